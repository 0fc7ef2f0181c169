"""Passes that take as long as a profile says: the stopwatch of an emulated job, which also waits.

Each pass is due at a time that follows from the one before, not from when this one began: what was late is made up for
by the next ones, each of which may be cut to half. Only passes that took about what they should are measured. How far
the job is behind all the same is its slip; one that is too large ends the job, for what it tells is not true any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from pollux.agent.dealing import StepPlan
from pollux.agent.stopwatch import Stopwatch
from pollux.core import Shape
from pollux.errors import PacingSlipped

MOST_SLIP = 0.05
"""Share of the time that a job may be behind."""

LEAST_TIME_S = 10.0
"""Of fewer real seconds than these the share is not taken: one hiccup at the beginning is no slip."""

LEAST_SHARE = 0.5
"""A job that is behind cuts its passes to this share at most: no burst that would make the others late."""

ON_TIME = 0.05
"""A pass is measured if it took as long as it should, give or take this share."""


class Pace(NamedTuple):
    """How long a pass should take, in real seconds."""

    until_gradients_s: float
    """From its start until the gradients of this replica are there; what follows is synchronisation."""
    pass_s: float
    repeats: int
    """How many emulated passes it stands for."""
    compress: float
    """Emulated seconds in a real one."""


class PacedClock:
    """Real time, told as if a pass stood for itself alone."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.mark = now
        self.repeats = 1

    def seconds(self, start: float, end: float) -> float:
        return (end - start) / self.repeats


class PacedStopwatch(Stopwatch):
    """`pace` says how long a pass of a step should take. Times are told in real seconds of one emulated pass."""

    def __init__(
        self,
        gpu_type: str,
        pace: Callable[[Shape, StepPlan, int], Pace],
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._paced_clock = PacedClock(now)
        super().__init__(gpu_type, self._paced_clock, skip=0)
        self._pace = pace
        self._now = now
        self._sleep = sleep
        self._current: Pace | None = None
        """Of the pass that runs."""
        self._stretch = 1.0
        """Emulated seconds of a whole real pass, beside what is told of it."""
        self._start_s = 0.0
        self._due_s: float | None = None
        """When the last pass should have ended; None: the schedule begins with the end of the next step."""
        self._behind_s = 0.0
        self._lost_s = 0.0
        """What earlier schedules were behind when they ended."""
        self.trained_s = 0.0
        """Real seconds of all passes so far, as they should have been."""

    @property
    def slip(self) -> float:
        """Share of the time so far that the job is behind."""
        return (self._lost_s + self._behind_s) / self.trained_s if self.trained_s else 0.0

    def start_over(self) -> None:
        """Training stood still for a reason of its own: a schedule begins anew."""
        self._lost_s += self._behind_s
        self._behind_s = 0.0
        self._due_s = None

    def expect(self, shape: Shape, plan: StepPlan, index: int) -> None:
        self._current = pace = self._pace(shape, plan, index)
        self._paced_clock.repeats = pace.repeats
        self._stretch = pace.repeats * pace.compress
        self._start_s = self._now() if self._began is None else self._began

    def gradients_ready(self) -> None:
        if (pace := self._current) is not None:
            self._wait_until(self._end_s(pace) - (pace.pass_s - pace.until_gradients_s))
        super().gradients_ready()

    def end_backward(self) -> None:
        if (pace := self._current) is not None:
            self._wait_until(self._end_s(pace))
        super().end_backward()

    def end_pass(self, shape: Shape, per_gpu_batch_size: int, *, is_synchronising: bool, counts: bool) -> None:
        pace, self._current = self._current, None
        if pace is None:
            return
        now_s = self._now()
        is_on_time = abs(now_s - self._start_s - pace.pass_s) <= ON_TIME * pace.pass_s
        super().end_pass(shape, per_gpu_batch_size, is_synchronising=is_synchronising, counts=counts and is_on_time)
        self.trained_s += pace.pass_s
        if self._due_s is None:
            # The first step waits for replicas that come to it later: the schedule begins where all are together.
            self._due_s = now_s if is_synchronising else None
            return
        self._due_s += pace.pass_s
        self._behind_s = max(0.0, now_s - self._due_s)

    @property
    def is_too_slow(self) -> bool:
        return self._lost_s + self._behind_s > MOST_SLIP * max(self.trained_s, LEAST_TIME_S)

    def fail(self) -> NoReturn:
        """On all replicas at once: the job is behind its pace, though maybe not this replica's part of it."""
        raise PacingSlipped(self.slip, self.trained_s, MOST_SLIP)

    def pacing(self) -> tuple[float, float]:
        """(seconds behind, seconds trained) so far, for those who go on from here."""
        return self._lost_s + self._behind_s, self.trained_s

    def go_on(self, behind_s: float, trained_s: float) -> None:
        """From what `pacing` told, of the replicas that trained before."""
        self._lost_s, self._behind_s, self.trained_s = behind_s, 0.0, trained_s

    def typical_step_s(self, passes: int = 1) -> float | None:
        """In emulated seconds of a whole real step: what is to happen every so often does so there."""
        found_s = super().typical_step_s(passes)
        return None if found_s is None else found_s * self._stretch

    def _end_s(self, pace: Pace) -> float:
        """When the pass that runs should end."""
        if self._due_s is None:
            return self._start_s + pace.pass_s
        return max(self._due_s + pace.pass_s, self._start_s + LEAST_SHARE * pace.pass_s)

    def _wait_until(self, moment_s: float) -> None:
        if (left_s := moment_s - self._now()) > 0.0:
            self._sleep(left_s)
