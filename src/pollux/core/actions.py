"""What must now be done in the world: one frozen dataclass each, with no word on how.

Each is idempotent: doing the same generation twice is doing it once, and an action of a generation older than one
already seen is ignored. The world answers with events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pollux.core import checks
from pollux.core.allocation import Allocation
from pollux.core.message import Caused, OfGeneration
from pollux.core.plan import Snapshot
from pollux.errors import InvalidSpec


class StopReason(StrEnum):
    """Why a job must leave its GPUs; it saves its state first, except when cancelled or superseded."""

    PREEMPTED = "preempted"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    """These replicas should not be running at all, such as those of a node that was thought to be lost."""


@dataclass(frozen=True, slots=True)
class MakePlan(Caused):
    """Run the policy on the snapshot and answer with `PlanMade`."""

    round: int
    snapshot: Snapshot
    seed: int
    """Where the policy's randomness comes from, and nothing else."""

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "round", self.round, 0)
        checks.instance(InvalidSpec, "snapshot", self.snapshot, Snapshot)
        checks.whole(InvalidSpec, "seed", self.seed, 0)


@dataclass(frozen=True, slots=True)
class StartJob(OfGeneration):
    """Start the job there. Answer: `ReplicasReady`, `GenerationAbandoned` or `JobFailed`."""

    allocation: Allocation

    def __post_init__(self) -> None:
        OfGeneration.__post_init__(self)
        _need_gpus(self.allocation)


@dataclass(frozen=True, slots=True)
class ResizeJob(OfGeneration):
    """Get `generation` ready there while the present one trains, then switch. Answers as for `StartJob`."""

    allocation: Allocation

    def __post_init__(self) -> None:
        OfGeneration.__post_init__(self)
        _need_gpus(self.allocation)


@dataclass(frozen=True, slots=True)
class StopJob(OfGeneration):
    """End all replicas up to that generation. Always answered, by `JobStopped` at the latest."""

    reason: StopReason

    def __post_init__(self) -> None:
        OfGeneration.__post_init__(self)
        checks.instance(InvalidSpec, "reason", self.reason, StopReason)


Action = MakePlan | StartJob | ResizeJob | StopJob


def _need_gpus(allocation: Allocation) -> None:
    if not allocation:
        raise InvalidSpec("allocation", {}, "a job cannot run on nothing", "Give a StopJob to take its GPUs away")
