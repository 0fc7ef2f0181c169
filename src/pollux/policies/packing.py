"""Placement that policies share: counting what is free, choosing nodes, keeping jobs where they are.

Nodes are chosen by the rule of the published baselines: again and again the node with most free GPUs. One job never
gets GPUs of two types. A job that must be on one node gets the fullest that has room, so that larger ones find theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from pollux.core import Allocation, Cluster, FrozenMap, Job, JobId, NodeId, Plan, Shape, Snapshot


class _Layout(NamedTuple):
    """The schedulable nodes of a cluster, by GPU type (in alphabetical order) and then by id."""

    nodes: dict[str, tuple[NodeId, ...]]
    sizes: dict[str, tuple[int, ...]]
    totals: dict[str, int]
    places: dict[NodeId, tuple[str, int]]
    """Node → its type, and its position among the nodes of that type."""
    on_one_node: dict[tuple[NodeId, int], Allocation]
    """Allocations that were made before: most of all that are ever made, and checking them again takes its time."""


@lru_cache(maxsize=16)
def _layout(cluster: Cluster) -> _Layout:
    by_type = {kind: [n for n in cluster if n.schedulable and n.gpu_type == kind] for kind in cluster.gpu_types}
    return _Layout(
        {kind: tuple(node.id for node in nodes) for kind, nodes in by_type.items()},
        {kind: tuple(node.num_gpus for node in nodes) for kind, nodes in by_type.items()},
        {kind: sum(node.num_gpus for node in nodes) for kind, nodes in by_type.items()},
        {node.id: (kind, position) for kind, nodes in by_type.items() for position, node in enumerate(nodes)},
        {},
    )


class Free:
    """GPUs that nobody has been given yet: at first all of the schedulable nodes, whoever holds them now."""

    __slots__ = ("_layout", "_left", "by_type")

    def __init__(self, cluster: Cluster) -> None:
        self._layout = _layout(cluster)
        self._left = {kind: list(sizes) for kind, sizes in self._layout.sizes.items()}
        self.by_type = dict(self._layout.totals)
        """Free GPUs of each type, in alphabetical order of the types. To be read only."""

    @property
    def total(self) -> int:
        return sum(self.by_type.values())

    def gpu_type(self, allocation: Allocation) -> str | None:
        """The type of all its GPUs; None if there is none, it is not one, or a node is gone or not schedulable."""
        places = self._layout.places
        types = {places[node][0] if node in places else None for node in allocation.gpus}
        return types.pop() if len(types) == 1 else None

    def hold(self, allocation: Allocation, gpu_type: str | None = None) -> bool:
        """Give out exactly these GPUs, if all of them are free and of one type: that one, if it is given."""
        places, left = self._layout.places, self._left
        gpus = allocation.gpus.items()
        for node, count in gpus:
            place = places.get(node)
            if place is None:
                return False
            kind, position = place
            if gpu_type is None:
                gpu_type = kind
            if kind != gpu_type or left[kind][position] < count:
                return False
        for node, count in gpus:
            kind, position = places[node]
            left[kind][position] -= count
            self.by_type[kind] -= count
        return True

    def take(self, num_gpus: int, gpu_type: str | None = None) -> Allocation | None:
        """Give out `num_gpus` ≥ 1 GPUs of one type, or None if there are not so many.

        Again and again from the node with most free GPUs (lowest id on ties), as many as it has and are still needed.
        Without a type: of that which has most free GPUs (first by name on ties).
        """
        kind = widest(self.by_type, num_gpus) if gpu_type is None else gpu_type
        if kind is None or self.by_type.get(kind, 0) < num_gpus:
            return None
        left, nodes = self._left[kind], self._layout.nodes[kind]
        self.by_type[kind] -= num_gpus
        most = max(left)
        if most >= num_gpus:
            position = left.index(most)
            left[position] -= num_gpus
            known, key = self._layout.on_one_node, (nodes[position], num_gpus)
            return known.get(key) or known.setdefault(key, Allocation(FrozenMap({nodes[position]: num_gpus})))
        return self._take_apart(num_gpus, left, nodes)

    def on_node(self, node: NodeId) -> int:
        """Free GPUs of a schedulable node."""
        kind, position = self._layout.places[node]
        return self._left[kind][position]

    def most_on_one_node(self, gpu_type: str) -> int:
        """Free GPUs of the node of that type that has most."""
        return max(self._left.get(gpu_type, ()), default=0)

    def take_together(self, num_gpus: int, gpu_type: str, claims: Mapping[NodeId, int]) -> Allocation | None:
        """Give out so many GPUs of one node of that type, or None if no node has them.

        Of a node where they are free beside what others claim, if there is one; among those of the fullest (lowest id
        on ties).
        """
        left, nodes = self._left.get(gpu_type, []), self._layout.nodes.get(gpu_type, ())
        roomy = [position for position, count in enumerate(left) if count >= num_gpus]
        if not roomy:
            return None
        best = min(roomy, key=lambda at: (left[at] - claims.get(nodes[at], 0) < num_gpus, left[at], at))
        left[best] -= num_gpus
        self.by_type[gpu_type] -= num_gpus
        return Allocation(FrozenMap({nodes[best]: num_gpus}))

    @staticmethod
    def _take_apart(num_gpus: int, left: list[int], nodes: Sequence[NodeId]) -> Allocation:
        gpus: dict[NodeId, int] = {}
        # Every node but the last is emptied, so the order in which they are taken is known from the start.
        for position in sorted(range(len(left)), key=left.__getitem__, reverse=True):
            count = min(left[position], num_gpus)
            gpus[nodes[position]] = count
            left[position] -= count
            num_gpus -= count
            if not num_gpus:
                break
        return Allocation(FrozenMap(gpus))


def hold_for(job: Job, held: Allocation, free: Free, gpu_type: str | None) -> bool:
    """Give out exactly these GPUs to the job, if it may have them together and `Free.hold` has them."""
    return job.spec.can_be_on(len(held.gpus)) and free.hold(held, gpu_type)


def widest(left: Mapping[str, int], num_gpus: int) -> str | None:
    """The GPU type with most GPUs left (the first in the map on ties); None if even that has too few."""
    best, most = None, num_gpus - 1
    for kind, count in left.items():
        if count > most:
            best, most = kind, count
    return best


def type_for(job: Job, num_gpus: int, free: Free, left: Mapping[str, int]) -> str | None:
    """The GPU type for so many GPUs of the job: what it asks for, else has, else the widest. None if none has them."""
    wanted = job.spec.gpu_type
    if wanted is None and len(left) == 1:
        (only,) = left
        return only if left[only] >= num_gpus else None
    if wanted is not None:
        return wanted if left.get(wanted, 0) >= num_gpus else None
    own = free.gpu_type(job.assigned)
    return own if own is not None and left[own] >= num_gpus else widest(left, num_gpus)


@lru_cache(maxsize=64)
def packed_shapes(cluster: Cluster, gpu_type: str) -> tuple[Shape, ...]:
    """The shapes of 1, 2 … GPUs of that type on the fewest nodes of the empty cluster: the largest nodes first."""
    nodes = [node for node in cluster if node.schedulable and node.gpu_type == gpu_type]
    shapes: list[Shape] = []
    racks: set[str] = set()
    for count, node in enumerate(sorted(nodes, key=lambda node: -node.num_gpus), 1):
        racks.add(node.rack)
        before = len(shapes)
        shapes += [Shape(before + extra, count, len(racks)) for extra in range(1, node.num_gpus + 1)]
    return tuple(shapes)


def by_arrival(jobs: Iterable[Job]) -> list[Job]:
    """In order of submission."""
    return sorted(jobs, key=attrgetter("sequence"))


def requested_size(job: Job) -> int:
    """The GPUs that the owner asked for (the minimum if nobody said), within the bounds of the job."""
    spec = job.spec
    least, most = spec.gpu_bounds
    size = max(spec.requested_gpus or least, least)
    return size if most is None else min(size, most)


def pinned(snapshot: Snapshot, free: Free) -> dict[JobId, Allocation]:
    """What jobs that must not be pre-empted keep; it is held in `free`.

    Those whose nodes are gone, drained or of another type now, or who have less than their minimum, are not among
    them: they must change, and queue like everybody else. One with more than its maximum keeps the maximum.
    """
    kept: dict[JobId, Allocation] = {}
    for job in by_arrival(job for job in snapshot.jobs.values() if not job.spec.preemptible and job.allocation):
        # The second is where a job trains that is being resized: it can stay there if the nodes to come are gone.
        for held in (job.assigned, job.allocation):
            least, most = job.spec.gpu_bounds
            allocation = held if most is None or held.num_gpus <= most else _largest_part(held, most)
            if allocation.num_gpus >= least and hold_for(job, allocation, free, job.spec.gpu_type):
                kept[job.id] = allocation
                break
    return kept


def _largest_part(allocation: Allocation, num_gpus: int) -> Allocation:
    """So many GPUs of it, on the nodes where it has most."""
    gpus: dict[NodeId, int] = {}
    for node, count in sorted(allocation.gpus.items(), key=lambda item: -item[1]):
        gpus[node] = min(count, num_gpus)
        num_gpus -= gpus[node]
    return Allocation.of(gpus)


def settled(jobs: Iterable[Job], cluster: Cluster) -> list[Job]:
    """Those of the jobs that hold what they requested and can stay there, in the order given."""
    free, found = Free(cluster), []
    for job in jobs:
        held = job.assigned
        if held.num_gpus == requested_size(job) and hold_for(job, held, free, job.spec.gpu_type):
            found.append(job)
    return found


def plan_in_order(snapshot: Snapshot, order: Sequence[Job], *, strict: bool = False) -> Plan:
    """The plan of a policy that does not adapt sizes: who goes first gets the requested size, while there is room.

    Whoever does not fit waits, and those behind it may still fit; with `strict` they wait as well. Selected jobs stay
    where they are if they can, and those that must be on one node choose theirs in turn; then the others are placed,
    in that order. Pinned jobs go before all.
    """
    free = Free(snapshot.cluster)
    allocations = pinned(snapshot, free)
    left = dict(free.by_type)
    """Free GPUs of each type beside those of jobs in `moving`."""
    claims = Claims(job for job in order if job.id not in allocations)
    moving: list[tuple[Job, int, str]] = []
    for job in order:
        if job.id in allocations:
            continue
        size = requested_size(job)
        if job.spec.single_node:
            seat = seat_on_one_node(job, size, free, left, claims)
            if seat is not None:
                allocations[job.id] = seat
                continue
        elif (kind := type_for(job, size, free, left)) is not None:
            left[kind] -= size
            claims.settle(job)
            if job.assigned.num_gpus == size and free.hold(job.assigned, kind):
                allocations[job.id] = job.assigned
            else:
                moving.append((job, size, kind))
            continue
        if strict or not any(left.values()):
            break
    place_all(moving, free, allocations)
    return Plan(FrozenMap(allocations))


class Claims:
    """GPUs of each node on which jobs are that have not been placed yet; counted only if some must be on one node."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        jobs = list(jobs)
        self.by_node: Counter[NodeId] = Counter()
        if any(job.spec.single_node for job in jobs):
            for job in jobs:
                self.by_node.update(job.assigned.gpus)

    def settle(self, job: Job) -> None:
        """It has been placed, or will be somewhere."""
        if self.by_node:
            self.by_node.subtract(job.assigned.gpus)


