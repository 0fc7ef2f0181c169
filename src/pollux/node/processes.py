"""Processes by their numbers: whether one is still the same, how to end it, and what it leaves behind. Linux."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def is_running(pid: int, began: int) -> bool:
    """Whether the process of that number is still the one that began then."""
    return pid > 0 and began_at(pid) == began


def began_at(pid: int) -> int:
    """When a process began, in the kernel's ticks; 0: there is none, it has ended, or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


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


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
