"""The genetic solver as a whole: what its answers keep, what it remembers, and how good it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from benchmarks.reference import NAMES, by_genetic, by_published, cases, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.pollux.problems import POWERS, answer, problem, problems

from pollux.errors import InvalidSpec
from pollux.policies.pollux.genetic import Genetic, chance, evaluation, operators, repair, search, survival

SMALL = {"population": 12, "generations": 6}


def solve(solver, problem, seed=0, **budget):
    return answer(problem, solver, seed, **budget)


def published(**options):
    return replace(Genetic.published(), **options)


@settings(max_examples=150)
@given(problems(), st.sampled_from([Genetic, published]), st.integers(0, 9))
def test_no_answer_breaks_a_rule(problem, solver, seed):
    found = solve(solver(**SMALL), problem, seed)
    assert found.allocation.shape == problem.present.shape


@given(problems())
def test_the_answer_is_no_worse_than_staying(problem):
    if not problem.violations(problem.present):
        found = solve(Genetic(**SMALL), problem)
        assert found.fitness >= problem.fitness(problem.present) * (1 - 1e-12)


@pytest.mark.parametrize("solver", [Genetic, published])
def test_equal_seeds_give_equal_answers_and_others_do_not(solver):
    crowd = problem([4, 4, 4], [{}] * 9)
    first, again, other = (solve(solver(**SMALL), crowd, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.allocation, again.allocation)
    assert first.stats == again.stats
    assert (first.allocation != other.allocation).any()


@pytest.mark.parametrize("solver", [Genetic, published])
def test_plain_python_gives_the_same_answer_as_machine_code(solver, monkeypatch):
    crowd = problem([4, 2, 4], [{0: 2}, {0: 1, 1: 1}, {}, {}, {}], least=[1, 1, 1, 2, 5], max_nodes=2)
    compiled = [solve(solver(**SMALL), crowd, seed) for seed in range(3)]
    for module in (chance, evaluation, operators, repair, search, survival):
        for name, function in vars(module).items():
            if hasattr(function, "py_func"):
                monkeypatch.setattr(module, name, function.py_func)
    for seed, expected in enumerate(compiled):
        found = solve(solver(**SMALL), crowd, seed)
        np.testing.assert_array_equal(found.allocation, expected.allocation)
        assert found.stats == expected.stats


class TestBudget:
    CROWD = problem([4, 4, 4, 4], [{}] * 12)

    @pytest.mark.parametrize(("work", "expected"), [(None, 6), (1, 1), (0, 1), (3, 3)])
    def test_work_is_counted_in_generations(self, work, expected):
        assert solve(Genetic(**SMALL), self.CROWD, work=work).stats["generations"] == expected

    def test_it_stops_when_told_to(self):
        asked = []
        found = solve(Genetic(**SMALL), self.CROWD, should_stop=lambda: asked.append(1) or len(asked) > 2)
        assert found.stats["generations"] == 3
        assert not self.CROWD.violations(found.allocation)

    def test_more_work_is_no_worse(self):
        fitness = [solve(Genetic(), self.CROWD, work=work).fitness for work in (1, 5, 25)]
        assert fitness == sorted(fitness)

    def test_it_ends_early_when_there_is_nothing_new_to_try(self):
        found = solve(Genetic(), problem([1], [{}, {}], most=[1, 0]))
        assert found.stats["generations"] < 4
        np.testing.assert_array_equal(found.allocation, [[1], [0]])

    @pytest.mark.parametrize(("field", "value"), [("population", 0), ("generations", 0), ("matings", 1.5)])
    def test_options_are_checked(self, field, value):
        with pytest.raises(InvalidSpec, match=field):
            Genetic(**{field: value})


class TestMemory:
    """One generation is nothing but the seeds, so its answer tells what they were."""

    JOBS, NODES = ("a", "b", "c"), ("x", "y")
    PLAN = np.array([[2, 0], [0, 2], [0, 1]])

    def solver(self, **options):
        """One that remembers the plan."""
        solver = Genetic(seed_present=False, seat_idle=False, **options)
        first = problem([4, 4], [{}] * 3, job_ids=self.JOBS, node_ids=self.NODES, present=self.PLAN)
        np.testing.assert_array_equal(solve(solver, first, work=1).allocation, self.PLAN)
        return solver

    @pytest.mark.parametrize(
        ("jobs", "nodes", "expected"),
        [
            ("abc", "xy", [[2, 0], [0, 2], [0, 1]]),
            ("cab", "xy", [[0, 1], [2, 0], [0, 2]]),  # another order
            ("abc", "yx", [[0, 2], [2, 0], [1, 0]]),
            ("nac", "xy", [[0, 0], [2, 0], [0, 1]]),  # a new job, a finished one
            ("abc", "zy", [[0, 0], [0, 2], [0, 1]]),  # a lost node, a new one
            ("nm", "zw", [[0, 0], [0, 0]]),
        ],
    )
    def test_rows_and_columns_follow_their_ids(self, jobs, nodes, expected):
        following = problem([4, 4], [{}] * len(jobs), job_ids=tuple(jobs), node_ids=tuple(nodes))
        np.testing.assert_array_equal(solve(self.solver(), following, work=1).allocation, expected)

    def test_the_published_mapping_goes_by_rank_among_those_still_there(self):
        following = problem([4, 4], [{}] * 3, job_ids=("c", "n", "a"), node_ids=self.NODES)
        found = solve(self.solver(seeds_by_rank=True), following, work=1)
        np.testing.assert_array_equal(found.allocation, [[2, 0], [0, 0], [0, 1]])

    def test_what_is_remembered_is_repaired(self):
        smaller = problem([1, 2], [{}] * 3, job_ids=self.JOBS, node_ids=self.NODES)
        np.testing.assert_array_equal(solve(self.solver(), smaller, work=1).allocation, [[1, 0], [0, 2], [0, 0]])

    def test_the_present_allocation_is_remembered_too_unless_as_published(self):
        better = np.array([[2, 0], [2, 0], [0, 4]])
        following = problem([4, 4], [{}] * 3, job_ids=self.JOBS, node_ids=self.NODES, present=better)
        solver = self.solver()
        np.testing.assert_array_equal(solve(solver, following, work=1).allocation, self.PLAN)
        solver.seed_present = True
        np.testing.assert_array_equal(solve(solver, following, work=1).allocation, better)

    def test_a_later_round_goes_on_where_the_last_ended(self):
        crowd = problem([4] * 4, [{}] * 12)
        solver = Genetic(generations=10)
        rounds = [solve(solver, crowd, seed).fitness for seed in range(4)]
        assert rounds == sorted(rounds)


def all_plans(problem):
    rows = list(product(*(range(size + 1) for size in problem.capacity.tolist())))
    for plan in product(rows, repeat=problem.num_jobs):
        allocation = np.array(plan)
        if not problem.violations(allocation):
            yield allocation


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize(
    "tiny",
    [
        problem([2, 2], [{0: 1}, {1: 2}, {}], factor=[0.5, 0.9, 0.9]),
        problem([3, 2], [{0: 2}, {0: 1, 1: 1}], factor=[0.8, 0.3], most=[3, 4]),
        problem([2, 2], [{0: 1}, {}, {}], pinned=[True, False, False], least=[1, 3, 1]),
        problem([2, 1], [{}, {}, {}], avoid_interference=False, least=[1, 2, 1]),
    ],
    ids=["crowded", "uneven", "pinned", "minima"],
)
def test_it_finds_the_best_of_all_plans_of_tiny_problems(tiny, p):
    tiny = replace(tiny, objective=replace(tiny.objective, p=p))
    best = max(tiny.fitness(plan) for plan in all_plans(tiny))
    for solver in (Genetic(generations=40), published(generations=40, matings=10)):
        assert solve(solver, tiny).fitness == pytest.approx(best, rel=1e-9)


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
class TestReference:
    """Beside the published search itself. The benchmark asks for medians of five seeds; here one seed has slack."""

    def test_the_recorded_answers_are_worth_what_was_recorded(self, pollux_data, name):
        recorded = list(cases(pollux_data, name))
        assert [case.name.split()[1] for case in recorded][:2] == ["cold", "warm"]
        for case in recorded:
            assert case.problem.fitness(case.allocation) == pytest.approx(case.fitness, rel=1e-7)
            assert case.problem.violations(case.allocation) == []
            assert (case.allocation.sum(axis=1) > 0).sum() == case.jobs_with_gpus

    def test_ours_finds_plans_as_good(self, pollux_data, name):
        for case in cases(pollux_data, name):
            found = outcome(case, by_genetic, [0])
            assert found.fitness[0] >= 0.99 * case.fitness
            assert found.jobs_with_gpus[0] >= case.jobs_with_gpus

    def test_with_the_published_options_it_is_the_published_search(self, pollux_data, name):
        for case in cases(pollux_data, name):
            found = outcome(case, by_published, range(5))
            assert np.median(found.fitness) == pytest.approx(case.fitness, rel=0.05)
