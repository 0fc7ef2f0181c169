"""From outcomes to the numbers that figures draw: pooled over workloads, averaged in bins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pollux.simulator.metrics import Outcome
from pollux.simulator.timeline import History, Timeline

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
    """Means over bins of equal length, nan where a bin has none; the last entry ends the step of the last bin."""

    start_s: Floats
    gpus_held: Floats
    efficiency: Floats
    """Weighted by GPUs."""
    throughput: Floats
    goodput: Floats
    active_jobs: Floats
    running_jobs: Floats


def binned(outcomes: Sequence[Outcome], bin_s: float) -> list[Binned]:
    """Of each outcome, all by the same rule: from histories if every one of them has some, else from samples."""
    if has_histories(outcomes):
        return [over_time(outcome, bin_s) for outcome in outcomes]
    return [over_rounds(outcome.timeline, bin_s) for outcome in outcomes]


def has_histories(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.histories is not None for outcome in outcomes)


def over_time(outcome: Outcome, bin_s: float) -> Binned:
    """Means over time, exact for all that is counted; the last bin ends with the run.

    Efficiency and goodput are what a history has of them: looked at once a round. All GPUs that are held weigh in.
    """
    last_s = end_s(outcome)
    edges = np.append(np.arange(0.0, last_s, bin_s), last_s)
    start_s, until_s, gpus, efficiency, goodput = _stays((outcome.histories or {}).values())
    throughput = np.divide(goodput, efficiency, out=np.zeros_like(goodput), where=efficiency > 0)
    submitted_s = np.array([job.submitted_at_s for job in outcome.jobs])
    finished_s = np.array([job.finished_at_s for job in outcome.jobs])
    length_s = np.diff(edges)

    def total(values: Floats) -> Floats:
        return _integrals(start_s, until_s, values, edges)

    return Binned(
        start_s=edges,
        gpus_held=_ratio(total(gpus), length_s),
        efficiency=_ratio(total(gpus * efficiency), total(gpus)),
        throughput=_ratio(total(throughput), length_s),
        goodput=_ratio(total(goodput), length_s),
        active_jobs=_ratio(_integrals(submitted_s, finished_s, np.ones_like(finished_s), edges), length_s),
        running_jobs=_ratio(total(np.ones_like(gpus)), length_s),
    )


def _stays(histories: Iterable[History]) -> list[Floats]:
    """Start, end, GPUs, efficiency and goodput of every span in which a job held GPUs and nothing changed."""
    parts = [
        np.array([it.time_s[:-1], it.time_s[1:], it.num_gpus[:-1], it.efficiency[:-1], it.goodput[:-1]], np.float64)
        for it in histories
    ]
    spans = np.concatenate([np.empty((5, 0)), *parts], axis=1)
    return list(spans[:, spans[2] > 0])


def _integrals(start_s: Floats, until_s: Floats, values: Floats, edges: Floats) -> Floats:
    """Of the sum of values that hold for a span each, between each two neighbours of `edges`."""
    moments = np.concatenate([start_s, until_s])
    order = np.argsort(moments, kind="stable")
    moments, level = moments[order], np.cumsum(np.concatenate([values, -values])[order])
    level[np.abs(level) < 1e-9 * np.abs(level).max(initial=0.0)] = 0.0  # what rounding leaves when all have gone
    integral = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(moments))])
    found: Floats = np.diff(np.interp(edges, moments, integral)) if moments.size else np.zeros(edges.size - 1)
    return found


def over_rounds(timeline: Timeline, bin_s: float) -> Binned:
    """Means of what was true right after each round, of efficiency over GPUs that trained: all that a timeline has."""
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
