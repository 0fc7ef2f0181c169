"""Who began as a replica: a mark that its process makes before anything else, and that can be made but once.

A daemon that loses its keeper in the middle of a start cannot know whether there is a process. It makes the mark
itself: if that succeeds, no process of that start will ever run; if not, the mark says which one does. So nothing is
started twice, and nothing runs that nobody knows. A mark is a symbolic link beside the log of the replica.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pollux.node.processes import start_ticks

REVOKED = "revoked"
NOT_MINE = 125
"""Exit code of a process whose start was taken back."""


def new_claim(log: Path) -> Path:
    """Where the next process that starts with this log is to make its mark."""
    return _path(log, _count(log) + 1)


def make_claim(path: str) -> None:
    """In the new process: make the mark, or end."""
    try:
        os.symlink(f"{os.getpid()}-{start_ticks(os.getpid())}", path)
    except OSError:
        os._exit(NOT_MINE)


def settle_claim(path: Path) -> tuple[int, int] | None:
    """The process that runs by this claim and when it began; None: there is none, and there will be none."""
    with suppress(OSError):  # it is made already; else, as where the folder is gone, no process can make it either
        os.symlink(REVOKED, path)
    return _read(path)


def settle_last_claim(log: Path) -> tuple[int, int] | None:
    """The same for the latest start with this log, of which nobody knows whether a process has made its mark."""
    return _read(_path(log, _count(log))) or settle_claim(new_claim(log))


def _count(log: Path) -> int:
    return sum(1 for _ in log.parent.glob(f"{log.stem}.start*"))


def _path(log: Path, number: int) -> Path:
    return log.with_suffix(f".start{number}")


def _read(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        pid, dash, began = os.readlink(path).partition("-")
        return (int(pid), int(began)) if dash else None
    return None
