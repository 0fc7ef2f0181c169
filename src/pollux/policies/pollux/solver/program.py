"""Which option each job of a small round gets, as an integer program.

Jobs on one node are alike to a node but for their size. So are the pieces of jobs on several nodes, if a node has one
of them at most; and if it may have more, pieces of one job that meet are one piece. So nodes offer *slots* of some
size, jobs and pieces fill slots of at least theirs, and only what a job may keep is bound to nodes by name. Nodes on
which nobody may keep anything are counted, by the *pattern* of slots that they offer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.choices import Choices, Rows
from pollux.policies.pollux.solver.linear import Linear

NOTHING, KEEP, LOCAL, APART = range(4)

MOST_COLUMNS = 5000
"""Beyond it the first relaxation alone takes seconds."""
GAP = 1e3
"""The gap in the program's own unit: HiGHS stops within 1e-6 of the optimum."""
BETTER = 1e-6
"""Share of the gap by which a plan must beat the one in hand. Without it HiGHS would seek what is known already."""


class Options(NamedTuple):
    """What each job may have. The axis is options, in any order."""

    job: FloatArray
    kind: FloatArray  # NOTHING, KEEP, LOCAL (on one node) or APART (on several)
    gpus: FloatArray
    nodes: FloatArray  # fewest nodes that a job on several can be on; 0 for the others
    value: FloatArray

    def only(self, mask: FloatArray) -> Options:
        return Options(*(each[mask] for each in self))


@dataclass(slots=True)
class Cluster:
    """Nodes, less what certainly stays on them."""

    free: FloatArray  # [N] GPUs
    may_be_apart: FloatArray  # [N] bool: a job on several nodes may come here

    def give_held(self, choices: Choices, jobs: Iterable[int]) -> Cluster:
        """What is left when these jobs keep what they hold."""
        left = Cluster(self.free.copy(), self.may_be_apart.copy())
        for job in jobs:
            rows = slice(choices.held.first[job], choices.held.first[job + 1])
            nodes = choices.held.node[rows]
            left.free[nodes] -= choices.held.gpus[rows]
            if len(nodes) > 1 and choices.avoid_interference:
                left.may_be_apart[nodes] = False
        left.may_be_apart &= left.free > 0
        return left


class Pattern(NamedTuple):
    """Slots of one node: for jobs on one node, and for a piece of one on several (0: none)."""

    local: tuple[int, ...]
    apart: int


@lru_cache(maxsize=256)
def patterns(free: int, local: tuple[int, ...], apart: tuple[int, ...]) -> tuple[Pattern, ...]:
    """All ways to cut a node into slots of these sizes (ascending), except those with room to enlarge or add one."""

    def cuts(room: int, upto: int) -> Iterator[tuple[int, ...]]:
        yield ()
        for size in local:
            if size <= min(room, upto):
                for rest in cuts(room - size, size):
                    yield (size, *rest)

    def steps(sizes: tuple[int, ...]) -> dict[int, int]:
        return {size: above - size for size, above in zip((0, *sizes), sizes, strict=False)}

    more_local, more_apart = steps(local), steps(apart)
    found = []
    for piece in (0, *apart):
        for slots in cuts(free - piece, free) if piece <= free else ():
            left = free - piece - sum(slots)
            growth = [more_apart.get(piece), *(more_local.get(size) for size in {0, *slots})]
            if all(step is None or step > left for step in growth):
                found.append(Pattern(slots, piece))
    return tuple(found)


