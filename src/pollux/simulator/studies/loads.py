"""More or fewer jobs in the same time: a workload at another load. Pure, and the same jobs for the same seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pollux.core import checks
from pollux.errors import InvalidSpec
from pollux.simulator.generator import BUILT_IN, MAX_JOBS, built_in_workload, generate
from pollux.simulator.workload import Workload, WorkloadJob

JITTER = 0.05
"""A copy comes earlier or later than its original by at most this share of the window of submissions."""


def generated_at(name: str, load: float) -> Workload:
    """A built-in workload, generated anew with so many times the jobs and the same seed; where it is a list of jobs,
    `scaled`."""
    options = BUILT_IN[name].options
    if options is None:
        return scaled(built_in_workload(name), load, 0)
    more = replace(options, num_jobs=count_at(options.num_jobs, load))
    return replace(generate(more), name=_title(name, load))


def scaled(workload: Workload, load: float, seed: int) -> Workload:
    """So many times the jobs of a workload, submitted within the same time.

    Of every application there are as many times the jobs, within rounding. Fewer: some are left out. More: some come
    again, near the time of the original and under a name of their own.
    """
    wanted = count_at(len(workload.jobs), load)
    copies, rest = divmod(wanted, len(workload.jobs))
    rng = np.random.Generator(np.random.PCG64(seed))
    chosen = _thinned(workload.jobs, rest, rng)
    if copies == 0:
        return Workload(_title(workload.name, load), tuple(chosen))
    again = [*itertools.chain.from_iterable(itertools.repeat(workload.jobs, copies - 1)), *chosen]
    jobs = [*workload.jobs, *_copies(workload.jobs, again, rng)]
    return Workload(_title(workload.name, load), tuple(sorted(jobs, key=lambda job: job.submitted_at_s)))


def count_at(num_jobs: int, load: float) -> int:
    """So many times the jobs, to the nearest whole number (halves upwards), but never none."""
    checks.finite(InvalidSpec, "load", load, 0, above=True)
    if num_jobs * load > MAX_JOBS:
        raise InvalidSpec("load", load, f"makes more than {MAX_JOBS:,} jobs", "Give a smaller one")
    return max(1, math.floor(num_jobs * load + 0.5))


def _title(name: str, load: float) -> str:
    return name if load == 1 else f"{name} × {load:g}"


def _thinned(jobs: Sequence[WorkloadJob], count: int, rng: np.random.Generator) -> list[WorkloadJob]:
    """So many of the jobs, in their order; each application keeps its share."""
    order = rng.random(len(jobs)).argsort(kind="stable").tolist()
    quotas = _quotas(jobs, count)
    kept = []
    for index in order:
        application = jobs[index].application
        if quotas[application] > 0:
            quotas[application] -= 1
            kept.append(index)
    return [jobs[index] for index in sorted(kept)]


def _quotas(jobs: Sequence[WorkloadJob], count: int) -> dict[str, int]:
    """How many of each application, by largest remainder: the exact share, rounded down or up."""
    sizes: dict[str, int] = {}
    for job in jobs:
        sizes[job.application] = sizes.get(job.application, 0) + 1
    quotas = {name: size * count // len(jobs) for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: (-(sizes[name] * count % len(jobs)), name))
    for name in by_remainder[: count - sum(quotas.values())]:
        quotas[name] += 1
    return quotas


def _copies(
    originals: Sequence[WorkloadJob], again: Sequence[WorkloadJob], rng: np.random.Generator
) -> list[WorkloadJob]:
    first, last = originals[0].submitted_at_s, originals[-1].submitted_at_s
    shifts = ((2.0 * rng.random(len(again)) - 1.0) * JITTER * (last - first)).tolist()
    taken = {job.name for job in originals}
    found = []
    for job, shift in zip(again, shifts, strict=True):
        at = _reflected(job.submitted_at_s + shift, first, last)
        found.append(replace(job, name=_free_name(job.name, taken), submitted_at_s=at))
        taken.add(found[-1].name)
    return found


def _reflected(at: float, first: float, last: float) -> float:
    """Back into the window, in whole seconds where there is room for one; the ends get no crowd of their own."""
    inside = 2 * first - at if at < first else 2 * last - at if at > last else at
    return min(max(float(round(inside)), first), last)


def _free_name(name: str, taken: set[str]) -> str:
    return next(free for number in itertools.count(2) if (free := f"{name}~{number}") not in taken)
