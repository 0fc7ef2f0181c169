"""The state of a service against its log: all that was ever recorded must lead to where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pollux.errors import PolluxError
from pollux.scheduler import MemoryLog, Scheduler, SchedulerOptions
from pollux.service.options import ServiceOptions
from pollux.service.store import SqliteLog
from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.violations import Kind, Violation
from pollux.wire.api import JobView


def check_replay(bed: Bed, views: Mapping[str, JobView]) -> Iterator[Violation]:
    """After the end of the service. `views`: what it said last of all jobs."""
    defaults = ServiceOptions(bed.folder.path)
    options = SchedulerOptions(seed=defaults.seed, retry_pause_s=bed.retry_pause_s, abandoned_starts_fail=True)
    try:
        with SqliteLog(bed.folder.database, read_only=True) as log:
            latest = log.latest()
            records = list(log.records())
            tail = list(log.records(latest[0])) if latest is not None else records
            # One that was damaged goes on from a saved state; what led to that may be lost.
            is_whole = bool(log.events(limit=1)) and log.events(limit=1)[0].number == 1
        saved = None if latest is None else (0, latest[1])
        whole = Scheduler(MemoryLog(records if is_whole else tail, None if is_whole else saved), options).state
        later = Scheduler(MemoryLog(tail, latest=saved), options).state
    except PolluxError as error:
        yield Violation(Kind.WRONG_STATE, f"the log cannot be replayed: {error}")
        return
    if whole.saved() != later.saved():
        yield Violation(
            Kind.WRONG_STATE,
            f"all {len(records)} records lead to another state than the saved one with the {len(tail)} since then",
        )
    for view in views.values():
        job = whole.job(view.id)
        if job is None:
            yield Violation(Kind.WRONG_STATE, f"{view.id} is known to the service, and not in its log")
        elif (said := (view.phase, view.generation, view.failures)) != (
            found := (job.phase, job.generation, job.num_failures)
        ):
            yield Violation(Kind.WRONG_STATE, f"{view.id} was {said} to the service, and is {found} in its log")
