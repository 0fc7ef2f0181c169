"""The agent inside a simulated job: the real `goodput.fit` and `goodput.best`, on measurements of the truth."""

from __future__ import annotations

import numpy as np

from pollux.applications import PassTime
from pollux.core import BatchLimits, GradientStats, JobModel, JobSpec, Profile, Progress, Shape
from pollux.goodput import BatchOptions, Candidates, Fit, GoodputModel, Theta, ThroughputModel, best_among, candidates
from pollux.goodput.pooled import Corrected
from pollux.simulator.batch_split import SingleGpu, split
from pollux.simulator.knowledge import Knowledge
from pollux.simulator.options import AgentOptions

MOST_CHOSEN = 4096
"""Choices that agents of one application remember: as many as a run of some hundred jobs needs, in a megabyte."""


class Agent:
    """One job's agent; it lives as long as the job and knows nothing but what it measured, and what it is told."""

    def __init__(
        self, spec: JobSpec, limits: BatchLimits, options: AgentOptions, knowledge: Knowledge | None = None
    ) -> None:
        """`knowledge` is where agents of its application begin, to share what they find out: they have the same limits
        and options."""
        self.limits = limits
        self.fixed_batch_size = (spec.requested_batch_size or limits.initial_batch_size) if spec.fixed_batch else None
        self._options = options
        self._knowledge = knowledge or Knowledge(options.published_fit)
        self._single_gpu = SingleGpu.ABOVE_INITIAL if options.single_gpu_accumulation else SingleGpu.FREE
        self._batch_options = BatchOptions(
            single_gpu_accumulation=options.single_gpu_accumulation, published_grid=options.published_grid
        )
        self._batch_size = limits.initial_batch_size
        """In use."""
        self._tuned: tuple[object, object, object, tuple[int, int]] = (None, None, None, (0, 0))
        """What the last tuning was for, and its answer: gradients change from epoch to epoch, not at every report."""
        self._candidates: dict[int, Candidates] = {}
        """By GPUs."""
        self._theta: tuple[object, Theta] = (None, ())
        """Of the fit that it tunes with: an array."""
        self.told: Corrected | None = None
        """What is known of its kind on the GPUs that it is put on, if anybody tells it."""

    @property
    def profile(self) -> Profile:
        """All that it has measured."""
        return self._knowledge.profile

    def tune(self, gpu_type: str, shape: Shape, gradient: GradientStats) -> tuple[int, int]:
        """(m, s) for the GPUs at hand: of highest goodput as far as it knows, or for the batch size it must keep."""
        if self.fixed_batch_size is not None:
            return split(self.fixed_batch_size, shape.num_gpus, self.limits, self._single_gpu)
        known = self._knowledge
        fitted = (self.told and known.of_kind(self.told, gpu_type)) or known.fits.get(gpu_type)
        if fitted is None:
            return self._smallest(shape)
        for_fit, for_shape, for_gradient, found = self._tuned
        is_for_these = for_shape is shape or for_shape == shape  # mostly the same object, which == does not look at
        if for_fit is not fitted or not is_for_these or not (for_gradient is gradient or for_gradient == gradient):
            found = self._chosen(fitted, shape, gradient)
            self._tuned = fitted, shape, gradient, found
        return found

    def _chosen(self, fitted: Fit | Corrected, shape: Shape, gradient: GradientStats) -> tuple[int, int]:
        """The best, unless what is in use is almost as good on these GPUs."""
        found, least = self._best(fitted, shape, gradient), self._options.hysteresis
        if least > 1.0:
            job = GoodputModel(*_parts(fitted), gradient, self.limits, self._batch_options)
            now = self._cut(self._batch_size, shape)
            if job.goodput(shape, *found) <= least * job.goodput(shape, *now):
                found = now
        self._batch_size = shape.num_gpus * found[0] * (found[1] + 1)
        return found

    def _best(self, fitted: Fit | Corrected, shape: Shape, gradient: GradientStats) -> tuple[int, int]:
        if not isinstance(fitted, Fit):
            return self._search(fitted, shape, gradient)
        chosen = self._knowledge.chosen
        asked = fitted.theta, shape.num_gpus, shape.num_nodes, shape.num_racks, gradient.sqr, gradient.var
        if (found := chosen.get(asked)) is None:
            if len(chosen) >= MOST_CHOSEN:
                chosen.clear()
            found = chosen[asked] = self._search(fitted, shape, gradient)
        return found

    def _search(self, fitted: Fit | Corrected, shape: Shape, gradient: GradientStats) -> tuple[int, int]:
        model, theta = _parts(fitted)
        if self._theta[0] is not fitted:
            self._theta = fitted, np.array(theta)
        choice = self._candidates.get(shape.num_gpus)
        if choice is None:
            choice = self._candidates[shape.num_gpus] = candidates(shape.num_gpus, self.limits, self._batch_options)
        found = best_among(choice, model, self._theta[1], shape, gradient, self.limits.initial_batch_size)
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
        self._knowledge = self._knowledge.after(gpu_type, shape, per_gpu_batch_size, passes)

    def model(self, gradient: GradientStats | None, progress: Progress, realloc_delay_s: float) -> JobModel:
        """What it reports."""
        return JobModel(self.limits, gradient, self._knowledge.summaries, progress, realloc_delay_s)


def _parts(fitted: Fit | Corrected) -> tuple[ThroughputModel, tuple[float, ...]]:
    """A throughput model and its parameters."""
    # Asked this way round: what a class makes of `isinstance` is slow if it implements a protocol.
    return (fitted.model, fitted.theta) if isinstance(fitted, Fit) else (fitted, (1.0,))
