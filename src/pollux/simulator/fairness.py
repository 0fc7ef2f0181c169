"""Finish-time fairness: how much longer a job takes on the shared cluster than alone on its fair share of it.

The procedure is that of Sia's released simulator (docs/simulator.md, "Fairness"): the Pollux paper shows ρ without
saying how large a fair share is while jobs come and go. How a job is run alone is not here; `measure` is handed that.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from pollux.core import Cluster, Node
from pollux.simulator.workload import WorkloadJob

JctAlone: TypeAlias = Callable[[WorkloadJob, Cluster], float]
"""Seconds from submission to end of a job that has a cluster to itself, under a policy that is new to both."""

ROUNDING = 1e-9
"""ρ above 1 by no more than this counts as 1: times are sums of floats, and alone they begin at another moment."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """ρ of every job of a run: below 1, it was better off than alone on its fair share."""

    rho: tuple[float, ...]
    """In the order of the outcome's jobs."""
    isolated_jct_s: tuple[float, ...]
    """JCT alone on the fair share, in the same order."""
    cpu_s: float = field(default=0.0, compare=False)
    """Of all the isolated runs."""

    @property
    def worst(self) -> float:
        return max(self.rho)

    @property
    def unfair_fraction(self) -> float:
        """Share of the jobs with ρ > 1."""
        return sum(rho > 1.0 + ROUNDING for rho in self.rho) / len(self.rho)

    def percentile(self, p: float) -> float:
        """The ρ that p percent of the jobs do not exceed, interpolated linearly; p from 0 to 100."""
        return float(np.percentile(self.rho, p))


def measure(
    jobs: Sequence[WorkloadJob],
    finished_at_s: Sequence[float],
    cluster: Cluster,
    interval_s: float,
    jct_alone: JctAlone,
    on_job: Callable[[], None] = lambda: None,
) -> Fairness:
    """ρ of jobs that shared a cluster and ended then. `on_job` hears of each that is done.

    The cluster is that of the start, with at least one GPU; `interval_s` is from round to round.
    """
    began = time.process_time()
    submitted_at_s = [job.submitted_at_s for job in jobs]
    isolated = _Isolated(cluster, interval_s, jct_alone)
    rho, alone_s = [], []
    for job, end, contention in zip(jobs, finished_at_s, contentions(submitted_at_s, finished_at_s), strict=True):
        alone_s.append(isolated.jct_s(job, cluster.num_gpus / contention))
        rho.append((end - job.submitted_at_s) / alone_s[-1])
        on_job()
    return Fairness(tuple(rho), tuple(alone_s), time.process_time() - began)


def contentions(submitted_at_s: Sequence[float], finished_at_s: Sequence[float]) -> list[float]:
    """For each job the mean number of active jobs during its life, itself included; weighted by time, exact."""
    starts, ends = np.array(submitted_at_s, dtype=float), np.array(finished_at_s, dtype=float)
    found = []
    for start, end in zip(starts, ends, strict=True):
        together_s = np.minimum(ends, end) - np.maximum(starts, start)
        found.append(float(together_s[together_s > 0.0].sum() / (end - start)))
    return found


def partition(cluster: Cluster, gpu_type: str, num_gpus: int) -> Cluster:
    """So many GPUs of one type, on whole nodes of the cluster and a part of one more.

    Nodes of the most frequent size go first, the larger of two that are as frequent, then by id.
    """
    nodes = _nodes(cluster, gpu_type)
    frequency = Counter(node.num_gpus for node in nodes)
    taken = []
    for node in sorted(nodes, key=lambda node: (-frequency[node.num_gpus], -node.num_gpus)):
        size = min(node.num_gpus, num_gpus)
        if size == 0:
            break
        taken.append(replace(node, num_gpus=size))
        num_gpus -= size
    return Cluster.of(*taken)


def phase_s(submitted_at_s: float, interval_s: float) -> float:
    """When to submit a job to an empty world so that its first round comes as soon as it did here.

    A job that arrives with a round is part of it; at the very start there is none, and the first is an interval later.
    """
    first_round = max(1, round(submitted_at_s / interval_s))
    if interval_s * first_round < submitted_at_s:
        first_round += 1
    return submitted_at_s - interval_s * (first_round - 1)


class _Isolated:
    """Jobs alone on parts of one cluster. What was run once is remembered: many jobs are alike."""

    def __init__(self, cluster: Cluster, interval_s: float, jct_alone: JctAlone) -> None:
        self._cluster = cluster
        self._interval_s = interval_s
        self._jct_alone = jct_alone
        self._sizes = {
            gpu_type: sum(node.num_gpus for node in _nodes(cluster, gpu_type)) for gpu_type in cluster.gpu_types
        }
        self._partitions: dict[tuple[str, int], Cluster] = {}
        self._known: dict[tuple[str, int, int, float, str, int], float] = {}

    def jct_s(self, job: WorkloadJob, share: float) -> float:
        """On `share` GPUs, not a whole number; over the types of GPUs the mean, weighted by how many there are."""
        total = self._cluster.num_gpus
        return sum(size / total * self._on_type(job, kind, min(share, size)) for kind, size in self._sizes.items())

    def _on_type(self, job: WorkloadJob, gpu_type: str, share: float) -> float:
        """Linear between whole numbers of GPUs; on less than one, one for that part of the time."""
        if share < 1.0:
            return self._on_whole(job, gpu_type, 1) / share
        below = math.floor(share)
        fewer = self._on_whole(job, gpu_type, below)
        if share == below:
            return fewer
        return fewer + (share - below) * (self._on_whole(job, gpu_type, below + 1) - fewer)

    def _on_whole(self, job: WorkloadJob, gpu_type: str, num_gpus: int) -> float:
        phase, requested = phase_s(job.submitted_at_s, self._interval_s), min(job.num_gpus, num_gpus)
        key = job.application, requested, job.batch_size, phase, gpu_type, num_gpus
        if (found := self._known.get(key)) is None:
            alone = replace(job, submitted_at_s=phase, num_gpus=requested)
            found = self._known[key] = self._jct_alone(alone, self._partition(gpu_type, num_gpus))
        return found

    def _partition(self, gpu_type: str, num_gpus: int) -> Cluster:
        """The same object each time, for those who remember what they found out about a cluster."""
        key = gpu_type, num_gpus
        if key not in self._partitions:
            self._partitions[key] = partition(self._cluster, gpu_type, num_gpus)
        return self._partitions[key]


def _nodes(cluster: Cluster, gpu_type: str) -> list[Node]:
    return [node for node in cluster if node.schedulable and node.gpu_type == gpu_type]
