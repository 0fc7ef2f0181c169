"""What the world reports of jobs, each message about one generation: the news heeded, the late dropped.

Messages may be delayed, reordered and said twice. Who is heeded: docs/job-lifecycle.md, 'Generations'.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from pollux.core import (
    Action,
    Allocation,
    Event,
    GenerationAbandoned,
    Job,
    JobFailed,
    JobFinished,
    JobReported,
    JobStopped,
    Phase,
    ReplicaLost,
    ReplicasReady,
    StopJob,
    StopReason,
    Trigger,
)

if TYPE_CHECKING:
    from pollux.scheduler.state import SchedulerState

Report = ReplicasReady | GenerationAbandoned | ReplicaLost | JobReported | JobStopped | JobFinished | JobFailed
NOTHING = Allocation()
LEAVING = (Phase.STOPPING, Phase.PAUSING, Phase.CANCELLING)
"""Told to give back all that it holds."""


def hear(state: SchedulerState, report: Report) -> list[Action]:
    """Take a report in; answer with what must be done about those who report."""
    job = state.jobs.get(report.job)
    if job is None or not _is_heeded(job, report):
        return _supersede(state, report)
    match report:
        case JobReported(profile=profile, model=model):
            state.believe(job.believed(model or job.model, profile or job.profile))
        case ReplicasReady():
            _switch(state, job)
        case GenerationAbandoned(reason=reason):
            if job.next_allocation is None and state.options.abandoned_starts_fail:
                _fail(state, job, reason)
            else:
                _abandon(state, job)
        case ReplicaLost():
            _shrink(state, job, report)
        case JobStopped():
            _release(state, job, Trigger.STOPPED)
        case JobFinished():
            _release(state, job, Trigger.FINISH)
        case JobFailed():
            _fail(state, job, report.reason, report.exit_code, may_retry=report.may_retry)
        case _:
            assert_never(report)
    return []


def is_news(state: SchedulerState, event: Event) -> bool:
    """Whether the event may change anything, or ask for anything; False for reports that are late or said again.

    A driver that hears the same from its world after each restart need not fill its log with it.
    """
    if not isinstance(event, Report):
        return True
    job = state.jobs.get(event.job)
    if job is None or not _is_heeded(job, event):
        return bool(_supersede(state, event))
    if isinstance(event, ReplicaLost) and event.generation == job.generation:
        return event.membership > job.membership
    return True


def release_if_stranded(state: SchedulerState, job: Job) -> None:
    """A job whose nodes are all gone has stopped: nobody is left to report it."""
    if job.allocation and not any(node in state.cluster for node in job.occupied.gpus):
        _release(state, job, Trigger.STOPPED)


def _is_heeded(job: Job, report: Report) -> bool:
    match report:
        case JobReported():
            return job.expects(report.generation)
        case ReplicasReady() | GenerationAbandoned():
            return job.awaits(report.generation)
        case JobFinished():
            return job.may_have_finished(report.generation)
        case JobStopped() if job.phase in LEAVING and report.generation == job.issued_generation:
            return True  # the answer may name what StopJob named, even if that generation was abandoned since
    return job.expects(report.generation)


def _supersede(state: SchedulerState, report: Report) -> list[Action]:
    """Replicas that tell of themselves although they should not be there must go."""
    job = state.job(report.job)
    if job is None or not isinstance(report, ReplicasReady | JobReported | ReplicaLost):
        return []
    if job.phase.holds_gpus and report.generation >= job.generation:
        return []  # said twice, or of a generation that is being given up anyway
    if report.generation > job.issued_generation:
        return []  # not a number that we gave out
    return [StopJob(job.id, report.generation, StopReason.SUPERSEDED)]


def _switch(state: SchedulerState, job: Job) -> None:
    if job.next_allocation is None:
        state.move(job, Trigger.READY)
        return
    job = state.move(
        job,
        Trigger.READY,
        allocation=job.next_allocation,
        next_allocation=None,
        generation=job.issued_generation,
        membership=0,
    )
    release_if_stranded(state, job)


def _abandon(state: SchedulerState, job: Job) -> None:
    if job.next_allocation is None:
        _release(state, job, Trigger.ABANDON)
        return
    was_wanted = job.id in state.giving_way or state.target.get(job.id) == job.next_allocation
    job = state.move(job, Trigger.ABANDON, next_allocation=None)
    if was_wanted:
        state.keep(job)  # the next round decides whether it is worth another try
    release_if_stranded(state, job)


def _fail(
    state: SchedulerState, job: Job, reason: str, exit_code: int | None = None, *, may_retry: bool = True
) -> None:
    """Another try after a pause, or the end."""
    count = job.num_failures + 1
    pause_s = state.options.retry_pause_after_s(count)
    retry_at_s = state.time_s + pause_s if pause_s else None
    failed = replace(job, num_failures=count, exit_reason=reason, exit_code=exit_code, retry_at_s=retry_at_s)
    _release(state, failed, Trigger.RETRY if may_retry and count <= job.spec.retries else Trigger.FAIL)


def _shrink(state: SchedulerState, job: Job, report: ReplicaLost) -> None:
    if report.generation != job.generation:
        # The switch to it has not been heard of yet; then this is what it will have.
        assert job.next_allocation is not None
        if left := _common(job.next_allocation, report.survivors):
            job = state.move(job, Trigger.LOSE_REPLICA, next_allocation=left)
            if job.phase is not Phase.STOPPING:
                state.keep(job)
        return
    left = _common(job.allocation, report.survivors)
    if left and report.membership > job.membership:
        job = state.move(job, Trigger.LOSE_REPLICA, allocation=left, membership=report.membership)
        if job.phase is not Phase.STOPPING:
            state.keep(job)  # the next round decides what follows
        release_if_stranded(state, job)


def _release(state: SchedulerState, job: Job, trigger: Trigger) -> None:
    """It has no replica left. A job that was told to stop so that it can start elsewhere does so."""
    was_told = job.phase is Phase.STOPPING and trigger is Trigger.STOPPED
    if not was_told:
        state.retarget(job.id, NOTHING)
    state.move(job, trigger, allocation=NOTHING, next_allocation=None)


def _common(held: Allocation, survivors: Allocation) -> Allocation:
    return Allocation.of({node: min(count, survivors.gpus.get(node, 0)) for node, count in held.gpus.items()})
