from __future__ import annotations

from dataclasses import replace

from pollux.core import Cluster, Node, NodeId, Phase
from pollux.policies.tiresias import Tiresias
from pollux.testing.snapshots import job, snapshot

ONE = Cluster.uniform(1, 4)
TWO = Cluster.uniform(2, 4)


def given_out(policy, moment):
    """Job → node → GPUs."""
    plan = policy.plan(moment, 0)
    plan.check(moment)
    return {job_id: dict(allocation.gpus) for job_id, allocation in plan.allocations.items()}


def test_jobs_that_had_much_service_go_behind_those_that_had_little():
    veteran = job("veteran", 0, 4, held={"node-0": 4}, attained_gpu_s=100.0)
    assert set(given_out(Tiresias(101.0), snapshot(ONE, veteran, job("new", 1, 1)))) == {"veteran"}
    assert set(given_out(Tiresias(100.0), snapshot(ONE, veteran, job("new", 1, 1)))) == {"new"}


def test_service_runs_on_while_a_job_holds_gpus():
    moment = snapshot(ONE, job("a", 0, 4, held={"node-0": 4}), job("b", 1, 4), time_s=25.0)
    assert set(given_out(Tiresias(101.0), moment)) == {"a"}
    assert set(given_out(Tiresias(100.0), moment)) == {"b"}


def test_smaller_jobs_pass_one_that_does_not_fit():
    moment = snapshot(ONE, job("a", 0, 2), job("b", 1, 3), job("c", 2, 2))
    assert set(given_out(Tiresias(), moment)) == {"a", "c"}


def test_the_second_queue_is_in_order_of_demotion():
    policy = Tiresias(100.0)
    young = [job("a", 0, 3), job("b", 1, 3)]
    policy.plan(snapshot(ONE, young[0], replace(young[1], attained_gpu_s=100.0)), 0)
    both = snapshot(ONE, *(replace(each, attained_gpu_s=200.0) for each in young))
    assert set(given_out(policy, both)) == {"b"}, "b was demoted first"
    assert set(given_out(Tiresias(100.0), both)) == {"a"}, "without a memory: by arrival"


def test_jobs_that_ended_are_forgotten():
    policy = Tiresias(100.0)
    b = job("b", 1, 3, attained_gpu_s=100.0)
    policy.plan(snapshot(ONE, b), 0)
    policy.plan(snapshot(ONE), 0)
    assert set(given_out(policy, snapshot(ONE, job("a", 0, 3, attained_gpu_s=100.0), b))) == {"a"}


def test_selected_jobs_keep_their_nodes_and_the_rest_is_placed_in_order_of_the_queues():
    moment = snapshot(
        TWO,
        job("demoted", 0, 1, attained_gpu_s=1e6),
        job("holds", 3, 2, held={"node-0": 2}),
        job("first", 1, 2),
        job("second", 2, 1),
    )
    assert given_out(Tiresias(), moment) == {
        "holds": {"node-0": 2},
        "first": {"node-1": 2},
        "second": {"node-0": 1},
        "demoted": {"node-1": 1},
    }


def test_a_job_is_spread_rather_than_left_waiting():
    moment = snapshot(TWO, job("a", 0, 3), job("b", 1, 5))
    assert given_out(Tiresias(), moment) == {"a": {"node-0": 3}, "b": {"node-0": 1, "node-1": 4}}


def test_a_job_that_is_being_resized_counts_where_it_goes():
    moving = replace(
        job("a", 0, 2, held={"node-0": 2}),
        phase=Phase.RESIZING,
        issued_generation=2,
        next_allocation=job("x", held={"node-1": 2}).allocation,
    )
    assert given_out(Tiresias(), snapshot(TWO, moving)) == {"a": {"node-1": 2}}


def test_gpus_are_counted_by_type():
    mixed = Cluster.of(Node(NodeId("a0"), 2, "a100"), Node(NodeId("t0"), 4, "t4"))
    moment = snapshot(
        mixed,
        job("picky", 0, 3, gpu_type="a100"),
        job("too-big", 1, 5),
        job("stays", 2, 1, held={"a0": 1}),
        job("free", 3, 4),
        job("small", 4, 1),
    )
    assert given_out(Tiresias(), moment) == {"stays": {"a0": 1}, "free": {"t0": 4}, "small": {"a0": 1}}
