"""A job: what its owner asked for (`JobSpec`) and where it stands (`Job`). No callables, no handles of any engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

from pollux.core import checks
from pollux.core.allocation import Allocation
from pollux.core.frozenmap import FrozenMap
from pollux.core.ids import JobId
from pollux.core.model import BatchLimits, BatchWishes, JobModel, ThroughputFit
from pollux.core.phase import Phase
from pollux.core.profile import Profile
from pollux.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the owner of a job asks for; changes only by a rescale."""

    id: JobId
    name: str = ""
    """For people; need not be unique. Empty: the id serves."""
    command: tuple[str, ...] = ()
    """Program and arguments, never passed through a shell."""
    working_dir: str = ""
    env: FrozenMap[str, str] = field(default_factory=FrozenMap, repr=False)
    """May hold secrets, which belong in no log."""
    checkpoint_dir: str = ""
    application: str | None = None
    """The kind of training task, opaque here: jobs of one kind behave alike."""

    min_gpus: int = 1
    """The fewest that it can run on. A job that waits holds none all the same."""
    max_gpus: int | None = None
    """The most that it can use; None: no limit of its own."""
    gpu_type: str | None = None
    """Run on this type only; None: on any."""
    requested_gpus: int | None = None
    """What the owner would choose; the size of a rigid job, and what policies that do not adapt sizes give."""
    rigid: bool = False
    """Runs on exactly `requested_gpus`: a script that cannot change its size."""
    single_node: bool = False
    """All its GPUs must be of one node: a program that knows nothing of other machines."""
    preemptible: bool = True
    """False: once it runs, it keeps at least `min_gpus` until it ends."""

    limits: BatchLimits | None = None
    """What is known of its batch sizes before it runs; its agent reports the rest."""
    batch: BatchWishes = field(default_factory=BatchWishes)
    """Bounds of its batch sizes that its agent is told."""
    requested_batch_size: int | None = None
    """Total batch size that the owner would choose; None: the initial one."""
    fixed_batch: bool = False
    """Keep the total batch size at the requested one (the initial one if none was requested)."""

    priority: int = 0
    """Higher goes first, where a policy knows priorities."""
    team: str = ""
    deadline_s: float | None = None
    """Wanted ready so many seconds after its submission."""
    retries: int = 3
    """How many failures are answered by another try."""

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "id", self.id)
        for name in ("name", "working_dir", "checkpoint_dir", "team"):
            checks.text(InvalidSpec, name, getattr(self, name), may_be_empty=True)
        if not isinstance(self.command, tuple):
            raise InvalidSpec("command", self.command, "must be a tuple of texts", "Give each argument as its own item")
        for position, argument in enumerate(self.command):
            checks.text(InvalidSpec, f"command[{position}]", argument, may_be_empty=position > 0)
        checks.frozen(InvalidSpec, "env", self.env)
        for name, value in self.env.items():
            checks.text(InvalidSpec, f'env["{name}"]', value, may_be_empty=True)
        for name in ("application", "gpu_type"):
            if getattr(self, name) is not None:
                checks.text(InvalidSpec, name, getattr(self, name))
        for name in ("rigid", "single_node", "preemptible", "fixed_batch"):
            checks.flag(InvalidSpec, name, getattr(self, name))
        checks.instance(InvalidSpec, "limits", self.limits, BatchLimits, optional=True)
        checks.instance(InvalidSpec, "batch", self.batch, BatchWishes)
        checks.whole(InvalidSpec, "requested_batch_size", self.requested_batch_size, 1, optional=True)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidSpec("priority", self.priority, "must be a whole number", "Give an int; 0 is ordinary")
        checks.finite(InvalidSpec, "deadline_s", self.deadline_s, 0, above=True, optional=True)
        checks.whole(InvalidSpec, "retries", self.retries, 0)
        self._check_sizes()

    def _check_sizes(self) -> None:
        checks.whole(InvalidSpec, "min_gpus", self.min_gpus, 1)
        checks.whole(InvalidSpec, "max_gpus", self.max_gpus, 1, optional=True)
        checks.whole(InvalidSpec, "requested_gpus", self.requested_gpus, 1, optional=True)
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            raise InvalidSpec(
                "max_gpus", self.max_gpus, f"less than min_gpus = {self.min_gpus}", "Raise max_gpus or lower min_gpus"
            )
        if self.rigid and self.requested_gpus is None:
            raise InvalidSpec("requested_gpus", None, "a rigid job needs a size", "Say how many GPUs it runs on")

    @property
    def gpu_bounds(self) -> tuple[int, int | None]:
        """Fewest and most GPUs when it runs; for a rigid job both are its size."""
        if self.rigid and self.requested_gpus is not None:
            return self.requested_gpus, self.requested_gpus
        return self.min_gpus, self.max_gpus

    def can_be_on(self, num_nodes: int) -> bool:
        """Whether it may have GPUs of so many nodes."""
        return num_nodes <= 1 or not self.single_node


