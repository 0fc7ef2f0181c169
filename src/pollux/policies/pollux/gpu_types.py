"""Which jobs share which GPUs: each GPU type is a problem of its own, and a job runs on one type at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pollux.core import Allocation, Cluster, Job, JobId, Snapshot
from pollux.policies.packing import Free, by_arrival, hold_for, pinned


@dataclass(frozen=True, slots=True)
class Holdings:
    """What jobs hold and could go on holding. Nodes that are gone, drained, smaller now or of a wrong type undo it."""

    by_job: Mapping[JobId, Allocation]
    pinned: Collection[JobId]
    """Those of them that must keep just that."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Holdings:
        free = Free(snapshot.cluster)
        found = pinned(snapshot, free)
        keeping = frozenset(found)
        for job in by_arrival(snapshot.jobs.values()):
            if job.assigned and job.id not in keeping and hold_for(job, job.assigned, free, job.spec.gpu_type):
                found[job.id] = job.assigned
        return cls(found, keeping)


def by_gpu_type(snapshot: Snapshot, holdings: Holdings) -> dict[str, list[Job]]:
    """The jobs that are to run on each type: that which they ask for, else have, else where fewest share the GPUs."""
    free = Free(snapshot.cluster)
    groups: dict[str, list[Job]] = {kind: [] for kind in free.by_type}
    undecided: list[Job] = []
    for job in by_arrival(snapshot.jobs.values()):
        held = holdings.by_job.get(job.id)
        kind = job.spec.gpu_type or (None if held is None else free.gpu_type(held))
        if kind is None:
            undecided.append(job)
        elif kind in groups:
            groups[kind].append(job)
    for job in undecided:
        wide = [kind for kind in free.by_type if _has_room(job, free, kind)]
        if wide:
            groups[max(wide, key=lambda kind: free.by_type[kind] / (1 + len(groups[kind])))].append(job)
    return groups


def _has_room(job: Job, free: Free, gpu_type: str) -> bool:
    """Whether it could run on what is free of that type."""
    on = free.most_on_one_node(gpu_type) if job.spec.single_node else free.by_type[gpu_type]
    return on >= job.spec.gpu_bounds[0]


def second_choices(
    cluster: Cluster, groups: dict[str, list[Job]], allocations: Mapping[JobId, Allocation], settled: set[JobId]
) -> list[str]:
    """Send jobs that went away empty to a type that has GPUs left; the types that now have more jobs.

    Nobody is sent twice: `settled` holds those who were.
    """
    free = Free(cluster)
    for allocation in filter(None, allocations.values()):
        free.hold(allocation)
    left = dict(free.by_type)
    changed: list[str] = []
    for kind, jobs in groups.items():
        for job in [job for job in jobs if not allocations.get(job.id) and job.id not in settled]:
            least = job.spec.gpu_bounds[0]
            wide = [
                other
                for other, count in left.items()
                if other != kind and count >= least and _has_room(job, free, other)
            ]
            if job.spec.gpu_type is None and wide:
                other = max(wide, key=left.__getitem__)
                left[other] -= least
                settled.add(job.id)
                jobs.remove(job)
                groups[other].append(job)
                changed.append(other)
    return sorted(set(changed))
