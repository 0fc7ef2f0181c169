"""All scheduling state, and the only function that changes it: `SchedulerState.apply(event, now)`.

Applying an event also takes the decisions that follow from it (`reconcile`), so that replaying the log of events alone
gives the same state; it never calls a policy, for plans are events. Late, duplicated and unknown messages change
nothing. Phases and their steps: docs/job-lifecycle.md.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from pollux.core import (
    Action,
    Allocation,
    Cluster,
    Event,
    FrozenMap,
    Job,
    JobCancelled,
    JobId,
    JobPaused,
    JobRecovered,
    JobReported,
    JobRescaled,
    JobResumed,
    JobSubmitted,
    KindsImported,
    MakePlan,
    NodeDrained,
    NodeId,
    NodeJoined,
    NodeLost,
    Phase,
    Plan,
    PlanMade,
    RoundDue,
    Snapshot,
    StopJob,
    StopReason,
    Trigger,
    next_phase,
)
from pollux.scheduler.occupancy import Occupancy
from pollux.scheduler.pool import Pool
from pollux.scheduler.reconcile import reconcile
from pollux.scheduler.recovery import recover
from pollux.scheduler.reports import LEAVING, hear, release_if_stranded
from pollux.scheduler.saving import SavedState, Step
from pollux.scheduler.trim import trimmed

NOTHING = Allocation()
HISTORY = 20
"""How many steps of a job an `IllegalTransition` tells."""

_REQUESTS = {
    JobCancelled: (Trigger.CANCEL, StopReason.CANCELLED),
    JobPaused: (Trigger.PAUSE, StopReason.PAUSED),
    JobResumed: (Trigger.RESUME, None),
}


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How plans are carried out."""

    in_place: bool = True
    """Change the GPUs of a running job while it trains on; False: stop it and start it again, as the paper does."""
    seed: int = 0
    """Where the randomness of all rounds comes from."""
    retry_pause_s: float = 0.0
    """How long a job waits after its first failure; twice as long after each one that follows."""
    max_retry_pause_s: float = 300.0
    """But never longer than this."""
    abandoned_starts_fail: bool = False
    """A start that was given up counts as a failure of the job, so that one that never starts ends."""

    def retry_pause_after_s(self, num_failures: int) -> float:
        """Seconds until a job that has failed so often is tried again."""
        return min(self.retry_pause_s * 2.0 ** min(num_failures - 1, 60), self.max_retry_pause_s)


