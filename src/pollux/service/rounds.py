"""Waiting for rounds: the rule of `scheduler.rounds` on the machine's clock."""

from __future__ import annotations

import asyncio
import time

from pollux.core import Event
from pollux.scheduler import SchedulerState
from pollux.scheduler.rounds import RoundTimes


class Rounds:
    """The timer. Its clock is the machine's monotonic one."""

    def __init__(self, interval_s: float, gather_s: float, early_gap_s: float) -> None:
        self._times = RoundTimes(interval_s, early_gap_s, gather_s, time.monotonic())
        self._changed = asyncio.Event()

    def note(self, event: Event, state: SchedulerState) -> None:
        """Something happened: a round may be worth its while before the interval is over."""
        before_s = self._times.next_s
        self._times.note(event, state, time.monotonic())
        self._wake_if_sooner(before_s)

    def hurry(self, delay_s: float) -> None:
        """Have one as soon as may be after so many seconds."""
        before_s = self._times.next_s
        self._times.hurry(delay_s, time.monotonic())
        self._wake_if_sooner(before_s)

    async def due(self) -> None:
        """Returns when a round is due, and counts it."""
        while (left_s := self._times.next_s - time.monotonic()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        self._times.begin(time.monotonic())

    def _wake_if_sooner(self, than_s: float) -> None:
        if self._times.next_s < than_s:
            self._changed.set()
