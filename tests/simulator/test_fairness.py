"""Finish-time fairness: hand-computed scenes, and the laws that ρ follows."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.scenes import EQUAL_SHARE, SteadyTruth

from pollux.core import Allocation, Cluster, Node, NodeId, NodeJoined, NodeLost, Plan, Snapshot
from pollux.errors import InvalidSpec, PolluxError
from pollux.policies import Policy
from pollux.simulator.cluster_file import ClusterFile, NodeChange
from pollux.simulator.comparison import run_all
from pollux.simulator.fairness import Fairness, contentions, measure, partition, phase_s
from pollux.simulator.metrics import Outcome
from pollux.simulator.options import Options
from pollux.simulator.scenario import GPU_TYPE, Scenario, simulate
from pollux.simulator.settings import applied
from pollux.simulator.workload import Workload, WorkloadJob, write_workload

STARTS_S = 60.0 + 30.0
"""A job of the first moment waits for the first round, and then for its replicas."""
STEADY_S = 200.0
"""Training time of a steady job on one GPU; on n GPUs an n-th of it."""


class Steady(SteadyTruth):
    """The truth with round numbers, where a run also looks for somewhere to keep it."""

    def save(self) -> None:
        pass


class Short(Policy):
    """Gives each job a GPU; refuses to plan more often than one short run needs."""

    num_plans = 0

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        self.num_plans += 1
        assert self.num_plans <= 5, "used for more than one run"
        return Plan.of({job: Allocation.of({NodeId("node-0"): 1}) for job in snapshot.jobs})


def uniform(num_nodes: int, gpus_per_node: int) -> ClusterFile:
    return ClusterFile(Cluster.uniform(num_nodes, gpus_per_node, GPU_TYPE))


def jobs(*asked: tuple[float, int]) -> tuple[WorkloadJob, ...]:
    """Steady jobs `job-0` … by time of submission and GPUs."""
    return tuple(WorkloadJob(f"job-{i}", at_s, "steady", gpus, 32) for i, (at_s, gpus) in enumerate(asked))


@pytest.fixture
def run(tmp_path):
    """The outcome of steady jobs that share a cluster, with their fairness."""

    def run(policy: str, cluster: ClusterFile, *asked: tuple[float, int], **options: object) -> Outcome:
        path = tmp_path / "steady.csv"
        write_workload(Workload("steady", jobs(*asked)), path)
        scenario = Scenario(str(path), policy, cluster, options=applied(Options(), options), fairness=True)
        return simulate(scenario, truths={"steady": Steady()})

    return run


class TestScenes:
    def test_a_job_that_was_alone_anyway_has_exactly_1(self, run):
        outcome = run("fifo", uniform(2, 2), (0.0, 3))
        assert outcome.fairness.rho == (1.0,)
        assert outcome.fairness.isolated_jct_s == (outcome.jobs[0].jct_s,) == (STARTS_S + STEADY_S / 3,)

    def test_two_equal_jobs_with_half_the_cluster_each_have_exactly_1(self, run):
        fairness = run("fifo", uniform(1, 2), (0.0, 1), (0.0, 1)).fairness
        assert fairness.rho == (1.0, 1.0)
        assert (fairness.worst, fairness.unfair_fraction) == (1.0, 0.0)

    def test_who_waits_in_a_queue_pays_and_who_is_ahead_gains(self, run):
        """Both ask for both GPUs. The first trains from 90 to 190 s; the second starts in the round of 240 s."""
        outcome = run("fifo", uniform(1, 2), (0.0, 2), (0.0, 2))
        assert [job.jct_s for job in outcome.jobs] == [190.0, 370.0]
        on_one, on_two = STARTS_S + STEADY_S, STARTS_S + STEADY_S / 2
        share = 2 / ((2 * 190 + 180) / 370)  # two jobs for 190 s, then one
        isolated = on_one + (share - 1) * (on_two - on_one)
        assert outcome.fairness.isolated_jct_s == pytest.approx((on_one, isolated))
        assert outcome.fairness.rho == pytest.approx((190 / on_one, 370 / isolated))
        assert outcome.fairness.worst == outcome.fairness.rho[1]
        assert outcome.fairness.unfair_fraction == 0.5

    def test_less_than_one_gpu_is_one_for_that_part_of_the_time(self, run):
        outcome = run("fifo", uniform(1, 1), (0.0, 1), (0.0, 1), (0.0, 1))
        assert [job.jct_s for job in outcome.jobs] == [290.0, 530.0, 770.0]
        shares = [1 / 3, 530 / (3 * 290 + 2 * 240), 770 / (3 * 290 + 2 * 240 + 240)]
        assert outcome.fairness.isolated_jct_s == pytest.approx([290 / share for share in shares])

    def test_a_request_beyond_the_share_is_lowered_to_it_and_keeps_its_batch(self, tmp_path):
        """bert with 48 examples does not fit onto one GPU at once: it accumulates there."""
        path = tmp_path / "w.csv"
        wide = [WorkloadJob(f"job-{i}", 0.0, "bert", 4, 48) for i in range(4)]
        write_workload(Workload("w", tuple(wide)), path)
        found = simulate(Scenario(str(path), "tiresias", uniform(1, 4), fairness=True))
        alone = WorkloadJob("alone", 0.0, "bert", 1, 48)
        write_workload(Workload("w", (alone,)), path)
        on_one = simulate(Scenario(str(path), "tiresias", uniform(1, 1))).jobs[0].jct_s
        assert found.fairness.isolated_jct_s[0] == pytest.approx(on_one)

    def test_policies_that_adapt_have_it_too(self, run):
        fairness = run(EQUAL_SHARE, uniform(2, 2), (0.0, 1), (10.0, 4), (70.0, 2)).fairness
        assert len(fairness.rho) == 3
        assert all(0.5 < rho < 2.0 for rho in fairness.rho)

    def test_every_run_has_a_policy_of_its_own(self, run):
        assert run(f"{__name__}:Short", uniform(1, 2), (0.0, 1), (0.0, 1)).fairness.rho == (1.0, 1.0)

    @pytest.mark.parametrize("at_s", [0.0, 1.0, 59.0, 60.0, 61.5, 105.0, 180.0])
    def test_the_wait_for_the_first_round_is_that_of_the_shared_run(self, run, at_s):
        outcome = run("fifo", uniform(1, 2), (at_s, 1))
        assert outcome.fairness.isolated_jct_s == (outcome.jobs[0].jct_s,)

    def test_a_job_that_comes_late_is_off_by_rounding_at_most(self, run):
        assert run("fifo", uniform(1, 2), (60 * 1234 + 0.7, 1)).fairness.rho == pytest.approx((1.0,), abs=1e-12)


class Fussy(Short):
    """Fails, or gives nothing, once it has a job to itself: which in these scenes only isolated runs have."""

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        if len(snapshot.jobs) == 1:
            raise RuntimeError("I hate to be alone")
        return super().plan(snapshot, seed)


class Lazy(Short):
    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        return Plan() if len(snapshot.jobs) == 1 else super().plan(snapshot, seed)


class TestFailures:
    def test_the_time_limit_is_that_of_the_shared_run(self, run):
        """One after the other they have three GPUs each; but a share of 1.5 is also tried as one GPU alone."""
        options = {"interval_s": 10, "world.realloc_delay_s": 0, "world.max_time_s": 160}
        outcome = run("fifo", uniform(1, 3), (0.0, 3), (0.0, 3), **options)
        assert max(job.finished_at_s for job in outcome.jobs) < 160 < 10 + STEADY_S
        assert len(outcome.fairness.rho) == 2

    @pytest.mark.parametrize(
        ("policy", "message"), [("Fussy", "I hate to be alone"), ("Lazy", "gives these jobs nothing")]
    )
    def test_of_an_isolated_run_name_the_job_and_say_that_it_was_alone(self, run, policy, message):
        with pytest.raises(PolluxError, match=message) as failure:
            run(f"{__name__}:{policy}", uniform(1, 2), (0.0, 1), (0.0, 1))
        assert "job 'job-0'" in str(failure.value)
        assert "alone on its fair share (1 GPUs)" in str(failure.value)
        assert isinstance(failure.value, InvalidSpec) == (policy == "Lazy"), "a bug is told as one"


class TestChangingClusters:
    def test_the_share_is_that_of_the_nodes_at_the_start_and_never_fails(self, run):
        lose = NodeChange(100.0, NodeLost(NodeId("node-1")))
        outcome = run("fifo", ClusterFile(Cluster.uniform(2, 1, GPU_TYPE), (lose,)), (0.0, 1), (0.0, 1))
        assert outcome.fairness.isolated_jct_s[0] == STARTS_S + STEADY_S
        assert outcome.fairness.rho[0] == 1.0
        assert outcome.fairness.rho[1] > 1.5, "its node was lost"

    def test_random_failures_count_against_the_shared_run_only(self, run):
        options = {"world.node_mtbf_s": 150.0, "world.node_repair_s": 60.0}
        outcome = run("fifo", uniform(1, 1), (0.0, 1), **options)
        assert outcome.fairness.isolated_jct_s == (STARTS_S + STEADY_S,)
        assert outcome.fairness.rho[0] > 1.0

    def test_a_cluster_without_a_gpu_at_the_start_has_nothing_to_share(self, run):
        join = NodeChange(100.0, NodeJoined(Node(NodeId("node-0"), 1, GPU_TYPE)))
        with pytest.raises(InvalidSpec, match="no GPU at the start"):
            run("fifo", ClusterFile(Cluster(), (join,)), (0.0, 1))


class TestPartition:
    def sizes(self, cluster: Cluster, num_gpus: int) -> list[int]:
        return sorted((node.num_gpus for node in partition(cluster, "t4", num_gpus)), reverse=True)

    def test_is_whole_nodes_and_one_smaller(self):
        cluster = Cluster.uniform(16, 4, "t4")
        assert [self.sizes(cluster, size) for size in (1, 4, 6, 64)] == [[1], [4], [4, 2], [4] * 16]
        assert partition(cluster, "t4", 64) == cluster

    def test_of_uneven_nodes_takes_the_usual_ones_first(self):
        nodes = [Node(NodeId(f"n{i}"), size, "t4") for i, size in enumerate((8, 2, 2, 4))]
        cluster = Cluster.of(*nodes, Node(NodeId("other"), 4, "a100"), Node(NodeId("away"), 4, "t4", schedulable=False))
        assert [self.sizes(cluster, size) for size in (3, 5, 13, 16)] == [[2, 1], [2, 2, 1], [8, 2, 2, 1], [8, 4, 2, 2]]

    @given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.data())
    def test_has_as_many_gpus_as_asked_for(self, sizes, data):
        cluster = Cluster.of(*(Node(NodeId(f"n{i}"), size, "t4") for i, size in enumerate(sizes)))
        num_gpus = data.draw(st.integers(1, cluster.num_gpus))
        part = partition(cluster, "t4", num_gpus)
        assert part.num_gpus == num_gpus
        assert all(node.num_gpus <= cluster[node.id].num_gpus for node in part)


class TestPhase:
    @pytest.mark.parametrize(
        ("at_s", "phase"), [(0.0, 0.0), (1.0, 1.0), (60.0, 60.0), (61.0, 1.0), (120.0, 60.0), (6030.0, 30.0)]
    )
    def test_is_that_within_the_interval(self, at_s, phase):
        assert phase_s(at_s, 60.0) == phase

    @given(st.floats(0.0, 1e6), st.floats(0.1, 1000.0))
    def test_lies_in_the_first_interval_and_is_the_time_itself_there(self, at_s, interval_s):
        phase = phase_s(at_s, interval_s)
        assert 0.0 <= phase <= interval_s * (1 + 1e-9)
        assert at_s > interval_s or phase == at_s

    @given(st.integers(1, 10_000), st.floats(0.1, 1000.0))
    def test_of_the_very_moment_of_a_round_is_a_whole_interval(self, number, interval_s):
        assert phase_s(interval_s * number, interval_s) == pytest.approx(interval_s)


def slow_contention(lives: Sequence[tuple[int, int]], index: int) -> float:
    """Second by second."""
    start, end = lives[index]
    active = [sum(other <= second < its_end for other, its_end in lives) for second in range(start, end)]
    return sum(active) / len(active)


lives = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 40)).map(lambda life: (life[0], life[0] + life[1])), min_size=1
)


class TestContention:
    @given(lives)
    def test_equals_its_specification_second_by_second(self, lives):
        found = contentions([start for start, _ in lives], [end for _, end in lives])
        assert found == pytest.approx([slow_contention(lives, index) for index in range(len(lives))])

    def test_of_a_job_alone_is_exactly_1(self):
        assert contentions([0.1, 7.3], [0.7, 9.9]) == [1.0, 1.0]


class Alone:
    """Runs nobody: a job takes as long as it says, and is remembered."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, int, int, tuple[str, ...]]] = []

    def __call__(self, job: WorkloadJob, cluster: Cluster) -> float:
        self.asked.append((job.name, job.submitted_at_s, job.num_gpus, cluster.num_gpus, cluster.gpu_types))
        slowness = 4.0 if cluster.gpu_types == ("k80",) else 1.0
        return slowness * 100.0 / cluster.num_gpus


