"""What the cluster and its jobs did over time, sampled after each round."""

from __future__ import annotations

from collections.abc import Iterable

from pollux.core import JobId
from pollux.scheduler import SchedulerState
from pollux.simulator.run import Run


class Timeline:
    """Parallel lists, one entry a round."""

    def __init__(self) -> None:
        self.time_s: list[float] = []
        self.num_gpus: list[int] = []
        """Of the cluster."""
        self.active_jobs: list[int] = []
        """Submitted and not ended: the contention."""
        self.running_jobs: list[int] = []
        """Those that hold GPUs."""
        self.gpus_held: list[int] = []
        self.gpus_training: list[int] = []
        """Those of them whose jobs train: all but those that wait for replicas."""
        self.throughput: list[float] = []
        """Examples a second, of all jobs that train."""
        self.goodput: list[float] = []
        """Useful examples a second."""
        self.efficiency: list[float | None] = []
        """Statistical efficiency, weighted by GPUs; None while nothing trains."""

    def sample(self, now: float, state: SchedulerState, runs: Iterable[Run]) -> None:
        throughput = goodput = weighted = 0.0
        training = num_runs = 0
        for run in runs:
            num_runs += 1
            if run.trains(now):
                training += run.shape.num_gpus
                weighted += run.shape.num_gpus * run.efficiency
                throughput += run.throughput
                goodput += run.throughput * run.efficiency
        self.time_s.append(now)
        self.num_gpus.append(state.cluster.num_gpus)
        self.active_jobs.append(len(state.jobs))
        self.running_jobs.append(num_runs)
        self.gpus_held.append(sum(state.occupancy.used.values()))
        self.gpus_training.append(training)
        self.throughput.append(throughput)
        self.goodput.append(goodput)
        self.efficiency.append(weighted / training if training else None)

    def offered_gpu_s(self, start_s: float, end_s: float) -> float:
        """GPU-seconds that the cluster had between two moments; its size counts from each sample to the next."""
        total, since = 0.0, start_s
        size = self.num_gpus[0] if self.num_gpus else 0
        for time_s, next_size in zip(self.time_s, self.num_gpus, strict=True):
            until = min(max(time_s, since), end_s)
            total += size * (until - since)
            since, size = until, next_size
        return total + size * (end_s - since)

    def mean_efficiency(self) -> float | None:
        """Statistical efficiency over the whole run, weighted by GPUs that trained."""
        known = [(e, g) for e, g in zip(self.efficiency, self.gpus_training, strict=True) if e is not None]
        weight = sum(gpus for _, gpus in known)
        return sum(efficiency * gpus for efficiency, gpus in known) / weight if weight else None

    def mean_contention(self) -> float:
        """Active jobs, averaged over the rounds that had any."""
        busy = [count for count in self.active_jobs if count]
        return sum(busy) / len(busy) if busy else 0.0


class History:
    """What one job did: parallel lists, one entry for each change. While it holds no GPUs, all are zero."""

    def __init__(self) -> None:
        self.time_s: list[float] = []
        self.num_gpus: list[int] = []
        self.num_nodes: list[int] = []
        self.batch_size: list[int] = []
        """Total, of one step."""
        self.efficiency: list[float] = []
        """Statistical efficiency at that batch size, also before its replicas are ready."""
        self.goodput: list[float] = []
        """Useful examples a second; zero until its replicas are ready."""

    def note(
        self, now: float, num_gpus: int, num_nodes: int, batch_size: int, efficiency: float, goodput: float
    ) -> None:
        """What is true from now on; written down only if it was not true before."""
        latest = (num_gpus, num_nodes, batch_size, efficiency, goodput)
        columns = (self.num_gpus, self.num_nodes, self.batch_size, self.efficiency, self.goodput)
        if self.time_s and latest == tuple(column[-1] for column in columns):
            return
        self.time_s.append(now)
        for column, value in zip(columns, latest, strict=True):
            column.append(value)  # type: ignore[attr-defined]


class Histories:
    """The history of every job that has held GPUs so far."""

    def __init__(self) -> None:
        self.of_job: dict[JobId, History] = {}
        self._holding: set[JobId] = set()

    def sample(self, now: float, runs: Iterable[Run]) -> None:
        holding = set()
        for run in runs:
            job, shape = run.training.id, run.shape
            holding.add(job)
            goodput = run.throughput * run.efficiency if run.trains(now) else 0.0
            history = self.of_job.setdefault(job, History())
            history.note(now, shape.num_gpus, shape.num_nodes, run.training.batch_size, run.efficiency, goodput)
        for job in self._holding - holding:
            self.let_go(job, now)
        self._holding = holding

    def let_go(self, job: JobId, now: float) -> None:
        """It holds nothing from now on. A job that ends between two samples is told of at its end."""
        self._holding.discard(job)
        self.of_job.setdefault(job, History()).note(now, 0, 0, 0, 0.0, 0.0)
