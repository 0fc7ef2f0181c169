"""From a cluster's job list to a workload, the paper's way (section 5.1), or as the jobs really came.

The log says when jobs come and how big they are; what they train, and so how long they run, comes from the built-in
application that stands for their GPU time. Dates are discarded and the jobs of many days overlaid on one, unless
`consecutive` keeps a stretch of the log as it happened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import numpy as np

from pollux.applications import catalogue
from pollux.core import checks
from pollux.errors import InvalidSpec, UnknownName
from pollux.simulator.generator import (
    CONFIGURATIONS,
    MAX_JOBS,
    Configuration,
    realistic_configuration,
    tuned_within,
)
from pollux.simulator.importers.job_list import JobList, LoggedJob
from pollux.simulator.workload import Workload, WorkloadJob

T = TypeVar("T")

PAPER_NUM_JOBS = 160
DAY_S = 24 * 3600.0
REDRAWN_MAX_DURATION_S = DAY_S


class Category(NamedTuple):
    """Jobs of similar GPU time, and the applications that stand for them alike (paper, Table 1)."""

    name: str
    below_gpu_hours: float
    """And not below that of the category before."""
    applications: tuple[str, ...]
    is_redrawn: bool
    """Realistic GPUs come from any job of the category that ended within a day: the log has jobs of weeks on one GPU,
    but on one GPU the application would take longer still."""


CATEGORIES = (
    Category("small", 1.0, ("cifar10", "ncf"), is_redrawn=False),
    Category("medium", 10.0, ("deepspeech2", "bert"), is_redrawn=False),
    Category("large", 100.0, ("yolov3",), is_redrawn=True),
    Category("extra large", math.inf, ("imagenet",), is_redrawn=True),
)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a job list becomes a workload. Equal options and lists give equal workloads."""

    num_jobs: int | None = None
    """Drawn without replacement. None: 160, or with `consecutive` all that there are."""
    window_start_h: float = 2.0
    """First hour of the day; not with `consecutive`."""
    window_h: float = 8.0
    """Jobs that were submitted within so many hours; a day at most, unless `consecutive`."""
    min_duration_s: float = 60.0
    """Shorter jobs are left out."""
    max_gpu_hours: float = 1000.0
    """Jobs of so much GPU time or more are left out."""
    configuration: str = "tuned"
    """`tuned`: sizes and batch sizes that suit the application; `realistic`: the log's GPUs, M0 on each."""
    max_gpus: int | None = None
    """Largest request, so that every job fits a cluster; None: no limit."""
    seed: int = 0
    consecutive: bool = False
    """Keep the dates: the jobs of `window_h` hours as they came."""
    starts_at: float | None = None
    """With `consecutive`: where the window starts, in seconds as the log's times; None: where it holds most jobs."""
    cluster: str | None = None
    """Only jobs of this cluster or virtual cluster; None: of all."""
    gpu_type: str = "t4"
    """What tuned configurations are tuned for."""

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "num_jobs", self.num_jobs, 1, optional=True)
        if self.num_jobs is not None and self.num_jobs > MAX_JOBS:
            raise InvalidSpec("num_jobs", self.num_jobs, "too many", f"Give {MAX_JOBS} or fewer")
        checks.finite(InvalidSpec, "window_start_h", self.window_start_h, 0)
        checks.finite(InvalidSpec, "window_h", self.window_h, 0, above=True)
        checks.finite(InvalidSpec, "min_duration_s", self.min_duration_s, 0)
        checks.finite(InvalidSpec, "max_gpu_hours", self.max_gpu_hours, 0, above=True)
        if self.configuration not in CONFIGURATIONS:
            raise InvalidSpec(
                "configuration", self.configuration, "no such choice", f"Give {' or '.join(CONFIGURATIONS)}"
            )
        checks.whole(InvalidSpec, "max_gpus", self.max_gpus, 1, optional=True)
        checks.whole(InvalidSpec, "seed", self.seed, 0)
        checks.flag(InvalidSpec, "consecutive", self.consecutive)
        checks.finite(InvalidSpec, "starts_at", self.starts_at, None, optional=True)
        checks.text(InvalidSpec, "gpu_type", self.gpu_type)
        self._check_window()

    @property
    def window_hours(self) -> str:
        """The hours of the day, as people write them; the last is not in it."""
        end = self.window_start_h + self.window_h
        return f"{self.window_start_h:g}–{end if end <= 24.0 else end - 24.0:g}"

    def _check_window(self) -> None:
        if self.window_start_h >= 24.0:
            raise InvalidSpec(
                "window_start_h", self.window_start_h, "is no hour of the day", "Give 0 or more, below 24"
            )
        if not self.consecutive and self.window_h > 24.0:
            fix = "Give 24 or less, or keep the dates with consecutive"
            raise InvalidSpec("window_h", self.window_h, "is longer than the day that jobs are overlaid on", fix)
        if not self.consecutive and self.starts_at is not None:
            fix = "Set consecutive as well, or give window_start_h instead"
            raise InvalidSpec("starts_at", self.starts_at, "needs the dates, which are discarded", fix)


