"""When the next round is due: each interval, and sooner if GPUs lie idle while somebody waits for some."""

from __future__ import annotations

import asyncio
import heapq
import time

from pollux.core import (
    Event,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
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


class Rounds:
    """The timer. Its clock is the machine's monotonic one."""

    def __init__(self, interval_s: float, gather_s: float, early_gap_s: float) -> None:
        self._interval_s = interval_s
        self._gather_s = gather_s
        self._early_gap_s = early_gap_s
        self._last_s = time.monotonic() - interval_s  # the first one is due at once
        self._early_s: list[float] = []
        """When rounds before the interval's end are wanted; the next one of them first."""
        self._changed = asyncio.Event()

    def note(self, event: Event, state: SchedulerState) -> None:
        """Something happened: a round may be worth its while before the interval is over."""
        if isinstance(event, CHANGES) and is_somebody_waiting(state):
            self.hurry(0.0)

    def hurry(self, delay_s: float) -> None:
        """Have one as soon as may be after so many seconds."""
        now_s = time.monotonic()
        wanted_s = max(now_s + delay_s + self._gather_s, self._last_s + self._early_gap_s)
        if not self._early_s or wanted_s < self._early_s[0] or delay_s > 0:
            heapq.heappush(self._early_s, wanted_s)
            self._changed.set()

    async def due(self) -> None:
        """Returns when a round is due, and counts it."""
        while True:
            at_s = self._last_s + self._interval_s
            if self._early_s:
                at_s = min(at_s, self._early_s[0])
            now_s = time.monotonic()
            left_s = at_s - now_s
            if left_s <= 0:
                self._last_s = now_s
                while self._early_s and self._early_s[0] <= now_s:
                    heapq.heappop(self._early_s)
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                pass


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
