"""A training task as a few numbers: how fast its steps are, how its gradient noise and its metric move with progress.

Small, parametric and of our own making, so that Pollux works out of the box without any measured data. Progress is
statistical: in iterations at M0, or as the fraction of a whole training run.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from pollux.core import BatchLimits, FrozenMap, GradientStats, Shape, ThroughputFit
from pollux.errors import InvalidModel
from pollux.goodput import DEFAULT_BATCH, NOTHING_FITS, BatchOptions, BestConfig, GoodputModel

TUNING_ROUNDS = 10


def _hat_weights(knots: tuple[float, ...], at: float) -> tuple[int, float]:
    """Between which knots a point lies: index of the left one, and the weight of the right one; flat outside."""
    right = min(max(bisect.bisect_right(knots, at), 1), len(knots) - 1)
    span = knots[right] - knots[right - 1]
    return right - 1, min(max((at - knots[right - 1]) / span, 0.0), 1.0)


def _check_knots(field: str, knots: tuple[float, ...], values: int) -> None:
    rising = all(left < right for left, right in itertools.pairwise(knots))
    if len(knots) < 2 or not rising or knots[0] < 0.0 or knots[-1] > 1.0:
        raise InvalidModel(field, knots, "must be at least two rising fractions of training", "Give 0 ≤ … ≤ 1")
    if values != len(knots):
        raise InvalidModel(field, knots, f"{values} values for {len(knots)} knots", "Give one value a knot")


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """ln(φ/M0) at knots of progress, linear in between; at each a parabola in u = log₂(batch size / M0).

    The gradient noise scale depends on the batch size that it is measured at, contrary to theory, up to tenfold; hence
    the parabola.
    """

    progress: tuple[float, ...]
    """Fractions of a whole training run, rising."""
    coefficients: tuple[tuple[float, ...], ...]
    """(c0, c1, c2) at each knot: ln(φ/M0) = c0 + c1·u + c2·u²."""

    def __post_init__(self) -> None:
        _check_knots("noise.progress", self.progress, len(self.coefficients))
        for row in self.coefficients:
            if len(row) != 3 or not all(math.isfinite(value) for value in row):
                raise InvalidModel("noise.coefficients", row, "must be three finite numbers", "Give (c0, c1, c2)")

    def log_ratio(self, progress: float, doublings: float) -> float:
        """ln(φ/M0) at a fraction of training and u doublings of M0."""
        left, weight = _hat_weights(self.progress, progress)
        below, above = (c0 + doublings * (c1 + doublings * c2) for c0, c1, c2 in self.coefficients[left : left + 2])
        return below + weight * (above - below)


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """The validation metric at knots of progress, linear in between, at M0."""

    name: str
    higher_is_better: bool
    progress: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_knots("metric.progress", self.progress, len(self.values))

    def at(self, progress: float) -> float:
        left, weight = _hat_weights(self.progress, progress)
        return self.values[left] + weight * (self.values[left + 1] - self.values[left])


class PassTime(NamedTuple):
    """Seconds of the two kinds of passes over m examples a GPU."""

    grad_time_s: float
    """One that only accumulates."""
    iteration_time_s: float
    """One that synchronises: a whole iteration without accumulation."""

    def iteration(self, accumulation_steps: int) -> float:
        """Seconds of an iteration with that many accumulation passes before the one that synchronises."""
        return self.iteration_time_s + accumulation_steps * self.grad_time_s


@dataclass(frozen=True, slots=True)
class Application:
    """A training task of the catalogue."""

    name: str
    title: str
    optimizer: str
    scaling_rule: str
    """How its learning rate follows the batch size: adascale or sqrt."""
    limits: BatchLimits
    epochs: int
    """Statistical epochs of a whole training run."""
    total_progress: float
    """Iterations at M0 of a whole training run."""
    throughput: FrozenMap[str, ThroughputFit]
    """By GPU type."""
    noise: NoiseCurve
    metric: MetricCurve
    source: str
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise InvalidModel("epochs", self.epochs, "must be at least 1", "Give the epochs of a training run")
        if not 0.0 < self.total_progress < math.inf:
            raise InvalidModel("total_progress", self.total_progress, "must be positive", "Give iterations at M0")

    def gradient(self, progress: float, batch_size: float) -> GradientStats:
        """Gradient statistics at a fraction of training, as measured at that total batch size.

        Only their ratio means something: sqr and var sum to one.
        """
        doublings = math.log2(min(max(batch_size, self.limits.initial_batch_size), self.limits.max_batch_size))
        doublings -= math.log2(self.limits.initial_batch_size)
        ratio = math.exp(self.noise.log_ratio(progress, doublings))
        return GradientStats(sqr=1.0 / (1.0 + ratio), var=ratio / (1.0 + ratio))

    def gradient_in_epoch(self, epoch: int, batch_size: float) -> GradientStats:
        """The same, taken to be constant during an epoch: what it is in its middle."""
        return self.gradient((epoch + 0.5) / self.epochs, batch_size)

    def epoch_at(self, progress: float) -> int:
        """In which epoch a run is that has made so much progress, in iterations at M0."""
        return min(int(self.epochs * progress / self.total_progress), self.epochs - 1)

    def pass_time(self, gpu_type: str, shape: Shape, per_gpu_batch_size: int) -> PassTime:
        """How long passes take on GPUs of that type, by the fitted model."""
        known = self.goodput(gpu_type, self.gradient_in_epoch(0, self.limits.initial_batch_size))
        level = known.model.level(shape.num_nodes, shape.num_racks)
        return PassTime(
            float(known.model.t_grad(known.theta, per_gpu_batch_size)),
            float(known.model.t_step(known.theta, shape.num_gpus, level, per_gpu_batch_size)),
        )

    def of_length(self, share: float) -> Application:
        """A training run so many times as long; its noise and its metric go through the same curves."""
        return replace(
            self,
            name=f"{self.name}:{share:g}",
            epochs=max(1, round(self.epochs * share)),
            total_progress=self.total_progress * share,
        )

    def goodput(self, gpu_type: str, gradient: GradientStats, options: BatchOptions = DEFAULT_BATCH) -> GoodputModel:
        """Its goodput on a GPU type, as a job with these gradient statistics sees it."""
        return GoodputModel.on(self.throughput, gpu_type, gradient, self.limits, options)

    def settled(
        self, gpu_type: str, progress: float, shape: Shape, options: BatchOptions = DEFAULT_BATCH
    ) -> BestConfig:
        """What a job that keeps tuning its batch size ends up with on a shape, at a fraction of training.

        The noise is measured at the batch size in use and the best batch size follows the noise, so this is where the
        two agree (or, after a few rounds, where they have come close).
        """
        batch_size = float(self.limits.initial_batch_size)
        found = NOTHING_FITS
        for _ in range(TUNING_ROUNDS):
            found = self.goodput(gpu_type, self.gradient(progress, batch_size), options).best(shape)
            if found.batch_size(shape.num_gpus) in (0, batch_size):
                break
            batch_size = float(found.batch_size(shape.num_gpus))
        return found
