"""What oracles are told, against what then really happens."""

from __future__ import annotations

import pytest
from tests.simulator.scenes import SteadyTruth, run_jobs, steady_job

from pollux.core import Allocation, Cluster, FrozenMap, Node, NodeId, Oracle, Shape
from pollux.errors import InvalidModel
from pollux.simulator.options import AgentOptions, Options, WorldOptions
from pollux.simulator.oracle import OracleSource
from pollux.simulator.run import Run, Training
from pollux.simulator.truth import truths_built_in
from pollux.simulator.workload import WorkloadJob

EVERYTHING = ("remaining_iterations", "remaining_s", "iteration_time_s")
CLUSTER = Cluster.uniform(2, 4, "t4")
TRUTHS = truths_built_in()


def training(job: WorkloadJob, **spec: object) -> Training:
    truth = TRUTHS[job.application]
    _, made = steady_job(job.name, job.num_gpus, requested_batch_size=job.batch_size, **spec)
    return Training(made, truth, AgentOptions())


def ask(of: Training, cluster: Cluster = CLUSTER, options: Options | None = None, now: float = 0.0, run=None) -> Oracle:
    return OracleSource(EVERYTHING, options or Options()).ask(of, run, cluster, now)


@pytest.mark.parametrize(
    "job",
    [
        WorkloadJob("one", 0, "ncf", 1, 512),
        WorkloadJob("accumulates", 0, "bert", 1, 96),
        WorkloadJob("node", 0, "cifar10", 4, 1024),
        WorkloadJob("uneven", 0, "cifar10", 7, 2048),
        WorkloadJob("rounds-up", 0, "deepspeech2", 6, 160),
    ],
    ids=lambda job: job.name,
)
@pytest.mark.parametrize("doubles", [False, True])
def test_the_seconds_left_are_those_that_a_run_alone_takes(job, doubles):
    options = Options(world=WorldOptions(realloc_delay_s=0.0), agent=AgentOptions(single_gpu_accumulation=doubles))
    world = run_jobs("fifo", [job], TRUTHS, CLUSTER, options)
    (ended,) = world.scheduler.state.ended.values()
    expected = ended.finished_at_s - ended.first_started_at_s
    assert ask(training(job), options=options).remaining_s == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_seconds_left_go_down_with_the_time():
    job = WorkloadJob("a", 0, "ncf", 2, 1024)
    of = training(job)
    whole = ask(of).remaining_s
    run = Run(of, 1, Allocation(FrozenMap({"node-0": 2})), CLUSTER, Options().world.rank_order, 100.0, 130.0)
    assert ask(of, now=120.0, run=run).remaining_s == pytest.approx(whole), "it is not ready yet"
    assert ask(of, now=140.0, run=run).remaining_s == pytest.approx(whole - 10.0)
    of.epoch = of.truth.epochs - 1
    of.progress = of.truth.epoch_end(of.epoch)
    assert ask(of).remaining_s == 0.0


def test_iterations_left_count_from_the_end_of_the_epoch_and_are_1_in_the_last_one():
    of = training(WorkloadJob("a", 0, "cifar10", 2, 256))
    of.epoch = 3
    expected = of.truth.iterations(of.truth.epochs - 1, 256) - of.truth.iterations(3, 256)
    assert ask(of).remaining_iterations == expected
    of.epoch = of.truth.epochs - 1
    assert ask(of).remaining_iterations == 1.0


def test_iteration_times_are_those_of_the_densest_placements():
    cluster = Cluster.of(Node(NodeId("a"), 1, "t4"), Node(NodeId("b"), 3, "t4"), Node(NodeId("c"), 9, "k80"))
    of = training(WorkloadJob("a", 0, "cifar10", 1, 512), gpu_type="t4")
    times = ask(of, cluster).iteration_time_s
    passes = of.truth.passes
    assert times == {
        Shape(1, 1): passes("t4", (1,), 512).iteration_time_s,
        Shape(2, 1): passes("t4", (2,), 256).iteration_time_s,
        Shape(3, 1): passes("t4", (3,), 171).iteration_time_s,
        Shape(4, 2): passes("t4", (3, 1), 128).iteration_time_s,
    }


def test_the_published_oracle_believes_in_two_passes_on_one_gpu():
    of = training(WorkloadJob("a", 0, "cifar10", 1, 128))
    published = ask(of, options=Options(world=WorldOptions(oracle_doubles_one_gpu=True))).iteration_time_s
    passes = of.truth.passes("t4", (1,), 64)
    assert published[Shape(1)] == passes.iteration_time_s + passes.grad_time_s
    assert published[Shape(2)] == ask(of).iteration_time_s[Shape(2)]


class UpToThree(SteadyTruth):
    def passes(self, gpu_type, placement, per_gpu_batch_size):
        if sum(placement) > 3:
            raise InvalidModel("placement", placement, "not measured", "Use fewer GPUs")
        return super().passes(gpu_type, placement, per_gpu_batch_size)


def test_times_are_told_up_to_where_they_are_known():
    of = Training(steady_job("a", 2)[1], UpToThree(), AgentOptions())
    assert list(ask(of).iteration_time_s) == [Shape(1), Shape(2), Shape(3)]


def test_a_job_larger_than_the_cluster_is_told_about_the_whole_of_it():
    of = Training(steady_job("a", 100)[1], SteadyTruth(), AgentOptions())
    assert ask(of).remaining_s == pytest.approx(200 / 8)


def test_without_a_node_nobody_knows_how_long_it_takes():
    known = ask(Training(steady_job("a", 4)[1], UpToThree(), AgentOptions()), Cluster())
    assert known.remaining_s is None
    assert known.iteration_time_s == {}


def test_only_what_was_asked_for_is_told_and_it_follows_the_cluster():
    source = OracleSource(("remaining_s",), Options())
    of = Training(steady_job("a", 8)[1], SteadyTruth(), AgentOptions())
    assert source.ask(of, None, CLUSTER, 0.0) == Oracle(remaining_s=25.0)
    assert source.ask(of, None, Cluster.uniform(1, 4, "t4"), 0.0) == Oracle(remaining_s=50.0)
