"""The agent inside a simulated job: it knows what it measured, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.simulator.scenes import EQUAL_SHARE, events, reports, run_jobs

from pollux.applications import PassTime
from pollux.core import (
    Cluster,
    GradientStats,
    JobId,
    JobReported,
    JobSpec,
    Observation,
    ObservationKey,
    Progress,
    Shape,
)
from pollux.errors import InvalidSpec
from pollux.simulator import agent as agents
from pollux.simulator import knowledge as knowledges
from pollux.simulator.agent import Agent
from pollux.simulator.knowledge import Knowledge
from pollux.simulator.options import AgentOptions
from pollux.simulator.truth import truths_built_in
from pollux.simulator.workload import WorkloadJob

TRUTHS = truths_built_in()
CIFAR = TRUTHS["cifar10"]
NOISY = GradientStats(sqr=0.01, var=10.0)


def agent(
    options: AgentOptions | None = None, truth=CIFAR, knowledge: Knowledge | None = None, **spec: object
) -> Agent:
    asked = JobSpec(JobId("a"), limits=truth.limits, **spec)
    return Agent(asked, truth.limits, options or AgentOptions(), knowledge)


def measure(of: Agent, placement: tuple[int, ...], m: int, truth=CIFAR) -> None:
    of.observe("t4", Shape(sum(placement), len(placement)), m, truth.passes("t4", placement, m))


def agent_with(m: int) -> Agent:
    """One that has measured that batch size on one GPU."""
    of = agent()
    measure(of, (1,), m)
    return of


@pytest.fixture
def fits(monkeypatch) -> list[int]:
    """One entry a fit."""
    made: list[int] = []
    real = knowledges.fit

    def counted(seen, **kwargs):
        made.append(1)
        return real(seen, **kwargs)

    monkeypatch.setattr(knowledges, "fit", counted)
    return made


class TestHysteresis:
    def measured(self, hysteresis: float) -> Agent:
        found = agent(AgentOptions(hysteresis=hysteresis))
        for m in (128, 512):
            measure(found, (1,), m)
        measure(found, (2,), 64)
        return found

    def test_a_batch_size_stays_until_another_one_is_so_much_better(self):
        quick, calm = self.measured(1.0), self.measured(1.05)
        noises = [GradientStats(1.0, 4.0 * 1.1**step) for step in range(40)]
        chosen = [[of.tune("t4", Shape(1), noise) for noise in noises] for of in (quick, calm)]
        assert len(set(chosen[0])) > len(set(chosen[1])) > 1
        assert all(before <= after for before, after in pairwise(chosen[1]))

    def test_on_other_gpus_it_is_the_total_batch_size_that_stays(self):
        stubborn = self.measured(1000.0)
        assert stubborn.tune("t4", Shape(1), NOISY) == (128, 0)
        assert stubborn.tune("t4", Shape(2), NOISY) == (64, 0)
        assert stubborn.tune("t4", Shape(8, 2), NOISY) == (32, 0)  # less is not allowed
        assert stubborn.tune("t4", Shape(1), NOISY) == (256, 0)

    def test_below_one_makes_no_sense(self):
        with pytest.raises(InvalidSpec, match=r"agent\.hysteresis"):
            AgentOptions(hysteresis=0.99)


class TestFixedBatch:
    @pytest.mark.parametrize(("gpus", "expected"), [(1, (512, 0)), (2, (256, 0)), (3, (171, 0)), (8, (64, 0))])
    def test_keeps_what_the_owner_asked_for_whatever_it_measures(self, gpus, expected):
        fixed = agent(requested_batch_size=512, fixed_batch=True)
        assert fixed.tune("t4", Shape(gpus), NOISY) == expected
        measure(fixed, (1,), 512)
        assert fixed.tune("t4", Shape(gpus), NOISY) == expected

    def test_of_which_the_initial_one_is_the_default(self):
        assert agent(fixed_batch=True).fixed_batch_size == CIFAR.limits.initial_batch_size

    def test_takes_two_passes_on_one_gpu_where_the_artifact_does(self):
        doubled = agent(AgentOptions(single_gpu_accumulation=True), requested_batch_size=512, fixed_batch=True)
        assert doubled.tune("t4", Shape(1), NOISY) == (256, 1)


class TestAdaptive:
    @pytest.mark.parametrize(("gpus", "expected"), [(1, (128, 0)), (4, (32, 0)), (8, (32, 0))])
    def test_starts_at_the_initial_batch_size_or_the_least_that_fills_the_gpus(self, gpus, expected):
        assert agent().tune("t4", Shape(gpus), NOISY) == expected

    def test_grows_once_it_has_a_model_and_the_noise_allows(self):
        of = agent()
        measure(of, (1,), 128)
        m, s = of.tune("t4", Shape(1), NOISY)
        assert m * (s + 1) > 128
        quiet = of.tune("t4", Shape(1), GradientStats(sqr=10.0, var=1e-6))
        assert quiet == (128, 0)

    def test_a_model_of_one_type_says_nothing_about_another(self):
        of = agent()
        measure(of, (1,), 128)
        assert of.tune("v100", Shape(1), NOISY) == (128, 0)

    def test_a_batch_size_stays_within_its_limits(self):
        of = agent()
        measure(of, (1,), 128)
        for gpus in (1, 2, 7, 32):
            m, s = of.tune("t4", Shape(gpus, min(gpus, 4)), GradientStats(sqr=1e-9, var=1e3))
            assert 128 <= gpus * m * (s + 1) <= CIFAR.limits.max_batch_size
            assert 32 <= m <= CIFAR.limits.max_per_gpu_batch_size


class TestFits:
    def test_only_a_new_configuration_is_fitted_again(self, fits):
        of = agent()
        measure(of, (1,), 128)
        measure(of, (1,), 128)
        assert len(fits) == 1
        measure(of, (1,), 256)
        measure(of, (2,), 128)
        measure(of, (1,), 256)
        assert len(fits) == 3

    def test_placements_of_one_shape_are_one_configuration(self, fits):
        of = agent()
        measure(of, (3, 1), 64)
        measure(of, (1, 3), 64)
        measure(of, (2, 2), 64)
        assert len(fits) == 1

    def test_the_profile_holds_what_was_measured(self):
        of = agent()
        measure(of, (2,), 128)
        grad_time_s, iteration_time_s = CIFAR.passes("t4", (2,), 128)
        (item,) = of.profile.of_type("t4").items()
        assert item == (
            ObservationKey(Shape(2), 128),
            Observation(0.0, 0, iteration_time_s, iteration_time_s - grad_time_s, 1),
        )

    @pytest.mark.parametrize("published", [False, True])
    def test_the_report_holds_limits_gradient_fit_progress_and_delay(self, published):
        of = agent(AgentOptions(published_fit=published, published_grid=published))
        progress = Progress(10.0, 100.0, 0.0)
        before = of.model(NOISY, progress, 30.0)
        assert before.throughput == {}
        measure(of, (2,), 128)
        report = of.model(NOISY, progress, 30.0)
        assert (report.limits, report.gradient, report.progress) == (CIFAR.limits, NOISY, progress)
        assert report.realloc_delay_s == 30.0
        assert report.throughput["t4"].max_gpus_observed == 2
        assert report.throughput.keys() == {"t4"}


class TestSharing:
    """Agents of one application begin with the same knowledge: nothing."""

    CONFIGURATIONS = (((1,), 128), ((2,), 128), ((3, 1), 64), ((1,), 256))

    def test_who_measures_the_same_knows_the_same_and_is_not_fitted_again(self, fits):
        nothing = Knowledge()
        one, other, alone = agent(knowledge=nothing), agent(knowledge=nothing), agent()
        for of in (one, other):
            for placement, m in self.CONFIGURATIONS:
                measure(of, placement, m)
        assert len(fits) == len(self.CONFIGURATIONS)
        assert one.profile is other.profile
        for placement, m in self.CONFIGURATIONS:
            measure(alone, placement, m)
        progress = Progress(1.0)
        assert alone.profile == one.profile
        assert alone.model(NOISY, progress, 30.0) == one.model(NOISY, progress, 30.0)

    def test_who_knows_the_same_chooses_the_same_without_another_search(self, monkeypatch):
        nothing = Knowledge()
        one, other, alone = agent(knowledge=nothing), agent(knowledge=nothing), agent()
        for of in (one, other, alone):
            for placement, m in self.CONFIGURATIONS:
                measure(of, placement, m)
        shapes = [Shape(1), Shape(2), Shape(4, 2), Shape(6, 2)]
        chosen = [one.tune("t4", shape, NOISY) for shape in shapes]
        assert [alone.tune("t4", shape, NOISY) for shape in shapes] == chosen
        monkeypatch.setattr(Agent, "_search", None)
        assert [other.tune("t4", shape, NOISY) for shape in shapes] == chosen

    def test_of_too_many_choices_all_are_forgotten(self, monkeypatch):
        monkeypatch.setattr(agents, "MOST_CHOSEN", 2)
        of = agent()
        measure(of, (1,), 128)
        shapes = [Shape(1), Shape(2), Shape(3), Shape(1)]
        assert [of.tune("t4", shape, NOISY) for shape in shapes] == [
            agent_with(128).tune("t4", s, NOISY) for s in shapes
        ]
        assert len(of._knowledge.chosen) == 2

    def test_nobody_learns_from_another_one(self):
        nothing = Knowledge()
        one, other = agent(knowledge=nothing), agent(knowledge=nothing)
        measure(one, (1,), 128)
        assert not other.profile
        assert other.tune("t4", Shape(1), NOISY) == (128, 0)
        measure(other, (1,), 256)
        assert one.profile.of_type("t4").keys() == {ObservationKey(Shape(1), 128)}
        assert other.profile.of_type("t4").keys() == {ObservationKey(Shape(1), 256)}

    def test_another_placement_of_the_same_shape_is_another_measurement(self, fits):
        nothing = Knowledge()
        one, other = agent(knowledge=nothing), agent(knowledge=nothing)
        grad_time_s, iteration_time_s = passes = CIFAR.passes("t4", (2, 2), 64)
        one.observe("t4", Shape(4, 2), 64, passes)
        other.observe("t4", Shape(4, 2), 64, PassTime(grad_time_s, 1.1 * iteration_time_s))
        assert len(fits) == 2
        assert one.profile != other.profile


class TestInTheWorld:
    def test_reports_tell_of_progress_and_of_more_and_more_configurations(self):
        jobs = [WorkloadJob("a", 0, "cifar10", 1, 128), WorkloadJob("b", 0, "ncf", 1, 256)]
        world = run_jobs(EQUAL_SHARE, jobs, TRUTHS, Cluster.uniform(2, 2, "t4"))
        told = [report for report in reports(world) if report.job == "a"]
        done = [report.model.progress.done for report in told]
        assert done == sorted(done)
        assert told[0].model.progress.total == CIFAR.epoch_end(CIFAR.epochs - 1)
        sizes = [len(report.profile.of_type("t4")) for report in told]
        assert sizes == sorted(sizes)
        assert sizes[-1] > sizes[0] >= 0
        assert max(fit.max_gpus_observed for fit in told[-1].model.throughput.values()) == 4

    def test_a_job_that_waits_for_its_replicas_reports_nothing(self):
        world = run_jobs(EQUAL_SHARE, [WorkloadJob("a", 0, "ncf", 1, 256)], TRUTHS, Cluster.uniform(1, 1, "t4"))
        first, *_ = events(world, JobReported)
        assert first[0] == 90.0

    def test_adapting_batch_sizes_makes_a_job_faster_than_keeping_the_initial_one(self):
        job = WorkloadJob("a", 0, "cifar10", 1, 128)
        fixed, adaptive = (
            run_jobs(policy, [job], TRUTHS, Cluster.uniform(1, 1, "t4")).scheduler.state.ended["a"].finished_at_s
            for policy in ("fifo", EQUAL_SHARE)
        )
        assert adaptive < fixed
