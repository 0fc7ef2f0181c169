"""Generated workloads: the same for ever, in the shares asked for, with sizes that suit the applications."""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.applications import load, names
from pollux.core import BatchLimits, Cluster, FrozenMap
from pollux.errors import InvalidSpec, UnknownName
from pollux.goodput import gain, t_iter
from pollux.goodput.levels import ThetaSys
from pollux.simulator.generator import (
    BUILT_IN,
    PAPER_MIX,
    TUNED_GPUS,
    Configuration,
    GeneratorOptions,
    built_in_names,
    built_in_workload,
    generate,
    tuned_configurations,
)
from pollux.simulator.workload import base_name, read_workload, to_csv, write_workload

LISTED = ("six", "twelve", "four")

LIMITS = {name: load(name).limits for name in names()}

GOLDEN = """\
name,time,application,num_replicas,batch_size
cifar10-0,540,cifar10,8,2048
ncf-1,722,ncf,2,32768
cifar10-2,775,cifar10,12,4096
ncf-3,963,ncf,2,32768
bert-4,1090,bert,6,384
ncf-5,1300,ncf,2,32768
cifar10-6,1788,cifar10,12,4096
ncf-7,1853,ncf,2,32768
ncf-8,1992,ncf,2,32768
deepspeech2-9,2250,deepspeech2,16,640
cifar10-10,2670,cifar10,8,2048
yolov3-11,3144,yolov3,4,64
"""


def options() -> st.SearchStrategy[GeneratorOptions]:
    shares = st.dictionaries(st.sampled_from(names()), st.floats(0, 10), min_size=1).filter(
        lambda mix: sum(mix.values()) > 0
    )
    return st.builds(
        GeneratorOptions,
        num_jobs=st.integers(1, 50),
        duration_s=st.floats(1, 1e6),
        seed=st.integers(0, 2**70),
        arrivals=st.sampled_from(["poisson", "uniform", "daily"]),
        configuration=st.sampled_from(["tuned", "realistic"]),
        mix=shares.map(FrozenMap),
        max_gpus=st.none() | st.integers(1, 64),
    )


class TestGenerate:
    def test_a_small_workload_is_the_same_on_every_machine_and_for_ever(self):
        # Changes only with the numbers of the built-in applications or the paper's mix.
        assert to_csv(generate(GeneratorOptions(num_jobs=12, duration_s=3600.0, seed=7))) == GOLDEN

    @given(options=options())
    @settings(max_examples=50)
    def test_it_can_be_read_back_and_obeys_its_options(self, tmp_path_factory, options):
        workload = generate(options)
        path = tmp_path_factory.mktemp("generated") / f"{workload.name}.csv"
        write_workload(workload, path)
        cluster = None if options.max_gpus is None else Cluster.uniform(1, options.max_gpus)
        assert read_workload(path, LIMITS, cluster) == workload
        assert len(workload.jobs) == options.num_jobs
        for index, job in enumerate(workload.jobs):
            assert job.name == f"{job.application}-{index}"
            assert job.submitted_at_s.is_integer()
            assert 0.0 <= job.submitted_at_s <= options.duration_s
            assert options.mix[job.application] > 0.0

    def test_equal_seeds_give_equal_bytes_and_other_seeds_others(self):
        first, again, other = (generate(GeneratorOptions(seed=seed)) for seed in (3, 3, 4))
        assert to_csv(first) == to_csv(again)
        assert to_csv(first) != to_csv(other)

    def test_one_option_changes_one_thing(self):
        base = GeneratorOptions(num_jobs=50)
        first = generate(base).jobs
        other_times = generate(replace(base, arrivals="daily")).jobs
        assert [(j.name, j.num_gpus, j.batch_size) for j in first] == [
            (j.name, j.num_gpus, j.batch_size) for j in other_times
        ]
        other_sizes = generate(replace(base, configuration="realistic")).jobs
        assert [(j.name, j.submitted_at_s) for j in first] == [(j.name, j.submitted_at_s) for j in other_sizes]

    def test_the_mix_converges_to_its_shares(self):
        jobs = generate(GeneratorOptions(num_jobs=20_000)).jobs
        counts = Counter(job.application for job in jobs)
        assert sum(PAPER_MIX.values()) == pytest.approx(1.0)
        for name, share in PAPER_MIX.items():
            assert counts[name] / len(jobs) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(jobs)))

    def test_shares_are_in_any_unit_and_zero_means_never(self):
        mix = FrozenMap({"bert": 30.0, "cifar10": 0.0, "ncf": 10.0, "yolov3": 0.0})
        counts = Counter(job.application for job in generate(GeneratorOptions(num_jobs=4000, mix=mix)).jobs)
        assert set(counts) == {"bert", "ncf"}
        assert counts["bert"] / 4000 == pytest.approx(0.75, abs=0.03)

    def test_ten_thousand_jobs_have_names_of_their_own(self):
        jobs = generate(GeneratorOptions(num_jobs=10_000, configuration="realistic")).jobs
        assert len({job.name for job in jobs}) == 10_000

    def test_other_applications_than_the_built_in_ones_can_be_used(self):
        own = replace(load("bert"), name="mine")
        for configuration in ("tuned", "realistic"):
            wanted = GeneratorOptions(20, configuration=configuration, mix=FrozenMap({"mine": 1.0}))
            assert {job.application for job in generate(wanted, {"mine": own}).jobs} == {"mine"}


