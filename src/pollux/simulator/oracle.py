"""The truth about a job's future, for policies that declare that they need it (SRTF, Optimus)."""

from __future__ import annotations

from pollux.core import Cluster, FrozenMap, Oracle, Shape
from pollux.errors import InvalidModel
from pollux.simulator.batch_split import SingleGpu, split
from pollux.simulator.options import Options
from pollux.simulator.run import Run, Training
from pollux.simulator.truth import Placement, Truth


class OracleSource:
    """Answers about the jobs of one world, each as its owner configured it. Tables are made once and kept."""

    def __init__(self, options: Options) -> None:
        real = SingleGpu.ABOVE_INITIAL if options.agent.single_gpu_accumulation else SingleGpu.FREE
        self._single_gpu = real
        self._believed_single_gpu = SingleGpu.ALWAYS if options.world.oracle_doubles_one_gpu else real
        self._times: dict[tuple[str, int, str, Cluster], FrozenMap[Shape, float]] = {}
        self._rates: dict[tuple[str, int, int, str, Cluster], list[float]] = {}
        self._seconds: dict[tuple[str, int, int, str, Cluster], list[float]] = {}

    def ask(self, training: Training, run: Run | None, cluster: Cluster, now: float) -> Oracle:
        """The truth about one job at this moment."""
        spec, truth = training.spec, training.truth
        batch_size = spec.requested_batch_size or truth.limits.initial_batch_size
        gpu_type = spec.gpu_type or (cluster.gpu_types or truth.gpu_types)[0]
        progress = training.progress if run is None else run.progress_at(now)
        return Oracle(
            remaining_iterations=_remaining_iterations(truth, training.epoch, batch_size),
            remaining_s=self._remaining_s(training, progress, batch_size, gpu_type, cluster),
            iteration_time_s=self._iteration_times(truth, batch_size, gpu_type, cluster),
        )

    def _iteration_times(
        self, truth: Truth, batch_size: int, gpu_type: str, cluster: Cluster
    ) -> FrozenMap[Shape, float]:
        """By packed shape, up to where the truth is known."""
        key = truth.name, batch_size, gpu_type, cluster
        if (found := self._times.get(key)) is None:
            times: dict[Shape, float] = {}
            for placement in _packed_placements(cluster, gpu_type):
                try:
                    seconds = _iteration_time(truth, batch_size, gpu_type, placement, self._believed_single_gpu)
                except InvalidModel:
                    break
                times[Shape(sum(placement), len(placement))] = seconds
            found = self._times[key] = FrozenMap(times)
        return found

    def _remaining_s(
        self, training: Training, progress: float, batch_size: int, gpu_type: str, cluster: Cluster
    ) -> float:
        """If it keeps training on the GPUs that its owner requested, as closely together as this cluster allows."""
        truth = training.truth
        num_gpus = training.spec.requested_gpus or 1
        key = truth.name, batch_size, num_gpus, gpu_type, cluster
        if key not in self._rates:
            self._rates[key], self._seconds[key] = self._tabulate(truth, batch_size, num_gpus, gpu_type, cluster)
        left = truth.epoch_end(training.epoch) - progress
        return max(left, 0.0) / self._rates[key][training.epoch] + self._seconds[key][training.epoch + 1]

    def _tabulate(
        self, truth: Truth, batch_size: int, num_gpus: int, gpu_type: str, cluster: Cluster
    ) -> tuple[list[float], list[float]]:
        """Speed in each epoch, and seconds from the start of each epoch to the end of training."""
        placements = _packed_placements(cluster, gpu_type)
        placement = placements[min(num_gpus, len(placements)) - 1] if placements else (num_gpus,)
        m, s = split(batch_size, sum(placement), truth.limits, self._single_gpu)
        seconds = _iteration_time(truth, batch_size, gpu_type, placement, self._single_gpu)
        in_use = sum(placement) * m * (s + 1)
        scale = in_use / truth.limits.initial_batch_size
        rates = []
        for epoch in range(truth.epochs):
            noise = truth.gradient(epoch, in_use)
            rates.append((noise.var + noise.sqr) / (noise.var / scale + noise.sqr) / seconds)
        to_end = [0.0]
        for epoch in reversed(range(truth.epochs)):
            length = truth.epoch_end(epoch) - (truth.epoch_end(epoch - 1) if epoch else 0.0)
            to_end.append(to_end[-1] + length / rates[epoch])
        return rates, to_end[::-1]


def _remaining_iterations(truth: Truth, epoch: int, batch_size: int) -> float:
    """Counted from the end of the present epoch, as the artifact does; 1 in the last one."""
    last = truth.epochs - 1
    if epoch >= last:
        return 1.0
    return truth.iterations(last, batch_size) - truth.iterations(epoch, batch_size)


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
