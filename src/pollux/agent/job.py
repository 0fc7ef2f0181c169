"""`Job`: what a training script talks to. Everything behind it is in the modules around this one.

parts      what a prepared job consists of          membership    whom it trains with, and how that changes
training   its loops, saving, leaving               state         what checkpoints and newcomers go on from
stepping   passes of a step, learning rate          loader        which samples when, with dealing and order
adapting   progress, noise, batch size              telling       journal and reports
"""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from pollux.agent.emulation import Emulation
from pollux.agent.environment import Environment
from pollux.agent.evaluation import ShardedLoader, shard_loader
from pollux.agent.looping import Goal
from pollux.agent.membership import Membership
from pollux.agent.metrics import Average, Averages
from pollux.agent.options import Options
from pollux.agent.parts import Parts
from pollux.agent.preparing import sort_out
from pollux.agent.state import TrainingState
from pollux.agent.training import Training
from pollux.errors import InvalidSpec, LoopMisuse


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
        self._membership = Membership(self._environment)
        self._replicas = self._membership.replicas
        self._averages = Averages(self._membership.sum, self._replicas.device)
        self._state = TrainingState(self.options, self._averages, self.state)
        self._parts: Parts | None = None
        self._training: Training | None = None
        self._is_closed = False
        atexit.register(self.close)

    # What the script may ask

    @property
    def device(self) -> torch.device:
        """Where this replica's model belongs."""
        return self._replicas.device

    @property
    def is_main(self) -> bool:
        """One replica prints and writes files. Which one may change; a replica that joins later asks after that."""
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
        return self._made.adapter.noise_scale

    @property
    def learning_rate_factors(self) -> tuple[float, ...]:
        """What the learning rate of each parameter group is multiplied by now."""
        return self._made.adapter.factors_of(self.batch_size)

    @property
    def emulation(self) -> Emulation | None:
        """What the job emulates; None: it is a real one."""
        return self._made.emulation

    # Setting up

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Take over a model, its optimizer and its loader, and if there are any a schedule and a GradScaler.

        Gives back what the loop is to use instead, in the same order. Goes on from the newest checkpoint, if any.
        """
        if self._parts is not None:
            raise LoopMisuse("job.prepare was called twice", "Hand it all objects in one call")
        given = sort_out(objects)
        self._parts = parts = Parts.of(given, self.options, self._environment, self._membership)
        self._state.prepared(parts)
        self._training = Training(self._membership, parts, self._state, self._averages, self.close)
        self._training.begin()
        return parts.in_order(objects)

    @property
    def _made(self) -> Parts:
        if self._parts is None:
            raise LoopMisuse("the job has nothing to train yet", "Call job.prepare(model, optimizer, loader) first")
        return self._parts

    @property
    def _trained(self) -> Training:
        self._made  # noqa: B018 - says what is missing
        assert self._training is not None
        return self._training

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
        return self._trained.turns(
            "epochs", count, lambda: made.adapter.progress, lambda start, turn: Goal(progress=start + turn * length)
        )

    def passes(self, count: int) -> Iterator[int]:
        """`count` plain passes: each delivers every sample once, whatever progress that makes."""
        made = self._made
        return self._trained.turns(
            "passes",
            count,
            lambda: float(made.dealer.committed.pass_index),
            lambda start, turn: Goal(pass_index=int(start) + turn),
        )

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Instead of `loss.backward()`. The loss is a mean over the batch; with AMP, the scaled one."""
        self._made.stepper.backward(loss, **kwargs)

    def stop(self, reason: str = "the script asked for it") -> None:
        """End the loop early and well, on all replicas at the same step, at most two beats from now."""
        training = self._trained
        training.stop_reason = reason
        training.stop()

    # Evaluation, metrics, state

    def shard(self, loader: DataLoader[Any]) -> DataLoader[Any] | ShardedLoader:
        """A loader for evaluation: over all replicas each sample comes once."""
        if self._membership.is_managed:
            return ShardedLoader(loader, self._replicas)
        return shard_loader(loader, self._replicas.rank, self._replicas.size)

    def average(self, name: str) -> Average:
        """A mean over samples and replicas, kept by checkpoints: `add(value, count)`, then `compute()`."""
        return self._averages[name]

    def register(self, name: str, holder: Any) -> Any:
        """Have checkpoints keep anything with `state_dict` and `load_state_dict`. Gives it back, restored on resume."""
        self._state.register(name, holder)
        return holder

    def save(self) -> None:
        """Have a checkpoint written at the next opportunity; the first replica's call counts."""
        if not self._made.saver.is_on:
            raise LoopMisuse("job.save was called, and there is no folder to save to", "Give Job(checkpoint_dir=…)")
        self._made.adapter.wants_save = True

    def close(self) -> None:
        """Give back threads and connections; called by itself when the script ends."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._parts is not None:
            self._parts.close()
        self._membership.close(self._parts.dealer.committed.step if self._parts is not None else 0)