class TestArrivals:
    @pytest.fixture
    def quarters(self):
        def quarters(arrivals: str) -> list[float]:
            jobs = generate(GeneratorOptions(num_jobs=20_000, duration_s=4000.0, arrivals=arrivals)).jobs
            counts = Counter(int(job.submitted_at_s // 1000) for job in jobs)
            return [counts[quarter] / len(jobs) for quarter in range(4)]

        return quarters

    def test_poisson_and_uniform_fill_the_window_evenly(self, quarters):
        assert quarters("poisson") == pytest.approx([0.25] * 4, abs=0.015)
        assert quarters("uniform") == [0.25] * 4

    def test_daily_is_busiest_in_the_middle(self, quarters):
        # 6x(1 − x) over a quarter: 5/32 at the ends, 11/32 in the middle.
        assert quarters("daily") == pytest.approx([5 / 32, 11 / 32, 11 / 32, 5 / 32], abs=0.015)

    def test_gaps_are_equal_for_uniform_and_exponential_for_poisson(self):
        def gaps(arrivals: str) -> list[float]:
            jobs = generate(GeneratorOptions(num_jobs=5000, duration_s=5e6, arrivals=arrivals)).jobs
            return [right.submitted_at_s - left.submitted_at_s for left, right in itertools.pairwise(jobs)]

        assert set(gaps("uniform")) == {1000.0}
        random = gaps("poisson")
        assert sum(random) / len(random) == pytest.approx(1000.0, rel=0.01)
        assert sum(gap > 1000.0 for gap in random) / len(random) == pytest.approx(math.exp(-1), abs=0.03)
        assert sum(gap > 3000.0 for gap in random) / len(random) == pytest.approx(math.exp(-3), abs=0.015)


class TestTuned:
    @pytest.mark.parametrize("name", names())
    def test_they_agree_with_the_definition_in_plain_loops(self, name):
        application = load(name)
        theta = ThetaSys(**application.throughput["t4"].params)
        limits = application.limits

        def whole_run(K, M):
            passes = math.ceil(M / K / limits.max_per_gpu_batch_size)
            step = t_iter(theta, K, math.ceil(K / 4), math.ceil(M / K / passes), passes - 1)
            stats = [application.gradient((i + 0.5) / 20, M) for i in range(20)]
            shares = [1 / gain(g.sqr, g.var, M / limits.initial_batch_size) for g in stats]
            return application.total_progress * step * sum(shares) / 20

        sizes = [limits.initial_batch_size * 2**i for i in range(20)]
        sizes = [M for M in sizes if limits.max_batch_size >= M]
        best = {}
        for K in TUNED_GPUS:
            usable = [M for M in sizes if K * limits.min_per_gpu_batch_size <= M]
            if usable:
                best[K] = min((whole_run(K, M), M) for M in usable)
        expected = [
            (K, M) for K, (time, M) in best.items() if time < 12 * 3600 and 0.5 < best[1][0] / time / K < 0.8
        ] or [(1, best[1][1])]
        assert list(tuned_configurations(application, "t4")) == expected

    @pytest.mark.parametrize(
        ("name", "published"),  # policies.md, C.2, from measured times
        [
            ("cifar10", {(6, 2048), (8, 2048), (12, 4096), (16, 4096)}),
            ("deepspeech2", {(6, 320), (12, 640)}),
            ("bert", {(6, 384), (8, 384), (12, 384), (16, 384)}),
            ("yolov3", {(4, 64)}),
            ("imagenet", {(24, 3200), (32, 6400), (48, 6400)}),
        ],
    )
    def test_they_hold_most_of_the_published_ones(self, name, published):
        assert published <= set(tuned_configurations(load(name), "t4"))

    def test_without_a_good_size_it_is_one_gpu(self):
        own = replace(load("cifar10"), total_progress=1e9)
        assert tuned_configurations(own, "t4") == (Configuration(1, 256),)

    def test_all_are_chosen_alike(self):
        mix = FrozenMap({"cifar10": 1.0})
        counts = Counter(job.num_gpus for job in generate(GeneratorOptions(num_jobs=4000, mix=mix)).jobs)
        assert {gpus: count / 4000 for gpus, count in counts.items()} == pytest.approx(
            dict.fromkeys((6, 8, 12, 16), 0.25), abs=0.03
        )

    def test_a_limit_keeps_what_fits_and_lowers_what_does_not(self):
        def sizes(name: str, max_gpus: int) -> set[int]:
            mix = FrozenMap({name: 1.0})
            return {job.num_gpus for job in generate(GeneratorOptions(200, mix=mix, max_gpus=max_gpus)).jobs}

        assert sizes("cifar10", 8) == {6, 8}
        assert sizes("imagenet", 16) == {16}
        assert sizes("imagenet", 15) == {12}
        assert sizes("imagenet", 1) == {1}

    def test_an_unknown_gpu_type_is_named(self):
        with pytest.raises(UnknownName, match="t4"):
            generate(GeneratorOptions(gpu_type="h100"))
        assert generate(GeneratorOptions(gpu_type="h100", configuration="realistic")).jobs

    def test_batch_sizes_begin_where_one_gpu_does(self):
        own = replace(load("bert"), limits=BatchLimits(3, 24, 4, 12))
        for configuration in ("tuned", "realistic"):
            wanted = GeneratorOptions(50, configuration=configuration, mix=FrozenMap({"bert": 1.0}))
            for job in generate(wanted, {"bert": own}).jobs:
                assert 4 * job.num_gpus <= job.batch_size <= 24

    @pytest.mark.parametrize("configuration", ["tuned", "realistic"])
    def test_limits_that_no_gpu_can_meet_are_refused(self, configuration):
        own = replace(load("bert"), limits=BatchLimits(2, 3, 4, 12))
        wanted = GeneratorOptions(5, configuration=configuration, mix=FrozenMap({"bert": 1.0}))
        with pytest.raises(InvalidSpec, match="no GPU can train it"):
            generate(wanted, {"bert": own})


class TestRealistic:
    def test_most_jobs_ask_for_one_gpu_and_batches_grow_with_gpus(self):
        jobs = generate(GeneratorOptions(num_jobs=20_000, configuration="realistic")).jobs
        for job in jobs:
            assert job.batch_size == LIMITS[job.application].initial_batch_size * job.num_gpus
        shares = {gpus: count / len(jobs) for gpus, count in Counter(job.num_gpus for job in jobs).items()}
        assert shares[1] > 0.9
        assert set(shares) == {1, 2, 4, 8, 16, 32}
        assert 1.3 <= sum(gpus * share for gpus, share in shares.items()) <= 1.7  # published: 1.3–1.6

    def test_sizes_follow_the_philly_trace(self, pollux_data):
        """The table in the generator, derived again from the trace."""
        counts: dict[str, Counter[int]] = {name: Counter() for name in ("cifar10", "bert", "yolov3", "imagenet", "own")}
        with (pollux_data / "pollux-osdi21" / "philly.csv").open() as stream:
            for row in csv.DictReader(stream):
                duration, hours = float(row["duration"]), float(row["gpu_time"]) / 3600
                hour = (datetime.fromisoformat(row["timestamp"]) - timedelta(hours=2)).hour
                if duration < 60 or hours >= 1000 or hour >= 8 or (hours >= 10 and duration > 24 * 3600):
                    continue
                name = "cifar10" if hours < 1 else "bert" if hours < 10 else "yolov3" if hours < 100 else "imagenet"
                counts[name][int(row["num_gpus"])] += 1
                counts["own"][int(row["num_gpus"])] += 1
        apps = {name: replace(load("ncf"), name=name) for name in counts}  # ncf: no limit on GPUs
        for name, trace in counts.items():
            wanted = GeneratorOptions(20_000, configuration="realistic", mix=FrozenMap({name: 1.0}))
            found = Counter(job.num_gpus for job in generate(wanted, apps).jobs)
            for gpus in (1, 2, 4, 8, 16, 32):
                assert found[gpus] / 20_000 == pytest.approx(trace[gpus] / trace.total(), abs=0.015)

    def test_a_limit_lowers_the_largest(self):
        wanted = GeneratorOptions(500, configuration="realistic", mix=FrozenMap({"imagenet": 1.0}), max_gpus=12)
        jobs = generate(wanted).jobs
        assert {(job.num_gpus, job.batch_size) for job in jobs} == {(8, 1600), (12, 2400)}

    def test_the_batch_stays_within_the_largest(self):
        wanted = GeneratorOptions(2000, configuration="realistic", mix=FrozenMap({"imagenet": 1.0}))
        own = replace(load("imagenet"), limits=BatchLimits(200, 1000, 20, 200))
        assert {job.batch_size for job in generate(wanted, {"imagenet": own}).jobs} == {1000}


class TestOptions:
    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("num_jobs", 0, "num_jobs = 0: must be at least 1"),
            ("num_jobs", 1.5, "whole number"),
            ("num_jobs", 10**9, "Give 1000000 or fewer"),
            ("duration_s", 0, "greater than 0"),
            ("duration_s", math.inf, "must be finite"),
            ("seed", -1, "must be at least 0"),
            ("arrivals", "weekly", "Give poisson or uniform or daily"),
            ("arrivals", ["poisson"], "Give poisson or uniform or daily"),
            ("configuration", "best", "Give tuned or realistic"),
            ("max_gpus", 0, "must be at least 1"),
            ("gpu_type", "", "must not be empty"),
            ("mix", {"bert": 1.0}, r"Wrap it: FrozenMap\(mix\)"),
            ("mix", FrozenMap({"bert": -0.1}), r'mix\["bert"\] = -0.1: must be at least 0'),
            ("mix", FrozenMap({"bert": math.nan}), "must be finite"),
            ("mix", FrozenMap({"bert": 0.0, "ncf": 0.0}), "the shares sum to 0"),
            ("mix", FrozenMap(), "the shares sum to 0"),
            ("mix", FrozenMap({"bert": 1e308, "ncf": 1e308}), "the shares sum to inf"),
            ("mix", FrozenMap({1: 1.0}), "must be text"),
        ],
    )
    def test_bad_ones_are_refused_with_a_fix(self, field, value, expected):
        with pytest.raises(InvalidSpec, match=expected):
            GeneratorOptions(**{field: value})

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_an_unknown_application_is_named_with_the_closest(self, share):
        with pytest.raises(InvalidSpec, match=r"mix = 'cifar': no such application\. Did you mean 'cifar10'"):
            generate(GeneratorOptions(mix=FrozenMap({"bert": 1.0, "cifar": share})))
        with pytest.raises(InvalidSpec, match="Known: mine"):
            generate(GeneratorOptions(mix=FrozenMap({"bert": 1.0})), {"mine": load("bert")})


