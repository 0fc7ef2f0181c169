"""Sends the job's reports from a thread of its own: whatever the receiver does, training does not notice.

What waits is bounded: one report, the newest, and a fixed number of notices, the newest again. While the receiver is
away the pauses between tries double from 1 s to 60 s; if it says that it will never listen, the reporter falls silent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from pollux.errors import Permanent, PolluxError, Temporary
from pollux.wire.entries import JournalEntry
from pollux.wire.messages import AgentReport

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LAST_PAUSE_S = 0.05
"""Between the tries of a reporter that is being closed: the script waits for them."""
MAX_NOTICES = 256
"""About 200 kB as JSON; a job that loses contact for days keeps its last ones, and the journal has them all."""


class Reporter:
    """`send` and `note` may be called from any thread, return at once and never raise.

    `post` delivers one report or raises: `Temporary` (it is tried again), `Permanent` (nothing is tried again), any
    other exception (that report is given up). Without it there is no thread and nothing happens. `pause` waits for so
    many seconds, or less once the reporter is closed; tests replace it.
    """

    def __init__(
        self,
        post: Callable[[AgentReport], None] | None,
        *,
        max_notices: int = MAX_NOTICES,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._lock = threading.Condition()  # never held while posting
        self._report: AgentReport | None = None
        self._is_news = False
        self._notices: deque[JournalEntry] = deque()
        self._max_notices = max_notices
        self._dropped = 0
        self._closing = threading.Event()
        self._until_s = 0.0
        """Once it is closed: how long it tries."""
        self._pause = self._closing.wait if pause is None else pause
        self._thread: threading.Thread | None = None
        if post is not None:
            self._thread = threading.Thread(target=self._run, args=(post,), name="pollux-reporter", daemon=True)
            self._thread.start()

    def send(self, report: AgentReport) -> None:
        """Let this report go out next, in place of one that still waits."""
        with self._lock:
            if not self.is_silent:
                self._keep(report.notices)
                self._report = replace(report, notices=())
                self._is_news = True
                self._lock.notify()

    def note(self, entry: JournalEntry) -> None:
        """Let this entry go along with the next report."""
        with self._lock:
            if not self.is_silent:
                self._keep((entry,))

    def close(self, timeout_s: float) -> None:
        """Deliver what waits, trying for no longer than that; may be called again."""
        with self._lock:
            if not self._closing.is_set():
                self._until_s = time.monotonic() + timeout_s
            self._closing.set()
            self._is_news |= bool(self._notices)
            self._lock.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.info("The last report was not taken within %g s and is given up.", timeout_s)

    @property
    def is_silent(self) -> bool:
        """There is nobody to report to: none was given, the reporter is closed, or it was told not to come back."""
        return self._thread is None or self._closing.is_set()

    @property
    def notices_dropped(self) -> int:
        """How many notices found no room, or went down with a report that was refused."""
        return self._dropped

    def _run(self, post: Callable[[AgentReport], None]) -> None:
        pause_s = FIRST_PAUSE_S
        has_complained = False
        is_last = False
        while not is_last:
            with self._lock:
                self._lock.wait_for(lambda: self._is_news or self._closing.is_set())
                is_last = self._closing.is_set()
                report = self._take()
            if report is None:
                return
            try:
                post(report)
            except Temporary as error:
                self._take_back(report)
                if is_last:
                    if time.monotonic() + LAST_PAUSE_S >= self._until_s:
                        log.warning("The last report of job %s did not arrive. %s", report.job, error.args[0])
                        return
                    is_last = False  # a short job may be over before its connection stands
                    time.sleep(LAST_PAUSE_S)
                    continue
                if pause_s == FIRST_PAUSE_S:
                    log.warning("Reports of job %s do not arrive; training goes on. %s", report.job, error)
                self._pause(min(max(pause_s, error.retry_after_s), LONGEST_PAUSE_S))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            except Permanent as error:
                log.warning("No more reports of job %s are sent; training goes on. %s", report.job, error)
                self._fall_silent()
                return
            except Exception as error:
                if not has_complained:
                    trace = None if isinstance(error, PolluxError) else error
                    log.warning("A report was given up, which is said only once: %s", error, exc_info=trace)
                has_complained = True
                with self._lock:
                    self._dropped += len(report.notices)
            else:
                if pause_s > FIRST_PAUSE_S:
                    log.info("Reports of job %s arrive again.", report.job)
            pause_s = FIRST_PAUSE_S

    def _take(self) -> AgentReport | None:
        """What is to be sent now, with all the notices; None if there is nothing new. Needs the lock."""
        if not self._is_news or self._report is None:
            return None
        notices = tuple(self._notices)
        self._notices.clear()
        self._is_news = False
        return replace(self._report, notices=notices, notices_dropped=self._dropped)

    def _take_back(self, report: AgentReport) -> None:
        """It did not arrive: the report itself gives way to a newer one, its notices go in front of later ones."""
        with self._lock:
            later = tuple(self._notices)
            self._notices.clear()
            self._keep((*report.notices, *later))
            self._is_news = True

    def _keep(self, notices: Iterable[JournalEntry]) -> None:
        """Append; the oldest make room. Needs the lock."""
        self._notices.extend(notices)
        while len(self._notices) > self._max_notices:
            self._notices.popleft()
            self._dropped += 1

    def _fall_silent(self) -> None:
        with self._lock:
            self._closing.set()
            self._is_news = False
            self._report = None
            self._notices.clear()
