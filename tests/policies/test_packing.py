from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import Allocation, Cluster, FrozenMap, Node, NodeId, Shape
from pollux.policies.packing import (
    Free,
    by_arrival,
    packed_shapes,
    pinned,
    plan_in_order,
    requested_size,
    settled,
)
from pollux.testing.snapshots import job, snapshot


def cluster(*sizes: int, gpu_type: str = "gpu") -> Cluster:
    return Cluster.of(*(Node(NodeId(f"n{i}"), size, gpu_type) for i, size in enumerate(sizes)))


def allocation(**gpus: int) -> Allocation:
    return Allocation(FrozenMap({NodeId(node): count for node, count in gpus.items()}))


TWO_TYPES = Cluster.of(
    Node(NodeId("a0"), 4, "a100"), Node(NodeId("t0"), 4, "t4"), Node(NodeId("t1"), 4, "t4", schedulable=False)
)


def take_slow(free: dict[str, int], num_gpus: int) -> dict[str, int] | None:
    """The published rule, word for word."""
    if sum(free.values()) < num_gpus:
        return None
    taken: dict[str, int] = {}
    while num_gpus:
        node = max(sorted(free), key=lambda name: free[name])
        count = min(free[node], num_gpus)
        taken[node] = taken.get(node, 0) + count
        free[node] -= count
        num_gpus -= count
    return taken


class TestFree:
    @given(st.lists(st.integers(1, 8), max_size=6), st.lists(st.integers(1, 12), max_size=8))
    def test_takes_what_the_published_rule_takes(self, sizes, requests):
        free, slow = Free(cluster(*sizes)), {f"n{i}": size for i, size in enumerate(sizes)}
        for num_gpus in requests:
            taken, expected = free.take(num_gpus), take_slow(slow, num_gpus)
            assert (None if taken is None else dict(taken.gpus)) == expected
            assert free.total == sum(slow.values())

    def test_takes_the_type_with_most_free_gpus_and_the_first_by_name_on_ties(self):
        free = Free(TWO_TYPES)
        assert free.take(1) == allocation(a0=1)
        assert free.take(1) == allocation(t0=1)
        assert free.by_type == {"a100": 3, "t4": 3}

    def test_never_mixes_types(self):
        free = Free(TWO_TYPES)
        assert free.total == 8
        assert free.take(5) is None
        assert free.take(4, "t4") == allocation(t0=4)
        assert free.take(1, "t4") is None
        assert free.take(1, "h100") is None

    def test_holds_what_is_free_and_of_one_type(self):
        def holds(wanted: Allocation, gpu_type: str | None = None) -> bool:
            return Free(TWO_TYPES).hold(wanted, gpu_type)

        assert holds(allocation(a0=4))
        assert holds(allocation(a0=4), "a100")
        assert not holds(allocation(a0=4), "t4")
        assert not holds(allocation(a0=5))
        assert not holds(allocation(a0=1, t0=1)), "of two types"
        assert not holds(allocation(t1=1)), "drained"
        assert not holds(allocation(gone=1))

    def test_what_is_held_is_not_free_and_what_cannot_be_held_changes_nothing(self):
        free = Free(TWO_TYPES)
        assert free.hold(allocation(a0=3))
        assert free.by_type == {"a100": 1, "t4": 4}
        assert not free.hold(allocation(a0=2))
        assert not free.hold(allocation(a0=1, gone=1))
        assert free.total == 5

    def test_tells_the_type_of_an_allocation(self):
        free = Free(TWO_TYPES)
        assert free.gpu_type(allocation(t0=1)) == "t4"
        assert [free.gpu_type(allocation(**held)) for held in ({}, {"gone": 1}, {"a0": 1, "t0": 1})] == [None] * 3

    def test_two_of_the_same_cluster_do_not_know_each_other(self):
        first, second = Free(TWO_TYPES), Free(TWO_TYPES)
        first.take(4)
        assert second.total == 8


