"""One job in the virtual world: where it is in its training, on which GPUs, and how fast it goes."""

from __future__ import annotations

from functools import cached_property

from pollux.core import Allocation, Cluster, GradientStats, JobId, JobSpec, Progress
from pollux.goodput import gain
from pollux.simulator.agent import Agent
from pollux.simulator.knowledge import Knowledge
from pollux.simulator.options import AgentOptions, RankOrder
from pollux.simulator.truth import Truth


class Training:
    """How far a job has come; survives every loss of its GPUs."""

    def __init__(self, spec: JobSpec, truth: Truth, options: AgentOptions, knowledge: Knowledge | None = None) -> None:
        self.id: JobId = spec.id
        self.spec = spec
        self.truth = truth
        self.agent = Agent(spec, truth.limits, options, knowledge)
        self.progress = 0.0
        """In iterations at M0."""
        self.epoch = 0
        """The statistical epoch that it is in; as many as there are once it is done."""
        self.batch_size = truth.limits.initial_batch_size
        """In use, or last in use."""
        self._length_factor = options.length_factor(spec.id)

    @property
    def is_done(self) -> bool:
        return self.epoch >= self.truth.epochs

    @cached_property
    def length(self) -> float:
        """Progress at its end."""
        return self.truth.epoch_end(self.truth.epochs - 1)

    def summary(self) -> Progress:
        """What its training loop knows and may report: the length of a run is declared, not guessed."""
        if self._length_factor is None:
            return Progress(self.progress)
        total = self.progress + self._length_factor * (self.length - self.progress)
        return Progress(self.progress, total, 0.0)

    def fall_back(self) -> None:
        """To the last checkpoint, written when the epoch began."""
        self.progress = self.truth.epoch_end(self.epoch - 1) if self.epoch else 0.0


class Run:
    """One stay of a job on some GPUs: the replicas of a generation. Between two changes its speed is constant."""

    def __init__(
        self,
        training: Training,
        generation: int,
        allocation: Allocation,
        cluster: Cluster,
        order: RankOrder,
        now: float,
        ready_at_s: float,
    ) -> None:
        self.training = training
        self.generation = generation
        self.membership = 0
        self.allocation = allocation
        counts = allocation.gpus.values()
        self.placement = tuple(counts) if order is RankOrder.BY_NODE else tuple(sorted(counts, reverse=True))
        self.gpu_type = cluster[next(iter(allocation.gpus))].gpu_type
        self.shape = allocation.shape(cluster)
        self.counted_until_s = now
        """Up to when `training.progress` counts."""
        self.ready_at_s = ready_at_s
        """It holds its GPUs and does not train before."""
        self.slowdown = 1.0
        """What interference leaves of its speed."""
        self.version = 0
        """Grows with every change of speed: what was predicted before does not hold any more."""
        self.m = self.s = 0
        """Per-GPU batch size and accumulation steps in use; m is 0 before the first tuning."""
        self.gradient: GradientStats | None = None
        """That of the present epoch and batch size, which its speed was found with."""
        self._measured: int | None = None
        """The per-GPU batch size that was measured last: on the same GPUs it tells nothing new."""
        self.tune()

    def tune(self) -> None:
        """Let the agent choose its batch size for the GPUs at hand, and find out how fast that goes."""
        training = self.training
        gradient = training.truth.gradient(training.epoch, training.batch_size)
        m, s = training.agent.tune(self.gpu_type, self.shape, gradient)
        if m != self.m or s != self.s:
            self.m, self.s = m, s
            training.batch_size = self.shape.num_gpus * m * (s + 1)
            self.passes = training.truth.passes(self.gpu_type, self.placement, m)
        elif gradient is self.gradient:
            self.version += 1  # as fast as before, but progress was counted meanwhile
            return
        self.find_speed()

    def find_speed(self) -> None:
        """Speed with the present batch size in the present epoch."""
        truth, batch_size = self.training.truth, self.training.batch_size
        self.goal = truth.epoch_end(self.training.epoch)
        """Progress at which the epoch ends."""
        self.gradient = gradient = truth.gradient(self.training.epoch, batch_size)
        scale = batch_size / truth.limits.initial_batch_size
        worth = float(gain(gradient.sqr, gradient.var, scale))
        seconds = self.passes.iteration(self.s)
        self.rate = worth / seconds * self.slowdown
        """Iterations at M0 a second."""
        self.throughput = batch_size / seconds * self.slowdown
        """Examples a second."""
        self.efficiency = worth / scale
        self.version += 1

    def trains(self, now: float) -> bool:
        return now >= self.ready_at_s

    def count(self, now: float) -> None:
        """Count the progress made up to now; an epoch that is about to end does so by its own event."""
        self.training.progress = self.progress_at(now)
        self.counted_until_s = now

    def progress_at(self, now: float) -> float:
        training = self.training
        seconds = now - max(self.counted_until_s, self.ready_at_s)
        if seconds <= 0.0:
            return training.progress
        return min(training.progress + self.rate * seconds, self.goal)

    def observe(self, now: float) -> None:
        """Let the agent measure what it has been doing, if it has done anything."""
        if now > self.ready_at_s and self._measured != self.m:
            self.training.agent.observe(self.gpu_type, self.shape, self.m, self.passes)
            self._measured = self.m
