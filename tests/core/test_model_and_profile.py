import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import (
    BatchLimits,
    BatchWishes,
    FrozenMap,
    GradientStats,
    JobModel,
    Observation,
    ObservationKey,
    Profile,
    Progress,
    Shape,
    ThroughputFit,
)
from pollux.errors import InvalidModel, InvalidProfile, InvalidSpec

from .strategies import keys, observations

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("build", "field", "problem"),
    [
        (lambda: BatchLimits(256, 128, 1, 2), "initial_batch_size", "greater than max_batch_size = 128"),
        (lambda: BatchLimits(1, 128, 3, 2), "min_per_gpu_batch_size", "greater than max_per_gpu_batch_size = 2"),
        (lambda: BatchLimits(0, 128, 1, 2), "initial_batch_size", "at least 1"),
        (lambda: BatchLimits(1, 128.0, 1, 2), "max_batch_size", "whole number"),
        (lambda: BatchLimits(1, 128, True, 2), "min_per_gpu_batch_size", "whole number"),
        (lambda: GradientStats(NAN, 1.0), "sqr", "finite"),
        (lambda: GradientStats(1.0, INF), "var", "finite"),
        (lambda: GradientStats(1.0, -1.0), "var", "at least 0"),
        (lambda: GradientStats(0.0, 0.0), "sqr", "both 0"),
        (lambda: GradientStats("1", 0.0), "sqr", "must be a number"),
        (lambda: ThroughputFit("", FrozenMap()), "model", "must not be empty"),
        (lambda: ThroughputFit("paper", FrozenMap({"a": NAN})), 'params["a"]', "finite"),
        (lambda: ThroughputFit("paper", FrozenMap({"a": 1.0}), ("b",)), "priors", "not among the parameters"),
        (lambda: ThroughputFit("paper", FrozenMap({"a": 1.0}), "a"), "priors", "tuple of names"),
        (lambda: ThroughputFit("paper", FrozenMap(), mean_relative_error=-0.1), "mean_relative_error", "at least 0"),
        (lambda: ThroughputFit("paper", FrozenMap(), converged=1), "converged", "true or false"),
        (lambda: Progress(-1.0), "done", "at least 0"),
        (lambda: Progress(1.0, NAN), "total", "finite"),
        (lambda: Progress(1.0, None, 2.0), "total_stddev", "no total"),
        (lambda: JobModel(None), "limits", "must be a BatchLimits"),
        (lambda: JobModel(BatchLimits(1, 2, 1, 2), realloc_delay_s=-1.0), "realloc_delay_s", "at least 0"),
        (lambda: JobModel(BatchLimits(1, 2, 1, 2), throughput={}), "throughput", "FrozenMap"),
    ],
)
def test_models_outside_their_range_are_refused(build, field, problem):
    with pytest.raises(InvalidModel, match=problem) as caught:
        build()
    assert caught.value.field == field
    assert caught.value.fix


@pytest.mark.parametrize(
    ("wishes", "field", "problem"),
    [
        ({"max_batch_size": 0}, "max_batch_size", "at least 1"),
        ({"initial_batch_size": 8.0}, "initial_batch_size", "whole number"),
        ({"initial_batch_size": 9, "max_batch_size": 8}, "initial_batch_size", "greater than max_batch_size = 8"),
        ({"min_per_gpu_batch_size": 9, "max_batch_size": 8}, "min_per_gpu_batch_size", "greater than max_batch_size"),
        (
            {"min_per_gpu_batch_size": 9, "max_per_gpu_batch_size": 8},
            "min_per_gpu_batch_size",
            "greater than max_per_gpu_batch_size = 8",
        ),
    ],
)
def test_wishes_that_nobody_can_fulfil_are_refused(wishes, field, problem):
    with pytest.raises(InvalidSpec, match=problem) as caught:
        BatchWishes(**wishes)
    assert caught.value.field == field


def test_who_wishes_nothing_is_content():
    assert BatchWishes() == BatchWishes(None, None, None, None)
    assert BatchWishes(8, 8, 8, 8).initial_batch_size == 8


