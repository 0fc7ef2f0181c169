"""Jobs that wait for each other's GPUs, as in a swap: which of them gives way, and what it holds meanwhile.

Nobody is stopped as long as one of them can make room while it trains. It gives up, GPU by GPU, what others are short
of, and goes on with the rest of what it holds; where its bounds forbid that, it takes up what is free of its target, or
else GPUs that nobody is to hold, in place of what it gives up. All of this leads towards the target, which stays.

Why it ends: take what each job holds or is to hold, on each node the larger of both, and sum up by how much that is
more than the node has. Jobs wait for each other only while this sum is above 0. Whoever gives way lowers it, as does a
stop; nobody who starts, comes to its target or keeps what it has raises it, and each of these settles one job more. So
a plan is carried out in no more steps than this sum and twice the number of jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pollux.core import Allocation, Cluster, Job, JobId, NodeId

if TYPE_CHECKING:
    from pollux.scheduler.state import SchedulerState

NOTHING = Allocation()


def way_out(state: SchedulerState, blocked: Sequence[Job]) -> tuple[Job, Allocation] | None:
    """Who gives way, and what it is to hold then: nothing if it must be stopped. None if nobody is in the way.

    For moments with nothing in flight, when all jobs but the `blocked` ones hold what they are to hold. The one that
    loses least gives way, the latest to arrive among equals.
    """
    standstill = Standstill.of(state, blocked)
    in_the_way = [job for job in blocked if standstill.relief(job, NOTHING)]
    losses = _losses(in_the_way)
    for uses_spare in (False, True):
        steps = [(job, after) for job in in_the_way if (after := standstill.step(job, uses_spare)) is not None]
        if steps:
            return min(steps, key=lambda step: (losses[step[0].id], -step[0].sequence))
    stopped = sorted(in_the_way, key=lambda job: (not job.spec.preemptible, losses[job.id], -job.sequence))
    return (stopped[0], NOTHING) if stopped else None


def _losses(jobs: Sequence[Job]) -> dict[JobId, float]:
    """GPU-seconds that a re-allocation costs each of them, as its agent has measured it.

    One that has measured nothing yet counts as the slowest of the others: giving way should not be a leap in the dark.
    """
    delays_s = {job.id: None if job.model is None else job.model.realloc_delay_s for job in jobs}
    slowest_s = max((delay_s for delay_s in delays_s.values() if delay_s is not None), default=1.0)
    return {
        job.id: (slowest_s if (delay_s := delays_s[job.id]) is None else delay_s) * job.allocation.num_gpus
        for job in jobs
    }


@dataclass(frozen=True, slots=True)
class Standstill:
    """What there is to share at a moment when nobody gets any further."""

    cluster: Cluster
    target: Mapping[JobId, Allocation]
    free: Mapping[NodeId, int]
    """GPUs that nobody holds."""
    spare: Mapping[NodeId, int]
    """Those of them that nobody is to hold either."""
    lacking: Mapping[NodeId, int]
    """GPUs that jobs are to get beyond the free ones, where there are too few: others must give them up."""

    @classmethod
    def of(cls, state: SchedulerState, blocked: Sequence[Job]) -> Standstill:
        growth: Counter[NodeId] = Counter()
        for job in blocked:
            growth.update(state.target[job.id].beyond(job.allocation).gpus)
        used = state.occupancy.used
        left = {node: count - used.get(node, 0) for node, count in state.cluster.capacity.items()}
        return cls(
            state.cluster,
            state.target,
            {node: count for node, count in left.items() if count > 0},
            {node: count - growth[node] for node, count in left.items() if count > growth[node]},
            {node: count - left.get(node, 0) for node, count in growth.items() if count > left.get(node, 0)},
        )

    def relief(self, job: Job, after: Allocation) -> int:
        """How many GPUs that are lacking the job makes room for, if it comes to hold `after`."""
        wanted = self.target[job.id]
        before, left = job.allocation.beyond(wanted).gpus, after.beyond(wanted).gpus
        return sum(
            min(count - left.get(node, 0), self.lacking[node]) for node, count in before.items() if node in self.lacking
        )

    def step(self, job: Job, uses_spare: bool) -> Allocation | None:
        """What the job can hold, within its bounds, that makes most room for others; None if it can make none.

        Of its target, what it holds or is free; of the rest that it holds, what nobody lacks, and more if it must; with
        `uses_spare` others in place of those. Where it serves as well, no replica joins that it does not have already.
        """
        wanted = self.target[job.id]
        held, free = job.allocation.gpus, self.free
        kept = {node: min(count, held.get(node, 0)) for node, count in wanted.gpus.items()}
        taken = {node: min(count, held.get(node, 0) + free.get(node, 0)) for node, count in wanted.gpus.items()}
        fewest, most = job.spec.gpu_bounds
        found, most_relief = None, 0
        for nodes in self._places(job, uses_spare):
            for base in (kept, taken):
                after = self._filled(job, {node: base.get(node, 0) for node in nodes}, uses_spare)
                is_in_bounds = after.num_gpus >= fewest and (most is None or after.num_gpus <= most)
                if is_in_bounds and (relief := self.relief(job, after)) > most_relief:
                    found, most_relief = after, relief
        return found

    def _places(self, job: Job, uses_spare: bool) -> Iterator[list[NodeId]]:
        """Nodes that the job may be on at the same time: one if it must, else those of one GPU type.

        Of types that it holds or is to hold only: no plan meant it to run on others.
        """
        own = {node for node in (*job.allocation.gpus, *self.target[job.id].gpus) if node in self.cluster}
        types = {self.cluster[node].gpu_type for node in own}
        nodes = sorted(own | {node for node in self.spare if uses_spare and self.cluster[node].gpu_type in types})
        if job.spec.single_node:
            yield from ([node] for node in nodes)
        else:
            yield from ([node for node in nodes if self.cluster[node].gpu_type == kind] for kind in sorted(types))

    def _filled(self, job: Job, base: Mapping[NodeId, int], uses_spare: bool) -> Allocation:
        """`base` and more on its nodes: of what nobody lacks as much as the job has, else no more than it must have."""
        surplus = job.allocation.beyond(self.target[job.id]).gpus
        lacked = {node: min(count, self.lacking.get(node, 0)) for node, count in surplus.items()}
        harmless = {node: count - lacked[node] for node, count in surplus.items()}
        fewest, most = job.spec.gpu_bounds
        size = job.allocation.num_gpus if most is None else min(job.allocation.num_gpus, most)
        filled = Counter(base)
        for source, limit in ((harmless, size), (self.spare if uses_spare else {}, fewest), (lacked, fewest)):
            for node in base:
                filled[node] += max(0, min(source.get(node, 0), limit - filled.total()))
        return Allocation.of(filled)
