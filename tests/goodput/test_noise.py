"""The estimators of the gradient noise scale against truth, identities and plain loops.

**Linear regression, solved.** x ~ N(0, C), y = xᵀw* + ε with ε ~ N(0, σ²), loss ½(xᵀw − y)². With δ = w − w* the
gradient of one example is h = x(xᵀδ − ε), so E h = Cδ. Its second moment needs the fourth moments of a Gaussian, for
which Isserlis gives E[xᵢxⱼxₖxₗ] = CᵢⱼCₖₗ + CᵢₖCⱼₗ + CᵢₗCⱼₖ, hence E[x xᵀ (xᵀδ)²] = (δᵀCδ) C + 2 Cδ δᵀC and

    Σ = E[h hᵀ] − Cδ δᵀC = (δᵀCδ + σ²) C + Cδ δᵀC

Under P = diag(1/p): |Pg|² = |PCδ|² and tr(PΣPᵀ) = (δᵀCδ + σ²) Σᵢ Cᵢᵢ/pᵢ² + |PCδ|², at any fixed w.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pollux.errors import InvalidModel
from pollux.goodput.noise import (
    NoiseAverage,
    NoiseSample,
    fresh_share,
    from_difference,
    from_gradients,
    from_replicas,
    from_slices,
    from_split_batch,
    group_sqr_norms,
    local_mean,
)
from pollux.goodput.preconditioning import preconditioner

repeatable = settings(max_examples=50, deadline=None, derandomize=True)

M0 = 32
D = 48
HALVES = (0, D // 2)  # two parameter groups


class Regression:
    """Linear regression at a fixed w, with the statistics known in closed form."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        mixing = rng.normal(size=(D, D)) / math.sqrt(D) + np.diag(np.linspace(0.5, 1.5, D))
        self.factor = np.linalg.cholesky(mixing @ mixing.T)
        self.C = self.factor @ self.factor.T
        self.delta = rng.normal(size=D)
        self.sigma = 2.0
        self.g = self.C @ self.delta
        self.residual = float(self.delta @ self.g) + self.sigma**2
        # What Adam's second moment would settle at: E h² elementwise.
        v = self.residual * np.diag(self.C) + 2.0 * self.g**2
        self.adam = preconditioner("adam", v, step=10_000)
        self.steep = np.linspace(0.5, 3.0, D)

    def truth(self, p: np.ndarray | float) -> tuple[float, float]:
        """(|Pg|², tr(PΣPᵀ)/M0)"""
        sqr = float(((self.g / p) ** 2).sum())
        return sqr, (self.residual * float((np.diag(self.C) / np.square(p)).sum()) + sqr) / M0

    def gradients(self, seed: int, steps: int, sizes: tuple[int, ...]) -> np.ndarray:
        """[steps, count, D]: the mean gradients of `steps` batches cut into slices of the given sizes."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(steps, sum(sizes), D)) @ self.factor.T
        error = x @ self.delta - self.sigma * rng.normal(size=(steps, sum(sizes)))
        sums = np.add.reduceat(x * error[..., None], np.cumsum([0, *sizes[:-1]]), axis=1)
        return sums / np.asarray(sizes)[:, None]


REGRESSION = Regression()
PRECONDITIONERS = {"sgd": 1.0, "diagonal": REGRESSION.steep, "adam": REGRESSION.adam}

# Each turns gradients [steps, count, D] of slices of the given sizes into the samples of those steps.


def as_replicas(gradients: np.ndarray, sizes: tuple[int, ...], p: np.ndarray | float) -> list[NoiseSample]:
    local = group_sqr_norms(gradients, p, HALVES).mean(axis=1)
    total = group_sqr_norms(gradients.mean(axis=1), p, HALVES)
    return [from_replicas(lo, to, len(sizes), sum(sizes) / M0) for lo, to in zip(local, total, strict=True)]


def as_uneven_slices(gradients: np.ndarray, sizes: tuple[int, ...], p: np.ndarray | float) -> list[NoiseSample]:
    local = group_sqr_norms(gradients, p, HALVES)
    total = group_sqr_norms(np.asarray(sizes) @ gradients / sum(sizes), p, HALVES)
    return [from_slices(lo, sizes, to, M0) for lo, to in zip(local, total, strict=True)]


def as_split_batch(gradients: np.ndarray, sizes: tuple[int, ...], p: np.ndarray | float) -> list[NoiseSample]:
    halves = group_sqr_norms(gradients, p, HALVES)
    total = group_sqr_norms(np.asarray(sizes) @ gradients / sum(sizes), p, HALVES)
    scale = sum(sizes) / M0
    return [from_split_batch(one, two, to, scale, sizes) for (one, two), to in zip(halves, total, strict=True)]


def as_differences(gradients: np.ndarray, sizes: tuple[int, ...], p: np.ndarray | float) -> list[NoiseSample]:
    """Neighbouring steps in pairs, as the agent takes them: each gradient is used twice."""
    g = gradients[:, 0] / p
    norms = group_sqr_norms(g, 1.0, HALVES)
    dots = np.add.reduceat(g[:-1] * g[1:], HALVES, axis=-1)
    scale = sum(sizes) / M0
    return [from_difference(a, b, dot, scale) for a, b, dot in zip(norms[:-1], norms[1:], dots, strict=True)]


ESTIMATORS = {
    "many replicas": (as_replicas, (16,) * 4),  # K = 4, s = 0
    "accumulation": (as_replicas, (8,) * 4),  # K = 1, s = 3
    "replicas and accumulation": (as_replicas, (12,) * 8),  # K = 4, s = 1
    "a split batch": (as_split_batch, (16, 16)),
    "an odd split batch": (as_split_batch, (16, 17)),
    "differences": (as_differences, (32,)),
    "uneven slices": (as_uneven_slices, (3, 11, 7, 30, 13)),
}


def averaged(samples: Iterable[NoiseSample], average: NoiseAverage | None = None, steps: int = 1) -> NoiseAverage:
    average = average or NoiseAverage()
    for sample in samples:
        average = average.update(sample, steps)
    return average


# --- against truth


def test_the_closed_form_of_linear_regression_is_right():
    h = REGRESSION.gradients(0, 100_000, (1,))[:, 0]
    for p in PRECONDITIONERS.values():
        sqr, var = REGRESSION.truth(p)
        assert ((h.mean(axis=0) / p) ** 2).sum() == pytest.approx(sqr, rel=0.01)
        assert (h / p).var(axis=0).sum() / M0 == pytest.approx(var, rel=0.01)


def test_published_estimators_are_unbiased_for_four_replicas_with_accumulation():
    # policies.md, vector E.6
    K, b, s, initial, d = 4, 6, 1, 8, 5
    rng = np.random.default_rng(6)
    g, root = rng.normal(size=d), rng.normal(size=(d, d))
    examples = g + rng.normal(size=(20_000, K * (s + 1), b, d)) @ root.T
    gradients = examples.mean(axis=2)
    local, total = (gradients**2).sum(axis=-1).mean(axis=1), (gradients.mean(axis=1) ** 2).sum(axis=-1)
    samples = [
        from_replicas(lo, to, K * (s + 1), K * b * (s + 1) / initial) for lo, to in zip(local, total, strict=True)
    ]
    assert np.mean([x.sqr for x in samples]) == pytest.approx((g**2).sum(), rel=0.01)
    assert np.mean([x.var for x in samples]) == pytest.approx((root**2).sum() / initial, rel=0.01)


@pytest.mark.parametrize(("estimate", "sizes"), ESTIMATORS.values(), ids=ESTIMATORS)
def test_the_noise_scale_of_linear_regression_is_within_five_percent_after_two_thousand_steps(estimate, sizes):
    # The standard error is 0.9 to 2.0 %, by the spread over seeds and by relative_error.
    gradients = REGRESSION.gradients(2021, 2_000, sizes)
    for p in PRECONDITIONERS.values():
        sqr, var = REGRESSION.truth(p)
        average = averaged(estimate(gradients, sizes, p))
        assert average.noise_scale(M0) == pytest.approx(M0 * var / sqr, rel=0.05)
        assert average.stats() == pytest.approx((sqr, var), rel=0.05)


def test_every_eighth_step_is_enough_once_the_window_stretches_over_as_many_measurements():
    sizes = (16,) * 4
    sqr, var = REGRESSION.truth(1.0)
    samples = as_replicas(REGRESSION.gradients(8, 2_000, sizes), sizes, 1.0)
    average = averaged(samples, NoiseAverage(min_samples=1000), steps=8)
    assert average.effective_samples == pytest.approx(1000, rel=0.05)
    assert average.noise_scale(M0) == pytest.approx(M0 * var / sqr, rel=0.05)


def test_the_reported_error_is_the_spread_over_repetitions():
    sizes = (16,) * 4
    samples = as_replicas(REGRESSION.gradients(3, 5_000, sizes), sizes, 1.0)
    averages = [averaged(samples[i : i + 50]) for i in range(0, 5_000, 50)]
    spread = np.std([math.log(a.noise_scale(M0)) for a in averages])
    assert np.mean([a.relative_error() for a in averages]) == pytest.approx(spread, rel=0.2)


# --- identities

finite = st.floats(-100.0, 100.0)
positive = st.floats(1e-3, 1e3)


@st.composite
def slices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(gradients [count, 4], sizes [count])"""
    count = draw(st.integers(2, 6))
    sizes = draw(arrays(np.int64, count, elements=st.integers(1, 50)))
    return draw(arrays(np.float64, (count, 4), elements=finite)), sizes


