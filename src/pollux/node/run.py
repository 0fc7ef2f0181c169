"""How one job is run: the brain of its home. Pure: what happened comes in, orders go out; no clock, no input or output.

Each call writes down a request or a piece of news as it is, and then has the rules followed (`node.rules`).

    start ─▶ members train at (g, 0) ──loss──▶ the living ones gather as (g, 1), (g, 2) …
                    │ resize: newcomers get ready while g trains; lost or late: g+1 is abandoned
                    ▼
    members that stay and newcomers train at (g+1, 0), the others leave ──loss──▶ (g+1, 1) …
"""

from __future__ import annotations

from collections.abc import Sequence

from pollux.core import (
    Allocation,
    Event,
    JobFailed,
    JobFinished,
    JobId,
    JobStopped,
    NodeId,
    StopReason,
)
from pollux.errors import InvalidSpec, StaleGeneration
from pollux.node.members import SavedRun, Target, places
from pollux.node.orders import KillReplica, Order
from pollux.node.rules import Rules, RunOptions
from pollux.wire.nodes import ReplicaHere, RunPhase, RunStatus
from pollux.wire.replicas import ReplicaPhase

__all__ = ["JobRun", "RunOptions", "SavedRun"]

_AT_ONCE = (StopReason.CANCELLED, StopReason.SUPERSEDED)
"""Nothing is saved for these."""


