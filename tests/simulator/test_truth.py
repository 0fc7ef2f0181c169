"""The ground truth: the published simulator's numbers from measured traces, and the built-in applications' own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pollux
from pollux import applications
from pollux.applications import PassTime
from pollux.applications.measured import EpochStats, Measured, StepTime
from pollux.core import BatchLimits, GradientStats, Shape
from pollux.errors import InvalidDocument, InvalidModel, InvalidSpec, UnknownName
from pollux.goodput import PAPER, gain, iteration_time
from pollux.simulator.truth import FittedTruth, MeasuredTruth, Truth, truths_built_in, truths_of_traces


def made(**changes: object) -> Measured:
    """Times linear in nodes, GPUs and m, so that every interpolation is exact."""
    steps = [
        StepTime(placement, m, *linear(len(placement), sum(placement), m))
        for placement in [(1,), (2,), (1, 1), (1, 2), (2, 2), (1, 1, 2)]
        for m in (8, 16)
    ]
    wide = [(6, 6), (6, 12), (16, 16), (16, 32)]
    steps += [StepTime((K // N,) * N, m, *linear(N, K, m), is_placement_known=False) for N, K in wide for m in (8, 16)]
    epochs = {
        32: [EpochStats(100.0, 100.0, 0.5, 2.0, 1.0), EpochStats(200.0, 200.0, 0.6, 1.0, 3.0)],
        64: [EpochStats(99.0, 60.0, 0.5, 4.0, 2.0), EpochStats(201.0, 130.0, 0.6, 3.0, 9.0)],
    }
    return Measured(**{"name": "made", "steps": steps, "epochs": epochs, **changes})


def linear(num_nodes: int, num_gpus: int, m: int) -> tuple[float, float]:
    sync = 0.01 * num_nodes + 0.001 * num_gpus
    return 0.1 + 0.002 * m + sync, sync


class TestMeasured:
    @pytest.mark.parametrize("m", [8, 11, 16])
    @pytest.mark.parametrize("placement", [(1,), (2, 1), (1, 2), (1, 2, 1), (2, 1, 1), (1,) * 6, (2,) * 8, (2,) * 16])
    def test_interpolates_in_m_on_a_measured_ring_and_over_all_three_elsewhere(self, placement, m):
        step, sync = linear(len(placement), sum(placement), m)
        found = MeasuredTruth(made()).passes("t4", placement, m)
        assert found == pytest.approx(PassTime(step - sync, step), rel=1e-12)

    def test_takes_more_than_16_nodes_for_16(self):
        step, sync = linear(16, 20, 9)
        assert MeasuredTruth(made()).passes("t4", (1,) * 20, 9) == pytest.approx(PassTime(step - sync, step))

    def test_averages_rows_of_the_same_placement(self):
        steps = [StepTime((1, 2), 8, 1.0, 0.5), StepTime((2, 1), 8, 3.0, 0.5)]
        assert MeasuredTruth(made(steps=steps)).passes("t4", (1, 2), 8) == PassTime(1.5, 2.0)

    @pytest.mark.parametrize(
        ("placement", "m"),
        [((1,), 7), ((1,), 17), ((1,) * 6, 7), ((1,) * 6, 17), ((4,) * 6, 8), ((2,) * 20, 8), ((), 8)],
    )
    def test_invents_nothing_beyond_what_was_measured(self, placement, m):
        with pytest.raises(InvalidModel, match=rf"made was not measured there with {m} examples.*16 nodes, 32 GPUs"):
            MeasuredTruth(made()).passes("t4", placement, m)

    def test_needs_points_in_all_directions_to_interpolate_between_placements(self):
        flat = [step for step in made().steps if len(step.placement) == 1]
        with pytest.raises(InvalidModel, match="not measured"):
            MeasuredTruth(made(steps=flat)).passes("t4", (1, 1), 8)

    def test_reads_gradients_between_batch_sizes_and_clamps_outside(self):
        truth = MeasuredTruth(made())
        assert truth.gradient(0, 32) == truth.gradient(0, 1) == GradientStats(sqr=2.0, var=1.0)
        assert truth.gradient(1, 48) == GradientStats(sqr=2.0, var=6.0)
        assert truth.gradient(1, 64) == truth.gradient(1, 999) == GradientStats(sqr=3.0, var=9.0)

    def test_ends_epochs_with_the_batch_size_that_needs_least_progress(self):
        truth = MeasuredTruth(made())
        assert [truth.epoch_end(epoch) for epoch in range(truth.epochs)] == [99.0, 200.0]

    def test_counts_iterations_between_batch_sizes(self):
        truth = MeasuredTruth(made())
        assert [truth.iterations(0, size) for size in (32, 48, 64)] == [100.0, 80.0, 60.0]
        assert truth.iterations(1, 40) == 182.5

    def test_takes_its_limits_from_the_data(self):
        assert MeasuredTruth(made()).limits == BatchLimits(32, 64, 8, 16)
        assert MeasuredTruth(made(name="yolov3")).limits.max_per_gpu_batch_size == 8

    def test_refuses_epochs_that_make_no_sense(self):
        epochs = made().epochs
        with pytest.raises(InvalidDocument, match=r"differ: \{32: 2, 64: 1\}"):
            MeasuredTruth(made(epochs={**epochs, 64: epochs[64][:1]}))
        with pytest.raises(InvalidDocument, match=r"validation-64\.csv: progress does not rise"):
            MeasuredTruth(made(epochs={**epochs, 64: epochs[64][::-1]}))


class TestFitted:
    def test_is_the_application_at_its_word(self):
        application = applications.load("cifar10")
        truth = FittedTruth(application)
        theta = [application.throughput["t4"].params[name] for name in PAPER.parameters]
        for placement in [(1,), (4,), (1, 3), (4, 4, 4, 4, 4)]:
            shape = Shape(sum(placement), len(placement))
            seconds = iteration_time(PAPER, theta, shape.num_gpus, PAPER.level(shape.num_nodes, 1), 100, 0)
            assert truth.passes("t4", placement, 100) == (PAPER.t_grad(theta, 100), seconds)
        assert truth.gradient(0, 512) == application.gradient(0.5 / application.epochs, 512)
        assert truth.epoch_end(truth.epochs - 1) == pytest.approx(application.total_progress)

    def test_needs_as_many_iterations_as_progress_at_the_initial_batch_size_and_fewer_above(self):
        truth = FittedTruth(applications.load("cifar10"))
        last, initial = truth.epochs - 1, truth.limits.initial_batch_size
        assert truth.iterations(last, initial) == pytest.approx(truth.epoch_end(last))
        noise = truth.gradient(0, 1024)
        worth = gain(noise.sqr, noise.var, 1024 / initial)
        assert truth.iterations(0, 1024) == pytest.approx(truth.epoch_end(0) / worth)
        assert truth.iterations(last, 1024) < truth.iterations(last, initial)


@pytest.mark.parametrize("truth", [MeasuredTruth(made()), FittedTruth(applications.load("bert"))], ids=lambda t: t.name)
class TestBoth:
    def test_refuses_an_unknown_gpu_type_each_time(self, truth: Truth):
        for _ in range(2):
            with pytest.raises(UnknownName, match="Known: t4"):
                truth.passes("v100", (1,), 8)

    def test_remembers_its_answers(self, truth: Truth):
        assert truth.passes("t4", (1, 1), 8) is truth.passes("t4", (1, 1), 8)
        assert truth.gradient(1, 40) is truth.gradient(1, 40)

    @pytest.mark.parametrize("epoch", [-1, 2])
    def test_refuses_an_epoch_outside_the_run(self, truth: Truth, epoch: int):
        for ask in (truth.epoch_end, lambda e: truth.gradient(e, 32), lambda e: truth.iterations(e, 32)):
            with pytest.raises(InvalidModel, match="has 2"):
                ask(epoch)


class TestBuiltInTruths:
    def test_each_is_made_once_in_any_length(self):
        truths = truths_built_in()
        assert truths["cifar10:0.2"] is truths["cifar10:0.2"]
        assert truths["cifar10:0.2"].epochs == truths["cifar10"].epochs // 5
        assert "bert:3" in truths
        assert set(truths) == set(applications.names())

    @pytest.mark.parametrize("name", ["nope", "nope:2", ""])
    def test_others_are_not_there(self, name):
        assert name not in truths_built_in()

    def test_what_is_no_length_is_said(self):
        with pytest.raises(InvalidSpec, match="'bert:0': says no length"):
            truths_built_in()["bert:0"]


def test_only_the_applications_asked_for_are_loaded(tmp_path):
    assert list(truths_built_in(["ncf", "bert"])) == ["ncf", "bert"]
    assert set(truths_built_in()) == set(applications.names())
    assert len(truths_built_in()) == len(applications.names())
    with pytest.raises(UnknownName, match="bert"):
        truths_built_in(["brt"])
    for name, placements in (("good", "placement,local_bsz,step_time,sync_time\n1,8,0.1,0.0\n"), ("bad", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "placements.csv").write_text(placements)
        (tmp_path / name / "validation-8.csv").write_text("progress,iteration,metric,grad_sqr,grad_var\n9,9,0,1,1\n")
    assert truths_of_traces(tmp_path, ["good"])["good"].passes("t4", (1,), 8) == PassTime(0.1, 0.1)
    with pytest.raises(InvalidDocument, match="bad"):
        truths_of_traces(tmp_path)


def test_importing_it_loads_neither_numba_nor_scipy():
    script = "import sys, pollux.simulator.truth; print({'numba', 'scipy'} & set(sys.modules))"
    source = str(Path(pollux.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": source})
    assert (done.stdout.strip(), done.returncode) == ("set()", 0), done.stderr


@pytest.fixture(scope="module")
def truths(pollux_data: Path) -> dict[str, Truth]:
    return truths_of_traces(pollux_data / "pollux-osdi21" / "traces")


@pytest.fixture(scope="module")
def reference(pollux_data: Path) -> dict[str, list[dict[str, object]]]:
    """What the published code answered."""
    return json.loads((pollux_data / "pollux-osdi21" / "reference" / "values.json").read_text())


@pytest.mark.data
class TestOnTheArtifactsData:
    def test_pass_times_are_the_published_simulators(self, truths, reference):
        for row in reference["throughput"]:
            found = truths[row["app"]].passes("t4", tuple(row["placement"]), row["local_bsz"])
            assert found.iteration_time_s == pytest.approx(row["step_time"], rel=1e-9), row
            assert found.iteration_time_s - found.grad_time_s == pytest.approx(row["sync_time"], rel=1e-9), row

    def test_gradients_and_constants_are_the_published_simulators(self, truths, reference):
        for row in reference["grad_stats"]:
            found = truths[row["app"]].gradient(row["epoch"], row["batch_size"])
            assert (found.sqr, found.var) == pytest.approx((row["grad_sqr"], row["grad_var"]), rel=1e-9), row
        for name, row in reference["constants"].items():
            limits = truths[name].limits
            assert limits.initial_batch_size == row["init_batch_size"]
            assert limits.max_batch_size == row["max_batch_size"]
            assert limits.min_per_gpu_batch_size == row["min_local_bsz"]
            assert limits.max_per_gpu_batch_size == row["max_local_bsz"]
            assert truths[name].epochs == row["max_epochs"]
            assert truths[name].epoch_end(truths[name].epochs - 1) == pytest.approx(row["total_progress"], rel=1e-12)

    def test_every_epoch_has_gradients_and_rising_iterations(self, truths):
        for truth in truths.values():
            for size in (truth.limits.initial_batch_size, truth.limits.max_batch_size):
                noise = [truth.gradient(epoch, size) for epoch in range(truth.epochs)]
                assert all(math.isfinite(stats.var) for stats in noise)
                counted = [truth.iterations(epoch, size) for epoch in range(truth.epochs)]
                assert counted == sorted(counted)
                assert counted[0] > 0

    def test_wide_placements_are_interpolated_as_scipy_does(self, truths):
        from scipy.interpolate import LinearNDInterpolator

        rng = np.random.default_rng(1)
        for truth in truths.values():
            truth.passes("t4", (1,) * 5, truth.limits.min_per_gpu_batch_size)
            surface = truth._surface
            theirs = LinearNDInterpolator(surface._mesh.points, surface._values)  # triangulates again, on its own
            for _ in range(500):
                num_nodes = int(rng.integers(5, 17))
                num_gpus = int(rng.integers(num_nodes, 4 * num_nodes + 1))
                m = int(rng.integers(truth.limits.min_per_gpu_batch_size, truth.limits.max_per_gpu_batch_size + 1))
                expected = theirs(num_nodes, num_gpus, m)
                if np.isnan(expected).any():
                    assert surface.at(num_nodes, num_gpus, m) is None
                else:
                    assert surface.at(num_nodes, num_gpus, m) == pytest.approx(tuple(expected), rel=1e-12)

    def test_all_that_the_limits_allow_on_16_nodes_of_4_was_measured(self, truths):
        for truth in truths.values():
            for num_nodes in range(1, 17):
                for num_gpus in range(num_nodes, 4 * num_nodes + 1):
                    each, over = divmod(num_gpus, num_nodes)
                    placement = (each + 1,) * over + (each,) * (num_nodes - over)
                    largest = min(truth.limits.max_per_gpu_batch_size, truth.limits.max_batch_size // num_gpus)
                    for m in {truth.limits.min_per_gpu_batch_size, largest}:
                        if m <= largest:
                            assert truth.passes("t4", placement, m).grad_time_s > 0.0
