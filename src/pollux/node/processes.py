"""Processes by their numbers: whether one is still the same, how to end it, and what it leaves behind. Linux."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def is_running(pid: int, began: int) -> bool:
    """Whether the process of that number is still the one that began then. 0: it had ended before anybody looked."""
    return pid > 0 and began > 0 and began_at(pid) == began


def is_unreaped(pid: int, began: int) -> bool:
    """Whether the process has ended, and its parent has not asked yet how."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "ZX" and int(fields[19]) == began


def began_at(pid: int) -> int:
    """When a process began, in the kernel's ticks; 0: there is none, it has ended, or the system does not tell."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])


def start_ticks(pid: int) -> int:
    """As `began_at`, also of a process that has ended and was not reaped yet."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def parent_of(pid: int) -> int:
    """Also of a process that was not reaped yet; 0: there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def name_of(pid: int) -> str:
    """The name by which the kernel knows it, at most 15 letters; also of one that was not reaped yet."""
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def command_of(pid: int) -> list[str]:
    """Its arguments, the program first; empty of one that has ended."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[:-1]
    except OSError:
        return []


def exit_code_of(ended: os.waitid_result) -> int:
    """As `os.waitstatus_to_exitcode` counts: negative is the signal that ended it."""
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def send_signal(pid: int, number: int, *, to_session: bool = False, whole_session_only: bool = False) -> None:
    """To the process; 9, and with `to_session` any signal, to everything in its session as well.

    What it started must not outlive it.
    """
    if pid <= 0:
        return
    has_arrived = False
    if to_session or number == signal.SIGKILL:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
            has_arrived = True
    if not has_arrived and not whole_session_only:  # it may not have made its session yet
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def children(pid: int) -> list[int]:
    """Adopted ones among them."""
    found: list[int] = []
    with suppress(OSError):  # it may end meanwhile
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(word) for word in path.read_text().split()]
    return found


def members_of(group: int) -> list[int]:
    """Processes of a process group, also those that were not reaped yet."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[2]) == group]


def end_leftovers(candidates: Iterable[int], variable: str) -> list[int]:
    """Kill those that have begun with `variable` ("NAME=value") in their environment, and all below them."""
    marked = variable.encode()
    waiting = [pid for pid in candidates if marked in _environment(pid)]
    found: list[int] = []
    while waiting:
        pid = waiting.pop()
        waiting += children(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            found.append(pid)
    return found


def _stat(pid: int) -> list[str]:
    """What /proc says of it after its name, from its state on; empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
