"""SenseTime's Helios traces: `cluster_log.csv`, one row a Slurm job."""

from __future__ import annotations

from pathlib import Path

from pollux.simulator.csv_table import Row
from pollux.simulator.importers.job_list import Found, JobList, LoggedJob, PassedOver, read_table
from pollux.simulator.importers.recorded import optional_text, recorded_time

COLUMNS = ("job_id", "gpu_num", "submit_time", "start_time", "end_time")
"""`vc` is read where it is there. `duration` and `queue` are differences of the three times, and are not."""


def read_helios(path: Path, text: str, *, skip_damaged: bool = False) -> JobList:
    """Half of the published jobs ask for no GPU; they are passed over."""
    return read_table(path, text, COLUMNS, _job, skip_damaged)


def _job(row: Row) -> Found:
    name, gpus = row.get("job_id"), row.whole("gpu_num", 0)
    submitted_at, start, end = (recorded_time(row, column) for column in COLUMNS[2:])
    if submitted_at is None and not row.problems and "submit_time" in row.cells:
        row.wrong("submit_time", "is left open", "give the time of submission, or take the row out")
    if start is not None and end is not None and end < start:
        row.wrong("end_time", f"is before start_time = {row.cells['start_time']!r}", "mend one of them")
    if name is None or gpus is None or submitted_at is None or row.problems:
        return None
    if gpus == 0:
        return PassedOver.NO_GPUS
    if start is None:
        return PassedOver.NO_START
    if end is None:
        return PassedOver.NO_END
    return LoggedJob(name, submitted_at, end - start, gpus, optional_text(row, "vc"))
