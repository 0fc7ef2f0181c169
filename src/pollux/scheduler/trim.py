"""What is left of a plan when it arrives: the world may have moved on since the snapshot that it was made from."""

from __future__ import annotations

from collections.abc import Mapping

from pollux.core import Allocation, Cluster, Job, JobId, NodeId, Phase, Plan


def trimmed(plan: Plan, jobs: Mapping[JobId, Job], cluster: Cluster, now_s: float) -> dict[JobId, Allocation]:
    """The part of a plan that can still be carried out.

    Jobs that are gone, or whose next try is not due yet, drop out; nodes that are gone are taken off. Where the rest is
    outside a job's bounds, or on several nodes for a job that must be on one, or more than its nodes have after the
    jobs that arrived before it, the job keeps what it has if nobody else was given that, and waits for the next round.
    """
    room = dict(cluster.capacity)
    target: dict[JobId, Allocation] = {}
    live = [jobs[job_id] for job_id in plan.allocations if job_id in jobs]
    left_out: list[Job] = []
    for job in sorted(live, key=lambda job: job.sequence):
        if not job.may_be_given_gpus_at(now_s):
            continue
        wanted = plan.allocations[job.id]
        if not all(node in room for node in wanted.gpus):
            wanted = Allocation.of({node: count for node, count in wanted.gpus.items() if node in room})
        if _in_bounds(job, wanted) and _fits(room, wanted):
            _take(room, wanted)
            target[job.id] = wanted
        else:
            left_out.append(job)
    for job in left_out:
        # Nodes without room of their own are drained or gone: nobody else was given anything there.
        if job.phase is not Phase.STOPPING and job.assigned and _fits(room, job.assigned):
            _take(room, job.assigned)
            target[job.id] = job.assigned
    return target


def _in_bounds(job: Job, wanted: Allocation) -> bool:
    fewest, most = job.spec.gpu_bounds
    in_size = wanted.num_gpus >= fewest and (most is None or wanted.num_gpus <= most)
    return in_size and job.spec.can_be_on(len(wanted.gpus))


def _fits(room: dict[NodeId, int], wanted: Allocation) -> bool:
    return all(count <= room.get(node, count) for node, count in wanted.gpus.items())


def _take(room: dict[NodeId, int], wanted: Allocation) -> None:
    for node, count in wanted.gpus.items():
        if node in room:
            room[node] -= count
