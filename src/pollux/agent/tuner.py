"""Which batch size a job should train with: fit its throughput, then take the (m, s) of highest goodput.

`tune` is pure; `Tuner` runs it in a thread of its own, since a fit takes 1 to 18 ms and a step of training must not
wait for it. A job that was told what others of its kind have measured goes by that, corrected by its own measurements;
what it reports is its own fit alone. The simulated twin is `simulator/agent.py`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from pollux.agent.batching import BatchConfig, fitted_to, initial_config, narrowed
from pollux.agent.experience import Experience
from pollux.core import BatchLimits, FrozenMap, GradientStats, JobModel, Profile, Progress, Shape, checks
from pollux.errors import InvalidInput, InvalidModel, InvalidProfile, InvalidSpec
from pollux.goodput import (
    DEFAULT_FIT,
    NOTHING_FITS,
    PAPER,
    UNKNOWN_GRADIENT,
    Fit,
    FitOptions,
    GoodputModel,
    Observations,
    ThroughputModel,
    fit,
    iteration_time,
)
from pollux.goodput.compiled import interpreted
from pollux.goodput.pooled import Corrected, of_job

log = logging.getLogger(__name__)

Fits: TypeAlias = FrozenMap[str, Fit]
NO_FITS: Fits = FrozenMap()

PATIENCE_S = 10.0
"""How long `close` waits for a fit that is under way; none takes a hundredth of it."""


@dataclass(frozen=True, slots=True)
class TunerOptions:
    """How a job is tuned."""

    adapt: bool = True
    """False: the batch size is the user's; the job is still fitted, for the scheduler to know it."""
    hysteresis: float = 1.05
    """A batch size is left only for one whose goodput is predicted to be so many times better (the artifact's)."""
    growth: float = 2.0
    """A pass may be so many times larger than the largest that has worked: memory is not known before it was tried."""
    throughput_model: ThroughputModel = PAPER
    fit: FitOptions = DEFAULT_FIT

    def __post_init__(self) -> None:
        checks.flag(InvalidSpec, "adapt", self.adapt)
        checks.finite(InvalidSpec, "hysteresis", self.hysteresis, 1)
        checks.finite(InvalidSpec, "growth", self.growth, 1)


DEFAULT_TUNER = TunerOptions()


