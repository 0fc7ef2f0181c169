"""How one job is run: the brain of its home. Pure: what happened comes in, orders go out; no clock, no input or output.

A run changes in two steps. A request or a piece of news is written down as it is; then the rules (`_follow_a_rule`,
one method each) are followed until none applies, and what is now decided is turned into orders (`node.dispatch`).
Rules look at what is known and not at what came last, so that late, lost and repeated messages need no rules of their
own.

    start ─▶ members train at (g, 0) ──loss──▶ the living ones gather as (g, 1), (g, 2) …
                    │ resize: newcomers get ready while g trains; lost or late: g+1 is abandoned
                    ▼
    members that stay and newcomers train at (g+1, 0), the others leave ──loss──▶ (g+1, 1) …
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pollux.core import (
    Allocation,
    Event,
    FrozenMap,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobId,
    JobStopped,
    NodeId,
    ReplicaLost,
    ReplicasReady,
    StopReason,
)
from pollux.errors import InvalidSpec, StaleGeneration
from pollux.node.deadlines import Deadlines
from pollux.node.dispatch import Dispatch
from pollux.node.members import Failure, NextGeneration, Replica, SavedRun, Target, places, split
from pollux.node.orders import Announce, KillReplica, Order
from pollux.wire.nodes import ReplicaHere, RunPhase, RunStatus, Seat
from pollux.wire.replicas import ReplicaPhase

__all__ = ["JobRun", "RunOptions", "SavedRun"]

_AT_ONCE = (StopReason.CANCELLED, StopReason.SUPERSEDED)
"""Nothing is saved for these."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How long a run waits for what may never come."""

    ready_timeout_s: float = 300.0
    """For newcomers to be ready, and for a state that was handed over to show up."""
    repair_grace_s: float = 1.0
    """For a word on what became of the member that another one cannot reach."""
    stop_timeout_s: float = 60.0
    """For a replica that was told to go."""
    node_timeout_s: float = 30.0
    """For a node that is out of reach, before its replicas count as lost."""


