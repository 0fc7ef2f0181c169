from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import BatchLimits, Cluster, FrozenMap, Node, NodeId, Oracle
from pollux.policies.optimus import Optimus, grow
from pollux.policies.packing import packed_shapes
from pollux.testing.snapshots import job, snapshot

TWO = Cluster.uniform(2, 4)


def given_out(moment, policy=None):
    """Job → node → GPUs."""
    plan = (policy or Optimus()).plan(moment, 0)
    plan.check(moment)
    return {job_id: dict(allocation.gpus) for job_id, allocation in plan.allocations.items()}


def counts(moment):
    return {job_id: sum(gpus.values()) for job_id, gpus in given_out(moment).items()}


def truth(*iteration_time_s: float, remaining: float | None = 100.0, cluster: Cluster = TWO) -> Oracle:
    """Of 1, 2 … GPUs; None where nobody knows."""
    shapes = packed_shapes(cluster, *cluster.gpu_types)
    times = {shape: t for shape, t in zip(shapes, iteration_time_s, strict=False) if t is not None}
    return Oracle(remaining, None, FrozenMap(times))


HALVES = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)


def grow_slow(given_counts, most, remaining, times, left):
    """The published loop, word for word: gains in a list, the first of the greatest."""

    def gain(i):
        now, then = times[i].get(found[i]), times[i].get(found[i] + 1)
        return 0.0 if found[i] + 1 > most[i] or now is None or then is None else (now - then) * remaining[i]

    found = list(given_counts)
    gains = [gain(i) for i in range(len(found))]
    while left > 0 and gains and max(gains) > 0:
        best = gains.index(max(gains))
        found[best] += 1
        gains[best] = gain(best)
        left -= 1
    return found


# Few different values, so that ties are frequent.
rows = st.tuples(
    st.integers(1, 3),
    st.integers(0, 12),
    st.sampled_from([0.0, 1.0, 10.0]),
    st.lists(st.sampled_from([None, 1.0, 2.0, 3.0, 4.0]), min_size=12, max_size=12),
)


@given(st.lists(rows, max_size=6), st.integers(0, 20))
def test_the_greedy_matches_its_plain_loop_specification(jobs, left):
    given_counts, most, remaining = ([row[column] for row in jobs] for column in range(3))
    times = [dict.fromkeys(range(1, 14)) | dict(enumerate(row[3], 1)) for row in jobs]
    expected = grow_slow(given_counts, most, remaining, times, left)
    assert grow(given_counts, most, remaining, times, left) == expected
    assert sum(expected) - sum(given_counts) <= left


def test_gpus_go_where_they_save_most_seconds():
    jobs = job("a", 0), job("b", 1)
    oracle = {"a": truth(*HALVES, remaining=50.0), "b": truth(*HALVES, remaining=1000.0)}
    assert counts(snapshot(TWO, *jobs, oracle=oracle)) == {"a": 2, "b": 6}


def test_the_earliest_wins_a_tie():
    oracle = {"a": truth(8.0, 7.0), "b": truth(8.0, 7.0)}
    three = Cluster.uniform(1, 3)
    assert counts(snapshot(three, job("a", 1), job("b", 0), oracle=oracle)) == {"a": 1, "b": 2}


def test_everybody_gets_one_before_anybody_gets_two_in_order_of_arrival():
    jobs = [job(f"j{i}", 9 - i) for i in range(10)]
    oracle = {each.id: truth(*HALVES) for each in jobs}
    assert counts(snapshot(TWO, *jobs, oracle=oracle)) == {f"j{i}": 1 for i in range(2, 10)}


def test_nobody_is_given_what_does_not_help():
    assert counts(snapshot(TWO, job("a"), oracle={"a": truth(8.0, 4.0, 4.0, 1.0)})) == {"a": 2}
    assert counts(snapshot(TWO, job("a"), oracle={"a": truth(8.0, 4.0, None, 1.0)})) == {"a": 2}
    assert counts(snapshot(TWO, job("a"), oracle={"a": truth(*HALVES, remaining=0.0)})) == {"a": 1}


def test_a_job_of_which_nothing_is_known_gets_its_minimum():
    assert counts(snapshot(TWO, job("a", min_gpus=2), oracle={})) == {"a": 2}
    assert counts(snapshot(TWO, job("a"), oracle={"a": truth(*HALVES, remaining=None)})) == {"a": 8}


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ({}, 8),
        ({"max_gpus": 3}, 3),
        ({"limits": BatchLimits(64, 1024, 16, 64)}, 4),
        ({"limits": BatchLimits(64, 1024, 16, 64), "requested_batch_size": 100}, 6),
        ({"limits": BatchLimits(64, 1024, 16, 64), "max_gpus": 2}, 2),
        ({"limits": BatchLimits(64, 1024, 48, 64), "min_gpus": 3}, 3),
        ({"gpus": 5, "rigid": True}, 5),
    ],
)
def test_nobody_exceeds_its_bounds(spec, most):
    assert counts(snapshot(TWO, job("a", **spec), oracle={"a": truth(*HALVES)})) == {"a": most}


