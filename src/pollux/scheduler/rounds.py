"""When the next round is due: each interval, and sooner if GPUs lie idle while somebody waits for some.

A rule without a clock: whoever drives the scheduler says what time it is, by any clock that does not go back.
"""

from __future__ import annotations

import heapq

from pollux.core import (
    Event,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobRecovered,
    JobRescaled,
    JobResumed,
    JobStopped,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Phase,
    ReplicasReady,
)
from pollux.scheduler.state import SchedulerState

CHANGES = (
    JobSubmitted,
    JobRecovered,
    JobResumed,
    JobRescaled,
    NodeJoined,
    NodeLost,
    JobStopped,
    JobFinished,
    JobFailed,
    GenerationAbandoned,
    ReplicasReady,
)
"""After these somebody new may wait, or GPUs may have become free."""


class RoundTimes:
    """The interval counts from the last round, whatever that came for; the first round is due at once."""

    def __init__(self, interval_s: float, early_gap_s: float, gather_s: float, now_s: float) -> None:
        """`early_gap_s`: from any round to one that does not wait for the interval, at least. `gather_s`: what comes
        within so many seconds is planned together."""
        self._interval_s = interval_s
        self._early_gap_s = early_gap_s
        self._gather_s = gather_s
        self._last_s = now_s - interval_s
        self._wanted_s: list[float] = []
        """When rounds before the interval's end are wanted; the next one of them first."""

    @property
    def next_s(self) -> float:
        """When the next round is due, if nothing else happens before."""
        at_s = self._last_s + self._interval_s
        return min(at_s, self._wanted_s[0]) if self._wanted_s else at_s

    def note(self, event: Event, state: SchedulerState, now_s: float) -> None:
        """The scheduler has taken an event in: a round may be worth its while before the interval is over."""
        if isinstance(event, CHANGES) and is_somebody_waiting(state):
            self.hurry(0.0, now_s)

    def hurry(self, delay_s: float, now_s: float) -> None:
        """Have one as soon as may be after so many seconds."""
        wanted_s = max(now_s + delay_s + self._gather_s, self._last_s + self._early_gap_s)
        if not self._wanted_s or wanted_s < self._wanted_s[0] or delay_s > 0:
            heapq.heappush(self._wanted_s, wanted_s)

    def begin(self, now_s: float) -> None:
        """A round begins now: it serves all who wanted one by now."""
        self._last_s = now_s
        while self._wanted_s and self._wanted_s[0] <= now_s:
            heapq.heappop(self._wanted_s)


def is_somebody_waiting(state: SchedulerState) -> bool:
    """Whether there are a free GPU and a job that has none and may have some now."""
    waiting = any(
        job.phase is Phase.PENDING and job.id not in state.target and (job.retry_at_s or 0.0) <= state.time_s
        for job in state.jobs.values()
    )
    return waiting and num_free(state) > 0


def num_free(state: SchedulerState) -> int:
    """GPUs that nobody holds, on nodes that take jobs."""
    held = sum(job.occupied.num_gpus for job in state.jobs.values())
    return max(0, state.cluster.num_gpus - held)