@dataclass(frozen=True, slots=True)
class Replay:
    """A workload, and how many jobs of the list each step left."""

    workload: Workload
    num_elsewhere: int
    """Of other clusters than the one asked for."""
    num_too_short: int
    num_too_large: int
    """Those too short are not among them."""
    num_usable: int
    num_in_window: int
    starts_at: float | None
    """Second 0 of the workload by the log's clock; None where dates were discarded."""


class _Arrival(NamedTuple):
    at_s: float
    """Whole seconds after the start of the window."""
    job: LoggedJob


def category_of(job: LoggedJob) -> Category:
    """By GPU time alone."""
    return next(category for category in CATEGORIES if job.gpu_hours < category.below_gpu_hours)


def replay(log: JobList, options: ReplayOptions | None = None) -> Replay:
    """A workload of `<application>-<index>` jobs at whole seconds."""
    options = ReplayOptions() if options is None else options
    jobs = _of_cluster(log, options.cluster)
    long_enough = [job for job in jobs if job.duration_s >= options.min_duration_s]
    usable = [job for job in long_enough if job.gpu_hours < options.max_gpu_hours]
    if not usable:
        asked = f"{options.min_duration_s:g} s or more and below {options.max_gpu_hours:g} GPU-hours"
        problem = f"none of its {len(jobs)} jobs is usable: {asked}"
        raise InvalidSpec("log", log.name, problem, "Let shorter or larger jobs in, or take another log")
    starts_at = _window_start(usable, options) if options.consecutive else None
    arrivals = _arrivals(usable, options, starts_at)
    wanted = _number_of_jobs(arrivals, options)

    # Only .random() of a named bit generator, and as many draws a job whatever the options: see `generator.generate`.
    draws = np.random.Generator(np.random.PCG64(options.seed)).random((len(arrivals), 3)).tolist()
    drawn = sorted(sorted(range(len(arrivals)), key=lambda index: draws[index][0])[:wanted])
    requests = _Requests([arrival.job for arrival in arrivals], options)
    workload_jobs = []
    for index, place in enumerate(drawn):
        at_s, job = arrivals[place]
        application, size = requests.of(job, draws[place][1], draws[place][2])
        workload_jobs.append(WorkloadJob(f"{application}-{index}", at_s, application, size.num_gpus, size.batch_size))
    return Replay(
        Workload(f"{log.name}-{options.configuration}-seed-{options.seed}", tuple(workload_jobs)),
        num_elsewhere=len(log.jobs) - len(jobs),
        num_too_short=len(jobs) - len(long_enough),
        num_too_large=len(long_enough) - len(usable),
        num_usable=len(usable),
        num_in_window=len(arrivals),
        starts_at=starts_at,
    )


def _of_cluster(log: JobList, cluster: str | None) -> Sequence[LoggedJob]:
    if cluster is None:
        return log.jobs
    jobs = [job for job in log.jobs if job.cluster == cluster]
    if not jobs:
        raise UnknownName("cluster", cluster, {job.cluster for job in log.jobs if job.cluster is not None})
    return jobs


