"""A made-up cluster under load, round after round: what policies are timed with, from 16 GPUs to tens of thousands.

Nothing is trained and nobody ends by work done. Jobs come and go, and what is believed of them drifts, at rates that a
busy cluster has; what the policy said last is in force. Needs no measured data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pollux import applications
from pollux.core import (
    Allocation,
    Cluster,
    FrozenMap,
    GradientStats,
    Job,
    JobId,
    JobModel,
    JobSpec,
    Phase,
    Plan,
    Progress,
    Snapshot,
    ThroughputFit,
    checks,
)
from pollux.errors import InvalidSpec, UnknownName
from pollux.simulator.generator import PAPER_MIX

GPU_TYPE = "t4"
INTERVAL_S = 60.0
REALLOC_DELAY_S = 30.0
LEAVE = 0.03
"""Share of the jobs that leave from one round to the next; as many arrive."""
DRIFT = 0.03
"""Of the noise scale of a job that runs: standard deviation of its logarithm, a round."""
GROW = 0.05
"""Share of the jobs that are measured on twice the GPUs of before."""
THETA_JITTER = 0.15
PHI_JITTER = 0.3
LARGEST = 64
"""GPUs of one job, as in the paper's evaluation."""
AGES_S = (600.0, 36_000.0)
"""Of the jobs that the first round finds."""
PACE = 0.01
"""Share of what is left to do that a running job does in a round."""

MIXES: Mapping[str, tuple[Mapping[str, float], tuple[int, ...]]] = {
    "standard": (PAPER_MIX, (1, 2, 4, 8, 16, 32)),
    "elastic": ({name: share for name, share in PAPER_MIX.items() if name != "ncf"}, (32, 64)),
}
"""Shares of applications, and on how many GPUs jobs have been measured. In the standard mix 36 % are of ncf and keep
one GPU; in the elastic one every job may have as many as any may."""


