from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from benchmarks import reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.policies.pollux.problems import POWERS, packed_plans, problem, problems, scaling

from pollux.policies.pollux.packed import NEVER, Offers, Packed, choose_sizes, offer, packed_sizes, place
from pollux.policies.pollux.solver import Budget


def solve(of):
    answer = Packed().solve(of, Budget(), np.random.default_rng(0))
    assert of.violations(answer.allocation) == []
    assert answer.fitness == of.fitness(answer.allocation)
    return answer


def rows(of):
    return solve(of).allocation.tolist()


def chosen(offers: Offers, num_gpus: int, choose=choose_sizes):
    return choose(*offers, num_gpus)


class TestPackedSizes:
    @pytest.mark.parametrize(
        ("nodes", "sizes"),
        [
            ([4, 4, 4], [1, 2, 4, 8, 12]),
            ([8], [1, 2, 4, 8]),
            ([6, 6], [1, 2, 4, 6, 12]),
            ([2, 8, 4], [1, 2, 4, 8, 12, 14]),
            ([1, 1], [1, 2]),
            ([], []),
        ],
    )
    def test_are_powers_of_two_within_a_node_and_whole_nodes_beyond(self, nodes, sizes):
        assert packed_sizes(np.array(nodes, dtype=np.int64)) == sizes


class TestOffers:
    def test_are_the_packed_sizes_within_the_bounds_the_minimum_and_what_is_held(self):
        of = problem([4, 4, 4], [{}, {0: 3}, {}, {1: 1, 2: 2}], least=[1, 1, 3, 1], most=[2, 12, 12, 2])
        offers = offer(of)
        assert offers.sizes.tolist() == [0, 1, 2, 3, 4, 8, 12]
        allowed = [offers.sizes[row > -np.inf].tolist() for row in offers.values]
        assert allowed == [[0, 1, 2], [0, 1, 2, 4, 8, 12], [0, 3, 4, 8, 12], [0, 1, 2]]
        assert (offers.kept_value > -np.inf).tolist() == [False, True, False, False], "the last holds too many"

    def test_the_pinned_are_offered_nothing_else(self):
        offers = offer(problem([4, 4], [{0: 3}], pinned=[True], most=[1]))
        assert (offers.values == -np.inf).all()
        assert offers.kept_value[0] > -np.inf

    def test_are_priced_on_the_fewest_nodes_and_after_the_factor(self):
        of = problem([4, 4], [{0: 1, 1: 1}], factor=[0.5])
        offers, alone, apart = offer(of), *scaling(8)
        expected = [-1 / (0.5 * each + 1e-3) for each in (0, alone[1], alone[2], alone[4], apart[8])]
        np.testing.assert_allclose(offers.values[0], expected)
        np.testing.assert_allclose(offers.kept_value[0], -1 / (apart[2] + 1e-3))

    def test_stop_at_the_largest_number_of_nodes(self):
        offers = offer(problem([4, 4, 4], [{}], max_nodes=2))
        assert offers.sizes[offers.values[0] > -np.inf].tolist() == [0, 1, 2, 4, 8]


# Few different values, so that ties are frequent; none of them is exact in binary.
value = st.sampled_from([-np.inf, -0.7, -0.3, -0.1, 0.1, 0.3])
option = st.tuples(st.integers(0, 5), value, value)


@st.composite
def offers(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3)))
    num_jobs, width = draw(st.integers(0, 4)), 1 + len(sizes)
    values, ties = (np.array(draw(st.lists(value, min_size=size, max_size=size))) for size in [num_jobs * width] * 2)
    values, ties = values.reshape(num_jobs, width), ties.reshape(num_jobs, width)
    values[:, 0], ties = np.maximum(values[:, 0], -0.7), np.maximum(ties, -0.7)
    kept = draw(st.lists(option, min_size=num_jobs, max_size=num_jobs))
    kept_size, kept_value, kept_tie = np.array(kept).reshape(-1, 3).T
    kept_tie = np.maximum(kept_tie, -0.7)
    return Offers(np.array([0, *sizes]), values, ties, kept_size.astype(np.int64), kept_value, kept_tie)


def worth(these: Offers, choice) -> tuple[int, float, float]:
    """GPUs, value and tie value of a choice."""
    size = value = tie = 0
    for job, index in enumerate(choice):
        is_kept = index < 0
        size += int(these.kept_size[job] if is_kept else these.sizes[index])
        value += these.kept_value[job] if is_kept else these.values[job, index]
        tie += these.kept_tie_value[job] if is_kept else these.tie_values[job, index]
    return size, value, tie