_NOT_CHANGING = frozenset(phase for phase in Phase if not phase.holds_gpus) | {Phase.STARTING, Phase.RUNNING}


class Basis(NamedTuple):
    """The parts of a job that it is worth remembering something about."""

    spec: JobSpec
    limits: BatchLimits | None
    fits: FrozenMap[str, ThroughputFit]

    @classmethod
    def of(cls, spec: JobSpec, model: JobModel | None) -> Basis:
        return cls(spec, None, _NO_FITS) if model is None else cls(spec, model.limits, model.throughput)


class Reading(NamedTuple):
    """What whoever plans for thousands of jobs at once looks at, of each of them: three objects, not thirty."""

    basis: Basis
    """What is seldom other than before; the same object from report to report, as long as its parts are."""
    assigned: Allocation
    numbers: bytes
    """As float64: sequence, submitted_at_s, attained_gpu_s, held_since_s, num_reallocations, first_started_at_s,
    GPUs occupied; of its model gradient sqr and var, progress done and total, realloc_delay_s. NaN: not known."""


_NO_FITS: FrozenMap[str, ThroughputFit] = FrozenMap()
_OWN_NUMBERS, _TOLD_NUMBERS = Struct("7d"), Struct("5d")


def _told(model: JobModel | None) -> bytes:
    """What a model adds to `Reading.numbers`."""
    if model is None:
        return _NOTHING_TOLD
    nan, gradient, progress, delay_s = math.nan, model.gradient, model.progress, model.realloc_delay_s
    sqr, var = (nan, nan) if gradient is None else (gradient.sqr, gradient.var)
    done, total = (nan, None) if progress is None else (progress.done, progress.total)
    return _TOLD_NUMBERS.pack(sqr, var, done, nan if total is None else total, nan if delay_s is None else delay_s)


_NOTHING_TOLD = _TOLD_NUMBERS.pack(*[math.nan] * 5)


class _WithReading:
    """A slot of its own for what is read of ten thousand jobs at once: their dicts need not be fetched from memory."""

    __slots__ = ("reading",)
    reading: Reading