def close(a: object, b: object, size: float) -> None:
    """Equal up to rounding of norms of the given size."""
    assert np.asarray(a) == pytest.approx(np.asarray(b), rel=1e-9, abs=1e-9 * size + 1e-12)


@repeatable
@given(slices(), positive)
def test_the_statistics_solve_the_two_equations_they_come_from(case, initial):
    gradients, sizes = case
    sample = from_gradients(gradients, sizes, initial)
    (local,), count = local_mean(group_sqr_norms(gradients), sizes)
    (total,) = group_sqr_norms(sizes @ gradients / sizes.sum())
    size = local * max(1.0, sample.scale)
    close(sample.sqr[0] + sample.var[0] / sample.scale, total, size)
    close(sample.sqr[0] + count * sample.var[0] / sample.scale, local, size)
    assert sample.var[0] >= -1e-9 * size
    assert not sample.biased


@repeatable
@given(slices())
def test_var_is_the_weighted_spread_around_the_mean(case):
    gradients, sizes = case
    mean = sizes @ gradients / sizes.sum()
    spread = sizes @ ((gradients - mean) ** 2).sum(axis=1) / (len(sizes) - 1)
    close(from_gradients(gradients, sizes, 1.0).var, [spread], (gradients**2).sum() * sizes.sum())


