"""Optimus (Peng et al., EuroSys '18) as the Pollux paper compares with it: the next GPU to whom it helps most.

"Optimus+Oracle": it is told how many iterations each job still has to do and how long one takes on any number of GPUs.
Batch sizes stay as requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import ClassVar, NamedTuple

from pollux.core import Allocation, Cluster, FrozenMap, Job, JobId, JobSpec, Oracle, Plan, Shape, Snapshot
from pollux.policies.base import Policy, truth
from pollux.policies.packing import (
    Claims,
    Free,
    by_arrival,
    hold_for,
    packed_shapes,
    pinned,
    place_all,
    seat_on_one_node,
    type_for,
)

_UNKNOWN = Oracle()


class _Times(dict[int, float | None]):
    """GPUs → seconds of an iteration on the densest placement; None where nobody knows. Looked up when first asked."""

    __slots__ = ("by_shape", "shapes")

    def __init__(self, by_shape: FrozenMap[Shape, float], shapes: tuple[Shape, ...]) -> None:
        super().__init__()
        self.by_shape = by_shape
        self.shapes = shapes

    def __missing__(self, num_gpus: int) -> float | None:
        seconds = self[num_gpus] = self.by_shape.get(self.shapes[num_gpus - 1])
        return seconds


class _Facts(NamedTuple):
    """What does not change from round to round about a job."""

    spec: JobSpec
    least: int
    most: int
    times: _Times


@dataclass
class Optimus(Policy):
    """Every job gets its minimum, in order of submission while GPUs last; the rest goes where it saves most time.

    One GPU at a time goes to the job whose remaining seconds it shortens most, the earliest on ties, until nobody
    gains. Times are those of the densest placement; a job of which nothing is known stays at its minimum. Jobs whose
    number of GPUs does not change stay where they are; the others are placed anew, the smallest first. Jobs that must
    not be pre-empted get their minimum before all others. Those that must be on one node grow where their minimum is.
    """

    needs_oracle: ClassVar[tuple[str, ...]] = ("remaining_iterations", "iteration_time_s")
    adapts_gpus: ClassVar[bool] = True

    _facts: dict[JobId, _Facts] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What was found out about the jobs of the last round, and is still so."""

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        oracle = truth(snapshot, "optimus")
        free = Free(snapshot.cluster)
        left = dict(free.by_type)
        seats = _Seats(snapshot.cluster)
        granted = _minimums(snapshot, free, left, seats)
        selected: list[tuple[Job, int, str]] = []
        remembered: dict[JobId, _Facts] = {}
        for kind in left:
            jobs = by_arrival([snapshot.jobs[job_id] for job_id, its_kind in granted.items() if its_kind == kind])
            shapes = packed_shapes(snapshot.cluster, kind)
            known = [oracle.get(job.id, _UNKNOWN) for job in jobs]
            facts = [self._facts_of(job, its, shapes) for job, its in zip(jobs, known, strict=True)]
            counts = grow(
                [its.least for its in facts],
                [min(its.most, seats.most(job)) for job, its in zip(jobs, facts, strict=True)],
                [1.0 if o.remaining_iterations is None else o.remaining_iterations for o in known],
                [its.times for its in facts],
                left[kind],
            )
            remembered.update((job.id, its) for job, its in zip(jobs, facts, strict=True))
            selected.extend(zip(jobs, counts, [kind] * len(jobs), strict=True))
        self._facts = remembered
        allocations = seats.grown({job.id: count for job, count, _ in selected}, free)
        selected = [item for item in selected if item[0].id not in allocations]
        selected.sort(key=lambda item: item[1])
        place_all(selected, free, allocations)
        return Plan(FrozenMap(allocations))

    def _facts_of(self, job: Job, oracle: Oracle, shapes: tuple[Shape, ...]) -> _Facts:
        """Those of an earlier round, if specification, times and cluster are still the same objects."""
        found = self._facts.get(job.id)
        if found is not None and found.spec is job.spec:
            times = found.times
            if times.by_shape is oracle.iteration_time_s and times.shapes is shapes:
                return found
        times = _Times(oracle.iteration_time_s, shapes)
        return _Facts(job.spec, job.spec.gpu_bounds[0], most_gpus(job, len(shapes)), times)


