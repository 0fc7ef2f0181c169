"""Pollux as a policy: from a snapshot to problems, one a GPU type, and from their solutions to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from pollux.core import Allocation, Cluster, FrozenMap, Job, JobId, Node, Plan, Shape, Snapshot, checks
from pollux.errors import InvalidSpec, UnknownName
from pollux.goodput import BatchOptions
from pollux.goodput.numerics import FloatArray
from pollux.policies.base import Policy
from pollux.policies.packing import packed_shapes
from pollux.policies.pollux.gpu_types import Holdings, by_gpu_type, second_choices
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.packed import Packed
from pollux.policies.pollux.problem import Problem
from pollux.policies.pollux.solver import Budget, Solver
from pollux.policies.pollux.speedups import Speedups, spreads_known_to


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
    """What a re-allocation is taken to cost; None: as each job has measured it."""
    unmeasured_delay_s: float = 30.0
    """What it is taken to cost before a job has measured it (paper, section 5.3)."""
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
    """How agents choose their batch size: what a policy believes must be what they do."""
    floor: float = 1e-3
    """What a job without GPUs counts in the power mean."""
    population: int = 100
    generations: int = 100
    """Of the genetic solver."""
    published_search: bool = False
    """The genetic solver with the artifact's own rules and slips (docs/deviations.md)."""

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise UnknownName("pollux.solver", self.solver, SOLVERS)
        checks.finite(InvalidSpec, "pollux.realloc_delay_s", self.realloc_delay_s, 0, optional=True)
        checks.finite(InvalidSpec, "pollux.unmeasured_delay_s", self.unmeasured_delay_s, 0)
        checks.whole(InvalidSpec, "pollux.growth", self.growth, 1)
        checks.whole(InvalidSpec, "pollux.max_gpus", self.max_gpus, 1, optional=True)
        checks.whole(InvalidSpec, "pollux.max_nodes", self.max_nodes, 1, optional=True)
        try:
            Objective(self.p, floor=self.floor)
        except InvalidSpec as error:
            raise InvalidSpec(f"pollux.{error.field}", error.value, error.problem, error.fix) from None
        checks.whole(InvalidSpec, "pollux.population", self.population, 1)
        checks.whole(InvalidSpec, "pollux.generations", self.generations, 1)
        self._by_type: dict[str, tuple[Speedups, Solver]] = {}
        self._stats: dict[str, float] = {}

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        rng = np.random.Generator(np.random.PCG64(seed))
        holdings = Holdings.of(snapshot)
        groups = by_gpu_type(snapshot, holdings)
        self._stats = {}
        allocations: dict[JobId, Allocation] = {}
        settled: set[JobId] = set()
        waiting = list(groups)
        while waiting:
            for gpu_type in waiting:
                if groups[gpu_type]:
                    allocations |= self._solve(snapshot, holdings, gpu_type, groups[gpu_type], rng)
            waiting = second_choices(snapshot.cluster, groups, allocations, settled) if len(groups) > 1 else []
        return Plan(FrozenMap({job: allocation for job, allocation in allocations.items() if allocation}))

    def _solve(
        self, snapshot: Snapshot, holdings: Holdings, gpu_type: str, jobs: Sequence[Job], rng: np.random.Generator
    ) -> dict[JobId, Allocation]:
        """Who gets which GPUs of that type, nothing included."""
        now_s = snapshot.time_s
        # Those that must keep what they have, then those who have had least.
        order = sorted(
            jobs, key=lambda job: (job.id not in holdings.pinned, job.attained_gpu_s_at(now_s), job.sequence)
        )
        speedups, solver = self._tools(gpu_type)
        problem = self._problem(snapshot, holdings, gpu_type, order, speedups)
        solution = solver.solve(problem, Budget(), rng)
        facts = {"fitness": solution.fitness, "bound": solution.bound, **solution.stats}
        prefix = f"{gpu_type}." if len(snapshot.cluster.gpu_types) > 1 else ""
        self._stats |= {f"{prefix}{name}": float(fact) for name, fact in facts.items() if fact is not None}
        return _allocations(problem, solution.allocation, holdings)

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
        self, snapshot: Snapshot, holdings: Holdings, gpu_type: str, jobs: Sequence[Job], speedups: Speedups
    ) -> Problem:
        """The round as numbers, for the jobs that are to run on GPUs of that type."""
        nodes = [node for node in snapshot.cluster if node.schedulable and node.gpu_type == gpu_type]
        capacity = np.array([node.num_gpus for node in nodes], dtype=np.int64)
        racks = {name: index for index, name in enumerate(sorted({node.rack for node in nodes}))}
        models = speedups.prepare(jobs)
        known = frozenset(model.model for model in models if model is not None)
        spreads = spreads_known_to(known, len(nodes), len(racks))
        present = _present(jobs, nodes, holdings)
        bounds = [self._bounds(job, held) for job, held in zip(jobs, present.sum(axis=1).tolist(), strict=True)]
        least, most = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
        total = int(capacity.sum())
        most = np.minimum(most, [int(capacity.max()) if job.spec.single_node else total for job in jobs])
        fair = self._fair_share(snapshot.cluster, gpu_type, -(-total // len(jobs)))
        return Problem(
            tuple(job.id for job in jobs),
            tuple(node.id for node in nodes),
            capacity,
            np.array([racks[node.rack] for node in nodes], dtype=np.int64),
            spreads.of,
            present,
            np.array([job.id in holdings.pinned for job in jobs], dtype=bool),
            least,
            most,
            speedups.table(jobs, np.maximum(most, present.sum(axis=1)), spreads, int(capacity.max()), fair),
            np.array([self._factor(job, snapshot.time_s) for job in jobs]),
            Objective(self.p, len(nodes) / total, self.floor),
            self.avoid_interference,
            self.max_nodes or len(nodes),
            np.array([job.spec.single_node for job in jobs], dtype=bool),
        )

    def _fair_share(self, cluster: Cluster, gpu_type: str, num_gpus: int) -> Shape:
        """The shape of an equal part of the cluster."""
        return Shape(num_gpus) if self.one_node_fair_share else packed_shapes(cluster, gpu_type)[num_gpus - 1]

    def _bounds(self, job: Job, held: int) -> tuple[int, int]:
        """Fewest and most GPUs that it may have in this round."""
        least, most = job.spec.gpu_bounds
        observed = 0
        limits = [limit for limit in (most, self.max_gpus) if limit is not None]
        if job.model is not None:
            observed = max((fit.max_gpus_observed for fit in job.model.throughput.values()), default=0)
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
            delay_s = self.unmeasured_delay_s if measured is None else measured
        age_s = job.age_s(now_s)
        if age_s + delay_s == 0.0:
            return 1.0
        return max(age_s - job.num_reallocations * delay_s, 0.0) / (age_s + delay_s)


def _packed(policy: Pollux) -> Solver:
    return Packed()


def _genetic(policy: Pollux) -> Solver:
    from pollux.policies.pollux.genetic import Genetic  # imported for those who ask for it

    rules = Genetic.published() if policy.published_search else Genetic()
    return replace(rules, population=policy.population, generations=policy.generations)


SOLVERS: Mapping[str, Callable[[Pollux], Solver]] = {"packed": _packed, "genetic": _genetic}


def _present(jobs: Sequence[Job], nodes: Sequence[Node], holdings: Holdings) -> FloatArray:
    """[J, N]: what each holds; nothing where it cannot stay."""
    position = {node.id: index for index, node in enumerate(nodes)}
    present = np.zeros((len(jobs), len(nodes)), dtype=np.int64)
    for row, job in enumerate(jobs):
        held = holdings.by_job.get(job.id)
        if held is not None and next(iter(held.gpus)) in position:
            for node, count in held.gpus.items():
                present[row, position[node]] = count
    return present


def _allocations(problem: Problem, answer: FloatArray, holdings: Holdings) -> dict[JobId, Allocation]:
    stays = (answer == problem.present).all(axis=1)
    found: dict[JobId, Allocation] = dict.fromkeys(problem.job_ids, Allocation())
    for row in np.flatnonzero(answer.any(axis=1)).tolist():
        job_id = problem.job_ids[row]
        if stays[row]:
            found[job_id] = holdings.by_job[job_id]
        else:
            nodes = np.flatnonzero(answer[row]).tolist()
            found[job_id] = Allocation(FrozenMap({problem.node_ids[node]: int(answer[row, node]) for node in nodes}))
    return found
