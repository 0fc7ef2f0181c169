"""FITNESS_p, the power mean of the jobs' speedups (paper, section 4.2), as a sum of one value a job.

    FITNESS_p = (1/J · Σ_j x_j^p)^(1/p),   x_j = scale · speedup_j + floor

p = 1 is the mean, p = −1 the harmonic mean, p → −∞ the slowest job, p = 0 the geometric mean. Solvers add up the
*values* x^p (ln x for p = 0, −x^p for p < 0): whatever p, more is better, and the order of sums is that of fitnesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pollux.core import checks
from pollux.errors import InvalidSpec
from pollux.goodput.numerics import FloatArray, Real

LARGEST_SPEEDUP = 1e3
"""Up to which, and down to its reciprocal, values must be numbers that thousands of jobs can be summed in."""
LARGEST_VALUE = 1e300
GEOMETRIC = 1e-6
"""Below it p is as good as 0: x^p is 1 but for digits that sums of many jobs lose."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a plan is worth, from the speedups of its jobs."""

    p: float = -1.0
    scale: float = 1.0
    """What a speedup counts: the artifact has nodes per GPU here, and the floor is chosen for that."""
    floor: float = 1e-3
    """What a job without GPUs counts. For p < 0 it says how much is given up to let nobody wait."""

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "p", self.p, None)
        checks.finite(InvalidSpec, "scale", self.scale, 0, above=True)
        checks.finite(InvalidSpec, "floor", self.floor, 0, above=True)
        if abs(self.p) < GEOMETRIC:
            object.__setattr__(self, "p", 0.0)
        steepest = math.log(LARGEST_VALUE) / max(math.log(LARGEST_SPEEDUP), abs(math.log(self.floor)))
        if abs(self.p) > steepest:
            fix = f"Choose a p within ±{steepest:.0f}: at −10 hardly anybody but the slowest counts already"
            raise InvalidSpec("p", self.p, f"too steep for floor = {self.floor:g}", fix)

    @property
    def supremum(self) -> float:
        """No value is higher, whatever the speedup."""
        return 0.0 if self.p < 0.0 else math.inf

    def values(self, speedup: FloatArray) -> FloatArray:
        """Of each job, larger is better. `speedup` is what is left of it after a re-allocation's factor."""
        x = self.scale * speedup + self.floor
        if self.p == 0.0:
            return np.asarray(np.log(x))
        return np.asarray(math.copysign(1.0, self.p) * x**self.p)

    def fitness(self, values: FloatArray) -> float:
        """FITNESS_p of all jobs together; 0 without jobs."""
        return float(self.of_mean(float(np.mean(values)))) if len(values) else 0.0

    def of_mean(self, mean: Real) -> FloatArray:
        """FITNESS_p from the mean of the values; of many plans at once if an array is given."""
        return np.asarray(np.exp(mean) if self.p == 0.0 else np.abs(mean) ** (1.0 / self.p))
