"""Pollux as a policy: from a snapshot to problems, one a GPU type, and from their solutions to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pollux.core import Allocation, Cluster, FrozenMap, Job, JobId, Node, Plan, Shape, Snapshot, checks
from pollux.errors import InvalidSpec, UnknownName
from pollux.goodput import BatchOptions, GoodputModel
from pollux.goodput.numerics import FloatArray
from pollux.policies.base import Policy
from pollux.policies.packing import Free, by_arrival, packed_shapes, pinned
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.packed import Packed
from pollux.policies.pollux.problem import Problem
from pollux.policies.pollux.solver import Budget, Solver
from pollux.policies.pollux.speedups import Speedups, spreads_known_to

USUAL_DELAY_S = 30.0
"""What a re-allocation costs before a job has measured it (paper, section 5.3)."""


@dataclass
class Pollux(Policy):
    """Goodput, shared fairly: GPUs where they speed up jobs most over their fair share; batch sizes follow."""

    reads_models: ClassVar[bool] = True
    adapts_gpus: ClassVar[bool] = True
    adapts_batch: ClassVar[bool] = True

    solver: str = "packed"
    """`packed`, fast and deterministic, or `genetic`, the paper's search."""
    p: float = -1.0
    """Of the power mean: 1 seeks throughput, −1 is the paper's default, −10 hardly sees anybody but the slowest."""
    realloc_delay_s: float | None = None
    """What a re-allocation is taken to cost; None: as each job has measured it, 30 s before."""
    growth: int = 2
    """A job may get so many times the GPUs that it has been measured with."""
    avoid_interference: bool = True
    """At most one job on several nodes may use any node."""
    penalise_first_start: bool = False
    """Discount the start of a job that never ran like any other re-allocation, as the artifact does."""
    one_node_fair_share: bool = False
    """Price the fair share as if all its GPUs were on one node, as the artifact does."""
    max_gpus: int | None = None
    """Of one job; the artifact's limit is 64."""
    max_nodes: int | None = None
    """Of one job; the artifact's limit is 16."""
    single_gpu_accumulation: bool = False
    published_grid: bool = False
    """How agents choose their batch size, as `agent.…` says: what a policy believes must be what they do."""
    floor: float = 1e-3
    """What a job without GPUs counts in the power mean."""

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise UnknownName("pollux.solver", self.solver, SOLVERS)
        checks.finite(InvalidSpec, "pollux.p", self.p, None)
        checks.finite(InvalidSpec, "pollux.realloc_delay_s", self.realloc_delay_s, 0, optional=True)
        checks.whole(InvalidSpec, "pollux.growth", self.growth, 1)
        checks.whole(InvalidSpec, "pollux.max_gpus", self.max_gpus, 1, optional=True)
        checks.whole(InvalidSpec, "pollux.max_nodes", self.max_nodes, 1, optional=True)
        checks.finite(InvalidSpec, "pollux.floor", self.floor, 0, above=True)
        self._by_type: dict[str, tuple[Speedups, Solver]] = {}
        self._stats: dict[str, float] = {}

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        rng = np.random.Generator(np.random.PCG64(seed))
        free = Free(snapshot.cluster)
        kept = pinned(snapshot, free)
        groups = _by_gpu_type(snapshot, kept)
        self._stats = {}
        allocations: dict[JobId, Allocation] = {}
        for gpu_type, jobs in groups.items():
            speedups, solver = self._tools(gpu_type)
            problem = self._problem(snapshot, gpu_type, _by_priority(jobs, kept, snapshot.time_s), kept, speedups)
            solution = solver.solve(problem, Budget(), rng)
            allocations |= _allocations(problem, solution.allocation, snapshot, kept)
            facts = {"fitness": solution.fitness, "bound": solution.bound, **solution.stats}
            prefix = f"{gpu_type}." if len(groups) > 1 else ""
            self._stats |= {f"{prefix}{name}": float(fact) for name, fact in facts.items() if fact is not None}
        if len(groups) > 1:
            _seat_elsewhere(snapshot, allocations)
        return Plan(FrozenMap(allocations))

    def stats(self) -> Mapping[str, float]:
        return self._stats

    def _tools(self, gpu_type: str) -> tuple[Speedups, Solver]:
        """What is remembered about the jobs and the searches of that type."""
        if gpu_type not in self._by_type:
            options = BatchOptions(
                single_gpu_accumulation=self.single_gpu_accumulation, published_grid=self.published_grid
            )
            self._by_type[gpu_type] = Speedups(gpu_type, options), SOLVERS[self.solver](self)
        return self._by_type[gpu_type]

    def _problem(
        self,
        snapshot: Snapshot,
        gpu_type: str,
        jobs: Sequence[Job],
        kept: Mapping[JobId, Allocation],
        speedups: Speedups,
    ) -> Problem:
        """The round as numbers, for the jobs that are to run on GPUs of that type."""
        nodes = [node for node in snapshot.cluster if node.schedulable and node.gpu_type == gpu_type]
        capacity = np.array([node.num_gpus for node in nodes], dtype=np.int64)
        racks = {name: index for index, name in enumerate(sorted({node.rack for node in nodes}))}
        models = speedups.prepare(jobs)
        known = frozenset(model.model for model in models if model is not None)
        spreads = spreads_known_to(known, len(nodes), len(racks))
        present = _present(jobs, nodes, kept)
        bounds = [self._bounds(*of) for of in zip(jobs, models, present.sum(axis=1).tolist(), strict=True)]
        least, most = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
        total = int(capacity.sum())
        most = np.minimum(most, total)
        fair = self._fair_share(snapshot.cluster, gpu_type, -(-total // len(jobs)))
        return Problem(
            tuple(job.id for job in jobs),
            tuple(node.id for node in nodes),
            capacity,
            np.array([racks[node.rack] for node in nodes], dtype=np.int64),
            spreads.of,
            present,
            np.array([job.id in kept for job in jobs], dtype=bool),
            least,
            most,
            speedups.table(jobs, np.maximum(most, present.sum(axis=1)), spreads, int(capacity.max()), fair),
            np.array([self._factor(job, snapshot.time_s) for job in jobs]),
            Objective(self.p, len(nodes) / total, self.floor),
            self.avoid_interference,
            self.max_nodes or len(nodes),
        )

    def _fair_share(self, cluster: Cluster, gpu_type: str, num_gpus: int) -> Shape:
        """The shape of an equal part of the cluster."""
        return Shape(num_gpus) if self.one_node_fair_share else packed_shapes(cluster, gpu_type)[num_gpus - 1]

    def _bounds(self, job: Job, model: GoodputModel | None, held: int) -> tuple[int, int]:
        """Fewest and most GPUs that it may have in this round."""
        least, most = job.spec.gpu_bounds
        observed = 0
        limits = [limit for limit in (most, self.max_gpus) if limit is not None]
        if model is not None and job.model is not None:
            observed = max(fit.max_gpus_observed for fit in job.model.throughput.values())
            largest = job.spec.requested_batch_size if job.spec.fixed_batch else job.model.limits.max_batch_size
            largest = largest or job.model.limits.initial_batch_size
            limits.append(max(largest // job.model.limits.min_per_gpu_batch_size, least))
        return least, min([max(self.growth * observed, held, least), *limits])

    def _factor(self, job: Job, now_s: float) -> float:
        """REALLOC_FACTOR: what is left of a job's time if it pays for one more re-allocation (paper, section 4.2.1)."""
        if job.first_started_at_s is None and not job.allocation and not self.penalise_first_start:
            return 1.0
        delay_s = self.realloc_delay_s
        if delay_s is None:
            measured = None if job.model is None else job.model.realloc_delay_s
            delay_s = USUAL_DELAY_S if measured is None else measured
        age_s = job.age_s(now_s)
        if age_s + delay_s == 0.0:
            return 1.0
        return max(age_s - job.num_reallocations * delay_s, 0.0) / (age_s + delay_s)


def _make_packed(policy: Pollux) -> Solver:
    return Packed()


SOLVERS: Mapping[str, Callable[[Pollux], Solver]] = {"packed": _make_packed}


def _by_priority(jobs: Sequence[Job], kept: Mapping[JobId, Allocation], now_s: float) -> list[Job]:
    """Those that must keep what they have, then those who have had least."""
    return sorted(jobs, key=lambda job: (job.id not in kept, job.attained_gpu_s_at(now_s), job.sequence))


def _by_gpu_type(snapshot: Snapshot, kept: Mapping[JobId, Allocation]) -> dict[str, list[Job]]:
    """The jobs that are to run on each type: that which they ask for, else have, else where fewest share the GPUs."""
    free = Free(snapshot.cluster)
    groups: dict[str, list[Job]] = {kind: [] for kind in free.by_type}
    undecided: list[Job] = []
    for job in by_arrival(snapshot.jobs.values()):
        kind = job.spec.gpu_type or free.gpu_type(kept.get(job.id, job.assigned))
        if kind is None:
            undecided.append(job)
        elif kind in groups:
            groups[kind].append(job)
    for job in undecided:
        wide = [kind for kind, total in free.by_type.items() if total >= job.spec.gpu_bounds[0]]
        if wide:
            groups[max(wide, key=lambda kind: free.by_type[kind] / (1 + len(groups[kind])))].append(job)
    return {kind: jobs for kind, jobs in groups.items() if jobs}


def _present(jobs: Sequence[Job], nodes: Sequence[Node], kept: Mapping[JobId, Allocation]) -> FloatArray:
    """[J, N]: what each holds; nothing where it cannot stay."""
    position = {node.id: index for index, node in enumerate(nodes)}
    present = np.zeros((len(jobs), len(nodes)), dtype=np.int64)
    for row, job in enumerate(jobs):
        held = kept.get(job.id, job.assigned).gpus
        if all(node in position for node in held):
            for node, count in held.items():
                present[row, position[node]] = count
    return present


def _allocations(
    problem: Problem, answer: FloatArray, snapshot: Snapshot, kept: Mapping[JobId, Allocation]
) -> dict[JobId, Allocation]:
    stays = (answer == problem.present).all(axis=1)
    found: dict[JobId, Allocation] = {}
    for row in np.flatnonzero(answer.any(axis=1)).tolist():
        job_id = problem.job_ids[row]
        if stays[row]:
            found[job_id] = kept.get(job_id, snapshot.jobs[job_id].assigned)
        else:
            nodes = np.flatnonzero(answer[row]).tolist()
            found[job_id] = Allocation(FrozenMap({problem.node_ids[node]: int(answer[row, node]) for node in nodes}))
    return found


def _seat_elsewhere(snapshot: Snapshot, allocations: dict[JobId, Allocation]) -> None:
    """Jobs that went away empty on one GPU type get their minimum of another, if some is left."""
    free = Free(snapshot.cluster)
    for allocation in allocations.values():
        free.hold(allocation)
    for job in by_arrival(snapshot.jobs.values()):
        if job.id not in allocations and job.spec.gpu_type is None:
            found = free.take(job.spec.gpu_bounds[0])
            if found is not None:
                allocations[job.id] = found
