"""What happened: one frozen dataclass each. The log of these is the truth; the state is computed from it.

The time of an event is not in it: it comes beside it, into `handle(event, now)` and into the log. Every event about
the replicas of a job carries the generation that it speaks of, so that late ones can be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.core import checks
from pollux.core.allocation import Allocation
from pollux.core.cluster import Node
from pollux.core.frozenmap import FrozenMap
from pollux.core.ids import JobId, NodeId
from pollux.core.job import JobSpec
from pollux.core.kinds import KindProfile, check_kinds
from pollux.core.message import Caused, OfGeneration
from pollux.core.model import JobModel
from pollux.core.phase import Phase
from pollux.core.plan import Plan
from pollux.core.profile import Profile
from pollux.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class _OfJob(Caused):
    job: JobId

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "job", self.job)


@dataclass(frozen=True, slots=True)
class _OfNode(Caused):
    node: NodeId

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "node", self.node)


@dataclass(frozen=True, slots=True)
class JobSubmitted(Caused):
    spec: JobSpec

    def __post_init__(self) -> None:
        checks.instance(InvalidSpec, "spec", self.spec, JobSpec)

    @property
    def job(self) -> JobId:
        return self.spec.id


@dataclass(frozen=True, slots=True)
class JobRecovered(Caused):
    """The log had lost the job, or how far it was, and others still knew: the files of the cluster, and its daemons.

    With an outcome, the job has ended. One that trains goes on as it does. Else the job waits again, after what may
    still run of it has saved and stopped.
    """

    spec: JobSpec
    submitted_at_s: float
    generation: int = 0
    """The highest that was ever used for it; 0: it was never started."""
    allocation: Allocation = field(default_factory=Allocation)
    """What still runs of it; empty: nothing."""
    trains: bool = False
    """All of it trains as that generation, and nothing of it is under way to another one."""
    membership: int = 0
    outcome: Phase | None = None
    """How it ended; None: it has not."""
    reason: str = ""
    exit_code: int | None = None
    finished_at_s: float | None = None
    """When it ended; None: nobody remembers, or it has not."""
    num_failures: int = 0
    """As far as anybody knows."""

    def __post_init__(self) -> None:
        checks.instance(InvalidSpec, "spec", self.spec, JobSpec)
        checks.finite(InvalidSpec, "submitted_at_s", self.submitted_at_s, None)
        checks.finite(InvalidSpec, "finished_at_s", self.finished_at_s, None, optional=True)
        checks.whole(InvalidSpec, "generation", self.generation, 0)
        checks.whole(InvalidSpec, "membership", self.membership, 0)
        checks.whole(InvalidSpec, "num_failures", self.num_failures, 0)
        checks.flag(InvalidSpec, "trains", self.trains)
        if self.trains and not self.allocation:
            raise InvalidSpec("allocation", {}, "a job that trains holds something", "Say what, or that it does not")
        if self.allocation and not self.generation:
            raise InvalidSpec("generation", 0, "a job that runs has one", "Give the highest that was used for it")
        if self.outcome is not None and not self.outcome.is_terminal:
            fix = "Give succeeded, failed or cancelled, or None"
            raise InvalidSpec("outcome", str(self.outcome), "is not the end of a job", fix)

    @property
    def job(self) -> JobId:
        return self.spec.id


@dataclass(frozen=True, slots=True)
class JobCancelled(_OfJob):
    """Somebody asked to cancel it; its replicas may still run."""


@dataclass(frozen=True, slots=True)
class JobPaused(_OfJob):
    """Somebody asked for a pause; its replicas may still run."""


@dataclass(frozen=True, slots=True)
class JobResumed(_OfJob):
    """Somebody asked to end its pause."""


@dataclass(frozen=True, slots=True)
class JobRescaled(_OfJob):
    """Somebody changed how many GPUs it may have."""

    min_gpus: int
    max_gpus: int | None

    def __post_init__(self) -> None:
        _OfJob.__post_init__(self)
        checks.whole(InvalidSpec, "min_gpus", self.min_gpus, 1)
        checks.whole(InvalidSpec, "max_gpus", self.max_gpus, self.min_gpus, optional=True)


@dataclass(frozen=True, slots=True)
class NodeJoined(Caused):
    """A node is there, or has changed: also how a drained node comes back."""

    node: Node

    def __post_init__(self) -> None:
        checks.instance(InvalidSpec, "node", self.node, Node)


@dataclass(frozen=True, slots=True)
class NodeLost(_OfNode):
    """A node is gone, with every replica on it."""


@dataclass(frozen=True, slots=True)
class NodeDrained(_OfNode):
    """A node takes nothing new; what it holds is to be moved."""


@dataclass(frozen=True, slots=True)
class RoundDue(Caused):
    """It is time to plan."""

    round: int

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "round", self.round, 0)


@dataclass(frozen=True, slots=True)
class PlanMade(Caused):
    """The answer to `MakePlan`. Replaying a log obeys it and never plans again."""

    round: int
    plan: Plan
    stopped_early: bool = False
    """A limit in wall-clock time cut the search short, so that another run may answer otherwise."""
    cpu_ms: float | None = None
    """What planning cost. None where logs are promised to be equal byte for byte."""
    stats: FrozenMap[str, float] = field(default_factory=FrozenMap)
    """What the policy tells of its search: fitness, bound, generations …"""

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "round", self.round, 0)
        checks.instance(InvalidSpec, "plan", self.plan, Plan)
        checks.flag(InvalidSpec, "stopped_early", self.stopped_early)
        checks.finite(InvalidSpec, "cpu_ms", self.cpu_ms, 0, optional=True)
        checks.frozen(InvalidSpec, "stats", self.stats)
        for name, value in self.stats.items():
            checks.finite(InvalidSpec, f'stats["{name}"]', value, None)


@dataclass(frozen=True, slots=True)
class ReplicasReady(OfGeneration):
    """All replicas of that generation train, and those of the one before are gone or have become part of it."""


@dataclass(frozen=True, slots=True)
class GenerationAbandoned(OfGeneration):
    """That generation did not get ready and was cleaned away; the one before, if any, trains on."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaLost(OfGeneration):
    """Some replicas are gone; the others re-formed by themselves as this membership."""

    membership: int
    survivors: Allocation
    """What still trains; if nothing does, the job has stopped or failed instead."""

    def __post_init__(self) -> None:
        OfGeneration.__post_init__(self)
        checks.whole(InvalidSpec, "membership", self.membership, 1)
        if not self.survivors:
            raise InvalidSpec("survivors", {}, "nothing is left of the job", "Report JobFailed or JobStopped instead")