class Program:
    """The options that are left, each with its `regret` at the prices; `gap` is what all together may cost."""

    def __init__(
        self,
        choices: Choices,
        cluster: Cluster,
        options: Options,
        regret: FloatArray,
        price: float,
        node_price: float,
        gap: float,
    ) -> None:
        is_settled = (np.bincount(options.job, minlength=choices.num_jobs) == 1)[options.job] & (options.kind <= KEEP)
        stays = is_settled & (options.kind == KEEP)
        self._choices, self._options, self._linear = choices, options.only(~is_settled), Linear()
        self._stay = options.job[stays].tolist()
        self._rest = cluster.give_held(choices, self._stay)
        # Of slots for jobs on one node and of slots for pieces: column, size, how many one of the column stands for.
        self._slots: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
        self._named: list[tuple[int, list[int], list[int]]] = []  # node, columns of slots and of slots for pieces
        self._counted: list[tuple[list[int], FloatArray, tuple[Pattern, ...]]] = []  # nodes, columns, their patterns

        self._chosen = self._linear.columns(np.ones(len(self._options.job)), GAP / gap * regret[~is_settled])
        for job in np.unique(self._options.job):
            self._linear.row(1, 1, (self._chosen[self._options.job == job], 1))
        self._sell(self._options.gpus, int(self._rest.free.sum()), price / gap)
        if choices.avoid_interference:
            num_slots = int(cluster.may_be_apart.sum() - options.nodes[stays].sum())
            self._sell(self._options.nodes, num_slots, node_price / gap)
        self._cut_into_pieces()
        self._cut_nodes()
        self._seat()
        self._linear.cost_below(GAP * (1.0 - BETTER))

    @property
    def is_too_large(self) -> bool:
        return self._linear.num_columns > MOST_COLUMNS

    def solve(self, node_limit: int) -> tuple[Rows | None, float]:
        """A plan that costs less than the gap, if one was found, and the share of the gap that any costs at least."""
        answer = self._linear.solve(node_limit)
        if answer.x is None:
            return None, float(np.clip(answer.bound / GAP, 0.0, 1.0 - BETTER))
        x, fewest = answer.x, (answer.x[self._chosen] * self._options.nodes)[self._options.kind == APART].sum()
        if x[self._pieces].sum() > fewest:
            # The options are settled. Among the ways to place them, few large pieces are better than many small ones.
            gathered = self._linear.solve_rest(self._chosen, x, self._pieces.ravel(), node_limit)
            x = x if gathered.x is None else gathered.x
        return self._plan(x), max(answer.bound / GAP, 0.0)

    def _sell(self, amounts: FloatArray, supply: int, share: float) -> None:
        """What is not sold costs its price; no more than the gap allows is left over."""
        most = min(supply, int(1.0 / share + BETTER)) if share * supply > 1.0 else supply
        unsold = self._linear.columns(np.array([most]), GAP * share if most else 0.0)
        self._linear.row(supply, supply, (self._chosen, amounts), (unsold, 1))

    def _cut_into_pieces(self) -> None:
        """How many pieces of each size a job on several nodes has."""
        options, room = self._options, self._rest.free[self._rest.may_be_apart]
        is_apart = options.kind == APART
        self._apart_jobs = np.unique(options.job[is_apart])
        self._piece_sizes = sizes = np.arange(1, room.max(initial=0) + 1)[: None if len(self._apart_jobs) else 0]
        self._pieces = np.zeros((len(self._apart_jobs), len(sizes)), dtype=np.int64)
        for row, job in enumerate(self._apart_jobs):
            mine = is_apart & (options.job == job)
            chosen, gpus = self._chosen[mine], options.gpus[mine]
            most = np.minimum(min(self._choices.most_nodes[job], len(room)), gpus)
            self._pieces[row] = columns = self._linear.columns(gpus.max() // sizes)
            self._linear.row(0, 0, (columns, sizes), (chosen, -gpus))
            self._linear.row(0, np.inf, (columns, 1), (chosen, -options.nodes[mine]))
            self._linear.row(-np.inf, 0, (columns, 1), (chosen, -most))

    def _cut_nodes(self) -> None:
        """Slots: those of nodes that somebody may keep one by one, of the others by pattern."""
        options, choices, rest = self._options, self._choices, self._rest
        pieces = self._piece_sizes if choices.avoid_interference else self._piece_sizes[:0]
        sizes = np.unique(options.gpus[options.kind == LOCAL])
        self._local_sizes = sizes if choices.avoid_interference else np.union1d(sizes, self._piece_sizes)

        keepers: dict[int, list[tuple[int, int, bool]]] = {}
        for column, job in zip(self._chosen[options.kind == KEEP], options.job[options.kind == KEEP], strict=True):
            rows = range(choices.held.first[job], choices.held.first[job + 1])
            for row in rows:
                keeper = int(column), int(choices.held.gpus[row]), len(rows) > 1
                keepers.setdefault(int(choices.held.node[row]), []).append(keeper)
        counted: dict[tuple[int, bool], list[int]] = {}
        for node, (free, may_be_apart) in enumerate(zip(rest.free.tolist(), rest.may_be_apart.tolist(), strict=True)):
            local = self._local_sizes[self._local_sizes <= free]
            apart = pieces[pieces <= free] if may_be_apart else pieces[:0]
            if node in keepers:
                self._name(node, free, int(may_be_apart), local, apart, keepers[node])
            elif free > 0:
                counted.setdefault((free, len(apart) > 0), []).append(node)
        for (free, has_apart), nodes in counted.items():
            local = self._local_sizes[self._local_sizes <= free]
            found = patterns(free, tuple(local.tolist()), tuple(pieces[pieces <= free].tolist()) if has_apart else ())
            columns = self._linear.columns(np.full(len(found), len(nodes)))
            self._linear.row(-np.inf, len(nodes), (columns, 1))
            self._counted.append((nodes, columns, found))
            for column, pattern in zip(columns.tolist(), found, strict=True):
                self._slots[0].extend((column, size, pattern.local.count(size)) for size in set(pattern.local))
                self._slots[1].extend([(column, pattern.apart, 1)] if pattern.apart else [])

    def _name(
        self,
        node: int,
        free: int,
        free_for_apart: int,
        local: FloatArray,
        apart: FloatArray,
        keepers: Sequence[tuple[int, int, bool]],
    ) -> None:
        """Slots of one node, some of whose GPUs jobs may keep."""
        keeps, gpus, is_apart = (np.array(each) for each in zip(*keepers, strict=True))
        slots, piece = self._linear.columns(free // local), self._linear.columns(np.ones(len(apart)))
        self._linear.row(-np.inf, free, (slots, local), (piece, apart), (keeps, gpus))
        if self._choices.avoid_interference:
            self._linear.row(-np.inf, free_for_apart, (piece, 1), (keeps[is_apart], 1))
        self._named.append((node, slots.tolist(), piece.tolist()))
        self._slots[0].extend((int(column), int(size), 1) for column, size in zip(slots, local, strict=True))
        self._slots[1].extend((int(column), int(size), 1) for column, size in zip(piece, apart, strict=True))

    def _seat(self) -> None:
        """There are as many slots of at least each size as jobs, or pieces, of at least that size."""
        options = self._options
        local, apart = (np.array(slots, dtype=np.int64).reshape(-1, 3).T for slots in self._slots)
        for size in self._local_sizes:
            jobs = self._chosen[(options.kind == LOCAL) & (options.gpus >= size)]
            if not self._choices.avoid_interference:
                jobs = np.concatenate([jobs, self._pieces[:, self._piece_sizes >= size].ravel()])
            column, _, count = local[:, local[1] >= size]
            self._linear.row(-np.inf, 0, (jobs, 1), (column, -count))
        for size in self._piece_sizes if self._choices.avoid_interference else ():
            column, _, count = apart[:, apart[1] >= size]
            self._linear.row(-np.inf, 0, (self._pieces[:, self._piece_sizes >= size].ravel(), 1), (column, -count))

    def _plan(self, x: FloatArray) -> Rows | None:
        """Of a solution; None if its slots do not hold what was chosen."""
        options, choices = self._options, self._choices
        plan = np.zeros((choices.num_jobs, choices.num_nodes), dtype=np.int64)
        chosen = x[self._chosen] > 0
        for job in [*np.flatnonzero(choices.pinned), *self._stay, *options.job[chosen & (options.kind == KEEP)]]:
            rows = slice(choices.held.first[job], choices.held.first[job + 1])
            plan[job, choices.held.node[rows]] = choices.held.gpus[rows]

        is_local = chosen & (options.kind == LOCAL)
        jobs = list(zip(options.gpus[is_local].tolist(), options.job[is_local].tolist(), strict=True))
        pieces = [
            (int(size), int(job))
            for job, columns in zip(self._apart_jobs, self._pieces, strict=True)
            for size, count in zip(self._piece_sizes, x[columns], strict=True)
            for _ in range(count)
        ]
        local, apart = self._offered(x)
        if not choices.avoid_interference:
            jobs, pieces = [*jobs, *pieces], []
        return Rows.of_matrix(plan) if _seated(plan, jobs, local) and _seated(plan, pieces, apart) else None

    def _offered(self, x: FloatArray) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Slots (size, node) for jobs on one node, and for pieces."""
        found: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        sizes = [{column: size for column, size, _ in slots} for slots in self._slots]
        for node, *both in self._named:
            for slots, size, columns in zip(found, sizes, both, strict=True):
                slots.extend((size[column], node) for column in columns for _ in range(x[column]))
        for nodes, counts, cuts in self._counted:
            used = [pattern for pattern, count in zip(cuts, x[counts], strict=True) for _ in range(count)]
            for node, pattern in zip(nodes, used, strict=False):
                found[0].extend((size, node) for size in pattern.local)
                found[1].extend([(pattern.apart, node)] if pattern.apart else [])
        return found


def _seated(plan: FloatArray, wanted: Sequence[tuple[int, int]], slots: Iterable[tuple[int, int]]) -> bool:
    """Give each (size, job) a slot (size, node), the largest the largest; False if one is too small."""
    offered = sorted(slots, reverse=True)
    if len(wanted) > len(offered):
        return False
    for (size, job), (room, node) in zip(sorted(wanted, reverse=True), offered, strict=False):
        if size > room:
            return False
        plan[job, node] += size
    return True
