"""The daemon of one node on this machine: found or started, watched, started again when it dies, and ended."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pollux import __version__
from pollux.core import FrozenMap, NodeId
from pollux.errors import Permanent, PolluxError
from pollux.providers.local.remains import end_remains, remains
from pollux.wire.frames import dial
from pollux.wire.nodes import DescribeNode, NodeDescription

if TYPE_CHECKING:
    from pollux.node.folder import StateFolder

log = logging.getLogger(__name__)

ASK_EVERY_S = 10.0
ASK_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 180.0
"""One that is there and silent for so long is killed. Its first word waits for torch, which is slow on a busy machine.
"""
EARLY_S = 60.0
MAX_EARLY_DEATHS = 5
"""So many deaths in a row, each within `EARLY_S` of its start, and no other start is tried."""
MAX_PAUSE_S = 30.0
LEAVE_TIMEOUT_S = 30.0
END_TIMEOUT_S = 60.0
REMAINS_GRACE_S = 10.0
POLL_S = 0.05
MAX_OUT_BYTES = 10 << 20

_started: list[subprocess.Popen[bytes]] = []
"""Daemons that this process started and has not seen the end of: one that outlives its provider is no mistake."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a daemon must say of itself; one that says something else is replaced."""

    node: NodeId
    slots: int
    gpu_type: str
    replica_env: FrozenMap[str, str] = field(default_factory=FrozenMap)
    job_env: tuple[str, ...] = ()
    job_user: str = ""

    def is_met_by(self, said: NodeDescription) -> bool:
        if (said.node, said.slots, said.version) != (self.node, self.slots, __version__):
            return False
        given = (said.gpu_type, said.replica_env, said.job_env, said.job_user)
        return given == (self.gpu_type, self.replica_env, self.job_env, self.job_user)


class _Refusal:
    """What a daemon says that knows another token."""


