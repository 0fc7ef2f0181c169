"""What a fault is, and the scene that it falls upon. The faults themselves are in `faults_*.py`."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.jobs import Crew
from pollux.testing.chaos.processes import Process, Role
from pollux.testing.chaos.quick import HANG_AFTER_S
from pollux.testing.chaos.violations import Violation
from pollux.testing.chaos.watch import Watch

T = TypeVar("T")

FIND_S = 6.0
"""So long a fault waits for somebody whom it can befall."""
BRIEFLY_S = (0.3, 2.0)
FOR_LONG_S = (HANG_AFTER_S + 1.0, HANG_AFTER_S + 4.0)
"""Longer than a replica may be silent."""


class NotNow(Exception):  # noqa: N818 - reads as what it says
    """The fault does not fall: there is nobody whom it could befall, or it needs what is not here."""


@dataclass
class Scene:
    """All that a fault may use. `draw` is its own, so that what it does does not depend on the faults before."""

    bed: Bed
    crew: Crew
    watch: Watch
    draw: random.Random = field(default_factory=random.Random)
    violations: list[Violation] = field(default_factory=list)
    backups: list[Path] = field(default_factory=list)
    may_refuse_log: bool = False
    """The log was damaged so that the service may refuse it, with a sentence that says what to do."""
    _timers: list[threading.Timer] = field(default_factory=list)

    # Whom it befalls

    def some(self, role: Role, node: str | None = None) -> list[Process]:
        """All processes of that role that live, in an order that does not depend on their pids. `NotNow`: none do."""
        found = self.wait(lambda: self.bed.find(role, node), f"there is no {role}")
        return sorted(found, key=lambda one: (one.node, one.job, one.replica, one.pid))

    def wait(self, look: Callable[[], list[T]], otherwise: str) -> list[T]:
        """What it finds, as soon as it finds something. `NotNow`: nothing for a while."""
        until_s = time.monotonic() + FIND_S
        while not (found := look()):
            if time.monotonic() > until_s:
                raise NotNow(otherwise)
            self.crew.tend()
            time.sleep(0.1)
        return found

    def one(self, role: Role) -> Process:
        return self.draw.choice(self.some(role))

    def of_node(self, node: str) -> list[Process]:
        """Everything that would be gone with the machine."""
        return [one for one in self.bed.find(node=node) if one.role is not Role.SERVICE]

    # What is done to them

    def kill(self, victims: Sequence[Process]) -> str:
        hit = [one for one in victims if self.bed.send(one, signal.SIGKILL)]
        if not hit:
            raise NotNow("all of them have ended meanwhile")
        self.wait_until_gone(hit)
        return f"killed {', '.join(map(str, hit))}"

    def wait_until_gone(self, killed: Sequence[Process]) -> None:
        """A process that was killed may hold its locks for some more milliseconds."""
        until_s = time.monotonic() + FIND_S
        while any(one.lives for one in killed) and time.monotonic() < until_s:
            time.sleep(0.01)

    def stop(self, victims: Sequence[Process], seconds: float) -> str:
        """SIGSTOP, and SIGCONT after so long."""
        hit = [one for one in victims if self.bed.send(one, signal.SIGSTOP)]
        if not hit:
            raise NotNow("all of them have ended meanwhile")
        self.later(seconds, lambda: [self.bed.send(one, signal.SIGCONT) for one in hit])
        return f"stopped {', '.join(map(str, hit))} for {seconds:.1f} s"

    def kill_service(self) -> str:
        """It notices nothing. Returns when it is gone."""
        text = self.kill(self.some(Role.SERVICE))
        until_s = time.monotonic() + FIND_S
        while self.bed.folder.is_locked and time.monotonic() < until_s:
            time.sleep(0.02)
        return text

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do it after so long, by itself."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def wait_for_timers(self) -> None:
        """Until nothing of what `later` was told is left to be done."""
        while self._timers:
            self._timers.pop().join()


@dataclass(frozen=True)
class Fault:
    name: str
    inject: Callable[[Scene], str]
    """Does it, and says what. `NotNow`: it could not be done. Recovery is awaited by the campaign."""
    ends_service: bool
    ends_all: bool = False
    """Nothing is left that another fault of the same round could befall."""

    @property
    def sentence(self) -> str:
        """For a list of faults."""
        return (self.inject.__doc__ or "").partition("\n")[0]


FAULTS: dict[str, Fault] = {}
"""By name, in the order in which they are declared."""


def fault(
    name: str, *, ends_service: bool = False, ends_all: bool = False
) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    """Declares a fault: a function with a sentence as its docstring. `ends_service`: `pollux up` has to follow."""

    def declare(inject: Callable[[Scene], str]) -> Callable[[Scene], str]:
        FAULTS[name] = Fault(name, inject, ends_service or ends_all, ends_all)
        return inject

    return declare