def seat_on_one_node(job: Job, size: int, free: Free, left: dict[str, int], claims: Claims) -> Allocation | None:
    """Give a job so many GPUs of one node: of its own if it can stay; None if no node has them.

    `left`, what may be given of each type, is lowered. It is put where others have claims only if it must be.
    """
    claims.settle(job)
    own = free.gpu_type(job.assigned)
    kinds = [kind for kind in left if job.spec.gpu_type in (None, kind) and left[kind] >= size]
    for kind in sorted(kinds, key=lambda kind: (kind != own, -left[kind])):
        stays = kind == own and job.assigned.num_gpus == size and hold_for(job, job.assigned, free, kind)
        seat = job.assigned if stays else free.take_together(size, kind, claims.by_node)
        if seat is not None:
            left[kind] -= size
            return seat
    return None


def place_all(selected: Iterable[tuple[Job, int, str]], free: Free, allocations: dict[JobId, Allocation]) -> None:
    """Add to `allocations` so many GPUs of that type for each job; together they must not be more than are free.

    A job that holds just so many stays, if it can; then the others are placed, in the order given.
    """
    moving: list[tuple[Job, int, str]] = []
    for job, size, kind in selected:
        held = job.assigned
        if held.num_gpus == size and free.hold(held, kind):
            allocations[job.id] = held
        else:
            moving.append((job, size, kind))
    for job, size, kind in moving:
        allocation = free.take(size, kind)
        assert allocation is not None, f"{size} GPUs of {kind} were counted for {job.id}, but are not there"
        allocations[job.id] = allocation
