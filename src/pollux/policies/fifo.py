"""First in, first out: jobs run on what they requested, from start to end."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.core import Plan, Snapshot
from pollux.policies.base import Policy
from pollux.policies.packing import plan_in_order, settled


@dataclass
class Fifo(Policy):
    """First come, first served; nobody is pre-empted.

    Higher priorities go first, then earlier submissions. The first job that does not fit blocks all behind it, even
    one that the cluster can never hold. A running job that cannot stay as it is (its node is gone, its size is not
    what it requested) queues again, in its old place.
    """

    backfill: bool = False
    """Let jobs that fit pass one that does not; large jobs may wait for long."""

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        queue = sorted(snapshot.jobs.values(), key=lambda job: (-job.spec.priority, job.sequence))
        running = settled(queue, snapshot.cluster)
        stays = {job.id for job in running}
        waiting = [job for job in queue if job.id not in stays]
        return plan_in_order(snapshot, [*running, *waiting], strict=not self.backfill)
