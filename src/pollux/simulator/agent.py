"""The agent inside a simulated job: the real `goodput.fit` and `goodput.best`, on measurements of the truth.

Measurements are free of noise, so each (GPU type, shape, per-GPU batch size) is measured once and the model is fitted
again only when a new one turns up.
"""

from __future__ import annotations

from pollux.applications import PassTime
from pollux.core import (
    BatchLimits,
    FrozenMap,
    GradientStats,
    JobModel,
    JobSpec,
    Observation,
    ObservationKey,
    Profile,
    Progress,
    Shape,
    ThroughputFit,
)
from pollux.goodput import DEFAULT_FIT, PUBLISHED, BatchOptions, Fit, GoodputModel, Observations, best, fit
from pollux.simulator.batch_split import SingleGpu, split
from pollux.simulator.options import AgentOptions


class Agent:
    """One job's agent; it lives as long as the job and knows nothing but what it measured."""

    def __init__(self, spec: JobSpec, limits: BatchLimits, options: AgentOptions) -> None:
        self.limits = limits
        self.fixed_batch_size = (spec.requested_batch_size or limits.initial_batch_size) if spec.fixed_batch else None
        self.profile = Profile()
        self._options = options
        self._single_gpu = SingleGpu.ABOVE_INITIAL if options.single_gpu_accumulation else SingleGpu.FREE
        self._batch_options = BatchOptions(
            single_gpu_accumulation=options.single_gpu_accumulation, published_grid=options.published_grid
        )
        self._batch_size = limits.initial_batch_size
        """In use."""
        self._fits: dict[str, Fit] = {}
        self._summaries: FrozenMap[str, ThroughputFit] = FrozenMap()
        """Of the fits, as they are reported."""
        self._tuned: tuple[object, tuple[int, int]] = (None, (0, 0))
        """What the last tuning was for, and its answer: gradients change from epoch to epoch, not at every report."""

    def tune(self, gpu_type: str, shape: Shape, gradient: GradientStats) -> tuple[int, int]:
        """(m, s) for the GPUs at hand: of highest goodput as far as it knows, or for the batch size it must keep."""
        if self.fixed_batch_size is not None:
            return split(self.fixed_batch_size, shape.num_gpus, self.limits, self._single_gpu)
        fitted = self._fits.get(gpu_type)
        if fitted is None:
            return self._smallest(shape)
        asked = (fitted, shape, gradient)
        if self._tuned[0] != asked:
            self._tuned = asked, self._chosen(fitted, shape, gradient)
        return self._tuned[1]

    def _chosen(self, fitted: Fit, shape: Shape, gradient: GradientStats) -> tuple[int, int]:
        """The best, unless what is in use is almost as good on these GPUs."""
        found, least = self._best(fitted, shape, gradient), self._options.hysteresis
        if least > 1.0:
            job = GoodputModel(fitted.model, fitted.theta, gradient, self.limits, self._batch_options)
            now = self._cut(self._batch_size, shape)
            if job.goodput(shape, *found) <= least * job.goodput(shape, *now):
                found = now
        self._batch_size = shape.num_gpus * found[0] * (found[1] + 1)
        return found

    def _best(self, fitted: Fit, shape: Shape, gradient: GradientStats) -> tuple[int, int]:
        found = best(fitted.model, fitted.theta, shape, gradient, self.limits, self._batch_options)
        if found.goodput > 0.0:
            return found.per_gpu_batch_size, found.accumulation_steps
        return self._smallest(shape)

    def _smallest(self, shape: Shape) -> tuple[int, int]:
        return self._cut(self.limits.initial_batch_size, shape)

    def _cut(self, batch_size: int, shape: Shape) -> tuple[int, int]:
        """That batch size on these GPUs, or the least that they can share."""
        batch_size = max(batch_size, self.limits.min_per_gpu_batch_size * shape.num_gpus)
        return split(batch_size, shape.num_gpus, self.limits, self._single_gpu)

    def observe(self, gpu_type: str, shape: Shape, per_gpu_batch_size: int, passes: PassTime) -> None:
        """Take a measurement in; fit again if it tells something new."""
        key = ObservationKey(shape, per_gpu_batch_size)
        if key in self.profile.of_type(gpu_type):
            return
        waiting = passes.iteration_time_s - passes.grad_time_s
        self.profile = self.profile.add(gpu_type, key, Observation(0.0, 0, passes.iteration_time_s, waiting, 1))
        seen = Observations.of(self.profile.of_type(gpu_type))
        options = PUBLISHED if self._options.published_fit else DEFAULT_FIT
        self._fits[gpu_type] = fit(seen, warm=self._fits.get(gpu_type), options=options)
        self._summaries = FrozenMap({kind: fitted.summary() for kind, fitted in self._fits.items()})

    def model(self, gradient: GradientStats, progress: Progress, realloc_delay_s: float) -> JobModel:
        """What it reports."""
        return JobModel(self.limits, gradient, self._summaries, progress, realloc_delay_s)
