"""Jobs that train a tiny model and behave like another application on other GPUs.

All of it is real, replicas, all-reduces, optimizer steps, beats, tuning, reports, resizes, but what a small machine
does not have: how long a pass takes (`pacing`), how much progress a step makes, how noisy its gradients are, and its
loss. That comes from the profile of an application (`pollux.applications`), as in the simulator. The cluster's time
runs `compress` times as fast as ours. One real step stands for several emulated ones where those would be too quick
for this machine. What the tiny model itself measures is logged beside.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pollux import applications
from pollux.agent.adapting import Adapter
from pollux.agent.batching import BatchConfig
from pollux.agent.beat import Beat
from pollux.agent.dealing import StepPlan
from pollux.agent.environment import EmulatedCluster, Environment
from pollux.agent.options import Options
from pollux.agent.pacing import Pace, PacedStopwatch
from pollux.applications import Application, PassTime
from pollux.core import GradientStats, Shape
from pollux.errors import InvalidSpec, UnknownName
from pollux.goodput import gain

log = logging.getLogger(__name__)

PREFIX = "emulated-"
"""How the names of GPU types begin that are none: what is measured on them never mixes with what is true."""

LEAST_STEP_S = 0.1
"""A real step takes at least so long: waiting is exact to about a millisecond …"""

PASS_CPU_S, DOUBLING_CPU_S = 0.003, 0.0025
"""… and longer where many share the machine: a pass costs a replica so much processor time, averaging the gradients so
much more for each doubling of the replicas (measured with gloo on two cores, 1 to 32 replicas), …"""

BUSY = 0.35
"""… and this share of the machine may go to steps. The rest is for starts, resizes, fits and the service."""


class Emulation:
    """One job's part in an emulated cluster."""

    def __init__(self, application: Application, gpu_type: str, cluster: EmulatedCluster) -> None:
        if gpu_type not in application.throughput:
            raise UnknownName("emulate: GPU type", gpu_type, application.throughput)
        self.application = application
        self.cluster = cluster
        self._gpu_type = gpu_type
        self.config: Callable[[], BatchConfig] = lambda: BatchConfig(1, 1, 1)
        """What the job trains with now."""
        self.stopwatch = PacedStopwatch(PREFIX + gpu_type, self._pace)
        self._pass_time = lru_cache(maxsize=4096)(self._told_pass_time)

    @classmethod
    def of(cls, options: Options, environment: Environment) -> Emulation | None:
        """None: the job is a real one. Anywhere else than on an emulated cluster it takes its time."""
        cluster, kind = environment.emulated, environment.gpu_type or ""
        if options.emulate is None:
            if cluster is None:
                return None
            raise InvalidSpec(
                "emulate",
                None,
                "the GPUs of this cluster are emulated, and the script does not say what to emulate on them",
                "Use pollux run --emulate cifar10 here, or run this script on a cluster of real GPUs or slots",
            )
        application = applications.load(options.emulate)
        known = kind.removeprefix(PREFIX) if kind.startswith(PREFIX) else next(iter(application.throughput))
        return cls(application, known, cluster or EmulatedCluster())

    def told(self, options: Options) -> Options:
        """The profile's limits, and reports that come as often as in the emulated cluster."""
        limits = self.application.limits
        return replace(
            options,
            max_batch_size=limits.max_batch_size,
            min_per_gpu_batch_size=limits.min_per_gpu_batch_size,
            max_per_gpu_batch_size=limits.max_per_gpu_batch_size,
            report_every_s=options.report_every_s / self.cluster.compress,
            guard=False,  # the loss follows from the progress: there is nothing to find out
        )

    # What a step is

    def repeats(self, shape: Shape, config: BatchConfig) -> int:
        """How many emulated steps one real step stands for; the same on all replicas."""
        cpu_s = PASS_CPU_S * config.passes + DOUBLING_CPU_S * math.log2(shape.num_gpus)
        busy_s = self.cluster.machine_slots * cpu_s / (_num_cores() * BUSY)
        return max(1, math.ceil(max(LEAST_STEP_S, busy_s) / self._step_s(shape, config)))

    def _step_s(self, shape: Shape, config: BatchConfig) -> float:
        """Real seconds of one emulated step."""
        times = self._pass_time(shape, config.per_gpu_batch_size)
        return times.iteration(config.accumulation_steps) / self.cluster.compress

    def _told_pass_time(self, shape: Shape, per_gpu_batch_size: int) -> PassTime:
        return self.application.pass_time(self._gpu_type, shape, per_gpu_batch_size)

    def _pace(self, shape: Shape, plan: StepPlan, index: int) -> Pace:
        config = self.config()
        repeats, compress = self.repeats(shape, config), self.cluster.compress
        if plan.passes != config.passes:
            # A step that is measured in two passes, or the short last one of the data, is a step like the others.
            even_s = repeats * self._step_s(shape, config) / plan.passes
            return Pace(even_s, even_s, repeats, compress)
        times = self._pass_time(shape, config.per_gpu_batch_size)
        grad_s = repeats * times.grad_time_s / compress
        is_last = index == plan.passes - 1
        return Pace(grad_s, repeats * times.iteration_time_s / compress if is_last else grad_s, repeats, compress)

    # What comes of it

    def gradient(self, progress: float, batch_size: int) -> GradientStats:
        """At that progress, in iterations at M0."""
        return self.application.gradient_in_epoch(self.application.epoch_at(progress), batch_size)

    def worth(self, progress: float, shape: Shape, config: BatchConfig) -> float:
        """How many iterations at M0 a real step is worth, all that it stands for together."""
        gradient = self.gradient(progress, config.batch_size)
        scale = config.batch_size / self.application.limits.initial_batch_size
        return self.repeats(shape, config) * float(gain(gradient.sqr, gradient.var, scale))

    def metric(self, progress: float) -> float:
        """The validation metric of the profile."""
        return self.application.metric.at(min(progress / self.application.total_progress, 1.0))

    def loss(self, progress: float) -> float:
        """Falls as the metric of the profile gets better."""
        curve, value = self.application.metric, self.metric(progress)
        return (100.0 if "%" in curve.name else 1.0) - value if curve.higher_is_better else value

    def hold_back(self, since_s: float | None = None) -> None:
        """Train on when the emulated re-allocation is over, that began at that time of the monotonic clock.

        None: when this process did.
        """
        began_s = time.monotonic() - _age_s() if since_s is None else since_s
        left_s = began_s + self.cluster.realloc_delay_s / self.cluster.compress - time.monotonic()
        if left_s > 0.0:
            time.sleep(left_s)
        self.stopwatch.start_over()


