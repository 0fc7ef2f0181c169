"""What others know of jobs that the event log has lost, or lost sight of: from the ledger, and from daemons. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pollux.core import (
    Allocation,
    Event,
    Job,
    JobFailed,
    JobFinished,
    JobId,
    JobPaused,
    JobRecovered,
    NodeId,
    Phase,
)
from pollux.scheduler import SchedulerState
from pollux.service.ledger import LedgerEntry
from pollux.wire.nodes import RunPhase, RunStatus

MOST_NAMES = 8


def from_ledger(entries: Iterable[LedgerEntry], state: SchedulerState) -> Iterator[Event]:
    """What the scheduler has to hear before it hears of any node."""
    for entry in entries:
        spec = entry.spec
        job = state.job(spec.id)
        if job is None and entry.outcome is None:
            yield JobRecovered(spec, entry.submitted_at_s, cause="its file in the folder of the cluster")
            if entry.is_paused:
                yield JobPaused(spec.id, cause="its file in the folder of the cluster")
        elif job is not None and not job.phase.is_terminal and entry.outcome is not None:
            yield JobRecovered(
                job.spec,
                job.submitted_at_s,
                outcome=entry.outcome,
                reason=entry.reason,
                exit_code=entry.exit_code,
                cause="its file in the folder of the cluster",
            )


def from_run(job: Job, run: RunStatus, node: NodeId) -> JobRecovered | None:
    """A run of the job that is ahead of the log; None: it is not."""
    if run.issued_generation <= job.issued_generation:
        return None
    known = JobRecovered(job.spec, job.submitted_at_s, run.issued_generation, cause=f"node {node} knows more of it")
    match run.end:
        case None if run.phase is not RunPhase.ENDED:
            trains = run.phase is RunPhase.TRAINING and run.generation == run.issued_generation
            return replace(known, allocation=_held(job, run, node), trains=trains, membership=run.membership)
        case JobFinished():
            return replace(known, outcome=Phase.SUCCEEDED)
        case JobFailed(reason=reason, exit_code=code, may_retry=may_retry) if not may_retry or not job.spec.retries:
            return replace(known, outcome=Phase.FAILED, reason=reason, exit_code=code)
    return known


def sentence(num_lost: int, jobs: Sequence[JobId]) -> str:
    """What people are told of a log that has lost its end; empty: nothing was lost."""
    if not num_lost and not jobs:
        return ""
    found = f"{', '.join(jobs[:MOST_NAMES])}{' …' if len(jobs) > MOST_NAMES else ''}"
    taken_up = f"Jobs taken up again from other files: {found}." if jobs else "No job is missing."
    if not num_lost:
        return f"The event log did not know all jobs of this cluster. {taken_up}"
    count = "the last record" if num_lost == 1 else f"the last {num_lost} records"
    return (
        f"The event log has lost {count}: its end is damaged, or an older or an empty log was put in its place. "
        f"{taken_up} What else was decided meanwhile (drained nodes, changed sizes, measurements) is not known."
    )


def _held(job: Job, run: RunStatus, node: NodeId) -> Allocation:
    """What it holds there. A plain command is one process, whatever it holds."""
    if job.spec.rigid and job.spec.requested_gpus:
        return Allocation.of({next(iter(run.allocation.gpus), node): job.spec.requested_gpus})
    return run.allocation or Allocation.of({node: 1})
