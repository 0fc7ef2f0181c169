"""The bundle of one job's goodput: built from what a job reported, checked, sent to other processes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from pollux.core import BatchLimits, FrozenMap, GradientStats, JobModel, Shape, ThroughputFit
from pollux.errors import InvalidModel, InvalidSpec, UnknownName
from pollux.goodput import (
    PAPER,
    RACKS,
    UNKNOWN_GRADIENT,
    BatchOptions,
    Envelope,
    GoodputModel,
    ShapeSet,
    ThetaSys,
    fit,
    tables,
    throughput_model,
)

from .strategies import observe, typical_keys

THETA = ThetaSys(0.05, 0.001, 0.02, 0.001, 0.1, 0.005, 2.0)
BOX = BatchLimits(128, 4096, 32, 1024)
GRADIENT = GradientStats(1.0, 30.0)
NAN, INF = float("nan"), float("inf")


def reported(**changes) -> JobModel:
    params = {**dict(zip(PAPER.parameters, THETA, strict=True)), **changes.pop("params", {})}
    fitted = ThroughputFit(changes.pop("model", "paper"), FrozenMap(params))
    return JobModel(BOX, changes.pop("gradient", GRADIENT), FrozenMap({"t4": fitted}))


def test_what_a_job_reported_becomes_its_goodput():
    job = GoodputModel.of(reported(), "t4")
    assert job == GoodputModel(PAPER, tuple(THETA), GRADIENT, BOX)
    fixed = GoodputModel.of(reported(), "t4", BatchOptions(fixed_batch=True))
    assert fixed.best(Shape(2)).batch_size(2) == 128


def test_a_fit_survives_the_way_through_the_report():
    seen = observe(PAPER, THETA, typical_keys(np.random.default_rng(1), 12), 0.05)
    found = fit(seen, RACKS)
    job = GoodputModel.of(JobModel(BOX, GRADIENT, FrozenMap({"t4": found.summary()})), "t4")
    assert (job.model, job.theta) == (RACKS, found.theta)


def test_before_any_gradient_was_measured_every_batch_size_is_fully_efficient():
    job = GoodputModel.of(reported(gradient=None), "t4")
    assert job.gradient == UNKNOWN_GRADIENT
    assert job.efficiency(4096) == 1.0
    assert job.goodput(Shape(4), 1024) == job.throughput(Shape(4), 1024)


def test_arrays_of_batch_sizes_give_arrays_of_goodput():
    job = GoodputModel(PAPER, THETA, GRADIENT, BOX)
    m, s = np.array([32.0, 64.0, 128.0]), np.array([[0.0], [3.0]])
    together = job.goodput(Shape(8, 2), m, s)
    assert together.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        assert together[i, j] == pytest.approx(job.goodput(Shape(8, 2), float(m[j]), float(s[i, 0])), rel=1e-12)


def test_new_gradient_statistics_leave_the_rest():
    job = GoodputModel(PAPER, THETA, GRADIENT, BOX).with_gradient(UNKNOWN_GRADIENT)
    assert job == GoodputModel(PAPER, THETA, UNKNOWN_GRADIENT, BOX)


@pytest.mark.parametrize("theta", [(), THETA[:6], (*THETA, 1.0)], ids=["none", "six", "eight"])
def test_another_number_of_parameters_is_refused_with_their_names(theta):
    with pytest.raises(InvalidModel, match="7 values") as caught:
        GoodputModel(PAPER, theta, GRADIENT, BOX)
    assert caught.value.field == "theta"
    assert "alpha_node" in caught.value.fix


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("value", [NAN, INF, -INF, -0.1])
def test_parameters_that_are_not_finite_or_negative_are_refused(index, value):
    theta = list(THETA)
    theta[index] = value
    with pytest.raises(InvalidModel) as caught:
        GoodputModel(PAPER, tuple(theta), GRADIENT, BOX)
    assert caught.value.field == PAPER.parameters[index]
    assert caught.value.value == pytest.approx(value, nan_ok=True)
    assert caught.value.fix


@pytest.mark.parametrize("gamma", [0.0, 0.99, 10.1])
def test_an_overlap_outside_its_range_is_refused(gamma):
    with pytest.raises(InvalidModel, match="1 … 10") as caught:
        GoodputModel(PAPER, THETA._replace(gamma=gamma), GRADIENT, BOX)
    assert (caught.value.field, caught.value.value) == ("gamma", gamma)


def test_parameters_of_a_job_that_takes_no_time_at_all_are_refused():
    with pytest.raises(InvalidModel):
        GoodputModel(PAPER, (0.0,) * 6 + (1.0,), GRADIENT, BOX).best(Shape(1))


def test_parameters_missing_in_a_report_are_named():
    fitted = ThroughputFit("racks", FrozenMap(dict(zip(PAPER.parameters, THETA, strict=True))))
    with pytest.raises(InvalidModel, match="alpha_rack, beta_rack missing"):
        GoodputModel.of(JobModel(BOX, GRADIENT, FrozenMap({"t4": fitted})), "t4")


def test_a_gpu_type_that_was_never_fitted_is_answered_with_those_that_were():
    with pytest.raises(UnknownName, match="Did you mean 't4'") as caught:
        GoodputModel.of(reported(), "t40")
    assert caught.value.field == "gpu_type"


def test_an_unknown_throughput_model_is_answered_with_the_nearest_name():
    with pytest.raises(UnknownName, match="Did you mean 'paper'") as caught:
        throughput_model("papr")
    assert (caught.value.field, caught.value.value) == ("throughput model", "papr")
    with pytest.raises(UnknownName, match=r"Known: .*paper, racks"):
        GoodputModel.of(reported(model="nothing like it"), "t4")


@pytest.mark.parametrize(
    ("build", "error", "field"),
    [
        (lambda: BatchLimits(256, 128, 1, 8), InvalidModel, "initial_batch_size"),  # M0 > M_max
        (lambda: BatchLimits(1, 128, 9, 8), InvalidModel, "min_per_gpu_batch_size"),
        (lambda: Shape(2, 3), InvalidSpec, "num_gpus"),  # K < N
        (lambda: GradientStats(-1.0, 1.0), InvalidModel, "sqr"),
        (lambda: ShapeSet.of([Shape(0)]), InvalidSpec, "num_gpus"),
    ],
)
def test_inputs_outside_their_range_never_reach_the_model(build, error, field):
    with pytest.raises(error) as caught:
        build()
    assert caught.value.field == field
    assert caught.value.fix


@pytest.mark.parametrize("model", [PAPER, RACKS], ids=["paper", "racks"])
def test_models_and_fits_sent_to_another_process_are_the_same_there(model):
    found = fit(observe(PAPER, THETA, typical_keys(np.random.default_rng(2), 8), 0.05), model)
    job = GoodputModel(model, found.theta, GRADIENT, BOX)
    again, fit_again = pickle.loads(pickle.dumps((job, found)))
    assert again == job
    assert fit_again == found
    assert again.model is fit_again.model is model  # else layouts would be made anew for every plan
    assert again.best(Shape(8, 2)) == job.best(Shape(8, 2))


def test_a_table_mixes_models_sent_and_made_here():
    job = GoodputModel(PAPER, THETA, GRADIENT, BOX)
    places = ShapeSet.up_to(2, 8)
    sent = pickle.loads(pickle.dumps(job))
    found = tables([job, sent], places)
    assert (found.goodput[0] == found.goodput[1]).all()
    again = pickle.loads(pickle.dumps(Envelope([job], places))).tables([GRADIENT])
    np.testing.assert_allclose(again.goodput[0], found.goodput[0], rtol=1e-12)
