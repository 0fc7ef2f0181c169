"""What is learnt from other jobs of a kind: exact where somebody measured, near it in between, the fit far away."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pollux.core import (
    BatchLimits,
    FrozenMap,
    GradientStats,
    JobModel,
    KindProfile,
    Observation,
    ObservationKey,
    Progress,
    Shape,
    Tally,
)
from pollux.core.kinds import GradientSums
from pollux.goodput import PAPER, GoodputModel, Observations, ShapeSet, fit, tables
from pollux.goodput.compiled import interpreted
from pollux.goodput.pooled import (
    ALIKE,
    FADE,
    LARGEST,
    MOST,
    NEWS,
    Corrected,
    Kind,
    correct,
    foreseen,
    interpolate,
    laid_out,
    of_job,
    scale_of,
    with_usual_length,
)

THETA = (0.02, 0.0004, 0.01, 0.001, 0.05, 0.002, 1.6)
LIMITS = BatchLimits(128, 4096, 32, 1024)
PLACES = [(1, 1), (4, 1), (8, 2), (16, 4)]
SIZES = [32, 64, 128, 256]


def bent(K, N, m):
    """Seconds of a kind that the paper's model cannot describe: slow in the middle, and on eight GPUs."""
    level = PAPER.level(N, 1)
    slow = 1.0 + 0.3 * math.exp(-(math.log(m / 100.0) ** 2)) + (0.2 if K == 8 else 0.0)
    return PAPER.t_grad(THETA, m) * slow, PAPER.t_step(THETA, K, level, m) * slow


def measured(places=PLACES, sizes=SIZES, factor=1.0, passes=10):
    found = {}
    for K, N in places:
        for m in sizes:
            grad, step = (factor * seconds for seconds in bent(K, N, m))
            sync_s = max(step - grad, 0.0)
            found[ObservationKey(Shape(K, N), m)] = Observation(0.0, 0, passes * step, passes * sync_s, passes)
    return found


def taught(*lessons):
    kind = Kind()
    for lesson in lessons:
        kind.note(lesson)
    return kind


def test_what_was_measured_is_predicted_exactly():
    model = taught(measured()).model()
    for K, N in PLACES:
        for m in SIZES:
            _, step = bent(K, N, m)
            assert model.t_step((1.0,), K, PAPER.level(N, 1), m) == pytest.approx(step, rel=1e-9)
            assert model.t_grad((1.0,), m) > 0.0
            assert model.t_step((2.0,), K, PAPER.level(N, 1), m) == pytest.approx(2 * step, rel=1e-9)


def test_neighbours_of_what_was_measured_are_predicted_better_than_by_the_fit_alone():
    seen = Observations.of(measured())
    fitted = fit(seen)
    model = Corrected(PAPER, fitted.theta, seen)
    errors: dict[str, list[float]] = {"fit": [], "corrected": []}
    for K, N in [(1, 1), (4, 1), (12, 3), (16, 4)]:
        for m in (48, 96, 180):
            _, step = bent(K, N, m)
            level = PAPER.level(N, 1)
            for name, time in (
                ("fit", PAPER.t_step(fitted.theta, K, level, m)),
                ("corrected", model.t_step((1.0,), K, level, m)),
            ):
                errors[name].append(abs(math.log(float(time) / step)))
    assert np.mean(errors["corrected"]) < 0.6 * np.mean(errors["fit"])


def test_far_from_what_was_measured_the_fit_is_left_alone():
    seen = Observations.of(measured())
    theta = fit(seen).theta
    model = Corrected(PAPER, theta, seen)
    far = model.t_step((1.0,), 16 * 2**12, 1, 64) / PAPER.t_step(theta, 16 * 2**12, 1, 64)
    assert far == pytest.approx(1.0, abs=1e-4)
    nobody = Corrected(PAPER, theta, Observations.of(measured(places=[(4, 1)])))
    assert nobody.t_step((1.0,), 8, 1, 64) == pytest.approx(PAPER.t_step(theta, 8, 1, 64))  # no one was on two nodes


