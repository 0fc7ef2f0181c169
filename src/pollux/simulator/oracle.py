"""The truth about a job's future, for policies that declare that they need it (SRTF, Optimus)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from pollux.core import Cluster, FrozenMap, JobSpec, Oracle, Shape
from pollux.errors import InvalidModel
from pollux.goodput import gain
from pollux.policies.packing import packed_shapes
from pollux.simulator.batch_split import SingleGpu, split
from pollux.simulator.options import Options
from pollux.simulator.run import Run, Training
from pollux.simulator.truth import Placement, Truth


class _Future:
    """What lies ahead of all jobs of one kind, on one cluster. Found out when asked for: some of it takes its time."""

    def __init__(self, truth: Truth, spec: JobSpec, cluster: Cluster, gpu_type: str, options: Options) -> None:
        self._truth, self._spec, self._cluster, self._gpu_type = truth, spec, cluster, gpu_type
        self._single_gpu = SingleGpu.ABOVE_INITIAL if options.agent.single_gpu_accumulation else SingleGpu.FREE
        self._believed_single_gpu = SingleGpu.ALWAYS if options.world.oracle_doubles_one_gpu else self._single_gpu
        self._batch_size = spec.requested_batch_size or truth.limits.initial_batch_size
        self._placements = _packed_placements(cluster, gpu_type)
        self.until_epoch_ends: dict[int, Oracle] = {}
        """Answers in which nothing changes before the epoch does."""

    @cached_property
    def iteration_times(self) -> FrozenMap[Shape, float]:
        """By packed shape, for as many GPUs as the job can use and the truth is known for."""
        most = self._batch_size // self._truth.limits.min_per_gpu_batch_size
        limit = self._spec.gpu_bounds[1]
        usable = self._placements[: most if limit is None else min(most, limit)]
        times: dict[Shape, float] = {}
        for shape, placement in zip(packed_shapes(self._cluster, self._gpu_type), usable, strict=False):
            try:
                times[shape] = self._iteration_time(placement, self._believed_single_gpu)
            except InvalidModel:
                break
        return FrozenMap(times)

    @cached_property
    def rates(self) -> list[float]:
        """Iterations at M0 a second in each epoch, at the size that the owner requested; none without a node."""
        if not self._placements:
            return []
        truth = self._truth
        placement = self._placements[min(self._spec.requested_gpus or 1, len(self._placements)) - 1]
        m, s = split(self._batch_size, sum(placement), truth.limits, self._single_gpu)
        seconds = self._iteration_time(placement, self._single_gpu)
        in_use = sum(placement) * m * (s + 1)
        scale = in_use / truth.limits.initial_batch_size
        gradients = (truth.gradient(epoch, in_use) for epoch in range(truth.epochs))
        return [float(gain(noise.sqr, noise.var, scale)) / seconds for noise in gradients]

    @cached_property
    def seconds_from(self) -> list[float]:
        """From the start of each epoch to the end of training."""
        truth, to_end = self._truth, [0.0]
        for epoch in reversed(range(truth.epochs)):
            length = truth.epoch_end(epoch) - (truth.epoch_end(epoch - 1) if epoch else 0.0)
            to_end.append(to_end[-1] + length / self.rates[epoch])
        return to_end[::-1]

    @cached_property
    def iterations_left(self) -> list[float]:
        """Counted from the end of each epoch, as the artifact does; 1 in the last one."""
        epochs = range(self._truth.epochs)
        ends = [self._truth.iterations(epoch, self._batch_size) for epoch in epochs]
        return [ends[-1] - end for end in ends[:-1]] + [1.0]

    def _iteration_time(self, placement: Placement, single_gpu: SingleGpu) -> float:
        m, s = split(self._batch_size, sum(placement), self._truth.limits, single_gpu)
        return self._truth.passes(self._gpu_type, placement, m).iteration(s)


class OracleSource:
    """Answers about the jobs of one world, each as its owner configured it. Tables are made once for each cluster."""

    def __init__(self, fields: Sequence[str], options: Options) -> None:
        """`fields` of `Oracle` are told, the others stay empty."""
        self._tells_seconds, self._tells_iterations, self._tells_times = (
            name in fields for name in ("remaining_s", "remaining_iterations", "iteration_time_s")
        )
        self._options = options
        self._cluster = Cluster()
        self._gpu_type: str | None = None
        self._futures: dict[tuple[str | None, int | None, int | None, int | None, str | None], _Future] = {}

    def ask(self, training: Training, run: Run | None, cluster: Cluster, now: float) -> Oracle:
        """The truth about one job at this moment."""
        if cluster is not self._cluster:
            self._cluster, self._futures = cluster, {}
            self._gpu_type = next(iter(cluster.gpu_types), None)
        truth, spec, epoch = training.truth, training.spec, training.epoch
        key = spec.application, spec.requested_batch_size, spec.requested_gpus, spec.max_gpus, spec.gpu_type
        future = self._futures.get(key)
        if future is None:
            gpu_type = spec.gpu_type or self._gpu_type or truth.gpu_types[0]
            future = self._futures[key] = _Future(truth, spec, cluster, gpu_type, self._options)
        answer = future.until_epoch_ends.get(epoch)
        if answer is None:
            answer = future.until_epoch_ends[epoch] = Oracle(
                remaining_iterations=future.iterations_left[epoch] if self._tells_iterations else None,
                iteration_time_s=future.iteration_times if self._tells_times else FrozenMap(),
            )
        if not self._tells_seconds or not future.rates:
            return answer
        progress = training.progress if run is None else run.progress_at(now)
        left = max(truth.epoch_end(epoch) - progress, 0.0)
        return replace(answer, remaining_s=left / future.rates[epoch] + future.seconds_from[epoch + 1])


def _packed_placements(cluster: Cluster, gpu_type: str) -> list[Placement]:
    """For 1, 2, 3 … GPUs the placement on the fewest nodes: the largest ones, filled one after the other."""
    nodes = sorted((node.num_gpus for node in cluster if node.schedulable and node.gpu_type == gpu_type), reverse=True)
    placements: list[Placement] = []
    for index, num_gpus in enumerate(nodes):
        full = tuple(nodes[:index])
        placements += [(*full, count) for count in range(1, num_gpus + 1)]
    return placements
