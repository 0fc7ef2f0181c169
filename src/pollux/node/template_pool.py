"""The keeper's view of the templates: one for each job, while its code stays the same. Part of the keeper's loop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from selectors import BaseSelector

from pollux.node.forking import Program, fork, open_log
from pollux.node.lines import Lines, Message
from pollux.node.templates import Wanted, leading_imports, run_template

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""How long replicas wait for the imports of their template before they do them by themselves."""


@dataclass(frozen=True, slots=True)
class Start:
    """A replica that is to be."""

    tag: str
    program: Program
    log: str
    claim: str = ""
    """Where its process makes its mark (`node.claims`); empty: nowhere."""
    is_command: bool = False
    """Any program, not a script: no template is of use to it."""

    @property
    def job(self) -> str:
        return self.tag.partition("/")[0]


@dataclass(slots=True, eq=False)
class Template:
    key: tuple[str, ...]
    give_up_at_s: float
    pid: int = 0
    logs: int = -1
    """A socket over which it is given the logs of replicas, open."""
    lines: Lines | None = None
    is_useless: bool = False
    reads: dict[str, str | None] | None = None
    """What its imports saw in the environment; None while they run."""
    waiting: dict[str, Start] = field(default_factory=dict)

    @property
    def is_loading(self) -> bool:
        return self.reads is None and not self.is_useless

    def kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Templates:
    """Calls back, for every start that it took: `began` with its pid, `failed`, or `fork_here` if no template will do.

    `release` closes, in a forked process, all that is the keeper's but one socket.
    """

    def __init__(
        self,
        selector: BaseSelector,
        release: Callable[[], None],
        began: Callable[[Start, int], None],
        failed: Callable[[Start, str], None],
        fork_here: Callable[[Start], None],
    ) -> None:
        self._selector = selector
        self._release = release
        self._began = began
        self._failed = failed
        self._fork_here = fork_here
        self._of_job: dict[str, Template] = {}
        self._open: set[Template] = set()
        """Those that may still speak, dropped ones among them."""

    def take(self, start: Start, fingerprint: str) -> bool:
        """Fork this replica from its job's template, which is loaded if need be. False: not from one.

        `OSError` if the machine has no room for another process.
        """
        key = (fingerprint, start.program.script, start.program.directory, start.program.user)
        template = self._of_job.get(start.job)
        if template is not None and template.key != key:
            self.drop(start.job)
            template = None
        if template is None:
            imports = leading_imports(start.program.script)
            if all(wanted.is_done for wanted in imports):
                return False
            template = self._load(key, start, imports)
        if template.is_useless:
            return False
        template.waiting[start.tag] = start
        if template.reads is not None:
            self._ask(template, start)
        return True

    def drop(self, job: str) -> None:
        """End the job's template; what waits for it is forked without."""
        if (template := self._of_job.pop(job, None)) is not None:
            template.kill()

    def drop_all(self) -> None:
        for job in list(self._of_job):
            self.drop(job)

    def drain(self) -> None:
        """Hear all that templates have said so far."""
        for template in list(self._open):
            if template.lines is not None:
                template.lines.ready()

    def ended(self, pid: int) -> None:
        """That process is reaped: its number may be another's from now on."""
        for template in self._open:
            if template.pid == pid:
                template.pid = 0

    @property
    def next_deadline_s(self) -> float | None:
        return min((one.give_up_at_s for one in self._open if one.is_loading), default=None)

    def look_at_the_clock(self, now_s: float) -> None:
        for template in self._open:
            if template.is_loading and now_s >= template.give_up_at_s:
                log.warning("Imports of %s take over %g s: not waited for.", template.key[1], LOAD_TIMEOUT_S)
                template.is_useless = True
                template.kill()

    def _load(self, key: tuple[str, ...], start: Start, imports: list[Wanted]) -> Template:
        template = Template(key, time.monotonic() + LOAD_TIMEOUT_S)
        ours, theirs = socket.socketpair()
        logs_here, logs_there = socket.socketpair()
        logs_here.setblocking(False)
        template.logs = logs_here.detach()  # a number: in a forked process no object is to close what is another's then
        heard, ended = partial(self._heard, template), partial(self._lost, start.job, template)
        template.lines = Lines(ours, self._selector, heard, ended)
        try:
            role = partial(run_template, start.program, start.log, imports, theirs, logs_there)
            template.pid = fork(role, self._release)
        except OSError:
            template.lines.close()
            theirs.close()
            logs_there.close()
            os.close(template.logs)
            raise
        theirs.close()  # not in a `finally`, which the child would come by
        logs_there.close()
        self._of_job[start.job] = template
        self._open.add(template)
        return template

    def _heard(self, template: Template, message: Message) -> None:
        match message:
            case {"reads": dict(reads)}:
                template.reads = reads
                log.info("Process %d is the template of %s.", template.pid, template.key[1])
                for start in list(template.waiting.values()):
                    self._ask(template, start)
            case {"problem": str(problem)}:
                log.warning("Replicas of %s are forked without their imports: %s.", template.key[1], problem)
                template.is_useless = True
            case {"tag": str(tag), "pid": int(pid)} if tag in template.waiting:
                self._began(template.waiting.pop(tag), pid)
            case {"tag": str(tag), "error": str(problem)} if tag in template.waiting:
                self._failed(template.waiting.pop(tag), problem)

    def _lost(self, job: str, template: Template) -> None:
        """All who might still tell a pid have let go of the connection: what waits now has no process."""
        self._open.discard(template)
        os.close(template.logs)
        if not template.is_loading and not template.is_useless and self._of_job.get(job) is template:
            log.warning("The template of %s ended; the next replica loads another one.", template.key[1])
            del self._of_job[job]
        template.is_useless = True
        while template.waiting:
            self._fork_here(template.waiting.popitem()[1])

    def _ask(self, template: Template, start: Start) -> None:
        given = start.program.environment
        others = [name for name, value in (template.reads or {}).items() if given.get(name) != value]
        if others or template.lines is None:
            log.info("%s is forked without its imports, which depend on %s.", start.tag, ", ".join(sorted(others)))
            del template.waiting[start.tag]
            self._fork_here(start)
            return
        try:
            _give_log(template.logs, start)
        except OSError as error:
            log.warning("%s is forked without its imports: its log was not handed over (%s).", start.tag, error)
            del template.waiting[start.tag]
            self._fork_here(start)
            return
        template.lines.send({"tag": start.tag, "claim": start.claim, "program": asdict(start.program)})


def _give_log(logs: int, start: Start) -> None:
    descriptor = open_log(start.log, start.program.user)
    try:
        with socket.socket(fileno=os.dup(logs)) as way:
            socket.send_fds(way, [b"l"], [descriptor])
    finally:
        os.close(descriptor)
