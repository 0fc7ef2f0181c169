"""What the cluster did over time, sampled after each round."""

from __future__ import annotations

from collections.abc import Iterable

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
        self.throughput: list[float] = []
        """Examples a second, of all jobs that train."""
        self.goodput: list[float] = []
        """Useful examples a second."""
        self.efficiency: list[float | None] = []
        """Statistical efficiency, weighted by GPUs; None while nothing trains."""

    def sample(self, now: float, state: SchedulerState, runs: Iterable[Run]) -> None:
        throughput = goodput = weighted = 0.0
        held = training = num_runs = 0
        for run in runs:
            num_runs += 1
            held += run.shape.num_gpus
            if run.trains(now):
                training += run.shape.num_gpus
                weighted += run.shape.num_gpus * run.efficiency
                throughput += run.throughput
                goodput += run.throughput * run.efficiency
        self.time_s.append(now)
        self.num_gpus.append(state.cluster.num_gpus)
        self.active_jobs.append(len(state.jobs))
        self.running_jobs.append(num_runs)
        self.gpus_held.append(held)
        self.throughput.append(throughput)
        self.goodput.append(goodput)
        self.efficiency.append(weighted / training if training else None)