@settings(deadline=None)
@given(offers(), st.integers(0, 12))
def test_the_sizes_are_the_best_of_all_and_ties_are_broken(these, num_gpus):
    found = worth(these, chosen(these, num_gpus).tolist())
    assert found[0] <= num_gpus
    everything = [worth(these, choice) for choice in product(range(-1, len(these.sizes)), repeat=len(these.values))]
    possible = [(value, tie) for size, value, tie in everything if size <= num_gpus]
    best = max(value for value, _ in possible)
    assert found[1] == pytest.approx(best, abs=1e-9)
    assert found[2] == pytest.approx(max(tie for value, tie in possible if value >= best - 1e-9), abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(offers(), st.integers(0, 12))
def test_without_numba_the_sizes_are_the_same(these, num_gpus):
    in_python = getattr(choose_sizes, "py_func", choose_sizes)
    assert chosen(these, num_gpus, in_python).tolist() == chosen(these, num_gpus).tolist()


@settings(deadline=None)
@given(offers(), st.integers(0, 12))
def test_those_who_may_stay_do_so_among_equals(these, num_gpus):
    stay = [-1] * len(these.values)
    size, *present = worth(these, stay)
    assume(size <= num_gpus and present[0] > -np.inf)
    best = worth(these, chosen(these, num_gpus).tolist())[1:]
    if best == pytest.approx(tuple(present), abs=1e-9):
        assert chosen(these, num_gpus).tolist() == stay


@pytest.mark.parametrize("p", POWERS)
@given(st.permutations([1] * 8 + [2] * 8))
def test_rounding_is_no_reason_to_move(p, sizes):
    """Moving costs nothing and jobs could as well change places: equal sums, but for their last digits. Those who can
    never run make the sums large, and the others lift them over a power of two."""
    held = [{}] * 64 + [{node: size} for node, size in enumerate(sizes)]
    never = np.arange(len(held)) < 64
    most = np.where(never, 0, 2)
    of = problem(sizes, held, p=p, factor=np.ones(len(held)), speedup=scaling(24, 0.61) / 300, most=most)
    assert (chosen(offer(of), 24)[64:] == -1).all()


class TestSolve:
    @settings(deadline=None, max_examples=300)
    @given(problems())
    def test_never_breaks_a_rule(self, of):
        solve(of)

    @settings(deadline=None)
    @given(problems())
    def test_gives_the_same_answer_again(self, of):
        assert rows(of) == rows(of)

    @settings(deadline=None)
    @given(problems())
    def test_nobody_waits_beside_a_gpu_that_it_could_use(self, of):
        answer = solve(of).allocation
        waits = ~answer.any(axis=1) & (of.least == 1) & (of.most >= 1)
        assert not waits.any() or answer.sum() == of.capacity.sum()

    @settings(deadline=None, max_examples=200)
    @given(problems())
    def test_whoever_means_to_stay_keeps_its_gpus_while_nobody_may_be_moved(self, of):
        offers = offer(of)
        choice = chosen(offers, int(of.capacity.sum()))
        answer, _ = place(of, offers, choice, NEVER)
        keepers = of.present[choice < 0]
        meet = ((keepers > 0) & ((keepers > 0).sum(axis=1) > 1)[:, None]).sum(axis=0) > 1
        if not (of.avoid_interference and meet.any()):
            np.testing.assert_array_equal(answer[choice < 0], keepers)

    @settings(deadline=None, max_examples=200)
    @given(problems())
    def test_is_at_least_as_good_as_to_leave_all_as_it_is(self, of):
        if not of.violations(of.present) and (of.present.sum(axis=1) <= of.most).all():
            assert solve(of).fitness >= of.fitness(of.present) * (1 - 1e-9)

    @pytest.mark.parametrize("p", POWERS)
    @pytest.mark.parametrize(
        ("nodes", "num_jobs"), [([4], 1), ([4], 3), ([2, 2], 2), ([2, 2], 3), ([1, 1, 1], 3), ([4, 4], 1), ([4, 4], 2)]
    )
    def test_is_the_best_of_all_packed_plans_of_an_empty_cluster(self, nodes, num_jobs, p):
        tables = np.stack([scaling(sum(nodes), exponent) for exponent in (0.9, 0.5, 0.7)[:num_jobs]])
        of = problem(nodes, [{}] * num_jobs, p=p, speedup=tables)
        best = max(of.fitness(plan) for plan in packed_plans(of))
        assert solve(of).fitness == pytest.approx(best)

    def test_leaves_all_as_it_is_if_the_better_sizes_do_not_fit_on_the_nodes(self):
        """The last one would make more of two GPUs than the third of its one, but no node could have them."""
        tables = np.stack([scaling(5), scaling(5, 0.1), 0.2 * scaling(5), scaling(5)])
        of = problem(
            [1, 4],
            [{1: 1}, {1: 3}, {0: 1}, {}],
            pinned=[True, False, False, False],
            least=[1, 2, 1, 2],
            most=[1, 5, 1, 2],
            speedup=tables,
            max_nodes=1,
        )
        choice = chosen(offer(of), 5)
        assert choice[3] > 0, "the sizes alone would be better"
        assert rows(of) == of.present.tolist()

    @pytest.mark.data
    @pytest.mark.parametrize("name", reference.NAMES)
    def test_is_about_as_good_as_the_published_search_or_better(self, pollux_data, name):
        for case in reference.cases(pollux_data, name):
            assert solve(case.problem).fitness > 0.999 * case.problem.fitness(case.allocation), case.name

    def test_no_jobs(self):
        assert solve(problem([4, 4], [])).allocation.shape == (0, 2)

    def test_those_who_had_least_go_first_if_not_all_can_run(self):
        assert [sum(row) for row in rows(problem([2, 1], [{}] * 5))] == [1, 1, 1, 0, 0]

    def test_a_job_whose_bounds_exclude_each_other_waits(self):
        assert rows(problem([4], [{}], least=[4], most=[3])) == [[0]]

    def test_jobs_on_several_nodes_that_met_are_parted(self):
        of = problem([4, 4, 4], [{0: 1, 1: 1}, {1: 1, 2: 1}], factor=[0.0, 0.0], least=[2, 2], most=[2, 2])
        answer = rows(of)
        assert answer[0] == [1, 1, 0], "who comes first stays"
        assert sum(answer[1]) == 2

    def test_nobody_joins_the_pinned_on_several_nodes(self):
        of = problem(
            [2, 2], [{0: 1, 1: 1}, {0: 1, 1: 1}], factor=[0.0, 0.0], pinned=[True, False], least=[2, 2], most=[2, 2]
        )
        assert rows(of) == [[1, 1], [0, 0]]


class TestMoves:
    """Two nodes of four GPUs, unless said otherwise. Jobs of one GPU want no more; what comes pays nothing to start."""

    def comes(self, *held, size=4, nodes=(4, 4), **fields):
        """What the others hold after a job came that needs so many GPUs; it is the first row."""
        jobs = [{}, *held]
        most = [size] + [max(sum(each.values()), 1) for each in held]
        of = problem(nodes, jobs, least=[size] + [1] * len(held), most=most, **fields)
        return of, solve(of).allocation

    def moved(self, of, answer):
        return np.flatnonzero((answer != of.present).any(axis=1))[1:].tolist()

    def test_one_job_moves_where_one_is_in_the_way(self):
        of, answer = self.comes({0: 1}, {0: 1}, {1: 1})
        assert answer[0].tolist() == [0, 4]
        assert self.moved(of, answer) == [3]

    def test_nobody_moves_where_nobody_has_to(self):
        of, answer = self.comes({0: 1}, {0: 1}, {0: 1})
        assert answer[0].tolist() == [0, 4]
        assert self.moved(of, answer) == []

    def test_whole_nodes_are_emptied_with_the_fewest_moves(self):
        two_nodes_at_most = np.array([[0, 0], [0, 0], [0, 0], [1, 1], [1, 1]])
        held = {0: 1}, {0: 1}, {1: 1}, {2: 2}, {2: 1}, {3: 1}
        of, answer = self.comes(*held, size=8, nodes=(4, 4, 4, 4), spread=two_nodes_at_most, factor=[0.99] * 7)
        assert answer[0].tolist() == [0, 4, 0, 4]
        assert self.moved(of, answer) == [3, 6]

    def test_nobody_moves_where_fragments_serve_as_well(self):
        of, answer = self.comes({0: 1}, {1: 1}, speedup=scaling(8, apart=1.0))
        assert sorted(answer[0].tolist()) == [1, 3]
        assert self.moved(of, answer) == []

    def test_nor_where_moving_costs_more_than_it_brings(self):
        of, answer = self.comes({0: 1}, {1: 1}, factor=[1.0, 0.01, 0.01])
        assert sorted(answer[0].tolist()) == [1, 3]
        assert self.moved(of, answer) == []

    def test_only_those_move_who_make_way_for_a_gain(self):
        """Two jobs come, and one GPU of each node is free: to make room for the one pays, for the other it does not."""
        tables = np.stack([scaling(8, apart=0.3), scaling(8, apart=1.0), *[scaling(8)] * 4])
        of = problem(
            [2, 2, 2, 2],
            [{}, {}, {0: 1}, {1: 1}, {2: 1}, {3: 1}],
            least=[2, 2, 1, 1, 1, 1],
            most=[2, 2, 1, 1, 1, 1],
            speedup=tables,
        )
        answer = solve(of).allocation
        assert sorted(answer[0].tolist()) == [0, 0, 0, 2]
        assert sorted(answer[1].tolist()) == [0, 0, 1, 1]
        assert (answer[2:] != of.present[2:]).any(axis=1).sum() == 1

    @pytest.mark.parametrize("p", POWERS)
    def test_room_is_made_for_any_p_also_while_others_wait(self, p):
        held = [{0: 1}, {1: 1}, {0: 2}, {1: 2}]
        of = problem(
            [4, 4],
            [{}, *held, {}],
            p=p,
            least=[2, 1, 1, 2, 2, 8],
            most=[2, 1, 1, 2, 2, 8],
            speedup=scaling(8, apart=0.2),
        )
        answer = solve(of).allocation
        assert sorted(answer[0].tolist()) == [0, 2], (
            "the last one waits, whatever is done, and outweighs all for p = −10"
        )
