"""What the REST API of the service answers with, as dataclasses: the service fills them, the command line reads them.

Times are seconds since 1970 by the service's clock, durations seconds. Figures that nobody has measured yet are None.
The same classes are the source of the published OpenAPI document.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.core import FrozenMap, JobId, NodeId, Phase


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the service is there; asked without a token."""

    status: str
    """ok; recovering: it reads its log and asks the daemons, and takes no orders yet; or ending."""
    version: str


@dataclass(frozen=True, slots=True)
class JobView:
    """One row of `pollux ps` and `pollux top`."""

    id: JobId
    name: str
    team: str
    phase: Phase
    is_rigid: bool
    """A plain command with a fixed number of GPUs."""
    priority: int
    min_gpus: int
    max_gpus: int | None
    gpus: int
    """Held now; during a resize those of the generation that trains."""
    allocation: FrozenMap[NodeId, int]
    next_allocation: FrozenMap[NodeId, int] | None
    """While a resize is under way: what it will hold."""
    generation: int
    """Grows with each start and each resize; 0 before the first."""
    reallocations: int
    """How often its GPUs were changed as planned."""
    failures: int
    retries: int
    """How many failures are answered by another try."""
    submitted_at_s: float
    started_at_s: float | None
    """When it was first given GPUs."""
    finished_at_s: float | None
    attained_gpu_s: float
    """GPU-seconds held so far."""
    waits_for: str = ""
    """Why a job that is not running is not running; empty otherwise."""
    exit_reason: str = ""
    """Why it ended, or failed the last time."""
    exit_code: int | None = None
    deadline_at_s: float | None = None
    batch_size: int | None = None
    """Examples of a step, over all replicas."""
    per_gpu_batch_size: int | None = None
    accumulation_steps: int | None = None
    """Passes over the model before the one that synchronises."""
    learning_rate_factor: float | None = None
    """Of the first parameter group."""
    step: int | None = None
    """Optimizer steps done."""
    progress: float | None = None
    """From 0 to 1."""
    eta_s: float | None = None
    """Seconds until it ends if it keeps what it has."""
    loss: float | None = None
    """Smoothed."""
    throughput: float | None = None
    """Examples a second."""
    efficiency: float | None = None
    """Progress per example, relative to the initial batch size."""
    goodput: float | None = None
    """Useful examples a second."""
    noise_scale: float | None = None
    """In examples."""
    reported_at_s: float | None = None
    """When these figures were sent, by the clock of the job's machine."""
    gpu_types: tuple[str, ...] = ()
    """Of the GPUs that they were measured on; `emulated-…` are none."""


@dataclass(frozen=True, slots=True)
class JobDetail:
    """What `pollux describe` shows. Values of environment variables are secrets and never here."""

    job: JobView
    command: tuple[str, ...]
    working_dir: str
    checkpoint_dir: str
    env_names: tuple[str, ...]
    application: str | None
    gpu_type: str | None
    """Runs on this type only; null: on any."""
    requested_gpus: int | None
    is_preemptible: bool
    """false: once it runs, it keeps its smallest size until it ends."""
    has_fixed_batch: bool
    initial_batch_size: int | None
    max_batch_size: int | None
    realloc_delay_s: float | None
    """What one re-allocation of it costs, as measured."""
    fit_error: float | None
    """Mean relative error of the throughput model, on the GPUs it runs on."""
    kind: str | None = None
    """Under which the profile registry files it: `application`, else the fingerprint that its agent reports."""


@dataclass(frozen=True, slots=True)
class JobList:
    """Jobs in order of arrival."""

    jobs: tuple[JobView, ...]


@dataclass(frozen=True, slots=True)
class NodeView:
    """One machine, or what acts as one."""

    id: NodeId
    gpus: int
    free_gpus: int
    """Those that may be given out: none unless it is ready."""
    gpu_type: str
    state: str
    """ready, drained, or away: its daemon is out of reach."""
    address: str
    jobs: FrozenMap[JobId, int] = field(default_factory=FrozenMap)
    """GPUs that each job holds there."""
    labels: FrozenMap[str, str] = field(default_factory=FrozenMap)
    """What its provider says about it, by name."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The service and its nodes."""

    version: str
    pid: int
    policy: str
    interval_s: float
    """From one round to the next."""
    round: int
    """The latest."""
    time_s: float
    """Now."""
    started_at_s: float
    is_recovering: bool
    gpus: int
    free_gpus: int
    nodes: tuple[NodeView, ...]
    num_jobs: FrozenMap[str, int]
    """By phase."""
    warnings: tuple[str, ...] = ()
    """What people should know, such as that the disk is full, or that the log has lost records."""


@dataclass(frozen=True, slots=True)
class EventView:
    """One line of `pollux events`."""

    sequence: int
    at_s: float
    kind: str
    """The name of the event (JobSubmitted, PlanMade …) or of the agent's notice (BatchChanged …)."""
    job: str
    """Empty if it is not about one."""
    text: str
    """One sentence for people."""
    detail: FrozenMap[str, object] = field(default_factory=FrozenMap)
    """The document as plain JSON. Values of environment variables are blanked out, measurements only counted."""


@dataclass(frozen=True, slots=True)
class EventPage:
    """A part of the story, oldest first."""

    events: tuple[EventView, ...]
    next: int
    """Ask for what comes after this one."""


@dataclass(frozen=True, slots=True)
class LogFile:
    """What one replica has printed."""

    replica: str
    node: NodeId
    size: int
    """In bytes."""
    is_running: bool
    modified_at_s: float


@dataclass(frozen=True, slots=True)
class LogList:
    """The logs of a job, on all nodes that answer."""

    logs: tuple[LogFile, ...]


@dataclass(frozen=True, slots=True)
class KindView:
    """What the profile registry holds of one kind of job, in figures."""

    kind: str
    """What owners call the application, else a fingerprint of script and model."""
    jobs: int
    """How many have ended and gone in."""
    observations: int
    """Different GPU types, shapes and per-GPU batch sizes that were measured."""
    gpu_types: tuple[str, ...]
    max_gpus: int
    """The most that a job was measured on; 0: nothing was measured."""
    work: float | None
    """Mean length of those that succeeded, in examples at the initial batch size."""
    realloc_delay_s: float | None
    """Mean cost of a re-allocation."""
    updated_at_s: float


@dataclass(frozen=True, slots=True)
class KindList:
    """The profile registry, in order of the names of kinds."""

    kinds: tuple[KindView, ...]


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """How many GPUs a job may have from now on."""

    min_gpus: int
    max_gpus: int | None
    """null: no limit of its own."""


@dataclass(frozen=True, slots=True)
class ShutdownRequest:
    """How the service is to end."""

    jobs: str
    """leave: daemons and jobs go on without the service; stop: jobs save and end, daemons end too."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with what was sent."""

    field: str
    value: str
    """As it was given, shortened; blank if it may be a secret."""
    problem: str
    fix: str
    line: int | None = None
    """In the file, if it came from one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The body of every error, as application/problem+json."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    faults: tuple[Fault, ...] = ()
