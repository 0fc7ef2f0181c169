"""Tiresias (Gu et al., NSDI '19) as the Pollux paper compares with it: least attained service, in two queues.

Sizes and batch sizes stay as requested. Without promotion, without profiling for skew, like the published artifact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.core import JobId, Plan, Snapshot, checks
from pollux.errors import InvalidSpec
from pollux.policies.base import Policy
from pollux.policies.packing import by_arrival, plan_in_order


@dataclass
class Tiresias(Policy):
    """Jobs that have had little service go before those that have had much; needs to know nothing about them.

    The first queue is in order of submission. A job whose GPU-seconds reach the threshold joins the tail of the second
    queue and stays there. Who fits into the GPUs that those before it leave, runs; who does not, loses its GPUs.

    The order of the second queue is remembered from round to round. Jobs over the threshold that are not remembered
    (after a restart of the scheduler, or a pause) join its tail in order of submission.
    """

    service_threshold_gpu_s: float = 57_600.0  # 16 GPU-hours: the artifact's value, tuned for its workload
    """GPU-seconds, waiting for replicas included, after which a job moves to the second queue."""

    _demoted: dict[JobId, None] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The second queue: a dict for its order."""

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "service_threshold_gpu_s", self.service_threshold_gpu_s, 0, above=True)

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        jobs, now_s = snapshot.jobs, snapshot.time_s
        demoted: dict[JobId, None] = {job_id: None for job_id in self._demoted if job_id in jobs}
        first = []
        for job in by_arrival(jobs.values()):
            if job.id in demoted:
                continue
            if job.attained_gpu_s_at(now_s) >= self.service_threshold_gpu_s:
                demoted[job.id] = None
            else:
                first.append(job)
        self._demoted = demoted
        return plan_in_order(snapshot, [*first, *(jobs[job_id] for job_id in demoted)])
