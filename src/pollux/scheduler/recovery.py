"""Jobs that the log had lost, or lost sight of, taken up again: what others knew of them becomes scheduling state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from pollux.core import Action, Allocation, Job, JobRecovered, Phase, StopJob, StopReason

if TYPE_CHECKING:
    from pollux.scheduler.state import SchedulerState

NOTHING = Allocation()

_LEAVES_AS = {
    Phase.PAUSED: (Phase.PAUSING, StopReason.PAUSED),
    Phase.PAUSING: (Phase.PAUSING, StopReason.PAUSED),
    Phase.CANCELLING: (Phase.CANCELLING, StopReason.CANCELLED),
}
"""What its owner asked for still holds; all others are to run again."""
_WAITS_AS = {Phase.PAUSED: Phase.PAUSED, Phase.PAUSING: Phase.PAUSED, Phase.CANCELLING: Phase.CANCELLED}


def recover(state: SchedulerState, event: JobRecovered) -> list[Action]:
    """Take it in, unless the log knows as much. What is between two generations by decisions that are lost is stopped.

    It saves first.
    """
    known = state.job(event.job)
    if known is not None and known.phase.is_terminal:
        return []
    is_new = known is None
    job = Job(event.spec, event.submitted_at_s, len(state.jobs) + len(state.ended)) if known is None else known
    job = replace(job, num_failures=max(job.num_failures, event.num_failures))
    if event.outcome is not None:
        finished_at_s = state.time_s if event.finished_at_s is None else event.finished_at_s
        generation = max(job.issued_generation, event.generation)
        end = {"exit_reason": event.reason, "exit_code": event.exit_code, "finished_at_s": finished_at_s}
        _put(state, job, event.outcome, generation, NOTHING, end)
        return []
    if event.generation <= job.issued_generation and not is_new:
        return []
    if not event.allocation:
        _put(state, job, _WAITS_AS.get(job.phase, Phase.PENDING), event.generation)
        return []
    if event.trains and job.phase not in _LEAVES_AS:
        started_at_s = state.time_s if job.first_started_at_s is None else job.first_started_at_s
        seen = {"membership": event.membership, "first_started_at_s": started_at_s}
        _put(state, job, Phase.RUNNING, event.generation, event.allocation, seen)
        state.keep(state.jobs[job.id])  # until the next plan
        return []
    phase, reason = _LEAVES_AS.get(job.phase, (Phase.STOPPING, StopReason.PREEMPTED))
    _put(state, job, phase, event.generation, event.allocation)
    return [StopJob(job.id, event.generation, reason)]


def _put(
    state: SchedulerState,
    job: Job,
    phase: Phase,
    generation: int,
    allocation: Allocation = NOTHING,
    more: Mapping[str, object] = MappingProxyType({}),
) -> None:
    state.retarget(job.id, NOTHING)
    changes = {
        "phase": phase,
        "generation": generation,
        "issued_generation": generation,
        "membership": 0,
        "allocation": allocation,
        "next_allocation": None,
        "attained_gpu_s": job.attained_gpu_s_at(state.time_s),
        "held_since_s": state.time_s if allocation else None,
        "retry_at_s": None,
        "finished_at_s": state.time_s if phase.is_terminal else None,
    }
    state.put(job.with_changes(**{**changes, **more}), "recovered")
