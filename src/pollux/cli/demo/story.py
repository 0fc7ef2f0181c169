"""What became of the jobs of a demo, told from the service's events, its views of jobs, and what the jobs printed.

Times are seconds after the first submission of the run. Nothing is asked here and nothing is printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from pollux.cli import words
from pollux.cli.demo.workload import Arrival, Target
from pollux.cli.trial.running import Outage, notice_time_s, notices
from pollux.core import Phase
from pollux.wire.api import EventView, JobView

REFERENCE = "fifo"
"""The policy that the others are held against."""


@dataclass(frozen=True, slots=True)
class Moment:
    """How a job trains from here on; with no GPUs: it does not."""

    at_s: float
    gpus: int
    batch_size: int
    learning_rate_factor: float


@dataclass(frozen=True, slots=True)
class JobStory:
    """One job, from its submission to its end."""

    name: str
    command: str
    requested_gpus: int | None
    target: Target
    phase: Phase
    exit_reason: str
    submitted_at_s: float
    first_gpu_at_s: float | None
    finished_at_s: float | None
    gpu_s: float
    reallocations: int
    in_place: int
    """Changes of its replicas while it trained on."""
    starts: int
    """How often it trained from the beginning: once, if all is well."""
    resumes: int
    """How often it went on from a checkpoint."""
    failures: int
    moments: tuple[Moment, ...]
    value: float | None
    """What it printed last, of the metric that its target names; the worst of its replicas."""

    @property
    def jct_s(self) -> float | None:
        return None if self.finished_at_s is None else self.finished_at_s - self.submitted_at_s

    @property
    def faults(self) -> list[str]:
        """What must not happen in a demo, a sentence each."""
        found = []
        if self.phase is not Phase.SUCCEEDED:
            found.append(f"{self.name} is {self.phase}{f': {self.exit_reason}' if self.exit_reason else ''}.")
        elif self.value is None:
            found.append(f"{self.name} has not printed its {self.target.metric}.")
        elif not self.target.is_reached_by(self.value):
            found.append(
                f"{self.name} has not reached its target: {self.target.metric} {self.value:.4g}, not {self.target}."
            )
        if self.starts > 1:
            found.append(f"{self.name} has started from scratch {self.starts} times.")
        if self.failures:
            found.append(f"{self.name} has failed {self.failures} times on its way.")
        return found


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """All jobs under one policy."""

    policy: str
    gpus: int
    seconds: float
    """From the first submission to the last end."""
    jobs: tuple[JobStory, ...]
    events: tuple[tuple[float, str], ...] = ()
    """Sentences for people, with their times."""
    outage: Outage | None = None
    faults: tuple[str, ...] = ()
    """Of the run itself; those of its jobs are with them."""

    @property
    def avg_jct_s(self) -> float | None:
        """None if a job has not ended."""
        times = [job.jct_s for job in self.jobs]
        known = [time for time in times if time is not None]
        return sum(known) / len(known) if known and len(known) == len(times) else None

    @property
    def reallocations(self) -> int:
        return sum(job.reallocations for job in self.jobs)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What `pollux demo` found, run by run."""

    runs: tuple[PolicyRun, ...]
    cores: int
    is_on_gpus: bool

    @property
    def faults(self) -> list[str]:
        """Empty: every job reached its target, nobody started from scratch, nothing was left running."""
        return [
            f"{run.policy}: {fault}"
            for run in self.runs
            for fault in (*run.faults, *(f for j in run.jobs for f in j.faults))
        ]

    def run(self, policy: str) -> PolicyRun | None:
        return next((run for run in self.runs if run.policy == policy), None)

    @property
    def jct_ratio_vs_fifo(self) -> float | None:
        """Average JCT of the first policy over that of fifo: below 1 is better. None if either is unknown."""
        reference = self.run(REFERENCE)
        if reference is None or self.runs[0] is reference:
            return None
        ours, theirs = self.runs[0].avg_jct_s, reference.avg_jct_s
        return ours / theirs if ours is not None and theirs else None

    @property
    def reallocations(self) -> int:
        """Of the first run."""
        return self.runs[0].reallocations

    def document(self) -> dict[str, Any]:
        """All of it as plain data."""
        runs = []
        for run in self.runs:
            jobs = [{**asdict(job), "jct_s": job.jct_s, "faults": job.faults} for job in run.jobs]
            plain = {**asdict(run), "avg_jct_s": run.avg_jct_s, "reallocations": run.reallocations}
            runs.append({**plain, "jobs": jobs})
        return {
            "jct_ratio_vs_fifo": self.jct_ratio_vs_fifo,
            "reallocations": self.reallocations,
            "cores": self.cores,
            "is_on_gpus": self.is_on_gpus,
            "faults": self.faults,
            "runs": runs,
        }


