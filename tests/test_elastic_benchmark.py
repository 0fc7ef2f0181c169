"""The figures of the benchmark of changing replicas, from made-up changes: nothing is trained or timed."""

from __future__ import annotations

import pytest
from benchmarks.areas import elastic
from benchmarks.training.elastic import MEASURED, PHASES, SCRIPT, Change, Step, step_ms, steps_lost

GROWN = Change(
    generation=2,
    requested_s=100.0,
    ready_s=(100.2, 100.3),
    trained_s=(100.45, 100.5),
    ended_s={"told": 100.31, "switch": 100.35, "gather": 100.34, "state": 100.36, "group": 100.38, "wrap": 100.4},
)
SHRUNK = Change(3, 200.0, (), (200.15,), {"switch": 200.1})
TRANSITIONS = ("1to2", "2to4", "4to3", "3to1")


def test_a_pause_begins_with_the_last_newcomer_ready_or_with_the_request():
    assert GROWN.pause_ms == pytest.approx(200.0)
    assert GROWN.total_ms == pytest.approx(500.0)
    assert GROWN.ready_ms == pytest.approx([200.0, 300.0])
    assert SHRUNK.pause_ms == SHRUNK.total_ms == pytest.approx(150.0)


@pytest.mark.parametrize("change", [GROWN, SHRUNK])
def test_the_phases_add_up_to_the_pause(change):
    phases = change.phases_ms()
    assert tuple(phases) == PHASES
    assert min(phases.values()) >= 0.0
    assert sum(phases.values()) == pytest.approx(change.pause_ms)


def test_the_script_notes_phases_that_the_agent_has():
    pytest.importorskip("torch")
    from benchmarks.training import elastic_script

    assert tuple(elastic_script.PHASES) == MEASURED
    assert all(callable(getattr(owner, name)) for owner, name in elastic_script.PHASES.values())
    assert SCRIPT.name == "elastic_script.py"


def steps(*taken: tuple[int, int, int, int]) -> list[Step]:
    """Of one replica, 10 ms each."""
    return [Step(*one, ended_s=number / 100) for number, one in enumerate(taken)]


def test_no_step_is_lost_where_generations_go_on_from_each_other():
    first = steps((1, 0, 0, 4), (1, 0, 4, 8), (2, 0, 8, 10), (2, 1, 0, 4))
    newcomer = steps((2, 0, 8, 10), (2, 1, 0, 4))
    assert steps_lost([*newcomer, *first]) == 0


@pytest.mark.parametrize(
    "taken",
    [
        [(1, 0, 0, 4), (1, 0, 4, 8), (2, 0, 4, 8), (2, 0, 8, 10)],
        [(1, 0, 0, 4), (2, 0, 8, 10)],
        [(1, 0, 4, 8)],
        [(1, 0, 0, 10), (1, 1, 0, 4), (1, 2, 0, 10)],
        [(1, 0, 0, 4), (2, 0, 3, 7)],
    ],
    ids=["taken anew", "left out", "the first", "the rest of a pass", "overlapping"],
)
def test_a_step_that_is_taken_anew_or_left_out_is_lost(taken):
    assert steps_lost(steps(*taken)) == 1


def test_the_time_of_a_step_is_taken_within_generations():
    taken = steps((1, 0, 0, 4), (1, 0, 4, 8), (1, 0, 8, 10), (2, 1, 0, 4), (3, 1, 4, 8))
    assert step_ms(taken, {1}) == pytest.approx(10.0)
    assert step_ms(taken, {2, 3}) is None


def test_every_key_is_measured_and_those_of_the_small_model_have_bounds():
    changes = {transition: [SHRUNK if transition in ("4to3", "3to1") else GROWN] * 7 for transition in TRANSITIONS}
    found = [
        *elastic.pauses("pause_ms", changes, 990_000, restart_ms=2000.0),
        elastic.worker_ready(changes),
        elastic.restart([GROWN] * 3, 990_000),
        *elastic.pauses("pause_10m_ms", changes, 10_400_000),
        elastic.lost([steps((1, 0, 0, 4))]),
        *elastic.soaked(60, 20, []),
    ]
    assert [one.key for one in found] == [f"agent.{key}" for key in elastic.KEYS]
    bounds = {one.key.removeprefix("agent."): one.bound for one in found if one.bound is not None}
    assert bounds == {
        **{f"pause_ms.{transition}": 500.0 for transition in TRANSITIONS},
        "worker_ready_ms": 1000.0,
        "steps_lost": 0.0,
        "soak_violations": 0.0,
    }
    assert found[0].baseline == 2000.0
    assert "22.1 s" in found[len(TRANSITIONS) + 1].note


def test_a_row_tells_what_each_change_consists_of():
    [row] = elastic.pause_rows(990_000, {"2to4": [GROWN]}, steps((2, 0, 0, 4), (2, 0, 4, 8), (2, 0, 8, 10)))
    assert row == ("0.99 M", "2to4", "300", "200", "10", "40", "0", "10", "20", "20", "100", "10")
    table = elastic.pause_table([row])
    assert len(table.columns) == len(row)


def test_what_a_soak_breaks_is_counted_and_named():
    *_, found = elastic.soaked(8, 3, ["a sample was taken twice", "a process is left"])
    assert found.value == 2
    assert found.note == "a sample was taken twice; a process is left"
