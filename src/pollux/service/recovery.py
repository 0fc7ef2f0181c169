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
    JobPaused,
    JobRecovered,
    NodeId,
    Phase,
)
from pollux.scheduler import SchedulerState
from pollux.service.ledger import LedgerEntry
from pollux.wire.nodes import RunPhase, RunStatus

MOST_NAMES = 8
LEDGER = "its file in the folder of the cluster"


def from_ledger(entries: Iterable[LedgerEntry], state: SchedulerState) -> Iterator[Event]:
    """What the scheduler has to hear before it hears of any node."""
    for entry in entries:
        spec = entry.spec
        job = state.job(spec.id)
        if job is None and entry.outcome is None:
            yield JobRecovered(spec, entry.submitted_at_s, num_failures=entry.num_failures, cause=LEDGER)
            if entry.is_paused:
                yield JobPaused(spec.id, cause=LEDGER)
        elif entry.outcome is not None and (job is None or not job.phase.is_terminal):
            yield JobRecovered(
                spec,
                entry.submitted_at_s,
                outcome=entry.outcome,
                reason=entry.reason,
                exit_code=entry.exit_code,
                finished_at_s=entry.finished_at_s,
                num_failures=entry.num_failures,
                cause=LEDGER,
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
            failures = job.num_failures + 1
            return replace(known, outcome=Phase.FAILED, reason=reason, exit_code=code, num_failures=failures)
    return known


def sentence(num_lost: int, found: Sequence[JobRecovered]) -> str:
    """What people are told of a log that has lost its end; empty: nothing was lost."""
    if not num_lost and not found:
        return ""
    names = [event.job for event in found if event.outcome is None]
    unfinished = f"{', '.join(names[:MOST_NAMES])}{' …' if len(names) > MOST_NAMES else ''}"
    taken_up = (
        f"Jobs taken up again from other files: {unfinished}." if names else "No job is missing that has not ended."
    )
    if num_ended := len(found) - len(names):
        taken_up += f" How {'one more' if num_ended == 1 else f'{num_ended} more'} ended is known from there, too."
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
