"""The default solver: a price for GPUs, plans at that price, and improvement until the best is proven good enough.

1. `pricing`: the price at which jobs ask for as many GPUs as there are; with it, a bound that no plan exceeds.
2. `construct`: jobs take what they wish at the price, or stay. `fill.rescue`: nobody waits who is worth more than what
   others have. `fill.fill`: no GPU stays free that is worth anything to anybody.
3. `search`: on small clusters, what could beat that plan is looked through; it finds better plans, and a closer bound.
   Again after some improvement, and at last by another account of nodes (`closer`).
4. `improve`: a few nodes at a time are emptied and filled again, while the gap to the bound is too wide.
5. `exact`: very small clusters are settled by an integer program.

It remembers nothing from round to round: jobs that should stay where they are say so by their values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pollux.core import FrozenMap
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.board import Board, copy_of
from pollux.policies.pollux.solver.choices import Choices, Rows
from pollux.policies.pollux.solver.exact import finish
from pollux.policies.pollux.solver.opening import (
    NEGLIGIBLE,
    carried_on,
    closed,
    missing,
    opened,
    searched,
    searched_closer,
)
from pollux.policies.pollux.solver.pricing import Wishes
from pollux.policies.pollux.solver.round import Round, lay, prepare
from pollux.policies.pollux.solver.seam import Budget, Solution

CHUNK = 128
"""Steps of improvement between two looks at the clock; with very many jobs one step for 16 of them."""
FEWEST_STEPS, MOST_STEPS, STEPS_PER_JOB = 512, 4000, 10
MOST_JOB_STEPS = 8_000_000
"""The product of jobs and steps: with very many jobs single steps matter less, and all else takes longer."""
TOY_STEPS = 3000
"""For clusters that are small enough for `exact`: more than others of their size have, for it takes far longer."""
STALE = 2
"""Chunks without any gain after which improvement ends."""
SHORT_SEARCH, LONG_SEARCH = 1000, 10000
"""Options that the search looks at: before improvement, and after it if the gap is wide still."""


@dataclass
class Priced:
    """The solver. A step of improvement is its unit of work; a whole number of chunks is always done."""

    gap_target: float = 2e-4
    """Gap at which improvement ends, as a share of what the jobs that run are worth: idle ones may cost far more."""
    node_price: float = 2e-4
    """Of each node beyond the fewest possible, as a share of the job's value: for jobs that are as well off apart."""
    exact_gpus: int = 16
    """Up to how many GPUs the gap is closed by an integer program, which can take long."""
    exact_nodes: int = 2000
    """Of the tree that its search may visit."""

    def solve(self, choices: Choices, budget: Budget, rng: np.random.Generator) -> Solution:
        around = prepare(choices)
        steps = self._default_steps(around) if budget.work is None else budget.work
        wishes, board, bound, wanted = opened(around, self.node_price, self.gap_target, steps, SHORT_SEARCH)
        done = 0
        if wanted > 0.0:
            board, bound, done = self._improve(around, wishes, board, bound, steps, budget, rng)
        found, value = closed(around, board)
        rows, bound = Rows(*found), around.fixed + bound
        is_small = around.num_gpus <= self.exact_gpus and choices.beyond is None
        if is_small and bound - value > NEGLIGIBLE * abs(value) and not budget.should_stop():
            rows, value, bound = self._finish(choices, around, wishes, rows, value, bound)
        bound = max(bound, value)
        gap = (bound - value) / abs(value) if math.isfinite(value) and value != 0.0 else 0.0
        stats = {"price": wishes.price, "slot_price": wishes.slot_price, "steps": float(done), "gap": gap}
        return Solution(rows, value, bound, FrozenMap(stats), _cut_short(choices, wishes))

    def _improve(
        self,
        around: Round,
        wishes: Wishes,
        board: Board,
        bound: float,
        steps: int,
        budget: Budget,
        rng: np.random.Generator,
    ) -> tuple[Board, float, int]:
        """A plan whose gap is narrow enough, or as narrow as the budget allows; a bound; and the steps."""
        random = np.array([rng.integers(1, 1 << 32)], dtype=np.int64)
        chunk, done, stale, is_searched = max(CHUNK, len(board.jobs) // 16), 0, 0, False
        while (wanted := missing(bound, board, self.gap_target)) > 0.0 and not budget.should_stop():
            if is_searched and (done >= steps or stale == STALE):
                break
            if not is_searched and (done > 0 or steps == 0):
                # Best after a little improvement: the better the plan, the less there is to be searched.
                board, bound = searched(around, around.empty, wishes, board, bound, self.gap_target, LONG_SEARCH)
                is_searched = True
                continue
            gained = carried_on(board, wishes, self.node_price, random, chunk, wanted)
            stale = 0 if gained > 0.0 else stale + 1
            done += chunk
        if not budget.should_stop():
            board, bound = searched_closer(around, board, bound, self.gap_target, LONG_SEARCH)
        return board, bound, done

    def _default_steps(self, around: Round) -> int:
        jobs = max(len(around.empty.jobs), 1)
        if around.num_gpus <= self.exact_gpus:
            return TOY_STEPS
        return min(max(FEWEST_STEPS, STEPS_PER_JOB * jobs), MOST_STEPS, MOST_JOB_STEPS // jobs)

    def _finish(
        self, choices: Choices, around: Round, wishes: Wishes, rows: Rows, value: float, bound: float
    ) -> tuple[Rows, float, float]:
        """A plan that is at least as good, its value, and a bound no higher than this one."""
        limit, prices = self.exact_nodes, (wishes.price, wishes.slot_price)
        found = finish(choices, rows, value, bound, *prices, node_limit=limit)
        if found is None:
            return rows, value, bound
        board = copy_of(around.empty)
        lay(board, found[0].first, found[0].node, found[0].gpus)
        better, value = closed(around, board)
        return Rows(*better), value, found[2]


def _cut_short(choices: Choices, wishes: Wishes) -> FloatArray:
    """Jobs whose part in the bound is of GPUs that there are no values for."""
    if choices.beyond is None:
        return np.zeros(0, dtype=np.int64)
    fewest = (choices.first[1:] - choices.first[:-1]) // max(choices.num_classes, 1)
    return np.flatnonzero(choices.beyond - wishes.price * fewest > wishes.gain[:, 0])
