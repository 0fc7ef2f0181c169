"""The genetic solver's operators, each against a plain twin: exactly where nothing is drawn, else in distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.pollux.problems import problem, problems

from pollux.policies.pollux.genetic import chance, operators, repair, survival
from pollux.policies.pollux.genetic.evaluation import Worth, evaluate, new_ones
from pollux.policies.pollux.genetic.repair import Rules

seeds = st.integers(0, 2**32 - 1)


def chance_of(seed: int):
    return chance.begin(np.random.default_rng(seed))


def anything(problem, seed: int):
    """An individual that breaks rules: up to the node's size in about a third of the entries."""
    rng = np.random.default_rng(seed)
    shape = problem.num_jobs, problem.num_nodes
    return (rng.integers(0, problem.capacity + 1, shape) * (rng.random(shape) < 0.35)).astype(np.int16)


def measured(individual):
    num_gpus, num_nodes = np.zeros((2, len(individual)), dtype=np.int64)
    repair.measure(individual, num_gpus, num_nodes)
    return num_gpus, num_nodes


def repaired(individual, rules, seed):
    store = individual[None].copy()
    repair.repair(store, np.zeros(1, dtype=np.int64), rules, chance_of(seed))
    return store[0]


some_jobs = problems().filter(lambda problem: problem.num_jobs > 0)


class TestChance:
    def test_is_the_same_as_machine_code_and_as_plain_python(self):
        compiled, plain = chance_of(1), chance_of(1)
        drawn = [(chance.below(compiled, 7), chance.misses(compiled, -0.1)) for _ in range(500)]
        draw = getattr(chance.draw, "py_func", chance.draw)
        assert [
            ((int(draw(plain)) * 7) >> 32, int(np.log((int(draw(plain)) + 0.5) / 2**32) / -0.1)) for _ in range(500)
        ] == drawn

    def test_is_uniform(self):
        state = chance_of(2)
        counts = np.bincount([chance.below(state, 10) for _ in range(20_000)], minlength=10)
        assert len(counts) == 10
        assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # chi-squared, 9 degrees of freedom, one in a thousand
        assert np.mean([chance.chance(state) for _ in range(20_000)]) == pytest.approx(0.5, abs=0.01)

    def test_counts_misses_as_often_as_single_trials_have_them(self):
        state = chance_of(3)
        drawn = np.array([chance.misses(state, np.log(0.9)) for _ in range(20_000)])
        assert drawn.mean() == pytest.approx(9.0, abs=0.3)
        assert (drawn == 0).mean() == pytest.approx(0.1, abs=0.01)


@given(some_jobs, seeds, st.data())
def test_children_have_their_rows_before_the_cut_swapped(problem, seed, data):
    first, second = anything(problem, seed), anything(problem, seed + 1)
    cut = data.draw(st.integers(0, problem.num_jobs - 1))
    child, sibling = np.full_like(first, -1), np.full_like(first, -1)
    operators.cross(first, second, cut, child, sibling)
    np.testing.assert_array_equal(child, np.concatenate([second[:cut], first[cut:]]))
    np.testing.assert_array_equal(sibling, np.concatenate([first[:cut], second[cut:]]))


def grown_entry_by_entry(individual, capacity, rng):
    """The published growth, as it is written down: one draw an entry."""
    grown, num_jobs = individual.copy(), len(individual)
    for n, size in enumerate(capacity):
        if individual[:, n].sum() >= size:
            continue
        holders = np.count_nonzero(individual[:, n])
        for j in range(num_jobs):
            p1, p2 = 1 / num_jobs, 1 / holders if individual[j, n] else 0.0
            if rng.random() < p1 + p2 - p1 * p2:
                grown[j, n] = rng.integers(individual[j, n], size + 1)
    return grown


