"""One job on some GPUs: how far it is, how fast it goes."""

from __future__ import annotations

import pytest
from tests.simulator.scenes import SteadyTruth, steady_job

from pollux.core import Allocation, Cluster, FrozenMap, Node, NodeId, Progress, Shape
from pollux.simulator.options import AgentOptions, RankOrder
from pollux.simulator.run import Run, Training
from pollux.simulator.truth import truths_built_in

CLUSTER = Cluster.of(*(Node(NodeId(name), 4, "t4", FrozenMap({"rack": name})) for name in "abc"))


def run(gpus: dict[str, int], truth=None, order: RankOrder = RankOrder.LARGEST_FIRST, ready_at_s: float = 10.0, **spec):
    training = Training(steady_job("job", sum(gpus.values()), **spec)[1], truth or SteadyTruth(), AgentOptions())
    return Run(training, 1, Allocation(FrozenMap(gpus)), CLUSTER, order, 0.0, ready_at_s)


class TestPlacement:
    def test_nodes_form_a_ring_by_size_or_by_name(self):
        gpus = {"b": 3, "a": 1, "c": 2}
        assert run(gpus, order=RankOrder.BY_NODE).placement == (1, 3, 2)
        assert run(gpus, order=RankOrder.LARGEST_FIRST).placement == (3, 2, 1)

    def test_the_shape_counts_racks(self):
        made = run({"a": 1, "b": 2})
        assert made.shape == Shape(3, 2, 2)
        assert made.gpu_type == "t4"


class TestSpeed:
    def test_is_what_the_truth_says_at_the_batch_size_in_use(self):
        truth = truths_built_in(["cifar10"])["cifar10"]
        made = run({"a": 2}, truth, requested_batch_size=4096)
        assert (made.m, made.s, made.training.batch_size) == (1024, 1, 4096)
        noise, passes = truth.gradient(0, 4096), truth.passes("t4", (2,), 1024)
        seconds = passes.iteration_time_s + passes.grad_time_s
        gain = (noise.var + noise.sqr) / (noise.var / 32 + noise.sqr)
        assert made.rate == pytest.approx(gain / seconds)
        assert made.throughput == pytest.approx(4096 / seconds)
        assert made.efficiency == pytest.approx(gain / 32)
        assert made.rate == pytest.approx(made.throughput * made.efficiency / 128), "goodput in iterations of M0"

    def test_interference_takes_its_share_and_every_change_makes_old_predictions_void(self):
        made = run({"a": 2})
        before = made.version
        made.slowdown = 0.5
        made.find_speed()
        assert made.rate == 1.0
        assert made.version > before

    def test_rounding_up_uses_a_slightly_larger_batch(self):
        made = run({"a": 3}, requested_batch_size=32)
        assert (made.m, made.training.batch_size) == (11, 33)


class TestProgress:
    def test_begins_when_replicas_are_ready(self):
        made = run({"a": 2})
        assert [made.progress_at(now) for now in (0.0, 10.0, 11.0, 20.0)] == [0.0, 0.0, 2.0, 20.0]
        assert not made.trains(9.9)
        assert made.trains(10.0)

    def test_counts_once(self):
        made = run({"a": 2})
        for now in (5.0, 20.0, 20.0, 30.0):
            made.count(now)
        assert made.training.progress == 40.0
        assert made.progress_at(31.0) == 42.0

    def test_does_not_pass_the_end_of_an_epoch_by_itself(self):
        assert run({"a": 2}).progress_at(1000.0) == 100.0

    def test_survives_the_run_but_not_a_fall_back(self):
        made = run({"a": 2})
        made.count(30.0)
        training = made.training
        assert training.summary() == Progress(40.0, 200.0, 0.0)
        training.fall_back()
        assert training.progress == 0.0
        training.epoch, training.progress = 1, 150.0
        training.fall_back()
        assert training.progress == 100.0

    def test_is_done_after_the_last_epoch(self):
        training = run({"a": 1}).training
        assert not training.is_done
        training.epoch = 2
        assert training.is_done


class TestObserving:
    def test_nothing_is_measured_before_something_was_done(self):
        made = run({"a": 2}, fixed_batch=False)
        made.observe(10.0)
        assert not made.training.agent.profile
        made.observe(10.5)
        assert len(made.training.agent.profile.of_type("t4")) == 1

    def test_each_batch_size_is_measured_once(self):
        made = run({"a": 2}, fixed_batch=False)
        for m, seen in ((8, 1), (8, 1), (4, 2), (8, 2)):
            made.m = m
            made.observe(20.0)
            assert len(made.training.agent.profile.of_type("t4")) == seen

    def test_tuning_uses_what_was_measured(self):
        truth = truths_built_in(["ncf"])["ncf"]
        made = run({"a": 1}, truth, fixed_batch=False, requested_batch_size=None)
        assert made.training.batch_size == truth.limits.initial_batch_size
        made.observe(20.0)
        made.tune()
        assert made.training.batch_size > truth.limits.initial_batch_size
        assert made.passes == truth.passes("t4", (1,), made.m)


class TestDeclaredLength:
    def told(self, name="job", progress=10.0, **options):
        training = Training(steady_job(name, 1)[1], SteadyTruth(), AgentOptions(**options))
        training.progress = progress
        return training.summary()

    def test_is_right_unless_it_is_to_be_wrong(self):
        assert self.told().total == self.told(progress=20.0).total > 20.0

    def test_is_wrong_about_what_is_left_by_no_more_than_that_factor(self):
        right = self.told().remaining
        wrong = [self.told(f"job-{index}", length_error=3.0).remaining / right for index in range(40)]
        assert 1 / 3 <= min(wrong) < 0.6
        assert 1.6 < max(wrong) <= 3.0
        assert wrong == [self.told(f"job-{index}", length_error=3.0).remaining / right for index in range(40)]

    def test_may_be_missing(self):
        assert self.told(declares_length=False) == Progress(10.0)