@repeatable
@given(slices(), st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(case, random):
    gradients, sizes = case
    order = list(range(len(sizes)))
    random.shuffle(order)
    one, two = from_gradients(gradients, sizes, M0), from_gradients(gradients[order], sizes[order], M0)
    close((one.sqr, one.var), (two.sqr, two.var), (gradients**2).sum() * max(1.0, one.scale))


@repeatable
@given(slices(), st.integers(1, 50))
def test_equal_slices_give_the_published_formula(case, b):
    gradients, sizes = case
    count = len(sizes)
    local, total = (gradients**2).sum(axis=1).mean(), (gradients.mean(axis=0) ** 2).sum()
    sample = from_gradients(gradients, [b] * count, M0)
    size = local * max(1.0, sample.scale)
    close(sample.scale, b * count / M0, 0.0)
    close(sample.sqr, [(count * total - local) / (count - 1)], size)
    close(sample.var, [(local - total) * sample.scale / (count - 1)], size)


@repeatable
@given(slices(), st.floats(0.01, 100.0))
def test_scaling_the_gradients_scales_both_statistics_by_the_square(case, c):
    gradients, sizes = case
    one, two = from_gradients(gradients, sizes, M0), from_gradients(c * gradients, sizes, M0)
    close(c * c * np.array([one.sqr, one.var]), (two.sqr, two.var), c * c * (gradients**2).sum() * max(1.0, one.scale))


@repeatable
@given(slices())
def test_groups_add_up_to_the_whole(case):
    gradients, sizes = case
    whole, parts = from_gradients(gradients, sizes, M0), from_gradients(gradients, sizes, M0, starts=(0, 1, 3))
    size = (gradients**2).sum() * max(1.0, whole.scale)
    assert len(parts.sqr) == len(parts.var) == 3
    close((sum(parts.sqr), sum(parts.var)), (*whole.sqr, *whole.var), size)


@repeatable
@given(slices())
def test_an_empty_slice_is_no_sample(case):
    gradients, sizes = case
    norms = group_sqr_norms(gradients)
    padded = from_slices(np.vstack([norms, [5.0]]), [*sizes, 0], 0.0, M0)
    assert padded == from_slices(norms, sizes, 0.0, M0)


@repeatable
@given(arrays(np.float64, (2, 4), elements=finite), positive)
def test_a_split_batch_is_two_slices(gradients, scale):
    first, second = (gradients**2).sum(axis=1)
    total = (gradients.mean(axis=0) ** 2).sum()
    assert from_split_batch(first, second, total, scale) == from_replicas((first + second) / 2, total, 2, scale)


@repeatable
@given(arrays(np.float64, (2, 4), elements=finite), positive)
def test_a_difference_is_a_split_batch_of_both_steps_and_flagged(gradients, scale):
    previous, current = gradients
    sample = from_difference(previous @ previous, current @ current, previous @ current, scale)
    pair = from_split_batch(previous @ previous, current @ current, (gradients.mean(axis=0) ** 2).sum(), 2.0 * scale)
    close((sample.sqr, sample.var), (pair.sqr, pair.var), (gradients**2).sum() * max(1.0, scale))
    assert sample.scale == scale
    assert sample.biased
    assert not pair.biased


# --- smoothing


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[NoiseSample, int]]:
    """Samples of two groups with the steps each stands for; some biased, some overflowed."""
    groups = st.tuples(st.floats(-5.0, 50.0), st.floats(-5.0, 50.0))
    sample = st.builds(NoiseSample, groups, groups, st.floats(0.1, 200.0), st.booleans())
    lost = st.builds(NoiseSample.overflowed, st.floats(0.1, 200.0), st.booleans())
    return draw(st.lists(st.tuples(sample | sample | lost, st.integers(1, 64)), max_size=12))


