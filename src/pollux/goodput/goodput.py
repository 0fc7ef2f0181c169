"""Goodput of one job: throughput × statistical efficiency, with everything it depends on in one frozen bundle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from pollux.core import BatchLimits, GradientStats, JobModel, Shape, ThroughputFit
from pollux.errors import InvalidModel, UnknownName
from pollux.goodput.best import UNKNOWN_GRADIENT, BestConfig, best
from pollux.goodput.candidates import DEFAULT_BATCH, BatchOptions
from pollux.goodput.efficiency import shares
from pollux.goodput.levels import throughput_model
from pollux.goodput.numerics import FLOOR, Real
from pollux.goodput.throughput import ThroughputModel, throughput


@dataclass(frozen=True, slots=True)
class GoodputModel:
    """A job's goodput as a function of shape and batch size, on one GPU type."""

    model: ThroughputModel
    theta: tuple[float, ...]
    gradient: GradientStats
    limits: BatchLimits
    options: BatchOptions = DEFAULT_BATCH

    def __post_init__(self) -> None:
        names = self.model.parameters
        if len(self.theta) != len(names):
            raise InvalidModel("theta", self.theta, f"needs {len(names)} values", f"Give {', '.join(names)}")
        bounds = _bounds(self.model)  # type: ignore[arg-type]  # protocols are not known to be hashable
        for name, value, (low, high) in zip(names, self.theta, bounds, strict=True):
            if not low <= value <= high or value == math.inf:
                raise InvalidModel(name, value, f"must be finite and within {low:g} … {high:g}", "Fit the job again")
        if not self.model.t_grad(self.theta, self.limits.min_per_gpu_batch_size) > 0.0:
            raise InvalidModel("theta", tuple(self.theta), "a pass must take time", "Fit the job again")

    @classmethod
    def of(cls, job: JobModel, gpu_type: str, options: BatchOptions = DEFAULT_BATCH) -> GoodputModel:
        """From what a job reported; without gradient statistics yet, every batch size counts as fully efficient."""
        return cls.on(job.throughput, gpu_type, job.gradient or UNKNOWN_GRADIENT, job.limits, options)

    @classmethod
    def on(
        cls,
        fits: Mapping[str, ThroughputFit],
        gpu_type: str,
        gradient: GradientStats,
        limits: BatchLimits,
        options: BatchOptions = DEFAULT_BATCH,
    ) -> GoodputModel:
        """From stored fits, one a GPU type."""
        if gpu_type not in fits:
            raise UnknownName("gpu_type", gpu_type, fits)
        model, params = throughput_model(fits[gpu_type].model), dict(fits[gpu_type].params.items())
        try:
            theta = tuple([params[name] for name in model.parameters])
        except KeyError:
            missing = ", ".join(name for name in model.parameters if name not in params)
            raise InvalidModel("params", params, f"{missing} missing", "Fit the job again") from None
        return cls(model, theta, gradient, limits, options)

    def with_gradient(self, gradient: GradientStats) -> GoodputModel:
        return replace(self, gradient=gradient)

    def throughput(self, shape: Shape, m: Real, s: Real = 0) -> Real:
        """Examples per second."""
        level = self.model.level(shape.num_nodes, shape.num_racks)
        return throughput(self.model, self.theta, shape.num_gpus, level, m, s)

    def efficiency(self, M: Real) -> Real:
        """Progress per example at total batch size M, relative to M0."""
        a, b = shares(self.gradient.sqr, self.gradient.var)
        return 1.0 / (b + a * M / self.limits.initial_batch_size)

    def goodput(self, shape: Shape, m: Real, s: Real = 0) -> Real:
        """Useful examples per second."""
        return self.throughput(shape, m, s) * self.efficiency(shape.num_gpus * m * (s + 1))

    def best(self, shape: Shape) -> BestConfig:
        """The (m, s) of highest goodput on this shape."""
        return best(self.model, self.theta, shape, self.gradient, self.limits, self.options)


@lru_cache(maxsize=256)
def _bounds(model: ThroughputModel) -> tuple[tuple[float, float], ...]:
    """Lowest and highest of each parameter. `FLOOR` stands for nothing."""
    return tuple((0.0 if low == FLOOR else low, high) for low, high in zip(model.lower, model.upper, strict=True))
