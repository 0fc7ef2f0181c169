"""The paper's search for the best plan of a round: a genetic algorithm (section 4.2.1; NSGA-II in the artifact).

Individuals are allocations. Parents mix their jobs' rows; a child then has some rows reset to the present allocation,
some shrunk, some grown where GPUs are free, and is repaired until it keeps all rules. Of parents and children the best
survive, by two objectives: fitness, which decides the answer, and utility, which only keeps the population diverse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pollux.core import FrozenMap, JobId, NodeId, checks
from pollux.errors import InvalidSpec
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.genetic.chance import begin
from pollux.policies.pollux.genetic.evaluation import Worth, evaluate, new_ones
from pollux.policies.pollux.genetic.operators import breed
from pollux.policies.pollux.genetic.problem import Problem
from pollux.policies.pollux.genetic.repair import Rules, repair
from pollux.policies.pollux.genetic.survival import contestants, ranked, survivors, winners
from pollux.policies.pollux.solver import Budget, Solution


class _Memory(NamedTuple):
    """The best of an earlier round, to begin the next with."""

    job_ids: tuple[JobId, ...]
    node_ids: tuple[NodeId, ...]
    allocations: FloatArray  # [F, J, N]


@dataclass(slots=True)
class Genetic:
    """The paper's solver. It remembers the last round's best answers. A budget's unit of work is a generation."""

    population: int = 100
    generations: int = 100
    """Counting the first, as the artifact does."""
    matings: int = 3
    """How often parents mate in a generation at most: again while too few of their children are new (artifact: 101)."""
    seed_present: bool = True
    """Begin also with the present allocation, so that the answer is never worse (artifact: False)."""
    seat_idle: bool = True
    """Repair also gives free GPUs to jobs that have none (artifact: False)."""
    published_interference: bool = False
    """True: where two distributed jobs meet, the second and every later job leaves the node, distributed or not."""
    seeds_by_rank: bool = False
    """True: what is remembered of the jobs still there goes to them in their new order, not by id."""
    _memory: _Memory | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("population", "generations", "matings"):
            checks.whole(InvalidSpec, name, getattr(self, name), 1)

    @classmethod
    def published(cls) -> Genetic:
        """As in the artifact."""
        return cls(matings=101, seed_present=False, seat_idle=False, published_interference=True, seeds_by_rank=True)

    def solve(self, problem: Problem, budget: Budget, rng: np.random.Generator) -> Solution:
        if not problem.num_jobs or not problem.num_nodes:
            return problem.solution(problem.present)
        generations = self.generations if budget.work is None else budget.work
        search = _Search(problem, self, self._seeds(problem), rng)
        done = 1
        while done < generations and not budget.should_stop() and search.advance():
            done += 1
        front = search.best()
        self._memory = _Memory(problem.job_ids, problem.node_ids, search.store[front])
        allocation = search.store[front[0]].astype(problem.present.dtype)
        stats = {"generations": done, "evaluations": search.evaluations, "front": len(front)}
        return problem.solution(allocation, FrozenMap(stats))

    def _seeds(self, problem: Problem) -> FloatArray:
        """[F, J, N]: what to begin with, not yet repaired."""
        present = problem.present[None].astype(np.int16)
        if self._memory is None:
            return present
        remembered = _carried_over(self._memory, problem, self.seeds_by_rank)
        return np.concatenate([present, remembered]) if self.seed_present else remembered


def _carried_over(memory: _Memory, problem: Problem, by_rank: bool) -> FloatArray:
    """Remembered allocations of the jobs and nodes that are still there; zeros for the new ones."""
    old_row = {job: row for row, job in enumerate(memory.job_ids)}
    old_column = {node: column for column, node in enumerate(memory.node_ids)}
    rows = [row for row, job in enumerate(problem.job_ids) if job in old_row]
    columns = [column for column, node in enumerate(problem.node_ids) if node in old_column]
    from_rows = [old_row[problem.job_ids[row]] for row in rows]
    from_columns = [old_column[problem.node_ids[column]] for column in columns]
    seeds = np.zeros((len(memory.allocations), problem.num_jobs, problem.num_nodes), dtype=np.int16)
    kept = memory.allocations[:, sorted(from_rows) if by_rank else from_rows][:, :, from_columns]
    seeds[np.ix_(range(len(seeds)), rows, columns)] = kept
    return seeds


class _Search:
    """One search: the store [S, J, N] has a place for each member of the population and each child."""

    def __init__(self, problem: Problem, options: Genetic, seeds: FloatArray, rng: np.random.Generator) -> None:
        self._objective, self._options, self._rng = problem.objective, options, rng
        self._worth, self._chance = Worth.of(problem), begin(rng)
        self._rules = Rules.of(
            problem, published_interference=options.published_interference, seat_idle=options.seat_idle
        )
        seeds = seeds[: options.population]
        num_places = 2 * options.population + 1
        self.store = np.zeros((num_places, *seeds.shape[1:]), dtype=np.int16)
        self.evaluations = 0
        self._mean_value, self._utility, self._fitness = np.zeros((3, num_places))
        self.store[: len(seeds)] = seeds
        places = np.arange(len(seeds))
        self._members: FloatArray = self._news(places, known=places[:0])
        self._crowding: FloatArray = self._ranked(self._members)[1]

    def advance(self) -> bool:
        """One generation more; False if nobody new was found."""
        children = self._children()
        if not len(children):
            return False
        family = np.concatenate([self._members, children])
        front, crowding = self._ranked(family)
        chosen = survivors(front, crowding, self._options.population, self._rng)
        self._members, self._crowding = family[chosen], crowding[chosen]
        return True

    def best(self) -> FloatArray:
        """Places of those whom nobody beats in both objectives, the highest fitness first."""
        front, _ = self._ranked(self._members)
        places = self._members[front == 0]
        return np.asarray(places[np.lexsort((-self._utility[places], -self._fitness[places]))])

    def _children(self) -> FloatArray:
        """Places of as many new individuals as the population has, or of those that could be found."""
        members, known = self._members, self._members
        for _ in range(self._options.matings):
            wanted = self._options.population + len(members) - len(known)
            if wanted == 0:
                break
            is_free = np.ones(len(self.store), dtype=bool)
            is_free[known] = False
            places = np.flatnonzero(is_free)[: wanted + wanted % 2]
            parents, worth = self._parents(len(places)), self._worth
            breed(self.store, parents, places.reshape(-1, 2), worth.present, worth.capacity, self._chance)
            known = np.concatenate([known, self._news(places, known)[:wanted]])
        return known[len(members) :]

    def _parents(self, number: int) -> FloatArray:
        """[number / 2, 2] places, by tournament."""
        pairs = contestants(len(self._members), number, self._rng)
        fitness, utility = self._fitness[self._members], self._utility[self._members]
        chosen = winners(pairs, fitness, utility, self._crowding, self._rng.random(number))
        return self._members[chosen].reshape(-1, 2)

    def _news(self, places: FloatArray, known: FloatArray) -> FloatArray:
        """Those of these places that hold somebody new, after repair; judged now."""
        repair(self.store, places, self._rules, self._chance)
        evaluate(self.store, places, self._worth, self._mean_value, self._utility)
        self._fitness[places] = self._objective.of_mean(self._mean_value[places])
        self.evaluations += len(places)
        return np.asarray(places[new_ones(self.store, self._mean_value, self._utility, known, places)])

    def _ranked(self, places: FloatArray) -> tuple[FloatArray, FloatArray]:
        return ranked(self._fitness[places], self._utility[places])
