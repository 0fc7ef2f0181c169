"""What is kept of a cluster's log: when each job came, how long it ran, on how many GPUs.

Every format is read into this. Jobs that a log cannot tell these three of are passed over and counted; damaged rows
are refused, all in one error, unless the caller would rather have them passed over too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pollux.core import FrozenMap, checks
from pollux.errors import InvalidSpec
from pollux.simulator.csv_table import Row, read_rows
from pollux.simulator.documents import refusal

KIND = "log"
"""What errors call such a file."""


@dataclass(frozen=True, slots=True)
class LoggedJob:
    """One job as it ran on a real cluster."""

    name: str
    submitted_at: float
    """POSIX seconds by the log's own clock, read as if it were UTC: the time of day is that of the place."""
    duration_s: float
    """While it held its GPUs; time in the queue is not in it."""
    num_gpus: int
    cluster: str | None = None
    """The cluster or virtual cluster, where the log names one."""

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "name", self.name)
        checks.finite(InvalidSpec, "submitted_at", self.submitted_at, None)
        checks.finite(InvalidSpec, "duration_s", self.duration_s, 0)
        checks.whole(InvalidSpec, "num_gpus", self.num_gpus, 1)

    @property
    def gpu_hours(self) -> float:
        return self.num_gpus * self.duration_s / 3600.0


class PassedOver(StrEnum):
    """Why a job of the log is not in the list."""

    NO_GPUS = "no GPUs"
    NO_START = "no start recorded"
    NO_END = "no end recorded"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class JobList:
    """The jobs of a log in its order."""

    name: str
    jobs: tuple[LoggedJob, ...]
    passed_over: FrozenMap[str, int] = field(default_factory=FrozenMap)
    """How many jobs, by the `PassedOver` reason; only reasons that occurred."""

    @property
    def num_logged(self) -> int:
        """Jobs that the log holds, passed over or not."""
        return len(self.jobs) + sum(self.passed_over.values())


Found = LoggedJob | PassedOver | None
"""What a row is. None: it cannot be told, and the problems say why."""


class Intake:
    """Gathers what a reader finds, job by job, and gives the list or the one error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        """What is wrong with the file as a whole: never passed over."""
        self._damages: list[str] = []
        self._jobs: list[LoggedJob] = []
        self._passed_over: Counter[PassedOver] = Counter()

    def take(self, found: Found, problems: Sequence[str]) -> None:
        """One job, or why it is none. With problems it counts as damaged, whatever was found."""
        if problems:
            self._damages += problems
            self._passed_over[PassedOver.DAMAGED] += 1
        elif isinstance(found, LoggedJob):
            self._jobs.append(found)
        elif found is not None:
            self._passed_over[found] += 1

    def job_list(self, skip_damaged: bool) -> JobList:
        """The jobs; raises InvalidDocument if the file or, unless skipped, a row of it is damaged."""
        if self.problems or (self._damages and not skip_damaged):
            skip = ", or pass damaged jobs over: skip_damaged, --skip-damaged" if not self.problems else ""
            fix = f"Mend the file (layout: docs/workloads.md){skip}"
            raise refusal(KIND, self.path, [*self.problems, *self._damages], fix)
        counts = FrozenMap(
            {str(reason): self._passed_over[reason] for reason in PassedOver if self._passed_over[reason]}
        )
        return JobList(self.path.stem or KIND, tuple(self._jobs), counts)


def read_table(
    path: Path, text: str, columns: Sequence[str], job: Callable[[Row], Found], skip_damaged: bool
) -> JobList:
    """The jobs of a CSV file with one row a job."""
    intake = Intake(path)
    for row in read_rows(text, columns, intake.problems):
        intake.take(None if row.problems else job(row), row.problems)
    return intake.job_list(skip_damaged)
