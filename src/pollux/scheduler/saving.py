"""Scheduling state written down, so that a restart replays only what came after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.core import Allocation, Cluster, FrozenMap, GradientStats, Job, JobId, KindProfile, Phase, codec
from pollux.core.hints import BRIEF


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a job's life, as an `IllegalTransition` tells it."""

    time_s: float
    step: str
    phase: Phase

    def __str__(self) -> str:
        return f"{self.time_s:g} s: {self.step} → {self.phase}"


@codec.register
@dataclass(frozen=True, slots=True)
class SavedState:
    """All of a `SchedulerState` but its options and what follows from the rest (GPUs in use, who is not settled)."""

    time_s: float = 0.0
    round: int = 0
    awaited_round: int | None = None
    cluster: Cluster = field(default_factory=Cluster)
    jobs: tuple[Job, ...] = ()
    """Those that have not ended, in order of arrival."""
    ended: tuple[Job, ...] = ()
    """In the order in which they ended."""
    target: FrozenMap[JobId, Allocation] = field(default_factory=FrozenMap)
    histories: FrozenMap[JobId, tuple[Step, ...]] = field(default_factory=FrozenMap)
    """The latest steps of each job that has not ended, oldest first."""
    kinds: FrozenMap[str, KindProfile] = field(default_factory=FrozenMap, metadata=BRIEF)
    """The profile registry."""
    stages: FrozenMap[JobId, FrozenMap[int, GradientStats]] = field(default_factory=FrozenMap, metadata=BRIEF)
    """What each job that has not ended reported in each stage of its training."""
    giving_way: tuple[JobId, ...] = field(default=(), metadata=BRIEF)
    """Jobs whose resize under way is a step towards their target only."""
