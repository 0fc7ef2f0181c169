"""Tables over shapes and jobs, and the envelope, against one `best` at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import BatchLimits, GradientStats, Shape
from pollux.errors import InvalidModel
from pollux.goodput import (
    NOTHING_FITS,
    PAPER,
    PUBLISHED_BATCH,
    RACKS,
    BatchOptions,
    Envelope,
    GoodputModel,
    ShapeSet,
    tables,
)

from .strategies import NO_NOISE, ONLY_NOISE, batch_options, gradients, limits, rack_thetas, shapes, thetas

boxes = st.sampled_from([BatchLimits(128, 4096, 32, 1024), BatchLimits(8, 64, 4, 8), BatchLimits(1, 40, 1, 1)])
options = st.just(BatchOptions()) | batch_options
jobs = st.builds(GoodputModel, st.just(PAPER), thetas, gradients, boxes | limits(), options) | st.builds(
    GoodputModel, st.just(RACKS), rack_thetas, gradients, boxes, options
)
places = st.lists(shapes(max_racks=3), min_size=1, max_size=8).map(ShapeSet.of)


def assert_same(one, other, models, places):
    """Equal goodput; (m, s) may differ between configurations that are equally good."""
    np.testing.assert_allclose(one.goodput, other.goodput, rtol=1e-9, atol=0.0)
    differ = (one.per_gpu_batch_size != other.per_gpu_batch_size) | (one.accumulation_steps != other.accumulation_steps)
    for j, i in np.argwhere(differ):
        shape = list(places)[i]
        m, s = one.per_gpu_batch_size[j, i], one.accumulation_steps[j, i]
        assert models[j].goodput(shape, m, s) == pytest.approx(one.goodput[j, i], rel=1e-9)


@settings(max_examples=60)
@given(st.lists(jobs, min_size=1, max_size=4), places)
def test_a_table_holds_what_best_finds_for_each_job_and_shape(models, places):
    found = tables(models, places)
    assert found.goodput.shape == (len(models), len(places))
    for j, job in enumerate(models):
        for i, shape in enumerate(places):
            one = job.best(shape)
            m, s = found.per_gpu_batch_size[j, i], found.accumulation_steps[j, i]
            assert found.goodput[j, i] == pytest.approx(one.goodput, rel=1e-9)
            if one == NOTHING_FITS:
                assert (found.goodput[j, i], m, s) == (0.0, 0.0, 0.0)
            elif (m, s) != one[:2]:
                assert job.goodput(shape, m, s) == pytest.approx(one.goodput, rel=1e-9)


@settings(max_examples=40)
@given(st.lists(jobs, min_size=1, max_size=4), places, st.data())
def test_an_envelope_gives_the_tables_for_any_gradients(models, places, data):
    envelope = Envelope(models, places)
    for _ in range(3):
        found = [data.draw(gradients) for _ in models]
        changed = [job.with_gradient(gradient) for job, gradient in zip(models, found, strict=True)]
        assert_same(envelope.tables(found), tables(changed, places), changed, places)


@pytest.mark.parametrize("options", [BatchOptions(), PUBLISHED_BATCH, BatchOptions(fixed_batch=True)])
def test_whole_tables_and_envelopes_of_many_jobs_agree_over_the_range_of_noise(options):
    rng = np.random.default_rng(3)
    places = ShapeSet.up_to(4, 16)
    models = [
        GoodputModel(
            PAPER,
            (*np.exp(rng.uniform(-9.0, 0.0, 6)).tolist(), float(rng.uniform(1.0, 10.0))),
            NO_NOISE,
            BatchLimits(128, 4096, 32, 1024) if job % 2 else BatchLimits(12, 384, 4, 12),
            options,
        )
        for job in range(24)
    ]
    envelope = Envelope(models, places)
    for var in [0.0, *np.geomspace(1e-6, 1e9, 12).tolist()]:
        gradient = [GradientStats(1.0, var)] * len(models)
        changed = [job.with_gradient(gradient[0]) for job in models]
        assert_same(envelope.tables(gradient), tables(changed, places), changed, places)
    gradient = [ONLY_NOISE] * len(models)
    changed = [job.with_gradient(ONLY_NOISE) for job in models]
    assert_same(envelope.tables(gradient), tables(changed, places), changed, places)


def test_jobs_of_different_models_and_limits_keep_their_places():
    theta = (0.05, 0.001, 0.02, 0.001, 0.1, 0.005)
    small, large = BatchLimits(8, 8, 8, 8), BatchLimits(128, 4096, 32, 1024)
    models = [
        GoodputModel(PAPER, (*theta, 2.0), ONLY_NOISE, large),
        GoodputModel(RACKS, (*theta, 5.0, 0.5, 2.0), ONLY_NOISE, large),
        GoodputModel(PAPER, (*theta, 2.0), ONLY_NOISE, small),
    ]
    found = tables(models, ShapeSet.of([Shape(4, 2), Shape(4, 2, 2), Shape(1)]))
    assert found.goodput[0, 0] == found.goodput[0, 1] == found.goodput[1, 0] > found.goodput[1, 1] > 0
    assert found.goodput[2].tolist() == [0.0, 0.0, models[2].best(Shape(1)).goodput]
    assert found.per_gpu_batch_size[2].tolist() == [0.0, 0.0, 8.0]


def test_where_nothing_fits_anywhere_a_table_is_zero():
    job = GoodputModel(PAPER, (0.1,) * 6 + (1.0,), ONLY_NOISE, BatchLimits(8, 8, 8, 8))
    places = ShapeSet.of([Shape(2), Shape(4, 2)])
    for found in (tables([job], places), Envelope([job], places).tables([ONLY_NOISE])):
        assert all((part == 0.0).all() for part in found)


def test_no_jobs_and_no_shapes_give_empty_tables():
    job = GoodputModel(PAPER, (0.1,) * 6 + (1.0,), ONLY_NOISE, BatchLimits(8, 80, 1, 8))
    assert tables([], ShapeSet.up_to(2, 4)).goodput.shape == (0, 7)
    assert tables([job], ShapeSet.of([])).goodput.shape == (1, 0)
    assert Envelope([], ShapeSet.up_to(2, 4)).tables([]).goodput.shape == (0, 7)
    assert Envelope([job], ShapeSet.of([])).tables([ONLY_NOISE]).goodput.shape == (1, 0)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_envelope_refuses_another_number_of_gradients(count):
    job = GoodputModel(PAPER, (0.1,) * 6 + (1.0,), ONLY_NOISE, BatchLimits(8, 80, 1, 8))
    envelope = Envelope([job, job], ShapeSet.up_to(2, 4))
    with pytest.raises(InvalidModel, match="2 jobs") as caught:
        envelope.tables([ONLY_NOISE] * count)
    assert (caught.value.field, caught.value.value) == ("gradients", count)
    assert caught.value.fix


def test_shapes_up_to_a_size_are_all_of_them_once():
    places = ShapeSet.up_to(3, 5)
    assert list(places) == [Shape(K, N) for N in (1, 2, 3) for K in range(N, 6)]
    assert len(places) == 12
    assert len(ShapeSet.up_to(16, 64)) == sum(64 - N + 1 for N in range(1, 17))
    assert list(ShapeSet.of(list(places))) == list(places)


def test_equal_sets_of_shapes_are_equal_and_share_what_is_derived_from_them():
    assert ShapeSet.up_to(2, 8) == ShapeSet.up_to(2, 8)
    assert hash(ShapeSet.up_to(2, 8)) == hash(ShapeSet.up_to(2, 8))
    assert ShapeSet.up_to(2, 8) != ShapeSet.up_to(2, 7)
