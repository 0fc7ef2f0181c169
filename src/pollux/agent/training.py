"""A prepared job in its loops: which epochs there are, when it saves, leaves, and changes its replicas."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from pollux.agent.adapting import Heard
from pollux.agent.checkpoint import Loaded
from pollux.agent.looping import Goal
from pollux.agent.membership import Change, Left, Membership
from pollux.agent.metrics import Averages
from pollux.agent.parts import Parts
from pollux.agent.place import Place
from pollux.agent.signals import EXIT_CODE, ignore_terminate, on_terminate
from pollux.agent.state import TrainingState, random_states, restore_random_states
from pollux.errors import LoopMisuse

log = logging.getLogger(__name__)

NOT_SAVED = 1
"""The exit code of a replica that alone had the state, and could neither hand it over nor save it."""


class Training:
    """What happens in the loops of a script, on one of its replicas."""

    def __init__(
        self,
        membership: Membership,
        parts: Parts,
        state: TrainingState,
        averages: Averages,
        close: Callable[[], None],
    ) -> None:
        self._membership = membership
        self._replicas = membership.replicas
        self._parts = parts
        self._state = state
        self._averages = averages
        self._close = close
        self._resume_from = Place()
        self._is_resumed = self._has_joined = False
        self._on_resumed: Callable[[], None] | None = None
        """Called once, where the script comes to the loop that it resumes after an epoch or at the end."""
        self._loops_begun = 0
        self._leave_asked = False
        self.stop_reason = ""
        membership.on_lost = functools.partial(self.regroup, is_planned=False)
        membership.on_lost_in_body = self._lost_in_body
        membership.is_asked_to_leave = lambda: self._leave_asked
        parts.loop.on_heard = self._heard
        parts.loop.on_regroup = lambda is_planned: self.regroup(is_planned=is_planned)

    # Beginning

    def begin(self) -> None:
        """From the newest checkpoint if there is one; a replica that joins others waits until it comes to a loop."""
        if not self._replicas.is_member:
            return
        parts = self._parts
        parts.saver.check()
        loaded: Loaded | None = None
        while True:
            try:
                loaded = parts.saver.latest()
                if loaded is not None:
                    self._resume(loaded)
                parts.model.connect(self._replicas)
                break
            except RuntimeError as error:
                if not self._membership.is_loss(error):
                    raise
            if self._begin_again():
                break
        self._membership.has_state = True
        self._hold_back(None)
        if loaded is None:
            parts.teller.started()
        else:
            parts.teller.resumed(loaded.path)

    def _begin_again(self) -> bool:
        """Replicas were lost at the start. True: others had begun already, and gave this one their state."""
        parts = self._parts
        parts.model.disconnect()
        change = self._membership.regroup(self._state, is_planned=False)
        if change.state is not None:
            self._settle_in(change)
            self._go_on_at(change.state["training"], restores_random=False)
            return True
        parts.assign_roles()
        parts.adapter.regrouped()
        return False

    def _resume(self, loaded: Loaded) -> None:
        is_main = self._replicas.is_main
        self._state.resume(loaded.parts, str(loaded.path), is_main=is_main)
        self._go_on_at(loaded.parts["training"], restores_random=is_main)

    def _go_on_at(self, training: Mapping[str, Any], *, restores_random: bool) -> None:
        """Fast-forward to that place of the script."""
        self._resume_from = Place(**training["place"])
        self._is_resumed = True
        if not restores_random:
            return
        restore = functools.partial(restore_random_states, training["random"], self._replicas.device)
        # Where they were taken: making an iterator of a DataLoader draws from them.
        if training["is_inside"]:
            self._parts.loop.on_first_pass = restore
        else:
            self._on_resumed = restore

    # Loops

    def turns(
        self, kind: str, count: int, beginning: Callable[[], float], goal: Callable[[float, int], Goal]
    ) -> Iterator[int]:
        """The loop that a script writes around the one over its loader."""
        if self._parts.loop.goal is not None:
            raise LoopMisuse(
                "job.epochs or job.passes is used inside another of them", "Write one of them around the loop"
            )
        if self._replicas.is_member:
            yield from self._turns(kind, count, beginning, goal)
            return
        self._membership.wait_until_called()
        # From here on it may be the only one that has the state.
        with on_terminate(self._ask_leave, is_managed=True):
            self._join_the_others()
            yield from self._turns(kind, count, beginning, goal)

    def _turns(
        self, kind: str, count: int, beginning: Callable[[], float], goal: Callable[[float, int], Goal]
    ) -> Iterator[int]:
        made = self._parts
        self._membership.has_finished = False
        number = self._loops_begun
        self._loops_begun += 1
        resumed = self._resume_from
        if number == resumed.loop and self._is_resumed:
            self._check_same_loop(resumed, kind, count)
        if number == resumed.loop and self._on_resumed is not None:
            self._on_resumed()
            self._on_resumed = None
        if number < resumed.loop:
            return
        if number == resumed.loop and resumed.is_finished and resumed.epoch >= count:
            if self._replicas.is_main:
                log.warning("this loop of %d epochs has ended before: give more, or another checkpoint_dir", count)
            self._membership.has_finished = True
            return
        first, start = 0, beginning()
        if number == resumed.loop and self._is_resumed:
            first, start = resumed.epoch, resumed.start
        if number != resumed.loop or not self._has_joined:
            made.loop.is_stopped = False
        if made.saver.is_on or self._membership.is_managed:
            self._state.check_user_state()
        try:
            with on_terminate(self._ask_leave, is_managed=self._membership.is_managed):
                for epoch in range(first, count):
                    made.loop.goal = aim = goal(start, epoch + 1)
                    made.adapter.total_progress = goal(start, count).progress
                    self._state.place = Place(number, epoch, start, kind=kind, count=count)
                    yield epoch
                    if aim.progress is not None:
                        # Left early, by a break: the next epoch is a whole one all the same.
                        start -= max(0.0, aim.progress - made.adapter.progress)
                    self._state.place = Place(number, epoch + 1, start, kind=kind, count=count)
                    self._agree_to_go_on()
                    if made.loop.is_stopped:
                        break
                end = Place(number, max(first, count), start, is_finished=True, kind=kind, count=count)
                self._finish_loop(end)
                self._membership.has_finished = True
            if self._leave_asked:  # too late for those in the loop to hear of it; all that they have done is saved
                made.teller.stopped("SIGTERM")
                self._end(EXIT_CODE)
        finally:  # also after a break of the script's
            made.loop.goal = None
            made.adapter.wants_stop = False

    @staticmethod
    def _check_same_loop(others: Place, kind: str, count: int) -> None:
        """A script that comes to other loops than it did before, or than the other replicas, went another way."""
        if others.kind and others.kind != kind:
            raise LoopMisuse(
                f"loop {others.loop} of the script is over job.{kind}({count}), and was over"
                f" job.{others.kind}({others.count}) in the state that it goes on from",
                "Run the same loops in the same order on every replica, whatever is_main, the rank or the time says",
            )

    def stop(self) -> None:
        """End the loop early and well, on all replicas at the same step, at most two beats from now."""
        if self._parts.loop.is_inside:
            self._parts.adapter.wants_stop = True
        else:
            self._parts.loop.is_stopped = True

    # Boundaries

    def _heard(self, heard: Heard) -> None:
        made = self._parts
        made.teller.beat()
        made.teller.checkpoint(made.saver.last_path)
        self._membership.beat(self._state.step)
        if Heard.LEAVE in heard and made.loop.is_cut_short:
            self._leave_asked = True  # nothing may be raised while the loader is closed; soon the epoch is over
        elif Heard.LEAVE in heard:
            self._leave()
        if Heard.STOP in heard:
            made.loop.is_stopped = True
        elif Heard.SAVE in heard:
            self._save(wait=False)

    def _ask_leave(self) -> None:
        """A signal came."""
        self._leave_asked = True
        self._parts.adapter.wants_leave = True

    def _agree_to_go_on(self) -> None:
        """Between epochs; every replica comes by here, so that what one was asked all do."""
        loop = self._parts.loop
        is_stopped = loop.is_stopped or self._parts.adapter.wants_stop
        place = self._membership.place
        asked = [self._leave_asked, is_stopped, self._membership.is_pending]
        told = torch.tensor(asked, dtype=torch.float64, device=self._replicas.device)
        leave, stop, pending = self._membership.sum(told).tolist()
        loop.is_stopped = stop > 0
        if leave > 0:
            self._leave_surely()
        # After a repair in the sum the answer is about other members.
        is_same = self._membership.place == place
        if is_same and pending == self._replicas.size and self._membership.is_pending:
            self.regroup(is_planned=True)

    def _leave_surely(self) -> NoReturn:
        """Also if members are lost in it."""
        while True:
            try:
                self._leave()
            except RuntimeError as error:
                if not self._membership.is_loss(error):
                    raise
            self.regroup(is_planned=False)

    def _leave(self) -> NoReturn:
        made = self._parts
        self._save(wait=True)
        # A launcher that sees one replica end may end the others, one of which is still writing.
        self._replicas.barrier()
        self._membership.has_left = True
        made.teller.checkpoint(made.saver.last_path)
        made.teller.stopped("SIGTERM")
        self._end(EXIT_CODE)

    def _end(self, code: int) -> NoReturn:
        if self._membership.is_managed:
            ignore_terminate()
        self._close()
        raise SystemExit(code)

    def _finish_loop(self, place: Place) -> None:
        """Every replica calls it, and none is past it before the checkpoint is on disk: then a signal does no harm.

        Whoever hears here that one of them was asked to leave was asked, too.
        """
        made = self._parts
        try:
            made.adapter.settle()
        except RuntimeError as error:
            if not self._membership.is_loss(error):
                raise
            self.regroup(is_planned=False)
        self._state.place = place
        averages = self._averages.merged_state() if made.saver.is_on else {}
        was_main = self._replicas.is_main
        self._close_the_books(averages)
        asked = torch.tensor([self._leave_asked], dtype=torch.float64, device=self._replicas.device)
        if self._membership.sum(asked).item() > 0:
            self._leave_asked = True
        if self._replicas.is_main and not was_main:
            self._close_the_books(averages)  # the one that was to do it is lost

    def _close_the_books(self, averages: Mapping[str, Any]) -> None:
        """The loop is over: save that and say so, on the first replica."""
        made = self._parts
        if made.saver.is_on:
            self._write(averages, wait=True)
            made.teller.checkpoint(made.saver.last_path)
        made.teller.finished(self.stop_reason if made.loop.is_stopped else "")

    def _save(self, *, wait: bool) -> None:
        """Every replica calls it: averages are summed over all of them. Members may be lost in it."""
        self._write(self._averages.merged_state(self._replicas.sum), wait=wait)

    def _write(self, averages: Mapping[str, Any], *, wait: bool) -> None:
        if self._replicas.is_main:
            state = self._state
            self._parts.saver.save(state.step, state.parts(averages), state.facts(), wait=wait)

    # Other replicas

    def _lost_in_body(self) -> bool:
        if not self._parts.model.is_in_pass:
            return False
        self._parts.stepper.lose()
        return True

    def _join_the_others(self) -> None:
        """A newcomer has come to its first loop, and was called: from here on it is where they are."""
        began_s = time.monotonic()
        change = self._membership.regroup(self._state, is_planned=False)
        assert change.state is not None
        self._settle_in(change)
        self._go_on_at(change.state["training"], restores_random=True)
        self._has_joined = True
        self._hold_back(began_s)
        before = change.state["training"].get("replicas", self._replicas.size)
        self._parts.teller.replicas_changed(before, change.is_repair)  # nobody who was there before may be left to
        if self._parts.loop.is_stopped and not change.state["training"]["is_inside"]:
            # Stopped after an epoch: to the others that was the last one.
            self._resume_from = dataclasses.replace(self._resume_from, epoch=self._resume_from.count)

    def regroup(self, *, is_planned: bool) -> None:
        """Between two steps, or where replicas come together: become a member of what the daemon names next.

        Planned: all members of the present group do so here.
        """
        before, began_s, was_planned = self._replicas.size, time.monotonic(), is_planned
        has_trained = self._membership.has_state
        if is_planned:
            self._let_go()
        self._parts.adapter.drop()
        self._parts.model.disconnect()
        while True:
            try:
                change = self._membership.regroup(self._state, is_planned=is_planned)
            except Left as left:
                self._go(left)
            try:
                self._settle_in(change)
            except RuntimeError as error:
                if not self._membership.is_loss(error):
                    raise
                is_planned = False
                continue
            self._keep_random()
            self._hold_back(began_s)
            if was_planned and has_trained and not change.is_repair:
                self._parts.adapter.realloc_delay_s = time.monotonic() - began_s
            self._parts.teller.replicas_changed(before, change.is_repair)
            return

    def _hold_back(self, since_s: float | None) -> None:
        """Emulated GPUs take their time to change hands."""
        if self._parts.emulation is not None:
            self._parts.emulation.hold_back(since_s)

    def _go(self, left: Left) -> NoReturn:
        if not left.has_state_to_save:
            self._end(0)
        # The first code says that it was asked to save and did.
        self._end(EXIT_CODE if self._save_alone() else NOT_SAVED)

    def _save_alone(self) -> bool:
        """On a replica that leaves with the state, whatever its rank was; whether it is on disk."""
        made, state = self._parts, self._state
        averages = state.merged_averages or self._averages.state_dict()
        if not made.saver.save(state.step, state.parts(averages), state.facts(), wait=True):
            log.error("this replica alone had the state of step %d, and it is not saved", state.step)
            return False
        made.teller.speak_last()
        made.teller.checkpoint(made.saver.last_path)
        made.teller.stopped("SIGTERM" if self._leave_asked else "nobody took over from the replicas that left")
        return True

    def _keep_random(self) -> None:
        """The loader is about to be iterated anew, which draws: go on from the same as those who join here."""
        loop, device = self._parts.loop, self._replicas.device
        if loop.is_inside and loop.on_first_pass is None:
            loop.on_first_pass = functools.partial(restore_random_states, random_states(device), device)

    def _let_go(self) -> None:
        """Have nothing under way in the group that is to be left, and lose nothing that its members have heard of."""
        adapter = self._parts.adapter
        try:
            if Heard.SAVE in adapter.settle():
                adapter.wants_save = True
            self._pass_on_requests()
            if self._leave_asked:
                self._leave()
            self._merge_averages()
        except RuntimeError as error:
            if not self._membership.is_loss(error):
                raise

    def _pass_on_requests(self) -> None:
        """Whoever was asked to stop or to leave may not be there to tell the others."""
        loop, adapter = self._parts.loop, self._parts.adapter
        asked = [self._leave_asked, loop.is_stopped or adapter.wants_stop, adapter.wants_save]
        told = torch.tensor(asked, dtype=torch.float64, device=self._replicas.device)
        leave, stop, save = self._replicas.sum(told).tolist()
        loop.is_stopped = stop > 0
        adapter.wants_save = save > 0 and self._membership.is_heir
        if leave > 0:
            self._ask_leave()

    def _merge_averages(self) -> None:
        """Some members may leave: the first of those who stay takes over what all have counted."""
        try:
            merged = self._averages.merged_state(self._replicas.sum)
        except LoopMisuse as error:  # all see it: the script hears of it where it asks for them
            log.warning("averages are not handed over: %s", error)
            return
        self._averages.load_state_dict(merged, self._membership.is_heir)
        self._state.merged_averages = merged if self._membership.is_leaving else None

    def _settle_in(self, change: Change) -> None:
        made = self._parts
        if change.state is not None and change.is_full:
            self._state.join(change.state, is_main=self._replicas.is_main)
        elif change.state is not None:
            self._state.agree(change.state)
        made.assign_roles()
        made.adapter.regrouped()
        made.stepper.regrouped()
        made.loop.regrouped()
        made.model.connect(self._replicas, is_equal=change.is_shared)
        self._membership.has_state = True
