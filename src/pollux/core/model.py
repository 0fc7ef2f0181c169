"""What is believed about a job: limits, gradient statistics, fitted throughput, progress.

Only numbers live here, so that a model can be compared, stored and sent. The formulas that use them live in
`goodput/` (paper, sections 3 and 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter

from pollux.core import checks
from pollux.core.frozenmap import FrozenMap
from pollux.core.hints import BRIEF
from pollux.errors import InvalidModel, InvalidSpec


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Which batch sizes a job may use, in examples."""

    initial_batch_size: int
    """M0: the batch size that the user's learning rate was chosen for."""
    max_batch_size: int
    min_per_gpu_batch_size: int
    max_per_gpu_batch_size: int
    """What fits into the memory of one GPU."""

    def __post_init__(self) -> None:
        checks.whole(InvalidModel, "initial_batch_size", self.initial_batch_size, 1)
        checks.whole(InvalidModel, "max_batch_size", self.max_batch_size, 1)
        checks.whole(InvalidModel, "min_per_gpu_batch_size", self.min_per_gpu_batch_size, 1)
        checks.whole(InvalidModel, "max_per_gpu_batch_size", self.max_per_gpu_batch_size, 1)
        if self.initial_batch_size > self.max_batch_size:
            raise InvalidModel(
                "initial_batch_size",
                self.initial_batch_size,
                f"greater than max_batch_size = {self.max_batch_size}",
                "Raise max_batch_size or lower initial_batch_size",
            )
        if self.min_per_gpu_batch_size > self.max_per_gpu_batch_size:
            raise InvalidModel(
                "min_per_gpu_batch_size",
                self.min_per_gpu_batch_size,
                f"greater than max_per_gpu_batch_size = {self.max_per_gpu_batch_size}",
                "Raise max_per_gpu_batch_size or lower min_per_gpu_batch_size",
            )


