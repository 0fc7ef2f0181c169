"""From a job list to a workload: the window, the draw, the categories and the sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.applications import load, names
from pollux.errors import InvalidSpec, UnknownName
from pollux.simulator.generator import tuned_configurations
from pollux.simulator.importers import (
    CATEGORIES,
    JobList,
    LoggedJob,
    ReplayOptions,
    category_of,
    read_log,
    replay,
)
from pollux.simulator.importers.recorded import parse_time
from pollux.simulator.workload import read_workload, to_csv, write_workload

HOUR = 3600.0
DAY = 24 * HOUR
LIMITS = {name: load(name).limits for name in names()}
CATEGORY = {name: category for category in CATEGORIES for name in category.applications}


def job(at_h: float, duration_s: float = 600.0, num_gpus: int = 1, cluster: str | None = None) -> LoggedJob:
    return LoggedJob("j", at_h * HOUR, duration_s, num_gpus, cluster)


def listed(*jobs: LoggedJob) -> JobList:
    return JobList("mine", jobs)


def logged_jobs() -> st.SearchStrategy[LoggedJob]:
    return st.builds(
        LoggedJob,
        name=st.just("j"),
        submitted_at=st.floats(-1e9, 2e9) | st.integers(0, 20).map(lambda hours: hours * HOUR),
        duration_s=st.floats(0, 1e7),
        num_gpus=st.sampled_from([1, 2, 4, 8, 64, 1000]),
        cluster=st.sampled_from([None, "a"]),
    )


def options() -> st.SearchStrategy[ReplayOptions]:
    return st.builds(
        ReplayOptions,
        num_jobs=st.integers(1, 30),
        window_start_h=st.floats(0, 23.9),
        window_h=st.floats(0.5, 24),
        configuration=st.sampled_from(["tuned", "realistic"]),
        max_gpus=st.none() | st.integers(1, 64),
        seed=st.integers(0, 2**70),
        consecutive=st.booleans(),
    )


class TestProperties:
    @given(jobs=st.lists(logged_jobs(), min_size=1, max_size=60), options=options())
    @settings(max_examples=100)
    def test_it_obeys_its_options_or_says_how_many_jobs_there_are(self, tmp_path_factory, jobs, options):
        log = listed(*jobs)
        usable = [job for job in jobs if job.duration_s >= 60 and job.gpu_hours < 1000]
        start_s, window_s = options.window_start_h * HOUR, options.window_h * HOUR
        in_window = sum((each.submitted_at - start_s) // 1 % DAY < window_s for each in usable)
        if not usable or (in_window < options.num_jobs and not options.consecutive):
            with pytest.raises(InvalidSpec, match=f"only {in_window} usable" if usable else "is usable"):
                replay(log, options)
            return
        found = replay(log, options)
        assert options.consecutive or found.num_in_window == in_window
        workload = found.workload
        assert found.num_usable == len(usable) >= found.num_in_window >= len(workload.jobs)
        assert len(workload.jobs) == min(options.num_jobs, found.num_in_window)
        assert all(0 <= each.submitted_at_s < options.window_h * HOUR for each in workload.jobs)
        assert all(each.submitted_at_s.is_integer() for each in workload.jobs)
        assert all(options.max_gpus is None or each.num_gpus <= options.max_gpus for each in workload.jobs)
        drawn = Counter(CATEGORY[each.application].name for each in workload.jobs)
        assert drawn <= Counter(category_of(each).name for each in usable)
        path = tmp_path_factory.mktemp("replayed") / f"{workload.name}.csv"
        write_workload(workload, path)
        assert read_workload(path, LIMITS) == workload
        assert to_csv(replay(log, options).workload) == to_csv(workload)

    @given(jobs=st.lists(logged_jobs(), min_size=1, max_size=40), window_h=st.floats(0.5, 48))
    @settings(max_examples=100)
    def test_no_stretch_of_the_log_is_busier_than_the_busiest(self, jobs, window_h):
        every = ReplayOptions(window_h=window_h, consecutive=True, min_duration_s=0.0, max_gpu_hours=1e9)
        best = replay(listed(*jobs), every).num_in_window
        for each in jobs:
            other = replay(listed(*jobs), replace(every, starts_at=float(each.submitted_at // 1)))
            assert other.num_in_window <= best


class TestOverlaid:
    def test_days_are_laid_over_one_another_and_dates_are_gone(self):
        log = listed(job(2), job(24 + 9.99), job(10), job(5 * 24 + 1.99), job(-24 + 3))
        found = replay(log, ReplayOptions(num_jobs=3))
        assert [each.submitted_at_s for each in found.workload.jobs] == [0.0, HOUR, 28764.0]
        assert found.num_in_window == 3
        assert found.starts_at is None

    def test_a_window_may_reach_over_midnight(self):
        found = replay(listed(job(23), job(25), job(27)), ReplayOptions(num_jobs=2, window_start_h=22, window_h=4))
        assert [each.submitted_at_s for each in found.workload.jobs] == [HOUR, 3 * HOUR]

    def test_too_few_jobs_are_counted(self):
        with pytest.raises(
            InvalidSpec, match=r"only 2 usable jobs were submitted in hours 2–10 of any day\. Give 2 or"
        ):
            replay(listed(job(2), job(3), job(1)), ReplayOptions(num_jobs=3))
        with pytest.raises(InvalidSpec, match="only 1 usable job was submitted"):
            replay(listed(job(2)), ReplayOptions(num_jobs=2))
        with pytest.raises(InvalidSpec, match=r"only 0 usable jobs .* Widen or move the window"):
            replay(listed(job(1)))

    def test_the_paper_draws_160(self):
        assert len(replay(listed(*(job(3),) * 200)).workload.jobs) == 160

    def test_short_and_large_jobs_are_left_out_and_counted(self):
        log = listed(job(3, 59.9), job(3, 60.0), job(3, 1000 * HOUR), job(3, 999.9 * HOUR), job(3, 30.0, 10**6))
        found = replay(log, ReplayOptions(num_jobs=2))
        assert (found.num_too_short, found.num_too_large, found.num_usable) == (2, 1, 2)
        with pytest.raises(InvalidSpec, match="none of its 1 jobs is usable: 60 s or more and below 1000 GPU-hours"):
            replay(listed(job(3, 1.0)))

    def test_fewer_jobs_are_some_of_the_same(self):
        log = listed(*(job(2 + index / 100, 600.0 * (index % 50 + 1)) for index in range(300)))
        many, few = (replay(log, ReplayOptions(num_jobs=number)).workload.jobs for number in (100, 40))

        def asked(jobs):
            return {(each.submitted_at_s, each.application, each.num_gpus, each.batch_size) for each in jobs}

        assert asked(few) < asked(many)

    def test_another_seed_draws_other_jobs(self):
        log = listed(*(job(2 + index / 100) for index in range(300)))
        first, second = (to_csv(replay(log, ReplayOptions(num_jobs=20, seed=seed)).workload) for seed in (0, 1))
        assert first != second

    def test_only_jobs_of_a_cluster(self):
        log = listed(job(3, cluster="a"), job(4, cluster="b"), job(5))
        found = replay(log, ReplayOptions(num_jobs=1, cluster="b"))
        assert found.workload.jobs[0].submitted_at_s == 2 * HOUR
        assert found.num_elsewhere == 2
        with pytest.raises(UnknownName, match="Known: a, b"):
            replay(log, ReplayOptions(cluster="c"))


class TestConsecutive:
    def test_the_busiest_hours_are_kept_as_they_came(self):
        log = listed(job(1), job(50), job(50.5), job(49.9), job(58.1), job(200))
        found = replay(log, ReplayOptions(consecutive=True))
        assert found.starts_at == 49.9 * HOUR
        assert [each.submitted_at_s for each in found.workload.jobs] == [0.0, 360.0, 2160.0]

    def test_of_equally_busy_ones_the_first(self):
        assert replay(listed(job(100), job(5)), ReplayOptions(consecutive=True)).starts_at == 5 * HOUR

    def test_from_a_given_time_and_longer_than_a_day(self):
        log = listed(job(1), job(30), job(47), job(49))
        found = replay(log, ReplayOptions(consecutive=True, starts_at=HOUR / 2, window_h=48.0))
        assert [each.submitted_at_s for each in found.workload.jobs] == [1800.0, 29.5 * HOUR, 46.5 * HOUR]

    def test_more_jobs_than_there_are_is_all_of_them_and_fewer_are_drawn(self):
        log = listed(job(1), job(2), job(3))
        counts = [
            len(replay(log, ReplayOptions(consecutive=True, num_jobs=number)).workload.jobs) for number in (2, 9, None)
        ]
        assert counts == [2, 3, 3]

    def test_a_time_without_jobs_is_refused_with_those_that_have_some(self):
        with pytest.raises(InvalidSpec, match="Give a time between 1970-01-01 01:00:00 and 1970-01-01 03:00:00"):
            replay(listed(job(1), job(3)), ReplayOptions(consecutive=True, starts_at=DAY))


class TestSizes:
    @pytest.mark.parametrize(
        ("gpu_hours", "applications"),
        [
            (0.999, {"cifar10", "ncf"}),
            (1.0, {"deepspeech2", "bert"}),
            (9.99, {"deepspeech2", "bert"}),
            (10.0, {"yolov3"}),
            (100.0, {"imagenet"}),
            (999.0, {"imagenet"}),
        ],
    )
    @pytest.mark.parametrize("num_gpus", [1, 4])
    def test_applications_stand_for_gpu_time(self, gpu_hours, applications, num_gpus):
        log = listed(*(job(3, gpu_hours * HOUR / num_gpus, num_gpus),) * 40)
        found = replay(log, ReplayOptions(num_jobs=40))
        assert {each.application for each in found.workload.jobs} == applications

    def test_tuned_ones_are_those_of_the_application(self):
        log = listed(*(job(3, hours * HOUR) for hours in (0.5, 5, 50, 500) for _ in range(100)))
        for each in replay(log, ReplayOptions(num_jobs=400)).workload.jobs:
            assert (each.num_gpus, each.batch_size) in tuned_configurations(load(each.application), "t4")

    def test_realistic_ones_are_those_of_the_log_with_the_initial_batch_on_each(self):
        log = listed(*(job(3, 60.0, gpus) for gpus in (1, 2, 4)))
        found = replay(log, ReplayOptions(num_jobs=3, configuration="realistic"))
        for each, gpus in zip(found.workload.jobs, (1, 2, 4), strict=True):
            assert each.num_gpus == gpus
            assert each.batch_size == gpus * LIMITS[each.application].initial_batch_size

    def test_realistic_ones_stay_within_the_limits(self):
        log = listed(*(job(3, 60.0, 1000) for _ in range(20)))
        for each in replay(log, ReplayOptions(num_jobs=20, configuration="realistic")).workload.jobs:
            limits = LIMITS[each.application]
            assert each.num_gpus == min(1000, limits.max_batch_size // limits.min_per_gpu_batch_size)
            assert each.batch_size == limits.max_batch_size

    def test_large_ones_are_drawn_anew_from_jobs_of_a_day_or_less(self):
        week, day = job(3, 99 * HOUR, 1), job(3, 24 * HOUR, 4)
        found = replay(listed(*(week,) * 20, day), ReplayOptions(num_jobs=21, configuration="realistic"))
        assert {each.num_gpus for each in found.workload.jobs} == {4}

    def test_without_any_such_job_the_logs_gpus_stay(self):
        found = replay(listed(job(3, 49 * HOUR, 2)), ReplayOptions(num_jobs=1, configuration="realistic"))
        assert found.workload.jobs[0].num_gpus == 2


class TestOptions:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("num_jobs", 0),
            ("num_jobs", 10**7),
            ("window_start_h", 24.0),
            ("window_start_h", -1.0),
            ("window_h", 0.0),
            ("window_h", 25.0),
            ("min_duration_s", -1.0),
            ("max_gpu_hours", 0.0),
            ("configuration", "wild"),
            ("max_gpus", 0),
            ("seed", -1),
            ("consecutive", 1),
            ("starts_at", 5.0),
            ("gpu_type", ""),
        ],
    )
    def test_wrong_ones_are_refused(self, field, value):
        with pytest.raises(InvalidSpec, match=field):
            ReplayOptions(**{field: value})


@pytest.fixture(scope="module")
def log(pollux_data):
    return read_log(pollux_data / "pollux-osdi21" / "philly.csv")


@pytest.mark.data
class TestPhillyOfThePaper:
    """Figures of ../shared/design/policies.md, section C.1."""

    def test_rows_kept_and_in_the_window(self, log):
        found = replay(log)
        assert (log.num_logged, len(log.jobs)) == (82_247, 82_247)
        assert (found.num_usable, found.num_in_window) == (74_428, 31_293)
        assert len(found.workload.jobs) == 160

    def test_shares_of_the_categories_in_the_window(self, log):
        every = replay(log, ReplayOptions(num_jobs=31_293, configuration="realistic")).workload.jobs
        counts = Counter(CATEGORY[each.application].name for each in every)
        shares = [round(100 * counts[category.name] / len(every)) for category in CATEGORIES]
        assert shares == [78, 15, 5, 2]
        assert sum(each.num_gpus for each in every) / len(every) == pytest.approx(1.5, abs=0.2)

    def test_the_busiest_stretch_is_a_real_one(self, log):
        found = replay(log, ReplayOptions(consecutive=True, num_jobs=5))
        assert found.num_in_window == 1978
        assert found.starts_at == parse_time("2017-10-20 02:06:33")
