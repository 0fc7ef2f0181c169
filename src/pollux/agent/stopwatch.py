"""How long passes take: seconds and counts by (shape, m), as the throughput model is fitted to (docs/goodput.md).

A pass lasts from the moment its micro-batch is asked for until the loop's body is over, so waiting for data, the user's
own code and the optimizer step are part of it. What does not tell the speed of training is left out: warm-up, what
follows an interruption of the loop, and single passes in which something else happened.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pollux.agent.dealing import StepPlan
from pollux.core import FrozenMap, Observation, ObservationKey, Profile, Shape
from pollux.core.codec import decode, encode
from pollux.errors import InvalidSpec

OUTLIER_FACTOR = 5.0
"""A pass so many times slower than the median of its kind held something else: an evaluation, a checkpoint."""

FIRST_FEW = 5
"""Passes of a kind that are judged together, as soon as there is a median to judge by."""

WINDOW = 32
"""Passes that the running median is taken over; outliers are among them, so a lasting slowdown is soon believed …"""

REFRESH = 16
"""… and after so many passes it is taken again."""

LONGEST_QUEUE = 256
"""Passes that may wait for the device to finish them; it is never this far behind while training goes on."""


class PassClock(Protocol):
    """Where a device stands in time. A mark is opaque to its user; taking and reading one never waits."""

    def mark(self) -> Any:
        """The moment at which the device has done all that it was given so far."""
        ...

    def seconds(self, start: Any, end: Any) -> float | None:
        """From one mark to a later one; None as long as the device has not come to both."""
        ...


class HostClock:
    """For devices that have finished when a call returns: the processor."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark = now

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class CudaClock:
    """For GPUs, which run behind the host: events on the current stream, read once the device has come to them."""

    def __init__(self, new_event: Callable[[], CudaEvent] | None = None) -> None:
        if new_event is None and not torch.cuda.is_available():
            raise InvalidSpec("clock", "CudaClock", "there is no CUDA device here", "Use HostClock()")
        self._new_event = new_event or _timing_event

    def mark(self) -> CudaEvent:
        event = self._new_event()
        event.record()
        return event

    def seconds(self, start: CudaEvent, end: CudaEvent) -> float | None:
        return start.elapsed_time(end) / 1000.0 if end.query() and start.query() else None


