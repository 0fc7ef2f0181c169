"""`Job`: what a training script talks to. Everything behind it is in the modules around this one.

stepping   passes of a step: gradients, learning rate        loader, dealing, order    which samples when
adapting   progress, noise, batch size, beats                saving                    checkpoints
looping    boundaries of passes and steps                    telling                   journal and reports
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from pollux.agent.adapting import Adapter, Heard
from pollux.agent.batching import initial_config
from pollux.agent.checkpoint import Loaded
from pollux.agent.dealing import Cursor, Dealer
from pollux.agent.environment import Environment
from pollux.agent.evaluation import shard_loader
from pollux.agent.loader import ENDLESS, TrainingLoader, source_of
from pollux.agent.looping import Goal, TrainingLoop
from pollux.agent.memory import MemoryBound
from pollux.agent.metrics import Average, Averages
from pollux.agent.model import ReplicatedModel, batch_dependent_layers
from pollux.agent.noise_meter import NoiseMeter
from pollux.agent.options import Options
from pollux.agent.preconditioners import kind
from pollux.agent.preparing import Prepared, sort_out
from pollux.agent.replicas import Replicas
from pollux.agent.rules import default_rule, rule_named
from pollux.agent.saving import Saver, random_states, restore_random_states
from pollux.agent.scaler import StepScaler
from pollux.agent.schedule import ProgressSchedule, Turn
from pollux.agent.signals import EXIT_CODE, on_terminate
from pollux.agent.snapshot import checked
from pollux.agent.stepping import Stepper
from pollux.agent.stopwatch import CudaClock, HostClock, Stopwatch
from pollux.agent.telling import Teller
from pollux.agent.tuner import Tuner, TunerOptions
from pollux.errors import InvalidSpec, LoopMisuse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the script's loops the job is: the how-many-eth loop, its epoch, and what it counts from."""

    loop: int = 0
    epoch: int = 0
    start: float = 0.0
    is_finished: bool = False


