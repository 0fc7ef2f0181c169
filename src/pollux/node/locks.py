"""Locks on files: held by one process until it ends, however it ends. Who holds one is asked of the kernel (Linux)."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

LOOKED_AT_S = 0.5
"""Whoever only looks whether a lock is held (`is_locked`) holds it for a moment: nobody is turned away for that."""
LOOK_S = 0.01


def hold(path: Path, patience_s: float = LOOKED_AT_S) -> int | None:
    """Hold this lock file until the descriptor is closed, or the process ends; children do not inherit it.

    None: another process holds it. `OSError` if the file cannot be made.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > until_s:
                os.close(lock)
                return None
            time.sleep(LOOK_S)
        except BaseException:
            os.close(lock)
            raise


def is_held(lock: int, path: Path) -> bool:
    """Whether the descriptor is still that of this file: one that was removed keeps nobody out any more."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except OSError:
        return False


def holder(path: Path) -> int | None:
    """The process that holds this lock file; None: nobody does, or the system does not tell."""
    with suppress(OSError):
        file = os.stat(path)
        owners = [_owner(line, file.st_ino) for line in Path("/proc/locks").read_text("ascii").splitlines()]
        # Numbers of files are told apart by device alone, and overlays tell another device than stat: look inside.
        return next((pid for pid in owners if pid and _has_open(pid, file)), None)
    return None


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process, as by SIGSTOP: it lives, and does nothing."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] in "Tt"
    return False


def _owner(line: str, inode: int) -> int | None:
    """Of a line such as `1: FLOCK  ADVISORY  WRITE 4242 08:02:131 0 EOF`, if it is about this file."""
    fields = line.split()
    is_ours = len(fields) > 5 and fields[1::2][:2] == ["FLOCK", "WRITE"] and fields[5].endswith(f":{inode}")
    return int(fields[4]) if is_ours and fields[4].isdecimal() else None


def _has_open(pid: int, file: os.stat_result) -> bool:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(descriptor.stat(), file):
                    return True
    return False
