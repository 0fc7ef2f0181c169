"""Workloads at another load: as many jobs as asked for, in the same time, of the same kinds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidSpec
from pollux.simulator.generator import BUILT_IN, built_in_workload
from pollux.simulator.studies.loads import generated_at, scaled
from pollux.simulator.workload import Workload, WorkloadJob

APPLICATIONS = ("bert", "cifar10", "ncf")
LOADS = st.floats(0.05, 4.0)
SEEDS = st.integers(0, 2**32)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    times = sorted(draw(st.lists(st.integers(0, 30_000), min_size=1, max_size=40)))
    kinds = draw(st.lists(st.sampled_from(APPLICATIONS), min_size=len(times), max_size=len(times)))
    jobs = [
        WorkloadJob(f"{kind}-{index}", float(at), kind, 1 + index % 4, 512)
        for index, (at, kind) in enumerate(zip(times, kinds, strict=True))
    ]
    return Workload("drawn", tuple(jobs))


class TestScaled:
    @given(workloads(), LOADS, SEEDS)
    def test_has_as_many_jobs_as_the_load_says(self, workload, load, seed):
        assert abs(len(scaled(workload, load, seed).jobs) - max(1.0, load * len(workload.jobs))) <= 0.5

    @given(workloads(), LOADS, SEEDS)
    def test_keeps_the_mix_within_rounding(self, workload, load, seed):
        before = Counter(job.application for job in workload.jobs)
        found = scaled(workload, load, seed)
        after = Counter(job.application for job in found.jobs)
        factor = len(found.jobs) / len(workload.jobs)
        assert all(abs(after[name] - factor * count) < 1 for name, count in before.items())

    @given(workloads(), LOADS, SEEDS)
    def test_stays_within_the_time_of_the_submissions(self, workload, load, seed):
        first, last = workload.jobs[0].submitted_at_s, workload.jobs[-1].submitted_at_s
        assert all(first <= job.submitted_at_s <= last for job in scaled(workload, load, seed).jobs)

    @given(workloads(), LOADS, SEEDS)
    def test_asks_for_what_the_originals_ask_for_under_names_of_their_own(self, workload, load, seed):
        asked = {(job.application, job.num_gpus, job.batch_size) for job in workload.jobs}
        found = scaled(workload, load, seed).jobs
        assert {(job.application, job.num_gpus, job.batch_size) for job in found} <= asked
        assert len({job.name for job in found}) == len(found)

    @given(workloads(), LOADS, SEEDS)
    def test_is_the_same_for_the_same_seed(self, workload, load, seed):
        assert scaled(workload, load, seed) == scaled(workload, load, seed)

    @given(workloads(), st.floats(1.0, 4.0), SEEDS)
    def test_more_jobs_come_on_top_of_the_old_ones(self, workload, load, seed):
        assert set(workload.jobs) <= set(scaled(workload, load, seed).jobs)

    @given(workloads(), st.floats(0.05, 1.0), SEEDS)
    def test_fewer_jobs_are_some_of_the_old_ones(self, workload, load, seed):
        assert set(scaled(workload, load, seed).jobs) <= set(workload.jobs)

    def test_a_load_of_one_changes_nothing(self):
        workload = built_in_workload("demo")
        assert scaled(workload, 1.0, 5) == workload

    def test_other_seeds_leave_out_other_jobs(self):
        workload = built_in_workload("demo")
        assert scaled(workload, 0.5, 0).jobs != scaled(workload, 0.5, 1).jobs

    def test_a_name_that_is_taken_is_not_given_again(self):
        jobs = (WorkloadJob("a", 0.0, "ncf", 1, 256), WorkloadJob("a~2", 9.0, "ncf", 1, 256))
        assert sorted(job.name for job in scaled(Workload("w", jobs), 2, 0).jobs) == ["a", "a~2", "a~2~2", "a~3"]

    @pytest.mark.parametrize("load", [0, -1.0, float("nan"), float("inf"), 1e9])
    def test_refuses_a_load_that_makes_no_sense(self, load):
        with pytest.raises(InvalidSpec, match="load"):
            scaled(built_in_workload("demo"), load, 0)


class TestGenerated:
    @pytest.mark.parametrize(("load", "num_jobs"), [(0.5, 12), (1, 24), (1.5, 36), (2, 48)])
    def test_built_in_workloads_are_generated_anew(self, load, num_jobs):
        found = generated_at("demo", load)
        assert len(found.jobs) == num_jobs
        assert found.jobs[-1].submitted_at_s < BUILT_IN["demo"].options.duration_s

    def test_of_those_that_are_listed_some_jobs_come_again(self):
        found = generated_at("six", 1.5)
        assert len(found.jobs) == 9
        assert set(found.jobs) > set(built_in_workload("six").jobs)

    def test_a_load_of_one_is_the_built_in_workload(self):
        assert generated_at("demo", 1) == built_in_workload("demo")
