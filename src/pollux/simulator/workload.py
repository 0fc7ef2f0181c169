"""Workloads: which jobs arrive when, and what their owners ask for.

Read from and written to CSV in the layout of the paper's artifact: name, time, application, num_replicas, batch_size.
Every damaged row is named with its line and column, all of them in one error. What a job really does is not here: that
is its application's.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.core import BatchLimits, Cluster, checks
from pollux.errors import InvalidDocument, InvalidSpec, UnknownName
from pollux.simulator.csv_table import Row, read_rows
from pollux.simulator.documents import read_text, refusal

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
"""What a file must have, in the order that `write_workload` gives; others are passed over."""


def base_name(application: str) -> str:
    """`cifar10` of `cifar10:0.2`, which is the same application with a training run a fifth as long."""
    return application.partition(":")[0]


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

    `limits` are those of the applications that may be named: KeyError for any other, InvalidSpec for one that is
    named in a length that it cannot have. With a cluster, jobs that ask for more GPUs than its
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
        for row in read_rows(text, COLUMNS, self.problems):
            if not row.problems and (job := self._job(row)) is not None:
                yield job
            self.problems += row.problems

    def _job(self, row: Row) -> WorkloadJob | None:
        name = self._name(row)
        time = row.at_least_zero("time", "give seconds after the start of the workload, 0 or more")
        gpus, batch = row.whole("num_replicas"), row.whole("batch_size")
        application = row.get("application")
        limits = None if application is None else self._limits_of(row, application)
        if application is not None and limits is not None and batch is not None:
            _check_batch(row, application, limits, gpus, batch)
        if gpus is not None and self.max_gpus is not None and gpus > self.max_gpus:
            fix = f"ask for {self.max_gpus} or fewer, or take a larger cluster"
            row.wrong("num_replicas", f"more GPUs than the {self.max_gpus} of the cluster", fix)
        if name is None or time is None or application is None or gpus is None or batch is None:
            return None
        return None if row.problems else WorkloadJob(name, time, application, gpus, batch)

    def _limits_of(self, row: Row, application: str) -> BatchLimits | None:
        base = base_name(application)
        try:
            return self.limits[application]
        except InvalidSpec as error:  # of its length
            row.wrong("application", error.problem, error.fix[:1].lower() + error.fix[1:])
        except KeyError:
            if base != application and base in self.limits:
                row.wrong("application", "measured traces come in one length only", f"give {base}")
            else:
                row.wrong("application", "no such application", UnknownName("", base, self.limits).fix)
        return None

    def _name(self, row: Row) -> str | None:
        """The name, noted as wrong if a row above has it."""
        text = row.get("name")
        if text is None:
            return None
        if problem := _name_problem(text):
            row.wrong("name", problem[0], problem[1][:1].lower() + problem[1][1:])
        elif text in self._line_of:
            row.wrong("name", f"line {self._line_of[text]} has the same name", "give each job a name of its own")
        else:
            self._line_of[text] = row.line
        return text


def _check_batch(row: Row, application: str, limits: BatchLimits, gpus: int | None, batch: int) -> None:
    """Notes a batch size that the application cannot train with.

    Below M0 nothing is known of an application: neither its gradient noise nor, in the artifact, any measurement.
    """
    low, high, share = limits.initial_batch_size, limits.max_batch_size, limits.min_per_gpu_batch_size
    if batch > high:
        row.wrong("batch_size", f"more than {high}, the largest of {application}", f"give {low} to {high}")
    elif batch < low:
        row.wrong("batch_size", f"less than {low}, the initial one of {application}", f"give {low} to {high}")
    elif gpus is not None and batch < gpus * share:
        fewer = f"lower num_replicas to {batch // share}" if batch >= share else ""
        more = f"raise batch_size to {gpus * share}" if gpus * share <= high else ""
        fix = " or ".join(filter(None, (more, fewer))) or "take another application"
        row.wrong("batch_size", f"less than {share} examples on each of {gpus} GPUs", fix)


def _name_problem(name: str) -> tuple[str, str] | None:
    """What is wrong with a name, and the fix. One line of visible text, so that any file and log can hold it."""
    if not name.isprintable():
        return "holds a line break or another unprintable character", "Give a name of one line of visible text"
    if name != name.strip():
        return "begins or ends with a space", "Leave the space out"
    return None