def slow_average(history: list[tuple[NoiseSample, int]], window: float, min_samples: float):
    """The specification: every sample has a weight, and what comes later takes its part of it away."""
    kept: list[NoiseSample] = []
    weights: list[float] = []
    skipped = 0
    for sample, steps in history:
        if not all(math.isfinite(x) for x in sample.sqr):
            skipped += 1
            continue
        if not sample.biased and any(x.biased for x in kept):
            kept, weights = [], []
        theta = max((1 - 1 / window) ** (sample.scale * steps), (min_samples - 1) / (min_samples + 1))
        weights = [theta * w for w in weights] + [1 - theta]
        kept.append(sample)
    if not kept:
        return (1.0,), (0.0,), 0.0, (0.0, 0.0, 0.0), skipped
    total = sum(weights)
    shares = [w / total for w in weights]
    sqr = tuple(sum(w * x.sqr[i] for w, x in zip(shares, kept, strict=True)) for i in range(2))
    var = tuple(sum(w * x.var[i] for w, x in zip(shares, kept, strict=True)) for i in range(2))
    gaps = [(sum(x.sqr) - sum(sqr), sum(x.var) - sum(var)) for x in kept]
    scatter = tuple(
        sum(w * d[i] * d[j] for w, d in zip(shares, gaps, strict=True)) for i, j in ((0, 0), (0, 1), (1, 1))
    )
    return sqr, var, total**2 / sum(w * w for w in weights), scatter, skipped


