"""From what jobs hold to what they are to hold: one small step at a time, never with a GPU given out twice.

Every step is a phase of the job and an action for the world; the world's answers come back as events, after which this
runs again. GPUs are free when their last owner has said so, not when it was told to go.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pollux.core import Action, Allocation, Job, NodeId, Phase, ResizeJob, StartJob, StopJob, StopReason, Trigger
from pollux.scheduler.giving_way import way_out

if TYPE_CHECKING:
    from pollux.scheduler.state import SchedulerState

ACTIVE = (Phase.STARTING, Phase.RUNNING, Phase.RESIZING)


def reconcile(state: SchedulerState) -> list[Action]:
    """Take every step towards the target that can be taken now."""
    if not state.unsettled:
        return []
    actions: list[Action] = []
    blocked: list[Job] = []
    waiting: list[Job] = []
    for job in sorted((state.jobs[job_id] for job_id in state.unsettled), key=lambda job: job.sequence):
        if job.phase in ACTIVE and not _can_stay(state, job):
            actions.append(_stop(state, job))
        elif job.phase in (Phase.PENDING, Phase.RUNNING):
            waiting.append(job)
    for job in waiting:
        wanted = state.target[job.id]
        if not state.occupancy.has_room(wanted, job.allocation):
            blocked.append(job)
        elif job.phase is Phase.PENDING:
            actions.append(_start(state, job, wanted))
        else:
            actions.append(_resize(state, job, wanted))
    if blocked and not state.num_in_flight:
        actions += _unblock(state, blocked)
    return actions


def outstanding(state: SchedulerState) -> list[Action]:
    """What the world owes an answer to, to be asked again after a crash: doing it twice is doing it once.

    Plans are not asked for again: the next round makes a newer one.
    """
    actions: list[Action] = []
    for job in state.jobs.values():
        match job.phase:
            case Phase.STARTING:
                actions.append(StartJob(job.id, job.generation, job.allocation))
            case Phase.RESIZING:
                assert job.next_allocation is not None
                actions.append(ResizeJob(job.id, job.issued_generation, job.next_allocation))
            case Phase.STOPPING:
                actions.append(StopJob(job.id, job.issued_generation, StopReason.PREEMPTED))
            case Phase.PAUSING:
                actions.append(StopJob(job.id, job.issued_generation, StopReason.PAUSED))
            case Phase.CANCELLING:
                actions.append(StopJob(job.id, job.issued_generation, StopReason.CANCELLED))
    return actions


def _can_stay(state: SchedulerState, job: Job) -> bool:
    """Whether it gets to what it is to hold without giving back all that it holds."""
    return job.id in state.target and state.options.in_place and not job.spec.rigid


def _unblock(state: SchedulerState, blocked: list[Job]) -> list[Action]:
    """Nothing is in flight, so nobody is about to make room for these jobs.

    Some wait for GPUs that are not coming, as others kept theirs after all: they keep what they have, until the next
    round. The others wait for each other, as in a swap: one of them gives way.
    """
    capacity = state.cluster.capacity
    promised: Counter[NodeId] = Counter()
    for wanted in state.target.values():
        promised.update(wanted.gpus)
    short = {node for node, count in promised.items() if count > capacity.get(node, 0)}
    # The latest to arrive gives in first. What it then keeps may be what another one waits for.
    while hopeless := next((job for job in reversed(blocked) if _growth(state, job) & short), None):
        blocked.remove(hopeless)
        promised.subtract(state.target[hopeless.id].gpus)
        promised.update(hopeless.allocation.gpus)
        state.keep(hopeless)
        short = {node for node, count in promised.items() if count > capacity.get(node, 0)}
    way = way_out(state, blocked)
    if way is None:
        return []
    job, after = way
    return [_resize(state, job, after) if after else _stop(state, job)]


def _growth(state: SchedulerState, job: Job) -> set[NodeId]:
    """Nodes on which it is to hold more than it does."""
    return set(state.target[job.id].beyond(job.allocation).gpus)


def _start(state: SchedulerState, job: Job, wanted: Allocation) -> Action:
    generation = job.issued_generation + 1
    state.move(
        job,
        Trigger.START,
        generation=generation,
        issued_generation=generation,
        membership=0,
        allocation=wanted,
        num_reallocations=job.num_reallocations + (job.issued_generation > 0),
        first_started_at_s=state.time_s if job.first_started_at_s is None else job.first_started_at_s,
        retry_at_s=None,
    )
    return StartJob(job.id, generation, wanted)


def _resize(state: SchedulerState, job: Job, wanted: Allocation) -> Action:
    generation = job.issued_generation + 1
    state.move(
        job,
        Trigger.RESIZE,
        issued_generation=generation,
        next_allocation=wanted,
        num_reallocations=job.num_reallocations + 1,
    )
    if wanted != state.target[job.id]:
        state.giving_way.add(job.id)
    return ResizeJob(job.id, generation, wanted)


def _stop(state: SchedulerState, job: Job) -> Action:
    state.move(job, Trigger.STOP)
    return StopJob(job.id, job.issued_generation, StopReason.PREEMPTED)