class SupervisedDaemon:
    """Whoever calls `look` once a second keeps the daemon running; it starts as the first one does."""

    def __init__(
        self, wanted: Wanted, folder: StateFolder, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.node = wanted.node
        self.folder = folder
        self.slots = wanted.slots
        self._wanted = wanted
        self.gpu_type = ""
        """Empty until the daemon has told it."""
        self.reached_at = ""
        """Where it was heard last; a daemon takes the port of the one before."""
        self.is_ready = False
        self.is_given_up = False
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._began = 0
        self._heard_s = time.monotonic()
        """When it was heard last, or we began to wait for its first word."""
        self._started_s = -math.inf
        self._is_expected = False
        """It was there when we looked last."""
        self._early_deaths = 0
        self._next_start_s = -math.inf
        self._is_ended = False
        self._busy = asyncio.Lock()

    async def look(self) -> None:
        """Start it if it is not there and its time has come; else hear who it is, and now and then whether it lives."""
        async with self._busy:
            if self._is_ended or self.is_given_up:
                return
            if self._is_alive():
                self._is_expected = True
                if not self.is_ready or time.monotonic() - self._heard_s > ASK_EVERY_S:
                    await self._greet()
                self._shorten_output()
                return
            if self._is_expected:
                self._note_death()
            if not self.is_given_up and time.monotonic() >= self._next_start_s:
                self._start()

    async def end(self) -> None:
        """For good. Replicas save first; nothing is left when this returns, if need be by SIGKILL."""
        from pollux.node.processes import began_at

        async with self._busy:
            self._is_ended = True
            self.is_ready = False
            until_s = time.monotonic() + END_TIMEOUT_S
            if not self._is_alive() and not self.is_given_up and remains(self.folder):
                self._start()  # a daemon ends best what another one has left
            said = None
            while said is None and self._is_alive() and time.monotonic() < until_s:
                said = await self._describe()
                await asyncio.sleep(POLL_S)
            # One that knows another token is ours as well: it holds the lock of our folder.
            if pid := said.pid if isinstance(said, NodeDescription) else self.folder.daemon if said else 0:
                self._pid, self._began = pid, began_at(pid)
                self._send(pid, signal.SIGINT)
                await self._gone(until_s)
            self._kill()
            await self._gone(time.monotonic() + LEAVE_TIMEOUT_S)
            await end_remains(self.folder, REMAINS_GRACE_S)
            self.folder.forget_token()

    @property
    def last_words(self) -> str:
        from pollux.node.folder import last_lines

        return last_lines(self._out, 5) or last_lines(self.folder.log, 5) or "nothing"

    def _start(self) -> None:
        self.is_ready = False
        self._is_expected = True
        self._started_s = self._heard_s = time.monotonic()
        try:
            with open(os.open(self._out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as out:
                self._out.chmod(0o600)  # one that was there before
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:
            log.error("Node %s: its daemon cannot be started: %s", self.node, error)
            return
        _started.append(self._process)
        log.info("Node %s: its daemon is started, process %d.", self.node, self._process.pid)

    async def _greet(self) -> None:
        from pollux.node.processes import began_at

        said = await self._describe()
        if said is None:
            if time.monotonic() - self._heard_s > ANSWER_TIMEOUT_S:
                log.error("Node %s: its daemon does not answer, and is killed. Replicas train on.", self.node)
                self._heard_s = time.monotonic()
                self._kill()
            return
        if isinstance(said, _Refusal):
            await self._replace_refusing()
            return
        is_ours = self._process is not None and self._process.pid == said.pid
        # One of ours may have another version if Pollux was installed anew since we run: so will the next be.
        if not is_ours and not self._wanted.is_met_by(said):
            await self._replace(said)
        elif (file := self.folder.node_file()) is not None and file.pid == said.pid:
            if not is_ours and not self.is_ready:
                log.info("Node %s: its daemon, process %d, was running already.", self.node, said.pid)
                self._started_s = -math.inf
            self._heard_s = time.monotonic()
            self._pid, self._began = said.pid, began_at(said.pid)
            self.gpu_type = said.gpu_type
            self.reached_at = f"{file.host}:{file.port}"
            self.is_ready = True

    async def _replace(self, said: NodeDescription) -> None:
        """By a daemon as we want it; replicas train on meanwhile."""
        was = f"{said.node}, {said.slots} slots of type {said.gpu_type}, version {said.version}"
        log.info("Node %s: the daemon that runs (%s) is replaced. Replicas train on.", self.node, was)
        await self._replace_by_pid(said.pid)

    async def _replace_refusing(self) -> None:
        """The token was changed while daemons lived. The daemon is ours: it holds the lock of our folder.

        Replicas that talk to it know the old token alone. The next daemon has them save and stop, and their jobs go on
        from there; plain commands do not notice.
        """
        pid = self.folder.daemon
        log.warning(
            "Node %s: its daemon, process %d, knows another token than %s, and is replaced. Jobs that trained under it "
            "save, stop, and go on from there.",
            *(self.node, pid, self.folder.token_file),
        )
        await self._replace_by_pid(pid)

    async def _replace_by_pid(self, pid: int) -> None:
        if pid:
            self._send(pid, signal.SIGTERM)
        await self._gone(time.monotonic() + LEAVE_TIMEOUT_S)
        self._kill()
        await self._gone(time.monotonic() + LEAVE_TIMEOUT_S)
        self._start()

    def _note_death(self) -> None:
        now_s = time.monotonic()
        self.is_ready = self._is_expected = False
        self._early_deaths = self._early_deaths + 1 if now_s - self._started_s < EARLY_S else 0
        if self._early_deaths >= MAX_EARLY_DEATHS:
            self.is_given_up = True
            return
        pause_s = min(2.0 ** (self._early_deaths - 2), MAX_PAUSE_S) if self._early_deaths > 1 else 0.0
        self._next_start_s = now_s + pause_s
        when = f"in {pause_s:g} s" if pause_s else "at once"
        log.warning(
            "Node %s: its daemon has died, and is started again %s. Its last lines: %s",
            *(self.node, when, self.last_words),
        )

    async def _describe(self) -> NodeDescription | _Refusal | None:
        """None: no daemon answers on this folder."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                try:
                    peer = await dial(self.folder.address, self.folder.token)
                except Permanent:  # who answers on our own socket knows another token
                    return _Refusal()
                try:
                    said = await peer.ask(DescribeNode())
                finally:
                    peer.close()
        except (PolluxError, TimeoutError):
            return None
        return said if isinstance(said, NodeDescription) else None

    def _is_alive(self) -> bool:
        """Our child, the process that we have heard, or whoever holds the folder."""
        from pollux.node.folder import is_locked
        from pollux.node.processes import is_running

        _bury()
        if self._process is not None and self._process.poll() is None:
            return True
        return is_running(self._pid, self._began) or is_locked(self.folder.path / "lock")

    def _send(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)

    def _kill(self) -> None:
        """Every process that may be the daemon, without any word. Replicas live on."""
        from pollux.node.processes import is_running

        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if is_running(self._pid, self._began):
            self._send(self._pid, signal.SIGKILL)
        if pid := self.folder.daemon:
            self._send(pid, signal.SIGKILL)

    async def _gone(self, until_s: float) -> None:
        while self._is_alive() and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)

    def _shorten_output(self) -> None:
        """node.log says the same. The daemon appends: it goes on at the new end."""
        with suppress(OSError):
            if self._out.stat().st_size > MAX_OUT_BYTES:
                os.truncate(self._out, 0)

    @property
    def _out(self) -> Path:
        return self.folder.path / "node.out"


def _bury() -> None:
    """So that no daemon which we started, and which has ended, stays in the table of processes."""
    for process in [*_started]:
        if process.poll() is not None:
            with suppress(ValueError):  # another thread was faster
                _started.remove(process)