@repeatable
@given(histories(), st.floats(1.5, 5_000.0), st.floats(1.0, 200.0))
def test_the_average_matches_its_plain_loop_specification(history, window, min_samples):
    average = NoiseAverage(window, min_samples)
    for sample, steps in history:
        average = average.update(sample, steps)
    sqr, var, effective, scatter, skipped = slow_average(history, window, min_samples)
    assert average.sqr == pytest.approx(sqr, rel=1e-6, abs=1e-6)
    assert average.var == pytest.approx(var, rel=1e-6, abs=1e-6)
    assert average.effective_samples == pytest.approx(effective, rel=1e-6)
    assert average.scatter == pytest.approx(scatter, rel=1e-6, abs=1e-5)
    assert average.skipped == skipped


@repeatable
@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.integers(1, 32)), min_size=1, max_size=20), finite, positive)
def test_smoothing_a_constant_gives_that_constant_from_the_first_update_on(widths, sqr, var):
    average = NoiseAverage()
    for scale, steps in widths:
        average = average.update(NoiseSample((sqr, 0.0), (var, var), scale), steps)
        assert average.sqr == pytest.approx((sqr, 0.0), rel=1e-12)
        assert average.var == pytest.approx((var, var), rel=1e-12)


@repeatable
@given(histories())
def test_an_average_survives_json_and_pickle(history):
    average = NoiseAverage()
    for sample, steps in history:
        average = average.update(sample, steps)
    assert NoiseAverage(**json.loads(json.dumps(dataclasses.asdict(average), allow_nan=False))) == average
    assert pickle.loads(pickle.dumps(average)) == average


@repeatable
@given(st.floats(0.1, 60.0), st.integers(1, 30))
def test_one_wide_update_ages_like_many_narrow_ones(scale, steps):
    old = NoiseAverage(min_samples=1).update(NoiseSample((3.0,), (4.0,), 1.0))
    new = NoiseSample((5.0,), (6.0,), scale)
    wide, narrow = old.update(new, steps), averaged([new] * steps, old)
    assert (*wide.sqr, *wide.var, wide.weight) == pytest.approx((*narrow.sqr, *narrow.var, narrow.weight))


@repeatable
@given(st.floats(1.1, 5_000.0), st.floats(1.0, 500.0), st.floats(0.01, 10_000.0))
def test_the_window_stretches_until_it_holds_enough_samples(window, min_samples, age):
    f = fresh_share(window, min_samples, age)
    assert f <= 1 - (1 - 1 / window) ** age + 1e-9
    assert (2 - f) / f >= min_samples * (1 - 1e-9)


def test_the_default_window_is_the_published_one_up_to_sixty_two_times_the_initial_batch_size():
    for scale in (0.5, 1.0, 32.0, 62.0):
        assert fresh_share(1000.0, NoiseAverage().min_samples, scale) == pytest.approx(1 - 0.999**scale, rel=1e-9)


def test_statistics_before_the_first_sample_see_no_noise():
    assert NoiseAverage().stats() == (1.0, 1e-6)
    assert NoiseAverage().effective_samples == 0.0
    assert NoiseAverage().relative_error() == math.inf
    assert NoiseAverage().group_gains(8.0) == pytest.approx([1.0], abs=1e-5)


def test_raw_samples_may_be_negative_and_only_used_values_are_clamped_group_by_group():
    average = NoiseAverage().update(NoiseSample((-2.0, 5.0), (0.0, 3.0), 1.0))
    assert average.sqr == (-2.0, 5.0)
    assert average.stats() == pytest.approx((5.0, 3.0 + 1e-6))
    assert average.update(NoiseSample((6.0, 5.0), (0.0, 3.0), 1.0)).sqr == pytest.approx((2.0, 5.0), abs=0.01)


