"""What a prepared job consists of, and how it is put together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.agent.adapting import Adapter
from pollux.agent.batching import BatchConfig, fitted_to, initial_config
from pollux.agent.dealing import Dealer
from pollux.agent.emulation import EmulatedAdapter, Emulation
from pollux.agent.environment import Environment
from pollux.agent.experience import Experience
from pollux.agent.fingerprint import fingerprint, main_script
from pollux.agent.loader import ENDLESS, TrainingLoader, source_of
from pollux.agent.looping import TrainingLoop
from pollux.agent.membership import Membership
from pollux.agent.memory import MemoryBound
from pollux.agent.model import ReplicatedModel, batch_dependent_layers
from pollux.agent.noise_meter import NoiseMeter
from pollux.agent.options import Options
from pollux.agent.preconditioners import kind
from pollux.agent.preparing import Prepared
from pollux.agent.replicas import Replicas
from pollux.agent.rules import default_rule, rule_named
from pollux.agent.saving import Saver
from pollux.agent.scaler import StepScaler
from pollux.agent.schedule import ProgressSchedule, Turn
from pollux.agent.stepping import Stepper
from pollux.agent.stopwatch import CudaClock, HostClock, Stopwatch
from pollux.agent.telling import Teller
from pollux.agent.tuner import Tuner, TunerOptions
from pollux.core import BatchLimits


@dataclass(frozen=True, slots=True)
class Parts:
    """What a prepared job consists of."""

    given: Prepared
    replicas: Replicas
    model: ReplicatedModel
    loader: TrainingLoader
    schedule: ProgressSchedule | None
    scaler: StepScaler | None
    dealer: Dealer
    adapter: Adapter
    stepper: Stepper
    loop: TrainingLoop
    saver: Saver
    teller: Teller
    iterations: int | None
    """Of M0 in one pass; None if its length is unknown."""
    emulation: Emulation | None

    @classmethod
    def of(cls, given: Prepared, options: Options, environment: Environment, membership: Membership) -> Parts:
        """Put together for the user's objects."""
        emulation = Emulation.of(options, environment)
        options = (emulation.told(options) if emulation is not None else options).told(environment.batch)
        replicas = membership.replicas
        model = ReplicatedModel(given.model, options.ddp)
        source = source_of(given.loader, options, replicas)
        assert given.loader.batch_size is not None
        limits = options.limits(given.loader.batch_size, source.pass_length, environment.batch)
        initial_batch_size = limits.initial_batch_size
        dealer = Dealer(
            source.pass_length if source.is_bounded and source.pass_length else ENDLESS,
            _first_config(limits, replicas.size, environment.batch.batch_size),
            replicas.size,
        )
        depends = options.batch_dependent
        dealer.measuring.splits = not (bool(batch_dependent_layers(given.model)) if depends is None else depends)
        dealer.least = 1 if dealer.measuring.splits else 2
        memory = MemoryBound(limits)
        if emulation is not None:
            stopwatch: Stopwatch = emulation.stopwatch
        else:
            clock = CudaClock() if replicas.device.type == "cuda" else HostClock()
            stopwatch = Stopwatch(environment.gpu_type or replicas.gpu_type, clock)
        meter = NoiseMeter(given.optimizer, preconditioner=options.preconditioner) if options.measure_noise else None
        iterations = math.ceil(source.pass_length / initial_batch_size) if source.pass_length else None
        rule = default_rule(kind(given.optimizer)) if options.rule == "auto" else rule_named(options.rule)
        tuning = TunerOptions(adapt=options.adapt, hysteresis=options.hysteresis)
        make_adapter = Adapter if emulation is None else functools.partial(EmulatedAdapter, emulation)
        adapter = make_adapter(
            options,
            replicas,
            dealer,
            memory,
            stopwatch,
            meter=meter,
            param_groups=given.optimizer.param_groups,
            rule=rule,
            iterations_per_epoch=iterations or 1,
            make_tuner=lambda: Tuner(tuning, experience=Experience(environment.experience)),
        )
        scaler = StepScaler(given.scaler) if given.scaler is not None else None
        stepper = Stepper(
            model,
            given.optimizer,
            replicas,
            memory,
            stopwatch,
            meter=meter,
            splits=dealer.measuring.splits,
            scaler=scaler,
            has_schedule=given.scheduler is not None,
            course=adapter,
            is_loss=membership.is_loss,
        )
        loop = TrainingLoop(dealer, stepper, adapter, stopwatch, membership)
        schedule = None
        if given.scheduler is not None:
            schedule = ProgressSchedule(given.scheduler, _turn_of(loop, adapter))
        folder = Path(options.checkpoint_dir) if options.checkpoint_dir else environment.checkpoint_dir
        saver = Saver(folder, options.keep_checkpoints, options.checkpoint_every_s, replicas)
        tensorboard = Path(options.tensorboard) if options.tensorboard else None
        teller = Teller(
            environment,
            replicas,
            adapter,
            dealer,
            folder,
            tensorboard,
            options.seed,
            membership.post,
            fingerprint=fingerprint(given.model, given.optimizer, main_script()),
        )
        adapter.save_is_due = lambda: saver.is_due
        adapter.on_batch, adapter.on_verdict, adapter.on_tuned = teller.batch_changed, teller.verdict, teller.report
        loop.on_memory = teller.out_of_memory
        loader = TrainingLoader(given.loader, source, loop, iterations)
        loader.batch_size = initial_batch_size
        made = (model, loader, schedule, scaler, dealer, adapter, stepper, loop, saver, teller)
        parts = cls(given, replicas, *made, iterations, emulation)
        parts.assign_roles()
        return parts

    def assign_roles(self) -> None:
        """The first replica decides, writes and reports. Called whenever it may have become another one."""
        self.adapter.assign_role()
        self.saver.assign_role()
        self.teller.assign_role()

    @property
    def tuner(self) -> Tuner | None:
        return self.adapter.tuner

    def in_order(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """What stands for each of the user's objects."""
        given = self.given
        instead = {id(given.model): self.model, id(given.loader): self.loader}
        instead[id(given.scheduler)] = self.schedule
        instead[id(given.scaler)] = self.scaler
        return tuple(instead.get(id(item), item) for item in objects)

    def close(self) -> None:
        self.adapter.close()
        self.saver.close()
        self.teller.close()


def _first_config(limits: BatchLimits, num_gpus: int, wanted: int | None) -> BatchConfig:
    """What the job begins with: M0, or what its owner has asked for."""
    if wanted is None:
        return initial_config(limits, num_gpus)
    return fitted_to(BatchConfig(wanted, wanted, 1), limits, num_gpus)


def _turn_of(loop: TrainingLoop, adapter: Adapter) -> Callable[[], Turn | None]:
    """For the schedule: the turn of the loop over the loader that runs; its progress ends where the loop does."""

    def turn() -> Turn | None:
        if not loop.is_inside:
            return None
        total = adapter.total_progress
        return loop.turn._replace(progress=adapter.progress if total is None else min(adapter.progress, total))

    return turn
