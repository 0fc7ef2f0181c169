"""What a job learns of itself while it trains, and what it makes of it: progress, noise, batch size, learning rate.

Once a beat the replicas exchange one small vector (`beat`). What it brings is taken in by all of them at the same
step, with the same numbers, so that their progress, learning rates and batch sizes are equal without further talk.
The first replica alone has a tuner, and puts its decisions into the next vector.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import torch

from pollux.agent.batching import BatchConfig, fitted_to, narrowed
from pollux.agent.beat import Beat, pack, unpack
from pollux.agent.dealing import Dealer, StepPlan
from pollux.agent.guard import ConvergenceGuard, Verdict
from pollux.agent.interval import Interval
from pollux.agent.memory import MemoryBound
from pollux.agent.noise_meter import NoiseMeter, difference_sample, sample
from pollux.agent.options import Options
from pollux.agent.replicas import Pending, Replicas
from pollux.agent.rules import Scaling, ScalingRule, checked_factors
from pollux.agent.stepping import Stepper
from pollux.agent.stopwatch import Stopwatch
from pollux.agent.tuner import Measured, Tuned, Tuner
from pollux.core import BatchLimits, GradientStats, Profile, Progress
from pollux.goodput import gain
from pollux.goodput.noise import NoiseAverage

BEAT_S = 0.5
"""Wanted time between beats: how long a signal, a decision or a due checkpoint may wait."""

MOST_STEPS_A_BEAT = 16
"""The guard wants to see the loss a few dozen times before training has doubled, also of a job with quick steps."""

ENOUGH_SAMPLES = 8.0
"""Effective samples of the noise before the batch size follows it."""

KEPT_SAMPLES = 64.0
"""Samples that the noise is averaged over at least, however rarely steps are measured."""

LEAST_EVERY = 16
"""Steps from one measured step to the next at least: where time is spent waiting, its cost looks smaller than it is."""

EARLY_EVERY, EARLY_SAMPLES = 8, 32.0
"""Until so many effective samples are there, measure this often whatever it costs: a few steps, once in a job."""


@dataclass(frozen=True, slots=True)
class Flight:
    """What was known when a vector was sent, and is needed when it is read."""

    pending: Pending
    progress: float
    scale: float
    rate: float
    """The user's learning rate."""
    measured: tuple[int, float, int, bool] | None
    """(gradients, M/M0, steps since the last, whether differenced) of the measured step in it."""


class Heard(enum.Flag):
    """What a beat asks of the job."""

    NOTHING = 0
    BEAT = enum.auto()
    """A beat was read, whatever else it says."""
    SAVE = enum.auto()
    STOP = enum.auto()
    LEAVE = enum.auto()


