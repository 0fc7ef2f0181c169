from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.policies.pollux.brute_force import best_sum, price_bound, sum_of
from tests.policies.pollux.small_rounds import small_round

from pollux.policies.pollux.solver import Budget
from pollux.policies.pollux.solver.choices import Choices, Rows
from pollux.policies.pollux.solver.exact import finish, worth_of
from pollux.policies.pollux.solver.priced import Priced
from pollux.policies.pollux.solver.program import Pattern, patterns

POWERS = (-10.0, -1.0, 0.0, 1.0)
SEEDS = range(50)
NODE_LIMIT = 10_000


@cache
def best(seed: int, p: float) -> float:
    return best_sum(small_round(seed, p))


def poor_plan(choices: Choices, *, keep: bool) -> Rows:
    """Pinned jobs alone, or with as many others as can keep what they hold."""
    held = choices.held.matrix(choices.num_nodes)
    plan = held * choices.pinned[:, None]
    for job in np.flatnonzero(choices.keep > -np.inf) if keep else ():
        kept = plan.copy()
        kept[job] = held[job]
        if sum_of(choices, Rows.of_matrix(kept)) > -np.inf:
            plan = kept
    return Rows.of_matrix(plan)


def best_price(choices: Choices) -> float:
    """Of the lowest bound, roughly: between prices of an idle job and of a GPU more."""
    return min([0.0, *np.geomspace(1e-2, 10.0, 12), 1e3, 1e30], key=lambda price: price_bound(choices, price))


def finished(choices: Choices, seed: int, node_limit: int = NODE_LIMIT) -> tuple[Rows, float, float]:
    """From a poor plan, and prices that are good, bad or none, by seed."""
    rows = poor_plan(choices, keep=seed % 2 == 0)
    price = 0.0 if seed % 3 == 0 else 0.7 if seed % 3 == 1 else best_price(choices)
    bound = price_bound(choices, price)
    found = finish(choices, rows, sum_of(choices, rows), bound, price, 0.1 * price * (seed % 4), node_limit=node_limit)
    assert found is not None
    assert sum_of(choices, found[0]) == pytest.approx(found[1], rel=1e-12)
    assert sum_of(choices, rows) <= found[1] <= found[2] <= bound + 1e-12 * abs(bound)
    return found


@pytest.mark.parametrize("p", POWERS)
def test_the_answer_is_that_of_brute_force(p):
    for seed in SEEDS:
        choices = small_round(seed, p)
        _, value, bound = finished(choices, seed)
        assert value == pytest.approx(best(seed, p), rel=1e-9, abs=1e-12), seed
        assert bound >= best(seed, p) - 1e-12 * abs(value), seed


@pytest.mark.parametrize("p", POWERS)
def test_the_default_solver_finds_what_brute_force_finds(p):
    for seed in SEEDS:
        choices = small_round(seed, p)
        answer = Priced().solve(choices, Budget(), np.random.default_rng(seed))
        assert answer.value == pytest.approx(sum_of(choices, answer.rows), rel=1e-12), seed
        assert answer.value == pytest.approx(best(seed, p), rel=1e-9, abs=1e-12), seed
        assert answer.bound >= best(seed, p) - 1e-12 * abs(answer.value), seed


def test_the_bound_is_that_of_the_plan():
    for seed in range(12):
        choices = small_round(seed, -1.0)
        rows, value, _ = finished(choices, seed)
        price = best_price(choices)
        again = finish(choices, rows, value, price_bound(choices, price), price, 0.0, node_limit=NODE_LIMIT)
        assert again is not None
        assert again[1] == value
        assert again[2] == pytest.approx(value, rel=1e-5), seed


def test_a_search_that_ends_early_is_no_worse_than_before_and_its_bound_holds():
    for seed in range(12):
        choices = small_round(seed, 0.0)
        _, value, bound = finished(choices, seed, node_limit=1)
        assert value <= best(seed, 0.0) + 1e-9 <= bound + 2e-9, seed


def test_a_job_that_cannot_run_does_not_hide_the_others():
    alone = small_round(10, -10.0)
    with_idle = replace(
        alone,
        first=np.append(alone.first, alone.first[-1] + alone.num_classes),
        value=np.append(alone.value, [-1e30] * alone.num_classes),
        keep=np.append(alone.keep, -np.inf),
        held=replace(alone.held, first=np.append(alone.held.first, alone.held.first[-1])),
        pinned=np.append(alone.pinned, False),
        most_nodes=np.append(alone.most_nodes, 1),
    )
    rows, _, _ = finished(with_idle, 10)
    others = replace(rows, first=rows.first[:-1])
    assert abs(best(10, -10.0)) < 1e12
    assert sum_of(alone, others) == pytest.approx(best(10, -10.0), rel=1e-9)


def test_equal_rounds_have_equal_answers():
    choices = small_round(5, -1.0)
    (one, *sums), (other, *others) = finished(choices, 5), finished(choices, 5)
    assert sums == others
    assert (one.matrix(choices.num_nodes) == other.matrix(choices.num_nodes)).all()


def test_what_it_does_not_model_is_left_to_others():
    racks = small_round(1, -1.0, racks=2)
    rows = poor_plan(racks, keep=False)
    assert finish(racks, rows, 0.0, 0.0, 0.0, 0.0, node_limit=1) is None

    by_number_of_nodes = small_round(3, -1.0)
    spread = by_number_of_nodes.spread.copy()
    spread[3:] = 0
    choices = replace(by_number_of_nodes, spread=spread)
    assert finish(choices, poor_plan(choices, keep=False), 0.0, 0.0, 0.0, 0.0, node_limit=1) is None


def test_a_plan_that_breaks_a_rule_is_no_start():
    choices = small_round(5, -1.0)
    rows = Rows.of_matrix(np.tile(choices.capacity, (choices.num_jobs, 1)))
    assert finish(choices, rows, 0.0, 1e9, 0.0, 0.0, node_limit=1) is None


def test_plans_are_worth_what_brute_force_says_and_broken_rules_are_seen():
    rng, broken = np.random.default_rng(0), 0
    for seed in range(80):
        choices = small_round(seed, 1.0)
        plan = poor_plan(choices, keep=True).matrix(choices.num_nodes)
        job, node = rng.integers(choices.num_jobs), rng.integers(choices.num_nodes)
        plan[job, node] = rng.integers(0, choices.capacity[node] + 1)
        rows = Rows.of_matrix(plan)
        worth, expected = worth_of(choices, rows), sum_of(choices, rows)
        broken += worth is None
        assert (-np.inf if worth is None else worth.sum()) == pytest.approx(expected), seed
    assert 15 < broken < 65


def test_patterns_leave_no_room_for_more():
    assert patterns(3, (1, 2), ()) == (Pattern((1, 1, 1), 0), Pattern((2, 1), 0))
    assert patterns(2, (), (1, 2)) == (Pattern((), 2),)
    assert set(patterns(2, (1,), (1, 2))) == {Pattern((1, 1), 0), Pattern((1,), 1), Pattern((), 2)}
    assert patterns(1, (2,), ()) == (Pattern((), 0),)
    assert len(patterns(8, tuple(range(1, 9)), ())) == 22
    assert len(patterns(8, tuple(range(1, 9)), tuple(range(1, 9)))) == 67