def test_the_first_unbiased_sample_after_biased_ones_starts_afresh():
    biased, honest = NoiseSample((9.0,), (9.0,), 1.0, biased=True), NoiseSample((1.0,), (2.0,), 1.0)
    average = averaged([biased, NoiseSample.overflowed(1.0), biased])
    assert average.biased
    average = average.update(honest)
    assert average == dataclasses.replace(NoiseAverage().update(honest), skipped=1)
    average = average.update(biased)
    assert average.biased
    assert 1.0 < average.sqr[0] < 9.0


def test_an_overflowed_unbiased_sample_does_not_restart_a_biased_average():
    average = NoiseAverage().update(NoiseSample((9.0,), (9.0,), 1.0, biased=True))
    assert average.update(NoiseSample.overflowed(1.0)) == dataclasses.replace(average, skipped=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_values_that_are_not_finite_are_skipped_and_counted(bad):
    average = NoiseAverage().update(NoiseSample((1.0, 2.0), (3.0, 4.0), 1.0))
    for sample in (NoiseSample((1.0, bad), (3.0, 4.0), 1.0), NoiseSample((1.0, 2.0), (bad, 4.0), 1.0)):
        assert average.update(sample) == dataclasses.replace(average, skipped=1)


def test_gain_efficiency_and_noise_scale_match_the_published_vector():
    # policies.md, vector E.3
    average = NoiseAverage().update(NoiseSample((1.0, 0.0), (4.0, 4.0), 1.0))
    assert average.group_gains(8.0) == pytest.approx([10.0 / 3.0, 8.0])
    one = NoiseAverage().update(NoiseSample((1.0,), (4.0,), 1.0))
    assert one.group_gains(8.0) / 8.0 == pytest.approx([0.41667], abs=1e-5)
    assert one.noise_scale(128.0) == pytest.approx(512.0)


@repeatable
@given(st.tuples(finite, finite), st.tuples(finite, finite), st.floats(1.0, 100.0))
def test_gains_lie_between_one_and_the_scale(sqr, var, scale):
    gains = NoiseAverage().update(NoiseSample(sqr, var, 1.0)).group_gains(scale)
    assert ((gains >= 1.0 - 1e-12) & (gains <= scale * (1.0 + 1e-12))).all()


def test_gain_is_one_where_there_is_neither_gradient_nor_noise():
    average = NoiseAverage(var_floor=0.0).update(NoiseSample((0.0, 1.0), (0.0, 1.0), 1.0))
    assert average.group_gains(4.0) == pytest.approx([1.0, 1.6])


def test_the_noise_scale_is_infinite_where_no_gradient_is_seen():
    average = NoiseAverage().update(NoiseSample((-1.0,), (2.0,), 1.0))
    assert average.noise_scale(M0) == math.inf
    assert average.relative_error() == math.inf


# --- bad input


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("local_sqr_norm_mean", lambda: from_replicas(math.nan, 1.0, 2, 1.0)),
        ("local_sqr_norm_mean", lambda: from_replicas(-1.0, 1.0, 2, 1.0)),
        ("local_sqr_norm_mean", lambda: from_replicas([], [], 2, 1.0)),
        ("local_sqr_norm_mean", lambda: from_replicas([[1.0, 2.0], [3.0]], 1.0, 2, 1.0)),
        ("local_sqr_norm_mean", lambda: from_replicas(np.ones((2, 2)), np.ones((2, 2)), 2, 1.0)),
        ("total_sqr_norm", lambda: from_replicas(1.0, math.inf, 2, 1.0)),
        ("total_sqr_norm", lambda: from_replicas([1.0, 2.0], [1.0], 2, 1.0)),
        ("total_sqr_norm", lambda: from_replicas(1.0, 4.0, 2, 1.0)),  # a sum where a mean is due
        ("count", lambda: from_replicas(1.0, 1.0, 1, 1.0)),
        ("scale", lambda: from_replicas(1.0, 1.0, 2, 0.0)),
        ("scale", lambda: from_replicas(1.0, 1.0, 2, math.nan)),
        ("M0", lambda: from_slices([1.0, 1.0], [1, 1], 1.0, 0.0)),
        ("sqr_norms", lambda: from_slices([1.0, -1.0], [1, 1], 1.0, 8.0)),
        ("sizes", lambda: from_slices([1.0, 1.0], [1, -1], 1.0, 8.0)),
        ("sizes", lambda: from_slices([1.0, 1.0], [1, 1, 1], 1.0, 8.0)),
        ("sizes", lambda: from_slices([1.0, 1.0], [0, 0], 1.0, 8.0)),
        ("count", lambda: from_slices([1.0, 1.0], [5, 0], 1.0, 8.0)),
        ("first_sqr_norm", lambda: from_split_batch(math.inf, 1.0, 1.0, 1.0)),
        ("second_sqr_norm", lambda: from_split_batch(1.0, [1.0, 1.0], 1.0, 1.0)),
        ("previous_sqr_norm", lambda: from_difference(-1.0, 1.0, 0.0, 1.0)),
        ("current_sqr_norm", lambda: from_difference([1.0, 1.0], 1.0, 0.0, 1.0)),
        ("dot", lambda: from_difference(1.0, 1.0, math.nan, 1.0)),
        ("dot", lambda: from_difference(1.0, 1.0, [0.0, 0.0], 1.0)),
        ("dot", lambda: from_difference(1.0, 1.0, 3.0, 1.0)),
        ("scale", lambda: from_difference(1.0, 1.0, 0.0, -1.0)),
        ("var", lambda: NoiseSample((1.0,), (1.0, 2.0), 1.0)),
        ("scale", lambda: NoiseSample((1.0,), (1.0,), 0.0)),
        ("window", lambda: NoiseAverage(window=1.0)),
        ("min_samples", lambda: NoiseAverage(min_samples=0.5)),
        ("var_floor", lambda: NoiseAverage(var_floor=-1.0)),
        ("var", lambda: NoiseAverage(sqr=(1.0, 1.0))),
        ("sqr", lambda: NoiseAverage(sqr=(math.nan,))),
        ("steps", lambda: NoiseAverage().update(NoiseSample((1.0,), (1.0,), 1.0), steps=0)),
        ("scale", lambda: NoiseAverage().group_gains(0.0)),
        (
            "sample",
            lambda: averaged([NoiseSample((1.0,), (1.0,), 1.0), NoiseSample((1.0, 1.0), (1.0, 1.0), 1.0)]),
        ),
    ],
)
def test_bad_input_is_refused_with_the_field_its_value_and_a_fix(field, call):
    with pytest.raises(InvalidModel) as caught:
        call()
    assert caught.value.field == field
    assert caught.value.problem
    assert caught.value.fix


def test_a_cautious_average_promises_less_the_fewer_samples_it_has():
    rng = np.random.default_rng(3)
    raised = []
    for count in (4, 400):
        average = NoiseAverage(var_floor=0.0)
        for sqr in rng.normal(1.0, 2.0, count):
            average = average.update(NoiseSample((float(sqr), 0.5), (3.0, 1.0), 1.0))
        cautious = average.cautious()
        assert cautious.var == average.var
        assert cautious.noise_scale(32.0) < average.noise_scale(32.0)
        raised.append(sum(cautious.sqr) - sum(max(sqr, 0.0) for sqr in average.sqr))
        # Shared out as the noise is: three parts to one.
        gained = np.subtract(cautious.sqr, np.maximum(average.sqr, 0.0))
        assert gained[0] == pytest.approx(3.0 * gained[1])
    assert raised[1] < raised[0] / 4
    single = NoiseAverage().update(NoiseSample((1.0,), (1.0,), 1.0))
    assert single.cautious() == single
