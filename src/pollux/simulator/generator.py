"""Synthetic workloads from the catalogue of applications: seeded, pure, and the same bytes for ever.

Sizes and batch sizes as in the paper's evaluation (section 5.1): *tuned*, as an owner who knows the application well
would choose them, or *realistic*, as owners chose them on Microsoft's Philly cluster.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pollux.applications import Application, catalogue
from pollux.core import BatchLimits, FrozenMap, checks
from pollux.errors import InvalidSpec, UnknownName
from pollux.goodput import UNKNOWN_GRADIENT, GoodputModel, gain, iteration_time
from pollux.simulator.listed import FOUR, SIX, TWELVE
from pollux.simulator.workload import Workload, WorkloadJob

ARRIVALS = ("poisson", "uniform", "daily")
CONFIGURATIONS = ("tuned", "realistic")
MAX_JOBS = 1_000_000

PAPER_MIX = FrozenMap(  # paper, Table 1
    {"cifar10": 0.36, "ncf": 0.36, "deepspeech2": 0.10, "bert": 0.10, "yolov3": 0.06, "imagenet": 0.02}
)

TUNED_GPUS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
TUNED_GPUS_PER_NODE = 4
TUNED_MAX_TIME_S = 12 * 3600.0
TUNED_SCALING = (0.5, 0.8)
"""Speedup per GPU over the best 1-GPU configuration of a well-chosen size: both ends excluded (paper, section 5.2)."""
TUNED_POINTS = 20
"""Points of progress at which a whole run is summed up."""

# GPUs that jobs ask for in the Philly trace (philly.csv of the paper's artifact), by GPU time: shares of the 24,498
# jobs below 1 GPU·h, 4,771 of 1–10, 991 of 10–100 and 62 of 100–1000 that run a minute or more (the last two: a day
# or less) and arrive in the artifact's hours 2–9. 12, 24 and 64, 0.3 % at most, are left out.
_SMALL = ((1, 0.9822), (2, 0.0030), (4, 0.0098), (8, 0.0044), (16, 0.0004))
_MEDIUM = ((1, 0.9516), (2, 0.0019), (4, 0.0195), (8, 0.0216), (16, 0.0031), (32, 0.0017))
_LARGE = ((1, 0.5086), (2, 0.0383), (4, 0.2583), (8, 0.1705), (16, 0.0121), (32, 0.0091))
_EXTRA_LARGE = ((8, 0.6613), (16, 0.2581), (32, 0.0806))
_ALL = ((1, 0.9599), (2, 0.0040), (4, 0.0195), (8, 0.0139), (16, 0.0018), (32, 0.0007))
_REALISTIC = {  # the GPU time an application stands for (paper, Table 1); any other: all jobs together
    "cifar10": _SMALL,
    "ncf": _SMALL,
    "deepspeech2": _MEDIUM,
    "bert": _MEDIUM,
    "yolov3": _LARGE,
    "imagenet": _EXTRA_LARGE,
}


@dataclass(frozen=True, slots=True)
class GeneratorOptions:
    """What to generate. Equal options give equal workloads."""

    num_jobs: int = 160
    duration_s: float = 8 * 3600.0
    """All jobs arrive before this time."""
    seed: int = 0
    arrivals: str = "poisson"
    """`poisson`: at random; `uniform`: at equal gaps; `daily`: at random, most of them in the middle of the window."""
    configuration: str = "tuned"
    """`tuned`: sizes and batch sizes that suit the application; `realistic`: sizes as in the Philly trace."""
    mix: FrozenMap[str, float] = PAPER_MIX
    """Share of each application, in any unit."""
    max_gpus: int | None = None
    """Largest request, so that every job fits a cluster; None: no limit."""
    gpu_type: str = "t4"
    """What tuned configurations are tuned for."""

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "num_jobs", self.num_jobs, 1)
        if self.num_jobs > MAX_JOBS:
            raise InvalidSpec("num_jobs", self.num_jobs, "too many", f"Give {MAX_JOBS} or fewer")
        checks.finite(InvalidSpec, "duration_s", self.duration_s, 0, above=True)
        checks.whole(InvalidSpec, "seed", self.seed, 0)
        for name, known in (("arrivals", ARRIVALS), ("configuration", CONFIGURATIONS)):
            if (value := getattr(self, name)) not in known:
                raise InvalidSpec(name, value, "no such choice", f"Give {' or '.join(known)}")
        checks.whole(InvalidSpec, "max_gpus", self.max_gpus, 1, optional=True)
        checks.text(InvalidSpec, "gpu_type", self.gpu_type)
        checks.frozen(InvalidSpec, "mix", self.mix)
        for name, share in self.mix.items():
            checks.text(InvalidSpec, "mix", name)
            checks.finite(InvalidSpec, f'mix["{name}"]', share, 0)
        total = sum(self.mix.values())
        if not 0.0 < total < math.inf:
            raise InvalidSpec("mix", dict(self.mix), f"the shares sum to {total:g}", "Make one of them positive")


class Configuration(NamedTuple):
    """What a job asks for."""

    num_gpus: int
    batch_size: int


def generate(options: GeneratorOptions, applications: Mapping[str, Application] | None = None) -> Workload:
    """A workload of `<application>-<index>` jobs at whole seconds; `applications` are the built-in ones by default."""
    known = catalogue.names() if applications is None else tuple(applications)
    for name in options.mix:
        if name not in known:
            raise InvalidSpec("mix", name, "no such application", UnknownName("mix", name, known).fix)
    names = [name for name, share in options.mix.items() if share > 0]
    bounds = _bounds([options.mix[name] for name in names])
    choices = {}
    for name in names:
        application = catalogue.load(name) if applications is None else applications[name]
        choices[name] = _choices(application, options)

    # Only .random() of a named bit generator: distributions are revised between versions of numpy, this is not. As many
    # draws a job whatever the options, so that one option changes one thing.
    draws = np.random.Generator(np.random.PCG64(options.seed)).random((options.num_jobs, 5)).tolist()
    times = sorted(_arrival(options, index, draw[:3]) for index, draw in enumerate(draws))
    jobs = []
    for index, (at, draw) in enumerate(zip(times, draws, strict=True)):
        name = names[bisect.bisect_right(bounds, draw[3])]
        size_bounds, sizes = choices[name]
        size = sizes[bisect.bisect_right(size_bounds, draw[4])]
        jobs.append(WorkloadJob(f"{name}-{index}", at, name, size.num_gpus, size.batch_size))
    title = f"{options.configuration}-{options.arrivals}-{options.num_jobs}-seed-{options.seed}"
    return Workload(title, tuple(jobs))


def tuned_configurations(application: Application, gpu_type: str) -> tuple[Configuration, ...]:
    """What an owner who knows the application well might ask for; by number of GPUs, never empty.

    The best batch size of each number of GPUs whose whole run takes less than 12 hours and whose speedup per GPU is
    neither wasteful nor timid; without any, the best on one GPU (paper, section 5.2).
    """
    best = _best_times(application, gpu_type)
    alone_s, alone_batch = best[1]
    low, high = TUNED_SCALING
    valid = (
        Configuration(gpus, batch)
        for gpus, (seconds, batch) in best.items()
        if seconds < TUNED_MAX_TIME_S and low < alone_s / seconds / gpus < high
    )
    return tuple(valid) or (Configuration(1, alone_batch),)


@lru_cache(maxsize=256)
def _best_times(application: Application, gpu_type: str) -> FrozenMap[int, tuple[float, int]]:
    """By number of GPUs that the application can use: seconds of the fastest whole run, and its batch size.

    A run at batch size M on K GPUs takes total progress × T_iter / gain, with the gain of each point of progress.
    """
    limits = application.limits
    model = GoodputModel.on(application.throughput, gpu_type, UNKNOWN_GRADIENT, limits)
    iterations = {batch: _iterations(application, batch) for batch in _batch_sizes(limits)}
    best = {}
    for gpus in TUNED_GPUS:
        level = model.model.level(-(-gpus // TUNED_GPUS_PER_NODE), 1)
        times = []
        for batch, count in iterations.items():
            if batch < gpus * limits.min_per_gpu_batch_size:
                continue
            # Not `batch_split.split`, which stays below the largest batch size: published sizes were chosen without.
            passes = -(-batch // (gpus * limits.max_per_gpu_batch_size))
            per_gpu = -(-batch // (gpus * passes))
            seconds = float(iteration_time(model.model, model.theta, gpus, level, per_gpu, passes - 1))
            times.append((count * seconds, batch))
        if times:
            best[gpus] = min(times)
    return FrozenMap(best)


def _batch_sizes(limits: BatchLimits) -> list[int]:
    """M0, or the least that one GPU takes, times powers of two, up to the largest batch size."""
    least = _least_batch(limits)
    return [least * 2**power for power in range((limits.max_batch_size // least).bit_length())]


def _least_batch(limits: BatchLimits) -> int:
    least = max(limits.initial_batch_size, limits.min_per_gpu_batch_size)
    if least > limits.max_batch_size:
        problem = f"less than min_per_gpu_batch_size = {least}: no GPU can train it"
        raise InvalidSpec("max_batch_size", limits.max_batch_size, problem, "Mend the limits of the application")
    return least


def _iterations(application: Application, batch: int) -> float:
    """Iterations of a whole run at a constant batch size."""
    points = [application.gradient((point + 0.5) / TUNED_POINTS, batch) for point in range(TUNED_POINTS)]
    scale = batch / application.limits.initial_batch_size
    shares = (1.0 / float(gain(gradient.sqr, gradient.var, scale)) for gradient in points)
    return application.total_progress * math.fsum(shares) / TUNED_POINTS


def _choices(application: Application, options: GeneratorOptions) -> tuple[list[float], list[Configuration]]:
    """What jobs of an application ask for, and the bounds of each choice as `_bounds` gives them."""
    if options.configuration == "tuned":
        sizes = tuned_within(application, options.gpu_type, options.max_gpus)
        return _bounds([1.0] * len(sizes)), list(sizes)
    table = _REALISTIC.get(application.name, _ALL)
    configurations = [realistic_configuration(application, count, options.max_gpus) for count, _ in table]
    return _bounds([share for _, share in table]), configurations


def realistic_configuration(application: Application, num_gpus: int, max_gpus: int | None) -> Configuration:
    """What an owner who thinks in GPUs asks for: M0 on each. Too large a request is lowered, not dropped."""
    limits = application.limits
    most = limits.max_batch_size // limits.min_per_gpu_batch_size
    gpus = min(num_gpus, most if max_gpus is None else min(most, max_gpus))
    return Configuration(gpus, min(_least_batch(limits) * gpus, limits.max_batch_size))


def tuned_within(application: Application, gpu_type: str, max_gpus: int | None) -> tuple[Configuration, ...]:
    """Tuned configurations that fit; if all are too large, the largest number of GPUs that fits, with its best batch.

    Falling back to one GPU would turn half a day of ImageNet into a week.
    """
    tuned = tuned_configurations(application, gpu_type)
    fitting = tuple(size for size in tuned if max_gpus is None or size.num_gpus <= max_gpus)
    if fitting or max_gpus is None:
        return fitting
    best = _best_times(application, gpu_type)
    gpus = max(gpus for gpus in best if gpus <= max_gpus)
    return (Configuration(gpus, best[gpus][1]),)


def _bounds(shares: Sequence[float]) -> list[float]:
    """Upper bounds of all choices but the last, for `bisect_right` with a draw of 0 … 1."""
    sums = list(itertools.accumulate(shares))
    return [value / sums[-1] for value in sums[:-1]]


def _arrival(options: GeneratorOptions, index: int, draw: list[float]) -> float:
    """When a job arrives, in whole seconds; the jobs are sorted by it afterwards."""
    if options.arrivals == "uniform":
        return float(math.floor(index * options.duration_s / options.num_jobs))
    # Arrivals of a Poisson process, given their number, lie anywhere in the window alike: one draw each. The median of
    # three draws has density 6x(1 − x): half as much again in the middle, none at the ends.
    fraction = sorted(draw)[1] if options.arrivals == "daily" else draw[0]
    return float(math.floor(fraction * options.duration_s))


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A workload that is always there, and the cluster that it is meant for."""

    title: str
    options: GeneratorOptions | None
    """None: its jobs are listed, not generated."""
    num_nodes: int
    gpus_per_node: int
    jobs: tuple[WorkloadJob, ...] = ()

    @property
    def num_jobs(self) -> int:
        return len(self.jobs) if self.options is None else self.options.num_jobs