class Job:
    """A training job that measures itself and tunes its batch size and learning rate.

    The same script runs alone, under torchrun, and under Pollux. Options: `pollux.torch.Options`, by name.
    """

    def __init__(self, **options: Any) -> None:
        known = {field.name for field in dataclasses.fields(Options)}
        for name in options:
            if name not in known:
                raise InvalidSpec(name, options[name], "no such option", f"Known: {', '.join(sorted(known))}")
        self.options = Options(**options)
        self.state: dict[str, Any] = {}
        """Plain values of yours that checkpoints keep."""
        self._environment = Environment.read()
        self._replicas = Replicas.join(self._environment)
        self._averages = Averages(self._replicas.sum, self._replicas.device)
        self._registered: dict[str, Any] = {}
        self._parts: _Parts | None = None
        self._loaded: Loaded | None = None
        self._resume_from = Place()
        self._on_resumed: Callable[[], None] | None = None
        """Called once, where the script comes to the loop that it resumes after an epoch or at the end."""
        self._place = Place()
        self._loops_begun = 0
        self._leave_asked = False
        self._is_closed = False
        self._stop_reason = ""
        atexit.register(self.close)

    # What the script may ask

    @property
    def device(self) -> torch.device:
        """Where this replica's model belongs."""
        return self._replicas.device

    @property
    def is_main(self) -> bool:
        """One replica prints and writes files."""
        return self._replicas.is_main

    @property
    def num_replicas(self) -> int:
        return self._replicas.size

    @property
    def batch_size(self) -> int:
        """Samples in the next step, over all replicas."""
        return self._made.dealer.config.batch_size

    @property
    def progress(self) -> float:
        """Iterations at the initial batch size that training so far is worth."""
        return self._made.adapter.progress

    @property
    def steps(self) -> int:
        """Steps so far, those that a GradScaler left out included."""
        return self._made.dealer.committed.step

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale φ in samples; None before it was measured, inf where noise hides the gradient."""
        adapter = self._made.adapter
        return adapter.noise.noise_scale(adapter.initial_batch_size) if adapter.noise.weight else None

    @property
    def learning_rate_factors(self) -> tuple[float, ...]:
        """What the learning rate of each parameter group is multiplied by now."""
        return self._made.adapter.factors_of(self.batch_size)

    # Setting up

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Take over a model, its optimizer and its loader, and if there are any a schedule and a GradScaler.

        Gives back what the loop is to use instead, in the same order. Goes on from the newest checkpoint, if any.
        """
        if self._parts is not None:
            raise LoopMisuse("job.prepare was called twice", "Hand it all objects in one call")
        given = sort_out(objects)
        self._parts = parts = self._make(given)
        self._loaded = parts.saver.latest()
        if self._loaded is not None:
            self._resume(parts, self._loaded)
        parts.model.connect(self._replicas)
        if self._loaded is None:
            parts.teller.started()
        else:
            parts.teller.resumed(self._loaded.path)
        return parts.in_order(objects)

    def _make(self, given: Prepared) -> _Parts:
        options, replicas = self.options, self._replicas
        model = ReplicatedModel(given.model, options.ddp)
        source = source_of(given.loader, options, replicas)
        initial_batch_size = given.loader.batch_size
        assert initial_batch_size is not None
        limits = options.limits(initial_batch_size, source.pass_length)
        dealer = Dealer(
            source.pass_length if source.is_bounded and source.pass_length else ENDLESS,
            initial_config(limits, replicas.size),
            replicas.size,
        )
        depends = options.batch_dependent
        dealer.measuring.splits = not (bool(batch_dependent_layers(given.model)) if depends is None else depends)
        dealer.least = 1 if dealer.measuring.splits else 2
        memory = MemoryBound(limits)
        stopwatch = Stopwatch(replicas.gpu_type, CudaClock() if replicas.device.type == "cuda" else HostClock())
        meter = NoiseMeter(given.optimizer, preconditioner=options.preconditioner) if options.measure_noise else None
        iterations = math.ceil(source.pass_length / initial_batch_size) if source.pass_length else None
        rule = default_rule(kind(given.optimizer)) if options.rule == "auto" else rule_named(options.rule)
        tuner = Tuner(TunerOptions(adapt=options.adapt, hysteresis=options.hysteresis)) if self.is_main else None
        adapter = Adapter(
            options,
            replicas,
            dealer,
            memory,
            stopwatch,
            meter=meter,
            param_groups=given.optimizer.param_groups,
            rule=rule,
            iterations_per_epoch=iterations or 1,
            tuner=tuner,
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
        )
        loop = TrainingLoop(dealer, stepper, adapter, stopwatch, replicas)
        schedule = ProgressSchedule(given.scheduler, self._turn) if given.scheduler is not None else None
        folder = Path(options.checkpoint_dir) if options.checkpoint_dir else self._environment.checkpoint_dir
        saver = Saver(folder, options.keep_checkpoints, options.checkpoint_every_s, replicas)
        tensorboard = Path(options.tensorboard) if options.tensorboard else None
        teller = Teller(self._environment, replicas, adapter, dealer, folder, tensorboard, options.seed)
        adapter.save_is_due = lambda: saver.is_due
        adapter.on_batch, adapter.on_verdict, adapter.on_tuned = teller.batch_changed, teller.verdict, teller.report
        loop.on_heard, loop.on_memory = self._heard, teller.out_of_memory
        loader = TrainingLoader(given.loader, source, loop, iterations)
        return _Parts(
            given, model, loader, schedule, scaler, dealer, adapter, stepper, loop, saver, teller, tuner, iterations
        )

    @property
    def _made(self) -> _Parts:
        if self._parts is None:
            raise LoopMisuse("the job has nothing to train yet", "Call job.prepare(model, optimizer, loader) first")
        return self._parts

    # Loops

    def epochs(self, count: int) -> Iterator[int]:
        """`count` statistical epochs: each ends when the progress of one pass at the initial batch size is made.

        Larger batches need more samples for the same progress, so that the loop over the loader may run through
        more than one pass; passes follow one another without a break.
        """
        made = self._made
        if made.iterations is None:
            raise LoopMisuse(
                "a statistical epoch needs the number of samples in a pass",
                "Give Job(samples_per_pass=…), or use job.passes(n) for plain passes",
            )
        length = float(made.iterations)
        return self._turns(
            count, lambda: made.adapter.progress, lambda start, turn: Goal(progress=start + turn * length)
        )

    def passes(self, count: int) -> Iterator[int]:
        """`count` plain passes: each delivers every sample once, whatever progress that makes."""
        made = self._made
        return self._turns(
            count,
            lambda: float(made.dealer.committed.pass_index),
            lambda start, turn: Goal(pass_index=int(start) + turn),
        )

    def _turns(self, count: int, beginning: Callable[[], float], goal: Callable[[float, int], Goal]) -> Iterator[int]:
        made = self._made
        if made.loop.goal is not None:
            raise LoopMisuse(
                "job.epochs or job.passes is used inside another of them", "Write one of them around the loop"
            )
        number = self._loops_begun
        self._loops_begun += 1
        resumed = self._resume_from
        if number == resumed.loop and self._on_resumed is not None:
            self._on_resumed()
            self._on_resumed = None
        if number < resumed.loop:
            return
        if number == resumed.loop and resumed.is_finished and resumed.epoch >= count:
            if self.is_main:
                log.warning("this loop of %d epochs has ended before: give more, or another checkpoint_dir", count)
            return
        first, start = 0, beginning()
        if number == resumed.loop and self._loaded is not None:
            first, start = resumed.epoch, resumed.start
        made.loop.is_stopped = False
        if made.saver.is_on:
            checked(self.state, 'user["state"]')  # better now than with the first checkpoint
        try:
            with on_terminate(self._ask_leave):
                for epoch in range(first, count):
                    made.loop.goal = aim = goal(start, epoch + 1)
                    made.adapter.total_progress = goal(start, count).progress
                    self._place = Place(number, epoch, start)
                    yield epoch
                    if aim.progress is not None:
                        # Left early, by a break: the next epoch is a whole one all the same.
                        start -= max(0.0, aim.progress - made.adapter.progress)
                    self._place = Place(number, epoch + 1, start)
                    self._agree_to_go_on()
                    if made.loop.is_stopped:
                        break
            self._finish_loop(Place(number, max(first, count), start, is_finished=True))
        finally:  # also after a break of the script's
            made.loop.goal = None
            made.adapter.wants_stop = False

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Instead of `loss.backward()`. The loss is a mean over the batch; with AMP, the scaled one."""
        self._made.stepper.backward(loss, **kwargs)

    def stop(self, reason: str = "the script asked for it") -> None:
        """End the loop early and well, on all replicas at the same step, at most two beats from now."""
        self._stop_reason = reason
        made = self._made
        if made.loop.is_inside:
            made.adapter.wants_stop = True
        else:
            made.loop.is_stopped = True

    # Evaluation, metrics, state

    def shard(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A loader for evaluation: over all replicas each sample comes once."""
        return shard_loader(loader, self._replicas.rank, self._replicas.size)

    def average(self, name: str) -> Average:
        """A mean over samples and replicas, kept by checkpoints: `add(value, count)`, then `compute()`."""
        return self._averages[name]

    def register(self, name: str, holder: Any) -> Any:
        """Have checkpoints keep anything with `state_dict` and `load_state_dict`. Gives it back, restored on resume."""
        if name in self._registered:
            raise LoopMisuse(f"job.register was given {name!r} twice", "Use one name for each object")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(holder, method, None)):
                raise InvalidSpec(name, type(holder).__name__, f"has no {method}", "Put plain values into job.state")
        self._registered[name] = holder
        self._restore_registered(name, holder)
        return holder

    def _restore_registered(self, name: str, holder: Any) -> None:
        if self._loaded is not None and name in self._loaded.parts["user"]["registered"]:
            holder.load_state_dict(self._loaded.parts["user"]["registered"][name])

    def save(self) -> None:
        """Have a checkpoint written at the next opportunity; the first replica's call counts."""
        if not self._made.saver.is_on:
            raise LoopMisuse("job.save was called, and there is no folder to save to", "Give Job(checkpoint_dir=…)")
        self._made.adapter.wants_save = True

    # Inside

    def _turn(self) -> Turn | None:
        """For the schedule: the turn of the loop over the loader that runs; its progress ends where the loop does."""
        made = self._made
        if not made.loop.is_inside:
            return None
        total = made.adapter.total_progress
        progress = made.adapter.progress if total is None else min(made.adapter.progress, total)
        return made.loop.turn._replace(progress=progress)

    def _heard(self, heard: Heard) -> None:
        made = self._made
        made.teller.beat()
        made.teller.checkpoint(made.saver.last_path)
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
        if self._parts is not None:
            self._parts.adapter.wants_leave = True

    def _agree_to_go_on(self) -> None:
        """Between epochs; every replica comes by here, so that what one was asked all do."""
        loop = self._made.loop
        is_stopped = loop.is_stopped or self._made.adapter.wants_stop
        asked = torch.tensor([self._leave_asked, is_stopped], dtype=torch.float64, device=self._replicas.device)
        leave, stop = self._replicas.sum(asked).tolist()
        loop.is_stopped = stop > 0
        if leave > 0:
            self._leave()

    def _leave(self) -> None:
        made = self._made
        self._save(wait=True)
        # A launcher that sees one replica end may end the others, one of which is still writing.
        self._replicas.barrier()
        made.teller.checkpoint(made.saver.last_path)
        made.teller.stopped("SIGTERM")
        self.close()
        raise SystemExit(EXIT_CODE)

    def _finish_loop(self, place: Place) -> None:
        made = self._made
        made.adapter.settle()
        self._place = place
        if made.saver.is_on:
            self._save(wait=True)
            made.teller.checkpoint(made.saver.last_path)
        made.teller.finished(self._stop_reason if made.loop.is_stopped else "")

    def _save(self, *, wait: bool) -> None:
        """Every replica calls it: averages are summed over all of them."""
        made = self._made
        averages = self._averages.merged_state()
        if not self.is_main:
            return
        parts: dict[str, Any] = {
            "model": made.model.state_dict(),
            "optimizer": made.given.optimizer.state_dict(),
            "training": {
                "adapter": made.adapter.state(),
                "cursor": dataclasses.asdict(made.dealer.committed),
                "place": dataclasses.asdict(self._place),
                "random": random_states(self.device),
                "is_inside": made.loop.is_inside,
                "seed": self.options.seed,
                "initial_batch_size": made.adapter.initial_batch_size,
                "pass_length": made.dealer.pass_length,
                "turn": made.loop.turn.number,
            },
            "user": {
                "averages": averages,
                "registered": {name: holder.state_dict() for name, holder in self._registered.items()},
                "state": self.state,
            },
        }
        if made.schedule is not None:
            parts["scheduler"] = made.schedule.state_dict()
        if made.scaler is not None:
            parts["scaler"] = made.scaler.inner.state_dict()
        facts = {
            "progress": made.adapter.progress,
            "batch_size": self.batch_size,
            "replicas": self.num_replicas,
            "pass": made.dealer.committed.pass_index,
            "finished": self._place.is_finished,
        }
        made.saver.save(self.steps, parts, facts, wait=wait)

    def _resume(self, made: _Parts, loaded: Loaded) -> None:
        parts = loaded.parts
        training = parts["training"]
        _check_same(loaded.path, "seed", training["seed"], self.options.seed)
        initial_batch_size = made.adapter.initial_batch_size
        _check_same(loaded.path, "initial_batch_size", training["initial_batch_size"], initial_batch_size)
        _check_same(loaded.path, "pass_length", training["pass_length"], made.dealer.pass_length)
        made.loop.turn = made.loop.turn._replace(number=training["turn"])
        made.given.model.load_state_dict(parts["model"])
        made.given.optimizer.load_state_dict(parts["optimizer"])
        if made.schedule is not None and "scheduler" in parts:
            made.schedule.load_state_dict(parts["scheduler"])
        if made.scaler is not None and "scaler" in parts:
            made.scaler.inner.load_state_dict(parts["scaler"])
        made.dealer.resume(Cursor(**training["cursor"]))
        made.adapter.load(training["adapter"])
        self._averages.load_state_dict(parts["user"]["averages"], self.is_main)
        self.state.update(parts["user"]["state"])
        for name, holder in self._registered.items():
            self._restore_registered(name, holder)
        self._resume_from = Place(**training["place"])
        if self.is_main:
            restore = functools.partial(restore_random_states, training["random"], self.device)
            # Where they were taken: making an iterator of a DataLoader draws from them.
            if training["is_inside"]:
                made.loop.on_first_pass = restore
            else:
                self._on_resumed = restore

    def close(self) -> None:
        """Give back threads and connections; called by itself when the script ends."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._parts is not None:
            if self._parts.tuner is not None:
                self._parts.tuner.close()
            self._parts.saver.close()
            self._parts.teller.close()
        self._replicas.leave()


def _check_same(path: Path, name: str, saved: object, given: object) -> None:
    if saved != given:
        raise InvalidSpec(
            name,
            given,
            f"{path} was made with {saved!r}, and progress and the order of samples follow from that",
            f"Use {saved!r} again, or another checkpoint_dir to start afresh",
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a prepared job consists of."""

    given: Prepared
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
    tuner: Tuner | None
    iterations: int | None
    """Of M0 in one pass; None if its length is unknown."""

    def in_order(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """What stands for each of the user's objects."""
        given = self.given
        instead = {id(given.model): self.model, id(given.loader): self.loader}
        instead[id(given.scheduler)] = self.schedule
        instead[id(given.scaler)] = self.scaler
        return tuple(instead.get(id(item), item) for item in objects)