class JobRun:
    """The run of one job, over all of its generations.

    The daemon saves the run (`saved`) after each call, and only then carries the orders out, in their sequence.
    `now_s` is any clock that does not go back; it may start anew with the daemon. A node counts as there until
    `node_gone`. No order is given for a node that is gone; what it missed is ordered in `node_back`. That a replica
    could not be started is told by `status` with an exit code.
    """

    def __init__(self, job: JobId, options: RunOptions | None = None) -> None:
        self._rules = Rules(SavedRun(job), options or RunOptions())

    @property
    def _run(self) -> SavedRun:
        return self._rules.run

    # Requests

    def start(self, generation: int, allocation: Allocation, now_s: float) -> list[Order]:
        """Start the job there. What may still run of it is ended first, and saves nothing.

        Asked for again after that generation has ended: how it ended is announced again.
        """
        is_new = self._is_new(generation, allocation)
        if not is_new and self._run.is_over:
            for event in self._run.standing:
                if isinstance(event, JobFinished | JobFailed | JobStopped):
                    self._rules.announce(event)
        if is_new:
            self._rules.abandon(f"generation {generation} starts instead")
            self._run.target = Target(generation, allocation)
            if self._run.is_over:
                self._rules.begin(self._run.target)
            else:
                self._rules.close(9)
        return self._rules.settle(now_s)

    def resize(self, generation: int, allocation: Allocation, in_place: bool, now_s: float) -> list[Order]:
        """Go over to that generation: in place while the present one trains, or by checkpoint and restart."""
        run = self._run
        if not self._is_new(generation, allocation):
            return self._rules.settle(now_s)
        is_ending = run.is_closing and (run.target is None or run.stopped_as > 0)
        self._rules.abandon(f"generation {generation} takes its place")
        if run.is_over or is_ending:
            self._rules.give_up_on(generation, "the job has ended" if run.is_over else "the job is ending")
        elif in_place and not run.is_closing:
            self._rules.get_ready(Target(generation, allocation))
        else:
            run.target = Target(generation, allocation)
            self._rules.close(15)
        return self._rules.settle(now_s)

    def stop(self, generation: int, reason: StopReason, now_s: float) -> list[Order]:
        """End all replicas up to that generation. Answered at once if there are none."""
        run = self._run
        if generation < run.newest:
            raise StaleGeneration(run.job, generation, run.newest)
        if generation > run.issued:
            run.issued, run.requested = generation, Allocation()
        if run.is_over:
            finished = [event for event in run.standing if isinstance(event, JobFinished)]
            self._rules.announce(finished[0] if finished else JobStopped(run.job, generation))
        else:
            self._rules.abandon("the job was told to stop")
            run.stopped_as = max(run.stopped_as, generation)
            self._rules.close(9 if reason in _AT_ONCE else 15)
        return self._rules.settle(now_s)

    # News

    def status(self, node: NodeId, here: ReplicaHere, now_s: float) -> list[Order]:
        """A replica there said something, or ended."""
        self._learn(node, here)
        return self._rules.settle(now_s)

    def node_gone(self, node: NodeId, now_s: float) -> list[Order]:
        """The daemon there is out of reach; to be told at once, since the run itself waits for `node_timeout_s`."""
        self._rules.dispatch.away.add(node)
        return self._rules.settle(now_s)

    def node_back(self, node: NodeId, replicas: Sequence[ReplicaHere], now_s: float) -> list[Order]:
        """The daemon there is in reach, with these replicas, those that ended among them.

        After a recovery: for each of `nodes`, the home itself among them. Whatever was ordered before may be lost.
        """
        run = self._run
        self._rules.dispatch.away.discard(node)
        if run.is_over and node not in run.used:
            run.used = (*run.used, node)
        for here in replicas:
            self._learn(node, here)
        listed = {here.replica for here in replicas}
        for replica in run.living():
            if replica.node != node:
                continue
            self._rules.dispatch.repeat(replica)
            if replica.name not in listed and replica.is_known:
                replica.is_gone = True  # with its machine, or with the process that kept its exit code
            elif replica.name not in listed:
                self._rules.dispatch.respawn(replica)
        return self._rules.settle(now_s)

    def node_lost(self, node: NodeId, now_s: float) -> list[Order]:
        """The machine there was restarted, and all that it had of the job is gone, through no fault of the job."""
        self._rules.dispatch.away.discard(node)
        for replica in self._run.living():
            if replica.node == node:
                replica.is_gone = True
        return self._rules.settle(now_s)

    def tick(self, now_s: float) -> list[Order]:
        """Time has passed. To be called at `next_deadline_s`; at other times it does no harm."""
        return self._rules.settle(now_s)

    # Questions

    @property
    def job(self) -> JobId:
        return self._run.job

    @property
    def store(self) -> str:
        """host:port of the rendezvous store; to be set before `start`, and before the first `node_back` of a recovery.

        Members that were gathering in another store gather anew, as the next membership.
        """
        return self._run.store

    @store.setter
    def store(self, address: str) -> None:
        self._run.store = address

    @property
    def next_deadline_s(self) -> float | None:
        """When to call `tick`, if nothing else happens before."""
        return self._rules.deadlines.next_s

    @property
    def nodes(self) -> frozenset[NodeId]:
        """Those that the run has, or may still have, something to do with."""
        return frozenset(self._run.used)

    @property
    def issued_generation(self) -> int:
        """The highest that was asked for."""
        return self._run.issued

    @property
    def is_over(self) -> bool:
        """Nothing is left of it, and that was announced. Late stops and nodes still get their answers from it."""
        return self._run.is_over

    @property
    def phase(self) -> RunPhase:
        run = self._run
        if run.is_over:
            return RunPhase.ENDED
        if run.is_closing:
            return RunPhase.STOPPING if run.target is None or run.stopped_as else RunPhase.RESTARTING
        if all(run.is_training(member) or member.phase is ReplicaPhase.LEAVING for member in run.members):
            is_alone = run.next is None and all(leaver.is_gone for leaver in run.leavers)
            return RunPhase.TRAINING if is_alone else RunPhase.RESIZING
        if run.membership > 0 or run.ready == run.generation:
            return RunPhase.REPAIRING
        has_begun = any(member.generation < run.generation or member.seat.is_newcomer for member in run.members)
        return RunPhase.RESIZING if has_begun else RunPhase.STARTING

    def standing(self) -> list[Event]:
        """What somebody who begins to watch has to hear: the announcements that still hold, oldest first."""
        return list(self._run.standing)

    def description(self, step: int | None = None) -> RunStatus:
        """How it stands. `step`: the newest one, if the daemon has heard of it by other ways."""
        run = self._run
        ends = [event for event in run.standing if isinstance(event, JobFinished | JobFailed | JobStopped)]
        statuses = tuple(replica.status for replica in run.living() if replica.status is not None)
        return RunStatus(
            run.job,
            self.phase,
            run.generation,
            run.membership,
            run.issued,
            places(member for member in run.members if not member.is_gone),
            step if step is not None else max((status.step for status in statuses if status.has_state), default=0),
            statuses,
            ends[-1] if run.is_over and ends else None,
        )

    def saved(self) -> SavedRun:
        """A copy of all that a recovery needs; a document of core (`dumps`, `loads`)."""
        return self._run.copied()

    @classmethod
    def restored(cls, saved: SavedRun, options: RunOptions | None = None) -> JobRun:
        """The run as it was saved. All of its nodes count as out of reach."""
        run = cls(saved.job, options)
        run._rules.run = saved.copied()
        run._rules.dispatch.away.update(saved.used)
        return run

    # What comes in

    def _is_new(self, generation: int, allocation: Allocation) -> bool:
        """Whether this request was not heard before; takes note of it."""
        run = self._run
        if not allocation:
            raise InvalidSpec("allocation", {}, "a job cannot run on nothing", "Stop the job to take its GPUs away")
        if (generation, allocation) == (run.issued, run.requested):
            return False
        if generation <= run.issued:
            raise StaleGeneration(run.job, generation, run.issued)
        run.issued, run.requested = generation, allocation
        return True

    def _learn(self, node: NodeId, here: ReplicaHere) -> None:
        if here.generation > self._run.issued:
            return  # the job has another home by now, which has started it: it is none of ours
        replica = self._run.find(here.replica)
        if replica is None or replica.is_gone:
            # Of another life: nobody waits for it, and it must not touch what is going on now.
            if not here.has_ended and node not in self._rules.dispatch.away:
                self._rules.news.append(KillReplica(node, here.replica, 9))
            return
        replica.learn(here)
