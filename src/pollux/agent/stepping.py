"""The passes of one optimizer step: weights of the loss, gradients that stay hidden until whole, the learning rate.

A step has one or more passes, and the body of the user's loop runs once in each. Until the last one, gradients are
taken away after the backward and given back before the next, so that clipping, `optimizer.step()` and `zero_grad()`
find nothing to work on; torch's optimizers pass over parameters without a gradient. One small parameter shows a zero
in the meantime: some ways of clipping fail where there is no gradient at all. The user's optimizer is not wrapped:
hooks around its step take that zero away, multiply the learning rate and put it back.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from pollux.agent.dealing import StepPlan
from pollux.agent.memory import MemoryBound, stand_in
from pollux.agent.model import ReplicatedModel
from pollux.agent.noise_meter import NoiseMeter
from pollux.agent.replicas import Replicas
from pollux.agent.scaler import StepScaler, is_in_scaler_step
from pollux.agent.schedule import is_scheduled
from pollux.agent.stopwatch import Stopwatch
from pollux.errors import LoopMisuse


class Course(Protocol):
    """Who knows the learning rate of a step and counts the steps taken: the adapter."""

    def factors(self, plan: StepPlan) -> Sequence[float]: ...
    def stepped(self, plan: StepPlan) -> None: ...


MOST_SKIPS: Final = 200
"""Steps in a row whose gradients are not finite; a GradScaler that starts far too high needs some twenty."""

LOOP: Final = "for batch in loader: … job.backward(loss); optimizer.step()"


class Outcome(enum.Enum):
    """How a pass ended."""

    ACCUMULATED = "more passes of this step follow"
    STEPPED = "the optimizer has stepped"
    SKIPPED = "the step was left out: a gradient was not finite"
    RETRY = "out of memory: the step is to be dealt again, in smaller passes"
    REGROUPED = "other replicas train now: what was dealt ahead is to be dealt again"


class Stepper:
    """Accompanies each pass: `begin_pass`, the user's body with `backward` and `optimizer.step()`, `end_pass`."""

    def __init__(
        self,
        model: ReplicatedModel,
        optimizer: torch.optim.Optimizer,
        replicas: Replicas,
        memory: MemoryBound,
        stopwatch: Stopwatch,
        *,
        meter: NoiseMeter | None,
        splits: bool,
        scaler: StepScaler | None,
        has_schedule: bool,
        course: Course,
        is_loss: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._replicas = replicas
        self._memory = memory
        self._stopwatch = stopwatch
        self._meter = meter
        self._splits = splits
        self._scaler = scaler
        self._has_schedule = has_schedule
        self._course = course
        self._is_loss = is_loss
        self.has_lost = False
        """Other replicas are out of reach: nothing comes of this step, which is to be dealt again."""
        self._skips = 0
        self._plan: StepPlan | None = None
        self._hidden: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._shown: torch.nn.Parameter | None = None
        """The parameter that shows a zero instead of its gradient, while it does."""
        self._smallest = min(self._parameters(), key=torch.Tensor.numel, default=None)
        self._rates: list[Any] = []
        self._kept = (-1, 0)
        self._timed: torch.Tensor | None = None
        self._timer: RemovableHandle | None = None
        self._index = self._size = 0
        self._weight = 1.0
        self.is_last = False
        """This pass is the last of its step: it synchronises, and the optimizer steps after it."""
        self.is_careful = False
        """Passes of this size were not proven to fit: this step averages gradients by itself, once all have some."""
        self._has_failed = self._is_watched = False
        self._did_backward = self._did_step = self._has_stepped = False
        self.losses: list[tuple[torch.Tensor, int]] = []
        """Mean loss and number of samples of each pass since the agent last took them."""
        self.difference: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """What the differenced estimator measured in this step."""
        model.on_failure = self._forward_failed
        model.on_error = self._note_loss_of_peers
        optimizer.register_step_pre_hook(self._before_optimizer)
        optimizer.register_step_post_hook(self._after_optimizer)
        # Until a measured step tells better: backward usually ends where forward began.
        self._time_synchronisation(next((p for p in self._parameters() if p.requires_grad), None))

    @property
    def is_complete(self) -> bool:
        """The optimizer has stepped on this plan, whatever the rest of the loop's body does."""
        return self.is_last and self._did_step

    @property
    def learning_rate(self) -> float:
        """What the user's schedule says for the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def regrouped(self) -> None:
        """Between two steps: there are other replicas now."""
        self.abandon()
        self.has_lost = False
        self._timed = None
        if self._timer is not None:
            self._timer.remove()
            self._timer = None
        self._time_synchronisation(next((p for p in self._parameters() if p.requires_grad), None))

    def check_model(self) -> None:
        """Before a turn of the loop: have DDP follow parameters that were frozen or unfrozen since."""
        self._model.reconnect(self._replicas)

    def begin_pass(self, plan: StepPlan, index: int) -> None:
        """The loader is about to hand out a micro-batch: pass `index` of the step."""
        self._show_no_more()
        self._restore_rates()
        size = self._replicas.size
        start, stop = plan.slice_of(self._replicas.rank, size, index)
        self._plan, self._index, self._size = plan, index, stop - start
        self._weight = size * self._size / plan.batch_size
        self.is_last = index == plan.passes - 1
        self._did_backward = self._did_step = False
        if index == 0:
            self._has_failed = False
            self.is_careful = size > 1 and not self._memory.is_proven(plan.per_gpu_batch_size)
        self._model.synchronise(self.is_last and not self.is_careful)
        self._model.is_in_pass, self._model.did_forward = True, False
        self._is_watched = plan.is_measured and self._meter is not None and size * plan.passes > 1
        if self._is_watched and self._meter is not None:
            if index == 0:
                self._meter.begin_step()
            self._meter.watch_pass()
        if self._scaler is not None:
            self._scaler.is_last_pass = self.is_last
            self._scaler.did_skip = False

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Gradients of a pass's mean loss."""
        if self._plan is None:
            raise LoopMisuse("job.backward was called outside the loop over the prepared loader", f"Write {LOOP}")
        if self._did_backward:
            raise LoopMisuse("job.backward was called twice for one batch", "Add the losses up and call it once")
        if self._replicas.size > 1 and not self._model.did_forward and not self._has_failed:
            raise LoopMisuse(
                "the loss of this batch was computed without calling the prepared model, so that DDP saw nothing of it",
                "Call model(…), not a method or a part of it: let forward do the work",
            )
        self._did_backward = True
        self._note_loss(loss)
        if not self._has_failed:
            self._reveal()
            failure = self._try_backward(loss if self._weight == 1.0 else loss * self._weight, kwargs)
            if failure is not None:
                self._fail(failure)
        self._stopwatch.end_backward()
        if self._is_watched and self._meter is not None:
            self._meter.end_pass(self._weight, self._replicas.size)
        if self.is_last:
            self._complete_gradients()
        elif not self._has_failed:
            self._hide()
        if not self.is_last or self._has_failed:
            self._show_zero()

    def _note_loss(self, loss: torch.Tensor) -> None:
        if not isinstance(loss, torch.Tensor):
            raise LoopMisuse(f"job.backward got a {type(loss).__name__}", "Give the loss itself, a tensor")
        if loss.numel() != 1:
            raise LoopMisuse(
                f"job.backward got a loss of shape {tuple(loss.shape)}", "Give the mean over the batch, one number"
            )
        plain = self._scaler.take_loss() if self._scaler is not None else None
        self.losses.append(((loss.detach() if plain is None else plain).reshape(()), self._size))

    def _try_backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> torch.OutOfMemoryError | None:
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError as error:
            # Without its traceback, which would keep the activations alive.
            return error.with_traceback(None)
        except RuntimeError as error:
            if not self._note_loss_of_peers(error):
                raise
        return None

    def _note_loss_of_peers(self, error: RuntimeError) -> bool:
        """Other replicas are out of reach: the body runs to its end, to no effect, and the step comes again."""
        if not self._is_loss(error):
            return False
        self.lose()
        return True

    def lose(self) -> None:
        """In the body of the loop: other replicas are out of reach. A step that the optimizer has taken counts."""
        self.has_lost = True
        if self.is_complete:
            return
        self._has_failed = True
        self._model.disconnect()
        self._clear_gradients()

    def end_pass(self) -> Outcome:
        """The body of the loop is over. Raises LoopMisuse if it left something out."""
        plan = self._plan
        assert plan is not None
        self._model.is_in_pass = False
        if not self._did_backward:
            raise LoopMisuse("the loop's body ended without job.backward(loss)", f"Write {LOOP}")
        if not self.is_last:
            return Outcome.ACCUMULATED
        self._plan = None
        if self._has_failed:
            del self.losses[-plan.passes :]  # they will come again
            return Outcome.RETRY
        self._skips = 0 if self._did_step else self._skips + 1
        if self._skips >= MOST_SKIPS:
            raise LoopMisuse(
                f"the gradients of {self._skips} steps in a row were not finite: the model has diverged",
                "Lower the learning rate, or go back to an earlier checkpoint",
            )
        if self._did_step:
            if plan.is_whole:  # a measured or last step may have run in smaller passes
                self._memory.succeeded(plan.per_gpu_batch_size)
            return Outcome.STEPPED
        if self._scaler is not None and self._scaler.did_skip:
            return Outcome.SKIPPED
        raise LoopMisuse(
            "the loop's body ended without a step of the prepared optimizer",
            "Call optimizer.step() once in every body, on the optimizer that job.prepare gave back: the job accumulates"
            " by itself. A GradScaler belongs into job.prepare, too",
        )

    def abandon(self) -> None:
        """The loop was left, maybe in the middle of a step: nothing of it remains."""
        if self._plan is not None and not self._did_step and (self._did_backward or self._index > 0):
            self._clear_gradients()  # the samples come again, and with them their gradients
        self._plan = None
        self._model.is_in_pass = False
        self._restore_rates()
        self._hidden = []
        self._kept = (-1, 0)
        self.difference = None
        self._model.synchronise(True)
        if self._meter is not None:
            self._meter.drop()

    # Gradients of several passes

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _hide(self) -> None:
        self._hidden = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _reveal(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _show_zero(self) -> None:
        self._shown = self._smallest
        if self._shown is not None:
            self._shown.grad = torch.zeros_like(self._shown)

    def _show_no_more(self) -> None:
        if self._shown is not None:
            self._shown.grad = None
            self._shown = None

    def _clear_gradients(self) -> None:
        self._hidden = []
        self._shown = None
        for parameter in self._parameters():
            parameter.grad = None

    def _complete_gradients(self) -> None:
        if self.is_careful and not self.has_lost:
            try:
                self._agree_and_average()
            except RuntimeError as error:
                if not self._note_loss_of_peers(error):
                    raise
        if self._has_failed:
            self._clear_gradients()
            if self._scaler is not None:
                self._scaler.is_last_pass = False  # it has no gradients to work on
            return
        plan, meter = self._plan, self._meter
        if meter is None or plan is None:
            return
        if self._is_watched:
            meter.end_step(self._gradient_scale())
            self._time_synchronisation(meter.last_parameter)
        elif self._replicas.size == 1 and not self._splits:
            self._difference(plan, meter)

    def _difference(self, plan: StepPlan, meter: NoiseMeter) -> None:
        """One replica that cannot split a batch compares the gradients of two neighbouring steps of equal size."""
        if plan.is_kept and plan.is_whole:
            meter.keep_gradient(self._gradient_scale())
            self._kept = plan.step, plan.batch_size
        elif plan.is_measured and plan.is_whole and self._kept == (plan.step - 1, plan.batch_size):
            self.difference = meter.difference(self._gradient_scale())

    def _gradient_scale(self) -> float:
        return float(self._scaler.inner.get_scale()) if self._scaler is not None else 1.0

    def _time_synchronisation(self, last: torch.Tensor | None) -> None:
        """What follows the gradient that comes last is synchronisation; a measured step says whose it is."""
        if self._replicas.size == 1 or last is None or last is self._timed:
            return
        if self._timer is not None:
            self._timer.remove()
        self._timed = last
        self._timer = last.register_hook(self._gradients_ready)  # type: ignore[no-untyped-call]

    def _gradients_ready(self, _: torch.Tensor) -> None:
        if self.is_last:
            self._stopwatch.gradients_ready()

    def _agree_and_average(self) -> None:
        """A size that was not proven yet ran without DDP: see whether it fitted everywhere, then average at once."""
        parameters = list(self._parameters())
        told = [float(self._has_failed), *(float(parameter.grad is not None) for parameter in parameters)]
        failed, *with_gradient = self._replicas.sum(torch.tensor(told, device=self._replicas.device)).tolist()
        self._has_failed = failed > 0
        if self._has_failed:
            return
        for parameter, count in zip(parameters, with_gradient, strict=True):
            # Used by another replica's samples and not by this one's.
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._replicas.mean_gradients([parameter.grad for parameter in parameters if parameter.grad is not None])

    # Out of memory

    def _forward_failed(self, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._plan is None:
            raise error
        self._fail(error)
        return stand_in(self._model.module, args, kwargs)

    def _fail(self, error: BaseException) -> None:
        assert self._plan is not None
        if self._replicas.size > 1 and not self.is_careful:
            error.add_note(
                "This pass had fitted before, and other replicas wait for it: start again from the checkpoint"
                f" with Job(max_per_gpu_batch_size={max(1, self._plan.per_gpu_batch_size // 2)})."
            )
            raise error
        if self._has_failed:
            return  # a later pass of the same step
        self._has_failed = True
        self._clear_gradients()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # The optimizer

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        plan = self._plan
        if plan is None:
            return
        if any(callable(arg) for arg in (*args[1:], *kwargs.values())):
            raise LoopMisuse(
                "optimizer.step was given a closure", "Compute the loss in the loop: closures cannot adapt"
            )
        if self._scaler is None and not self._has_stepped and is_in_scaler_step():
            raise LoopMisuse(
                "the loop uses a GradScaler that job.prepare was not given", "Hand it over with the model and the rest"
            )
        if not self._has_stepped and not self._has_schedule and is_scheduled(optimizer):
            raise LoopMisuse(
                "the optimizer has a learning-rate schedule that job.prepare was not given",
                "Make it before job.prepare and hand it over: its steps are counted in progress",
            )
        self._has_stepped = True
        if not self.is_last or self._has_failed:
            self._show_no_more()
            return
        if not self._did_backward:
            raise LoopMisuse(
                "the optimizer steps on gradients that job.backward has not seen",
                "Write job.backward(loss) instead of loss.backward()",
            )
        factors = self._course.factors(plan)
        if any(factor != 1.0 for factor in factors):
            groups = optimizer.param_groups
            self._rates = [group["lr"] for group in groups]
            for group, factor in zip(groups, factors, strict=True):
                group["lr"] = group["lr"] * factor

    def _restore_rates(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._restore_rates()
        if self._plan is None or not self.is_last or self._has_failed or self._did_step:
            return
        # A fused optimizer is called for gradients that are not finite, too, and leaves the step out by itself.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item() > 0:
            return
        self._did_step = True
        self._course.stepped(self._plan)
        if self._scaler is not None:
            self._scaler.did_skip = False
