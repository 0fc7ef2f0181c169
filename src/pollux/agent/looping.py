"""What happens at the boundaries of passes and steps, and when the loop over the loader is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pollux.agent.adapting import Adapter, Heard
from pollux.agent.batching import BatchConfig
from pollux.agent.dealing import Dealer, StepPlan
from pollux.agent.membership import Membership
from pollux.agent.schedule import Turn
from pollux.agent.stepping import Outcome, Stepper
from pollux.agent.stopwatch import Stopwatch
from pollux.errors import LoopMisuse

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When one turn of the user's loop over the loader ends: at a progress, or at the end of a pass."""

    progress: float | None = None
    pass_index: int | None = None

    def is_reached(self, progress: float, pass_index: int) -> bool:
        if self.progress is not None:
            return progress >= self.progress - ROUNDING
        assert self.pass_index is not None
        return pass_index >= self.pass_index


class TrainingLoop:
    """The loader's counterpart: knows the stepper, the adapter and the goal, and tells the job what a beat asks."""

    def __init__(
        self, dealer: Dealer, stepper: Stepper, adapter: Adapter, stopwatch: Stopwatch, membership: Membership
    ) -> None:
        self.dealer = dealer
        self.stepper = stepper
        self._adapter = adapter
        self._stopwatch = stopwatch
        self._membership = membership
        self._replicas = membership.replicas
        self.goal: Goal | None = None
        self.is_inside = False
        self.turn = Turn(-1, 0.0, 0.0)
        """The last turn of the loop over the loader, as of its start."""
        self.joined_turn: Turn | None = None
        """The turn that the others are in, on a replica that joins them there."""
        self.is_stopped = False
        self.is_cut_short = False
        """The script has left the loop over the loader by a break, and its last step is being counted."""
        self.on_heard: Callable[[Heard], None] = lambda _: None
        self.on_memory: Callable[[StepPlan, BatchConfig], None] = lambda *_: None
        self.on_first_pass: Callable[[], None] | None = None
        """Called once, before the next micro-batch is handed out, or where the loop is over without one."""
        self.on_regroup: Callable[[bool], None] = lambda _: None
        """Called between two steps: join the members that are named next. True: as planned, False: some are lost."""

    def enter(self) -> None:
        if self.goal is None:
            raise LoopMisuse(
                "the prepared loader is iterated outside of the job's epochs",
                "Write for epoch in job.epochs(n): around the loop (job.passes(n) for plain passes)",
            )
        if self.is_inside:
            raise LoopMisuse(
                "the prepared loader is iterated twice at the same time",
                "Finish one loop before the next; give job.shard(DataLoader(…)) a loader of its own",
            )
        self.is_inside = True
        next_turn = Turn(self.turn.number + 1, self._adapter.progress, self._adapter.progress)
        self.turn, self.joined_turn = self.joined_turn or next_turn, None
        self._check_model()
        self._stopwatch.interrupt()

    def _check_model(self) -> None:
        try:
            self.stepper.check_model()
        except RuntimeError as error:
            if not self._membership.is_loss(error):
                raise
            self.on_regroup(False)

    def leave(self) -> None:
        self.is_inside = False
        self._come_to_first_pass()
        self.stepper.abandon()
        self.dealer.rewind()
        self._stopwatch.interrupt()
        self._adapter.interrupted()

    def regrouped(self) -> None:
        """There are other replicas now: deal anew, from the last finished step on."""
        self.dealer.rewind()
        self._stopwatch.interrupt()

    def is_over(self) -> bool:
        if self.is_stopped or self.goal is None:
            return True
        return self.goal.is_reached(self._adapter.progress, self.dealer.committed.pass_index)

    def before_fetching(self) -> None:
        self._stopwatch.begin_pass()

    def begin_pass(self, plan: StepPlan, index: int) -> None:
        self._come_to_first_pass()
        self._stopwatch.expect(self._replicas.shape, plan, index)
        self.stepper.begin_pass(plan, index)

    def _come_to_first_pass(self) -> None:
        if self.on_first_pass is not None:
            self.on_first_pass()
            self.on_first_pass = None

    def end_pass(self, plan: StepPlan) -> Outcome:
        is_last = self.stepper.is_last
        outcome = self.stepper.end_pass()
        if outcome is Outcome.RETRY and self.stepper.has_lost:
            self.on_regroup(False)
            return Outcome.REGROUPED
        if outcome is Outcome.RETRY:
            self._stopwatch.interrupt()
            self.on_memory(plan, self._adapter.shrink(plan))
            return outcome
        counts = plan.is_whole and not plan.is_measured and not self.stepper.is_careful
        self._stopwatch.end_pass(self._replicas.shape, plan.per_gpu_batch_size, is_synchronising=is_last, counts=counts)
        if outcome is not Outcome.ACCUMULATED and self._finish(plan):
            return Outcome.REGROUPED
        return outcome

    def cut_short(self, plan: StepPlan) -> None:
        """The user left the loop. A step that the optimizer has taken counts; of any other nothing remains."""
        if self.stepper.is_complete:
            self.is_cut_short = True
            self.stepper.end_pass()
            self._finish(plan)
            self.is_cut_short = False

    def _finish(self, plan: StepPlan) -> bool:
        """A step is done. Says whether the replicas changed after it."""
        self.dealer.commit(plan)
        membership = self._membership
        membership.trained(plan.step + 1)
        if self.stepper.has_lost and not self.is_cut_short:
            self.on_regroup(False)
            return True
        try:
            heard = self._adapter.after_step(plan, self.stepper)
            if heard is not Heard.NOTHING:
                self.on_heard(heard)
        except RuntimeError as error:
            if not membership.is_loss(error):
                raise
            if self.is_cut_short:
                return False  # they regroup where they come together next: nothing may be raised here
            self.on_regroup(False)
            return True
        if self.is_cut_short or not membership.is_pending or not membership.is_switch_due(plan.step + 1):
            return False
        self.on_regroup(not membership.is_repair_pending)
        return True