class EmulatedAdapter(Adapter):
    """Goes by what the profile says instead of what the tiny model tells of itself, which it logs."""

    def __init__(self, emulation: Emulation, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._emulation = emulation
        emulation.config = lambda: self._dealer.config
        self.on_behind = emulation.stopwatch.fail
        self._memory.proven = self.limits.max_per_gpu_batch_size  # the profile knows what fits

    @property
    def is_behind(self) -> bool:
        return self._emulation.stopwatch.is_too_slow

    def stepped(self, plan: StepPlan) -> None:
        self.progress += self._emulation.worth(self.progress, self._replicas.shape, self._dealer.config)

    def gradient(self) -> GradientStats:
        return self._emulation.gradient(self.progress, self._dealer.config.batch_size)

    @property
    def noise_scale(self) -> float:
        known = self.gradient()
        return self.initial_batch_size * known.var / known.sqr

    @property
    def told_loss(self) -> float:
        return self._emulation.loss(self.progress)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pacing": self._emulation.stopwatch.pacing()}

    def load(self, state: dict[str, Any], *, keeps_given_config: bool) -> None:
        super().load(state, keeps_given_config=keeps_given_config)
        self._emulation.stopwatch.go_on(*state.get("pacing", (0.0, 0.0)))

    def _decisions(self, beat: Beat, is_saving: bool) -> Beat:
        before = self.tuned
        decided = super()._decisions(beat, is_saving)
        if self.tuned is not before:
            self._log_own()
        return decided

    def _log_own(self) -> None:
        """What the tiny model measures beside what is told of it."""
        own = super().noise_scale
        log.info(
            "emulated at progress %.0f: noise scale %.0f, loss %.4g; the tiny model's own: %s, %s",
            *(self.progress, self.noise_scale, self.told_loss),
            *("unknown" if value is None else f"{value:.4g}" for value in (own, self.loss)),
        )


def _age_s() -> float:
    """How long ago this process began; 0 where nobody tells."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
