"""From measurements to an application: on made measurements whose truth is known, and on the real ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux import applications
from pollux.applications.catalogue import from_text, to_text
from pollux.applications.fitting import fit_application, piecewise_linear
from pollux.applications.measured import EpochStats, Measured, StepTime
from pollux.errors import InvalidProfile
from pollux.goodput import ThetaSys, t_grad, t_iter
from pollux.simulator.traces import application_names, read_application

TRUTH = ThetaSys(0.05, 0.001, 0.03, 0.004, 0.1, 0.01, 2.0)


def made() -> Measured:
    """A task that follows the model exactly, with φ/M0 = e^(4·progress) at every batch size."""
    steps = []
    for placement in [(1,), (2,), (4,), (1, 1), (2, 2), (4, 4), (4, 4, 4), (4, 4, 4, 4), (3, 1), (2, 4)]:
        for m in (16, 32, 64, 128):
            step = float(t_iter(TRUTH, sum(placement), len(placement), m))
            steps.append(StepTime(placement, m, step, step - float(t_grad(TRUTH, m))))
    epochs = {
        size: [
            EpochStats(100.0 * (e + 1), 6400.0 * (e + 1) / size, 0.5 + 0.02 * e, 1.0, math.exp(4.0 * (e + 0.5) / 20))
            for e in range(20)
        ]
        for size in (64, 128, 256)
    }
    return Measured("made", steps, epochs)


def test_a_task_that_follows_the_model_is_recovered():
    found = fit_application(made(), "gpu", "made up")
    assert found.fit.converged
    assert found.fit.mean_relative_error < 1e-3
    assert found.heldout_mean_relative_error < 0.01
    assert found.noise_rms_log_error < 1e-6
    assert found.efficiency_mean_abs_error < 1e-6
    application = found.application
    assert application.total_progress == 2000.0
    assert application.limits.initial_batch_size == 64
    gradient = application.gradient(0.5, 128)
    assert gradient.var / gradient.sqr == pytest.approx(math.exp(2.0), rel=1e-6)
    assert from_text(to_text(application)).metric.at(1.0) == pytest.approx(0.5 + 0.02 * 19, abs=0.01)


def test_a_single_placement_is_fitted_without_a_held_out_error():
    measured = made()
    single = [step for step in measured.steps if step.placement == (1,)]
    found = fit_application(Measured("made", single, measured.epochs), "gpu", "made up")
    assert found.heldout_mean_relative_error is None
    assert found.heldout_published_error is None
    assert found.fit.mean_relative_error < 0.01


def test_epochs_that_differ_between_batch_sizes_are_refused():
    measured = made()
    shorter = {**measured.epochs, 256: measured.epochs[256][:-1]}
    with pytest.raises(InvalidProfile, match="differ between batch sizes"):
        fit_application(Measured("made", measured.steps, shorter), "gpu", "made up")


def test_a_vanishing_gradient_counts_as_pure_noise():
    measured = made()
    dead = {size: [row._replace(grad_sqr=0.0) for row in rows] for size, rows in measured.epochs.items()}
    application = fit_application(Measured("made", measured.steps, dead), "gpu", "made up").application
    assert application.gradient(0.5, 256).var > 0.9999


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_a_piecewise_line_passes_through_its_own_knots(values):
    x = np.linspace(0.0, 1.0, 10 * (len(values) - 1) + 1)
    y = np.interp(x, np.linspace(0.0, 1.0, len(values)), values)[:, None]
    knots, fitted = piecewise_linear(x, y, 1e-9, len(x))
    assert np.interp(x, knots, fitted[:, 0]) == pytest.approx(y[:, 0], abs=1e-6)


def test_a_single_epoch_gives_a_flat_curve():
    knots, values = piecewise_linear(np.array([0.5]), np.array([[3.0]]), 0.1, 12)
    assert knots.tolist() == [0.0, 1.0]
    assert values.tolist() == [[3.0], [3.0]]


@pytest.mark.data
def test_the_fit_is_better_than_the_published_procedure_on_every_application(pollux_data):
    traces = pollux_data / "pollux-osdi21" / "traces"
    for name in application_names(traces):
        found = fit_application(read_application(traces, name), "t4", "test")
        assert found.fit.converged, name
        assert found.fit.mean_relative_error < found.published.mean_relative_error, name
        assert found.fit.mean_relative_error <= 0.10, name
        assert found.efficiency_mean_abs_error < 0.02, name


@pytest.mark.data
def test_the_catalogue_is_what_the_command_makes_of_the_measured_data(pollux_data):
    traces = pollux_data / "pollux-osdi21" / "traces"
    for name in application_names(traces):
        committed = applications.load(name)
        made_again = fit_application(read_application(traces, name), "t4", committed.source).application
        assert made_again.limits == committed.limits
        assert made_again.noise.progress == pytest.approx(committed.noise.progress, rel=1e-5)
        for parameter, value in committed.throughput["t4"].params.items():
            assert made_again.throughput["t4"].params[parameter] == pytest.approx(value, rel=1e-3, abs=1e-7), name


@pytest.mark.data
def test_the_catalogue_predicts_the_recorded_gradient_statistics(pollux_data):
    """Efficiency at the recorded (batch size, epoch) pairs, from our curves against the published interpolation."""
    import json

    values = json.loads((pollux_data / "pollux-osdi21" / "reference" / "values.json").read_text())
    errors = []
    for row in values["grad_stats"]:
        application = applications.load(row["app"])
        M0 = application.limits.initial_batch_size
        scale = row["batch_size"] / M0
        recorded = (row["grad_var"] + row["grad_sqr"]) / (row["grad_var"] / scale + row["grad_sqr"]) / scale
        ours = application.gradient((row["epoch"] + 0.5) / application.epochs, row["batch_size"])
        errors.append(abs((ours.var + ours.sqr) / (ours.var / scale + ours.sqr) / scale - recorded))
    assert np.mean(errors) < 0.02
