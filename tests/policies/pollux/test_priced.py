"""The default solver on rounds of Pollux: judged by the matrices of the paper's search, and in small scenes."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import reference
from hypothesis import given, settings
from tests.policies.pollux.problems import POWERS, problem, problems, scaling

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.genetic import Problem
from pollux.policies.pollux.solver import Budget, Priced


def plan_of(of: Problem) -> FloatArray:
    """[J, N], checked against what the problem says of it."""
    found = Priced().solve(reference.choices(of), Budget(), np.random.default_rng(0))
    plan = found.rows.matrix(of.num_nodes)
    assert of.violations(plan) == []
    assert found.value == pytest.approx(of.values(plan).sum())
    return plan


@settings(deadline=None, max_examples=50)
@given(problems())
def test_no_rule_is_broken_and_to_leave_all_as_it_is_would_be_no_better(of):
    values = of.values(plan_of(of))
    if not of.violations(of.present) and (of.present.sum(axis=1) <= of.most).all():
        slack = Priced().gap_target * np.abs(values).sum()
        assert values.sum() >= of.values(of.present).sum() - slack


@pytest.mark.data
@pytest.mark.parametrize("name", reference.NAMES)
def test_plans_are_no_worse_than_those_of_the_published_search(pollux_data, name):
    for case in reference.cases(pollux_data, name):
        assert case.problem.fitness(plan_of(case.problem)) > case.problem.fitness(case.allocation), case.name


def test_those_who_had_least_go_first_if_not_all_can_run():
    assert plan_of(problem([2, 1], [{}] * 5)).sum(axis=1).tolist() == [1, 1, 1, 0, 0]


def test_a_job_whose_bounds_exclude_each_other_waits():
    assert plan_of(problem([4], [{}], least=[4], most=[3])).tolist() == [[0]]


def test_jobs_on_several_nodes_that_met_are_parted():
    of = problem([4, 4, 4], [{0: 1, 1: 1}, {1: 1, 2: 1}], factor=[0.0, 0.0], least=[2, 2], most=[2, 2])
    assert sorted((plan_of(of) == of.present).all(axis=1)) == [False, True]


class TestMoves:
    """A job comes that needs some GPUs and pays nothing to start; the others want no more than they hold."""

    def comes(self, *held, size=4, nodes=(4, 4), **fields):
        """What it gets, and who of the others moved."""
        most = [size] + [sum(each.values()) for each in held]
        of = problem(nodes, [{}, *held], least=[size] + [1] * len(held), most=most, **fields)
        plan = plan_of(of)
        return plan[0].tolist(), np.flatnonzero((plan != of.present).any(axis=1))[1:].tolist()

    def test_one_job_moves_where_one_is_in_the_way(self):
        assert self.comes({0: 1}, {0: 1}, {1: 1}) == ([0, 4], [3])

    def test_nobody_moves_where_nobody_has_to(self):
        assert self.comes({0: 1}, {0: 1}, {0: 1}) == ([0, 4], [])

    def test_nobody_moves_where_fragments_serve_as_well(self):
        row, moved = self.comes({0: 1}, {1: 1}, speedup=scaling(8, apart=1.0))
        assert (sorted(row), moved) == ([1, 3], [])

    def test_nor_where_moving_costs_more_than_it_brings(self):
        row, moved = self.comes({0: 1}, {1: 1}, factor=[1.0, 0.01, 0.01])
        assert (sorted(row), moved) == ([1, 3], [])

    @pytest.mark.parametrize("p", POWERS)
    def test_one_that_must_be_on_one_node_is_not_shut_out_by_fragments(self, p):
        single_node = [True, False, False]
        row, moved = self.comes({0: 2}, {1: 2}, size=3, p=p, single_node=single_node)
        assert (sorted(row), len(moved)) == ([0, 3], 1)
