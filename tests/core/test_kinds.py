import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import (
    BatchLimits,
    FrozenMap,
    GradientStats,
    GradientSums,
    Job,
    JobModel,
    JobSpec,
    KindProfile,
    Observation,
    ObservationKey,
    Phase,
    Profile,
    ProfileRegistry,
    Progress,
    Shape,
    Tally,
    dumps,
    encode,
    kind_of,
    loads,
)
from pollux.core.kinds import MAX_KINDS, MAX_OBSERVATIONS, NUM_STAGES, pooled, stage_of
from pollux.errors import InvalidDocument, InvalidModel

from .kinds import LIMITS, ended, model, profile, registry
from .strategies import kind_profiles


def is_close(one: KindProfile, other: KindProfile) -> bool:
    """Equal but for the rounding of floats."""

    def near(mine: object, theirs: object) -> bool:
        if isinstance(mine, float):
            return math.isclose(mine, theirs, rel_tol=1e-9)
        if isinstance(mine, dict):
            return mine.keys() == theirs.keys() and all(near(part, theirs[key]) for key, part in mine.items())
        return all(map(near, mine, theirs)) if isinstance(mine, list) else mine == theirs

    return near(encode(one), encode(other))


@settings(max_examples=30)
@given(kind_profiles, kind_profiles, kind_profiles)
def test_order_and_grouping_do_not_matter(a, b, c):
    assert is_close(a.merge(b), b.merge(a))
    known = [each if each.limits else replace(each, limits=LIMITS) for each in (a, b, c)]
    assert is_close(known[0].merge(known[1]).merge(known[2]), known[0].merge(known[1].merge(known[2])))
    assert a.merge(b).num_jobs == a.num_jobs + b.num_jobs
    assert is_close(KindProfile(latest_s=a.latest_s).merge(a), a)


@settings(max_examples=30)
@given(st.lists(kind_profiles, min_size=1, max_size=3))
def test_what_is_pooled_reads_back_equal(found):
    kinds = FrozenMap({f"kind-{number}": each for number, each in enumerate(found)})
    written = ProfileRegistry(pooled(kinds, kinds), "a test")
    assert loads(dumps(written), ProfileRegistry) == written


def test_sums_of_the_same_circumstances_add_up_and_others_stand_beside():
    together = profile(1, 2).merge(profile(2, 4, count=3)).merge(profile(1, gpu_type="a100"))
    seen = together.of_type("t4")
    assert {key.shape.num_gpus: one.sync_count for key, one in seen.items()} == {1: 1, 2: 4, 4: 3}
    assert list(seen) == sorted(seen)
    assert seen[ObservationKey(Shape(2), 16)] == Observation(0.0, 0, 4.0, 1.0, 4)
    assert (len(together), list(together.observations)) == (4, ["a100", "t4"])


def test_an_entry_keeps_so_many_observations_and_of_each_shape_the_best_measured():
    many = [
        (ObservationKey(Shape(gpus), m), Observation(0.0, 0, 1.0, 0.0, 1 + m))
        for gpus in (1, 2)
        for m in range(1, MAX_OBSERVATIONS)
    ]
    rare = ObservationKey(Shape(64), 1), Observation(0.0, 0, 1.0, 0.0, 1)
    known = KindProfile(Profile(FrozenMap({"t4": FrozenMap(dict(many)), "v100": FrozenMap([rare])})))
    assert len(known.profile) == MAX_OBSERVATIONS
    assert rare[0] in known.profile.of_type("v100")
    kept = known.profile.of_type("t4")
    for gpus in (1, 2):
        sizes = [key.per_gpu_batch_size for key in kept if key.shape.num_gpus == gpus]
        assert sizes == list(range(MAX_OBSERVATIONS - len(sizes), MAX_OBSERVATIONS))
    assert known == KindProfile(known.profile)


def test_the_least_recent_kinds_make_room():
    full = FrozenMap({f"kind-{number:03}": KindProfile(latest_s=float(number)) for number in range(MAX_KINDS)})
    assert pooled(full, FrozenMap({"kind-005": KindProfile(latest_s=500.0)})).keys() == full.keys()
    more = pooled(full, FrozenMap({"new": KindProfile(latest_s=500.0)}))
    assert more.keys() == (full.keys() | {"new"}) - {"kind-000"}