class TestMutation:
    INDIVIDUAL = np.array([[1, 0, 4, 0], [1, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=np.int16)
    PRESENT = np.full_like(INDIVIDUAL, 7)
    CAPACITY = np.array([4, 3, 4, 2])

    def mean_of(self, operator, trials=4000):
        """Mean of what an operator makes of the individual, and of its square."""
        state = chance_of(5)
        total = np.zeros((2, *self.INDIVIDUAL.shape))
        for _ in range(trials):
            child = self.INDIVIDUAL.copy()
            operator(child, state)
            total += child, child.astype(float) ** 2
        return total / trials

    def test_resets_a_tenth_of_the_rows(self):
        mean, _ = self.mean_of(lambda child, state: operators.reset_rows(child, self.PRESENT, state))
        np.testing.assert_allclose(mean, 0.9 * self.INDIVIDUAL + 0.1 * self.PRESENT, atol=0.15)

    def test_drops_a_tenth_of_the_entries_in_a_tenth_of_the_rows(self):
        trials = 20_000
        mean, _ = self.mean_of(operators.shrink_rows, trials)
        np.testing.assert_allclose(mean[self.INDIVIDUAL > 0] / self.INDIVIDUAL[self.INDIVIDUAL > 0], 0.99, atol=0.004)
        assert not mean[self.INDIVIDUAL == 0].any()

    def test_grows_as_one_draw_an_entry_does(self):
        found = self.mean_of(lambda child, state: operators.grow(child, self.CAPACITY, state), 8000)
        rng = np.random.default_rng(6)
        twins = np.array([grown_entry_by_entry(self.INDIVIDUAL, self.CAPACITY, rng) for _ in range(8000)], dtype=float)
        np.testing.assert_allclose(found[0], twins.mean(axis=0), atol=0.08)
        np.testing.assert_allclose(found[1], (twins**2).mean(axis=0), atol=0.3)

    @given(some_jobs, seeds)
    def test_grows_only_upwards_and_only_where_a_gpu_is_free(self, problem, seed):
        before = anything(problem, seed)
        after = before.copy()
        operators.grow(after, problem.capacity, chance_of(seed))
        assert (after >= before).all()
        assert (after <= problem.capacity).all()
        full = before.sum(axis=0) >= problem.capacity
        np.testing.assert_array_equal(after[:, full], before[:, full])


def separated(individual, problem, published):
    """Interference as whole-array counts. Pinned rows come first and stay."""
    distributed = (individual > 0) & ((individual > 0).sum(axis=1) > 1)[:, None]
    leaves = distributed.cumsum(axis=0) > 1
    if not published:
        leaves &= distributed
    return np.where(leaves & ~problem.pinned[:, None], 0, individual)


def seated(individual, problem):
    """Rows in order into what is left of the nodes."""
    left = problem.capacity.copy()
    for row in problem.present[problem.pinned]:
        left -= row
    result = individual.copy()
    for j in range(problem.num_jobs):
        if not problem.pinned[j]:
            row = [min(int(wanted), int(free)) for wanted, free in zip(individual[j], left, strict=True)]
            result[j] = row if sum(row) >= problem.least[j] else 0
            left -= result[j]
    return result


class TestRepair:
    @given(some_jobs, seeds, st.booleans())
    def test_separates_distributed_jobs(self, problem, seed, published):
        individual = anything(problem, seed)
        individual[problem.pinned] = problem.present[problem.pinned]
        expected = separated(individual, problem, published)
        num_gpus, num_nodes = measured(individual)
        repair.separate(individual, Rules.of(problem, published_interference=published), num_gpus, num_nodes)
        np.testing.assert_array_equal(individual, expected)
        np.testing.assert_array_equal([num_gpus, num_nodes], measured(individual))

    @given(some_jobs, seeds)
    def test_cuts_rows_to_their_limits_and_no_further(self, problem, seed):
        before = anything(problem, seed)
        after, num_gpus = before.copy(), measured(before)[0]
        repair.cut_rows(after, Rules.of(problem), num_gpus, measured(before)[1], chance_of(seed))
        limits = (problem.most, problem.most_nodes, problem.pinned)
        for row, cut, most, max_nodes, pinned in zip(before, after, *limits, strict=True):
            if pinned or (row.sum() <= most and np.count_nonzero(row) <= max_nodes):
                np.testing.assert_array_equal(cut, row)
                continue
            assert (cut <= row).all()
            assert np.count_nonzero(cut) <= max_nodes
            assert cut.sum() <= most
            assert ((cut > 0) & (cut < row)).sum() <= 1  # the rest are whole or gone
            assert cut.sum() == most or np.count_nonzero(cut) == min(max_nodes, np.count_nonzero(row))
        np.testing.assert_array_equal(num_gpus, after.sum(axis=1))

    def test_draws_which_nodes_keep_theirs(self):
        rules, state = Rules.of(problem([4, 4, 4, 4], [{}], most=[6])), chance_of(7)
        total = np.zeros(4)
        for _ in range(4000):
            individual = np.full((1, 4), 3, dtype=np.int16)
            repair.cut_rows(individual, rules, *measured(individual), state)
            total += individual[0]
        np.testing.assert_allclose(total / 4000, 1.5, atol=0.12)

    @given(some_jobs, seeds)
    def test_seats_rows_in_order(self, problem, seed):
        individual = anything(problem, seed)
        individual[problem.pinned] = problem.present[problem.pinned]
        expected, rules = seated(individual, problem), Rules.of(problem)
        room, num_gpus = rules.room.copy(), measured(individual)[0]
        repair.seat_rows(individual, rules, num_gpus, room)
        np.testing.assert_array_equal(individual, expected)
        np.testing.assert_array_equal(num_gpus, individual.sum(axis=1))
        np.testing.assert_array_equal(room, problem.capacity - individual.sum(axis=0))

    @given(some_jobs, seeds, st.booleans(), st.booleans())
    def test_leaves_no_violation(self, problem, seed, published, seat_idle):
        individual = anything(problem, seed)
        rules = Rules.of(problem, published_interference=published, seat_idle=seat_idle)
        assert problem.violations(repaired(individual, rules, seed)) == []

    @given(some_jobs, seeds)
    def test_changes_nothing_that_breaks_no_rule(self, problem, seed):
        individual = repaired(anything(problem, seed), Rules.of(problem), seed)
        again = repaired(individual, Rules.of(problem), seed + 1)
        np.testing.assert_array_equal(again, individual)

    @given(some_jobs, seeds)
    def test_seats_idle_jobs_wherever_one_node_is_free_enough(self, problem, seed):
        individual = repaired(anything(problem, seed), Rules.of(problem), seed)
        more = repaired(individual, Rules.of(problem, seat_idle=True), seed)
        assert (more >= individual).all()
        idle = ~more.any(axis=1) & ~problem.pinned & (problem.most >= problem.least)
        free = problem.capacity - more.sum(axis=0)
        assert (problem.least[idle] > free.max()).all()

    def test_seats_an_idle_job_on_several_nodes_if_it_needs_them(self):
        wide = problem([4, 4, 4], [{0: 2, 1: 2}, {}, {}], least=[1, 2, 6], max_nodes=3)
        individual = repaired(wide.present.astype(np.int16), Rules.of(wide, seat_idle=True), 0)
        assert individual[1].sum() == 2
        assert individual[2].sum() == 0  # it would interfere with the first
        alone = problem([4, 4, 4], [{}, {}], least=[1, 6])
        individual = np.array([[1, 0, 0], [0, 0, 0]], dtype=np.int16)
        assert repaired(individual, Rules.of(alone, seat_idle=True), 0)[1].sum() == 6

    def test_idle_jobs_on_several_nodes_may_meet_where_interference_does_not_matter(self):
        wide = problem([2, 2, 2], [{}, {}], least=[3, 3], avoid_interference=False)
        nobody = np.zeros((2, 3), dtype=np.int16)
        seated = [repaired(nobody, Rules.of(wide, seat_idle=True), seed).sum() for seed in range(20)]
        assert max(seated) == 6


@given(some_jobs, seeds)
def test_individuals_are_worth_what_the_problem_says(problem, seed):
    store = np.stack([anything(problem, seed + i) for i in range(4)])
    store[0] = problem.present
    repair.repair(store, np.arange(4), Rules.of(problem), chance_of(seed))
    mean_value, utility = np.full((2, 4), np.nan)
    evaluate(store, np.array([0, 2, 3]), Worth.of(problem), mean_value, utility)
    for place in (0, 2, 3):
        fitness = float(problem.objective.of_mean(mean_value[place]))
        assert fitness == pytest.approx(problem.fitness(store[place]), rel=1e-12)
        in_use = problem.capacity[store[place].any(axis=0)].sum()
        speedup = problem.speedups(store[place]).sum()
        assert utility[place] == pytest.approx(speedup / in_use if in_use else 0.0, rel=1e-12)
    assert np.isnan([mean_value[1], utility[1]]).all()


@given(st.integers(1, 12), seeds)
def test_new_are_those_seen_neither_before_nor_among_themselves(size, seed):
    rng = np.random.default_rng(seed)
    store = rng.integers(0, 2, (size, 2, 2)).astype(np.int16)
    worth = store.sum(axis=(1, 2)).astype(float)  # the same for several that differ
    places = rng.permutation(size)
    known, places = np.split(places, [rng.integers(0, size)])
    seen, expected = {store[place].tobytes() for place in known}, []
    for place in places:
        expected.append(store[place].tobytes() not in seen)
        seen.add(store[place].tobytes())
    np.testing.assert_array_equal(new_ones(store, worth, worth, known, places), expected)


def beats(a, b):
    return a[0] >= b[0] and a[1] >= b[1] and tuple(a) != tuple(b)


def front_by_front(points):
    """Non-dominated sorting by definition."""
    front, left, k = np.full(len(points), -1), set(range(len(points))), 0
    while left:
        best = {i for i in left if not any(beats(points[j], points[i]) for j in left)}
        front[list(best)] = k
        left, k = left - best, k + 1
    return front


def crowding_of_front(points):
    """Crowding by objective, each sorted on its own; the first of equals stands for all."""
    if len(points) <= 2:
        return np.full(len(points), np.inf)
    crowding = np.zeros(len(points))
    firsts = [i for i in range(len(points)) if not any(tuple(points[i]) == tuple(points[j]) for j in range(i))]
    for objective in range(2):
        values = sorted({points[i][objective] for i in firsts})
        for i in firsts:
            at = values.index(points[i][objective])
            at_end = at in (0, len(values) - 1)
            gap = np.inf if at_end else (values[at + 1] - values[at - 1]) / (values[-1] - values[0])
            crowding[i] += gap / 2
    return crowding


points_drawn = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=25)


class TestSurvival:
    @settings(max_examples=200)
    @given(points_drawn)
    def test_ranks_by_fronts_and_crowding(self, drawn):
        points = np.array(drawn, dtype=float)
        front, crowding = survival.ranked(points[:, 0], points[:, 1])
        np.testing.assert_array_equal(front, front_by_front(points))
        for k in range(front.max() + 1):
            members = np.flatnonzero(front == k)
            np.testing.assert_allclose(crowding[members], crowding_of_front(points[members]))

    @given(points_drawn, st.integers(1, 25), seeds)
    def test_the_best_survive(self, drawn, size, seed):
        points = np.array(drawn, dtype=float)
        front, crowding = survival.ranked(points[:, 0], points[:, 1])
        chosen = survival.survivors(front, crowding, size, np.random.default_rng(seed))
        assert len(set(chosen.tolist())) == min(size, len(points))
        for out in set(range(len(points))) - set(chosen.tolist()):
            assert all((front[i], -crowding[i]) <= (front[out], -crowding[out]) for i in chosen)

    @given(st.integers(1, 12), st.integers(1, 30), seeds)
    def test_everybody_has_as_many_contests(self, size, number, seed):
        pairs = survival.contestants(size, number, np.random.default_rng(seed))
        assert pairs.shape == (number, 2)
        counts = np.bincount(pairs.ravel(), minlength=size)
        assert counts.max() - counts.min() <= 1

    @given(points_drawn, seeds)
    def test_contests_go_to_the_better_then_the_less_crowded_then_by_lot(self, drawn, seed):
        points, rng = np.array(drawn, dtype=float), np.random.default_rng(seed)
        _, crowding = survival.ranked(points[:, 0], points[:, 1])
        pairs, lots = rng.integers(0, len(points), (20, 2)), rng.random(20)
        chosen = survival.winners(pairs, *points.T.copy(), crowding, lots)
        for (a, b), winner, lot in zip(pairs, chosen, lots, strict=True):
            if beats(points[a], points[b]) or beats(points[b], points[a]):
                assert winner == (a if beats(points[a], points[b]) else b)
            elif crowding[a] != crowding[b]:
                assert winner == max(a, b, key=lambda i: crowding[i])
            else:
                assert winner == (a if lot < 0.5 else b)