class TestBuiltIn:
    @pytest.mark.parametrize("name", built_in_names())
    def test_each_fits_its_cluster(self, name, tmp_path):
        built_in, workload = BUILT_IN[name], built_in_workload(name)
        assert workload.name == name
        write_workload(workload, tmp_path / f"{name}.csv")
        cluster = Cluster.uniform(built_in.num_nodes, built_in.gpus_per_node)
        limits = {**LIMITS, **{job.application: load(job.application).limits for job in workload.jobs}}
        assert read_workload(tmp_path / f"{name}.csv", limits, cluster) == workload
        assert len(workload.jobs) == built_in.num_jobs

    def test_the_demo_is_short_contended_and_varied(self):
        jobs = built_in_workload("demo").jobs
        assert len(jobs) == 24
        assert jobs[-1].submitted_at_s < 5400
        assert {job.application for job in jobs} == {"bert", "cifar10", "deepspeech2", "ncf", "yolov3"}
        assert sum(job.num_gpus for job in jobs) > 5 * 16

    def test_the_listed_ones_hold_every_application_but_the_smallest(self):
        kinds = {name: {base_name(job.application) for job in built_in_workload(name).jobs} for name in LISTED}
        assert kinds["six"] == kinds["twelve"] == set(names())
        assert {name: BUILT_IN[name].num_jobs for name in LISTED} == {"six": 6, "twelve": 12, "four": 4}
        for name in LISTED:
            jobs = built_in_workload(name).jobs
            assert all(1 <= job.num_gpus <= 4 for job in jobs)
            assert len({job.application for job in jobs}) == len(jobs)

    def test_an_unknown_one_is_refused_with_the_names(self):
        assert "demo" in built_in_names()
        with pytest.raises(UnknownName, match="Did you mean 'demo'"):
            built_in_workload("dem")