class TestMeasure:
    def test_jobs_that_are_alike_are_run_once(self):
        alone = Alone()
        heard: list[int] = []
        alike = jobs((10, 3), (70, 3), (130, 3))
        ends = [job.submitted_at_s + 60 for job in alike]
        found = measure(alike, ends, Cluster.uniform(1, 4, "t4"), 60.0, alone, lambda: heard.append(1))
        assert found.rho == (60 / 25,) * 3
        assert alone.asked == [("job-0", 10.0, 3, 4, ("t4",))]
        assert len(heard) == 3

    def test_another_phase_is_another_run(self):
        alone = Alone()
        measure(jobs((10, 3), (71, 3)), [60, 100], Cluster.uniform(1, 4, "t4"), 60.0, alone)
        assert [phase for _, phase, *_ in alone.asked] == [10.0, 11.0]

    def test_of_several_gpu_types_is_the_mean_weighted_by_gpus(self):
        """x = 4 of 4 GPUs, but only 3 and 1 of a kind."""
        cluster = Cluster.of(Node(NodeId("a"), 3, "t4"), Node(NodeId("b"), 1, "k80"))
        alone = Alone()
        found = measure(jobs((0, 2)), [200], cluster, 60.0, alone)
        assert found.isolated_jct_s == pytest.approx((0.25 * 4 * 100 + 0.75 * 100 / 3,))
        assert sorted(alone.asked) == [("job-0", 0, 1, 1, ("k80",)), ("job-0", 0, 2, 3, ("t4",))]

    @settings(max_examples=50)
    @given(lives, st.integers(1, 4), st.integers(1, 4), st.randoms())
    def test_rho_is_positive_bounded_and_follows_the_order_of_jobs(self, lives, num_nodes, gpus_per_node, random):
        cluster = Cluster.uniform(num_nodes, gpus_per_node, "t4")
        asked = jobs(*((start, 1 + index % 5) for index, (start, _) in enumerate(lives)))
        ends = [end for _, end in lives]
        found = measure(asked, ends, cluster, 60.0, Alone())
        assert all(rho > 0 for rho in found.rho)
        assert all(isolated >= 100 / cluster.num_gpus - 1e-9 for isolated in found.isolated_jct_s)
        assert found.worst == max(found.rho) == found.percentile(100)
        order = random.sample(range(len(lives)), len(lives))
        shuffled = measure([asked[i] for i in order], [ends[i] for i in order], cluster, 60.0, Alone())
        assert shuffled.rho == pytest.approx([found.rho[i] for i in order])