@dataclass(frozen=True, slots=True)
class Measured:
    """All that a decision rests on."""

    profile: Profile
    gradient: GradientStats | None
    """None: no noise was measured yet."""
    config: BatchConfig
    """What the job trains with now."""
    shape: Shape
    gpu_type: str
    limits: BatchLimits
    progress: Progress
    proven_per_gpu_batch_size: int
    """The largest that has worked; 0 if none has been tried for long enough."""
    largest_batch_size: int
    """What the convergence guard allows now."""
    realloc_delay_s: float | None = None
    """For how long training stood still when replicas last came or went as planned."""

    def allowed(self, growth: float) -> BatchLimits:
        """The limits less what the guard forbids and what memory may not hold; what runs now counts as fitting."""
        limits, running = self.limits, self.config.per_gpu_batch_size
        fitting = int(growth * self.proven_per_gpu_batch_size)
        if running <= limits.max_per_gpu_batch_size:
            fitting = max(fitting, running)
        return narrowed(
            limits,
            # Even M0 may need more on many replicas; that is no growth that the guard could object to.
            max_batch_size=max(self.largest_batch_size, limits.min_per_gpu_batch_size * self.shape.num_gpus),
            max_per_gpu_batch_size=fitting or None,
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """A decision, why, and what is predicted of the configuration that the job has from now on."""

    config: BatchConfig | None
    """None: stay."""
    model: JobModel
    """To be reported; its limits are those that the guard allows."""
    reason: str
    throughput: float | None = None
    """Examples per second; None if nothing could be fitted."""
    efficiency: float | None = None
    """Progress per example beside that of M0; None before any noise was measured."""
    goodput: float | None = None
    """Useful examples per second."""
    fits: Fits = NO_FITS
    """By GPU type: where the next fit starts."""
    problem: str = ""
    """What kept the job from being fitted or tuned, if anything."""


def tune(
    measured: Measured,
    warm: Mapping[str, Fit] = NO_FITS,
    options: TunerOptions = DEFAULT_TUNER,
    told: Corrected | None = None,
) -> Tuned:
    """Fit the job again and choose its batch size. `told`: what is known of its kind on the GPUs at hand.

    The choice keeps M0 ≤ M ≤ M_max and the per-GPU bounds, what the guard allows, and a per-GPU batch size of at most
    `growth` times the largest proven one. The job stays as it is unless the prediction is `hysteresis` times better,
    or what runs now is outside those bounds. Before any noise was measured it does not grow. What cannot be fitted is
    no error: the job stays, and `problem` says why.
    """
    fits, problem = _refitted(measured, warm, options)
    decision = _Decision(None, "the batch size is fixed")
    outlook = None
    try:
        outlook = _Outlook.of(measured, fits, options, told)
        if options.adapt:
            decision = _decide(measured, outlook, options)
    except InvalidInput as error:
        problem = problem or str(error)
        decision = _stay_inside(measured, options, "the model cannot be used") if options.adapt else decision
    kept = decision.config or measured.config
    return Tuned(
        config=decision.config,
        model=JobModel(
            limits=narrowed(measured.limits, max_batch_size=measured.largest_batch_size),
            gradient=measured.gradient,
            throughput=FrozenMap({gpu_type: fitted.summary() for gpu_type, fitted in fits.items()}),
            progress=measured.progress,
            realloc_delay_s=measured.realloc_delay_s,
        ),
        reason=decision.reason,
        throughput=outlook.throughput(kept) if outlook else None,
        efficiency=outlook.efficiency(kept) if outlook and measured.gradient else None,
        goodput=outlook.goodput(kept) if outlook and measured.gradient else None,
        fits=fits,
        problem=problem,
    )


class _Decision(NamedTuple):
    config: BatchConfig | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What is predicted for the GPUs at hand; batches that do not divide evenly are as slow as the larger parts."""

    measured: Measured
    job: GoodputModel

    @classmethod
    def of(cls, measured: Measured, fits: Fits, options: TunerOptions, told: Corrected | None) -> _Outlook | None:
        """By its kind, unless it is not like the others; else by its own fit. None if this GPU type has none yet."""
        model: ThroughputModel | None = None
        theta: tuple[float, ...] = (1.0,)
        if told is not None and options.throughput_model is PAPER:
            model = of_job(told, measured.profile.of_type(measured.gpu_type))
        if model is None:
            fitted = fits.get(measured.gpu_type)
            if fitted is None:
                return None
            model, theta = fitted.model, fitted.theta
        gradient = measured.gradient or UNKNOWN_GRADIENT
        return cls(measured, GoodputModel(model, theta, gradient, measured.allowed(options.growth)))

    def throughput(self, config: BatchConfig) -> float:
        model, shape = self.job.model, self.measured.shape
        level = model.level(shape.num_nodes, shape.num_racks)
        m, s = config.per_gpu_batch_size, config.accumulation_steps
        return config.batch_size / float(iteration_time(model, self.job.theta, shape.num_gpus, level, m, s))

    def efficiency(self, config: BatchConfig) -> float:
        return float(self.job.efficiency(config.batch_size))

    def goodput(self, config: BatchConfig) -> float:
        return self.throughput(config) * self.efficiency(config)

    def best(self) -> BatchConfig:
        """The configuration of highest goodput, with the fewest passes for its batch size; M0 itself if none beats it.

        M0 need not be a multiple of the number of replicas, which all that `goodput.best` tries are.
        """
        limits, num_gpus = self.job.limits, self.measured.shape.num_gpus
        initial = initial_config(limits, num_gpus)
        found = self.job.best(self.measured.shape)
        if found == NOTHING_FITS:
            return initial
        size, passes = found.batch_size(num_gpus), found.accumulation_steps + 1
        config = fitted_to(BatchConfig(size, found.per_gpu_batch_size, passes), limits, num_gpus)
        return max(initial, config, key=self.goodput)


def _refitted(measured: Measured, warm: Mapping[str, Fit], options: TunerOptions) -> tuple[Fits, str]:
    """Fits by GPU type, and what went wrong. A type that the job does not run on tells nothing new."""
    fits, problem = dict(warm), ""
    for gpu_type, observations in measured.profile.observations.items():
        earlier = fits.get(gpu_type)
        if earlier is not None and gpu_type != measured.gpu_type:
            continue
        try:
            seen = Observations.of(observations)
            fits[gpu_type] = fit(seen, options.throughput_model, earlier, options.fit)
        except (InvalidProfile, InvalidModel) as error:
            problem = f"{gpu_type}: {error}"
    return FrozenMap(fits), problem


def _decide(measured: Measured, outlook: _Outlook | None, options: TunerOptions) -> _Decision:
    if outlook is None:
        return _stay_inside(measured, options, "no throughput was fitted yet")
    if measured.gradient is None:
        return _stay_inside(measured, options, "no gradient noise was measured yet")
    now, found = measured.config, outlook.best()
    if not now.is_within(outlook.job.limits, measured.shape.num_gpus):
        return _Decision(found, f"{_described(now)} is no longer allowed; {_described(found)} is best")
    better = outlook.goodput(found) / outlook.goodput(now)
    if better > options.hysteresis:
        return _Decision(found, f"{_described(found)} promises {better:.3g} times the goodput of {_described(now)}")
    return _Decision(None, f"nothing promises {options.hysteresis:g} times the goodput of {_described(now)}")


def _stay_inside(measured: Measured, options: TunerOptions, reason: str) -> _Decision:
    """Stay, but for what the bounds demand."""
    allowed, num_gpus, now = measured.allowed(options.growth), measured.shape.num_gpus, measured.config
    if now.is_within(allowed, num_gpus):
        return _Decision(None, reason)
    try:
        moved = fitted_to(now, allowed, num_gpus)
    except InvalidSpec as error:
        return _Decision(None, str(error))
    return _Decision(moved, f"{_described(now)} is no longer allowed, and {reason}")


def _described(config: BatchConfig) -> str:
    return f"batch size {config.batch_size} ({config.passes} × {config.per_gpu_batch_size} a GPU)"


class Tuner:
    """`tune` in one daemon thread; on rank 0 only, used by the training thread. No call waits for a fit but `close`.

    A failure in the thread is logged, once for each kind, and costs that one answer. `on_tuned` is called in the
    thread.
    """

    def __init__(
        self,
        options: TunerOptions = DEFAULT_TUNER,
        on_tuned: Callable[[Tuned], None] | None = None,
        work: Callable[[Measured, Mapping[str, Fit], TunerOptions, Corrected | None], Tuned] = tune,
        experience: Experience | None = None,
    ) -> None:
        self._options = options
        self._experience = experience or Experience(None)
        self._on_tuned = on_tuned
        self._work = work
        self._fits: Fits = NO_FITS
        self._inbox: queue.SimpleQueue[Measured | None] = queue.SimpleQueue()
        self._answers: deque[Tuned] = deque(maxlen=1)
        self._is_busy = False
        """Set by `submit`, cleared by the thread: at most one piece of work is under way."""
        self._is_closed = False
        self._failures: set[type[Exception]] = set()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="pollux-tuner", daemon=True)
        self._thread.start()

    def submit(self, measured: Measured) -> bool:
        """Have it worked on; False if the one before still is, or after `close`: then it is dropped."""
        if self._is_busy or self._is_closed:
            return False
        self._is_busy = True
        self._inbox.put(measured)
        return True

    def take(self) -> Tuned | None:
        """The newest answer, once."""
        try:
            return self._answers.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """End the thread, after the work under way. Calling it again does nothing."""
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        # For one fit in half a minute, loading numba into the training process would cost more than it saves.
        with interpreted():
            while (measured := self._inbox.get()) is not None:
                try:
                    self._answer(measured)
                except Exception as error:  # whatever it is, training goes on without the answer
                    self._fits = NO_FITS  # they may have been the cause, or what others have measured
                    self._experience.forget()
                    if type(error) not in self._failures:
                        self._failures.add(type(error))
                        log.exception("The batch size was not tuned. Failures of this kind are not logged again")
                finally:
                    self._is_busy = False

    def _answer(self, measured: Measured) -> None:
        told = self._experience.on(measured.gpu_type)
        tuned = self._work(measured, self._fits, self._options, told)
        self._fits = tuned.fits
        if tuned.problem and tuned.problem != self._problem:
            log.info("The job could not be fitted as it should: %s", tuned.problem)
        self._problem = tuned.problem
        self._answers.append(tuned)
        if self._on_tuned is not None:
            self._on_tuned(tuned)
