"""Figures of a run, checked by hand."""

from __future__ import annotations

import json

import pytest
from tests.simulator.scenes import Scripted, ends, steady_job, steady_world

from pollux.core import Cluster, Job, JobId, JobSpec, Node, NodeId, NodeJoined, Phase
from pollux.simulator.cluster_file import NodeChange
from pollux.simulator.metrics import JobOutcome, Outcome
from pollux.simulator.options import Options, WorldOptions
from pollux.simulator.timeline import Timeline


def timeline(*samples: tuple[float, int, int, int, float | None]) -> Timeline:
    """Samples of (time, GPUs of the cluster, active jobs, GPUs that train, efficiency)."""
    made = Timeline()
    for time_s, num_gpus, active, training, efficiency in samples:
        made.time_s.append(time_s)
        made.num_gpus.append(num_gpus)
        made.active_jobs.append(active)
        made.gpus_training.append(training)
        made.efficiency.append(efficiency)
    return made


def outcome(*jobs: JobOutcome, samples: Timeline | None = None) -> Outcome:
    return Outcome("w", "p", {}, jobs, samples or timeline((60.0, 4, 1, 1, 1.0)), [0.001, 0.003], 1.5)


A = JobOutcome("a", "ncf", 0.0, 60.0, 100.0, 0, 80.0)
B = JobOutcome("b", "cifar10", 50.0, 120.0, 350.0, 3, 640.0)


class TestFigures:
    def test_of_two_jobs(self):
        found = outcome(A, B).figures()
        assert found["avg_jct_s"] == 200.0
        assert found["p50_jct_s"] == 200.0
        assert found["p90_jct_s"] == pytest.approx(100 + 0.9 * 200)
        assert found["p99_jct_s"] == pytest.approx(100 + 0.99 * 200)
        assert found["makespan_s"] == 350.0
        assert found["reallocations_per_job"] == 1.5
        assert found["gpu_hours"] == 720 / 3600
        assert found["utilisation"] == 720 / (4 * 350)
        assert found["policy_cpu_ms_mean"] == pytest.approx(2.0)
        assert found["policy_cpu_ms_p99"] == pytest.approx(2.98)
        assert found["cpu_s"] == 1.5

    def test_of_one_job_all_percentiles_are_its_own(self):
        found = outcome(B).figures()
        assert {found[key] for key in ("avg_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "makespan_s")} == {300.0}

    def test_of_each_job(self):
        assert B.figures() == {
            "jct_s": 300.0,
            "application": "cifar10",
            "submitted_at_s": 50.0,
            "started_at_s": 120.0,
            "finished_at_s": 350.0,
            "queued_s": 70.0,
            "reallocations": 3,
            "gpu_hours": 640 / 3600,
        }

    def test_a_job_of_the_scheduler_tells_all_of_it(self):
        spec = JobSpec(JobId("b"), application="cifar10")
        job = Job(spec, 50.0, 0, Phase.SUCCEEDED, 4, 4, num_reallocations=3, attained_gpu_s=640.0,
                  first_started_at_s=120.0, finished_at_s=350.0)  # fmt: skip
        assert JobOutcome.of(job) == B

    def test_the_document_is_json_and_has_everything(self):
        document = json.loads(json.dumps(outcome(A, B).document()))
        assert document["num_jobs"] == 2
        assert document["jobs"]["a"]["jct_s"] == 100.0
        assert document["timeline"]["time_s"] == [60.0]
        assert document.keys() >= outcome(A, B).figures().keys()


class TestTimeline:
    def test_a_changing_cluster_counts_as_long_as_it_was(self):
        made = timeline((60.0, 4, 1, 1, None), (120.0, 8, 1, 1, None), (180.0, 2, 1, 1, None))
        assert made.offered_gpu_s(0.0, 240.0) == 4 * 120 + 8 * 60 + 2 * 60
        assert made.offered_gpu_s(100.0, 130.0) == 4 * 20 + 8 * 10
        assert made.offered_gpu_s(200.0, 210.0) == 2 * 10
        assert Timeline().offered_gpu_s(0.0, 10.0) == 0.0

    def test_contention_is_averaged_over_rounds_with_jobs(self):
        assert timeline(*((0.0, 4, count, 0, None) for count in (0, 1, 3, 0, 2))).mean_contention() == 2.0
        assert timeline().mean_contention() == 0.0

    def test_efficiency_is_weighted_by_gpus_that_train(self):
        made = timeline((0.0, 4, 1, 1, 0.5), (60.0, 4, 1, 0, None), (120.0, 4, 1, 3, 0.9))
        assert made.mean_efficiency() == pytest.approx((0.5 + 3 * 0.9) / 4)
        assert timeline((0.0, 4, 1, 0, None)).mean_efficiency() is None

    def test_utilisation_is_unknown_without_gpus(self):
        assert outcome(A, samples=timeline((60.0, 0, 1, 0, None))).figures()["utilisation"] is None


class TestInTheWorld:
    def test_samples_are_taken_after_each_round(self):
        script = {1: {"a": {"node-0": 2}}, 2: {"a": {"node-1": 1}, "b": {"node-0": 2}}}
        join = NodeChange(130.0, NodeJoined(Node(NodeId("node-2"), 4, "t4")))
        world = steady_world(Scripted(script), [steady_job("a", 2), steady_job("b", 2)], changes=[join])
        assert ends(world) == {"a": 290.0, "b": 250.0}
        found = world.timeline
        assert found.time_s == [60.0, 120.0, 180.0, 240.0]
        assert found.num_gpus == [4, 4, 8, 8]
        assert found.active_jobs == [2, 2, 2, 2]
        assert found.running_jobs == [1, 2, 2, 2], "a moves in the second round, and is counted where it goes"
        assert found.gpus_held == [2, 3, 3, 3]
        assert found.gpus_training == [0, 0, 3, 3]
        assert found.throughput == pytest.approx([0.0, 0.0, 3 * 32, 3 * 32])
        assert found.goodput == pytest.approx(found.throughput), "all of it is useful at M0"
        assert found.efficiency == [None, None, 1.0, 1.0]

    def test_figures_of_a_whole_run(self):
        options = Options(world=WorldOptions(realloc_delay_s=0.0))
        world = steady_world(
            "fifo", [steady_job("a", 4), steady_job("b", 4)], Cluster.uniform(1, 4, "t4"), options=options
        )
        world.run()
        jobs = tuple(JobOutcome.of(job) for job in world.scheduler.state.ended.values())
        found = Outcome("w", "fifo", {}, jobs, world.timeline, world.policy_cpu_s, 0.0).figures()
        assert (found["avg_jct_s"], found["makespan_s"]) == ((110 + 170) / 2, 170.0)
        assert found["utilisation"] == pytest.approx(100 / 170)
        assert found["avg_contention"] == 1.5
        assert found["max_contention"] == 2
        assert len(world.policy_cpu_s) == 2
