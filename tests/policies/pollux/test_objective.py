from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pollux.errors import InvalidSpec
from pollux.policies.pollux.objective import Objective

TINY = 1e-12
powers = st.sampled_from([-10.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0]) | st.floats(-20, 20).filter(lambda p: abs(p) > 0.01)
speedup = st.floats(0.0, 64.0)


def fitness(p: float, *speedups: float, **options: float) -> float:
    objective = Objective(p, **options)
    return objective.fitness(objective.values(np.array(speedups)))


@pytest.mark.parametrize(("p", "expected"), [(1, 1.16667), (-1, 0.85714), (-10, 0.55801), (0, 1.0)])
def test_is_the_power_mean_of_the_speedups(p, expected):
    assert fitness(p, 2.0, 1.0, 0.5, floor=TINY) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("p", [-10.0, -1.0, 0.0, 1.0])
def test_scales_speedups_and_then_raises_all_by_the_floor(p):
    assert fitness(p, 4.0, scale=0.25, floor=0.5) == pytest.approx(1.5)


@pytest.mark.parametrize("p", [-10.0, -1.0, 0.0, 1.0])
def test_jobs_without_gpus_leave_it_finite(p):
    assert 0.0 < fitness(p, 0.0, 1.0) < 1.0
    assert fitness(p, 0.0, 0.0) == pytest.approx(1e-3)


@pytest.mark.parametrize("p", [-100.0, 100.0])
def test_the_steepest_see_the_slowest_or_the_fastest_only(p):
    speedups = np.r_[np.zeros(1000), 500.0]
    assert fitness(p, *speedups) == pytest.approx(min(speedups) + 1e-3 if p < 0 else max(speedups), rel=0.1)


def test_an_idle_job_counts_a_thousand_in_the_mean_of_reciprocals():
    assert 1.0 / fitness(-1, 0.0, 1.0) == pytest.approx((1000.0 + 1.0 / 1.001) / 2)


def test_of_no_jobs_is_nothing():
    assert fitness(-1) == 0.0


@given(powers, st.lists(speedup, min_size=1, max_size=6), st.data())
def test_larger_sums_of_values_are_larger_fitnesses(p, first, data):
    second = data.draw(st.lists(speedup, min_size=len(first), max_size=len(first)))
    objective = Objective(p)
    sums = [objective.values(np.array(each)).sum() for each in (first, second)]
    assume(abs(sums[0] - sums[1]) > 1e-9 * max(np.abs(sums)))
    assert (sums[0] > sums[1]) == (fitness(p, *first) > fitness(p, *second))


@given(powers, st.lists(speedup, min_size=1, max_size=6), st.integers(0, 5), st.floats(0.1, 10.0))
def test_nobody_loses_by_a_higher_speedup(p, speedups, index, more):
    index %= len(speedups)
    better = [each + more * (position == index) for position, each in enumerate(speedups)]
    assert fitness(p, *better) >= fitness(p, *speedups) * (1 - 1e-12)


@given(st.lists(speedup, min_size=1, max_size=6))
def test_grows_with_p(speedups):
    found = [fitness(p, *speedups) for p in (-10.0, -1.0, -0.5, 0.0, 0.5, 1.0, 10.0)]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(found))
    assert min(speedups) <= found[0]
    assert found[-1] <= max(speedups) + 2e-3


def test_of_many_plans_at_once():
    objective = Objective(-1)
    plans = np.array([[2.0, 1.0, 0.5], [1.0, 1.0, 1.0]])
    assert objective.of_mean(objective.values(plans).mean(axis=1)).tolist() == pytest.approx(
        [fitness(-1, *plan) for plan in plans]
    )


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"p": float("nan")}, "p"),
        ({"p": float("inf")}, "p"),
        ({"p": -101.0}, "p"),
        ({"p": 101.0}, "p"),
        ({"p": -51.0, "floor": 1e-6}, "p"),
        ({"scale": 0.0}, "scale"),
        ({"floor": 0.0}, "floor"),
        ({"floor": -1.0}, "floor"),
    ],
)
def test_refuses_what_is_no_objective(wrong, name):
    with pytest.raises(InvalidSpec, match=name):
        Objective(**wrong)


def test_a_tiny_p_is_the_geometric_mean():
    assert Objective(1e-9) == Objective(-1e-9) == Objective(0.0)
