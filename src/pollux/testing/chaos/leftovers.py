"""What must be gone: processes and GPUs of jobs that have ended, and, after `pollux down`, all but files that stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pollux.errors import PolluxError
from pollux.node.folder import is_locked
from pollux.node.processes import began_at
from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.jobs import Ticket
from pollux.testing.chaos.violations import Kind, Violation

GRACE_S = 15.0
UNFINISHED = ("*.new", "*.part", ".writing-*", ".removing-*", "token.*")
"""Files that are written under another name first: whoever dies meanwhile leaves them, and somebody must clear them."""


def check_jobs_left_nothing(bed: Bed, tickets: Iterable[Ticket]) -> Iterator[Violation]:
    """While the cluster still runs, and all jobs have ended."""
    known = {(run.pid, run.began): ticket for ticket in tickets for run in ticket.runs()}
    known |= {child: ticket for ticket in tickets for run in ticket.runs() for child in run.children}

    def living() -> list[tuple[int, int]]:
        return [one for one in known if began_at(one[0]) == one[1]]

    _wait(lambda: not living())
    for one in living():
        yield _orphan(f"process {one[0]} of {known[one]} lives on after its end")
    try:
        _wait(lambda: _free(bed) == 0)
        if held := _free(bed):
            yield _orphan(f"{held} GPUs are held, and no job is left")
    except PolluxError as error:
        yield Violation(Kind.NO_RECOVERY, f"the service does not answer in the end: {error}")


def _free(bed: Bed) -> int:
    with bed.client() as client:
        cluster = client.cluster()
        return cluster.gpus - cluster.free_gpus


def check_nothing_is_left(bed: Bed) -> Iterator[Violation]:
    """After `pollux down`."""
    _wait(lambda: not bed.find())
    for one in bed.find():
        yield _orphan(f"{one} is left after pollux down: {one.command}")
    for lock in (bed.folder.lock_file, *(bed.node_folder(node) / "lock" for node in bed.nodes)):
        if is_locked(lock):
            yield _orphan(f"{lock} is still held")
    for path in sorted(bed.folder.path.rglob("*")):
        if path.is_socket() or any(path.match(pattern) for pattern in UNFINISHED):
            yield _orphan(f"{path.relative_to(bed.folder.path)} is left")
    if (bed.folder.path / "service.json").exists():
        yield _orphan("service.json is left after pollux down")
    for path in _temporary(bed.home / "tmp"):
        yield _orphan(f"the temporary file {path} is left")


def _temporary(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*") if folder.is_dir() else ():
        if "torchinductor_" not in str(path):  # torch's, one for all that a user runs
            yield path


def _wait(is_so: Callable[[], bool]) -> None:
    """What is just ending is given a moment."""
    until_s = time.monotonic() + GRACE_S
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.2)


def _orphan(sentence: str) -> Violation:
    return Violation(Kind.ORPHAN, sentence)
