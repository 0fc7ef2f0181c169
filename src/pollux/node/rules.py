"""What a run does about what it knows: one method for each rule, and what they have in common.

Rules look at what is known and not at what came last, so that late, lost and repeated messages need no rules of their
own. They are followed until none applies; what is then decided is turned into orders by `node.dispatch`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pollux.core import (
    Event,
    FrozenMap,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobStopped,
    ReplicaLost,
    ReplicasReady,
)
from pollux.node.deadlines import Deadlines
from pollux.node.dispatch import Dispatch
from pollux.node.exit_codes import HOPELESS
from pollux.node.members import Failure, NextGeneration, Replica, SavedRun, Target, places, split
from pollux.node.orders import Announce, Order
from pollux.wire.nodes import Seat
from pollux.wire.replicas import ReplicaPhase

log = logging.getLogger(__name__)


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
    stuck_timeout_s: float = 300.0
    """For a member whose group is broken to come where the others gather, before it is killed."""


class Rules:
    """Keeps `run`; all else here is gone with the daemon, and nothing is lost with it."""

    def __init__(self, run: SavedRun, options: RunOptions) -> None:
        self.run = run
        self.deadlines = Deadlines()
        self.dispatch = Dispatch()
        self.news: list[Order] = []
        """Orders that come before those that follow from what was decided."""
        self._options = options

    def settle(self, now_s: float) -> list[Order]:
        while self._follow_a_rule(now_s):
            pass
        self._hasten(now_s)
        self.deadlines.forget_unasked(now_s)
        orders, self.news = [*self.news, *self.dispatch.orders(self.run)], []
        return orders

    def _follow_a_rule(self, now_s: float) -> bool:
        """Follow the first rule that applies. Each changes the run such that it no longer does."""
        return (
            self._lose_nodes(now_s)
            or self._drop_unstarted()
            or self._clear_away()
            or self._conclude()
            or self._finish(now_s)
            or self._lose_stuck(now_s)
            or self._repair(now_s)
            or self._save_by_a_leaver()
            or self._give_up(now_s)
            or self._tell_how_it_trains()
            or self._switch()
        )

    def _lose_nodes(self, now_s: float) -> bool:
        """A node that was out of reach for too long is lost, with all that was there."""
        lost: list[Replica] = []
        for node in sorted(self.dispatch.away):
            there = [replica for replica in self.run.living() if replica.node == node]
            if self.deadlines.is_due(f"node {node}", bool(there), self._options.node_timeout_s, now_s):
                lost += there
        for replica in lost:
            replica.is_gone = True
        return bool(lost)

    def _drop_unstarted(self) -> bool:
        """What must end and was never started is gone."""
        unstarted = [r for r in self.run.living() if r.signal and self.dispatch.was_never_started(r)]
        for replica in unstarted:
            replica.is_gone = True
        return bool(unstarted)

    def _clear_away(self) -> bool:
        """An abandoned generation is announced as such when its newcomers are gone."""
        run = self.run
        run.doomed = tuple(replica for replica in run.doomed if not replica.is_gone)
        there = {replica.generation for replica in run.doomed}
        cleared = [generation for generation in run.abandoned if generation not in there]
        for generation in cleared:
            self.announce(GenerationAbandoned(run.job, generation, run.abandoned[generation]))
            run.abandoned = run.abandoned.without(generation)
        return bool(cleared)

    def _conclude(self) -> bool:
        """All are gone: that was the end, or the next generation starts."""
        run = self.run
        if run.is_over or not run.is_closing or run.living():
            return False
        holders = [member for member in run.members if member.holds_state] or run.members
        unseen = next((member for member in holders if member.ended_unseen), None)
        if run.is_finished or all(member.ended_well or member.ended_unseen for member in holders):
            if run.target is not None:
                self.abandon("the job has finished")
            elif unseen is None or run.is_finished:
                self._end(JobFinished(run.job, run.generation))
            else:
                why = f"{unseen.obituary()}. It may have done all its work, and is not run again. {unseen.quote}"
                self._end(JobFailed(run.job, run.generation, why.strip(), may_retry=False))
            return True
        for member in run.members:
            if member.is_asked and member.ended_badly:
                why = "it was told to save and leave, and may have lost what it had not saved"
                log.warning("Job %s: %s: %s.", run.job, member.obituary(), why)
        if run.stopped_as:
            self._end(JobStopped(run.job, run.stopped_as))
        elif run.target is None and run.failure is not None and not any(r.has_saved for r in run.leavers):
            failure = run.failure
            self._end(JobFailed(run.job, run.generation, failure.reason, failure.exit_code, failure.may_retry))
        elif run.target is None:
            # Only nodes were lost, which is not the fault of the job; or it can go on from what a leaver has saved.
            self._end(JobStopped(run.job, run.generation))
        if run.target is not None:
            self.begin(run.target)
        return True

    def _finish(self, now_s: float) -> bool:
        """Nobody who has the state lives, and the last of them ended well: the training is finished.

        Those to whom it was to be handed over may have it and not have said so yet; not from one that said it was done.
        """
        run = self.run
        if run.is_over or run.is_closing or any(replica.ended_badly for replica in run.members):
            return False
        living = [member for member in run.members if not member.is_gone]
        if not living:
            self.close(0)
            return True
        holders = (*(member for member in run.members if member.holds_state), *run.leavers)
        is_nowhere = all(holder.is_gone for holder in holders)
        has_ended = is_nowhere and any(leaver.has_finished for leaver in run.leavers) and not self.dispatch.away
        if not (
            self.deadlines.is_due("end while moving", has_ended, self._options.repair_grace_s, now_s)
            or self.deadlines.is_due("taking over", is_nowhere, self._options.ready_timeout_s, now_s)
        ):
            return False
        run.is_finished = run.failure is None
        self.close(9)
        return True

    def _repair(self, now_s: float) -> bool:
        """A member is lost or cannot reach the others: those that live are the next membership.

        Also while they save and leave, which they do together.
        """
        run = self.run
        may_save = any(member.signal == 15 and not member.is_gone for member in run.members)
        have_saved = all(member.is_gone or member.phase is ReplicaPhase.LEAVING for member in run.members)
        if run.is_over or (run.is_closing and (have_saved or not may_save)):
            return False
        # Without a leaver those that stay cannot agree on the step to switch at.
        group = run.members if run.trains else (*run.members, *run.leavers)
        lost = [replica for replica in group if replica.ended_badly]
        has_lost_store = run.store != run.formed_with and not run.trains
        if not (lost or has_lost_store or self._is_held_up(now_s)):
            return False
        for replica in lost:
            if run.failure is None and (replica.exit_code is not None or replica.has_unknown_end):
                run.failure = Failure(replica.reason(), replica.exit_code, may_retry=replica.exit_code != HOPELESS)
        if run.next is not None:
            self.abandon("the generation that trains has lost replicas" if lost else "the members lost each other")
            return True
        living = [member for member in run.members if not member.is_gone]
        has_state = any(member.holds_state for member in living)
        # A member that ended well has finished the training, so that there is nothing to hand over.
        heirs = [] if any(member.ended_well for member in run.members) else [r for r in run.leavers if not r.is_gone]
        if not (living and (has_state or heirs)):
            # Before all is given up: one of them may have been given the state and not have said so yet.
            is_away = any(member.node in self.dispatch.away for member in living)
            is_hopeless = self.deadlines.is_due("state", True, self._options.repair_grace_s, now_s) and not is_away
            if living and not is_hopeless:
                return False
            self.close(9, leavers=15)
            return True
        run.leavers = tuple(leaver for leaver in run.leavers if not leaver.is_gone)
        self._form(run.membership + 1, living, has_state)
        return True

    def _save_by_a_leaver(self) -> bool:
        """No member is left, and leavers that were asked to save are: the first of them does it alone."""
        run = self.run
        living = [leaver for leaver in run.leavers if not leaver.is_gone]
        is_left_to_them = run.is_closing and all(member.ended_badly for member in run.members)
        if not is_left_to_them or any(leaver.left_as_asked for leaver in run.leavers):
            return False
        if not any(leaver.signal == 15 for leaver in living) or any(leaver.hands_over for leaver in living):
            return False
        run.leavers = tuple(living)
        self._form(run.membership + 1, run.members, has_state=False)
        return True

    def _lose_stuck(self, now_s: float) -> bool:
        """A member gives signs of life, and does not come to where the others gather: it must end."""
        run = self.run
        stuck = [
            member
            for member in run.members
            if member.phase is ReplicaPhase.TRAINING and member.at < run.at and run.membership > 0 and not member.signal
        ]
        is_waited_for = bool(stuck) and not run.is_closing and any(m.phase is ReplicaPhase.JOINING for m in run.members)
        if not self.deadlines.is_due("stuck", is_waited_for, self._options.stuck_timeout_s, now_s):
            return False
        for member in stuck:
            member.end_by(9)
        return True

    def _is_held_up(self, now_s: float) -> bool:
        """Members wait, or gather with one that has left, and have heard of nothing that would help them."""
        run = self.run
        group = (*run.members, *(leaver for leaver in run.leavers if leaver.hands_over))
        # A leaver that saved instead has handed nothing over.
        has_left = any(r.ended_well for r in run.members) or any(r.left_as_asked for r in group)
        is_short = has_left and any(
            not member.is_gone and member.phase is not ReplicaPhase.LEAVING and not run.is_training(member)
            for member in run.members
        )
        holds = is_short or any(replica.is_held_up for replica in group)
        return self.deadlines.is_due("repair", holds, self._options.repair_grace_s, now_s)

    def _give_up(self, now_s: float) -> bool:
        """A newcomer ended, or the switch could not be made in time: the present generation trains on."""
        run = self.run
        if not self.deadlines.is_due("ready", run.next is not None, self._options.ready_timeout_s, now_s):
            ended = next((newcomer for newcomer in run.newcomers if newcomer.is_gone), None)
            if ended is None:
                return False
            reason = f"{ended.obituary()} before it was ready" + (f". {ended.quote}" if ended.quote else "")
        else:
            late = ", ".join(newcomer.name for newcomer in run.newcomers if not newcomer.is_ready)
            who = f"replica {late} was" if late else "the members were"
            reason = f"{who} not ready after {self._options.ready_timeout_s:g} s"
        self.abandon(reason)
        return True

    def _tell_how_it_trains(self) -> bool:
        """All members train: say so, if anybody has not heard it yet."""
        run = self.run
        if run.is_closing or not run.trains:
            return False
        run.failure = None
        run.leavers = tuple(leaver for leaver in run.leavers if not leaver.is_gone)
        members = places(run.members)
        if run.ready < run.generation and not run.leavers:
            run.ready, run.announced = run.generation, run.allocation
            run.abandoned = FrozenMap({g: why for g, why in run.abandoned.items() if g > run.generation})
            self.announce(ReplicasReady(run.job, run.generation))
        elif run.ready == run.generation and run.announced != members:
            run.announced = members
            self.announce(ReplicaLost(run.job, run.generation, run.membership, members))
        else:
            return False
        return True

    def _switch(self) -> bool:
        """All newcomers are ready: those that stay join them, the others leave."""
        run = self.run
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
        run = self.run
        for replica in run.living():
            # Before the others train without it, a leaver is not late: the switch needs it.
            is_to_go = bool(replica.signal) or (replica in run.leavers and (run.trains or run.is_closing))
            what = f"end {replica.name}"
            if self.deadlines.is_due(what, is_to_go, self._options.stop_timeout_s, now_s):
                replica.end_by(9)
                self.dispatch.repeat(replica)
                self.deadlines.restart(what)
                self.deadlines.is_due(what, is_to_go, self._options.stop_timeout_s, now_s)

    # What the rules do

    def begin(self, target: Target) -> None:
        """Start all replicas of a generation, with nothing left of the one before."""
        run = self.run
        members = self._replicas(target, stayers=(), are_newcomers=False)
        run.generation, run.allocation = target.generation, target.allocation
        run.leavers, run.target, run.stopped_as = (), None, 0
        run.is_closing = run.is_finished = run.is_over = False
        run.failure = None
        run.standing = tuple(event for event in run.standing if isinstance(event, GenerationAbandoned))
        self._form(0, members, has_state=True)

    def get_ready(self, target: Target) -> None:
        """Start the newcomers of a generation that those who stay will be part of."""
        stayers, _ = split(self.run.members, target.allocation)
        newcomers = self._replicas(target, stayers, are_newcomers=True)
        self.run.next = NextGeneration(target.generation, target.allocation, newcomers)

    def _replicas(self, target: Target, stayers: Sequence[Replica], are_newcomers: bool) -> tuple[Replica, ...]:
        """New ones, where the allocation has room beside those that stay. Their ranks come after those."""
        run = self.run
        allocation = target.allocation
        kept = places(stayers).gpus
        nodes = [node for node, count in allocation.gpus.items() for _ in range(count - kept.get(node, 0))]
        made: list[Replica] = []
        for rank, node in enumerate(nodes, len(stayers)):
            run.num_started += 1
            name = f"{target.generation}-{run.num_started}"
            seat = Seat(name, rank, allocation.num_gpus, allocation.num_nodes, are_newcomers)
            made.append(Replica(node, target.generation, seat))
            self.deadlines.restart(f"node {node}")
        run.used = tuple(dict.fromkeys((*run.used, *nodes)))
        return tuple(made)

    def _form(self, membership: int, members: Iterable[Replica], has_state: bool) -> None:
        """These are the members now, in order of their ranks; without state, the first leaver hands it over."""
        run = self.run
        run.membership, run.members = membership, tuple(members)
        run.takes_over, run.formed_with = not has_state, run.store
        for position, leaver in enumerate(run.leavers):
            leaver.hands_over = run.takes_over and position == 0
        if membership > 0:
            for replica in (*run.members, *run.leavers):
                replica.answered = replica.at

    def abandon(self, reason: str) -> None:
        """What gets ready does so in vain."""
        run = self.run
        if run.next is not None:
            for newcomer in run.next.newcomers:
                newcomer.end_by(9)
            run.doomed = (*run.doomed, *run.next.newcomers)
            self.give_up_on(run.next.generation, reason)
            run.next = None
        if run.target is not None:
            self.give_up_on(run.target.generation, reason)
            run.target = None

    def give_up_on(self, generation: int, reason: str) -> None:
        self.run.abandoned = FrozenMap({**self.run.abandoned, generation: reason})

    def close(self, signal: int, leavers: int | None = None) -> None:
        """All have to go: by 15, 9, or with 0 by themselves; leavers by another signal if one is given."""
        run = self.run
        if run.target is None:
            self.abandon("the job is ending")
        run.is_closing = True
        for member in run.members:
            member.end_by(signal)
        for leaver in run.leavers:
            leaver.end_by(signal if leavers is None else leavers)

    def _end(self, event: Event) -> None:
        run = self.run
        run.is_over = run.target is None
        self.announce(event)

    def announce(self, event: Event) -> None:
        """Say it, and keep it for those who come later, in place of what it makes obsolete."""
        run = self.run
        match event:
            case ReplicaLost() | GenerationAbandoned():
                others = tuple(other for other in run.standing if type(other) is not type(event))
            case _:
                others = ()
        run.standing = (*others, event)
        self.news.append(Announce(event))