def most_gpus(job: Job, of_cluster: int) -> int:
    """The most GPUs that the cluster, its maximum and its batch size allow: each GPU needs its share of the batch."""
    spec = job.spec
    most = spec.gpu_bounds[1]
    if most is None or most > of_cluster:
        most = of_cluster
    if spec.limits is None:
        return most
    batch_size = spec.requested_batch_size or spec.limits.initial_batch_size
    return min(most, batch_size // spec.limits.min_per_gpu_batch_size)


def grow(
    counts: Sequence[int],
    most: Sequence[float],
    remaining: Sequence[float],
    times: Sequence[Mapping[int, float | None]],
    left: int,
) -> list[int]:
    """GPUs of each job once `left` more have been given out, one by one to the job that gains most, first on ties.

    counts, most  GPUs that each has at first, and may have
    remaining     iterations that each still has to do
    times         GPUs → seconds of an iteration; a size without is of no use
    """
    found = list(counts)

    def next_bid(index: int, now_s: float | None) -> tuple[float, int, float] | None:
        """Minus the seconds that another GPU saves, whose it would be, and the iteration time then; None: no gain."""
        count = found[index]
        if now_s is None or count >= most[index]:
            return None
        then_s = times[index][count + 1]
        if then_s is None:
            return None
        gain_s = (now_s - then_s) * remaining[index]
        return (-gain_s, index, then_s) if gain_s > 0 else None

    first = [next_bid(index, times[index][count]) for index, count in enumerate(found)]
    bids = [bid for bid in first if bid is not None]
    heapify(bids)
    while left > 0 and bids:
        _, index, then_s = bids[0]
        found[index] += 1
        left -= 1
        bid = next_bid(index, then_s)
        if bid is None:
            heappop(bids)
        else:
            heapreplace(bids, bid)
    return found


class _Seats:
    """Where the jobs are that must be on one node. Others give way to them, as their GPUs may be anywhere."""

    def __init__(self, cluster: Cluster) -> None:
        self._free = Free(cluster)
        self._by_job: dict[JobId, Allocation] = {}

    def seat(self, job: Job, left: dict[str, int]) -> bool:
        """Its minimum on one node, its own if there is room; `left`, GPUs of each type, is lowered by it."""
        least = job.spec.gpu_bounds[0]
        here = Allocation(FrozenMap(dict.fromkeys(job.assigned.gpus, least)))
        kind = self._free.gpu_type(here)
        if kind is not None and left[kind] >= least and hold_for(job, here, self._free, job.spec.gpu_type):
            left[kind] -= least
            self._by_job[job.id] = here
        elif (seat := seat_on_one_node(job, least, self._free, left, Claims([]))) is not None:
            self._by_job[job.id] = seat
        return job.id in self._by_job

    def gpu_type(self, job: Job) -> str:
        kind = self._free.gpu_type(self._by_job[job.id])
        assert kind is not None, f"the GPUs of {job.id} are of one node"
        return kind

    def most(self, job: Job) -> float:
        """GPUs that it can have where it is; no limit for others."""
        seat = self._by_job.get(job.id)
        return inf if seat is None else seat.num_gpus + self._free.on_node(*seat.gpus)

    def grown(self, counts: Mapping[JobId, int], free: Free) -> dict[JobId, Allocation]:
        """What these jobs hold if each is to have so many GPUs; less where the node has not so many. Held in `free`."""
        found: dict[JobId, Allocation] = {}
        for job_id, seat in self._by_job.items():
            (node,) = seat.gpus
            more = min(counts[job_id] - seat.num_gpus, self._free.on_node(node))
            if more:
                self._free.hold(Allocation.of({node: more}))
            found[job_id] = Allocation.of({node: seat.num_gpus + more})
            free.hold(found[job_id])
        return found


def _minimums(snapshot: Snapshot, free: Free, left: dict[str, int], seats: _Seats) -> dict[JobId, str]:
    """The jobs that get their minimum, and the GPU type of each; `left` is lowered by what they get."""
    kept = pinned(snapshot, Free(snapshot.cluster))
    order = by_arrival(snapshot.jobs.values())
    if kept:
        order.sort(key=lambda job: job.id not in kept)
    granted: dict[JobId, str] = {}
    for job in order:
        least = job.spec.gpu_bounds[0]
        if job.spec.single_node:
            if seats.seat(job, left):
                granted[job.id] = seats.gpu_type(job)
            continue
        kind = free.gpu_type(kept[job.id]) if job.id in kept else type_for(job, least, free, left)
        if kind is not None:
            left[kind] -= least
            granted[job.id] = kind
    return granted
