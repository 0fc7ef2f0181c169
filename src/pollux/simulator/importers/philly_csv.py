"""The reduced list of the paper's artifact, `philly.csv`; also the simplest layout to bring one's own log into."""

from __future__ import annotations

from pathlib import Path

from pollux.simulator.csv_table import Row
from pollux.simulator.importers.job_list import Found, JobList, LoggedJob, PassedOver, read_table
from pollux.simulator.importers.recorded import optional_text, recorded_seconds, recorded_time

COLUMNS = ("timestamp", "duration", "num_gpus")
"""`cluster` is read where it is there; `gpu_time` is the product of two others, and is not."""


def read_philly_csv(path: Path, text: str, *, skip_damaged: bool = False) -> JobList:
    """One row a job, named by its line: the layout has no names."""
    return read_table(path, text, COLUMNS, _job, skip_damaged)


def _job(row: Row) -> Found:
    gpus = row.whole("num_gpus", 0)
    duration_s = recorded_seconds(row, "duration")
    submitted_at = recorded_time(row, "timestamp")
    if submitted_at is None and not row.problems and "timestamp" in row.cells:
        row.wrong("timestamp", "is left open", "give the time of submission, or take the row out")
    if gpus is None or submitted_at is None or row.problems:
        return None
    if gpus == 0:
        return PassedOver.NO_GPUS
    if duration_s is None:
        return PassedOver.NO_END
    return LoggedJob(f"line-{row.line}", submitted_at, duration_s, gpus, optional_text(row, "cluster"))