def test_the_order_in_which_priors_are_given_does_not_matter():
    params = FrozenMap({"a": 1.0, "b": 1.0})
    assert ThroughputFit("paper", params, ("b", "a")) == ThroughputFit("paper", params, ("a", "b", "a"))


def test_remaining_work_is_never_negative_and_unknown_without_a_total():
    assert Progress(3.0, 10.0).remaining == 7.0
    assert Progress(11.0, 10.0, 2.0).remaining == 0.0
    assert Progress(3.0).remaining is None


@pytest.mark.parametrize(
    ("numbers", "field", "problem"),
    [
        ((-1.0, 1, 1.0, 0.0, 1), "accum_time_s", "at least 0"),
        ((NAN, 1, 1.0, 0.0, 1), "accum_time_s", "finite"),
        ((1.0, 1, INF, 0.0, 1), "sync_pass_time_s", "finite"),
        ((1.0, 1, 1.0, 2.0, 1), "sync_time_s", "more than sync_pass_time_s"),
        ((1.0, -1, 1.0, 0.0, 1), "accum_count", "at least 0"),
        ((1.0, 1.5, 1.0, 0.0, 1), "accum_count", "whole number"),
        ((1.0, 1, 1.0, 0.0, True), "sync_count", "whole number"),
        ((1.0, 0, 1.0, 0.0, 1), "accum_time_s", "time without a pass"),
        ((1.0, 1, 1.0, 0.0, 0), "sync_pass_time_s", "time without a pass"),
    ],
)
def test_impossible_measurements_are_refused(numbers, field, problem):
    with pytest.raises(InvalidProfile, match=problem) as caught:
        Observation(*numbers)
    assert caught.value.field == field


@pytest.mark.parametrize("arguments", [(Shape(1), 0), (Shape(1), 1.0), ((1, 1), 1)])
def test_impossible_keys_are_refused(arguments):
    with pytest.raises(InvalidProfile):
        ObservationKey(*arguments)


def test_mean_times_follow_from_the_sums():
    seen = Observation(accum_time_s=6.0, accum_count=3, sync_pass_time_s=5.0, sync_time_s=1.0, sync_count=2)
    assert seen.grad_time_s == (6.0 + (5.0 - 1.0)) / 5
    assert seen.iteration_time_s == 2.5


@pytest.mark.parametrize("mean", ["grad_time_s", "iteration_time_s"])
def test_means_need_a_synchronising_pass(mean):
    with pytest.raises(InvalidProfile, match=mean):
        getattr(Observation(1.0, 1, 0.0, 0.0, 0), mean)


@given(observations(), observations(), observations())
def test_merging_is_associative_and_commutative(a, b, c):
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert a.merge(b) == b.merge(a)
    assert (left.accum_count, left.sync_count) == (right.accum_count, right.sync_count)
    for name in ("accum_time_s", "sync_pass_time_s", "sync_time_s"):
        assert getattr(left, name) == pytest.approx(getattr(right, name))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("ab"), keys, observations()), max_size=5))
def test_a_profile_merges_what_has_the_same_key(found):
    profile = Profile()
    for gpu_type, key, observation in found:
        profile = profile.add(gpu_type, key, observation)
    for gpu_type, key, _ in found:
        total = profile.of_type(gpu_type)[key]
        same = [o for t, k, o in found if (t, k) == (gpu_type, key)]
        assert total.sync_count == sum(o.sync_count for o in same)
        assert total.accum_count == sum(o.accum_count for o in same)
    assert bool(profile) == bool(found)
    assert profile.of_type("never seen") == {}


def test_a_profile_refuses_plain_dicts_and_empty_types():
    with pytest.raises(InvalidProfile, match="FrozenMap"):
        Profile({})
    with pytest.raises(InvalidProfile, match="FrozenMap"):
        Profile(FrozenMap({"a": {}}))
    with pytest.raises(InvalidProfile, match="gpu_type"):
        Profile().add("", ObservationKey(Shape(1), 1), Observation(0.0, 0, 1.0, 0.0, 1))
