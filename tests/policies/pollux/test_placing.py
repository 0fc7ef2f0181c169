from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.pollux.problems import problem, problems

from pollux.policies.pollux.placing import Placing


def placed(nodes, *rows, **fields) -> Placing:
    """So many jobs on their rows (node → GPUs), and one more that has nothing."""
    of = problem(nodes, [*rows, {}], **fields)
    placing = Placing(of)
    for job in range(len(rows)):
        placing.put(job, of.present[job])
    return placing


def assert_books_are_right(placing: Placing, of) -> None:
    """What can be asked agrees with the allocation, counted anew."""
    allocation = placing.allocation
    np.testing.assert_array_equal(placing.free, of.capacity - allocation.sum(axis=0))
    assert (placing.free >= 0).all()
    distributed = (allocation > 0).sum(axis=1) > 1
    meeting = (allocation[distributed] > 0).sum(axis=0)
    for node in range(of.num_nodes):
        pair = np.zeros(of.num_nodes, dtype=np.int64)
        pair[[node, (node + 1) % of.num_nodes]] = 1
        if of.num_nodes > 1 and (placing.free[pair > 0] > 0).all():
            assert placing.fits(pair) == (not of.avoid_interference or not meeting[pair > 0].any())


@settings(deadline=None)
@given(
    problems(), st.lists(st.tuples(st.sampled_from(["find", "make room", "remove"]), st.integers(1, 9)), max_size=20)
)
def test_the_books_stay_right_whatever_happens(of, steps):
    placing = Placing(of)
    for number, (step, size) in enumerate(steps):
        if not of.num_jobs:
            return
        job = number % of.num_jobs
        if placing.allocation[job].any():
            if step == "remove":
                placing.remove(job)
        elif step == "find":
            row = placing.find(job, size)
            if row is not None:
                assert placing.fits(row)
                assert row.sum() == size
                assert np.count_nonzero(row) <= of.most_nodes[job]
                placing.put(job, row)
        elif step == "make room" and size <= of.capacity.sum():
            room = placing.make_room(job, size)
            if room is not None:
                row, leaving = room
                assert all(0 < placing.allocation[other].sum() < size and not of.pinned[other] for other in leaving)
                for other in leaving:
                    placing.remove(other)
                assert placing.fits(row)
                assert row.sum() == size
                assert np.count_nonzero(row) == placing.fewest_nodes(size) <= of.most_nodes[job]
                placing.put(job, row)
        assert_books_are_right(placing, of)


class TestFind:
    @pytest.mark.parametrize(
        ("size", "row"), [(1, [0, 1, 0]), (2, [0, 0, 2]), (4, [4, 0, 0]), (6, [4, 0, 2]), (7, [4, 1, 2])]
    )
    def test_the_fullest_node_that_has_room_else_as_few_nodes_as_can_be(self, size, row):
        assert placed([4, 4, 4], {1: 3}, {2: 2}).find(2, size).tolist() == row

    def test_none_if_there_are_not_so_many(self):
        assert placed([4, 4], {0: 1}).find(1, 8) is None

    def test_among_equals_where_it_is_already(self):
        of = problem([4, 4, 4], [{1: 2}])
        assert Placing(of).find(0, 4).tolist() == [0, 4, 0]

    def test_jobs_on_several_nodes_do_not_meet(self):
        placing = placed([4, 4, 4], {0: 1, 1: 1})
        assert placing.find(1, 5) is None
        assert placing.find(1, 3).tolist() == [3, 0, 0], "on one node it may be beside one"
        assert placed([4, 4], {0: 1, 1: 1}, avoid_interference=False).find(1, 5).tolist() == [3, 2]

    @pytest.mark.parametrize(("across", "row"), [(0.5, [3, 0, 3, 1]), (1.0, [3, 4, 0, 0])])
    def test_within_a_rack_if_the_job_gains_from_it(self, across, row):
        spread = np.array([[0, 0, 0], [0, 0, 0], [1, 1, 2], [1, 1, 2], [1, 1, 2]])
        table = np.arange(14) * np.array([[1.0], [0.8], [0.8 * across]])
        of = problem([3, 4, 3, 3], [{}], rack=[0, 1, 0, 0], spread=spread, speedup=table)
        assert Placing(of).find(0, 7).tolist() == row

    def test_no_more_nodes_than_allowed(self):
        assert placed([2, 2, 2], max_nodes=2).find(0, 5) is None
        assert placed([2, 2, 2], max_nodes=2).find(0, 4).tolist() == [2, 2, 0]


