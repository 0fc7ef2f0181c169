"""The best (m, s) for the GPUs that a job holds (paper, section 4.1). Tables over all shapes and jobs: `tables`.

    goodput = throughput × efficiency = M0 / (T_iter · (a + b·M0/M)),   a = sqr/(sqr + var), b = var/(sqr + var)

so the best configuration minimises the *cost* T_iter·(a + b·M0/M). Unlike φ = M0·b/a, the shares a and b have no
infinities: b = 1 is a gradient of pure noise, where every batch size is fully efficient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pollux.core import BatchLimits, GradientStats, Shape
from pollux.errors import InvalidModel
from pollux.goodput.candidates import DEFAULT_BATCH, BatchOptions, Candidates, candidates
from pollux.goodput.efficiency import shares
from pollux.goodput.throughput import Theta, ThroughputModel

UNKNOWN_GRADIENT = GradientStats(sqr=0.0, var=1.0)
"""Before any gradient was measured: φ = ∞, every batch size is fully efficient (policies that explore rely on it)."""


class BestConfig(NamedTuple):
    """What a job should run with, and what that brings."""

    per_gpu_batch_size: int
    accumulation_steps: int
    goodput: float
    """Useful examples per second; zero if no configuration fits the limits."""

    def batch_size(self, num_gpus: int) -> int:
        return num_gpus * self.per_gpu_batch_size * (self.accumulation_steps + 1)


NOTHING_FITS = BestConfig(0, 0, 0.0)
"""No (m, s) is inside the limits, for instance because K replicas of the smallest m exceed M_max."""


def best(
    model: ThroughputModel,
    theta: Theta,
    shape: Shape,
    gradient: GradientStats,
    limits: BatchLimits,
    options: BatchOptions = DEFAULT_BATCH,
) -> BestConfig:
    """The (m, s) of highest goodput for one shape; NOTHING_FITS if there is none."""
    return best_among(
        candidates(shape.num_gpus, limits, options), model, theta, shape, gradient, limits.initial_batch_size
    )


def best_among(
    choice: Candidates, model: ThroughputModel, theta: Theta, shape: Shape, gradient: GradientStats, M0: int
) -> BestConfig:
    """`best` for who asks often, and keeps the candidates of each K."""
    if not len(choice.m):
        return NOTHING_FITS
    if len(theta) != len(model.parameters):
        names = ", ".join(model.parameters)
        raise InvalidModel("theta", tuple(theta), f"needs {len(model.parameters)} values", f"Give {names}")
    level = model.level(shape.num_nodes, shape.num_racks)
    a, b = shares(gradient.sqr, gradient.var)
    index, cost = model.cheapest(theta, shape.num_gpus, level, choice, float(a), float(b))
    if not 0.0 < cost < math.inf:
        raise InvalidModel("theta", tuple(theta), "gives no time per iteration", "Give finite, positive parameters")
    return BestConfig(int(choice.m[index]), int(choice.s[index]), M0 / cost)
