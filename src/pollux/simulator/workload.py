"""Workloads: which jobs arrive when, and what their owners ask for.

Read from and written to CSV in the layout of the paper's artifact: name, time, application, num_replicas, batch_size.
Every damaged row is named with its line and column, all of them in one error. What a job really does is not here: that
is its application's.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.core import BatchLimits, Cluster, checks
from pollux.errors import InvalidDocument, InvalidSpec, UnknownName
from pollux.simulator.documents import read_text, refusal, shown

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
"""What a file must have, in the order that `write_workload` gives; others are passed over."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WorkloadJob:
    """One job: when it arrives, and what its owner would choose for it."""

    name: str
    submitted_at_s: float
    """Seconds after the start of the workload."""
    application: str
    num_gpus: int
    batch_size: int
    """Over all GPUs together. Split by rounding up, so it need not be a multiple of num_gpus."""

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "name", self.name)
        if problem := _name_problem(self.name):
            raise InvalidSpec("name", self.name, *problem)
        checks.finite(InvalidSpec, "submitted_at_s", self.submitted_at_s, 0)
        checks.text(InvalidSpec, "application", self.application)
        checks.whole(InvalidSpec, "num_gpus", self.num_gpus, 1)
        checks.whole(InvalidSpec, "batch_size", self.batch_size, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in the order of their arrival; those of the same second in the order of the file. Names are unique."""

    name: str
    jobs: tuple[WorkloadJob, ...]

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "name", self.name)
        if not isinstance(self.jobs, tuple):
            raise InvalidSpec("jobs", self.jobs, "must be a tuple of WorkloadJob", "Give tuple(jobs)")
        names = set()
        for index, job in enumerate(self.jobs):
            checks.instance(InvalidSpec, f"jobs[{index}]", job, WorkloadJob)
            if job.name in names:
                raise InvalidSpec(f"jobs[{index}].name", job.name, "occurs twice", "Give each job a name of its own")
            names.add(job.name)
        for index, (left, right) in enumerate(itertools.pairwise(self.jobs), 1):
            if right.submitted_at_s < left.submitted_at_s:
                problem = f"comes before the job ahead of it, {left.submitted_at_s:g}"
                raise InvalidSpec(
                    f"jobs[{index}].submitted_at_s", right.submitted_at_s, problem, "Sort the jobs by submitted_at_s"
                )


def read_workload(path: Path, limits: Mapping[str, BatchLimits], cluster: Cluster | None = None) -> Workload:
    """The jobs of a CSV file; raises InvalidDocument with every damaged row.

    `limits` are those of the applications that may be named. With a cluster, jobs that ask for more GPUs than its
    schedulable nodes have are refused as well. The workload is named as the file, without its ending.
    """
    text = read_text("workload", path)
    reader = _Reader(limits, cluster.num_gpus if cluster is not None else None)
    jobs = list(reader.jobs(text))
    if reader.problems:
        raise refusal("workload", path, reader.problems, "Mend the file (layout: docs/workloads.md)")
    return Workload(path.stem or "workload", tuple(sorted(jobs, key=lambda job: job.submitted_at_s)))


def checked(workload: Workload, limits: Mapping[str, BatchLimits], cluster: Cluster) -> Workload:
    """The same workload, if `read_workload` would take it: for those that do not come from a file."""
    reader = _Reader(limits, cluster.num_gpus)
    for _ in reader.jobs(to_csv(workload)):
        pass
    if reader.problems:
        raise refusal("workload", Path(workload.name), reader.problems, "Use a larger cluster, other traces or none")
    return workload


def write_workload(workload: Workload, path: Path) -> None:
    """Writes what `read_workload` reads back unchanged, byte for byte the same on every machine."""
    try:
        path.write_bytes(to_csv(workload).encode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "Name a file in a folder that is there and may be written to"
        raise InvalidDocument("workload", str(path), f"cannot be written: {reason}", fix) from error


def to_csv(workload: Workload) -> str:
    """The text of `write_workload`."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for job in workload.jobs:
        at = float(job.submitted_at_s)
        time = str(int(at)) if at.is_integer() else repr(at)
        writer.writerow((job.name, time, job.application, job.num_gpus, job.batch_size))
    return stream.getvalue()


class _Reader:
    """Rows to jobs; what cannot be used goes to `problems`, one line each."""

    def __init__(self, limits: Mapping[str, BatchLimits], max_gpus: int | None) -> None:
        self.limits = limits
        self.max_gpus = max_gpus
        self.problems: list[str] = []
        self._line_of: dict[str, int] = {}

    def jobs(self, text: str) -> Iterator[WorkloadJob]:
        """The jobs of the usable rows, in the order of the file."""
        rows = self._rows(text)
        line, header = next(rows, (1, []))
        if not header:
            if not self.problems:
                self.problems.append(f"the file is empty; begin it with the line {','.join(COLUMNS)}")
            return
        if not self._knows_columns(line, header):
            return
        is_bare = True
        for line, cells in rows:
            is_bare = False
            if any(cells[len(header) :]):
                fix = "quote the cell that holds a comma"
                self.problems.append(f"line {line}: {len(cells)} cells for {len(header)} columns; {fix}")
            elif (job := self._job(line, dict(itertools.zip_longest(header, cells[: len(header)])))) is not None:
                yield job
        if is_bare and not self.problems:
            self.problems.append(f"line {line}: no jobs follow the names of the columns; add one line a job")

    def _rows(self, text: str) -> Iterator[tuple[int, list[str]]]:
        """First line and cells of each row that is not blank."""
        reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
        before = 0
        try:
            for row in reader:
                cells = [cell.strip() for cell in row]
                if any(cells):
                    yield before + 1, cells
                before = reader.line_num
        except csv.Error as error:
            self.problems.append(f"line {before + 1}: {error}; close every quote, and put one job on a line")

    def _knows_columns(self, line: int, header: list[str]) -> bool:
        """Whether each column occurs once. Without names of columns nothing below them can be told apart."""
        missing = [column for column in COLUMNS if column not in header]
        if len(missing) == len(COLUMNS):
            fix = f"begin the file with {','.join(COLUMNS)}"
            self.problems.append(f"line {line}: {shown(','.join(header))} names none of the columns; {fix}")
            return False
        for column in missing:
            self.problems.append(f"line {line}: column {column!r} is missing; add it, also to each row")
        twice = [column for column in COLUMNS if header.count(column) > 1]
        for column in twice:
            self.problems.append(f"line {line}: column {column!r} occurs twice; keep one of them")
        return not twice

    def _job(self, line: int, cells: Mapping[str, str | None]) -> WorkloadJob | None:
        before = len(self.problems)
        row = _Row(line, cells, self.problems)
        name, time = row.name(self._line_of), row.time()
        gpus, batch = row.whole("num_replicas"), row.whole("batch_size")
        application = row.get("application")
        if application is not None and application not in self.limits:
            row.wrong("application", "no such application", UnknownName("", application, self.limits).fix)
        elif application is not None and batch is not None:
            row.check_batch(application, self.limits[application], gpus, batch)
        if gpus is not None and self.max_gpus is not None and gpus > self.max_gpus:
            fix = f"ask for {self.max_gpus} or fewer, or take a larger cluster"
            row.wrong("num_replicas", f"more GPUs than the {self.max_gpus} of the cluster", fix)
        if name is None or time is None or application is None or gpus is None or batch is None:
            return None
        return WorkloadJob(name, time, application, gpus, batch) if len(self.problems) == before else None


@dataclass(frozen=True, slots=True)
class _Row:
    """The cells of one row. A method that returns None has noted what is wrong."""

    line: int
    cells: Mapping[str, str | None]
    """By column; None where the row ends early. A column that the whole file lacks is noted already, and not here."""
    problems: list[str]

    def wrong(self, column: str, what: str, fix: str) -> None:
        self.problems.append(f"line {self.line}, {column} = {shown(self.cells[column])}: {what}; {fix}")

    def get(self, column: str) -> str | None:
        text = self.cells.get(column)
        if text is None and column in self.cells:
            self.problems.append(f"line {self.line}, {column}: the row ends before it; complete the row")
        elif text == "":
            self.wrong(column, "is empty", "fill the cell")
        return text or None

    def name(self, line_of: dict[str, int]) -> str | None:
        """The name, if no row above has it; `line_of` remembers it."""
        text = self.get("name")
        if text is None:
            return None
        if problem := _name_problem(text):
            self.wrong("name", problem[0], problem[1][:1].lower() + problem[1][1:])
        elif text in line_of:
            self.wrong("name", f"line {line_of[text]} has the same name", "give each job a name of its own")
        else:
            line_of[text] = self.line
        return text

    def _number(self, column: str, text: str) -> float | None:
        fix = "give digits, such as 16"
        if not _NUMBER.fullmatch(text) and not _NOT_FINITE.fullmatch(text):
            self.wrong(column, "is not a number", fix)
            return None
        if not math.isfinite(value := float(text)):
            self.wrong(column, "is not finite", fix)
            return None
        return value

    def time(self) -> float | None:
        """Seconds; a zero has no sign."""
        if (text := self.get("time")) is None or (value := self._number("time", text)) is None:
            return None
        if value < 0.0:
            self.wrong("time", "is negative", "give seconds after the start of the workload, 0 or more")
            return None
        return value + 0.0

    def whole(self, column: str) -> int | None:
        """A whole number of 1 or more; `4.0` is one."""
        if (text := self.get(column)) is None or (value := self._number(column, text)) is None:
            return None
        if not value.is_integer():
            self.wrong(column, "is not a whole number", f"give {max(math.ceil(value), 1)} or another whole number")
        elif value < 1.0:
            self.wrong(column, "is less than 1", "give a whole number of 1 or more")
        else:
            return int(value)
        return None

    def check_batch(self, application: str, limits: BatchLimits, gpus: int | None, batch: int) -> None:
        """Notes a batch size that the application cannot train with.

        Below M0 nothing is known of an application: neither its gradient noise nor, in the artifact, any measurement.
        """
        low, high, share = limits.initial_batch_size, limits.max_batch_size, limits.min_per_gpu_batch_size
        if batch > high:
            self.wrong("batch_size", f"more than {high}, the largest of {application}", f"give {low} to {high}")
        elif batch < low:
            self.wrong("batch_size", f"less than {low}, the initial one of {application}", f"give {low} to {high}")
        elif gpus is not None and batch < gpus * share:
            fewer = f"lower num_replicas to {batch // share}" if batch >= share else ""
            more = f"raise batch_size to {gpus * share}" if gpus * share <= high else ""
            fix = " or ".join(filter(None, (more, fewer))) or "take another application"
            self.wrong("batch_size", f"less than {share} examples on each of {gpus} GPUs", fix)


def _name_problem(name: str) -> tuple[str, str] | None:
    """What is wrong with a name, and the fix. One line of visible text, so that any file and log can hold it."""
    if not name.isprintable():
        return "holds a line break or another unprintable character", "Give a name of one line of visible text"
    if name != name.strip():
        return "begins or ends with a space", "Leave the space out"
    return None
