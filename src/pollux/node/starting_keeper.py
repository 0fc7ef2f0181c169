"""A keeper from its start until it serves: until then it has nothing yet, and is ended with whoever started it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from pollux.node.processes import exit_code_of, members_of, start_ticks

log = logging.getLogger(__name__)

KEEPER = "pollux.node.keeper"
WITNESS = "pollux.node.witness"
"""Starts the keeper, and is its parent."""
MAX_LOG_BYTES = 10 * 2**20
"""A new keeper begins a new log if that of the ones before is larger."""

# Two libraries start threads of their own when they are loaded, unless told that one is enough; and what the keeper
# prints is to be seen. The replicas have the environments that they are given.
FOR_KEEPER = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

_released: list[subprocess.Popen[bytes]] = []
"""Keepers that this process started and has not seen the end of: one that outlives its client is no mistake."""


class StartingKeeper:
    """Its witness leads a process group of the two."""

    def __init__(self, folder: Path, preload: Iterable[str] | None, environment: Mapping[str, str]) -> None:
        """Whatever is forked from it shows its environment in /proc: it has no other than jobs may see."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket = socket_of(folder)
        ourselves = os.getpid()
        command = [sys.executable, "-P", "-m", WITNESS, "--dir", str(folder.absolute())]
        command += ["--starter", str(ourselves), str(start_ticks(ourselves))]
        if preload is not None:
            command += ["--preload", ",".join(preload)]
        path = folder / "keeper.log"
        with suppress(FileNotFoundError):
            if path.stat().st_size > MAX_LOG_BYTES:
                path.replace(path.with_name("keeper.log.1"))
        log_file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**environment, **FOR_KEEPER},
                start_new_session=True,
            )
        finally:
            os.close(log_file)
        log.info("A keeper is started: process %d.", self._process.pid)

    @property
    def exit_code(self) -> int | None:
        """None: it has not ended. It is not reaped: as long as it is not, its group is no other's."""
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if ended is None else exit_code_of(ended)

    def is_that(self, keeper: int) -> bool:
        """Whether it is the process of that number: another keeper may have come first."""
        try:
            return os.getpgid(keeper) == self._process.pid
        except ProcessLookupError:
            return False

    def release(self) -> None:
        """It serves, and outlives us."""
        _released.append(self._process)

    async def end(self) -> None:
        """Kill it, and wait until it can do nothing any more."""
        os.killpg(self._process.pid, signal.SIGKILL)  # also where only the witness has ended
        for pid in members_of(self._process.pid):
            await gone(pid)
        self._process.wait()
        if not is_served(self._socket):
            Path(self._socket).unlink(missing_ok=True)


def socket_of(folder: Path) -> str:
    return str(folder / "keeper.sock")


def is_served(path: str) -> bool:
    """A keeper that was killed may still be seen to listen for a moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def bury() -> None:
    """So that no keeper which we started, and which has ended, stays in the table of processes."""
    for process in [*_released]:
        if process.poll() is not None:
            with suppress(ValueError):  # another thread was faster
                _released.remove(process)


async def gone(pid: int) -> None:
    """Wait until the process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