class JobRun:
    """The run of one job, over all of its generations.

    The daemon saves the run (`saved`) after each call, and only then carries the orders out, in their sequence.
    `now_s` is any clock that does not go back; it may start anew with the daemon. A node counts as there until
    `node_gone`. No order is given for a node that is gone; what it missed is ordered in `node_back`. That a replica
    could not be started is told by `status` with an exit code.
    """

    def __init__(self, job: JobId, options: RunOptions | None = None) -> None:
        self._options = options or RunOptions()
        self._run = SavedRun(job)
        self._deadlines = Deadlines()
        self._dispatch = Dispatch()
        self._news: list[Order] = []

    # Requests

    def start(self, generation: int, allocation: Allocation, now_s: float) -> list[Order]:
        """Start the job there. What may still run of it is ended first, and saves nothing."""
        if self._is_new(generation, allocation):
            self._abandon(f"generation {generation} starts instead")
            self._run.target = Target(generation, allocation)
            if self._run.is_over:
                self._begin(self._run.target)
            else:
                self._close(9)
        return self._settle(now_s)

    def resize(self, generation: int, allocation: Allocation, in_place: bool, now_s: float) -> list[Order]:
        """Go over to that generation: in place while the present one trains, or by checkpoint and restart."""
        run = self._run
        if not self._is_new(generation, allocation):
            return self._settle(now_s)
        is_ending = run.is_closing and (run.target is None or run.stopped_as > 0)
        self._abandon(f"generation {generation} takes its place")
        if run.is_over or is_ending:
            self._give_up_on(generation, "the job has ended" if run.is_over else "the job is ending")
        elif in_place and not run.is_closing:
            stayers, _ = split(run.members, allocation)
            newcomers = self._replicas(Target(generation, allocation), stayers, are_newcomers=True)
            run.next = NextGeneration(generation, allocation, newcomers)
        else:
            run.target = Target(generation, allocation)
            self._close(15)
        return self._settle(now_s)

    def stop(self, generation: int, reason: StopReason, now_s: float) -> list[Order]:
        """End all replicas up to that generation. Answered at once if there are none."""
        run = self._run
        if generation < run.newest:
            raise StaleGeneration(run.job, generation, run.newest)
        run.issued = max(run.issued, generation)
        if run.is_over:
            finished = [event for event in run.standing if isinstance(event, JobFinished)]
            self._announce(finished[0] if finished else JobStopped(run.job, generation))
        else:
            self._abandon("the job was told to stop")
            run.stopped_as = max(run.stopped_as, generation)
            self._close(9 if reason in _AT_ONCE else 15)
        return self._settle(now_s)

    # News

    def status(self, node: NodeId, here: ReplicaHere, now_s: float) -> list[Order]:
        """A replica there said something, or ended."""
        self._learn(node, here)
        return self._settle(now_s)

    def node_gone(self, node: NodeId, now_s: float) -> list[Order]:
        """The daemon there is out of reach; to be told at once, since the run itself waits for `node_timeout_s`."""
        self._dispatch.away.add(node)
        return self._settle(now_s)

    def node_back(self, node: NodeId, replicas: Sequence[ReplicaHere], now_s: float) -> list[Order]:
        """The daemon there is in reach, with these replicas, those that ended among them.

        After a recovery: for each of `nodes`, the home itself among them. Whatever was ordered before may be lost.
        """
        run = self._run
        self._dispatch.away.discard(node)
        if run.is_over and node not in run.used:
            run.used = (*run.used, node)
        for here in replicas:
            self._learn(node, here)
        listed = {here.replica for here in replicas}
        for replica in run.living():
            if replica.node != node:
                continue
            self._dispatch.repeat(replica)
            if replica.name not in listed and replica.is_known:
                replica.is_gone = True  # with its machine, or with the process that kept its exit code
            elif replica.name not in listed:
                self._dispatch.respawn(replica)
        return self._settle(now_s)

    def tick(self, now_s: float) -> list[Order]:
        """Time has passed. To be called at `next_deadline_s`; at other times it does no harm."""
        return self._settle(now_s)

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
        return self._deadlines.next_s

    @property
    def nodes(self) -> frozenset[NodeId]:
        """Those that the run has, or may still have, something to do with."""
        return frozenset(self._run.used)

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
        )

    def saved(self) -> SavedRun:
        """A copy of all that a recovery needs; a document of core (`dumps`, `loads`)."""
        return self._run.copied()

    @classmethod
    def restored(cls, saved: SavedRun, options: RunOptions | None = None) -> JobRun:
        """The run as it was saved. All of its nodes count as out of reach."""
        run = cls(saved.job, options)
        run._run = saved.copied()
        run._dispatch.away.update(saved.used)
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
        replica = self._run.find(here.replica)
        if replica is None or replica.is_gone:
            # Of another life: nobody waits for it, and it must not touch what is going on now.
            if here.exit_code is None and node not in self._dispatch.away:
                self._news.append(KillReplica(node, here.replica, 9))
            return
        replica.learn(here)

    # Rules

    def _settle(self, now_s: float) -> list[Order]:
        while self._follow_a_rule(now_s):
            pass
        self._hasten(now_s)
        self._deadlines.forget_unasked(now_s)
        orders, self._news = [*self._news, *self._dispatch.orders(self._run)], []
        return orders

    def _follow_a_rule(self, now_s: float) -> bool:
        """Follow the first rule that applies. Each changes the run such that it no longer does."""
        return (
            self._lose_nodes(now_s)
            or self._drop_unstarted()
            or self._clear_away()
            or self._conclude()
            or self._finish(now_s)
            or self._repair(now_s)
            or self._give_up(now_s)
            or self._tell_how_it_trains()
            or self._switch()
        )

    def _lose_nodes(self, now_s: float) -> bool:
        """A node that was out of reach for too long is lost, with all that was there."""
        lost: list[Replica] = []
        for node in sorted(self._dispatch.away):
            there = [replica for replica in self._run.living() if replica.node == node]
            if self._deadlines.is_due(f"node {node}", bool(there), self._options.node_timeout_s, now_s):
                lost += there
        for replica in lost:
            replica.is_gone = True
        return bool(lost)

    def _drop_unstarted(self) -> bool:
        """What must end and was never started is gone."""
        unstarted = [r for r in self._run.living() if r.signal and self._dispatch.was_never_started(r)]
        for replica in unstarted:
            replica.is_gone = True
        return bool(unstarted)

    def _clear_away(self) -> bool:
        """An abandoned generation is announced as such when its newcomers are gone."""
        run = self._run
        run.doomed = tuple(replica for replica in run.doomed if not replica.is_gone)
        there = {replica.generation for replica in run.doomed}
        cleared = [generation for generation in run.abandoned if generation not in there]
        for generation in cleared:
            self._announce(GenerationAbandoned(run.job, generation, run.abandoned[generation]))
            run.abandoned = run.abandoned.without(generation)
        return bool(cleared)

    def _conclude(self) -> bool:
        """All are gone: that was the end, or the next generation starts."""
        run = self._run
        if run.is_over or not run.is_closing or run.living():
            return False
        holders = [member for member in run.members if member.holds_state] or run.members
        if run.is_finished or all(member.ended_well for member in holders):
            if run.target is None:
                self._end(JobFinished(run.job, run.generation))
            else:
                self._abandon("the job has finished")
            return True
        if run.stopped_as:
            self._end(JobStopped(run.job, run.stopped_as))
        elif run.target is None and run.failure is not None:
            self._end(JobFailed(run.job, run.generation, run.failure.reason, run.failure.exit_code))
        elif run.target is None:
            self._end(JobStopped(run.job, run.generation))  # only nodes were lost: not the fault of the job
        if run.target is not None:
            self._begin(run.target)
        return True

    def _finish(self, now_s: float) -> bool:
        """Nobody who has the state lives, and the last of them ended well: the training is finished.

        Those to whom it was to be handed over may have it and not have said so yet.
        """
        run = self._run
        if run.is_over or run.is_closing or any(replica.ended_badly for replica in run.members):
            return False
        living = [member for member in run.members if not member.is_gone]
        if not living:
            self._close(0)
            return True
        holders = (*(member for member in run.members if member.holds_state), *run.leavers)
        is_nowhere = all(holder.is_gone for holder in holders)
        if not self._deadlines.is_due("taking over", is_nowhere, self._options.ready_timeout_s, now_s):
            return False
        run.is_finished = run.failure is None
        self._close(9)
        return True

    def _repair(self, now_s: float) -> bool:
        """A member is lost or cannot reach the others: those that live are the next membership."""
        run = self._run
        if run.is_over or run.is_closing:
            return False
        # Without a leaver those that stay cannot agree on the step to switch at.
        group = run.members if run.trains else (*run.members, *run.leavers)
        lost = [replica for replica in group if replica.ended_badly]
        has_lost_store = run.store != run.formed_with and not run.trains
        if not (lost or has_lost_store or self._is_held_up(now_s)):
            return False
        for replica in lost:
            if run.failure is None and replica.exit_code is not None:
                run.failure = Failure(replica.obituary(), replica.exit_code)
        if run.next is not None:
            self._abandon("the generation that trains has lost replicas" if lost else "the members lost each other")
            return True
        living = [member for member in run.members if not member.is_gone]
        has_state = any(member.holds_state for member in living)
        # A member that ended well has finished the training, so that there is nothing to hand over.
        heirs = [] if any(member.ended_well for member in run.members) else [r for r in run.leavers if not r.is_gone]
        if not (living and (has_state or heirs)):
            # Before all is given up: one of them may have been given the state and not have said so yet.
            is_away = any(member.node in self._dispatch.away for member in living)
            is_hopeless = self._deadlines.is_due("state", True, self._options.repair_grace_s, now_s) and not is_away
            if living and not is_hopeless:
                return False
            self._close(9, leavers=15)
            return True
        run.leavers = tuple(leaver for leaver in run.leavers if not leaver.is_gone)
        self._form(run.membership + 1, living, has_state)
        return True

    def _is_held_up(self, now_s: float) -> bool:
        """Members wait, or gather with one that ended well, and have heard of nothing that would help them."""
        run = self._run
        group = (*run.members, *(leaver for leaver in run.leavers if leaver.hands_over))
        is_short = any(member.ended_well for member in run.members) and any(
            not member.is_gone and member.phase is not ReplicaPhase.LEAVING and not run.is_training(member)
            for member in run.members
        )
        holds = is_short or any(replica.is_held_up for replica in group)
        return self._deadlines.is_due("repair", holds, self._options.repair_grace_s, now_s)

    def _give_up(self, now_s: float) -> bool:
        """A newcomer ended, or the switch could not be made in time: the present generation trains on."""
        run = self._run
        if not self._deadlines.is_due("ready", run.next is not None, self._options.ready_timeout_s, now_s):
            ended = next((newcomer for newcomer in run.newcomers if newcomer.is_gone), None)
            if ended is None:
                return False
            reason = f"{ended.obituary()} before it was ready"
        else:
            late = ", ".join(newcomer.name for newcomer in run.newcomers if not newcomer.is_ready)
            who = f"replica {late} was" if late else "the members were"
            reason = f"{who} not ready after {self._options.ready_timeout_s:g} s"
        self._abandon(reason)
        return True

    def _tell_how_it_trains(self) -> bool:
        """All members train: say so, if anybody has not heard it yet."""
        run = self._run
        if run.is_closing or not run.trains:
            return False
        run.failure = None
        run.leavers = tuple(leaver for leaver in run.leavers if not leaver.is_gone)
        members = places(run.members)
        if run.ready < run.generation and not run.leavers:
            run.ready, run.announced = run.generation, run.allocation
            run.abandoned = FrozenMap({g: why for g, why in run.abandoned.items() if g > run.generation})
            self._announce(ReplicasReady(run.job, run.generation))
        elif run.ready == run.generation and run.announced != members:
            run.announced = members
            self._announce(ReplicaLost(run.job, run.generation, run.membership, members))
        else:
            return False
        return True

    def _switch(self) -> bool:
        """All newcomers are ready: those that stay join them, the others leave."""
        run = self._run
        upcoming = run.next
        if upcoming is None or not run.trains or run.ready != run.generation:
            return False
        if not all(newcomer.is_ready for newcomer in upcoming.newcomers):
            return False
        stayers, leavers = split(run.members, upcoming.allocation)
        run.next = None
        run.generation, run.allocation = upcoming.generation, upcoming.allocation
        run.leavers = tuple(leavers)
        self._form(0, [*stayers, *upcoming.newcomers], has_state=bool(stayers))
        return True

    def _hasten(self, now_s: float) -> None:
        """What was told to go and is still there after `stop_timeout_s` is ended; if that does not help, again."""
        run = self._run
        for replica in run.living():
            # Before the others train without it, a leaver is not late: the switch needs it.
            is_to_go = bool(replica.signal) or (replica in run.leavers and (run.trains or run.is_closing))
            what = f"end {replica.name}"
            if self._deadlines.is_due(what, is_to_go, self._options.stop_timeout_s, now_s):
                replica.end_by(9)
                self._dispatch.repeat(replica)
                self._deadlines.restart(what)
                self._deadlines.is_due(what, is_to_go, self._options.stop_timeout_s, now_s)

    # What the rules do

    def _begin(self, target: Target) -> None:
        """Start all replicas of a generation, with nothing left of the one before."""
        run = self._run
        members = self._replicas(target, stayers=(), are_newcomers=False)
        run.generation, run.allocation = target.generation, target.allocation
        run.leavers, run.target, run.stopped_as = (), None, 0
        run.is_closing = run.is_finished = run.is_over = False
        run.failure = None
        run.standing = tuple(event for event in run.standing if isinstance(event, GenerationAbandoned))
        self._form(0, members, has_state=True)

    def _replicas(self, target: Target, stayers: Sequence[Replica], are_newcomers: bool) -> tuple[Replica, ...]:
        """New ones, where the allocation has room beside those that stay. Their ranks come after those."""
        run = self._run
        allocation = target.allocation
        kept = places(stayers).gpus
        nodes = [node for node, count in allocation.gpus.items() for _ in range(count - kept.get(node, 0))]
        made: list[Replica] = []
        for rank, node in enumerate(nodes, len(stayers)):
            run.num_started += 1
            name = f"{target.generation}-{run.num_started}"
            seat = Seat(name, rank, allocation.num_gpus, allocation.num_nodes, are_newcomers)
            made.append(Replica(node, target.generation, seat))
            self._deadlines.restart(f"node {node}")
        run.used = tuple(dict.fromkeys((*run.used, *nodes)))
        return tuple(made)

    def _form(self, membership: int, members: Iterable[Replica], has_state: bool) -> None:
        """These are the members now, in order of their ranks; without state, the first leaver hands it over."""
        run = self._run
        run.membership, run.members = membership, tuple(members)
        run.takes_over, run.formed_with = not has_state, run.store
        for position, leaver in enumerate(run.leavers):
            leaver.hands_over = run.takes_over and position == 0
        if membership > 0:
            for replica in (*run.members, *run.leavers):
                replica.answered = replica.at

    def _abandon(self, reason: str) -> None:
        """What gets ready does so in vain."""
        run = self._run
        if run.next is not None:
            for newcomer in run.next.newcomers:
                newcomer.end_by(9)
            run.doomed = (*run.doomed, *run.next.newcomers)
            self._give_up_on(run.next.generation, reason)
            run.next = None
        if run.target is not None:
            self._give_up_on(run.target.generation, reason)
            run.target = None

    def _give_up_on(self, generation: int, reason: str) -> None:
        self._run.abandoned = FrozenMap({**self._run.abandoned, generation: reason})

    def _close(self, signal: int, leavers: int | None = None) -> None:
        """All have to go: by 15, 9, or with 0 by themselves; leavers by another signal if one is given."""
        run = self._run
        if run.target is None:
            self._abandon("the job is ending")
        run.is_closing = True
        for member in run.members:
            member.end_by(signal)
        for leaver in run.leavers:
            leaver.end_by(signal if leavers is None else leavers)

    def _end(self, event: Event) -> None:
        run = self._run
        run.is_over = run.target is None
        self._announce(event)

    def _announce(self, event: Event) -> None:
        """Say it, and keep it for those who come later, in place of what it makes obsolete."""
        run = self._run
        match event:
            case ReplicaLost() | GenerationAbandoned():
                others = tuple(other for other in run.standing if type(other) is not type(event))
            case _:
                others = ()
        run.standing = (*others, event)
        self._news.append(Announce(event))
