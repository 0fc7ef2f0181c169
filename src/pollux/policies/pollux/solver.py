"""The seam between Pollux and the search for the best plan of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pollux.core import FrozenMap
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.problem import Problem


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Budget:
    """How much work a search may do. Equal budgets give equal answers, unless `should_stop` is given."""

    work: int | None = None
    """In the solver's own unit (generations of the genetic one); None: as much as it usually does."""
    should_stop: Callable[[], bool] = _never
    """Asked now and then; for a live service whose plan is due. What was found so far is the answer then."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The best answer that a solver found."""

    allocation: FloatArray  # [J, N] int
    fitness: float
    bound: float | None = None
    """No answer has a higher fitness; None if the solver cannot tell."""
    stats: Mapping[str, float] = field(default_factory=FrozenMap)
    """What its search has to tell."""


class Solver(Protocol):
    """Answers problems, round after round. It may remember earlier rounds, by the ids of jobs and nodes."""

    def solve(self, problem: Problem, budget: Budget, rng: np.random.Generator) -> Solution:
        """An answer without violations, whatever the budget."""
        ...
