"""The state of a service against its log: whatever a replay starts from, it must lead to where the service stands."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pollux.errors import Permanent, PolluxError
from pollux.scheduler import MemoryLog, SavedState, Scheduler, SchedulerOptions, SchedulerState
from pollux.service.options import ServiceOptions
from pollux.service.store import SqliteLog
from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.violations import Kind, Violation
from pollux.wire.api import JobView


def check_replay(bed: Bed, views: Mapping[str, JobView]) -> Iterator[Violation]:
    """After the end of the service. `views`: what it said last of all jobs."""
    try:
        state, violations = _replayed(bed.folder.database, _options(bed))
    except PolluxError as error:
        yield Violation(Kind.WRONG_STATE, f"the log cannot be replayed: {error}")
        return
    yield from violations
    for view in views.values():
        job = state.job(view.id)
        if job is None:
            yield Violation(Kind.WRONG_STATE, f"{view.id} is known to the service, and not in its log")
        elif (said := (view.phase, view.generation, view.failures)) != (
            found := (job.phase, job.generation, job.num_failures)
        ):
            yield Violation(Kind.WRONG_STATE, f"{view.id} was {said} to the service, and is {found} in its log")


def check_before_damage(bed: Bed) -> Iterator[Violation]:
    """The log as it is now, before a fault takes some of it away. Nobody may be writing to it.

    Replayed is a copy: SQLite would tidy up what it opens, and the fault is to meet what the service left.
    """
    database = bed.folder.database
    with tempfile.TemporaryDirectory(prefix="log-", dir=bed.home) as folder:
        for path in database.parent.glob(f"{database.name}*"):
            if path.suffix != ".lock" and not path.name.endswith("-shm"):
                shutil.copy(path, folder)
        try:
            _, violations = _replayed(Path(folder) / database.name, _options(bed))
        except PolluxError as error:
            violations = [Violation(Kind.WRONG_STATE, f"the log cannot be replayed: {error}")]
    yield from violations


def _options(bed: Bed) -> SchedulerOptions:
    seed = ServiceOptions(bed.folder.path).seed
    return SchedulerOptions(seed=seed, retry_pause_s=bed.retry_pause_s, abandoned_starts_fail=True)


def _replayed(path: Path, options: SchedulerOptions) -> tuple[SchedulerState, list[Violation]]:
    """The state that the newest saved one leads to, and for each other start of a replay that leads elsewhere, that."""
    with SqliteLog(path, read_only=True) as log:
        starts: list[tuple[int, SavedState | None]] = list(log.saved_states())
        first = log.events(limit=1)
        if not first or first[0].number == 1:  # else its beginning was lost to damage, and nothing leads up to the rest
            starts.append((0, None))
        if not starts:
            raise Permanent(f"{path} begins with record {first[0].number}, and has no saved state that can be read.")
        tails = [list(log.records(number)) for number, _ in starts]
    states = [
        Scheduler(MemoryLog(tail, None if saved is None else (0, saved)), options).state
        for (_, saved), tail in zip(starts, tails, strict=True)
    ]
    violations = [
        Violation(
            Kind.WRONG_STATE,
            f"the {len(tail)} records after number {number} lead to another state than the newest saved one, "
            f"of number {starts[0][0]}, with the {len(tails[0])} since then",
        )
        for (number, _), tail, state in zip(starts[1:], tails[1:], states[1:], strict=True)
        if state.saved() != states[0].saved()
    ]
    return states[0], violations
