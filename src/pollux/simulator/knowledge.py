"""What simulated agents know from measuring: observations, and the real `goodput.fit` to them.

Measurements are free of noise, so each (GPU type, shape, per-GPU batch size) is measured once, and agents of one
application that have measured the same in the same order know the same. They share it: two fits of three are those of
an earlier job, and every second choice of a batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from pollux.applications import PassTime
from pollux.core import FrozenMap, Observation, ObservationKey, Profile, Shape, ThroughputFit
from pollux.goodput import DEFAULT_FIT, PUBLISHED, Fit, Observations, fit
from pollux.goodput.pooled import Corrected, of_job

Chosen: TypeAlias = dict[tuple[tuple[float, ...], int, int, int, float, float], tuple[int, int]]
"""(m, s) by parameters of a fit; GPUs, nodes and racks; squared norm and variance of the gradient."""


class Knowledge:
    """One state of it; it never changes. What is measured next leads to another one, which is kept for the next agent
    that comes this way."""

    __slots__ = ("_next", "_of_kind", "_published_fit", "chosen", "fits", "profile", "summaries")

    def __init__(
        self,
        published_fit: bool = False,
        profile: Profile | None = None,
        fits: Mapping[str, Fit] | None = None,
        chosen: Chosen | None = None,
    ) -> None:
        """By default that of an agent which has measured nothing."""
        self.profile = profile or Profile()
        self.fits = fits or {}
        """By GPU type."""
        self.summaries: FrozenMap[str, ThroughputFit] = FrozenMap(
            {gpu_type: fitted.summary() for gpu_type, fitted in self.fits.items()}
        )
        """Of the fits, as they are reported."""
        self.chosen: Chosen = {} if chosen is None else chosen
        """What agents found to be best: a memory for all states, kept by those who share them."""
        self._published_fit = published_fit
        self._next: dict[tuple[str, ObservationKey, PassTime], Knowledge] = {}
        self._of_kind: dict[str, tuple[Corrected, Corrected | None]] = {}
        """By GPU type: what somebody was last told, and that set right."""

    def of_kind(self, told: Corrected, gpu_type: str) -> Corrected | None:
        """What is told of the kind, set right by what was measured; None for an agent that is not like its kind."""
        known = self._of_kind.get(gpu_type)
        if known is None or known[0] is not told:
            known = self._of_kind[gpu_type] = told, of_job(told, self.profile.of_type(gpu_type))
        return known[1]

    def after(self, gpu_type: str, shape: Shape, per_gpu_batch_size: int, passes: PassTime) -> Knowledge:
        """With one more measurement; this one itself if that tells nothing new."""
        key = ObservationKey(shape, per_gpu_batch_size)
        if key in self.profile.of_type(gpu_type):
            return self
        measured = gpu_type, key, passes
        if (known := self._next.get(measured)) is None:
            known = self._next[measured] = self._extended(gpu_type, key, passes)
        return known

    def _extended(self, gpu_type: str, key: ObservationKey, passes: PassTime) -> Knowledge:
        waiting = passes.iteration_time_s - passes.grad_time_s
        profile = self.profile.add(gpu_type, key, Observation(0.0, 0, passes.iteration_time_s, waiting, 1))
        seen = Observations.of(profile.of_type(gpu_type))
        options = PUBLISHED if self._published_fit else DEFAULT_FIT
        fitted = fit(seen, warm=self.fits.get(gpu_type), options=options)
        return Knowledge(self._published_fit, profile, {**self.fits, gpu_type: fitted}, self.chosen)
