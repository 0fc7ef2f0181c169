"""What an application says of its noise, its metric and its goodput."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux import applications
from pollux.applications import MetricCurve, NoiseCurve
from pollux.applications.catalogue import from_text, to_text
from pollux.core import Shape
from pollux.errors import InvalidDocument, InvalidModel, InvalidSpec, UnknownName
from pollux.goodput import noise_scale

PAPER_TASKS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
progress = st.floats(0.0, 1.0)


def test_the_catalogue_holds_the_six_tasks_of_the_paper():
    assert applications.names() == PAPER_TASKS


def test_an_unknown_application_is_answered_with_the_known_ones():
    with pytest.raises(UnknownName, match="Did you mean 'cifar10'") as caught:
        applications.load("cifar")
    assert caught.value.known == PAPER_TASKS


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_a_built_in_application_survives_its_own_text(name):
    application = applications.load(name)
    assert from_text(to_text(application)) == application


@pytest.mark.parametrize(
    ("name", "limits", "epochs"),
    [
        ("bert", (12, 384, 4, 12), 2),
        ("cifar10", (128, 4096, 32, 1024), 100),
        ("deepspeech2", (20, 640, 10, 80), 80),
        ("imagenet", (200, 12800, 20, 200), 90),
        ("ncf", (256, 32768, 32, 32768), 10),
        ("yolov3", (8, 512, 4, 8), 50),
    ],
)
def test_limits_and_epochs_are_those_of_the_paper(name, limits, epochs):
    application = applications.load(name)
    found = application.limits
    assert (
        found.initial_batch_size,
        found.max_batch_size,
        found.min_per_gpu_batch_size,
        found.max_per_gpu_batch_size,
    ) == limits
    assert application.epochs == epochs


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_noise_grows_as_training_goes_on(name):
    application = applications.load(name)
    M0 = application.limits.initial_batch_size
    early, late = (application.gradient(at, M0) for at in (0.05, 0.95))
    assert noise_scale(late.sqr, late.var, M0) > noise_scale(early.sqr, early.var, M0)


@given(name=st.sampled_from(PAPER_TASKS), at=progress, batch_size=st.floats(1, 1e6))
def test_gradient_statistics_are_shares_at_any_progress_and_batch_size(name, at, batch_size):
    found = applications.load(name).gradient(at, batch_size)
    assert found.sqr + found.var == pytest.approx(1.0)
    assert 0.0 < found.var < 1.0


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_every_application_has_a_best_configuration_on_one_node(name):
    application = applications.load(name)
    gradient = application.gradient(0.5, application.limits.initial_batch_size)
    for num_gpus in (1, 2, 4):
        best = application.goodput("t4", gradient).best(Shape(num_gpus))
        assert best.goodput > 0.0


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_a_job_that_keeps_tuning_ends_where_noise_and_batch_size_agree(name):
    application = applications.load(name)
    shape = Shape(8, 2)
    found = application.settled("t4", 0.5, shape)
    again = application.goodput("t4", application.gradient(0.5, found.batch_size(8))).best(shape)
    assert again.goodput == pytest.approx(found.goodput, rel=0.02)


def test_an_unknown_gpu_type_is_answered_with_the_known_ones():
    application = applications.load("bert")
    with pytest.raises(UnknownName, match="t4"):
        application.goodput("h100", application.gradient(0.5, 12))


def test_curves_are_linear_between_knots_and_flat_outside():
    metric = MetricCurve("accuracy", True, (0.2, 0.6), (1.0, 3.0))
    assert [metric.at(x) for x in (0.0, 0.2, 0.4, 0.6, 1.0)] == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])
    noise = NoiseCurve((0.0, 1.0), ((1.0, 0.5, 0.25), (3.0, 0.0, 0.0)))
    assert noise.log_ratio(0.0, 2.0) == pytest.approx(1.0 + 1.0 + 1.0)
    assert noise.log_ratio(0.5, 2.0) == pytest.approx((3.0 + 3.0) / 2)


@pytest.mark.parametrize("knots", [(), (0.5,), (0.5, 0.5), (0.6, 0.2), (-0.1, 0.5), (0.0, 1.5)])
def test_knots_must_rise_within_the_training_run(knots):
    with pytest.raises(InvalidModel, match=r"metric\.progress"):
        MetricCurve("accuracy", True, knots, (1.0,) * len(knots))


def test_a_knot_without_its_value_is_refused():
    with pytest.raises(InvalidModel, match="1 values for 2 knots"):
        MetricCurve("accuracy", True, (0.0, 1.0), (1.0,))
    with pytest.raises(InvalidModel, match="three finite numbers"):
        NoiseCurve((0.0, 1.0), ((1.0, 0.0, math.nan), (1.0, 0.0, 0.0)))


def test_a_damaged_application_file_is_refused_with_the_field():
    text = to_text(applications.load("bert")).replace('"epochs": 2', '"epochs": "two"')
    with pytest.raises(InvalidDocument, match="epochs"):
        from_text(text)


def test_a_name_may_say_how_long_a_training_run_is():
    whole, fifth, twice = (applications.load(name) for name in ("cifar10", "cifar10:0.2", "cifar10:2"))
    assert (fifth.name, fifth.epochs, twice.epochs) == ("cifar10:0.2", 20, 200)
    assert fifth.total_progress == pytest.approx(whole.total_progress / 5)
    assert fifth.gradient(0.5, 512) == whole.gradient(0.5, 512)
    assert fifth.limits == whole.limits
    assert applications.load("bert:0.01").epochs == 1


@pytest.mark.parametrize("length", ["", "0", "-1", "nan", "inf", "half"])
def test_a_length_that_is_none_is_refused(length):
    with pytest.raises(InvalidSpec, match=r"cifar10:0\.2"):
        applications.load(f"cifar10:{length}")


def test_a_length_does_not_make_an_unknown_application_known():
    with pytest.raises(UnknownName, match="cifar10"):
        applications.load("cifar:0.2")


@given(st.floats(0.0, 1.0, exclude_max=True))
def test_epochs_divide_the_run_evenly(share):
    application = applications.load("yolov3:0.3")
    epoch = application.epoch_at(share * application.total_progress)
    assert epoch / application.epochs <= share + 1e-9
    assert share <= (epoch + 1) / application.epochs + 1e-9
    assert application.epoch_at(2 * application.total_progress) == application.epochs - 1


def test_a_pass_that_synchronises_takes_longer_and_an_iteration_is_the_sum_of_its_passes():
    times = applications.load("bert").pass_time("t4", Shape(8, 2), 12)
    assert times.iteration_time_s > times.grad_time_s > 0
    assert times.iteration(3) == pytest.approx(times.iteration_time_s + 3 * times.grad_time_s)
