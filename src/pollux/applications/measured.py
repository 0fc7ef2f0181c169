"""Measurements of a training task, as rows: what an application is fitted from, and what readers of traces produce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pollux.goodput import Observations


class StepTime(NamedTuple):
    """Seconds of one pass on a placement."""

    placement: tuple[int, ...]
    """GPUs on each node."""
    per_gpu_batch_size: int
    step_time_s: float
    """A pass that synchronises."""
    sync_time_s: float
    """The part of it that did not overlap with compute."""
    is_placement_known: bool = True
    """False: only GPUs and nodes were recorded, and `placement` is their most even spread."""


class EpochStats(NamedTuple):
    """What one statistical epoch ended with, training at one total batch size."""

    progress: float
    """In M0-iterations."""
    iteration: float
    """Iterations at this batch size, from the start of training."""
    metric: float
    grad_sqr: float
    grad_var: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured of one training task."""

    name: str
    steps: Sequence[StepTime]
    epochs: Mapping[int, Sequence[EpochStats]]
    """By total batch size; the smallest is M0, the largest M_max."""

    def observations(self) -> Observations:
        """The step times as a fit takes them, in the order of `steps`."""
        return Observations.from_rows(
            (
                sum(step.placement),
                len(step.placement),
                1,
                step.per_gpu_batch_size,
                step.step_time_s - step.sync_time_s,
                step.step_time_s,
            )
            for step in self.steps
        )
