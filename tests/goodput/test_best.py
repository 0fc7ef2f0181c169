"""`best` against a search of every integer (m, s)."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings

from pollux.core import BatchLimits, GradientStats, Shape
from pollux.errors import InvalidModel
from pollux.goodput import (
    NOTHING_FITS,
    PAPER,
    PUBLISHED_BATCH,
    UNKNOWN_GRADIENT,
    BatchOptions,
    GoodputModel,
    ThetaSys,
    best,
)

from .strategies import (
    NO_NOISE,
    ONLY_NOISE,
    batch_options,
    every_config,
    goodput_by_hand,
    gradients,
    limits,
    shapes,
    thetas,
)

THETA = ThetaSys(0.05, 0.001, 0.02, 0.001, 0.1, 0.005, 2.0)
BOX = BatchLimits(128, 4096, 32, 1024)


@settings(max_examples=300)
@given(thetas, shapes(), gradients, limits(), batch_options)
@example(THETA, Shape(1), ONLY_NOISE, BatchLimits(1, 150, 1, 1), BatchOptions())
@example(THETA, Shape(64, 16), NO_NOISE, BatchLimits(1000, 1000, 1, 2000), BatchOptions())
@example(THETA, Shape(7, 3), ONLY_NOISE, BatchLimits(997, 149550, 1, 11), BatchOptions())
@example(THETA, Shape(1), ONLY_NOISE, BatchLimits(7, 14, 8, 9), BatchOptions(single_gpu_accumulation=True))
def test_best_is_within_half_a_per_cent_of_all_integers_and_inside_the_limits(theta, shape, gradient, box, options):
    K = shape.num_gpus
    found = best(PAPER, theta, shape, gradient, box, options)
    m, s = every_config(K, box, options)
    if len(m) == 0:
        assert found == NOTHING_FITS
        return
    highest = float(goodput_by_hand(theta, shape, gradient, box, m, s).max())
    assert found.goodput >= highest * (1 - 0.005)
    assert found.goodput <= highest * (1 + 1e-9)
    assert box.min_per_gpu_batch_size <= found.per_gpu_batch_size <= box.max_per_gpu_batch_size
    assert box.initial_batch_size <= found.batch_size(K) <= box.max_batch_size
    assert found.accumulation_steps == 0 or options.accumulation
    if options.single_gpu_accumulation and K == 1 and found.batch_size(1) > box.initial_batch_size:
        assert found.accumulation_steps >= 1


@given(thetas, shapes(), gradients, limits(), batch_options)
def test_the_goodput_reported_is_that_of_the_configuration_reported(theta, shape, gradient, box, options):
    job = GoodputModel(PAPER, theta, gradient, box, options)
    found = job.best(shape)
    assert found == best(PAPER, theta, shape, gradient, box, options)
    if found != NOTHING_FITS:
        again = job.goodput(shape, found.per_gpu_batch_size, found.accumulation_steps)
        assert found.goodput == pytest.approx(again, rel=1e-9)


@given(thetas, shapes(), gradients, limits())
@example(THETA, Shape(3), ONLY_NOISE, BatchLimits(1, 7, 1, 1))  # m must not be lowered to 0
def test_the_published_grid_too_stays_inside_the_upper_limits(theta, shape, gradient, box):
    found = best(PAPER, theta, shape, gradient, box, PUBLISHED_BATCH)
    if found != NOTHING_FITS:
        assert 1 <= found.per_gpu_batch_size <= box.max_per_gpu_batch_size
        assert found.batch_size(shape.num_gpus) <= box.max_batch_size


@pytest.mark.parametrize(
    ("num_gpus", "box"), [(1, BatchLimits(15, 15, 8, 10)), (3, BatchLimits(100, 100, 1, 100))], ids=["m_min", "M0"]
)
def test_the_published_grid_too_stays_inside_the_lower_limits(num_gpus, box):
    """Rounding m up passes M_max, and lowering it again must not leave the limits at the other end."""
    found = best(PAPER, THETA, Shape(num_gpus), ONLY_NOISE, box, PUBLISHED_BATCH)
    if found != NOTHING_FITS:
        assert found.per_gpu_batch_size >= box.min_per_gpu_batch_size
        assert found.batch_size(num_gpus) >= box.initial_batch_size


def test_a_fixed_batch_obeys_the_one_gpu_rule_too():
    options = BatchOptions(single_gpu_accumulation=True, fixed_batch=True)
    found = best(PAPER, THETA, Shape(1), ONLY_NOISE, BatchLimits(2, 100, 3, 7), options)  # M = 3 > M0 needs s ≥ 1
    assert found[:2] == (3, 1)


def test_nothing_fits_when_the_smallest_batches_of_all_gpus_exceed_the_largest_total():
    assert best(PAPER, THETA, Shape(64, 16), ONLY_NOISE, BatchLimits(8, 63, 1, 8)) == NOTHING_FITS
    assert best(PAPER, THETA, Shape(64, 16), ONLY_NOISE, BatchLimits(8, 64, 1, 8)).per_gpu_batch_size == 1


def test_without_accumulation_nothing_fits_when_the_initial_batch_exceeds_what_all_gpus_hold():
    box = BatchLimits(100, 1000, 1, 40)
    assert best(PAPER, THETA, Shape(2), ONLY_NOISE, box, BatchOptions(accumulation=False)) == NOTHING_FITS
    assert best(PAPER, THETA, Shape(2), ONLY_NOISE, box).goodput > 0
    assert best(PAPER, THETA, Shape(3), ONLY_NOISE, box, BatchOptions(accumulation=False)).goodput > 0


def test_a_gradient_without_noise_keeps_the_initial_batch_size():
    found = best(PAPER, THETA, Shape(1), NO_NOISE, BOX)
    assert (found.per_gpu_batch_size, found.accumulation_steps) == (128, 0)


def test_a_gradient_of_pure_noise_takes_the_largest_batch_that_pays():
    found = best(PAPER, THETA, Shape(4, 2), ONLY_NOISE, BOX)
    assert (found.per_gpu_batch_size, found.accumulation_steps) == (1024, 0)
    assert UNKNOWN_GRADIENT == ONLY_NOISE


def test_with_one_gpu_the_published_agent_accumulates_above_the_initial_batch_size():
    free = best(PAPER, THETA, Shape(1), ONLY_NOISE, BatchLimits(128, 1024, 32, 1024))
    forced = best(
        PAPER,
        THETA,
        Shape(1),
        ONLY_NOISE,
        BatchLimits(128, 1024, 32, 1024),
        BatchOptions(single_gpu_accumulation=True),
    )
    assert free[:2] == (1024, 0)
    assert forced[:2] == (512, 1)


@pytest.mark.parametrize(("num_gpus", "batch_size"), [(1, 128), (2, 128), (3, 129), (4, 128), (5, 160), (8, 256)])
def test_a_fixed_batch_stays_at_the_initial_size_or_as_little_above_it_as_the_gpus_allow(num_gpus, batch_size):
    found = best(PAPER, THETA, Shape(num_gpus), ONLY_NOISE, BOX, BatchOptions(fixed_batch=True))
    assert found.batch_size(num_gpus) == batch_size


def test_scaling_both_gradient_statistics_changes_nothing():
    one = best(PAPER, THETA, Shape(8, 2), GradientStats(1.0, 30.0), BOX)
    other = best(PAPER, THETA, Shape(8, 2), GradientStats(1e9, 30e9), BOX)
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("options", [BatchOptions(), BatchOptions(fixed_batch=True)], ids=["free", "fixed"])
@pytest.mark.parametrize(
    ("num_gpus", "limits", "expected"),
    [
        (1, BatchLimits(601, 601, 1, 8), (1, 600)),  # 601 is prime: only single examples reach it
        (1, BatchLimits(841, 841, 1, 3), (1, 840)),
        (4, BatchLimits(2404, 2404, 1, 8), (1, 600)),
        (1, BatchLimits(1_000_003, 1_000_003, 1, 2000), (1, 1_000_002)),
    ],
)
def test_a_batch_size_that_only_many_passes_reach_is_found(num_gpus, limits, expected, options):
    found = best(PAPER, THETA, Shape(num_gpus), ONLY_NOISE, limits, options)
    assert (found.per_gpu_batch_size, found.accumulation_steps) == expected


def test_parameters_that_give_no_time_are_refused_by_name():
    limits = BatchLimits(8, 64, 1, 8)
    with pytest.raises(InvalidModel, match="needs 7 values"):
        best(PAPER, (0.1, 0.1), Shape(2), ONLY_NOISE, limits)
    with pytest.raises(InvalidModel, match="gives no time per iteration"):
        best(PAPER, (math.nan,) * 7, Shape(2), ONLY_NOISE, limits)