def test_one_gpu_and_several_of_a_node_do_not_correct_each_other():
    seen = Observations.of(measured(places=[(1, 1)]))
    model = Corrected(PAPER, THETA, seen)
    assert model.t_step((1.0,), 1, 0, 128) > 1.1 * PAPER.t_step(THETA, 1, 0, 128)
    assert model.t_step((1.0,), 2, 0, 128) == pytest.approx(PAPER.t_step(THETA, 2, 0, 128))


def test_a_slip_of_a_clock_does_not_lead_astray():
    lesson = measured()
    key = ObservationKey(Shape(16, 4), 256)
    lesson[key] = Observation(0.0, 0, 1e4, 0.0, 1)
    model, theta = Corrected(PAPER, THETA, Observations.of(lesson)), THETA
    assert model.t_step((1.0,), 16, 1, 256) <= math.exp(LARGEST) * PAPER.t_step(theta, 16, 1, 256) * (1 + 1e-9)


def test_the_tables_of_goodput_take_it_like_any_other_model():
    model = taught(measured()).model()
    job = GoodputModel(model, (1.25,), GradientStats(1.0, 5.0), LIMITS)
    shapes = ShapeSet.up_to(3, 12)
    found = tables([job, job.with_gradient(GradientStats(1.0, 50.0))], shapes)
    for index, shape in enumerate(shapes):
        best = job.best(shape)
        assert found.goodput[0, index] == pytest.approx(best.goodput, rel=1e-9)
        at_best = job.goodput(shape, best.per_gpu_batch_size, best.accumulation_steps)
        assert at_best == pytest.approx(best.goodput, rel=1e-9)


def test_the_model_is_the_same_object_until_there_is_news():
    kind = Kind()
    assert kind.model() is None
    kind.note(measured(places=[(4, 1)]))
    first = kind.model()
    kind.note(measured(places=[(4, 1)]))
    kind.note(measured(places=[(4, 1)], factor=1.0 + NEWS / 4, passes=20))
    assert kind.model() is first
    changed = measured(places=[(4, 1)], passes=40)
    changed |= measured(places=[(4, 1)], sizes=[64], factor=1.0 + 3 * NEWS, passes=40)
    kind.note(changed)
    second = kind.model()
    assert second is not first
    assert second.max_gpus_observed == 4
    kind.note(measured(places=[(16, 4)]))
    assert kind.model().max_gpus_observed == 16


def test_the_longest_measured_counts_in_whatever_order():
    rough, fine = measured(passes=1), measured(passes=50)
    key = ObservationKey(Shape(8, 2), 64)
    rough[key] = Observation(0.0, 0, 1.3 * rough[key].sync_pass_time_s, 0.0, 1)
    for lessons in ((rough, fine), (fine, rough), (fine, rough, rough)):
        model = taught(*lessons).model()
        assert model.t_step((1.0,), 8, 1, 64) == pytest.approx(bent(8, 2, 64)[1], rel=1e-9)


def test_jobs_of_different_speed_tell_the_same_of_how_their_kind_scales():
    small, large = measured(places=[(4, 1)]), measured(places=[(4, 1), (16, 4)], factor=1.5, passes=20)
    kind = taught(small, large)
    model = kind.model()
    for place in [(4, 1), (16, 4)]:
        assert scale_of(model, measured(places=[place])) == pytest.approx(1.0, rel=2 * NEWS)
    assert scale_of(model, large) == pytest.approx(1.5, rel=2 * NEWS)


def test_a_job_of_another_kind_teaches_nothing():
    kind = taught(measured())
    model = kind.model()
    kind.note(measured(places=[(4, 1)], passes=99) | measured(places=[(16, 4)], factor=math.exp(3 * ALIKE), passes=99))
    assert kind.model() is model


def test_what_cannot_have_been_measured_is_ignored():
    key = ObservationKey(Shape(4), 64)
    for one in (Observation(0.1, 2, 0.0, 0.0, 0), Observation(0.0, 0, 0.0, 0.0, 3), Observation(0.0, 0, 1e9, 0.0, 1)):
        assert taught({key: one}).model() is None
        assert scale_of(taught(measured()).model(), {key: one}) == 1.0


