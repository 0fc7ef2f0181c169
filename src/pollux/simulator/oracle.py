"""The truth about a job's future, for policies that declare that they need it (SRTF, Optimus)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pollux.core import Cluster, FrozenMap, JobSpec, Oracle, Shape
from pollux.errors import InvalidModel
from pollux.goodput import gain
from pollux.policies.packing import packed_shapes
from pollux.simulator.batch_split import SingleGpu, split
from pollux.simulator.options import Options
from pollux.simulator.run import Run, Training
from pollux.simulator.truth import Placement, Truth


class _Future:
    """What lies ahead of all jobs of one kind, on one cluster."""

    def __init__(self, truth: Truth, spec: JobSpec, cluster: Cluster, gpu_type: str, options: Options) -> None:
        real = SingleGpu.ABOVE_INITIAL if options.agent.single_gpu_accumulation else SingleGpu.FREE
        believed = SingleGpu.ALWAYS if options.world.oracle_doubles_one_gpu else real
        batch_size = spec.requested_batch_size or truth.limits.initial_batch_size
        placements = _packed_placements(cluster, gpu_type)
        self.iteration_times = _iteration_times(
            truth, batch_size, gpu_type, zip(packed_shapes(cluster, gpu_type), placements, strict=False), believed
        )
        num_gpus = spec.requested_gpus or 1
        placement = placements[min(num_gpus, len(placements)) - 1] if placements else None
        self.rates = _rates(truth, batch_size, gpu_type, placement, real) if placement is not None else []
        """Iterations at M0 a second in each epoch, at the size that the owner requested; none without a node."""
        self.seconds_from = _seconds_from(truth, self.rates) if self.rates else []
        """From the start of each epoch to the end of training."""
        self.until_epoch_ends: dict[int, Oracle] = {}
        """Answers in which nothing changes before the epoch does."""
        last = truth.epochs - 1
        ends = [truth.iterations(epoch, batch_size) for epoch in range(truth.epochs)]
        self.iterations_left = [ends[last] - ends[epoch] if epoch < last else 1.0 for epoch in range(truth.epochs)]
        """Counted from the end of each epoch, as the artifact does; 1 in the last one."""


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
        self._futures: dict[tuple[str, int | None, int | None, str | None], _Future] = {}

    def ask(self, training: Training, run: Run | None, cluster: Cluster, now: float) -> Oracle:
        """The truth about one job at this moment."""
        if cluster is not self._cluster:
            self._cluster, self._futures = cluster, {}
            self._gpu_type = next(iter(cluster.gpu_types), None)
        truth, spec, epoch = training.truth, training.spec, training.epoch
        key = truth.name, spec.requested_batch_size, spec.requested_gpus, spec.gpu_type
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


def _iteration_times(
    truth: Truth,
    batch_size: int,
    gpu_type: str,
    packed: Iterable[tuple[Shape, Placement]],
    single_gpu: SingleGpu,
) -> FrozenMap[Shape, float]:
    """By packed shape, up to where the truth is known."""
    times: dict[Shape, float] = {}
    for shape, placement in packed:
        try:
            times[shape] = _iteration_time(truth, batch_size, gpu_type, placement, single_gpu)
        except InvalidModel:
            break
    return FrozenMap(times)


def _rates(truth: Truth, batch_size: int, gpu_type: str, placement: Placement, single_gpu: SingleGpu) -> list[float]:
    m, s = split(batch_size, sum(placement), truth.limits, single_gpu)
    seconds = _iteration_time(truth, batch_size, gpu_type, placement, single_gpu)
    in_use = sum(placement) * m * (s + 1)
    gradients = (truth.gradient(epoch, in_use) for epoch in range(truth.epochs))
    scale = in_use / truth.limits.initial_batch_size
    return [float(gain(noise.sqr, noise.var, scale)) / seconds for noise in gradients]


def _seconds_from(truth: Truth, rates: Sequence[float]) -> list[float]:
    to_end = [0.0]
    for epoch in reversed(range(truth.epochs)):
        length = truth.epoch_end(epoch) - (truth.epoch_end(epoch - 1) if epoch else 0.0)
        to_end.append(to_end[-1] + length / rates[epoch])
    return to_end[::-1]


def _iteration_time(truth: Truth, batch_size: int, gpu_type: str, placement: Placement, single_gpu: SingleGpu) -> float:
    m, s = split(batch_size, sum(placement), truth.limits, single_gpu)
    passes = truth.passes(gpu_type, placement, m)
    return passes.iteration_time_s + s * passes.grad_time_s


def _packed_placements(cluster: Cluster, gpu_type: str) -> list[Placement]:
    """For 1, 2, 3 … GPUs the placement on the fewest nodes: the largest ones, filled one after the other."""
    nodes = sorted((node.num_gpus for node in cluster if node.schedulable and node.gpu_type == gpu_type), reverse=True)
    placements: list[Placement] = []
    for index, num_gpus in enumerate(nodes):
        full = tuple(nodes[:index])
        placements += [(*full, count) for count in range(1, num_gpus + 1)]
    return placements