def _arrivals(jobs: Sequence[LoggedJob], options: ReplayOptions, starts_at: float | None) -> list[_Arrival]:
    """The jobs of the window by time; those of the same second in the order of the log."""
    found = []
    for job in jobs:
        if starts_at is None:
            at_s = math.floor(job.submitted_at - options.window_start_h * 3600.0) % DAY_S
        else:
            at_s = math.floor(job.submitted_at - starts_at)
        if 0 <= at_s < options.window_h * 3600.0:
            found.append(_Arrival(float(at_s), job))
    return sorted(found, key=lambda arrival: arrival.at_s)


def _window_start(jobs: Sequence[LoggedJob], options: ReplayOptions) -> float:
    """Where the consecutive window starts: as given, or at the job with which it holds most, the first of such."""
    window_s = options.window_h * 3600.0
    if options.starts_at is not None:
        if not any(0 <= job.submitted_at - options.starts_at < window_s for job in jobs):
            times = [job.submitted_at for job in jobs]
            problem = f"no usable job was submitted within {options.window_h:g} h from then"
            fix = f"Give a time between {clock(min(times))} and {clock(max(times))}"
            raise InvalidSpec("starts_at", clock(options.starts_at), problem, fix)
        return options.starts_at
    times = sorted(math.floor(job.submitted_at) for job in jobs)
    best, most, end = times[0], 0, 0
    for begin, time in enumerate(times):
        while end < len(times) and times[end] - time < window_s:
            end += 1
        if end - begin > most:
            best, most = time, end - begin
    return float(best)


def _number_of_jobs(arrivals: Sequence[_Arrival], options: ReplayOptions) -> int:
    """How many to draw; raises InvalidSpec if the window holds too few."""
    there = len(arrivals)
    if options.consecutive:
        return there if options.num_jobs is None else min(options.num_jobs, there)
    wanted = PAPER_NUM_JOBS if options.num_jobs is None else options.num_jobs
    if wanted > there:
        counted = "1 usable job was" if there == 1 else f"{there} usable jobs were"
        problem = f"only {counted} submitted in hours {options.window_hours} of any day"
        fewer = f"Give {there} or fewer, widen" if there else "Widen"
        fix = f"{fewer} or move the window, or let shorter or larger jobs in"
        raise InvalidSpec("num_jobs", wanted, problem, fix)
    return wanted


def clock(time: float) -> str:
    """A time of the log as logs write it; plain seconds where no calendar reaches."""
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{time:g} s"


class _Requests:
    """What the jobs of a window stand for and ask for."""

    def __init__(self, jobs: Sequence[LoggedJob], options: ReplayOptions) -> None:
        self.options = options
        self._tuned: dict[str, tuple[Configuration, ...]] = {}
        self._pools: dict[str, list[int]] = {category.name: [] for category in CATEGORIES}
        for job in jobs:
            if job.duration_s <= REDRAWN_MAX_DURATION_S:
                self._pools[category_of(job).name].append(job.num_gpus)

    def of(self, job: LoggedJob, application_draw: float, size_draw: float) -> tuple[str, Configuration]:
        category = category_of(job)
        application = _choice(category.applications, application_draw)
        if self.options.configuration == "tuned":
            return application, _choice(self._tuned_of(application), size_draw)
        gpus = job.num_gpus
        if category.is_redrawn and (pool := self._pools[category.name]):
            gpus = _choice(pool, size_draw)
        return application, realistic_configuration(catalogue.load(application), gpus, self.options.max_gpus)

    def _tuned_of(self, application: str) -> tuple[Configuration, ...]:
        if application not in self._tuned:
            loaded = catalogue.load(application)
            self._tuned[application] = tuned_within(loaded, self.options.gpu_type, self.options.max_gpus)
        return self._tuned[application]


def _choice(choices: Sequence[T], draw: float) -> T:
    """All alike, for a draw of 0 … 1."""
    return choices[int(draw * len(choices))]