def story(
    arrival: Arrival, view: JobView, events: Iterable[EventView], printed: Sequence[str], begin_s: float
) -> JobStory:
    """One job from its last view, its own events and notices, and the ends of the logs of its replicas.

    A notice may come twice, from the service and from the job's journal: it counts once.
    """
    events = list(events)
    # Said again when the service comes back, hence a set. Each generation starts, resumes or takes over in place.
    generations = {event.detail["generation"] for event in events if event.kind == "ReplicasReady"}
    told = notices(events)
    starts, resumes = (sum(notice.kind == f"Training{how}" for notice in told) for how in ("Started", "Resumed"))
    moments = [_moment(notice, begin_s) for notice in told]
    if moments and view.finished_at_s is not None:
        last = moments[-1]
        ended_s = max(view.finished_at_s - begin_s, last.at_s)
        moments.append(Moment(ended_s, 0, last.batch_size, last.learning_rate_factor))
    values = [value for text in printed if (value := printed_value(text, arrival.target.metric)) is not None]
    requested = arrival.document.get("requested_gpus")
    command = arrival.document.get("command", "")
    return JobStory(
        arrival.name,
        command if isinstance(command, str) else " ".join(command),
        requested if isinstance(requested, int) else None,
        arrival.target,
        view.phase,
        view.exit_reason,
        view.submitted_at_s - begin_s,
        None if view.started_at_s is None else view.started_at_s - begin_s,
        None if view.finished_at_s is None else view.finished_at_s - begin_s,
        view.attained_gpu_s,
        view.reallocations,
        max(len(generations) - starts - resumes, 0),
        starts,
        resumes,
        view.failures,
        tuple(moments),
        arrival.target.worst(values) if values else None,
    )


def _moment(notice: EventView, begin_s: float) -> Moment:
    state: Any = notice.detail["state"]
    gpus = 0 if notice.kind == "TrainingStopped" else int(state["replicas"])
    factors = state["learning_rate_factors"]
    return Moment(
        notice_time_s(notice) - begin_s, gpus, int(state["batch"]["batch_size"]), float(factors[0]) if factors else 1.0
    )


def printed_value(text: str, metric: str) -> float | None:
    """Of the last line that is a result as JSON and names that metric."""
    for line in reversed(text.splitlines()):
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict) and result.get("metric") == metric and isinstance(result.get("value"), int | float):
            return float(result["value"])
    return None


def changes(values: Iterable[float], least: float = 0.0, most: int = 6) -> str:
    """`1→3→2`: what a value went through, in moves by more than the share `least`; of a long way the two ends and the
    extremes between them."""
    way: list[float] = []
    for value in values:
        if not way or abs(value - way[-1]) > least * abs(way[-1]):
            way.append(value)
    shown = set(range(len(way)))
    if len(way) > most:
        inner = way[1:-1]
        shown = {0, 1 + inner.index(max(inner)), 1 + inner.index(min(inner)), len(way) - 1}
    parts = [words.figure(value) if index in shown else "…" for index, value in enumerate(way)]
    return "→".join(part for part, _ in groupby(parts)) or "–"
