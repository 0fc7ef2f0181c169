from __future__ import annotations

from pollux.core import Cluster, Oracle
from pollux.policies.fifo import Fifo
from pollux.policies.srtf import Remaining, Srtf
from pollux.testing.snapshots import job, snapshot

ONE = Cluster.uniform(1, 4)
TWO = Cluster.uniform(2, 4)


def given_out(policy, moment):
    """Job → node → GPUs."""
    plan = policy.plan(moment, 0)
    plan.check(moment)
    return {job_id: dict(allocation.gpus) for job_id, allocation in plan.allocations.items()}


def seconds(**remaining_s):
    return {name: Oracle(remaining_s=value) for name, value in remaining_s.items()}


class TestFifo:
    def test_the_first_that_does_not_fit_blocks_the_rest(self):
        moment = snapshot(ONE, job("a", 0, 2), job("b", 1, 3), job("c", 2, 1))
        assert given_out(Fifo(), moment) == {"a": {"node-0": 2}}
        assert given_out(Fifo(backfill=True), moment) == {"a": {"node-0": 2}, "c": {"node-0": 1}}

    def test_goes_by_arrival_not_by_name_and_by_priority_before_that(self):
        assert set(given_out(Fifo(), snapshot(ONE, job("a", 1, 4), job("b", 0, 4)))) == {"b"}
        assert set(given_out(Fifo(), snapshot(ONE, job("a", 1, 4, priority=1), job("b", 0, 4)))) == {"a"}

    def test_runs_nobody_down(self):
        late = job("late", 9, 4, held={"node-0": 4})
        assert set(given_out(Fifo(), snapshot(ONE, job("early", 0, 4, priority=5), late))) == {"late"}

    def test_a_job_whose_node_is_gone_queues_in_its_old_place(self):
        lost = job("lost", 0, 4, held={"gone": 4})
        assert given_out(Fifo(), snapshot(ONE, lost, job("b", 1, 4))) == {"lost": {"node-0": 4}}
        stays = job("stays", 2, 4, held={"node-0": 4})
        assert given_out(Fifo(), snapshot(ONE, lost, stays)) == {"stays": {"node-0": 4}}

    def test_a_job_that_lost_a_replica_is_given_its_size_again(self):
        assert given_out(Fifo(), snapshot(TWO, job("a", 0, 4, held={"node-1": 3}))) == {"a": {"node-0": 4}}

    def test_a_job_of_another_gpu_type_blocks_too(self):
        moment = snapshot(ONE, job("a", 0, 1, gpu_type="t4"), job("b", 1, 1))
        assert given_out(Fifo(), moment) == {}
        assert set(given_out(Fifo(backfill=True), moment)) == {"b"}


class TestSrtf:
    def test_the_shortest_goes_first_and_preempts(self):
        long = job("long", 0, 4, held={"node-0": 4})
        moment = snapshot(ONE, long, job("short", 1, 2), oracle=seconds(long=500.0, short=60.0))
        assert given_out(Srtf(), moment) == {"short": {"node-0": 2}}

    def test_skips_what_does_not_fit(self):
        moment = snapshot(ONE, job("a", 0, 3), job("b", 1, 2), job("c", 2, 1), oracle=seconds(a=1.0, b=2.0, c=3.0))
        assert set(given_out(Srtf(), moment)) == {"a", "c"}

    def test_service_counts_gpus(self):
        moment = snapshot(ONE, job("wide", 0, 4), job("narrow", 1, 1), oracle=seconds(wide=50.0, narrow=100.0))
        assert set(given_out(Srtf(), moment)) == {"wide"}
        assert set(given_out(Srtf(by=Remaining.SERVICE), moment)) == {"narrow"}

    def test_a_job_about_to_end_is_left_alone(self):
        ending = job("ending", 0, 4, held={"node-0": 4})
        moment = snapshot(ONE, ending, job("b", 1, 1), oracle=seconds(ending=29.0, b=40.0))
        by_service = Srtf(by=Remaining.SERVICE)
        assert given_out(by_service, moment) == {"ending": {"node-0": 4}}
        assert set(given_out(Srtf(by=Remaining.SERVICE, min_remaining_s=29.0), moment)) == {"b"}

    def test_without_preemption_running_jobs_stay(self):
        long = job("long", 0, 3, held={"node-0": 3})
        moment = snapshot(ONE, long, job("b", 1, 2), job("c", 2, 1), oracle=seconds(long=500.0, b=60.0, c=70.0))
        assert given_out(Srtf(preempt=False), moment) == {"long": {"node-0": 3}, "c": {"node-0": 1}}

    def test_jobs_of_which_nothing_is_known_go_last_in_order_of_arrival(self):
        jobs = job("x", 0, 2), job("y", 1, 2), job("known", 2, 2)
        oracle = {"known": Oracle(remaining_s=1e9), "y": Oracle()}
        assert set(given_out(Srtf(), snapshot(ONE, *jobs, oracle=oracle))) == {"known", "x"}

    def test_selected_jobs_keep_their_nodes(self):
        moment = snapshot(TWO, job("a", 0, 2), job("b", 1, 2, held={"node-1": 2}), oracle=seconds(a=1.0, b=2.0))
        assert given_out(Srtf(), moment) == {"a": {"node-0": 2}, "b": {"node-1": 2}}
