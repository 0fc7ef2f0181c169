"""What the service (or the launcher) and node daemons say to each other, over the daemons' local socket or TCP port.

Each request on a connection is answered by one message, in order; `Refused` says why not. The connection that asked to
`Watch` then carries news only. One daemon, the *home* of a job, runs it: others start and end replicas for it.

    service or launcher ── RunJob, ResizeRun, StopRun, ListRuns, Watch ──▶ home
    home ── HostStore, Spawn, Tell, Kill, ListReplicas, Forget, Watch ──▶ daemons, itself among them
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from pollux.core import (
    Allocation,
    Event,
    FrozenMap,
    JobFailed,
    JobFinished,
    JobId,
    JobStopped,
    NodeId,
    OfGeneration,
    StopReason,
    checks,
    register,
)
from pollux.errors import InvalidSpec
from pollux.wire.messages import AgentReport
from pollux.wire.replicas import Instruction, ReplicaStatus


@register
@dataclass(frozen=True, slots=True)
class Launch:
    """What the replicas of a job run: a Python script, from the top, in each of them.

    Or, with `is_plain`, any program: one process, which knows nothing of Pollux and holds `gpus` slots of one node.
    """

    job: JobId
    script: str
    """Absolute path; of a plain command the program, looked up as a shell would, in the environment's PATH."""
    arguments: tuple[str, ...] = ()
    directory: str = "."
    """Where it runs."""
    environment: FrozenMap[str, str] = field(default_factory=FrozenMap, repr=False)
    """In addition to, or instead of, what jobs find of the daemon's environment."""
    checkpoint_dir: str = ""
    """What POLLUX_CHECKPOINT_DIR says; empty: nothing."""
    is_plain: bool = False
    gpus: int = 1
    """Slots that each replica holds; more than one only for plain commands."""
    submission: str = ""
    """Tells this job from another one of the same id; empty: nobody said."""

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "job", self.job)
        if any(letter in self.job for letter in "/\0\n") or self.job in (".", ".."):
            raise InvalidSpec("job", self.job, "cannot be the name of a folder", "Use letters, digits, '-' and '_'")
        checks.text(InvalidSpec, "script", self.script)
        checks.text(InvalidSpec, "directory", self.directory)
        checks.frozen(InvalidSpec, "environment", self.environment)
        checks.text(InvalidSpec, "checkpoint_dir", self.checkpoint_dir, may_be_empty=True)
        checks.flag(InvalidSpec, "is_plain", self.is_plain)
        checks.whole(InvalidSpec, "gpus", self.gpus, 1)
        if self.gpus > 1 and not self.is_plain:
            raise InvalidSpec("gpus", self.gpus, "a replica of an elastic job holds one", "Start more replicas")


# To the home of a job


@register
@dataclass(frozen=True, slots=True)
class RunJob(OfGeneration):
    """Start the job there. `addresses`: host:port of the daemon of every node but the home itself."""

    launch: Launch
    allocation: Allocation
    addresses: FrozenMap[NodeId, str] = field(default_factory=FrozenMap)
    experience: str = field(default="", repr=False)
    """A document, `Profile`: what other jobs of its kind have measured, for the agent; empty: nothing. Daemons hand it
    on unread, so that nothing in it keeps a job from its start."""


@register
@dataclass(frozen=True, slots=True)
class ResizeRun(OfGeneration):
    """Get that generation ready there, then switch."""

    allocation: Allocation
    addresses: FrozenMap[NodeId, str] = field(default_factory=FrozenMap)
    experience: str = field(default="", repr=False)
    """As in `RunJob`, by now."""


@register
@dataclass(frozen=True, slots=True)
class StopRun(OfGeneration):
    """End all replicas up to that generation; they save first if the reason allows it."""

    reason: StopReason


@register
@dataclass(frozen=True, slots=True)
class ListRuns:
    """Which jobs have their home here? Answer: `Runs`."""