@dataclass(frozen=True, slots=True)
class JobReported(OfGeneration):
    """The agent tells what it measured and fitted; None: nothing new."""

    profile: Profile | None = None
    model: JobModel | None = None


@dataclass(frozen=True, slots=True)
class JobStopped(OfGeneration):
    """No replica is left: it was asked to stop, or its nodes are gone. Not the job's fault."""


@dataclass(frozen=True, slots=True)
class JobFinished(OfGeneration):
    """Its training has ended well."""


@dataclass(frozen=True, slots=True)
class JobFailed(OfGeneration):
    """It ended badly by itself, and no replica is left."""

    reason: str
    exit_code: int | None = None
    """None: there is none, or nobody knows it."""
    may_retry: bool = True
    """False: another try would fail again, or do twice what may have been done."""


@dataclass(frozen=True, slots=True)
class KindsImported(Caused):
    """Somebody brought what another cluster, or this one before, has learnt of kinds of jobs."""

    kinds: FrozenMap[str, KindProfile]
    replaces: bool = False
    """In place of all that the registry holds; False: added to it."""

    def __post_init__(self) -> None:
        check_kinds("kinds", self.kinds)
        checks.flag(InvalidSpec, "replaces", self.replaces)


Event = (
    JobSubmitted
    | JobRecovered
    | JobCancelled
    | JobPaused
    | JobResumed
    | JobRescaled
    | NodeJoined
    | NodeLost
    | NodeDrained
    | RoundDue
    | PlanMade
    | ReplicasReady
    | GenerationAbandoned
    | ReplicaLost
    | JobReported
    | JobStopped
    | JobFinished
    | JobFailed
    | KindsImported
)
