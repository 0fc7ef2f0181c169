"""Exit codes on disk: how each child of a keeper ended, written down before anybody reaps it.

Keeper and witness write them, the daemon reads them where no keeper is left to ask. A record is a symbolic link
`exits/PID-BEGAN` whose target is the exit code: it appears whole or not at all, and needs no room on a full disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from itertools import count
from pathlib import Path

from pollux.node.processes import start_ticks

FOLDER = "exits"
SHIM = "pollux-shim"
"""The name of processes that write down themselves what they have to tell (`node.commands`)."""
RETRY_S = 1.0


def prepare(folder: Path) -> None:
    """From now on ends are written down; until the folder `exits` is removed, when a node ends for good."""
    (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)


def record(folder: Path, pid: int, exit_code: int) -> None:
    """Write down how a child that nobody has reaped yet ended; negative: by which signal. `OSError` if it cannot be.

    Said again by another witness of the same end, it changes nothing. `FileNotFoundError`: nobody will ask for it.
    """
    with suppress(FileExistsError):
        os.symlink(str(exit_code), folder / FOLDER / _name(pid, start_ticks(pid)))


def record_patiently(folder: Path, pid: int, exit_code: int, tries: int | None = None) -> None:
    """The same, once a second until it is done: until a process is reaped, the kernel keeps its exit code for us."""
    for _ in count() if tries is None else range(tries):
        try:
            record(folder, pid, exit_code)
            return
        except FileNotFoundError:
            return  # the node has ended for good
        except OSError:
            time.sleep(RETRY_S)


def read(folder: Path, pid: int, began: int) -> int | None:
    """The exit code of the process of that number that began then; None: nobody has written it down."""
    place = folder / FOLDER
    # Without a beginning, the process had ended before anybody could look; its number was not used again since.
    names = [_name(pid, began)] if began else [path.name for path in place.glob(_name(pid, "*"))]
    for name in names:
        with suppress(OSError, ValueError):
            return int(os.readlink(place / name))
    return None


def remove(folder: Path, pid: int, began: int) -> None:
    """Its end is kept elsewhere by now."""
    with suppress(OSError):
        (folder / FOLDER / _name(pid, began)).unlink(missing_ok=True)


def remove_others(folder: Path, kept: Collection[int]) -> None:
    """Drop all records but those of these processes: nobody will ask for them."""
    with suppress(OSError):
        for path in (folder / FOLDER).iterdir():
            if path.name.partition("-")[0] not in map(str, kept):
                path.unlink(missing_ok=True)


def _name(pid: int, began: int | str) -> str:
    return f"{pid}-{began}"
