"""How a solver is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pollux.core import FrozenMap
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.choices import Choices, Rows


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Budget:
    """How much work a search may do. Equal budgets give equal answers, unless `should_stop` is given."""

    work: int | None = None
    """In the solver's own unit (steps of improvement, generations …); None: as much as it usually does."""
    should_stop: Callable[[], bool] = _never
    """Asked now and then; for a live service whose plan is due. What was found so far is the answer then."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The best answer that a solver found."""

    rows: Rows
    value: float
    """The sum over all jobs."""
    bound: float | None = None
    """No answer has a higher sum; None if the solver cannot tell."""
    stats: Mapping[str, float] = field(default_factory=FrozenMap)
    """What its search has to tell."""
    cut_short: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Jobs that might do better with more GPUs than there are values for (`Choices.beyond`)."""


class Solver(Protocol):
    """Answers rounds, one after the other. It may remember what helps with the next."""

    def solve(self, choices: Choices, budget: Budget, rng: np.random.Generator) -> Solution:
        """An answer that keeps all rules, whatever the budget."""
        ...