class Rounds:
    """Snapshots of one cluster, 60 s apart. Same arguments and same plans, same snapshots."""

    def __init__(
        self, num_gpus: int, num_jobs: int, gpus_per_node: int = 4, mix: str = "standard", seed: int = 0
    ) -> None:
        for name, count in (("num_gpus", num_gpus), ("num_jobs", num_jobs), ("gpus_per_node", gpus_per_node)):
            checks.whole(InvalidSpec, name, count, 1)
        checks.whole(InvalidSpec, "seed", seed, 0)
        if num_gpus % gpus_per_node:
            problem = f"is no multiple of gpus_per_node = {gpus_per_node}"
            raise InvalidSpec("num_gpus", num_gpus, problem, "All nodes are equal: give a multiple of it")
        if mix not in MIXES:
            raise UnknownName("mix", mix, MIXES)
        self._rng = np.random.default_rng(seed)
        self._shares, self._measured_on = MIXES[mix]
        self._num_jobs = num_jobs
        self._num_submitted = 0
        self._untold: dict[JobId, JobModel] = {}
        """What jobs that have not run yet will report once they have."""
        cluster = Cluster.uniform(num_gpus // gpus_per_node, gpus_per_node, GPU_TYPE)
        now_s = AGES_S[1]
        youngest, oldest = np.log(AGES_S).tolist()
        ages_s = np.exp(self._rng.uniform(youngest, oldest, num_jobs))
        jobs = [self._known_job(now_s, age_s) for age_s in sorted(ages_s.tolist(), reverse=True)]
        self.snapshot = Snapshot(now_s, 0, cluster, FrozenMap({job.id: job for job in jobs}))
        """The present one. In the first, everybody has run before and nobody holds anything."""

    def advance(self, plan: Plan) -> Snapshot:
        """A round later, with that plan in force since; one that the cluster cannot hold is refused."""
        before = self.snapshot
        plan.check(before)
        now_s = before.time_s + INTERVAL_S
        leaves, grows = self._rng.random((2, len(before.jobs))) < [[LEAVE], [GROW]]
        drift = np.exp(self._rng.normal(0.0, DRIFT, len(before.jobs)))
        jobs: dict[JobId, Job] = {}
        for job, is_gone, is_grown, factor in zip(before.jobs.values(), leaves, grows, drift.tolist(), strict=True):
            if is_gone:
                self._untold.pop(job.id, None)
                continue
            held = _given(job, plan[job.id], before.time_s)
            model = self._reported(held, is_grown, factor)
            jobs[job.id] = held if model is held.model else held.believed(model, held.profile)
        while len(jobs) < self._num_jobs:
            job = self._new_job(now_s - float(self._rng.uniform(0.0, INTERVAL_S)))
            jobs[job.id] = job
        self.snapshot = Snapshot(now_s, before.round + 1, before.cluster, FrozenMap(jobs))
        return self.snapshot

    def _new_job(self, submitted_at_s: float) -> Job:
        """One that never ran, of which nothing is known."""
        names = list(self._shares)
        shares = np.array([self._shares[name] for name in names])
        name = names[int(self._rng.choice(len(names), p=shares / shares.sum()))]
        application = applications.load(name)
        most = 1 if name == "ncf" else LARGEST
        measured_on = min(int(self._rng.choice(self._measured_on)), most)
        number = self._num_submitted
        self._num_submitted += 1
        spec = JobSpec(
            JobId(f"{number:07}"),
            application=name,
            max_gpus=most,
            requested_gpus=max(measured_on // 4, 1),
            limits=application.limits,
        )
        self._untold[spec.id] = self._model(application, measured_on)
        return Job(spec, submitted_at_s, sequence=number)

    def _known_job(self, now_s: float, age_s: float) -> Job:
        """One that has run before, and waits now."""
        job = self._new_job(now_s - age_s)
        num_starts = int(self._rng.integers(1, 6))
        return replace(
            job,
            generation=num_starts,
            issued_generation=num_starts,
            num_reallocations=num_starts - 1,
            attained_gpu_s=float(age_s * self._rng.uniform(0.5, 4.0)),
            first_started_at_s=job.submitted_at_s + INTERVAL_S,
            model=self._untold.pop(job.id),
        )

    def _model(self, application: applications.Application, measured_on: int) -> JobModel:
        """Like the application, but not quite: no two jobs have the same."""
        known = application.throughput[GPU_TYPE]
        factors = self._rng.uniform(1.0 - THETA_JITTER, 1.0 + THETA_JITTER, len(known.params))
        params = {name: value * float(by) for (name, value), by in zip(known.params.items(), factors, strict=True)}
        params["gamma"] = max(params["gamma"], 1.0)
        fraction = float(self._rng.uniform(0.02, 0.9))
        gradient = application.gradient(fraction, application.limits.initial_batch_size)
        total = application.total_progress * float(np.exp(self._rng.normal(0.0, PHI_JITTER)))
        return JobModel(
            application.limits,
            _scaled(gradient, float(np.exp(self._rng.normal(0.0, PHI_JITTER)))),
            FrozenMap({GPU_TYPE: _fit(known, params, measured_on)}),
            Progress(fraction * total, total, 0.0),
            REALLOC_DELAY_S,
        )

    def _reported(self, job: Job, is_grown: bool, drift: float) -> JobModel | None:
        """What it has told by the next round. All parts are new objects, as those of a report over the wire are;
        what they say again is found out when it is taken in, see `Job.believed`."""
        model = self._untold.pop(job.id, None) if job.allocation else None
        model = model or job.model
        if model is None or not job.allocation:
            return model
        assert model.gradient is not None
        assert model.progress is not None
        assert model.progress.total is not None
        known = model.throughput[GPU_TYPE]
        measured_on = max(known.max_gpus_observed * (2 if is_grown else 1), job.allocation.num_gpus)
        left = model.progress.total - model.progress.done
        return JobModel(
            model.limits,
            _scaled(model.gradient, drift),
            FrozenMap({GPU_TYPE: _fit(known, dict(known.params), min(measured_on, job.spec.max_gpus or LARGEST))}),
            Progress(model.progress.done + PACE * left, model.progress.total, 0.0),
            REALLOC_DELAY_S,
        )


def _fit(known: ThroughputFit, params: Mapping[str, float], measured_on: int) -> ThroughputFit:
    nodes = max(known.max_nodes_observed, 1)
    return replace(
        known, params=FrozenMap(params), max_gpus_observed=measured_on, max_nodes_observed=min(nodes, measured_on)
    )


def _scaled(gradient: GradientStats, factor: float) -> GradientStats:
    """With so many times the noise scale; only the ratio of the two means something."""
    ratio = factor * gradient.var / gradient.sqr
    return GradientStats(sqr=1.0 / (1.0 + ratio), var=ratio / (1.0 + ratio))


def _given(job: Job, wanted: Allocation, since_s: float) -> Job:
    """The job with what a plan of that time says, once its replicas run."""
    if wanted == job.allocation:
        return job
    attained_gpu_s = job.attained_gpu_s_at(since_s)
    if not wanted:
        return replace(
            job,
            phase=Phase.PENDING,
            allocation=wanted,
            held_since_s=None,
            attained_gpu_s=attained_gpu_s,
        )
    return replace(
        job,
        phase=Phase.RUNNING,
        generation=job.issued_generation + 1,
        issued_generation=job.issued_generation + 1,
        allocation=wanted,
        num_reallocations=job.num_reallocations + (job.issued_generation > 0),
        attained_gpu_s=attained_gpu_s,
        held_since_s=since_s,
        first_started_at_s=since_s if job.first_started_at_s is None else job.first_started_at_s,
    )
