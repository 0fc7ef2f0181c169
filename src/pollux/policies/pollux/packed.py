"""The default solver: sizes that pack well, chosen exactly, then placed with as few moves as possible.

1. Each job is offered 1, 2, 4 … GPUs of one node, whole nodes beyond, its own minimum, and what it holds now.
2. Dynamic programming over the number of GPUs finds the sizes of highest total value.
3. Jobs that keep their size stay where they are; the others are placed, the largest first. Where fragments are in the
   way, the fewest small jobs make room; where that does not pay, the newcomer takes fragments, or less.

Deterministic, and done in a few milliseconds for a cluster of 64 GPUs. It does not search beyond these sizes.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pollux.core import FrozenMap
from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.placing import Placing
from pollux.policies.pollux.problem import Problem
from pollux.policies.pollux.solver import Budget, Solution

HARMONIC = -1.0
"""What decides between plans that FITNESS_p cannot tell apart: for p = −10 all but the slowest job are noise."""
TIE = 1e-12
"""Relative difference up to which two sums are taken to be equal."""

NEVER, WHERE_IT_PAYS, ALWAYS = np.inf, 0.0, -np.inf
"""How much the objective must gain for jobs that meant to stay to be moved out of the way. What looks good job by job
is not always best in the end, so all three are tried where fragments are in the way."""


class Offers(NamedTuple):
    """Sizes [S] that jobs may be given, and what each is worth to each job. Column 0 is nothing at all.

    In the order of the arguments of `choose_sizes`.
    """

    sizes: FloatArray  # [S] int, ascending
    values: FloatArray  # [J, S]: −inf where a job may not have that size
    tie_values: FloatArray  # [J, S]
    kept_size: FloatArray  # [J] int: what it holds
    kept_value: FloatArray  # [J]: of staying there; −inf if it holds nothing
    kept_tie_value: FloatArray  # [J]


class Packed:
    """The solver; it remembers nothing."""

    def solve(self, problem: Problem, budget: Budget, rng: np.random.Generator) -> Solution:
        offers = offer(problem)
        choice = choose_sizes(*offers, int(problem.capacity.sum()))
        best, is_blocked = place(problem, offers, choice, NEVER)
        if is_blocked:
            # Not even to leave all as it is may be worse than what came of these sizes.
            stay = np.where(offers.kept_value > -np.inf, -1, 0)
            for sizes, worth in ((stay, NEVER), (choice, WHERE_IT_PAYS), (choice, ALWAYS)):
                answer, _ = place(problem, offers, sizes, worth)
                best = answer if _is_better(problem, answer, best) else best
            if problem.single_node is not None and (problem.single_node & (choice > 0) & ~best.any(axis=1)).any():
                answer, _ = place(problem, offers, choice, NEVER, make_way=True)
                shuts_out = (best.any(axis=1) & ~answer.any(axis=1)).any()
                best = answer if not shuts_out and _is_better(problem, answer, best) else best
        return Solution(best, problem.fitness(best), stats=FrozenMap({"blocked": float(is_blocked)}))


def packed_sizes(capacity: FloatArray) -> list[int]:
    """Numbers of GPUs that leave no fragments: powers of two within a node, then whole nodes, the largest first."""
    nodes = sorted(capacity.tolist(), reverse=True)
    largest = nodes[0] if nodes else 0
    within = {1 << power for power in range(largest.bit_length()) if 1 << power <= largest}
    return sorted(within | set(np.cumsum(nodes).tolist()) - {0})


def offer(problem: Problem) -> Offers:
    """What each job may have, and what that is worth."""
    packed = packed_sizes(problem.capacity)
    width = problem.speedup.shape[2]
    most_of_all = min(int(problem.capacity.sum()), width - 1)
    sizes = np.array([0, *sorted({*packed, *problem.least.tolist()})], dtype=np.int64)
    sizes = sizes[sizes <= most_of_all]
    nodes = _fewest_nodes(problem.capacity, sizes)
    spread = problem.spread[nodes, np.minimum(nodes, 1)]
    speedup = problem.speedup[:, spread, sizes]
    allowed = (
        (sizes >= problem.least[:, None]) & (sizes <= problem.most[:, None]) & (nodes <= problem.most_nodes[:, None])
    )
    allowed &= np.isin(sizes, packed) | (sizes == problem.least[:, None])
    allowed[:, 0] = True
    allowed[problem.pinned] = False
    kept_size = problem.present.sum(axis=1)
    may_stay = (kept_size >= problem.least) & (kept_size <= problem.most)
    may_stay &= np.count_nonzero(problem.present, axis=1) <= problem.most_nodes
    holds = (kept_size > 0) & (may_stay | problem.pinned)
    kept = np.where(holds, problem.speedups(problem.present), 0.0)
    return Offers(
        sizes,
        *_values(problem.objective, speedup * problem.factor[:, None], allowed),
        kept_size,
        *_values(problem.objective, kept, holds),
    )


def _fewest_nodes(capacity: FloatArray, sizes: FloatArray) -> FloatArray:
    """[S]: nodes that so many GPUs take, the largest nodes first."""
    ends = np.cumsum(np.sort(capacity)[::-1])
    return np.where(sizes > 0, np.searchsorted(ends, sizes) + 1, 0)


def _values(objective: Objective, speedup: FloatArray, allowed: FloatArray) -> tuple[FloatArray, FloatArray]:
    """By the objective, and by the harmonic mean, which decides ties."""
    primary, secondary = (
        np.where(allowed, each.values(speedup), -np.inf) for each in (objective, _harmonic(objective))
    )
    return primary, secondary


def _harmonic(objective: Objective) -> Objective:
    return replace(objective, p=HARMONIC)


def _is_better(problem: Problem, answer: FloatArray, other: FloatArray) -> bool:
    """By the objective, and among equals by the harmonic mean."""
    for judge in (problem, replace(problem, objective=_harmonic(problem.objective))):
        mine, its = judge.fitness(answer), judge.fitness(other)
        if abs(mine - its) > TIE * its:
            return mine > its
    return False


@compiled
def choose_sizes(
    sizes: FloatArray,
    values: FloatArray,
    tie_values: FloatArray,
    kept_size: FloatArray,
    kept_value: FloatArray,
    kept_tie_value: FloatArray,
    num_gpus: int,
) -> FloatArray:
    """[J]: the size that each job gets, an index into `sizes`, or −1 to stay as it is; sums are as high as can be.

    best[c] is the highest sum of the jobs so far with at most c GPUs. Jobs that may stay do so among equals.
    """
    jobs, width = values.shape
    best, tie = np.zeros(num_gpus + 1), np.zeros(num_gpus + 1)
    chosen = np.zeros((jobs, num_gpus + 1), dtype=np.int16)
    for job in range(jobs):
        new, new_tie = np.full(num_gpus + 1, -np.inf), np.full(num_gpus + 1, -np.inf)
        for index in range(-1, width):
            size = kept_size[job] if index < 0 else sizes[index]
            value = kept_value[job] if index < 0 else values[job, index]
            tie_value = kept_tie_value[job] if index < 0 else tie_values[job, index]
            if value == -np.inf:
                continue
            for used in range(size, num_gpus + 1):
                total, tie_total = best[used - size] + value, tie[used - size] + tie_value
                if total == -np.inf:
                    continue
                margin, tie_margin = TIE * abs(total), TIE * abs(tie_total)
                if total > new[used] + margin or (
                    total >= new[used] - margin and tie_total > new_tie[used] + tie_margin
                ):
                    new[used], new_tie[used], chosen[job, used] = total, tie_total, index
        best, tie = new, new_tie
    found = np.empty(jobs, dtype=np.int64)
    left = num_gpus
    for job in range(jobs - 1, -1, -1):
        index = chosen[job, left]
        found[job] = index
        left -= kept_size[job] if index < 0 else sizes[index]
    return found


def place(
    problem: Problem, offers: Offers, choice: FloatArray, worth: float, *, make_way: bool = False
) -> tuple[FloatArray, bool]:
    """GPUs on nodes for the chosen sizes, and whether fragments were in the way of one.

    Jobs that meant to stay make room if more than `worth` is gained by it. With `make_way` they also do so, once, for
    each job that must be on one node and else gets nothing.
    """
    placing, is_blocked = Placing(problem), False
    helped: set[int] = set()
    waiting: list[tuple[int, int]] = []
    """(−size, job): the largest first."""
    for job, index in enumerate(choice.tolist()):
        # Those on several nodes may have met before: the first of them stays.
        if index < 0 and (problem.pinned[job] or placing.fits(problem.present[job])):
            placing.put(job, problem.present[job])
        elif size := int(offers.kept_size[job] if index < 0 else offers.sizes[index]):
            heappush(waiting, (-size, job))
    while waiting:
        size, job = heappop(waiting)
        row = placing.find(job, -size)
        if row is None or np.count_nonzero(row) > placing.fewest_nodes(-size):
            is_blocked = True
            row = _anyhow(problem, offers, placing, job, -size)
            room = placing.make_room(job, -size) if worth < NEVER else None
            is_shut_out = make_way and _must_be_together(problem, job) and job not in helped and not row.any()
            if is_shut_out:
                helped.add(job)
                room = placing.make_way(-size, helped)
            if room is not None and (is_shut_out or _gain(placing, job, row, *room) > worth):
                row, leaving = room
                for other in leaving:
                    heappush(waiting, (-int(placing.allocation[other].sum()), other))
                    placing.remove(other)
        placing.put(job, row)
    _seat_idle(problem, placing)
    return placing.allocation, is_blocked


def _must_be_together(problem: Problem, job: int) -> bool:
    return problem.single_node is not None and bool(problem.single_node[job])


def _anyhow(problem: Problem, offers: Offers, placing: Placing, job: int, size: int) -> FloatArray:
    """The best of what there is room for: to stay after all, fragments of several nodes, fewer GPUs, or none."""
    sizes = [option for option in offers.sizes.tolist() if problem.least[job] <= option <= size]
    rows = [placing.find(job, option) for option in sizes]
    if offers.kept_value[job] > -np.inf and placing.fits(problem.present[job]):
        rows.append(problem.present[job])
    possible = [row for row in rows if row is not None]
    if not possible:
        return np.zeros(problem.num_nodes, dtype=np.int64)
    return max(reversed(possible), key=lambda row: placing.value(job, row))


def _gain(placing: Placing, job: int, row: FloatArray, instead: FloatArray, leaving: list[int]) -> float:
    """What the job gains by the other row, less what those who leave lose if each finds another node."""
    gain = placing.value(job, instead) - placing.value(job, row)
    for other in leaving:
        held = placing.allocation[other]
        gain += placing.value(other, held, moved=True) - placing.value(other, held)
    return gain


def _seat_idle(problem: Problem, placing: Placing) -> None:
    """Nobody waits beside GPUs that it could run on, even where the objective sees no gain in it yet."""
    for job in np.flatnonzero(placing.allocation.sum(axis=1) == 0).tolist():
        if not placing.free.any():
            return
        least = int(problem.least[job])
        row = placing.find(job, least) if least <= problem.most[job] else None
        if row is not None:
            placing.put(job, row)