def test_a_job_whose_minimum_does_not_fit_gets_nothing_and_lets_others_pass():
    jobs = job("a", 0, min_gpus=6), job("b", 1, min_gpus=3), job("c", 2, 2, rigid=True)
    assert counts(snapshot(TWO, *jobs, oracle={})) == {"a": 6, "c": 2}


def test_jobs_of_the_same_size_stay_and_the_others_are_placed_anew_smallest_first():
    jobs = (
        job("grows", 0, held={"node-0": 1}, max_gpus=3),
        job("stays", 1, held={"node-1": 2}, max_gpus=2),
        job("starts", 2, max_gpus=1),
    )
    oracle = {each.id: truth(*HALVES) for each in jobs}
    assert given_out(snapshot(TWO, *jobs, oracle=oracle)) == {
        "stays": {"node-1": 2},
        "starts": {"node-0": 1},
        "grows": {"node-0": 3},
    }


def test_a_job_whose_node_is_gone_moves_even_if_its_size_is_the_same():
    moment = snapshot(TWO, job("a", held={"gone": 2}, max_gpus=2), oracle={"a": truth(*HALVES)})
    assert given_out(moment) == {"a": {"node-0": 2}}


def test_jobs_that_must_not_be_preempted_get_their_minimum_first_and_may_grow():
    pinned_job = job("late", 9, held={"node-0": 2}, preemptible=False, min_gpus=2)
    early = [job(f"early-{i}", i, min_gpus=2) for i in range(4)]
    oracle = {"late": truth(*HALVES)}
    assert counts(snapshot(TWO, *early, pinned_job, oracle=oracle)) == {
        "early-0": 2, "early-1": 2, "early-2": 2, "late": 2
    }  # fmt: skip
    assert counts(snapshot(TWO, early[0], pinned_job, oracle=oracle)) == {"early-0": 2, "late": 6}


def test_each_gpu_type_is_given_out_by_itself():
    mixed = Cluster.of(Node(NodeId("a0"), 2, "a100"), Node(NodeId("t0"), 4, "t4"))
    oracle = {name: truth(*HALVES, cluster=Cluster.uniform(1, 8)) for name in ("x", "y")}
    moment = snapshot(mixed, job("x", 0, gpu_type="a100"), job("y", 1), oracle=oracle)
    assert given_out(moment) == {"x": {"a0": 2}, "y": {"t0": 4}}


def test_what_it_remembers_does_not_outlive_its_source():
    policy, jobs = Optimus(), (job("a"),)
    assert given_out(snapshot(TWO, *jobs, oracle={"a": truth(*HALVES)}), policy) != {}
    for useful in (1, 2, 3, 2, 1):
        times = tuple(1.0 / min(n, useful) for n in range(1, 9))
        found = given_out(snapshot(TWO, *jobs, oracle={"a": truth(*times)}), policy)
        assert found == {"a": {"node-0": useful}}
    small = Cluster.uniform(2, 1)
    oracle = {"a": truth(*HALVES[:2], cluster=small)}
    assert given_out(snapshot(small, *jobs, oracle=oracle), policy) == {"a": {"node-0": 1, "node-1": 1}}


class TestOneNode:
    """Jobs that must be on one node."""

    def test_one_grows_as_far_as_its_node_goes(self):
        jobs = [job("a", 0, single_node=True), job("b", 1)]
        found = given_out(snapshot(TWO, *jobs, oracle={"a": truth(*HALVES), "b": truth(*HALVES)}))
        assert found["a"] == {"node-0": 4}
        assert sum(found["b"].values()) == 4

    def test_one_stays_where_it_is_and_others_give_way(self):
        jobs = [job("a", 0, 2, {"node-0": 3}), job("b", 1, 4, {"node-1": 4}, rigid=True, single_node=True)]
        known = {"a": truth(*HALVES), "b": truth()}
        assert given_out(snapshot(TWO, *jobs, oracle=known)) == {"a": {"node-0": 4}, "b": {"node-1": 4}}

    def test_several_on_a_node_have_no_more_than_it_has(self):
        jobs = [job(name, i, single_node=True) for i, name in enumerate("ab")]
        node = Cluster.uniform(1, 4)
        found = counts(snapshot(node, *jobs, oracle=dict.fromkeys("ab", truth(*HALVES, cluster=node))))
        assert sum(found.values()) == 4