class RunPhase(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    RESIZING = "resizing"
    """Trains while the next generation gets ready, or switches to it."""
    REPAIRING = "repairing"
    """Replicas were lost, and the others gather."""
    RESTARTING = "restarting"
    """Resized by checkpoint: the replicas of one generation save and end before those of the next start."""
    STOPPING = "stopping"
    ENDED = "ended"


@register
@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a job stands, as its home sees it."""

    job: JobId
    phase: RunPhase
    generation: int
    """Of the replicas that train."""
    membership: int
    issued_generation: int
    """The highest number used so far."""
    allocation: Allocation
    step: int
    replicas: tuple[ReplicaStatus, ...] = ()
    end: JobFinished | JobFailed | JobStopped | None = None
    """How it ended; None: it has not, or was never started."""


@register
@dataclass(frozen=True, slots=True)
class Runs:
    runs: tuple[RunStatus, ...]


# To any daemon


@register
@dataclass(frozen=True, slots=True)
class DescribeNode:
    """Who are you? Answer: `NodeDescription`."""


@register
@dataclass(frozen=True, slots=True)
class NodeDescription:
    node: NodeId
    pid: int
    version: str
    slots: int
    """GPUs, or CPU slots."""
    gpu_type: str = "cpu"
    """What its slots are, such as "t4"."""
    devices: tuple[str, ...] = ()
    """Its GPUs as CUDA_VISIBLE_DEVICES names them; the first one is slot 0."""
    replica_env: FrozenMap[str, str] = field(default_factory=FrozenMap, repr=False)
    """Variables that it was told to give to every replica."""
    job_env: tuple[str, ...] = ()
    """Names of those that it was told to pass on from its own environment."""
    job_user: str = ""
    """Whom it runs jobs as; empty: as whoever started it."""


@register
@dataclass(frozen=True, slots=True)
class Seat:
    """A replica to start, and its place in the generation that it is started for."""

    replica: str
    rank: int
    size: int
    num_nodes: int
    is_newcomer: bool
    """It joins replicas that train already, when it is told to."""


@register
@dataclass(frozen=True, slots=True)
class Spawn(OfGeneration):
    """Start these replicas on this node. Answer: `Done`. A replica that is there already is left alone."""

    launch: Launch
    seats: tuple[Seat, ...]
    store: str
    experience: str | None = field(default=None, repr=False)
    """As in `RunJob`, for the first replica; None: it is not among these."""


@register
@dataclass(frozen=True, slots=True)
class Tell:
    """Hand an instruction to a replica here, now and whenever it comes back to the daemon."""

    job: JobId
    replica: str
    instruction: Instruction
    experience: str | None = field(default=None, repr=False)
    """As in `Spawn`."""


@register
@dataclass(frozen=True, slots=True)
class Kill:
    """Send a signal to a replica here: 15 to save and leave, 9 to end."""

    job: JobId
    replica: str
    signal: int


@register
@dataclass(frozen=True, slots=True)
class HostStore:
    """Host a rendezvous store for the job here, if there is none yet. Answer: `StoreAt`."""

    job: JobId


@register
@dataclass(frozen=True, slots=True)
class StoreAt:
    address: str


@register
@dataclass(frozen=True, slots=True)
class Forget(OfGeneration):
    """The job is over up to that generation: end its store and whatever is left of it here, drop exit codes. Logs stay.

    What a later home of the job has started here goes on, and so does its store.
    """


@register
@dataclass(frozen=True, slots=True)
class ListReplicas:
    """Which replicas of the job are here, or have ended here? Answer: `ReplicaList`."""

    job: JobId


@register
@dataclass(frozen=True, slots=True)
class ReplicaHere:
    """A replica as its node knows it."""

    replica: str
    generation: int
    """That it was started for."""
    pid: int
    status: ReplicaStatus | None
    """None before its first word."""
    exit_code: int | None = None
    """None while it runs, and if nobody knows it; negative: the signal that ended it."""
    log: str = ""
    """Path of its log on its node."""
    last_words: str = ""
    """If it ended badly: the end of its log, on one line; or why it could not be started."""
    has_unknown_end: bool = False
    """It has ended and nobody saw how, or it never began: there is no exit code."""
    may_have_finished: bool = False
    """Of an unknown end: all its work may have been done by then, so that it must not be run again unasked."""

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None or self.has_unknown_end


@register
@dataclass(frozen=True, slots=True)
class ReplicaList:
    replicas: tuple[ReplicaHere, ...]


@register
@dataclass(frozen=True, slots=True)
class ListLogs:
    """What have the replicas of the job printed on this node? Answer: `LogsHere`, also long after they ended."""

    job: JobId


@register
@dataclass(frozen=True, slots=True)
class LogHere:
    replica: str
    size: int
    is_running: bool
    modified_at_s: float


@register
@dataclass(frozen=True, slots=True)
class LogsHere:
    logs: tuple[LogHere, ...]


@register
@dataclass(frozen=True, slots=True)
class ReadLog:
    """A part of what a replica has printed here; a negative offset counts from the end. Answer: `LogPart`."""

    job: JobId
    replica: str
    offset: int = 0
    limit: int = 1 << 16


@register
@dataclass(frozen=True, slots=True)
class LogPart:
    text: str
    """Bytes that are no UTF-8 are replaced; a letter is never cut in two."""
    next_offset: int
    """Where the next part begins, in bytes."""


@register
@dataclass(frozen=True, slots=True)
class Watch:
    """From now on, tell me on this connection what happens. `job`: empty means all.

    First comes `Done`, then what was announced before and still holds, then what is new.
    """

    job: str = ""
    replicas: bool = False
    """Also of single replicas (`ReplicaHere`), not only of jobs that have their home here."""


@register
@dataclass(frozen=True, slots=True)
class Done:
    """It is done, or was already."""


@register
@dataclass(frozen=True, slots=True)
class Refused:
    """It is not done. `is_stale`: a newer generation is known here."""

    problem: str
    is_stale: bool = False
    generation: int = 0
    """The newer one; 0 if nothing is stale."""


@register
@dataclass(frozen=True, slots=True)
class ReplicaNews:
    """A replica has changed: what it says of itself, or that it ended. `is_hung`: it was killed for its silence."""

    job: JobId
    node: NodeId
    replica: ReplicaHere
    is_hung: bool = False


@register
@dataclass(frozen=True, slots=True)
class RunNews:
    """What the scheduler is to hear of a job, from its home."""

    at_s: float
    event: Event


@register
@dataclass(frozen=True, slots=True)
class ReportNews:
    """A report of the job's agent."""

    report: AgentReport


RunRequest: TypeAlias = RunJob | ResizeRun | StopRun
NodeRequest: TypeAlias = (
    RunJob
    | ResizeRun
    | StopRun
    | ListRuns
    | DescribeNode
    | Spawn
    | Tell
    | Kill
    | HostStore
    | Forget
    | ListReplicas
    | ListLogs
    | ReadLog
    | Watch
)
NodeAnswer: TypeAlias = Done | Refused | Runs | NodeDescription | StoreAt | ReplicaList | LogsHere | LogPart
NodeNews: TypeAlias = ReplicaNews | RunNews | ReportNews