class TestMakeRoom:
    def test_where_the_fewest_jobs_have_to_go(self):
        row, leaving = placed([4, 4], {0: 1}, {0: 1}, {1: 1}).make_room(3, 4)
        assert (row.tolist(), leaving) == ([0, 4], [2])

    def test_nobody_has_to_go_where_there_is_room(self):
        row, leaving = placed([4, 4], {0: 1}).make_room(1, 4)
        assert (row.tolist(), leaving) == ([0, 4], [])

    def test_whole_nodes(self):
        row, leaving = placed([4, 4, 4], {0: 1}, {0: 1}, {1: 2}, {2: 3}).make_room(4, 8)
        assert (row.tolist(), leaving) == ([0, 4, 4], [2, 3])

    def test_the_one_who_had_most_goes_among_equals(self):
        assert placed([4], {0: 1}, {0: 1}, {0: 1}).make_room(3, 2)[1] == [2]

    def test_the_smallest_that_is_enough_goes(self):
        row, leaving = placed([8], {0: 3}, {0: 1}, {0: 2}).make_room(3, 4)
        assert (row.tolist(), leaving) == ([4], [2]), "two are free, two are missing"
        assert sorted(placed([8], {0: 3}, {0: 1}, {0: 2}).make_room(3, 6)[1]) == [0, 1]

    def test_neither_pinned_nor_larger_nor_distributed_jobs_give_way(self):
        assert placed([4], {0: 1}, pinned=[True, False]).make_room(1, 4) is None
        assert placed([4], {0: 3}).make_room(1, 2) is None
        assert placed([4, 4], {0: 1, 1: 1}).make_room(1, 4) is None

    def test_no_more_nodes_than_allowed(self):
        assert placed([4, 4], {0: 1}, max_nodes=1).make_room(1, 8) is None
        assert placed([4, 4], {0: 1}, single_node=[False, True]).make_room(1, 8) is None
        assert placed([4, 4], {0: 1}, single_node=[True, False]).make_room(1, 8) is not None


class TestMakeWay:
    def test_on_the_node_where_the_fewest_have_to_go(self):
        row, leaving = placed([4, 4], {0: 1}, {0: 1}, {1: 1}).make_way(4, ())
        assert (row.tolist(), leaving) == ([0, 4], [2])

    def test_distributed_and_larger_jobs_go_as_well(self):
        row, leaving = placed([2, 2], {0: 1, 1: 1}).make_way(2, ())
        assert (row.tolist(), leaving) == ([2, 0], [0])
        row, leaving = placed([4], {0: 3}).make_way(2, ())
        assert (row.tolist(), leaving) == ([2], [0])

    def test_neither_pinned_jobs_nor_those_that_are_spared(self):
        assert placed([4], {0: 3}, pinned=[True, False]).make_way(2, ()) is None
        assert placed([4, 4], {0: 3}, {1: 3}).make_way(2, {0, 1}) is None
        assert placed([4, 4], {0: 3}, {1: 3}).make_way(2, {0})[1] == [1]

    def test_no_node_is_large_enough(self):
        assert placed([4, 4]).make_way(5, ()) is None


@given(problems())
def test_a_row_is_worth_what_the_problem_says(of):
    placing = Placing(of)
    for job in range(of.num_jobs):
        for row in (of.present[job], placing.find(job, 1), placing.find(job, 3)):
            if row is not None:
                answer = of.present.copy()
                answer[job] = row
                assert placing.value(job, row) == pytest.approx(float(of.values(answer)[job]))
