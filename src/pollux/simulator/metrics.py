"""What a run comes to: times of every job, and figures about all of them (definitions: docs/simulator.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pollux.core import FrozenMap, Job, KindProfile
from pollux.simulator.fairness import Fairness
from pollux.simulator.timeline import History, Timeline

LARGEST = ("max_contention", "worst_rho")
"""Figures that are the largest of something."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One job, from its submission to its end."""

    name: str
    application: str
    submitted_at_s: float
    started_at_s: float
    finished_at_s: float
    num_reallocations: int
    gpu_s: float

    @classmethod
    def of(cls, job: Job) -> JobOutcome:
        assert job.finished_at_s is not None
        assert job.first_started_at_s is not None
        return cls(
            job.id,
            job.spec.application or "",
            job.submitted_at_s,
            job.first_started_at_s,
            job.finished_at_s,
            job.num_reallocations,
            job.attained_gpu_s,
        )

    @property
    def jct_s(self) -> float:
        """Job completion time: from submission to end."""
        return self.finished_at_s - self.submitted_at_s

    def figures(self) -> dict[str, Any]:
        return {
            "jct_s": self.jct_s,
            "application": self.application,
            "submitted_at_s": self.submitted_at_s,
            "started_at_s": self.started_at_s,
            "finished_at_s": self.finished_at_s,
            "queued_s": self.started_at_s - self.submitted_at_s,
            "reallocations": self.num_reallocations,
            "gpu_hours": self.gpu_s / 3600,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """One workload under one policy."""

    workload: str
    policy: str
    inputs: Mapping[str, Any]
    """What it came from: every option, the cluster, the version."""
    jobs: tuple[JobOutcome, ...]
    """In order of submission."""
    timeline: Timeline
    policy_cpu_s: Sequence[float]
    """Of each round that planned."""
    cpu_s: float
    """Of the whole run, reading included; isolated runs for fairness are not."""
    fairness: Fairness | None = None
    """None if it was not measured."""
    histories: Mapping[str, History] | None = None
    """Of each job, by its name; None if nobody asked for them."""
    kinds: FrozenMap[str, KindProfile] = field(default_factory=FrozenMap)
    """The profile registry at the end; empty if the policy has no use for reports."""

    def figures(self) -> dict[str, Any]:
        """All figures but those of single jobs and of single rounds."""
        jcts = [job.jct_s for job in self.jobs]
        p50, p90, p99 = np.percentile(jcts, (50, 90, 99)).tolist()
        first = min(job.submitted_at_s for job in self.jobs)
        last = max(job.finished_at_s for job in self.jobs)
        gpu_s = sum(job.gpu_s for job in self.jobs)
        offered = self.timeline.offered_gpu_s(first, last)
        cpu_ms = 1000 * np.array(self.policy_cpu_s)
        return {
            "avg_jct_s": sum(jcts) / len(jcts),
            "p50_jct_s": p50,
            "p90_jct_s": p90,
            "p99_jct_s": p99,
            "makespan_s": last - first,
            "reallocations_per_job": sum(job.num_reallocations for job in self.jobs) / len(self.jobs),
            "gpu_hours": gpu_s / 3600,
            "utilisation": gpu_s / offered if offered else None,
            "avg_efficiency": self.timeline.mean_efficiency(),
            "avg_contention": self.timeline.mean_contention(),
            "max_contention": max(self.timeline.active_jobs, default=0),
            "policy_cpu_ms_mean": float(cpu_ms.mean()),
            "policy_cpu_ms_p99": float(np.percentile(cpu_ms, 99)),
            "cpu_s": self.cpu_s,
            "worst_rho": None if self.fairness is None else self.fairness.worst,
            "unfair_fraction": None if self.fairness is None else self.fairness.unfair_fraction,
            "fairness_cpu_s": None if self.fairness is None else self.fairness.cpu_s,
        }

    def document(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        document = {
            "workload": self.workload,
            "policy": self.policy,
            "num_jobs": len(self.jobs),
            **self.figures(),
            "inputs": self.inputs,
            "jobs": self._figures_of_jobs(),
            "timeline": vars(self.timeline),
        }
        if self.histories is not None:
            document["histories"] = {name: vars(history) for name, history in self.histories.items()}
        return document

    def _figures_of_jobs(self) -> dict[str, dict[str, Any]]:
        figures = {job.name: job.figures() for job in self.jobs}
        if self.fairness is not None:
            measured = zip(self.fairness.rho, self.fairness.isolated_jct_s, strict=True)
            for of_job, (rho, isolated_jct_s) in zip(figures.values(), measured, strict=True):
                of_job |= {"rho": rho, "isolated_jct_s": isolated_jct_s}
        return figures


def means(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    """Of each figure, over the workloads of each policy; None where one of them has none.

    Of a figure that is the largest of something (`LARGEST`), the largest of all: a mean of it would be nobody's.
    """
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        by_policy.setdefault(outcome.policy, []).append(outcome.figures())
    return {
        policy: {key: _over_workloads(key, [figures[key] for figures in runs]) for key in runs[0]}
        for policy, runs in by_policy.items()
    }


def _over_workloads(key: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return max(known) if key in LARGEST else math.fsum(known) / len(known)