@dataclass(frozen=True, slots=True)
class BatchWishes:
    """What the owner of a job asks of its agent, in examples; None: as the script says."""

    initial_batch_size: int | None = None
    max_batch_size: int | None = None
    min_per_gpu_batch_size: int | None = None
    max_per_gpu_batch_size: int | None = None

    def __post_init__(self) -> None:
        for field_ in fields(self):
            checks.whole(InvalidSpec, field_.name, getattr(self, field_.name), 1, optional=True)
        for lower, upper in (
            ("initial_batch_size", "max_batch_size"),
            ("min_per_gpu_batch_size", "max_batch_size"),
            ("min_per_gpu_batch_size", "max_per_gpu_batch_size"),
        ):
            low, high = getattr(self, lower), getattr(self, upper)
            if low is not None and high is not None and low > high:
                raise InvalidSpec(lower, low, f"greater than {upper} = {high}", f"Raise {upper} or lower {lower}")


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Estimates for the gradient of one batch of M0: squared norm of its mean, and its variance."""

    sqr: float
    var: float

    def __post_init__(self) -> None:
        checks.finite(InvalidModel, "sqr", self.sqr, 0)
        checks.finite(InvalidModel, "var", self.var, 0)
        if self.sqr == 0 and self.var == 0:
            raise InvalidModel(
                "sqr", self.sqr, "sqr and var are both 0: there was no gradient", "Leave the statistics out until then"
            )


@dataclass(frozen=True, slots=True)
class ThroughputFit:
    """A throughput model with its parameters, and how far they can be trusted."""

    model: str
    """Name of the throughput model, as `goodput` registers it."""
    params: FrozenMap[str, float]
    priors: tuple[str, ...] = ()
    """Names of the parameters that no observation has informed yet; kept in alphabetical order."""
    mean_relative_error: float = 0.0
    converged: bool = True
    max_gpus_observed: int = 0
    max_nodes_observed: int = 0

    def __post_init__(self) -> None:
        checks.text(InvalidModel, "model", self.model)
        checks.frozen(InvalidModel, "params", self.params)
        for name, value in self.params.items():
            checks.finite(InvalidModel, f'params["{name}"]', value, None)
        if not isinstance(self.priors, tuple):
            raise InvalidModel("priors", self.priors, "must be a tuple of names", "Give tuple(priors)")
        # In one order only, so that equal fits are equal.
        object.__setattr__(self, "priors", tuple(sorted(set(self.priors))))
        unknown = [name for name in self.priors if name not in self.params]
        if unknown:
            raise InvalidModel("priors", unknown, "not among the parameters", f"Known: {', '.join(self.params)}")
        checks.finite(InvalidModel, "mean_relative_error", self.mean_relative_error, 0)
        checks.flag(InvalidModel, "converged", self.converged)
        checks.whole(InvalidModel, "max_gpus_observed", self.max_gpus_observed, 0)
        checks.whole(InvalidModel, "max_nodes_observed", self.max_nodes_observed, 0)


@dataclass(frozen=True, slots=True)
class Progress:
    """Statistical progress in iterations of M0: what so many iterations at the initial batch size would have done."""

    done: float
    total: float | None = None
    """Expected length of the whole job; None if nobody knows. An estimate: `done` may come to exceed it."""
    total_stddev: float | None = None
    """How uncertain `total` is; None if it was not estimated, 0 if it is exact."""

    def __post_init__(self) -> None:
        checks.finite(InvalidModel, "done", self.done, 0)
        checks.finite(InvalidModel, "total", self.total, 0, optional=True)
        checks.finite(InvalidModel, "total_stddev", self.total_stddev, 0, optional=True)
        if self.total is None and self.total_stddev is not None:
            raise InvalidModel(
                "total_stddev", self.total_stddev, "there is no total that it could belong to", "Give total as well"
            )

    @property
    def remaining(self) -> float | None:
        """Iterations of M0 still to do, never negative; None if the total is unknown."""
        return None if self.total is None else max(self.total - self.done, 0.0)


MAX_FINGERPRINT = 80
"""Letters."""


@dataclass(frozen=True, slots=True)
class JobModel:
    """All that a policy may believe about how a job behaves. The agent makes it; nobody else fits."""

    limits: BatchLimits
    gradient: GradientStats | None = None
    throughput: FrozenMap[str, ThroughputFit] = field(default_factory=FrozenMap)
    """By GPU type; a type that was never fitted is absent."""
    progress: Progress | None = None
    realloc_delay_s: float | None = None
    """Measured cost of one re-allocation of this job; None before the first."""
    fingerprint: str | None = field(default=None, metadata=BRIEF)
    """Of its script and its model, such as `resnet-ab12cd34ef56`: jobs with the same one behave alike."""

    def __post_init__(self) -> None:
        checks.instance(InvalidModel, "limits", self.limits, BatchLimits)
        checks.instance(InvalidModel, "gradient", self.gradient, GradientStats, optional=True)
        checks.frozen(InvalidModel, "throughput", self.throughput)
        checks.instance(InvalidModel, "progress", self.progress, Progress, optional=True)
        checks.finite(InvalidModel, "realloc_delay_s", self.realloc_delay_s, 0, optional=True)
        if self.fingerprint is not None:
            checks.text(InvalidModel, "fingerprint", self.fingerprint)
            if len(self.fingerprint) > MAX_FINGERPRINT:
                problem = f"has {len(self.fingerprint)} letters"
                raise InvalidModel("fingerprint", self.fingerprint, problem, f"Give {MAX_FINGERPRINT} at most")

    def after(self, before: JobModel | None) -> JobModel:
        """An equal model, with the very limits and fits of the one before where they are equal.

        Reports come over the wire with everything in them, most of it said before. Whoever plans remembers what is made
        from limits and fits, and sees at a glance that it may: comparing all jobs in every round would take longer than
        planning.
        """
        if before is None or (self.limits is before.limits and self.throughput is before.throughput):
            return self
        limits = before.limits if self.limits == before.limits else self.limits
        throughput = before.throughput if self.throughput == before.throughput else self.throughput
        if limits is self.limits and throughput is self.throughput:
            return self
        found = object.__new__(JobModel)  # all parts were checked when they were made
        for name, value in zip(_FIELDS, _values(self), strict=True):
            object.__setattr__(found, name, value)
        object.__setattr__(found, "limits", limits)
        object.__setattr__(found, "throughput", throughput)
        return found


_FIELDS = tuple(field.name for field in fields(JobModel))
_values = attrgetter(*_FIELDS)