def test_one_job_leaves_what_it_measured_and_how_long_it_was():
    known = KindProfile.of(ended("a"), {0: GradientStats(1.0, 3.0)}, 7.0)
    assert known == KindProfile(
        profile(1, 2),
        1,
        FrozenMap({0: GradientSums(1.0, 96.0, 1)}),
        Tally(1, 3200.0, 3200.0**2),
        Tally(1, 2.0, 4.0),
        LIMITS,
        7.0,
    )
    assert KindProfile.of(ended("a", model=model(90.0, None)), {}, 7.0).work.mean == 90.0 * 32
    assert KindProfile.of(ended("a", Phase.CANCELLED), {}, 7.0).work == Tally()
    assert KindProfile.of(ended("a", model=None), {}, 7.0) == KindProfile(profile(1, 2), 1, latest_s=7.0)


def test_figures_of_several_jobs():
    lengths = Tally.of(1.0).merge(Tally.of(3.0)).merge(Tally.of(None))
    assert (lengths.count, lengths.mean, lengths.stddev) == (2, 2.0, 1.0)
    assert (Tally().mean, Tally().stddev) == (None, None)
    limits = replace(LIMITS, initial_batch_size=64)
    older = KindProfile.of(ended("a"), {}, 1.0)
    newer = KindProfile.of(ended("b", model=replace(model(1.0), limits=limits)), {}, 2.0)
    assert older.merge(newer).limits == newer.merge(older).limits == limits
    assert older.merge(KindProfile(latest_s=9.0)).limits == LIMITS


def test_noise_is_that_of_the_nearest_stage_whatever_the_initial_batch_size():
    jobs = KindProfile.of(ended("a"), {0: GradientStats(1.0, 3.0), 10: GradientStats(1.0, 9.0)}, 0.0)
    wide = replace(model(1.0), limits=BatchLimits(64, 512, 1, 64))
    jobs = jobs.merge(KindProfile.of(ended("b", model=wide), {0: GradientStats(3.0, 1.5)}, 0.0))
    assert jobs.gradient_at(0.0, 32) == GradientStats(2.0, 3.0)
    assert jobs.gradient_at(0.02, 64) == GradientStats(2.0, 1.5)
    assert jobs.gradient_at(0.4, 32) == jobs.gradient_at(1.0, 32) == GradientStats(1.0, 9.0)
    assert jobs.gradient_at(0.25, 32) == GradientStats(2.0, 3.0)  # the earlier of two that are as near
    assert KindProfile().gradient_at(0.5, 32) is None


@pytest.mark.parametrize(
    ("progress", "stage"),
    [
        (None, None),
        (Progress(5.0), None),
        (Progress(0.0, 0.0), None),
        (Progress(0.0, 100.0), 0),
        (Progress(52.0, 100.0), 10),
        (Progress(100.0, 100.0), NUM_STAGES - 1),
        (Progress(1e300, 5e-324), NUM_STAGES - 1),
        (Progress(1.7e308, 1.79e308), 18),
        (Progress(math.nextafter(3.0, 0.0), 3.0), NUM_STAGES - 1),
    ],
)
def test_stages_of_a_training(progress, stage):
    assert stage_of(progress) == stage


def test_a_job_is_of_the_kind_that_its_owner_says_else_of_its_fingerprint():
    said = Job(JobSpec("a", application="net"), 0.0, model=model(1.0, fingerprint="mlp-0"))
    assert kind_of(said) == "net"
    assert kind_of(replace(said, spec=JobSpec("a"))) == "mlp-0"
    assert kind_of(Job(JobSpec("a"), 0.0)) is None


def test_a_fingerprint_is_written_only_if_there_is_one():
    assert "fingerprint" not in dumps(model(1.0))
    assert loads(dumps(model(1.0, fingerprint="mlp-0"))).fingerprint == "mlp-0"
    for bad in ("", "x" * 81, 3):
        with pytest.raises(InvalidModel, match="fingerprint"):
            JobModel(LIMITS, fingerprint=bad)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: GradientSums(0.0, 0.0, 1), "both 0"),
        (lambda: GradientSums(1.0, 1.0, 0), "count"),
        (lambda: Tally(0, 1.0, 1.0), "of nothing"),
        (lambda: KindProfile(gradients=FrozenMap({NUM_STAGES: GradientSums(1.0, 1.0, 1)})), "no stage"),
        (lambda: KindProfile(gradients={}), "FrozenMap"),
        (lambda: ProfileRegistry(FrozenMap({"": KindProfile()})), "must not be empty"),
        (lambda: ProfileRegistry(FrozenMap({"a": None})), "must be a KindProfile"),
        (lambda: registry(*map(str, range(MAX_KINDS + 1))), "more than 128 kinds"),
    ],
)
def test_what_no_registry_may_hold_is_refused(make, problem):
    with pytest.raises(InvalidModel, match=problem):
        make()


def test_a_file_of_something_else_is_told_so():
    with pytest.raises(InvalidDocument, match="not a type that may stand here"):
        loads(dumps(JobModel(LIMITS)), ProfileRegistry)