class Adapter:
    """One job's knowledge and decisions; equal on all replicas but for what only the first one does."""

    def __init__(
        self,
        options: Options,
        replicas: Replicas,
        dealer: Dealer,
        memory: MemoryBound,
        stopwatch: Stopwatch,
        *,
        meter: NoiseMeter | None,
        param_groups: Sized,
        rule: ScalingRule,
        iterations_per_epoch: float,
        make_tuner: Callable[[], Tuner],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._replicas = replicas
        self._dealer = dealer
        self._memory = memory
        self._stopwatch = stopwatch
        self._meter = meter
        self._param_groups = param_groups
        self._rule = rule
        self._iterations_per_epoch = iterations_per_epoch
        self._make_tuner = make_tuner
        self.tuner: Tuner | None = None
        """Of the first replica."""
        self._clock = clock
        self.progress = 0.0
        """Iterations of M0 that all steps so far were worth."""
        self.realloc_delay_s: float | None = None
        """For how long training stood still when replicas last came or went as planned."""
        self.total_progress: float | None = None
        """What the loop at hand will have reached at its end."""
        # No floor under the variance: the published one would distort the noise of models with tiny gradients.
        self.noise = NoiseAverage(window=options.noise_window, min_samples=KEPT_SAMPLES, var_floor=0.0)
        self._trusted = self.noise
        """What decisions go by: the noise rather under- than over-estimated."""
        self.guard = ConvergenceGuard() if options.guard else None
        self.loss: float | None = None
        self.tuned: Tuned | None = None
        """The newest answer of the tuner (first replica only)."""
        self.wants_save = self.wants_stop = self.wants_leave = False
        """Told to all replicas by the next beat."""
        self.save_is_due: Callable[[], bool] = lambda: False
        self.on_behind: Callable[[], None] = lambda: None
        """Called on all replicas where one of them is too far behind the pace of an emulated job."""
        self.on_batch: Callable[[BatchConfig, BatchConfig, str, Tuned | None], None] = lambda *_: None
        self.on_verdict: Callable[[Verdict], None] = lambda _: None
        self.on_tuned: Callable[[Tuned], None] = lambda _: None
        self._interval = Interval(budget=options.noise_budget, smallest=LEAST_EVERY, start=LEAST_EVERY)
        self._beat_every = 1
        self._steps_since_beat = 0
        self._last_measured_step = -1
        self._measured_in_vain = 0
        self._was_preconditioned = False
        self._flight: Flight | None = None
        self._factors: tuple[Any, tuple[float, ...]] = (None, ())
        self._next_tuning_s = clock() + options.report_every_s
        self._last_step_s: float | None = None
        dealer.measuring.every = self._wanted_interval() if meter is not None else 0

    @property
    def limits(self) -> BatchLimits:
        return self._memory.limits

    @property
    def initial_batch_size(self) -> int:
        return self.limits.initial_batch_size

    @property
    def is_behind(self) -> bool:
        """Whether this replica cannot keep the pace of an emulated job."""
        return False

    # Who decides, and for how many

    def assign_role(self) -> None:
        """The first replica has a tuner."""
        if self._replicas.is_main and self.tuner is None:
            self.tuner = self._make_tuner()
        elif not self._replicas.is_main:
            self.close()

    def close(self) -> None:
        if self.tuner is not None:
            self.tuner.close()
            self.tuner = None

    def drop(self) -> None:
        """What is under way will not arrive."""
        self._flight = None

    def regrouped(self) -> None:
        """There are other replicas now, and all begin anew to count the steps of a beat."""
        self._factors = None, ()
        self._steps_since_beat = 0
        self._last_step_s = None
        self._dealer.num_replicas = self._replicas.size
        self._memory.regrouped()
        self._next_tuning_s = self._clock()  # the best batch size is another one
        size = self._replicas.size
        self.apply(self._dealer.config, "1 replica" if size == 1 else f"{size} replicas", None)

    # Every step

    def factors(self, plan: StepPlan) -> tuple[float, ...]:
        """What the learning rate of each parameter group is multiplied by in this step."""
        return self.factors_of(plan.batch_size)

    def factors_of(self, batch_size: int) -> tuple[float, ...]:
        """The same for a step of so many samples."""
        scale, num_groups = max(batch_size / self.initial_batch_size, 1.0), len(self._param_groups)
        if scale == 1.0:
            return (1.0,) * num_groups
        # Between two beats only progress moves, and by little.
        known = (scale, num_groups, self._flight)
        if self._factors[0] != known:
            scaling = Scaling(
                scale=scale,
                noise=self._trusted,
                num_groups=num_groups,
                progress=self.progress,
                iterations_per_epoch=self._iterations_per_epoch,
                initial_batch_size=self.initial_batch_size,
            )
            self._factors = known, checked_factors(self._rule, scaling)
        return self._factors[1]

    def worth(self, batch_size: int) -> float:
        """How many iterations of M0 a step of that size is worth. Before any noise was measured: one."""
        scale = batch_size / self.initial_batch_size
        if scale <= 1.0 or not self._trusted.weight:
            return 1.0
        sqr, var = self._trusted.stats()
        return float(gain(sqr, var, scale)) if sqr + var > 0.0 else 1.0

    def stepped(self, plan: StepPlan) -> None:
        """The optimizer has stepped: schedules that are asked next see its progress."""
        self.progress += self.worth(plan.batch_size)

    def after_step(self, plan: StepPlan, stepper: Stepper) -> Heard:
        """A step is over and committed; says what the job must do before the next."""
        self._steps_since_beat += 1
        self._time_step(plan)
        is_urgent = self._replicas.size == 1 and (self.wants_leave or self.wants_stop)
        if not plan.is_measured and self._steps_since_beat < self._beat_every and not is_urgent:
            return Heard.NOTHING
        return self._beat(plan, stepper)

    def _time_step(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        is_measuring = plan.is_measured or (plan.is_kept and not self._dealer.measuring.splits)
        if self._last_step_s is not None and (plan.is_whole or is_measuring):
            key = (plan.batch_size, plan.per_gpu_batch_size)
            self._interval.observe(now - self._last_step_s, is_measuring, key)
        self._last_step_s = now

    def interrupted(self) -> None:
        """The loop was left: the time until the next step says nothing."""
        self._last_step_s = None

    def shrink(self, plan: StepPlan) -> BatchConfig:
        """A pass of this step did not fit: have it dealt again in smaller ones. Gives the configuration before."""
        before = self._dealer.config
        limits = self._memory.failed(plan.per_gpu_batch_size)
        self._dealer.config = fitted_to(before, limits, self._replicas.size)
        return before

    # Beats

    def _beat(self, plan: StepPlan, stepper: Stepper) -> Heard:
        heard = self._read()
        self._send(plan, stepper, is_saving=Heard.SAVE in heard)
        if self._replicas.size == 1 and (self.wants_leave or self.wants_stop):
            heard |= self._read()  # nobody to wait for
        return heard

    def settle(self) -> Heard:
        """Take in what is still under way; a collective call."""
        return self._read()

    def _send(self, plan: StepPlan, stepper: Stepper, is_saving: bool) -> None:
        measured, norms = self._norms(plan, stepper)
        losses, stepper.losses = stepper.losses, []
        samples = sum(size for _, size in losses)
        device = self._replicas.device
        if losses:
            values = torch.stack([loss.to(torch.float64) for loss, _ in losses])
            sizes = torch.tensor([size for _, size in losses], dtype=torch.float64, device=values.device)
            loss_sum = (values @ sizes).reshape(1).to(device)
        else:
            loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
        asked = {"stop": self.wants_stop, "leave": self.wants_leave, "behind": self.is_behind}
        beat = Beat(float(samples), **{name: float(is_so) for name, is_so in asked.items()})
        if self._replicas.is_main:
            beat = self._decisions(beat, is_saving)
        vector = pack(beat, torch.cat([loss_sum, *norms]))
        scale = plan.batch_size / self.initial_batch_size
        self._flight = Flight(self._replicas.sum_async(vector), self.progress, scale, stepper.learning_rate, measured)
        self._steps_since_beat = 0

    def _norms(
        self, plan: StepPlan, stepper: Stepper
    ) -> tuple[tuple[int, float, int, bool] | None, list[torch.Tensor]]:
        meter = self._meter
        if meter is None or not plan.is_measured:
            return None, []
        if meter.is_preconditioned != self._was_preconditioned:
            # Statistics under two preconditioners do not mix.
            self._was_preconditioned = meter.is_preconditioned
            self.noise = self.noise.restarted()
        scale = plan.batch_size / self.initial_batch_size
        steps = plan.step - self._last_measured_step
        count = self._replicas.size * plan.passes
        if stepper.difference is not None:
            parts, stepper.difference = list(stepper.difference), None
            self._last_measured_step = plan.step
            self._measured_in_vain = 0
            return (2, scale, steps, True), parts
        if count < 2:
            # By another number each time: one and the same might go round with the passes.
            self._measured_in_vain += 1
            self._dealer.measuring.shift += self._measured_in_vain
            return None, []
        self._last_measured_step = plan.step
        local, total = meter.local(), meter.total()
        if not self._replicas.is_main:
            # Gradients are equal on all replicas up to the last bit or so; one replica's word makes them equal.
            total = torch.zeros_like(total)
        return (count, scale, steps, False), [local, total]

    def _decisions(self, beat: Beat, is_saving: bool) -> Beat:
        """What the first replica decides for all. The checkpoint that is due is not due again while it is made."""
        tuned = self.tuner.take() if self.tuner is not None else None
        config = None
        if tuned is not None:
            self.tuned = tuned
            config = tuned.config
            self.on_tuned(tuned)
        now = self._clock()
        if self.tuner is not None and now >= self._next_tuning_s:
            self._next_tuning_s = now + self._options.report_every_s
            self.tuner.submit(self.measured())
        save, self.wants_save = self.wants_save or (self.save_is_due() and not is_saving), False
        return dataclasses.replace(
            beat,
            save=float(save),
            batch_size=float(config.batch_size) if config else 0.0,
            per_gpu_batch_size=float(config.per_gpu_batch_size) if config else 0.0,
            passes=float(config.passes) if config else 0.0,
            measure_every=float(self._wanted_interval()),
            beat_every=float(self._wanted_beat()),
        )

    def _wanted_interval(self) -> int:
        every = self._interval.every
        return every if self.noise.effective_samples >= EARLY_SAMPLES else min(every, EARLY_EVERY)

    def _wanted_beat(self) -> int:
        step_s = self._stopwatch.typical_step_s(self._dealer.config.passes)
        if not step_s:
            return self._beat_every
        return max(1, min(MOST_STEPS_A_BEAT, round(BEAT_S / step_s)))

    def _read(self) -> Heard:
        flight, self._flight = self._flight, None
        if flight is None:
            return Heard.NOTHING
        beat, values = unpack(flight.pending.wait())
        if beat.behind:
            self.on_behind()
        if beat.samples:
            self.loss = values[0] / beat.samples
        self._take_noise(flight, values[1:])
        if self._meter is not None and beat.measure_every:
            self._dealer.measuring.every = int(beat.measure_every)
        if beat.beat_every:
            self._beat_every = int(beat.beat_every)
        if beat.config is not None:
            self.apply(beat.config, "higher goodput", self.tuned)
        self._ask_guard(flight, beat.samples)
        asked = ((Heard.SAVE, beat.save), (Heard.STOP, beat.stop), (Heard.LEAVE, beat.leave))
        return Heard.BEAT | Heard(sum(flag.value for flag, count in asked if count > 0))

    def _take_noise(self, flight: Flight, norms: list[float]) -> None:
        if flight.measured is None:
            return
        count, scale, steps, is_differenced = flight.measured
        groups = len(norms) // (3 if is_differenced else 2)
        parts = [norms[start : start + groups] for start in range(0, len(norms), groups)]
        taken = (
            difference_sample(parts[0], parts[1], parts[2], scale)
            if is_differenced
            else sample(parts[0], parts[1], count, scale)
        )
        if self.noise.weight and taken.is_usable and len(taken.sqr) != len(self.noise.sqr):
            self.noise = self.noise.restarted()  # the script added a parameter group
        self.noise = self.noise.update(taken, steps=max(1, steps))
        self._trusted = self.noise.cautious()

    def _ask_guard(self, flight: Flight, samples: float) -> None:
        if self.guard is None or self.loss is None or not samples:
            return
        verdict = self.guard.observe(flight.progress, self.loss, samples, max(flight.scale, 1.0), flight.rate)
        if verdict is None:
            return
        self.on_verdict(verdict)
        self.apply(self._dealer.config, verdict.message, None)

    # The batch size

    def apply(self, config: BatchConfig, reason: str, tuned: Tuned | None) -> None:
        """Deal steps of that configuration from now on, as far as memory and the guard let it."""
        allowed = fitted_to(config, narrowed(self.limits, max_batch_size=self._largest()), self._replicas.size)
        before = self._dealer.config
        if allowed != before:
            self._dealer.config = allowed
            self.on_batch(before, allowed, reason, tuned)

    def _largest(self) -> int:
        """Largest batch size that the guard has no objection to; what it could not judge does not grow."""
        if self.guard is None:
            return self.limits.max_batch_size
        scale = self.guard.largest_scale
        if not self.guard.is_ready:
            scale = min(scale, max(1.0, self._dealer.config.batch_size / self.initial_batch_size))
        return int(min(scale * self.initial_batch_size, self.limits.max_batch_size))

    def gradient(self) -> GradientStats | None:
        """What is known of the gradient; None until it is worth something."""
        if self._trusted.effective_samples < ENOUGH_SAMPLES:
            return None
        sqr, var = self._trusted.stats()
        return GradientStats(sqr, var) if sqr + var > 0.0 else None

    @property
    def noise_scale(self) -> float | None:
        """φ in samples; None before it was measured, inf where noise hides the gradient."""
        return self.noise.noise_scale(self.initial_batch_size) if self.noise.weight else None

    @property
    def told_loss(self) -> float | None:
        """The training loss that is reported."""
        return self.loss

    def profile(self) -> Profile:
        return self._stopwatch.profile()

    def measured(self) -> Measured:
        """All that the tuner goes by."""
        return Measured(
            profile=self._stopwatch.profile(),
            gradient=self.gradient(),
            config=self._dealer.config,
            shape=self._replicas.shape,
            gpu_type=self._stopwatch.gpu_type,
            limits=self.limits,
            progress=Progress(self.progress, self.total_progress),
            proven_per_gpu_batch_size=self._memory.proven,
            largest_batch_size=self._largest(),
            realloc_delay_s=self.realloc_delay_s,
        )

    # Checkpoints

    def state(self) -> dict[str, Any]:
        config = self._dealer.config
        return {
            "progress": self.progress,
            "noise": dataclasses.asdict(self.noise),
            "was_preconditioned": self._was_preconditioned,
            "last_measured_step": self._last_measured_step,
            "config": dataclasses.asdict(config),
            "max_per_gpu_batch_size": self.limits.max_per_gpu_batch_size,
            "proven_per_gpu_batch_size": self._memory.proven,
            "guard": self.guard.state() if self.guard is not None else None,
            "profile": self._stopwatch.state(),
            "measure_every": self._dealer.measuring.every,
            "measure_shift": self._dealer.measuring.shift,
            "measured_in_vain": self._measured_in_vain,
            "beat_every": self._beat_every,
            "realloc_delay_s": self.realloc_delay_s,
        }

    def load(self, state: dict[str, Any], *, keeps_given_config: bool) -> None:
        """Go on from `state`, also on another number of replicas.

        `keeps_given_config`: a job that does not adapt keeps the batch size that it is given now.
        """
        self.progress = state["progress"]
        self.noise = NoiseAverage(**state["noise"])
        self._trusted = self.noise.cautious()
        self._was_preconditioned = state["was_preconditioned"]
        self._last_measured_step = state["last_measured_step"]
        self._memory.resume(state["max_per_gpu_batch_size"], state["proven_per_gpu_batch_size"])
        if self.guard is not None and state["guard"] is not None:
            self.guard.load(state["guard"])
        self._stopwatch.load(state["profile"])
        is_given = keeps_given_config and not self._options.adapt
        config = self._dealer.config if is_given else BatchConfig(**state["config"])
        self._dealer.config = fitted_to(config, self.limits, self._replicas.size)
        if self._meter is not None and state["measure_every"]:
            self._dealer.measuring.every = state["measure_every"]
            self._dealer.measuring.shift = state.get("measure_shift", 0)
            self._measured_in_vain = state.get("measured_in_vain", 0)
        self._beat_every = state.get("beat_every", 1)
        self.realloc_delay_s = state.get("realloc_delay_s")