class SchedulerState:
    """Jobs, nodes, the plan in force. Read it freely; change it by `apply` only."""

    def __init__(self, options: SchedulerOptions | None = None) -> None:
        self.options = options or SchedulerOptions()
        self.time_s = 0.0
        self.round = 0
        """The latest round; the first is 1."""
        self.awaited_round: int | None = None
        """The round whose plan is being made."""
        self.cluster = Cluster()
        self.jobs: dict[JobId, Job] = {}
        """Jobs that have not ended, in order of arrival."""
        self.ended: dict[JobId, Job] = {}
        self.target: dict[JobId, Allocation] = {}
        """What each job is to hold by the plan in force; nothing if it is not named."""
        self.unsettled: set[JobId] = set()
        """Jobs that do not hold, and are not about to hold, what they are to."""
        self.giving_way: set[JobId] = set()
        """Jobs whose resize under way leads to a step towards what they are to hold, not to that itself."""
        self.num_in_flight = 0
        """Jobs that the world owes an answer."""
        self.occupancy = Occupancy()
        self.pool = Pool()
        """The profile registry."""
        self._histories: dict[JobId, deque[Step]] = {}
        """The latest steps of each job, for the story that an `IllegalTransition` tells."""

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, SchedulerState) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes

    def saved(self) -> SavedState:
        """All that `restored` needs to come to the same state."""
        return SavedState(
            self.time_s,
            self.round,
            self.awaited_round,
            self.cluster,
            tuple(self.jobs.values()),
            tuple(self.ended.values()),
            FrozenMap(self.target),
            FrozenMap({job_id: tuple(steps) for job_id, steps in self._histories.items()}),
            self.pool.kinds,
            FrozenMap({job_id: FrozenMap(stages) for job_id, stages in self.pool.stages.items()}),
            tuple(sorted(self.giving_way)),
        )

    @classmethod
    def restored(cls, saved: SavedState, options: SchedulerOptions | None = None) -> SchedulerState:
        """The state that was saved; it goes on as that one would have, if its options are the same."""
        state = cls(options)
        state.time_s, state.round, state.awaited_round = saved.time_s, saved.round, saved.awaited_round
        state._set_cluster(saved.cluster)
        state.target = dict(saved.target)
        state.ended = {job.id: job for job in saved.ended}
        state.pool = Pool(saved.kinds, {job_id: dict(stages) for job_id, stages in saved.stages.items()})
        for job in saved.jobs:
            state._histories[job.id] = deque(saved.histories.get(job.id, ()), maxlen=HISTORY)
            state.put(job)
        state.giving_way = set(saved.giving_way)
        return state

    def job(self, job_id: JobId) -> Job | None:
        """Any job that was ever submitted."""
        return self.jobs.get(job_id) or self.ended.get(job_id)

    def snapshot(self) -> Snapshot:
        """All that a policy may see now."""
        plannable = {job_id: job for job_id, job in self.jobs.items() if job.may_be_given_gpus_at(self.time_s)}
        return Snapshot(self.time_s, self.round, self.cluster, FrozenMap(plannable), kinds=self.pool.kinds)

    def apply(self, event: Event, now: float) -> list[Action]:
        """Take an event in; return what must now be done in the world. Time that runs backwards stands still."""
        self.time_s = max(self.time_s, now)
        actions: list[Action] = []
        match event:
            case JobReported():  # first, as almost all events are
                actions = hear(self, event)
            case JobSubmitted(spec):
                if self.job(spec.id) is None:
                    sequence = len(self.jobs) + len(self.ended)
                    self.put(Job(spec, self.time_s, sequence), "submitted")
            case JobRecovered():
                actions += recover(self, event)
            case JobCancelled() | JobPaused() | JobResumed():
                actions += self._obey(event)
            case JobRescaled():
                if event.job in self.jobs:
                    job = self.jobs[event.job]
                    spec = replace(job.spec, min_gpus=event.min_gpus, max_gpus=event.max_gpus)
                    self.put(replace(job, spec=spec), "rescaled")
            case NodeJoined(node):
                self._set_cluster(self.cluster.with_node(node))
            case NodeDrained(node_id):
                if node_id in self.cluster:
                    self._set_cluster(self.cluster.drained(node_id))
                    self._give_up_node(node_id)
            case NodeLost(node_id):
                if node_id in self.cluster:
                    self._set_cluster(self.cluster.without(node_id))
                    self._give_up_node(node_id)
                    for job in list(self.jobs.values()):
                        release_if_stranded(self, job)
            case RoundDue(number):
                actions += self._begin_round(number)
            case PlanMade(number, plan):
                if number == self.awaited_round:
                    self.awaited_round = None
                    self._obey_plan(plan)
            case KindsImported():
                self.pool.bring(event, self.time_s)
            case _:
                actions += hear(self, event)
        return actions + reconcile(self)

    def _obey(self, request: JobCancelled | JobPaused | JobResumed) -> list[Action]:
        job = self.jobs.get(request.job)
        if job is None:
            return []
        trigger, reason = _REQUESTS[type(request)]
        before = job.phase
        job = self.move(job, trigger)
        if reason is None or job.phase is before:
            return []
        self.retarget(job.id, NOTHING)
        # On its way out already, the world needs to hear again only that nothing need be saved any more.
        has_been_told = before in (Phase.STOPPING, Phase.PAUSING) and job.phase is not Phase.CANCELLING
        if has_been_told or not job.phase.holds_gpus:
            return []
        return [StopJob(job.id, job.issued_generation, reason)]

    def _set_cluster(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.occupancy.follow(cluster)

    def _give_up_node(self, node: NodeId) -> None:
        """Nothing new goes there. What is there stays as it is until the world or the next round says otherwise."""
        for job_id, wanted in list(self.target.items()):
            if node in wanted.gpus:
                self.keep(self.jobs[job_id])

    def _begin_round(self, number: int) -> list[Action]:
        if number <= self.round:
            return []
        self.round = number
        snapshot = self.snapshot()
        self.awaited_round = number if snapshot.jobs else None
        return [MakePlan(number, snapshot, round_seed(self.options.seed, number))] if snapshot.jobs else []

    def _obey_plan(self, plan: Plan) -> None:
        if plan.allocations == self.target:
            return  # most rounds change nothing
        target = trimmed(plan, self.jobs, self.cluster, self.time_s)
        for job_id in self.jobs:
            self.retarget(job_id, target.get(job_id, NOTHING))

    def move(self, job: Job, trigger: Trigger, **changes: Any) -> Job:
        """The job after one step of its life. As `put`, `retarget` and `keep`: for `reconcile` and `reports` only."""
        after = next_phase(job.phase, trigger, job.id, map(str, self._histories[job.id]))
        if after.is_terminal:
            changes |= {"finished_at_s": self.time_s, "retry_at_s": None}
        if "allocation" in changes or "next_allocation" in changes:  # what it occupies changes: count up to now
            changes["attained_gpu_s"] = job.attained_gpu_s_at(self.time_s)
            changes["held_since_s"] = self.time_s if changes.get("allocation", job.allocation) else None
        job = job.with_changes(phase=after, **changes)
        self.put(job, trigger.value)
        return job

    def retarget(self, job_id: JobId, wanted: Allocation) -> None:
        """Set what a job is to hold."""
        if wanted != self.target.get(job_id, NOTHING):
            self.giving_way.discard(job_id)
        if wanted:
            self.target[job_id] = wanted
        else:
            self.target.pop(job_id, None)
        if job_id in self.jobs:
            self._note_unsettled(self.jobs[job_id])

    def keep(self, job: Job) -> None:
        """It is to hold what it has or is getting, and nothing once it has been told to leave."""
        self.retarget(job.id, NOTHING if job.phase in LEAVING else job.assigned)

    def put(self, job: Job, step: str | None = None) -> None:
        """Replace a job, and all that is computed from jobs."""
        before = self.jobs.get(job.id)
        if before is None:
            self.occupancy.add(job.occupied)
        elif before.allocation is not job.allocation or before.next_allocation is not job.next_allocation:
            self.occupancy.remove(before.occupied)
            self.occupancy.add(job.occupied)
        if job.phase is not Phase.RESIZING:
            self.giving_way.discard(job.id)
        self.num_in_flight += _is_in_flight(job.phase) - (before is not None and _is_in_flight(before.phase))
        if job.model is not None and (before is None or before.model is not job.model):
            self.pool.note(job.id, job.model)
        if step is not None:
            history = self._histories.setdefault(job.id, deque(maxlen=HISTORY))
            history.append(Step(self.time_s, step, job.phase))
        if job.phase.is_terminal:
            self.jobs.pop(job.id, None)
            self._histories.pop(job.id)
            self.ended[job.id] = job
            self.target.pop(job.id, None)
            self.unsettled.discard(job.id)
            self.pool.take(job, self.time_s)
        else:
            self.jobs[job.id] = job
            self._note_unsettled(job)

    def believe(self, job: Job) -> None:
        """Replace a job that differs only in what is believed of it; the registry alone is computed from that."""
        if job.model is not None and job.model is not self.jobs[job.id].model:
            self.pool.note(job.id, job.model)
        self.jobs[job.id] = job

    def _note_unsettled(self, job: Job) -> None:
        if job.phase in LEAVING or job.assigned == self.target.get(job.id, NOTHING):
            self.unsettled.discard(job.id)
        else:
            self.unsettled.add(job.id)


def round_seed(seed: int, number: int) -> int:
    """The seed of one round: 63 bits that have nothing in common with those of any other round or seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "big") >> 1


def _is_in_flight(phase: Phase) -> bool:
    return phase.holds_gpus and phase is not Phase.RUNNING
