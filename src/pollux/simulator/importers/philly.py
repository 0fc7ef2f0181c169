"""Microsoft's Philly trace as published (msr-fiddle/philly-traces): `cluster_job_log`, a JSON array of jobs.

A job may have run in several attempts. Its duration is the time of all of them, without the waiting between; its GPUs
are those of the largest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pollux.errors import InvalidDocument
from pollux.simulator.documents import parsed_text, shown
from pollux.simulator.importers.job_list import KIND, Found, Intake, JobList, LoggedJob, PassedOver
from pollux.simulator.importers.recorded import MISSING, TIME_FIX, parse_time

KEYS = ("jobid", "submitted_time", "attempts")
"""And of each attempt `start_time`, `end_time` and the `gpus` of its `detail`; `vc` is read where it is there."""


def read_philly(path: Path, text: str, *, skip_damaged: bool = False) -> JobList:
    """Times are local and without an offset: on the night when clocks go back an attempt may end before it starts."""
    records = parsed_text(KIND, path, text, "JSON", json.loads)
    if not isinstance(records, list) or not records:
        problem = f"holds {shown(records)} where an array of jobs belongs"
        raise InvalidDocument(KIND, str(path), problem, 'Give [{"jobid": …, "submitted_time": …, "attempts": […]}, …]')
    intake = Intake(path)
    for index, content in enumerate(records):
        problems: list[str] = []
        if isinstance(content, dict):
            intake.take(_job(_Object(f"[{index}]", content, problems)), problems)
        else:
            problems.append(f"[{index}] = {shown(content)}: is not an object; write {{…}}")
            intake.take(None, problems)
    return intake.job_list(skip_damaged)


@dataclass(frozen=True, slots=True)
class _Object:
    """A JSON object at its place in the file. A method that returns None or nothing has noted what is wrong."""

    path: str
    content: Mapping[str, object]
    problems: list[str]

    def wrong(self, key: str, what: str, fix: str) -> None:
        self.problems.append(f"{self.path}.{key} = {shown(self.content[key])}: {what}; {fix}")

    def has(self, key: str) -> bool:
        if key not in self.content:
            self.problems.append(f"{self.path}.{key}: is missing; add it")
        return key in self.content

    def text(self, key: str) -> str | None:
        if not self.has(key):
            return None
        value = self.content[key]
        if isinstance(value, str) and value:
            return value
        self.wrong(key, "is not text", "give it in quotes")
        return None

    def time(self, key: str) -> float | None:
        """None also where the log left it open."""
        if not self.has(key):
            return None
        value = self.content[key]
        if value is None or (isinstance(value, str) and value in MISSING):
            return None
        time = parse_time(value) if isinstance(value, str) else None
        if time is None:
            self.wrong(key, "is not a time", TIME_FIX)
        return time

    def array(self, key: str) -> list[object]:
        """Empty where the log left it open."""
        value = self.content[key] if self.has(key) else None
        if value is not None and not isinstance(value, list):
            self.wrong(key, "is not an array", "write […]")
        return value if isinstance(value, list) else []

    def objects(self, key: str) -> list[_Object]:
        found = []
        for index, content in enumerate(self.array(key)):
            path = f"{self.path}.{key}[{index}]"
            if isinstance(content, dict):
                found.append(_Object(path, content, self.problems))
            else:
                self.problems.append(f"{path} = {shown(content)}: is not an object; write {{…}}")
        return found


class _Attempt(NamedTuple):
    start: float | None
    end: float | None
    num_gpus: int


def _job(job: _Object) -> Found:
    name, submitted_at = job.text("jobid"), job.time("submitted_time")
    attempts = [_attempt(attempt) for attempt in job.objects("attempts")]
    if submitted_at is None and not job.problems:
        job.wrong("submitted_time", "is left open", "give the time of submission, or take the job out")
    if name is None or submitted_at is None or job.problems:
        return None
    if attempts and attempts[-1].end is None:
        return PassedOver.NO_END
    # One of several attempts without a start or an end is a slip of the log, say its authors.
    times = [each.end - each.start for each in attempts if each.start is not None and each.end is not None]
    if not times:
        return PassedOver.NO_START
    gpus = max(attempt.num_gpus for attempt in attempts)
    if gpus == 0:
        return PassedOver.NO_GPUS
    vc = job.content.get("vc")
    return LoggedJob(name, submitted_at, sum(times), gpus, vc if isinstance(vc, str) and vc not in MISSING else None)


def _attempt(attempt: _Object) -> _Attempt:
    start, end = attempt.time("start_time"), attempt.time("end_time")
    if start is not None and end is not None and end < start:
        attempt.wrong("end_time", f"is before start_time = {attempt.content['start_time']!r}", "mend one of them")
    return _Attempt(start, end, sum(len(node.array("gpus")) for node in attempt.objects("detail")))
