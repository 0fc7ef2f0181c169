"""What the service knows, as the answers of its API (`wire.api`): pure functions of jobs, reports and events.

A figure comes from the agent's last report, or where there is none (a service that has just been started) from the
model that the scheduler keeps. Reports of an earlier generation are shown until there is a newer one, and those of
ended jobs for ever.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import TYPE_CHECKING

import pollux
from pollux.core import Cluster, FrozenMap, Job, JobId, JobModel, KindProfile, NodeId, Phase, Progress, kind_of
from pollux.service import events_text
from pollux.wire.api import ClusterView, EventView, JobDetail, JobView, KindList, KindView, NodeView
from pollux.wire.messages import AgentReport

if TYPE_CHECKING:
    from pollux.service.service import Service
    from pollux.service.store import StoredEvent

_TRAINING = (Phase.RUNNING, Phase.RESIZING)


def job_view(job: Job, report: AgentReport | None, now_s: float, waits_for: str = "") -> JobView:
    """One row of a table of jobs. `waits_for` is given for jobs that do not run."""
    spec = job.spec
    state = None if report is None else report.state
    batch = None if state is None else state.batch
    factors = () if state is None else state.learning_rate_factors
    fewest, most = spec.gpu_bounds
    return JobView(
        id=job.id,
        name=spec.name or job.id,
        team=spec.team,
        phase=job.phase,
        is_rigid=spec.rigid,
        priority=spec.priority,
        min_gpus=fewest,
        max_gpus=most,
        gpus=job.allocation.num_gpus,
        allocation=job.allocation.gpus,
        next_allocation=None if job.next_allocation is None else job.next_allocation.gpus,
        generation=job.generation,
        reallocations=job.num_reallocations,
        failures=job.num_failures,
        retries=spec.retries,
        submitted_at_s=job.submitted_at_s,
        started_at_s=job.first_started_at_s,
        finished_at_s=job.finished_at_s,
        attained_gpu_s=job.attained_gpu_s_at(now_s),
        waits_for=waits_for,
        exit_reason=job.exit_reason,
        exit_code=job.exit_code,
        deadline_at_s=None if spec.deadline_s is None else job.submitted_at_s + spec.deadline_s,
        batch_size=None if batch is None else batch.batch_size,
        per_gpu_batch_size=None if batch is None else batch.per_gpu_batch_size,
        accumulation_steps=None if batch is None else batch.accumulation_steps,
        learning_rate_factor=factors[0] if factors else None,
        step=None if state is None else state.step,
        progress=_share(_progress(job, report)),
        eta_s=_eta_s(job, report),
        loss=None if report is None else report.loss,
        throughput=None if report is None else report.throughput,
        efficiency=None if report is None else report.efficiency,
        goodput=None if report is None else report.goodput,
        noise_scale=None if report is None else report.noise_scale,
        reported_at_s=None if report is None else report.sent_at_s,
        gpu_types=() if report is None or report.profile is None else tuple(sorted(report.profile.observations)),
    )


def job_detail(
    job: Job, report: AgentReport | None, now_s: float, waits_for: str = "", cluster: Cluster | None = None
) -> JobDetail:
    """All that may be told of a job: of its environment the names only."""
    spec, model = job.spec, _model(job, report)
    limits = spec.limits if model is None else model.limits
    wishes = spec.batch
    return JobDetail(
        job=job_view(job, report, now_s, waits_for),
        command=spec.command,
        working_dir=spec.working_dir,
        checkpoint_dir=spec.checkpoint_dir,
        env_names=tuple(spec.env),
        application=spec.application,
        gpu_type=spec.gpu_type,
        requested_gpus=spec.requested_gpus,
        is_preemptible=spec.preemptible,
        has_fixed_batch=spec.fixed_batch,
        initial_batch_size=wishes.initial_batch_size if limits is None else limits.initial_batch_size,
        max_batch_size=wishes.max_batch_size if limits is None else limits.max_batch_size,
        realloc_delay_s=None if model is None else model.realloc_delay_s,
        fit_error=None if model is None else _fit_error(job, model, cluster or Cluster()),
        kind=kind_of(job) or (None if model is None else model.fingerprint),
    )


def cluster_view(service: Service, now_s: float) -> ClusterView:
    """The nodes, who holds what there, and how many jobs are in which phase."""
    state = service.scheduler.state
    held: dict[NodeId, dict[JobId, int]] = {}
    for job in state.jobs.values():
        for node_id, count in job.occupied.gpus.items():
            held.setdefault(node_id, {})[job.id] = count
    nodes = []
    for node in state.cluster:
        node_state = service.node_state(node.id)
        here = held.get(node.id, {})
        free = max(node.num_gpus - sum(here.values()), 0) if node_state == "ready" else 0
        address = service.node_address(node.id)
        jobs = FrozenMap(here)
        nodes.append(NodeView(node.id, node.num_gpus, free, node.gpu_type, node_state, address, jobs, node.labels))
    return ClusterView(
        version=pollux.__version__,
        pid=os.getpid(),
        policy=service.options.policy,
        interval_s=service.options.interval_s,
        round=state.round,
        time_s=now_s,
        started_at_s=service.started_at_s,
        is_recovering=service.is_recovering,
        gpus=sum(node.gpus for node in nodes),
        free_gpus=sum(node.free_gpus for node in nodes),
        nodes=tuple(nodes),
        num_jobs=FrozenMap(Counter(job.phase.value for job in (*state.jobs.values(), *state.ended.values()))),
        warnings=service.warnings,
    )


def kind_list(kinds: FrozenMap[str, KindProfile]) -> KindList:
    """The profile registry in figures."""
    return KindList(tuple(_kind_view(kind, known) for kind, known in kinds.items()))


def _kind_view(kind: str, known: KindProfile) -> KindView:
    observations = known.profile.observations
    return KindView(
        kind=kind,
        jobs=known.num_jobs,
        observations=len(known.profile),
        gpu_types=tuple(observations),
        max_gpus=max((key.shape.num_gpus for of_type in observations.values() for key in of_type), default=0),
        work=known.work.mean,
        realloc_delay_s=known.realloc_delay_s.mean,
        updated_at_s=known.latest_s,
    )


def event_view(stored: StoredEvent) -> EventView:
    """One line of the story."""
    document, job = stored.document, stored.job or ""
    text, detail = events_text.sentence(document, job), events_text.detail(document)
    return EventView(stored.number, stored.at_s, stored.kind, job, text, detail)


def _model(job: Job, report: AgentReport | None) -> JobModel | None:
    """The newest there is: a report without one says that nothing has changed."""
    return job.model if report is None or report.model is None else report.model


def _progress(job: Job, report: AgentReport | None) -> Progress | None:
    if report is not None:
        return report.state.progress
    return None if job.model is None else job.model.progress


def _share(progress: Progress | None) -> float | None:
    if progress is None or progress.total is None:
        return None
    return min(progress.done / progress.total, 1.0) if progress.total > 0 else 1.0


def _eta_s(job: Job, report: AgentReport | None) -> float | None:
    """Remaining iterations at M0, times M0 examples each, at so many useful examples a second."""
    model, progress = _model(job, report), _progress(job, report)
    if report is None or not report.goodput or model is None or progress is None or job.phase not in _TRAINING:
        return None
    if progress.remaining is None:
        return None
    eta_s = progress.remaining * model.limits.initial_batch_size / report.goodput
    return eta_s if math.isfinite(eta_s) else None


def _fit_error(job: Job, model: JobModel, cluster: Cluster) -> float | None:
    """Of the fit for the GPUs that it holds; of the only fit there is, if it holds none."""
    types = {cluster[node].gpu_type for node in job.allocation.gpus if node in cluster} or set(model.throughput)
    fit = model.throughput.get(types.pop()) if len(types) == 1 else None
    return None if fit is None else fit.mean_relative_error