class TestOneNode:
    """Jobs that must be on one node."""

    def plan(self, moment, **options):
        plan = plan_in_order(moment, by_arrival(moment.jobs.values()), **options)
        plan.check(moment)
        return {name: dict(allocation.gpus) for name, allocation in plan.allocations.items()}

    def test_the_fullest_node_with_room_is_taken(self):
        free = Free(cluster(4, 2, 3, 3))
        assert free.take_together(3, "gpu", {}) == allocation(n2=3)
        assert free.take_together(3, "gpu", {}) == allocation(n3=3)
        assert free.take_together(3, "gpu", {}) == allocation(n0=3)
        assert free.take_together(3, "gpu", {}) is None
        assert free.take_together(1, "unheard-of", {}) is None
        assert (free.total, free.on_node("n1"), free.most_on_one_node("gpu")) == (3, 2, 2)

    def test_a_node_that_others_claim_is_taken_only_if_no_other_has_room(self):
        free = Free(cluster(2, 4))
        assert free.take_together(2, "gpu", {"n0": 1}) == allocation(n1=2)
        assert free.take_together(2, "gpu", {"n0": 1, "n1": 1}) == allocation(n0=2)

    def test_whoever_runs_stays_and_is_not_moved_for_one_behind_it(self):
        runs = job("a", 0, 2, {"n0": 1, "n1": 1})
        waits = job("b", 1, 2, single_node=True)
        assert self.plan(snapshot(cluster(2, 2), runs, waits)) == {"a": {"n0": 1, "n1": 1}}

    def test_whoever_runs_moves_for_one_before_it(self):
        runs = job("a", 1, 2, {"n0": 1, "n1": 1})
        waits = job("b", 0, 2, single_node=True)
        assert self.plan(snapshot(cluster(2, 2), runs, waits)) == {"a": {"n1": 2}, "b": {"n0": 2}}

    def test_jobs_that_may_be_anywhere_fill_what_is_left(self):
        jobs = [job("a", 0, 3), job("b", 1, 3, single_node=True), job("c", 2, 2, single_node=True)]
        assert self.plan(snapshot(cluster(4, 4), *jobs)) == {"b": {"n0": 3}, "c": {"n1": 2}, "a": {"n1": 2, "n0": 1}}

    def test_one_that_fits_on_no_node_waits_and_blocks_where_the_order_is_strict(self):
        jobs = [job("a", 0, 5, single_node=True), job("b", 1, 5)]
        moment = snapshot(cluster(4, 4), *jobs)
        assert list(self.plan(moment)) == ["b"]
        assert self.plan(moment, strict=True) == {}

    def test_a_type_with_fewer_gpus_is_taken_if_only_that_has_such_a_node(self):
        nodes = Cluster.of(*(Node(NodeId(f"a{i}"), 1, "a100") for i in range(8)), Node(NodeId("t0"), 4, "t4"))
        assert self.plan(snapshot(nodes, job("a", 0, 2, single_node=True))) == {"a": {"t0": 2}}

    def test_what_is_held_of_several_nodes_cannot_be_kept(self):
        split = job("a", 0, 2, {"n0": 1, "n1": 1}, single_node=True, preemptible=False)
        moment = snapshot(cluster(2, 2), split)
        assert pinned(moment, Free(moment.cluster)) == {}
        assert settled([split], moment.cluster) == []
        assert self.plan(moment) == {"a": {"n0": 2}}


class TestPackedShapes:
    def test_fill_the_largest_nodes_first(self):
        assert packed_shapes(cluster(1, 4, 2), "gpu") == (
            *(Shape(n, 1) for n in (1, 2, 3, 4)), Shape(5, 2), Shape(6, 2), Shape(7, 3)
        )  # fmt: skip

    def test_count_racks_as_an_allocation_would(self):
        racks = Cluster.of(*(Node(NodeId(f"n{i}"), 4, labels=FrozenMap({"rack": f"r{i // 2}"})) for i in range(4)))
        shapes = packed_shapes(racks, "gpu")
        assert shapes[8 - 1] == Shape(8, 2, 1)
        assert shapes[9 - 1] == allocation(n0=4, n1=4, n2=1).shape(racks) == Shape(9, 3, 2)

    def test_are_of_one_type_and_leave_drained_nodes_out(self):
        assert packed_shapes(TWO_TYPES, "t4") == tuple(Shape(n, 1) for n in (1, 2, 3, 4))
        assert packed_shapes(TWO_TYPES, "h100") == ()


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ({}, 1),
        ({"min_gpus": 3}, 3),
        ({"gpus": 4}, 4),
        ({"gpus": 4, "max_gpus": 2}, 2),
        ({"gpus": 4, "min_gpus": 6}, 6),
        ({"gpus": 4, "max_gpus": 2, "rigid": True}, 4),
    ],
)
def test_the_requested_size_is_within_the_bounds_of_the_job(spec, size):
    assert requested_size(job("a", **spec)) == size


class TestPinned:
    def test_jobs_that_must_not_be_preempted_stay(self):
        free = Free(cluster(4, 4))
        moment = snapshot(
            cluster(4, 4),
            job("stays", 0, 2, held={"n0": 2}, preemptible=False),
            job("may-go", 1, 2, held={"n0": 2}),
            job("waits", 2, 2, preemptible=False),
        )
        assert pinned(moment, free) == {"stays": allocation(n0=2)}
        assert free.total == 6

    @pytest.mark.parametrize(
        ("held", "spec"),
        [({"gone": 2}, {}), ({"n0": 2, "gone": 1}, {}), ({"n0": 2}, {"min_gpus": 3}), ({"n0": 2}, {"gpu_type": "t4"})],
    )
    def test_but_not_where_they_cannot(self, held, spec):
        free = Free(cluster(4))
        assert pinned(snapshot(cluster(4), job("a", 0, 2, held=held, preemptible=False, **spec)), free) == {}
        assert free.total == 4

    def test_with_more_than_the_maximum_it_keeps_the_maximum(self):
        moment = snapshot(cluster(4, 4), job("a", 0, 2, held={"n0": 1, "n1": 4}, preemptible=False, max_gpus=3))
        assert pinned(moment, Free(cluster(4, 4))) == {"a": allocation(n1=3)}
