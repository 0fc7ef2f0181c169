"""What the replicas of a live job print, as one stream: the main one's by default, going over to the next when it ends.

The main replica is the oldest that lives: replicas are numbered by age, and ranks go by age, too. Scripts that print on
every replica must not seem to repeat themselves where the next one takes over: what it was seen to print long before
is left out, and of the rest the lines that it begins with and that were shown already. That holds only for replicas
that lived at the same time. One that was started afterwards, as for another try, does print its lines again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from pollux.wire.api import LogFile

if TYPE_CHECKING:
    from pollux.cli.finding import Link
    from pollux.wire.nodes import LogPart
    from pollux.wire.service_client import ServiceClient

PART_BYTES = 1 << 18
TAIL_BYTES = 1 << 18
"""Where the last lines are looked for."""
OVERLAP_S = 5.0
"""A replica that leaves has ended so many seconds after another took over, at the latest."""
MAX_RECENT = 5000
"""Lines that are remembered, so that they are not shown again."""
SAME_TIME_S = 1.0
"""Replicas that fall silent together have ended together."""

Show: TypeAlias = Callable[[LogFile, bool, str], None]
"""Called with a replica, whether it is the main one, and text: whole lines, unless it is the main one."""


@dataclass(slots=True)
class _Log:
    file: LogFile
    offset: int = 0
    rest: str = ""
    """A line that has no end yet."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """When it was seen to be how large; what is older than needed is dropped."""
    alive: tuple[int, int] | None = None
    """The first and the last look at which it ran."""

    @property
    def has_more(self) -> bool:
        return self.file.size > self.offset

    def see(self, file: LogFile, now_s: float, look: int) -> None:
        self.file = file
        if file.is_running:
            self.alive = (look if self.alive is None else self.alive[0], look)
        self.sizes.append((now_s, file.size))
        while len(self.sizes) > 1 and self.sizes[1][0] <= now_s - OVERLAP_S:
            del self.sizes[0]

    def lived_beside(self, other: _Log) -> bool:
        """Whether both are known to have run at the same time: they were seen to, or were started together."""
        if number(self.file.replica)[:1] == number(other.file.replica)[:1]:
            return True
        if self.alive is None or other.alive is None:
            return False
        return max(self.alive[0], other.alive[0]) <= min(self.alive[1], other.alive[1])

    def size_before(self, now_s: float) -> int:
        """How large it was a while ago; 0 if nobody knows."""
        at_s, size = self.sizes[0]
        return size if at_s <= now_s - OVERLAP_S else 0


class JobOutput:
    """Reads what is new whenever `show` is called."""

    def __init__(
        self, link: Link, job: str, show: Show, *, everything: bool = False, replica: str | None = None
    ) -> None:
        """`everything`: of all replicas; `replica`: of that one alone."""
        self._link = link
        self._job = job
        self._show = show
        self._everything = everything
        self._replica = replica
        self._logs: dict[tuple[str, str], _Log] = {}
        self._looks = 0
        self._main: _Log | None = None
        self._line = ""
        """What was shown of a line of the main replica that has no end yet."""
        self._recent: deque[str] = deque(maxlen=MAX_RECENT)
        """Lines of the main replica."""
        self._repeated: frozenset[str] = frozenset()
        """Lines of the last one, until this one prints another."""

    @property
    def replicas(self) -> tuple[str, ...]:
        """Those that have printed, or could have."""
        return tuple(log.file.replica for log in self._by_age())

    def skip_to_tail(self, lines: int) -> None:
        """Show the last lines only. To be called before `show`."""
        self._look()
        logs = self._by_age()
        if not self._everything and self._replica is None:
            living = [log for log in logs if log.file.is_running]
            self._main = living[0] if living else max(logs, key=lambda log: log.file.modified_at_s, default=None)
            logs = [] if self._main is None else [self._main]
        for log in logs:
            log.offset = max(0, log.file.size - TAIL_BYTES)
            is_cut = log.offset > 0
            text = "".join(self._read(log))
            whole = text.splitlines(keepends=True)[1 if is_cut else 0 :]
            self._tell(log, "".join(whole[max(0, len(whole) - lines) :]))

    def show(self) -> bool:
        """Show what is new; False if that was nothing."""
        self._look()
        has_shown = False
        for log in self._wanted():
            for text in self._read(log):
                has_shown = True
                self._tell(log, text)
            if not log.file.is_running:
                self._finish_line(log)
        return has_shown

    def finish(self) -> None:
        """The job has ended: show all that is left."""
        while self.show():
            pass
        for log in self._logs.values():
            self._finish_line(log)

    # Which logs

    def _look(self) -> None:
        now_s = time.monotonic()
        self._looks += 1
        found = self._link.ask(lambda client: client.logs(self._job)).logs
        here = {(file.node, file.replica): file for file in found}
        for key, file in here.items():
            self._logs.setdefault(key, _Log(file)).see(file, now_s, self._looks)

    def _wanted(self) -> Sequence[_Log]:
        logs = self._by_age()
        if self._replica is not None:
            return [log for log in logs if log.file.replica == self._replica]
        while self._main is None or not (self._main.file.is_running or self._main.has_more):
            successor = self._successor(logs)
            if successor is None:
                break
            if self._main is not None:
                self._finish_line(self._main)
                self._repeated = frozenset()
                if not self._everything and successor.lived_beside(self._main):
                    successor.offset = successor.size_before(time.monotonic())
                    self._repeated = frozenset(self._recent)
                self._recent.clear()
            self._main = successor
        if self._everything:
            return logs
        return [] if self._main is None else [self._main]

    def _successor(self, logs: Sequence[_Log]) -> _Log | None:
        """The next main replica: one that lives, or that went on printing after the last one had ended."""
        if self._main is None:
            return logs[0] if logs else None
        last = self._main.file
        for log in logs:
            is_later = log.file.is_running or log.file.modified_at_s > last.modified_at_s + SAME_TIME_S
            if number(log.file.replica) > number(last.replica) and is_later:
                return log
        return None

    def _by_age(self) -> list[_Log]:
        return sorted(self._logs.values(), key=lambda log: (number(log.file.replica), log.file.node))

    # Their text

    def _read(self, log: _Log) -> list[str]:
        texts = []
        while log.has_more:
            part = self._link.ask(partial(self._part, log.file, log.offset))
            log.offset = part.next_offset
            if not part.text:
                break  # the half of a letter
            texts.append(part.text)
        return texts

    def _part(self, file: LogFile, offset: int, client: ServiceClient) -> LogPart:
        return client.read_log(self._job, file.node, file.replica, offset, PART_BYTES)

    def _tell(self, log: _Log, text: str) -> None:
        text = log.rest + text
        if log is not self._main and self._replica is None:
            end = text.rfind("\n") + 1
            log.rest = text[end:]
            if end:
                self._show(log.file, False, text[:end])
            return
        log.rest = ""
        if self._repeated:
            text = self._without_repeated(log, text)
        *whole, self._line = f"{self._line}{text}".split("\n")
        self._recent.extend(whole)
        if text:
            self._show(log.file, True, text)

    def _without_repeated(self, log: _Log, text: str) -> str:
        """What the last main replica printed as well is left out, up to the first line that it did not print."""
        while (end := text.find("\n") + 1) and text[: end - 1] in self._repeated:
            text = text[end:]
        if end:
            self._repeated = frozenset()
            return text
        log.rest = text
        return ""

    def _finish_line(self, log: _Log) -> None:
        if log is not self._main and self._replica is None:
            if log.rest:
                text, log.rest = f"{log.rest}\n", ""
                self._show(log.file, False, text)
            return
        text, log.rest = log.rest, ""
        if self._line or text:
            self._line = ""
            self._show(log.file, True, f"{text}\n")


def number(replica: str) -> tuple[int, ...]:
    """Its age by its name, GENERATION-NUMBER: another home of the job, as after a pause, counts from 1 again."""
    return tuple(int(part) for part in replica.split("-") if part.isdecimal())
