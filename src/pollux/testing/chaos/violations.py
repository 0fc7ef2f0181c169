"""What a campaign may find broken, and under which figure it counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    LOST_JOB = "jobs lost"
    WRONG_OUTCOME = "wrong outcomes"
    WRONG_SAMPLES = "samples wrong"
    ORPHAN = "orphans"
    HANG = "hangs"
    NO_RECOVERY = "failed recoveries"
    WRONG_STATE = "wrong states"


@dataclass(frozen=True, slots=True)
class Violation:
    kind: Kind
    sentence: str
    count: int = 1
    """How many samples, where that is what was found."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"
