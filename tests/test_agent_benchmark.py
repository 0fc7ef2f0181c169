"""The figures of the agent's benchmark, from made-up runs: nothing is trained."""

from __future__ import annotations

import pytest
from benchmarks.areas import agent
from benchmarks.measurement import Measurement, Table
from benchmarks.training import replicas
from benchmarks.training.examples import Outcome

from pollux.core import Progress
from pollux.wire.entries import BatchChanged, BatchSetting, GuardFired, RunState, TrainingFinished, TrainingStarted


def state(step: int, batch_size: int) -> RunState:
    return RunState(step, Progress(float(step)), 1, BatchSetting(batch_size, batch_size), (1.0,), 0, 0)


def test_what_measuring_costs_is_not_trimmed_away():
    measured = [True] + [False] * 19
    run = {
        "parameters": 10_400_000,
        "steps": [3] * 20,
        "cpu_s": {"plain": [1.0] * 20, "again": [1.0] * 20, "prepared": [1.2 if it else 1.0 for it in measured]},
        "is_measured": measured,
        "every": 60,
    }
    [found] = agent.overhead("10m.x2", run, 2)
    assert found.key == "agent.overhead_cpu_ratio.10m.x2"
    assert found.value == pytest.approx(1.01)
    assert (found.baseline, found.bound) == (1.0, 1.03)


def test_outliers_are_trimmed_and_the_error_is_that_of_the_rest():
    samples = [1.0, 2.0] * 9 + [-90.0, 90.0]
    mean, error = agent.trimmed(samples)
    assert mean == pytest.approx(1.5)
    assert 0.0 < error < 0.2
    assert agent.trimmed([3.0]) == (3.0, 0.0)


def test_the_worst_way_of_each_optimizer_is_its_noise_error():
    cases = [
        {
            "optimizer": optimizer,
            "replicas": 1,
            "way": way,
            "passes": 1,
            "measured": value,
            "truth": 100.0,
            "standard_error": 0.02,
        }
        for optimizer in ("sgd", "adam")
        for way, value in (("split batch", 96.0), ("accumulation", 102.0))
    ]
    sgd, adam, table = agent.noise(cases)
    assert isinstance(sgd, Measurement)
    assert isinstance(adam, Measurement)
    assert isinstance(table, Table)
    assert (sgd.key, adam.key) == ("agent.noise_error.sgd", "agent.noise_error.adam")
    assert sgd.value == pytest.approx(0.04)
    assert "split batch" in sgd.note
    assert len(table.rows) == 4


@pytest.mark.parametrize(("name", "expected"), [("classifier", 1.0), ("lm", -2.0), ("recommender", 1.0)])
def test_a_gap_is_above_zero_where_adaptive_training_is_worse(name, expected):
    found = agent.accuracy_gap(name, [(Outcome(50.0, 10.0, 100), Outcome(49.0, 5.0, 60))] * 3)
    assert found.value == pytest.approx(expected)
    assert "0.50 × the CPU time" in found.note


def test_batch_sizes_and_the_guard_are_read_from_the_journal():
    grown = BatchChanged(0.0, state(60, 64), BatchSetting(32, 32), "goodput")
    journal = [TrainingStarted(0.0, state(0, 32)), grown, TrainingFinished(0.0, state(100, 64))]
    run = Outcome(1.0, 1.0, 100, journal)
    assert (run.mean_batch_size, run.final_batch_size, run.batch_changes, run.guard_fired) == (44.8, 64, 1, 0)
    assert Outcome(1.0, 1.0, 100, [*journal, GuardFired(0.0, state(100, 64), "why")]).guard_fired == 1


def test_a_replica_that_fails_is_quoted():
    with pytest.raises(RuntimeError, match=r"replica 0 ended with 1.*no_such_module"):
        replicas.run("no_such_module", 1)
