"""What a training job tells of its own course: one frozen dataclass for each kind of news.

The agent writes them to its journal, one line each, and sends them along with its reports. Every entry carries the
state that the next step starts from, so that the journal is enough to replay a run: which samples each step takes,
how they are cut, and what the learning rate is multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pollux.core import FrozenMap, Progress, checks, register
from pollux.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class BatchSetting:
    """How many examples a step takes, and how each replica cuts its share."""

    batch_size: int
    """Of the whole step, over all replicas."""
    per_gpu_batch_size: int
    """Examples of the largest pass over the model."""
    accumulation_steps: int = 0
    """Passes over the model before the one that synchronises."""

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "batch_size", self.batch_size, 1)
        checks.whole(InvalidSpec, "per_gpu_batch_size", self.per_gpu_batch_size, 1)
        checks.whole(InvalidSpec, "accumulation_steps", self.accumulation_steps, 0)


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands between two steps."""

    step: int
    """Optimizer steps done."""
    progress: Progress
    replicas: int
    batch: BatchSetting
    learning_rate_factors: tuple[float, ...]
    """What the rule makes of the user's learning rate, for each parameter group."""
    data_pass: int
    """Which traversal of the data this is, from 0."""
    data_offset: int
    """Samples of that pass that finished steps have used; the next step begins there."""

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "step", self.step, 0)
        checks.instance(InvalidSpec, "progress", self.progress, Progress)
        checks.whole(InvalidSpec, "replicas", self.replicas, 1)
        checks.instance(InvalidSpec, "batch", self.batch, BatchSetting)
        _factors("learning_rate_factors", self.learning_rate_factors)
        checks.whole(InvalidSpec, "data_pass", self.data_pass, 0)
        checks.whole(InvalidSpec, "data_offset", self.data_offset, 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """Any news. It is told before the step that it first holds for."""

    at_s: float
    """Seconds since 1970 by the clock of that machine; for people, nothing is computed from it."""
    state: RunState

    # Subclasses that check more call this by name: `super()` does not work in a dataclass with slots.
    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "at_s", self.at_s, None)
        checks.instance(InvalidSpec, "state", self.state, RunState)


@register
@dataclass(frozen=True, slots=True)
class TrainingStarted(Entry):
    """A run from the beginning."""

    seed: int | None = None
    """What the order of the samples follows from; None if they come from an iterable that has its own."""

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.whole(InvalidSpec, "seed", self.seed, 0, optional=True)


@register
@dataclass(frozen=True, slots=True)
class TrainingResumed(Entry):
    """A run goes on from a checkpoint. Entries of later steps that stand before this one tell of work that was lost."""

    checkpoint: str
    seed: int | None = None

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.text(InvalidSpec, "checkpoint", self.checkpoint)
        checks.whole(InvalidSpec, "seed", self.seed, 0, optional=True)


@register
@dataclass(frozen=True, slots=True)
class BatchChanged(Entry):
    """Another batch size, or the same one cut in another way."""

    before: BatchSetting
    reason: str
    predicted_gain: float | None = None
    """Goodput of the new setting over that of the old one; None if the change was not made for goodput."""

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.instance(InvalidSpec, "before", self.before, BatchSetting)
        checks.text(InvalidSpec, "reason", self.reason)
        checks.finite(InvalidSpec, "predicted_gain", self.predicted_gain, 0, optional=True)


@register
@dataclass(frozen=True, slots=True)
class ReplicasChanged(Entry):
    """Other replicas train from now on; their number may be the same."""

    before: int
    """How many there were."""
    reason: str
    """resized, or lost."""

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.whole(InvalidSpec, "before", self.before, 1)
        checks.text(InvalidSpec, "reason", self.reason)


@register
@dataclass(frozen=True, slots=True)
class LearningRateChanged(Entry):
    """The factors have moved by more than the journal lets pass in silence."""

    before: tuple[float, ...]

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        _factors("before", self.before)


@register
@dataclass(frozen=True, slots=True)
class GuardFired(Entry):
    """Training makes less progress than its predicted efficiency implies; the agent steps back towards M0.

    By its `kind`: stepped_back; or what comes before and after, suspected (M0 is tried, to compare), withdrawn, eased.
    """

    reason: str
    figures: FrozenMap[str, float] = field(default_factory=FrozenMap)
    """What the guard compared, by name."""
    kind: str = "stepped_back"

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.text(InvalidSpec, "reason", self.reason)
        checks.text(InvalidSpec, "kind", self.kind)
        checks.frozen(InvalidSpec, "figures", self.figures)
        for name, value in self.figures.items():
            checks.finite(InvalidSpec, f'figures["{name}"]', value, None)


@register
@dataclass(frozen=True, slots=True)
class OutOfMemory(Entry):
    """A pass did not fit into the memory of a GPU; the step is tried again in smaller passes."""

    tried: int
    """Examples of the pass that failed."""
    max_per_gpu_batch_size: int
    """The bound from now on."""

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.whole(InvalidSpec, "tried", self.tried, 1)
        checks.whole(InvalidSpec, "max_per_gpu_batch_size", self.max_per_gpu_batch_size, 1)


@register
@dataclass(frozen=True, slots=True)
class CheckpointSaved(Entry):
    """`state` is what the checkpoint holds; it reached the disk at `at_s`, some steps later."""

    checkpoint: str

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.text(InvalidSpec, "checkpoint", self.checkpoint)


@register
@dataclass(frozen=True, slots=True)
class TrainingFinished(Entry):
    """The loop has come to its end, or the user's code ended it early and well."""

    reason: str = ""

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.text(InvalidSpec, "reason", self.reason, may_be_empty=True)


@register
@dataclass(frozen=True, slots=True)
class TrainingStopped(Entry):
    """Somebody asked it to stop before its end: a signal, or the scheduler."""

    reason: str

    def __post_init__(self) -> None:
        Entry.__post_init__(self)
        checks.text(InvalidSpec, "reason", self.reason)


JournalEntry = (
    TrainingStarted
    | TrainingResumed
    | BatchChanged
    | ReplicasChanged
    | LearningRateChanged
    | GuardFired
    | OutOfMemory
    | CheckpointSaved
    | TrainingFinished
    | TrainingStopped
)


def surviving(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """The entries without those whose steps were lost to a crash: what a replay follows, in the order of steps."""
    kept: list[JournalEntry] = []
    for entry in entries:
        if isinstance(entry, TrainingStarted):
            kept = []
        elif isinstance(entry, TrainingResumed):
            kept = [earlier for earlier in kept if earlier.state.step <= entry.state.step]
        kept.append(entry)
    return sorted(kept, key=lambda entry: entry.state.step)


def _factors(name: str, values: object) -> None:
    if not isinstance(values, tuple):
        raise InvalidSpec(name, values, "must be a tuple of numbers", "Give one factor for each parameter group")
    for group, value in enumerate(values):
        checks.finite(InvalidSpec, f"{name}[{group}]", value, 0)
