"""What the keeper of a node has started and nobody has ended: found in the table of processes. Linux.

A daemon ends all this by itself. This is for one that cannot: it was killed, hangs, or does not start any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.errors import PolluxError

if TYPE_CHECKING:
    from pollux.node.folder import NodeFiles

POLL_S = 0.1
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    session: int
    command: bytes


def remains(folder: NodeFiles) -> set[int]:
    """The keeper and its witness, whatever was forked from it, and what these have started."""
    table = _processes()
    found = {*_forked(folder, table), *_recorded(folder)} & table.keys()
    while grown := {one.pid for one in table.values() if one.parent in found or one.session in found} - found:
        found |= grown
    return found


def left_replicas(folder: NodeFiles) -> set[int]:
    """Processes of jobs that live here, as far as the last daemon has written them down."""
    return _recorded(folder)


async def end_remains(folder: NodeFiles, grace_s: float) -> None:
    """Ask all of it to save and end; what still lives after `grace_s` seconds is killed."""
    if not remains(folder):
        return
    table = _processes()
    forked = _forked(folder, table)
    # The witness hands the signal on to the keeper, and that to its children; who has lost both gets it directly.
    first = {pid for pid in forked if table[pid].parent not in forked} | (_recorded(folder) - forked)
    _send(first, signal.SIGTERM)
    until_s = time.monotonic() + grace_s
    while time.monotonic() < until_s and remains(folder):
        await asyncio.sleep(POLL_S)
    until_s = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < until_s and (left := remains(folder)):
        _send(left, signal.SIGKILL)
        await asyncio.sleep(POLL_S)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _forked(folder: NodeFiles, table: dict[int, _Process]) -> set[int]:
    """Replicas, templates and stores are forked from the keeper and never changed: its command is theirs."""
    place = os.path.realpath(folder.path)
    return {one.pid for one in table.values() if _kept_in(one.command) == place}


def _kept_in(command: bytes) -> str | None:
    """The folder that the command of a keeper or a witness names, however it was spelled; None: it is of neither."""
    for module in (b"keeper", b"witness"):
        _, is_one, options = command.partition(b"\0pollux.node.%b\0--dir\0" % module)
        if is_one:
            return os.path.realpath(os.fsdecode(options.split(b"\0")[0]))
    return None


def _recorded(folder: NodeFiles) -> set[int]:
    """Replicas that the last daemon knew: plain commands among them, whose keeper may be gone."""
    from pollux.node.processes import is_running
    from pollux.node.roster import Roster

    roster = Roster(folder)
    for job in folder.jobs():
        with suppress(PolluxError, OSError):
            roster.load(job)
    return {hosted.pid for hosted in roster.alive() if is_running(hosted.pid, hosted.began)}


def _processes() -> dict[int, _Process]:
    """All that live, by pid."""
    table = {}
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdecimal():
                fields = Path(f"/proc/{name}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                if fields[0] not in "ZX":
                    table[int(name)] = _Process(int(name), int(fields[1]), int(fields[3]), command)
    return table