def test_a_kind_that_knows_enough_takes_in_only_new_sizes():
    kind = taught({ObservationKey(Shape(1), m): Observation(0.0, 0, 1.0 + m, 0.0, 1) for m in range(1, MOST + 1)})
    first = kind.model()
    kind.note({ObservationKey(Shape(1), MOST + 1): Observation(0.0, 0, 2.0 + MOST, 0.0, 1)})
    assert kind.model() is first
    kind.note({ObservationKey(Shape(2), 8): Observation(0.0, 0, 10.0, 0.0, 1)})
    assert kind.model().max_gpus_observed == 2


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_a_job_that_is_slower_than_its_kind_is_predicted_to_stay_so(factor):
    model = taught(measured()).model()
    found = scale_of(model, measured(places=[(4, 1)], factor=factor))
    assert found == pytest.approx(factor, rel=NEWS)
    assert math.log(found) / NEWS == pytest.approx(round(math.log(found) / NEWS))


def test_a_job_that_has_measured_nothing_is_taken_to_be_like_its_kind():
    assert scale_of(taught(measured()).model(), {}) == 1.0


def test_a_job_that_scales_otherwise_than_its_kind_is_told_apart():
    model = taught(measured()).model()
    own = measured(places=[(4, 1)]) | measured(places=[(16, 4)], factor=math.exp(3 * ALIKE))
    assert scale_of(model, own) is None


def test_a_job_trusts_its_own_times_and_expects_its_own_speed_elsewhere():
    model = taught(measured()).model()
    own = measured(places=[(4, 1)], factor=1.5)
    own |= measured(places=[(4, 1)], sizes=[128], factor=1.65)
    found = of_job(model, own)
    assert found.t_step((1.0,), 4, 0, 128) == pytest.approx(1.65 * bent(4, 1, 128)[1], rel=1e-9)
    assert found.t_step((1.0,), 16, 1, 64) == pytest.approx(1.5 * bent(16, 4, 64)[1], rel=2 * NEWS)
    assert of_job(model, {}) is model
    stranger = measured(places=[(4, 1)]) | measured(places=[(16, 4)], factor=math.exp(3 * ALIKE))
    assert of_job(model, stranger) is None


def test_a_newcomer_is_expected_to_begin_and_to_last_as_its_kind():
    kind = KindProfile(
        num_jobs=2,
        gradients=FrozenMap({1: GradientSums(2.0, 512.0, 2), 9: GradientSums(1.0, 9e9, 1)}),
        work=Tally(2, 512_000.0, 2 * 256_000.0**2),
        realloc_delay_s=Tally(1, 4.0, 16.0),
        limits=LIMITS,
    )
    model = foreseen(kind)
    assert model.limits == LIMITS
    assert model.realloc_delay_s == 4.0
    assert not model.throughput
    assert model.progress.total == pytest.approx(2000.0)
    assert model.progress.remaining == model.progress.total
    assert model.gradient == GradientStats(1.0, 2.0)
    own = BatchLimits(256, 4096, 32, 1024)
    assert foreseen(kind, own).progress.total == pytest.approx(1000.0)


def test_a_job_that_does_not_say_how_long_it_is_lasts_as_long_as_its_kind():
    silent = JobModel(LIMITS, progress=Progress(7.0))
    known = KindProfile(work=Tally(2, 2 * 32_000.0, 2 * 32_000.0**2))
    assert with_usual_length(silent, known).progress == Progress(7.0, 32_000.0 / LIMITS.initial_batch_size, 0.0)
    assert with_usual_length(silent, KindProfile()) == silent


def test_a_kind_that_nobody_has_ended_of_foresees_nothing():
    assert foreseen(KindProfile()) is None
    model = foreseen(KindProfile(), LIMITS)
    assert model.progress is None
    assert model.gradient is None


