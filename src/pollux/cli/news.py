"""Which events are news: not every round moves a job, and not every step of a learning rate is worth a line."""

from __future__ import annotations

from typing import Any

from pollux.wire.api import EventView

ROUTINE = frozenset({"RoundDue", "JobReported"})
LEAVING = frozenset({"JobStopped", "JobFailed", "JobFinished"})
"""After them a job holds nothing, and the next plan that gives it the same is news."""
WORTH_TELLING = 1.1
"""By what a learning rate changes at least, since it was told last."""


def unfiltered(event: EventView) -> bool:
    return True


class News:
    """Told all events in their order, it says of each whether it changes something that one sees."""

    def __init__(self) -> None:
        self._factors: dict[str, list[float]] = {}
        """Of each job, as told last."""
        self._placed: dict[str, object] | None = None
        """What the last plan gave to whom; None: it is not known."""

    def __call__(self, event: EventView) -> bool:
        detail: Any = event.detail
        if event.sequence == 1:
            self._placed = {}
        match event.kind:
            case "PlanMade":
                before, self._placed = self._placed, dict(detail["plan"]["allocations"])
                return before is not None and self._placed != before
            case "LearningRateChanged":
                told = self._factors.setdefault(event.job, list(detail["before"]))
                now = list(detail["state"]["learning_rate_factors"])
                if not _is_far(told, now):
                    return False
                self._factors[event.job] = now
            case kind if kind in LEAVING and self._placed is not None:
                self._placed.pop(event.job, None)
        return event.kind not in ROUTINE


def _is_far(before: list[float], now: list[float]) -> bool:
    if len(before) != len(now):
        return True
    return any(max(a, b) >= WORTH_TELLING * min(a, b) for a, b in zip(before, now, strict=True) if a != b)