class TestFigures:
    def test_of_a_distribution(self):
        fairness = Fairness((2.0, 0.5, 1.0, 1.5), (1.0, 1.0, 1.0, 1.0), 3.0)
        assert (fairness.worst, fairness.unfair_fraction, fairness.percentile(50)) == (2.0, 0.5, 1.25)

    def test_rounding_is_not_unfair(self):
        assert Fairness((1.0 + 1e-12, 1.0 + 1e-6), (1.0, 1.0)).unfair_fraction == 0.5

    def test_are_in_the_document_of_a_run(self, run):
        outcome = run("fifo", uniform(1, 2), (0.0, 2), (0.0, 2))
        document = json.loads(json.dumps(outcome.document()))
        assert document["worst_rho"] == outcome.fairness.worst
        assert document["unfair_fraction"] == 0.5
        assert document["fairness_cpu_s"] > 0
        assert [job["rho"] for job in document["jobs"].values()] == list(outcome.fairness.rho)
        assert document["jobs"]["job-0"]["isolated_jct_s"] == STARTS_S + STEADY_S

    def test_are_none_where_it_was_not_measured(self):
        outcome = simulate(Scenario("demo", "fifo"))
        assert outcome.fairness is None
        found = outcome.figures()
        assert found["worst_rho"] is found["unfair_fraction"] is found["fairness_cpu_s"] is None
        assert "rho" not in outcome.document()["jobs"][outcome.jobs[0].name]

    def test_the_shared_run_is_the_same_with_and_without(self):
        quiet, measured = (simulate(Scenario("demo", "tiresias", fairness=fairness)) for fairness in (False, True))
        assert measured.jobs == quiet.jobs
        assert len(measured.policy_cpu_s) == len(quiet.policy_cpu_s), "rounds of isolated runs are not among them"


def test_progress_hears_of_every_job_twice(tmp_path):
    path = tmp_path / "w.csv"
    write_workload(Workload("w", jobs((0.0, 1), (5.0, 1))), path)
    heard: list[object] = []
    simulate(
        Scenario(str(path), "fifo", uniform(1, 2), fairness=True),
        on_start=heard.append,
        on_end=lambda: heard.append("done"),
        truths={"steady": Steady()},
    )
    assert heard == [4, *["done"] * 4]


def test_two_processes_measure_what_one_does():
    scenarios = [Scenario("demo", policy, fairness=True) for policy in ("fifo", "srtf")]
    told: list[float] = []
    alone, together = (run_all(scenarios, processes, told.append) for processes in (1, 2))
    assert [outcome.fairness for outcome in together] == [outcome.fairness for outcome in alone]
    assert sum(told) == pytest.approx(4.0)
