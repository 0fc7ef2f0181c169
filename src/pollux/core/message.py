"""What events and actions have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.core import checks
from pollux.core.ids import JobId
from pollux.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class Caused:
    """Any event or action."""

    cause: str = field(default="", kw_only=True)
    """Free text or an id that leads back to the reason: a request, a round, a signal."""


@dataclass(frozen=True, slots=True)
class OfGeneration(Caused):
    """About the replicas of one generation of a job; late ones are known by their number."""

    job: JobId
    generation: int

    # Subclasses that check more call this by name: `super()` does not work in a dataclass with slots.
    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "job", self.job)
        checks.whole(InvalidSpec, "generation", self.generation, 1)
