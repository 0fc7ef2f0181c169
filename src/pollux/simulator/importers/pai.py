"""Alibaba's PAI trace of 2020 (cluster-trace-gpu-v2020): `pai_task_table.csv`, one row a task, several a job.

The table is published without the names of its columns, and is read with and without. Its times are whole POSIX
seconds of made-up dates whose time of day is right in UTC+8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pollux.simulator.csv_table import Row, read_rows
from pollux.simulator.importers.job_list import Found, Intake, JobList, LoggedJob, PassedOver
from pollux.simulator.importers.recorded import is_open, recorded_seconds

COLUMNS = ("job_name", "inst_num", "start_time", "end_time", "plan_gpu")
PUBLISHED = (
    *("job_name", "task_name", "inst_num", "status", "start_time"),
    *("end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)
"""The columns of the published file in their order."""

_CLOCK_S = 8 * 3600.0  # so that the time of day is that of the place, as in the other formats
_ROUNDING = 1e-6  # of sums of percents such as 33.3: less than any share that is planned


@dataclass(frozen=True, slots=True)
class _Task:
    """A task that asks for GPUs."""

    percent: float
    """100 is one GPU; of all its instances together."""
    start: float | None
    end: float | None


@dataclass(slots=True)
class _Job:
    tasks: list[_Task] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_pai(path: Path, text: str, *, skip_damaged: bool = False) -> JobList:
    """Jobs in the order of their first task. A job with a damaged task is damaged as a whole."""
    intake = Intake(path)
    jobs: dict[str, _Job] = {}
    for row in read_rows(text, COLUMNS, intake.problems, unnamed=PUBLISHED):
        task = None if row.problems else _task(row)
        if (name := row.cells.get("job_name")) is None or name == "":
            intake.take(None, row.problems)
            continue
        job = jobs.setdefault(name, _Job())
        job.problems += row.problems
        if task is not None:
            job.tasks.append(task)
    for name, job in jobs.items():
        intake.take(None if job.problems else _job(name, job.tasks), job.problems)
    return intake.job_list(skip_damaged)


def _task(row: Row) -> _Task | None:
    """None: it asks for no GPU, or is damaged."""
    row.get("job_name")
    start, end = _time(row, "start_time"), _time(row, "end_time")
    if start is not None and end is not None and end < start:
        row.wrong("end_time", f"is before start_time = {row.cells['start_time']!r}", "mend one of them")
    if is_open(row, "plan_gpu"):
        return None
    percent = row.at_least_zero("plan_gpu", "give percent of a GPU, 0 or more")
    if percent is None or percent == 0.0:
        return None
    if not (instances := row.whole("inst_num", 0)):
        return None
    if not math.isfinite(total := percent * instances):
        row.wrong("inst_num", f"is too many of plan_gpu = {row.cells['plan_gpu']!r}", "mend one of them")
        return None
    return _Task(total, start, end)


def _time(row: Row, column: str) -> float | None:
    """Seconds; None where there are none. A zero means so too: the published times begin days after it."""
    return recorded_seconds(row, column) or None


def _job(name: str, tasks: Sequence[_Task]) -> Found:
    """From its first start to its last end. The GPUs of all tasks are summed and then rounded up."""
    if not tasks:
        return PassedOver.NO_GPUS
    starts = [task.start for task in tasks if task.start is not None]
    ends = [task.end for task in tasks if task.start is not None and task.end is not None]
    if not starts:
        return PassedOver.NO_START
    if len(ends) < len(starts):
        return PassedOver.NO_END
    gpus = math.ceil(math.fsum(task.percent for task in tasks) / 100.0 - _ROUNDING)
    return LoggedJob(name, min(starts) + _CLOCK_S, max(ends) - min(starts), max(gpus, 1))