def test_machine_code_and_plain_python_interpolate_alike():
    rng = np.random.default_rng(3)
    log_K, log_m = np.sort(rng.uniform(0, 4, 5)), np.sort(rng.uniform(0, 6, 7))
    wrong, at_K, at_m = rng.normal(size=(5, 7)), rng.uniform(-1, 5, 200), rng.uniform(-1, 7, 200)
    compiled, plain = np.empty(200), np.empty(200)
    interpolate(log_K, log_m, wrong, 0.7, at_K, at_m, compiled)
    getattr(interpolate, "py_func", interpolate)(log_K, log_m, wrong, 0.7, at_K, at_m, plain)
    np.testing.assert_allclose(compiled, plain, rtol=1e-12)
    on_knots = np.empty(5)
    interpolate(log_K, log_m, wrong, 0.7, log_K, np.full(5, log_m[3]), on_knots)
    np.testing.assert_allclose(on_knots, wrong[:, 3])


def surface(log_K, log_m, wrong, x, y):
    """What the correction at (x, y) is, said slowly: rows of one K are filled up, then the grid is interpolated."""
    wrong = np.clip(wrong, -LARGEST, LARGEST)
    all_K, all_m = np.unique(log_K), np.unique(log_m)
    rows = []
    for each in all_K:
        knots, place = np.unique(log_m[log_K == each], return_inverse=True)
        mean = np.bincount(place, wrong[log_K == each]) / np.bincount(place)
        outside = np.maximum(np.maximum(knots[0] - all_m, all_m - knots[-1]), 0.0)
        rows.append(np.interp(all_m, knots, mean) * np.exp(-outside / FADE))
    near_x, near_y = np.clip(x, all_K[0], all_K[-1]), np.clip(y, all_m[0], all_m[-1])
    value = np.interp(near_x, all_K, [np.interp(near_y, all_m, row) for row in rows])
    return value * np.exp(-(abs(x - near_x) + abs(y - near_y)) / FADE)


@pytest.mark.parametrize("seed", range(12))
def test_corrections_are_interpolated_between_what_was_measured_at_the_same_level(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    level, log_K, log_m = (rng.integers(0, 3, n) * 1.0, rng.integers(0, 4, n) * 0.7, rng.integers(0, 6, n) * 0.5)
    wrong = rng.normal(size=n)
    order, sizes = np.lexsort((log_m, log_K, level)), log_m[np.lexsort((log_m, level))]
    points = level[order], log_K[order], log_m[order], wrong[order], sizes
    at = rng.uniform(-1, 4, 50), rng.integers(0, 4, 50) * 1.0, rng.uniform(-1, 4, 50)
    for kernels in ((laid_out, correct), (plain(laid_out), plain(correct))):
        grids, inside, outside = kernels[0](*points)
        found = np.empty(50)
        kernels[1](*grids, inside * np.exp(-outside / FADE), *at, found)
        for x, of, y, value in zip(*at, found, strict=True):
            here = level == of
            expected = surface(log_K[here], log_m[here], wrong[here], x, y) if here.any() else 0.0
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)


def plain(function):
    return getattr(function, "py_func", function)


def test_one_place_is_asked_for_like_many():
    model = taught(measured()).model()
    K, level, m = np.array([1, 4, 8, 12]), np.array([0, 0, 1, 1]), np.array([[40.0], [90.0], [500.0]])
    at_once = model.t_step((1.0,), K, level, m)
    assert at_once.shape == (3, 4)
    for i, j in np.ndindex(3, 4):
        one = model.t_step((1.0,), int(K[j]), int(level[j]), float(m[i, 0]))
        assert one == pytest.approx(at_once[i, j], rel=1e-12)


def test_a_single_measurement_is_enough():
    with interpreted():
        model = taught(measured(places=[(4, 1)], sizes=[64])).model()
    assert model.t_step((1.0,), 4, 0, 64) == pytest.approx(bent(4, 1, 64)[1], rel=1e-9)
    job = GoodputModel(model, (1.0,), GradientStats(0.0, 1.0), LIMITS)
    assert job.best(Shape(8, 2)).goodput > job.best(Shape(1)).goodput > 0.0


def test_other_batch_sizes_on_known_gpus_make_another_model_only_once_they_are_many():
    kind = taught(measured(sizes=range(32, 132)))
    before = kind.model()
    kind.note(measured([(4, 1)], [200]))
    assert kind.model() is before
    kind.note(measured([(4, 1)], range(201, 220)))
    assert kind.model() is not before
    before = kind.model()
    kind.note(measured([(12, 3)], [64]))
    assert kind.model() is not before
