"""Rounds recorded from simulations, planned again by other solvers, and what their plans are worth.

The worth is computed here from the plan and the jobs' models alone, by no code of any solver: FITNESS_p of the paper,
section 4.2, as `Pollux` has it by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pollux.core import Cluster, Job, Plan, Shape, Snapshot
from pollux.goodput import GoodputModel
from pollux.policies import Policy, registry
from pollux.policies.pollux.policy import Pollux
from pollux.simulator.comparison import prepare_once
from pollux.simulator.plan_cost import changes, proven_gap
from pollux.simulator.scenario import Scenario, world_of


class Recorded(NamedTuple):
    """A round that was planned, and the one before it."""

    snapshot: Snapshot
    before: Snapshot | None


class Recorder(Policy):
    """Plans as another policy does and keeps what it was asked. Rounds without jobs are passed over."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.rounds: list[Recorded] = []
        for fact in ("needs_oracle", "reads_models", "adapts_gpus", "adapts_batch"):
            setattr(self, fact, getattr(policy, fact))

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        if snapshot.jobs:
            self.rounds.append(Recorded(snapshot, self.rounds[-1].snapshot if self.rounds else None))
        return self._policy.plan(snapshot, seed)

    def stats(self) -> Mapping[str, float]:
        return self._policy.stats()


def recorded(scenario: Scenario, count: int) -> list[Recorded]:
    """So many rounds of a run, spread evenly over it; all if it has no more."""
    ready = prepare_once(scenario)
    recorder = Recorder(ready.policy)
    cluster = ready.cluster
    world_of(ready.workload.jobs, ready.truths, cluster.cluster, recorder, scenario.options, cluster.changes).run()
    num_rounds = len(recorder.rounds)
    chosen = {(2 * k + 1) * num_rounds // (2 * count) for k in range(count)}
    return [recorder.rounds[index] for index in sorted(chosen)]


@dataclass(frozen=True, slots=True)
class Planned:
    """What a solver made of a recorded round."""

    num_jobs: int
    fitness: float
    gap: float | None
    """None if it proves none."""
    changed: int
    """Jobs that were started, moved or stopped."""


def planned(found: Recorded, options: Mapping[str, object]) -> Planned:
    """By a new `pollux` with these options, that has planned nothing but the round before."""
    policy = registry.make("pollux", options)
    assert isinstance(policy, Pollux)
    if found.before is not None:
        policy.plan(found.before, found.before.round)
    plan = policy.plan(found.snapshot, found.snapshot.round)
    return Planned(
        len(found.snapshot.jobs),
        fitness(found.snapshot, plan, policy),
        proven_gap(policy.stats()),
        sum(changes(found.snapshot, plan)),
    )


def compared(scenario: Scenario, count: int, solvers: Sequence[Mapping[str, object]]) -> list[tuple[Planned, ...]]:
    """Rounds of a run, each planned by a `pollux` with each of these options."""
    return [tuple(planned(found, options) for options in solvers) for found in recorded(scenario, count)]


def fitness(snapshot: Snapshot, plan: Plan, rules: Pollux | None = None) -> float:
    """FITNESS_p of a plan; one that breaks a rule of the cluster or of interference is refused."""
    rules = rules or Pollux()
    plan.check(snapshot)
    if rules.avoid_interference:
        _check_interference(plan)
    (gpu_type,) = snapshot.cluster.gpu_types
    nodes = [node.num_gpus for node in snapshot.cluster if node.schedulable]
    fair = _densest(snapshot.cluster, math.ceil(sum(nodes) / len(snapshot.jobs)))
    speedups = [_speedup(job, plan, gpu_type, fair, snapshot, rules) for job in snapshot.jobs.values()]
    return _power_mean([len(nodes) / sum(nodes) * speedup + rules.floor for speedup in speedups], rules.p)


def _speedup(job: Job, plan: Plan, gpu_type: str, fair: Shape, snapshot: Snapshot, rules: Pollux) -> float:
    """Goodput over that of the fair share, less what a re-allocation costs."""
    wanted = plan[job.id]
    if not wanted:
        return 0.0
    factor = 1.0 if wanted == job.assigned else _realloc_factor(job, snapshot.time_s, rules)
    if job.model is None or gpu_type not in job.model.throughput:
        return factor * wanted.num_gpus / fair.num_gpus
    if job.spec.fixed_batch:
        raise ValueError(f"job {job.id}: what a fixed batch size is worth is not computed here")
    model = GoodputModel.of(job.model, gpu_type)
    return factor * model.best(wanted.shape(snapshot.cluster)).goodput / _fair_goodput(model, fair)


def _fair_goodput(model: GoodputModel, fair: Shape) -> float:
    """Where no batch size fits so many GPUs, that of half of them, and so on."""
    found = model.best(fair).goodput
    if found > 0.0:
        return found
    half = fair.num_gpus // 2
    return _fair_goodput(model, Shape(half, min(fair.num_nodes, half)))


def _realloc_factor(job: Job, now_s: float, rules: Pollux) -> float:
    if job.first_started_at_s is None and not job.allocation and not rules.penalise_first_start:
        return 1.0
    delay_s = rules.realloc_delay_s
    if delay_s is None and job.model is not None:
        delay_s = job.model.realloc_delay_s
    if delay_s is None:
        delay_s = rules.unmeasured_delay_s
    age_s = max(now_s - job.submitted_at_s, 0.0)
    if age_s + delay_s == 0.0:
        return 1.0
    return max(age_s - job.num_reallocations * delay_s, 0.0) / (age_s + delay_s)


def _densest(cluster: Cluster, num_gpus: int) -> Shape:
    """On the fewest nodes that have so many."""
    sizes = sorted((node.num_gpus for node in cluster if node.schedulable), reverse=True)
    num_nodes = next(count for count in range(1, len(sizes) + 1) if sum(sizes[:count]) >= num_gpus)
    return Shape(num_gpus, num_nodes)


def _power_mean(values: Sequence[float], p: float) -> float:
    if p == 0.0:
        return math.exp(math.fsum(map(math.log, values)) / len(values))
    return float((math.fsum(value**p for value in values) / len(values)) ** (1.0 / p))


def _check_interference(plan: Plan) -> None:
    seen: set[str] = set()
    for job, allocation in plan.allocations.items():
        if allocation.num_nodes > 1:
            if meeting := seen & set(allocation.gpus):
                raise ValueError(f"job {job} meets another one on several nodes on {', '.join(sorted(meeting))}")
            seen |= set(allocation.gpus)
