"""What was submitted, one small file a job: so that a job outlives a log that was damaged, emptied or put back.

jobs/ID/job.json holds the specification, and how the job ended once it has. The event log stays the truth; these files
are read when a service starts, for what the log does not know. They also see to it that no id is ever used twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pollux.core import Job, JobId, JobSpec, Phase, dumps, loads, register
from pollux.errors import PolluxError
from pollux.node.folder import write
from pollux.service.schema import clear_errors

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"-(\d{1,18})$")


@register
@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A job that was acknowledged."""

    spec: JobSpec
    submitted_at_s: float
    is_paused: bool = False
    outcome: Phase | None = None
    """How it ended; None: it has not."""
    reason: str = ""
    exit_code: int | None = None
    finished_at_s: float | None = None
    num_failures: int = 0

    @classmethod
    def of(cls, job: Job) -> LedgerEntry:
        is_paused = job.phase in (Phase.PAUSED, Phase.PAUSING)
        if not job.phase.is_terminal:
            return cls(job.spec, job.submitted_at_s, is_paused, num_failures=job.num_failures)
        end = job.phase, job.exit_reason, job.exit_code, job.finished_at_s, job.num_failures
        return cls(job.spec, job.submitted_at_s, False, *end)


class Ledger:
    """The files of one cluster's jobs, written after the event log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counter = folder / "last_number"
        self._number = 0
        """The highest that an id ever had, as far as is known."""
        self._has_looked = False
        self._written: dict[JobId, LedgerEntry] = {}

    def entries(self, ended: Container[JobId]) -> Iterator[LedgerEntry]:
        """All jobs that have files, but for those whose end is known. What cannot be read is passed over and logged."""
        for path in sorted(self._folder.glob("*/job.json")):
            if JobId(path.parent.name) in ended:
                continue
            try:
                entry = loads(path.read_bytes(), LedgerEntry)
            except (PolluxError, OSError) as error:
                log.error("%s cannot be read: if the event log has lost this job, nobody knows it. %s", path, error)
                continue
            self._written[entry.spec.id] = entry
            yield entry

    def keep(self, job: Job) -> None:
        """Write down how the job stands, if that is new. `DiskFull` or `Permanent` says why it cannot be."""
        entry = LedgerEntry.of(job)
        if self._written.get(job.id) == entry:
            return
        path = self._folder / job.id / "job.json"
        with clear_errors(path):
            write(path, dumps(entry), is_durable=True)
        if job.phase.is_terminal:
            self._written.pop(job.id, None)
        else:
            self._written[job.id] = entry

    def note(self, job: str) -> None:
        """That id is taken, whoever took it."""
        if found := _NUMBER.search(job):
            self._number = max(self._number, int(found[1]))

    def new_id(self, name: str, num_known: int) -> JobId:
        """An id that no job had before. `num_known`: how many jobs the event log knows."""
        if not self._has_looked:
            self._look()
        self._number = max(self._number, num_known) + 1
        while (self._folder / f"{name}-{self._number}").exists():
            self._number += 1
        try:
            write(self._counter, str(self._number), is_durable=True)
        except OSError as error:
            log.warning("The number of the last job cannot be written: %s", error)
        return JobId(f"{name}-{self._number}")

    def _look(self) -> None:
        self._has_looked = True
        with suppress(OSError, ValueError):
            self._number = max(self._number, int(self._counter.read_text("ascii")))
        for path in self._folder.glob("*/"):
            self.note(path.name)
