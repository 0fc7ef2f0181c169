"""Emulated jobs: the same steps, progress and noise as the simulator's truth; refusals; and one in real processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("torch")

from pollux import applications
from pollux.agent import emulation as module
from pollux.agent.batching import BatchConfig
from pollux.agent.dealing import StepPlan
from pollux.agent.emulation import LEAST_STEP_S, Emulation
from pollux.agent.environment import BatchVariables, EmulatedCluster, Environment
from pollux.agent.options import Options
from pollux.agent.pacing import PacedStopwatch
from pollux.core import Shape
from pollux.errors import InvalidSpec, PacingSlipped, UnknownName
from pollux.goodput import gain
from pollux.simulator.truth import truths_built_in

EXAMPLE = Path(__file__).parents[2] / "examples" / "emulated.py"
TRUTHS = truths_built_in()


def emulation(name: str = "cifar10", compress: float = 20.0, slots: int = 8, delay_s: float = 30.0) -> Emulation:
    return Emulation(applications.load(name), "t4", EmulatedCluster(compress, delay_s, slots))


def plan(config: BatchConfig, passes: int | None = None) -> StepPlan:
    return StepPlan(0, 0, 0, config.batch_size, passes or config.passes, config.per_gpu_batch_size)


shapes = st.sampled_from([Shape(1, 1), Shape(2, 1), Shape(4, 1), Shape(3, 2), Shape(8, 2)])


@given(st.sampled_from(applications.names()), shapes, st.integers(1, 4), st.floats(1.0, 60.0), st.data())
def test_the_passes_of_a_step_add_up_to_what_the_truth_says(
    name: str, shape: Shape, passes: int, compress: float, data: st.DataObject
) -> None:
    job = emulation(name, compress)
    limits = job.application.limits
    m = data.draw(st.integers(limits.min_per_gpu_batch_size, limits.max_per_gpu_batch_size))
    config = BatchConfig(m * shape.num_gpus * passes, m, passes)
    job.config = lambda: config
    placement = (shape.num_gpus,) if shape.num_nodes == 1 else (shape.num_gpus - 1, 1)
    true_s = TRUTHS[name].passes("t4", placement, m).iteration(passes - 1)
    for real_passes in (passes, passes + 1):  # as configured, and as a measured step is split
        paces = [job._pace(shape, plan(config, real_passes), index) for index in range(real_passes)]
        repeats = job.repeats(shape, config)
        assert sum(pace.pass_s for pace in paces) == pytest.approx(repeats * true_s / compress)
        assert sum(pace.pass_s for pace in paces) >= LEAST_STEP_S * (1 - 1e-9)
        assert all(pace.until_gradients_s <= pace.pass_s * (1 + 1e-9) for pace in paces)


@given(st.sampled_from(applications.names()), shapes, st.floats(0.0, 0.999), st.data())
def test_progress_is_made_at_the_speed_of_the_simulator(
    name: str, shape: Shape, share: float, data: st.DataObject
) -> None:
    job, truth = emulation(name), TRUTHS[name]
    limits = truth.limits
    size = data.draw(st.integers(limits.initial_batch_size, limits.max_batch_size))
    config = BatchConfig(size, -(-size // shape.num_gpus), 1)
    progress = share * job.application.total_progress
    assume(abs(share * truth.epochs - round(share * truth.epochs)) > 1e-9)  # rounding decides where an epoch ends
    epoch = next(epoch for epoch in range(truth.epochs) if progress < truth.epoch_end(epoch))
    noise = truth.gradient(epoch, size)
    expected = float(gain(noise.sqr, noise.var, size / limits.initial_batch_size))
    assert job.worth(progress, shape, config) / job.repeats(shape, config) == pytest.approx(expected)


def test_more_slots_on_a_machine_make_real_steps_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: 2)
    config = BatchConfig(128, 128, 1)
    few, many = emulation(slots=2), emulation(slots=64)
    assert few.repeats(Shape(1), config) < many.repeats(Shape(1), config)


@pytest.mark.parametrize("name", applications.names())
def test_the_loss_falls_and_the_metric_is_the_profiles(name: str) -> None:
    job = emulation(name)
    total = job.application.total_progress
    losses = [job.loss(total * share) for share in (0.0, 0.5, 1.0, 1.2)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == losses[-2] >= 0.0
    assert job.metric(total) == job.application.metric.values[-1]


def test_a_job_is_emulated_only_if_it_asks_for_it_and_its_cluster_is() -> None:
    assert Emulation.of(Options(), Environment()) is None
    alone = Emulation.of(Options(emulate="bert:0.1"), Environment())
    assert alone is not None
    assert alone.cluster == EmulatedCluster()
    assert Emulation.of(Options(emulate="bert"), Environment(gpu_type="cpu", emulated=EmulatedCluster(9.0))) is not None
    there = Environment(gpu_type="emulated-t4", emulated=EmulatedCluster(20.0, 30.0, 8))
    on_cluster = Emulation.of(Options(emulate="bert:0.1"), there)
    assert on_cluster is not None
    assert on_cluster.stopwatch.gpu_type == "emulated-t4"
    with pytest.raises(InvalidSpec, match="pollux run --emulate"):
        Emulation.of(Options(), there)
    with pytest.raises(UnknownName, match="cifar10"):
        Emulation.of(Options(emulate="cifar"), there)
    with pytest.raises(UnknownName, match="t4"):
        Emulation.of(Options(emulate="bert"), Environment(gpu_type="emulated-v100", emulated=EmulatedCluster()))


def test_limits_are_the_profiles_and_reports_come_as_often_as_there() -> None:
    told = emulation("yolov3").told(Options())
    limits = applications.load("yolov3").limits
    assert told.limits(limits.initial_batch_size, 10_000) == limits
    assert told.report_every_s == pytest.approx(30.0 / 20.0)
    kept = told.told(BatchVariables(batch_size=64, is_fixed=True))
    assert not kept.adapt


def test_a_start_and_a_change_take_the_delay_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(module, "_age_s", lambda: 0.4)
    job = emulation(compress=20.0, delay_s=30.0)
    job.hold_back()
    job.hold_back(999.5)
    job.hold_back(990.0)  # it took longer anyway
    assert slept == pytest.approx([1.1, 1.0])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"POLLUX_COMPRESS": "20"}, EmulatedCluster(20.0)),
        (
            {"POLLUX_COMPRESS": "20", "POLLUX_REALLOC_DELAY_S": "30", "POLLUX_MACHINE_SLOTS": "8"},
            EmulatedCluster(20.0, 30.0, 8),
        ),
    ],
)
def test_the_cluster_is_told_by_the_environment(variables: dict[str, str], expected: EmulatedCluster | None) -> None:
    assert Environment.read(variables).emulated == expected


@pytest.mark.parametrize("value", ["0", "-1", "nan", "fast"])
def test_a_compression_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidSpec, match="POLLUX_COMPRESS"):
        Environment.read({"POLLUX_COMPRESS": value})


def _run_example(rank: int, replicas: int, application: str) -> list[str]:
    os.environ["POLLUX_COMPRESS"] = "20"
    sys.argv = [str(EXAMPLE), application]
    printed, logged = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(logged):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return [printed.getvalue(), logged.getvalue()]


def _run_in_a_crowd(rank: int, replicas: int, application: str) -> list[str]:
    """Other tests run beside this one: whether the pace is kept is for tests/live/test_fidelity.py to say."""
    PacedStopwatch.is_too_slow = property(lambda self: False)
    return _run_example(rank, replicas, application)


def test_two_real_replicas_train_to_the_end_of_the_profile(spawn) -> None:
    (printed, logged), (nothing, _) = spawn(_run_in_a_crowd, 2, "bert:0.005")
    result = json.loads(printed.splitlines()[-1])
    assert result["value"] == 1.0
    assert result["pacing_slip"] >= 0.0
    assert result["profile_metric"] == {"name": "F1 (%)", "value": 88.6}
    assert "the tiny model's own" in logged
    assert not nothing


def _slip_on_the_second(rank: int, replicas: int, application: str) -> str:
    if rank == 1:
        PacedStopwatch.is_too_slow = property(lambda self: self.trained_s > 0.5)
    try:
        _run_example(rank, replicas, application)
    except PacingSlipped as error:
        return str(error)
    return "it went on"


def test_one_replica_that_cannot_keep_the_pace_ends_the_whole_job(spawn) -> None:
    assert all("cannot keep its pace" in said for said in spawn(_slip_on_the_second, 2, "bert:0.05"))