# Without ImageNet, which alone takes half a day of 16 GPUs. As asked for, 69 GPU·h: 4.3 h of 16 GPUs without a gap.
_DEMO_MIX = FrozenMap({"cifar10": 0.42, "ncf": 0.24, "deepspeech2": 0.14, "bert": 0.14, "yolov3": 0.06})

# Seed 33: of the first 40 the one whose counts of applications are closest to the shares of Table 1.
BUILT_IN: Mapping[str, BuiltIn] = {
    "demo": BuiltIn(
        "24 jobs in an hour and a half, more than 16 GPUs can take",
        GeneratorOptions(num_jobs=24, duration_s=5400.0, seed=4, mix=_DEMO_MIX, max_gpus=16),
        num_nodes=4,
        gpus_per_node=4,
    ),
    "paper": BuiltIn(
        "160 jobs in eight hours, as in the paper's evaluation",
        GeneratorOptions(seed=33, max_gpus=64),
        num_nodes=16,
        gpus_per_node=4,
    ),
    "paper-realistic": BuiltIn(
        "160 jobs in eight hours, sized as owners sized them on Philly",
        GeneratorOptions(seed=33, configuration="realistic", max_gpus=64),
        num_nodes=16,
        gpus_per_node=4,
    ),
    "six": BuiltIn("each of the six applications once, 17 minutes of arrivals", None, 2, 4, SIX),
    "twelve": BuiltIn("each of the six applications twice, two hours of arrivals", None, 2, 4, TWELVE),
    "four": BuiltIn("four short jobs, all there within 5 minutes", None, 2, 4, FOUR),
}


def built_in_names() -> tuple[str, ...]:
    """Names of the built-in workloads, sorted."""
    return tuple(sorted(BUILT_IN))


def built_in_workload(name: str) -> Workload:
    """The built-in workload of that name."""
    if name not in BUILT_IN:
        raise UnknownName("workload", name, BUILT_IN)
    found = BUILT_IN[name]
    return Workload(name, found.jobs) if found.options is None else replace(generate(found.options), name=name)
