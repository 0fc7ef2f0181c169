"""Pollux as a policy: what it may give, and what that is worth to FITNESS_p. The rest is in `sharing`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from pollux.core import Cluster, Shape, checks
from pollux.errors import InvalidSpec, UnknownName
from pollux.goodput.numerics import FloatArray, Real
from pollux.policies.packing import packed_shapes
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.reach import Reach
from pollux.policies.pollux.roster import Facts, Roster
from pollux.policies.pollux.sharing import Sharing
from pollux.policies.pollux.solver import Budget, Solution
from pollux.policies.pollux.solver.priced import Priced
from pollux.policies.pollux.values import Question, choices_of


@dataclass
class Pollux(Sharing):
    """Goodput, shared fairly: GPUs where they speed up jobs most over their fair share; batch sizes follow."""

    solver: str = "priced"
    """`priced`, near the optimum and provably so, or `genetic`, the paper's search."""
    p: float = -1.0
    """Of the power mean: 1 seeks throughput, −1 is the paper's default, −10 hardly sees anybody but the slowest."""
    realloc_delay_s: float | None = None
    """What a re-allocation is taken to cost; None: as each job has measured it."""
    unmeasured_delay_s: float = 30.0
    """What it is taken to cost before a job has measured it (paper, section 5.3)."""
    churn_factor: float = 0.95
    """What else is left of the speedup of a job that runs and is moved: below 1, fewer jobs are."""
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
        checks.finite(InvalidSpec, "pollux.churn_factor", self.churn_factor, 0)
        if self.churn_factor > 1.0:
            raise InvalidSpec("pollux.churn_factor", self.churn_factor, "must be at most 1", "1 is no extra charge")
        checks.whole(InvalidSpec, "pollux.growth", self.growth, 1)
        checks.whole(InvalidSpec, "pollux.max_gpus", self.max_gpus, 1, optional=True)
        checks.whole(InvalidSpec, "pollux.max_nodes", self.max_nodes, 1, optional=True)
        try:
            Objective(self.p, floor=self.floor)
        except InvalidSpec as error:
            raise InvalidSpec(f"pollux.{error.field}", error.value, error.problem, error.fix) from None
        checks.whole(InvalidSpec, "pollux.population", self.population, 1)
        checks.whole(InvalidSpec, "pollux.generations", self.generations, 1)
        super().__post_init__()
        self._asks: dict[str, tuple[Ask, Reach]] = {}

    def _answer(self, roster: Roster, facts: Facts, rng: np.random.Generator) -> tuple[Solution, dict[str, float]]:
        nodes, factor = facts.nodes, self._factor(facts)
        fair_share = self._fair_share(facts.moment.snapshot.cluster, roster.gpu_type, -(-nodes.total // len(facts)))
        objective = _objective(self.p, len(nodes.ids) / nodes.total, self.floor)
        if roster.gpu_type not in self._asks:
            self._asks[roster.gpu_type] = SOLVERS[self.solver](self), Reach()
        ask, reach = self._asks[roster.gpu_type]
        most = facts.most(self.growth * facts.observed, self.max_gpus)
        may_be_cut = self.solver == "priced" and math.isfinite(objective.supremum)
        while True:
            may_have = reach.cut(facts, most) if may_be_cut else most
            columns = roster.columns(facts, may_have, self.max_nodes)
            fair_goodput, is_cut = roster.goodput_on(columns, fair_share), None if may_have is most else may_have < most
            question = Question(columns, fair_share, fair_goodput, factor, objective, self.avoid_interference, is_cut)
            solution = ask(question, rng)
            if not len(solution.cut_short):
                return solution, _told(solution, objective, len(facts))
            reach.extend(facts, solution.cut_short, may_have)

    def _fair_share(self, cluster: Cluster, gpu_type: str, num_gpus: int) -> Shape:
        """The shape of an equal part of the cluster."""
        return Shape(num_gpus) if self.one_node_fair_share else packed_shapes(cluster, gpu_type)[num_gpus - 1]

    def _factor(self, facts: Facts) -> FloatArray:
        """[J] REALLOC_FACTOR: what is left of a job's time if it pays for one more re-allocation (paper, 4.2.1).

        Less of it for those that run, by the churn factor.
        """
        delay_s: Real = np.where(np.isnan(facts.delay_s), self.unmeasured_delay_s, facts.delay_s)
        if self.realloc_delay_s is not None:
            delay_s = self.realloc_delay_s
        age_s = facts.age_s + delay_s
        left = np.maximum(facts.age_s - facts.num_reallocations * delay_s, 0.0)
        factor = np.divide(left, age_s, out=np.ones(len(facts)), where=age_s > 0.0)
        if not self.penalise_first_start:
            factor[~facts.ran_before] = 1.0
        return np.asarray(np.where(facts.held_gpus > 0, self.churn_factor * factor, factor))


@lru_cache(maxsize=16)
def _objective(p: float, scale: float, floor: float) -> Objective:
    """Checked once, not in every round."""
    return Objective(p, scale, floor)


def _told(solution: Solution, objective: Objective, num_jobs: int) -> dict[str, float]:
    """Sums of values as FITNESS_p."""
    fitness = float(objective.of_mean(solution.value / num_jobs))
    found = {"fitness": fitness}
    if solution.bound is not None:
        found["bound"] = max(float(objective.of_mean(solution.bound / num_jobs)), fitness)
        found["gap"] = 1.0 - fitness / found["bound"]
    return found


Ask = Callable[[Question, np.random.Generator], Solution]
"""How a solver is asked."""


def _priced(policy: Pollux) -> Ask:
    solver = Priced()
    return lambda question, rng: solver.solve(choices_of(question), Budget(), rng)


def _genetic(policy: Pollux) -> Ask:
    from pollux.policies.pollux.genetic import Genetic, Problem  # imported for those who ask for it

    rules = Genetic.published() if policy.published_search else Genetic()
    solver = replace(rules, population=policy.population, generations=policy.generations)
    return lambda question, rng: solver.solve(Problem.of(question, policy.max_nodes), Budget(), rng)


SOLVERS: Mapping[str, Callable[[Pollux], Ask]] = {"priced": _priced, "genetic": _genetic}
