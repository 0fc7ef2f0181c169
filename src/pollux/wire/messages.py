"""What the agent of a job tells the scheduler, and how a message becomes bytes and back.

The bytes are a document of core's codec, which names its type and schema version. Both ends refuse what is larger
than `MAX_MESSAGE_BYTES` before they look into it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import TypeVar

from pollux.core import JobId, JobModel, JobReported, Profile, checks, dumps, loads, register
from pollux.errors import InvalidDocument, InvalidSpec
from pollux.wire.entries import Entry, JournalEntry, RunState

T = TypeVar("T")

MAX_MESSAGE_BYTES = 4 * 2**20
"""A profile with ten thousand observations stays below."""


@register
@dataclass(frozen=True, slots=True)
class AgentReport:
    """How a job stands. Each report replaces the one before; only `notices` add up."""

    job: JobId
    generation: int
    sent_at_s: float
    """Seconds since 1970 by the clock of the job's machine."""
    state: RunState
    profile: Profile | None = None
    """All that was measured so far; None: nothing new."""
    model: JobModel | None = None
    loss: float | None = None
    """Smoothed, over all replicas. None before the first, and when it is not a finite number: see `finite`."""
    throughput: float | None = None
    """Measured examples a second."""
    efficiency: float | None = None
    goodput: float | None = None
    """Useful examples a second: throughput × efficiency."""
    noise_scale: float | None = None
    """In examples."""
    notices: tuple[JournalEntry, ...] = ()
    """News since the last report that arrived, oldest first. After a lost answer some come twice, equal in all."""
    notices_dropped: int = 0
    """How many, since the agent started, it could neither deliver nor keep."""

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "job", self.job)
        checks.whole(InvalidSpec, "generation", self.generation, 1)
        checks.finite(InvalidSpec, "sent_at_s", self.sent_at_s, None)
        checks.instance(InvalidSpec, "state", self.state, RunState)
        checks.instance(InvalidSpec, "profile", self.profile, Profile, optional=True)
        checks.instance(InvalidSpec, "model", self.model, JobModel, optional=True)
        checks.finite(InvalidSpec, "loss", self.loss, None, optional=True)
        checks.finite(InvalidSpec, "throughput", self.throughput, 0, optional=True)
        checks.finite(InvalidSpec, "efficiency", self.efficiency, 0, optional=True)
        checks.finite(InvalidSpec, "goodput", self.goodput, 0, optional=True)
        checks.finite(InvalidSpec, "noise_scale", self.noise_scale, 0, optional=True)
        if not isinstance(self.notices, tuple):
            raise InvalidSpec("notices", self.notices, "must be a tuple of journal entries", "Give tuple(notices)")
        for position, notice in enumerate(self.notices):
            checks.instance(InvalidSpec, f"notices[{position}]", notice, Entry)
        checks.whole(InvalidSpec, "notices_dropped", self.notices_dropped, 0)

    def as_event(self, cause: str = "") -> JobReported:
        """What the scheduler hears of it. The model takes over the progress of the report, which is newer."""
        model = None if self.model is None else replace(self.model, progress=self.state.progress)
        return JobReported(self.job, self.generation, self.profile, model, cause=cause)


def finite(value: float | None) -> float | None:
    """The number, or None for what no message may carry: a loss that has become infinite or not a number."""
    return value if value is not None and isfinite(value) else None


def pack(message: object) -> bytes:
    """The message as a document; `InvalidDocument` if it is too large to be read."""
    return _of_readable_size(dumps(message).encode("ascii"))


def unpack(body: bytes, expected: type[T]) -> T:
    """The opposite of `pack`; `InvalidDocument` for everything else. A server still has to stop reading in time."""
    return loads(_of_readable_size(body), expected)


def _of_readable_size(body: bytes) -> bytes:
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidDocument(
            "message", f"{len(body)} bytes", f"larger than {MAX_MESSAGE_BYTES} bytes", "Send less in one message"
        )
    return body