@dataclass(frozen=True)  # no slots: a dict is copied at once
class Job(_WithReading):
    """A job at one moment. Changed by the scheduler's `apply` only, by building the next one."""

    spec: JobSpec
    submitted_at_s: float
    sequence: int = 0
    """How many jobs were submitted before it: the order of arrival, also among jobs of the same second."""
    phase: Phase = Phase.PENDING
    generation: int = 0
    """The generation that trains, or that is being started; 0 before the first start."""
    issued_generation: int = 0
    """The highest number ever given out, abandoned ones included; the next start or resize takes one more."""
    membership: int = 0
    """How often the survivors of this generation have re-formed."""
    allocation: Allocation = field(default_factory=Allocation)
    """What the present generation holds; not empty exactly while the phase holds GPUs."""
    next_allocation: Allocation | None = None
    """What `issued_generation` will hold, while a resize is under way."""
    model: JobModel | None = None
    profile: Profile = field(default_factory=Profile)
    num_reallocations: int = 0
    num_failures: int = 0
    attained_gpu_s: float = 0.0
    """GPU-seconds held up to `held_since_s`, or in all if it holds none now; ask `attained_gpu_s_at` for any moment."""
    held_since_s: float | None = None
    """Since when it occupies just what it does now; None while it holds nothing."""
    first_started_at_s: float | None = None
    """When it was first given GPUs."""
    retry_at_s: float | None = None
    """It failed and may not be given GPUs before then; None: at once."""
    finished_at_s: float | None = None
    exit_reason: str = ""
    exit_code: int | None = None

    def __post_init__(self) -> None:
        checks.instance(InvalidSpec, "spec", self.spec, JobSpec)
        checks.instance(InvalidSpec, "phase", self.phase, Phase)
        checks.finite(InvalidSpec, "submitted_at_s", self.submitted_at_s, None)
        for name in ("sequence", "generation", "issued_generation", "membership", "num_reallocations", "num_failures"):
            checks.whole(InvalidSpec, name, getattr(self, name), 0)
        checks.finite(InvalidSpec, "attained_gpu_s", self.attained_gpu_s, 0)
        checks.finite(InvalidSpec, "held_since_s", self.held_since_s, None, optional=True)
        checks.finite(InvalidSpec, "first_started_at_s", self.first_started_at_s, None, optional=True)
        checks.finite(InvalidSpec, "retry_at_s", self.retry_at_s, None, optional=True)
        checks.finite(InvalidSpec, "finished_at_s", self.finished_at_s, None, optional=True)
        if self.issued_generation < self.generation:
            raise InvalidSpec(
                "issued_generation",
                self.issued_generation,
                f"below generation = {self.generation}",
                "Set it to the highest number given out",
            )
        self._check_phase()
        since, started = self.held_since_s, self.first_started_at_s
        own = _OWN_NUMBERS.pack(
            self.sequence,
            self.submitted_at_s,
            self.attained_gpu_s,
            math.nan if since is None else since,
            self.num_reallocations,
            math.nan if started is None else started,
            self.occupied.num_gpus,
        )
        self._keep(Reading(Basis.of(self.spec, self.model), self.assigned, own + _told(self.model)))

    def _check_phase(self) -> None:
        phase = self.phase
        if phase.holds_gpus != bool(self.allocation):
            problem = "must hold GPUs" if phase.holds_gpus else "must not hold GPUs"
            held = dict(self.allocation.gpus)
            raise InvalidSpec("allocation", held, f"a {phase} job {problem}", "Change both at once")
        if phase.holds_gpus != (self.held_since_s is not None):
            problem = "must say since when it holds them" if phase.holds_gpus else "holds nothing"
            raise InvalidSpec("held_since_s", self.held_since_s, f"a {phase} job {problem}", "Change both at once")
        if phase is Phase.RESIZING and not self.next_allocation:
            raise InvalidSpec(
                "next_allocation", self.next_allocation, "a resizing job needs a target", "Say what it is to hold"
            )
        if self.next_allocation is not None and phase in _NOT_CHANGING:
            target = dict(self.next_allocation.gpus)
            raise InvalidSpec("next_allocation", target, f"a {phase} job is not being resized", "Set it to None")
        if phase.is_terminal != (self.finished_at_s is not None):
            problem = "must have an end" if phase.is_terminal else "cannot have ended"
            raise InvalidSpec("finished_at_s", self.finished_at_s, f"a {phase} job {problem}", "Change both at once")

    @property
    def id(self) -> JobId:
        return self.spec.id

    def believed(self, model: JobModel | None, profile: Profile) -> Job:
        """The same job, of which that is believed; what a model says again is the same object as before.

        Nothing is checked again: no rule joins these two to any other field, and they were checked when they were
        made. Agents report every half minute; `replace` would cost ten times as much.
        """
        after = object.__new__(Job)
        model = model and model.after(self.model)
        basis, assigned, numbers = self.reading
        if model is None or model.limits is not basis.limits or model.throughput is not basis.fits:
            basis = Basis.of(self.spec, model)
        after.__dict__.update(self.__dict__, model=model, profile=profile)
        after._keep(Reading(basis, assigned, numbers[: _OWN_NUMBERS.size] + _told(model)))
        return after

    def with_changes(self, **changes: object) -> Job:
        """As `dataclasses.replace`, with all checks, in half of the time: all steps of all jobs come through here."""
        after = object.__new__(Job)
        after.__dict__.update(self.__dict__, **changes)
        after.__post_init__()
        return after

    def _keep(self, reading: Reading) -> None:
        object.__setattr__(self, "reading", reading)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def may_be_given_gpus_at(self, now_s: float) -> bool:
        """Whether a plan of that moment may name it: by its phase, and as the pause after a failure is over."""
        return self.phase.may_be_given_gpus and (self.retry_at_s is None or self.retry_at_s <= now_s)

    @property
    def occupied(self) -> Allocation:
        """All GPUs that nobody else may have now: during a resize the old ones and the new ones."""
        return self.allocation if self.next_allocation is None else self.allocation.union(self.next_allocation)

    @property
    def assigned(self) -> Allocation:
        """What it holds, or will hold once the resize that is under way is done."""
        return self.allocation if self.next_allocation is None else self.next_allocation

    def attained_gpu_s_at(self, now_s: float) -> float:
        """GPU-seconds that it has held so far; waiting for replicas and both sides of a resize are included."""
        if self.held_since_s is None:
            return self.attained_gpu_s
        return self.attained_gpu_s + max(now_s - self.held_since_s, 0.0) * self.occupied.num_gpus

    def age_s(self, now_s: float) -> float:
        """Seconds since submission, never negative."""
        return max(now_s - self.submitted_at_s, 0.0)

    def expects(self, generation: int) -> bool:
        """Whether a message of that generation is to be heeded: the one that trains, or the one getting ready."""
        if not self.phase.holds_gpus:
            return False
        return generation == self.generation or (
            self.next_allocation is not None and generation == self.issued_generation
        )

    def awaits(self, generation: int) -> bool:
        """Whether that generation is getting ready, so that `ReplicasReady` or `GenerationAbandoned` may end it."""
        if self.next_allocation is not None:
            return generation == self.issued_generation
        return self.phase is Phase.STARTING and generation == self.generation

    def may_have_finished(self, generation: int) -> bool:
        """Whether a finish of that generation counts: also that of a job given up since, whose node came back."""
        return self.expects(generation) or (not self.phase.is_terminal and 0 < generation == self.generation)
