"""The closer account of nodes: it forbids nothing that can be placed, and some of what cannot."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pollux.policies.pollux.solver.board import BULKY, FEWEST, WHOLE
from pollux.policies.pollux.solver.closer import closer
from pollux.policies.pollux.solver.opening import searched_closer
from pollux.policies.pollux.solver.pricing import wishes_at_best_price
from pollux.policies.pollux.solver.round import Round, prepare

from .brute_force import best_sum
from .small_rounds import small_round
from .test_solver import round_of

MANY = 100_000


def bound_of(around: Round, by: Round) -> float:
    return around.fixed + wishes_at_best_price(by, by.empty).bound


@pytest.mark.parametrize("p", [-10.0, -1.0, 0.0, 1.0])
@pytest.mark.parametrize("part", range(3))
def test_no_plan_is_worth_more_than_its_bound(p, part):
    num_checked = 0
    for seed in range(40 * part, 40 * (part + 1)):
        choices = small_round(seed, p)
        best = best_sum(choices)
        if not choices.avoid_interference or not math.isfinite(best):
            continue
        around = prepare(choices)
        slack = 1e-9 * max(abs(best), 1.0)
        assert bound_of(around, closer(around)) >= best - slack, f"seed {seed}"
        # Nothing is given: all is found, and what is said of the rest holds.
        _, bound = searched_closer(around, around.empty, math.inf, 0.0, MANY)
        assert around.fixed + bound >= best - slack, f"seed {seed}"
        num_checked += 1
    assert num_checked > 20


def test_what_sizes_take_on_nodes_of_four():
    around = prepare(round_of([4] * 4, [{}, {}], most=16))
    table = closer(around).empty.sizes
    assert closer(around).slots == 8
    assert table[:5, WHOLE].tolist() == [0, 0, 0, 1, 2]
    assert table[:5, BULKY].tolist() == [0, 0, 1, 1, 1]
    # 5 are 4 + 1 at best, with one bulky piece; 6 and more on two nodes have two.
    assert table[5:10, FEWEST].tolist() == [3, 4, 4, 4, 5]


def test_three_do_not_fit_beside_two_jobs_with_six_on_two_nodes_each():
    """15 of 16 GPUs are wanted, and as many nodes for jobs on several as there are: it is the places that are wrong."""
    choices = round_of([4] * 4, [{}] * 3, most=8)
    width = 9
    value = np.full((3, 2, width), -np.inf)
    value[:, :, 0] = 0.0
    value[0, 1, 6] = value[1, 1, 6] = value[2, 0, 3] = 10.0
    around = prepare(replace(choices, value=value.ravel()))
    assert bound_of(around, around) == pytest.approx(30.0)
    assert best_sum(replace(choices, value=value.ravel())) == pytest.approx(20.0)
    _, bound = searched_closer(around, around.empty, 30.0, 0.0, MANY)
    assert bound == pytest.approx(20.0, rel=1e-6)
