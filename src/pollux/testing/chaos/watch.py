"""Looks at the service and at the witnesses of jobs all the time: what becomes of jobs, and how long anything hangs."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pollux.core import Phase
from pollux.errors import PolluxError
from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.witness import size_of
from pollux.wire.api import JobView

LOOK_S = 0.4
LOST_S = 20.0
RETRYING = "its next try"
"""How the service begins to say that a job pauses after a failure."""


@dataclass
class _Pulse:
    """How a job gets on."""

    folder: Path
    """Of its witnesses."""
    known_s: float
    """When the service last knew it, by the monotonic clock."""
    size: int = 0
    """Of what its witnesses have written."""
    stalled_s: float = 0.0
    """For how long they should have written something and have not."""


class Watch:
    """A thread of its own: `start`, `close`. What it has seen may be asked at any time, of jobs by their tokens.

    A job hangs while none of its processes writes anything although it holds GPUs, or could: as many are free as it
    needs, and it does not pause after a failure. That the service says something new of it, again and again, is no
    progress. All hang if nobody writes and the service says nothing new; the service, while it does not answer. That
    somebody keeps the cluster from working for some seconds is no excuse: the bound is far above that.
    """

    def __init__(self, bed: Bed) -> None:
        self.longest_hang_s = 0.0
        self.longest_hang = ""
        """What hung so long."""
        self.still_s = 0.0
        """For how long nothing at all has been heard of the jobs that have not ended, now."""
        self.changed: list[str] = []
        """Outcomes that were not the last word."""
        self.looked_s = time.monotonic()
        """When the service last answered, by the monotonic clock."""
        self._bed = bed
        self._views: dict[str, JobView] = {}
        self._ends: dict[str, JobView] = {}
        self._pulses: dict[str, _Pulse] = {}
        self._signs: tuple[object, ...] = ()
        self._moved_s = self._counted_s = time.monotonic()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-watch", daemon=True)

    def start(self) -> None:
        self.looked_s = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    # What it knows

    def expect(self, token: str, folder: Path) -> None:
        """A job that was taken, and the folder of its witnesses."""
        with self._lock:
            self._pulses.setdefault(token, _Pulse(folder, time.monotonic()))

    def view(self, token: str) -> JobView | None:
        """As the service said last."""
        with self._lock:
            return self._views.get(token)

    def end(self, token: str) -> JobView | None:
        """How it ended, as the service said first."""
        with self._lock:
            return self._ends.get(token)

    def is_over(self, token: str) -> bool:
        """Nothing more is to be expected of it."""
        return self.end(token) is not None or self.is_lost(token)

    def is_lost(self, token: str) -> bool:
        """Whether the service has not known it for so long that it will not come back."""
        with self._lock:
            return self.looked_s - self._pulses[token].known_s > LOST_S

    # The thread

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Once, now."""
        views: tuple[JobView, ...] | None = None
        free = 0
        asked_s = time.monotonic()
        with suppress(PolluxError, OSError), self._bed.client(5.0) as client:
            views, free = client.jobs(all=True).jobs, client.cluster().free_gpus
        with self._lock:
            if views is None:
                self._measure(asked_s - self.looked_s, "the service, which does not answer")
                return
            self.looked_s = asked_s
            self._views = {view.team: view for view in views}
            for view in views:
                self._note_end(view)
            self._count(free)

    def _note_end(self, view: JobView) -> None:
        before = self._ends.get(view.team)
        if before is not None and before.phase is not view.phase:
            self.changed.append(f"{view.id} ({view.team}) was {before.phase}, and then {view.phase}")
            del self._ends[view.team]
        if view.phase.is_terminal:
            self._ends.setdefault(view.team, view)

    def _count(self, free_gpus: int) -> None:
        now_s = time.monotonic()
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        signs: list[object] = []
        for token, pulse in self._pulses.items():
            view = self._views.get(token)
            if token in self._ends or view is None:  # one that nobody knows is lost, which is worse than a hang
                continue
            pulse.known_s = now_s
            size, before = size_of(pulse.folder), pulse.size
            pulse.size = size
            could = view.phase is Phase.PENDING and free_gpus >= view.min_gpus
            if size != before:
                pulse.stalled_s = 0.0
            elif (could or view.phase.holds_gpus) and not view.waits_for.startswith(RETRYING):
                pulse.stalled_s += passed_s
            self._measure(pulse.stalled_s, f"{view.id}, which is {view.phase}")
            signs.append((token, size, view.phase, view.generation, view.waits_for.startswith(RETRYING) and now_s))
        if self._signs != tuple(signs):
            self._signs, self._moved_s = tuple(signs), now_s
        self.still_s = now_s - self._moved_s if signs else 0.0
        self._measure(self.still_s, "all jobs")

    def _measure(self, seconds: float, what: str) -> None:
        if seconds > self.longest_hang_s:
            self.longest_hang_s, self.longest_hang = seconds, what