def _timing_event() -> CudaEvent:
    event: CudaEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class _Tally:
    """Passes of one kind: sums of those that count, and the recent ones, to know what is usual."""

    __slots__ = ("_limit_s", "_until_refresh", "count", "early", "left_out", "recent", "sync_s", "total_s")

    def __init__(self) -> None:
        self.total_s = 0.0
        self.sync_s = 0.0
        self.count = 0
        self.left_out = 0
        self.early: list[tuple[float, float]] | None = []
        """The first few passes, not yet in the sums; None once they are."""
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self._limit_s = 0.0
        self._until_refresh = REFRESH

    def add(self, pass_s: float, sync_s: float) -> None:
        self.recent.append(pass_s)
        if self.early is not None:
            self.early.append((pass_s, sync_s))
            if len(self.early) == FIRST_FEW:
                self._judge_early()
            return
        self._until_refresh -= 1
        if self._until_refresh == 0:
            self._limit_s, self._until_refresh = self._limit(), REFRESH
        if pass_s > self._limit_s:
            self.left_out += 1
            return
        self.total_s += pass_s
        self.sync_s += sync_s
        self.count += 1

    def sums(self) -> tuple[float, int, float]:
        """(seconds, passes, seconds of synchronisation), the first few judged by what is known of them so far."""
        if not self.early:
            return self.total_s, self.count, self.sync_s
        limit_s = self._limit()
        usual = [one for one in self.early if one[0] <= limit_s]
        return math.fsum(one[0] for one in usual), len(usual), math.fsum(one[1] for one in usual)

    def median_s(self) -> float | None:
        return sorted(self.recent)[len(self.recent) // 2] if self.recent else None

    def _limit(self) -> float:
        return OUTLIER_FACTOR * (self.median_s() or 0.0)

    def _judge_early(self) -> None:
        assert self.early is not None
        self._limit_s = self._limit()
        self.total_s, self.count, self.sync_s = self.sums()
        self.left_out = len(self.early) - self.count
        self.early = None


class _Record:
    """The two kinds of passes under one key; a synchronising pass may take many times as long as the other kind."""

    __slots__ = ("accumulating", "synchronising")

    def __init__(self) -> None:
        self.accumulating = _Tally()
        self.synchronising = _Tally()

    def observation(self) -> Observation | None:
        """None as long as nothing counts."""
        accum_s, accum_count, _ = self.accumulating.sums()
        pass_s, count, sync_s = self.synchronising.sums()
        return Observation(accum_s, accum_count, pass_s, sync_s, count) if accum_count or count else None


class Stopwatch:
    """Times every pass of one replica. Used by the training thread only; costs about 2 µs a pass.

    Left out are the first `skip` passes after each change of (shape, m), the first after an interruption, and passes
    five times slower than the median of their kind. Without `gradients_ready` the time of synchronisation is unknown
    and counts as computing.
    """

    def __init__(self, gpu_type: str, clock: PassClock, skip: int = 2) -> None:
        self.gpu_type = gpu_type
        self.lost = 0
        """Passes given up because the device did not report their end."""
        self._skip = skip
        self._mark = clock.mark
        self._seconds = clock.seconds
        self._before = Profile()
        """What was loaded."""
        self._records: dict[ObservationKey, _Record] = {}
        self._unread: deque[tuple[_Tally, Any, Any, Any, Any]] = deque()
        self._shape: Shape | None = None
        self._per_gpu_batch_size = 0
        self._record = _Record()
        self._cold = skip
        """Passes still to be left out."""
        self._began: Any = None
        self._ready: Any = None
        self._averaged: Any = None

    def begin_pass(self) -> None:
        """The loader is about to fetch a micro-batch."""
        self._ready = self._averaged = None
        self._began = self._mark()

    def expect(self, shape: Shape, plan: StepPlan, index: int) -> None:
        """The micro-batch is there: pass `index` of that step. Who only measures learns that at its end."""

    def gradients_ready(self) -> None:
        """Inside the backward of a synchronising pass: the last gradient of this replica is there."""
        self._ready = self._mark()

    def end_backward(self) -> None:
        """The backward returned: the gradients are averaged. Only after `gradients_ready` is there anything to time."""
        if self._ready is not None:
            self._averaged = self._mark()

    def end_pass(self, shape: Shape, per_gpu_batch_size: int, *, is_synchronising: bool, counts: bool) -> None:
        """The loop's body is over for this micro-batch.

        `per_gpu_batch_size` is the configuration's, also where this slice is one example smaller. Pass counts=False
        for a pass that is not like the others (a measured step, an uneven tail): it is as if it had not been.
        """
        began, self._began = self._began, None
        if began is None or not counts:
            return
        if per_gpu_batch_size != self._per_gpu_batch_size or (shape is not self._shape and shape != self._shape):
            self._turn_to(shape, per_gpu_batch_size)
        if self._cold:
            self._cold -= 1
            return
        if is_synchronising:
            averaged = self._averaged if shape.num_gpus > 1 else None
            self._unread.append((self._record.synchronising, began, self._mark(), self._ready, averaged))
        else:
            self._unread.append((self._record.accumulating, began, self._mark(), None, None))
        self._read()

    def interrupt(self) -> None:
        """The loop was left, for a validation, a checkpoint or the end of an epoch: the next pass is warm-up again."""
        self._began = None
        self._cold = max(self._cold, 1)

    def profile(self) -> Profile:
        """All that was measured, what was loaded included."""
        self._read()
        merged = dict(self._before.of_type(self.gpu_type))
        for key, record in self._records.items():
            seen = record.observation()
            if seen is not None:
                merged[key] = merged[key].merge(seen) if key in merged else seen
        return (
            Profile(self._before.observations.with_item(self.gpu_type, FrozenMap(merged))) if merged else self._before
        )

    @property
    def left_out(self) -> int:
        """How many passes were too slow to be training alone."""
        tallies = (tally for one in self._records.values() for tally in (one.accumulating, one.synchronising))
        return sum(tally.left_out for tally in tallies)

    def typical_step_s(self, passes: int = 1) -> float | None:
        """Median seconds of recent steps of so many passes, at the shape and m in use; None before the first."""
        synchronising_s = self._record.synchronising.median_s()
        if synchronising_s is None:
            return None
        accumulating_s = self._record.accumulating.median_s()
        return synchronising_s + (passes - 1) * (synchronising_s if accumulating_s is None else accumulating_s)

    def state(self) -> Any:
        """The profile as plain data, for a checkpoint."""
        return encode(self.profile())

    def load(self, state: Any) -> None:
        """Go on from what `state` gave, instead of what was measured here. The GPU type stays that of this replica."""
        self._before = decode(state, Profile)
        self._records.clear()
        self._unread.clear()
        self._shape, self._record, self._cold = None, _Record(), self._skip

    def _turn_to(self, shape: Shape, per_gpu_batch_size: int) -> None:
        key = ObservationKey(shape, per_gpu_batch_size)
        self._shape, self._per_gpu_batch_size = shape, per_gpu_batch_size
        self._cold = max(self._cold, self._skip)
        self._record = self._records.setdefault(key, _Record())

    def _read(self) -> None:
        """Take in the passes that the device has finished, in their order."""
        unread, seconds = self._unread, self._seconds
        while unread:
            tally, began, ended, ready, averaged = unread[0]
            pass_s = seconds(began, ended)
            sync_s = 0.0 if averaged is None else seconds(ready, averaged)
            if pass_s is None or sync_s is None:
                break
            unread.popleft()
            tally.add(pass_s, min(max(sync_s, 0.0), pass_s))
        if len(unread) > LONGEST_QUEUE:
            unread.popleft()
            self.lost += 1
