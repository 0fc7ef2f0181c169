"""From outcomes to the numbers that figures draw: pooled over workloads, averaged in bins, steps of a job's history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pollux.simulator.metrics import Outcome
from pollux.simulator.timeline import Timeline

Floats = NDArray[np.float64]
BINS_S = (60.0, 300.0, 600.0, 1800.0)
"""Lengths of a bin to choose from; the last is the paper's."""
MIN_BINS = 24


def by_policy(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """In the order of their appearance."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.policy, []).append(outcome)
    return found


def first_workload(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """What is too much to show for all workloads is shown for the first."""
    return [outcome for outcome in outcomes if outcome.workload == outcomes[0].workload]


def pooled_jcts(outcomes: Sequence[Outcome]) -> Floats:
    return np.array([job.jct_s for outcome in outcomes for job in outcome.jobs])


def pooled_rho(outcomes: Sequence[Outcome]) -> Floats:
    """Of those outcomes whose fairness was measured."""
    return np.array([rho for outcome in outcomes if outcome.fairness is not None for rho in outcome.fairness.rho])


def end_s(outcome: Outcome) -> float:
    return max(job.finished_at_s for job in outcome.jobs)


def nice_bin_s(outcomes: Sequence[Outcome]) -> float:
    """Half an hour, or less where the shortest of these runs would have too few bins to show anything."""
    shortest = min(map(end_s, outcomes))
    return max([bin_s for bin_s in BINS_S if shortest / bin_s >= MIN_BINS], default=BINS_S[0])


@dataclass(frozen=True, slots=True)
class Binned:
    """Means over bins of equal length, nan where a bin has no round; the last entry ends the step of the last bin."""

    start_s: Floats
    gpus_held: Floats
    efficiency: Floats
    """Weighted by GPUs that trained."""
    throughput: Floats
    goodput: Floats
    active_jobs: Floats
    running_jobs: Floats


def binned(timeline: Timeline, bin_s: float) -> Binned:
    index = (np.array(timeline.time_s) // bin_s).astype(int)
    num_bins = int(index.max()) + 1 if index.size else 0

    def total(values: Sequence[float] | Floats) -> Floats:
        return np.bincount(index, np.asarray(values, np.float64), num_bins).astype(np.float64)

    def mean(values: Sequence[float]) -> Floats:
        return _ratio(total(values), total(np.ones(len(values))))

    gpus = np.array(timeline.gpus_training, float)
    weighted = gpus * np.array([efficiency or 0.0 for efficiency in timeline.efficiency])
    return Binned(
        start_s=bin_s * np.arange(num_bins + 1 if num_bins else 0, dtype=np.float64),
        gpus_held=mean(timeline.gpus_held),
        efficiency=_ratio(total(weighted), total(gpus)),
        throughput=mean(timeline.throughput),
        goodput=mean(timeline.goodput),
        active_jobs=mean(timeline.active_jobs),
        running_jobs=mean(timeline.running_jobs),
    )


def _ratio(total: Floats, weight: Floats) -> Floats:
    ratio = np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)
    return np.append(ratio, ratio[-1:])


def _positive(values: Floats) -> Floats:
    """Only what a logarithmic axis can show."""
    return np.where(values > 0, values, np.nan)


CURVES: Mapping[str, tuple[str, str, Callable[[Binned], Floats]]] = {
    "gpus": ("GPUs held", "GPUs", lambda bins: bins.gpus_held),
    "efficiency": ("Statistical efficiency", "weighted by GPUs", lambda bins: bins.efficiency),
    "goodput": ("Goodput", "useful examples a second", lambda bins: _positive(bins.goodput)),
    "throughput": ("Throughput", "examples a second", lambda bins: _positive(bins.throughput)),
    "active-jobs": ("Contention", "active jobs", lambda bins: bins.active_jobs),
    "running-jobs": ("Jobs that hold GPUs", "running jobs", lambda bins: bins.running_jobs),
}
"""What is shown of the cluster in time: title, unit, and where it is."""
