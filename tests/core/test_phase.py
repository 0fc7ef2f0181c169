import pickle
import re
from pathlib import Path

import pytest

from pollux.core import TRANSITIONS, Phase, Trigger, next_phase
from pollux.errors import IllegalTransition

REQUESTS = (Trigger.PAUSE, Trigger.RESUME, Trigger.CANCEL)
REPORTS = (
    Trigger.READY,
    Trigger.ABANDON,
    Trigger.LOSE_REPLICA,
    Trigger.STOPPED,
    Trigger.FINISH,
    Trigger.RETRY,
    Trigger.FAIL,
)
LIVE = [phase for phase in Phase if not phase.is_terminal]
HOLDING = [phase for phase in Phase if phase.holds_gpus]


def walk(*triggers, phase=Phase.PENDING):
    for trigger in triggers:
        phase = next_phase(phase, trigger, "j")
    return phase


def reachable(phase):
    found, frontier = set(), {phase}
    while frontier:
        found |= frontier
        frontier = {after for (before, _), after in TRANSITIONS.items() if before in frontier} - found
    return found


def test_terminal_phases_have_no_exits():
    assert {phase for phase, _ in TRANSITIONS} == set(LIVE)


@pytest.mark.parametrize("phase", LIVE)
def test_every_live_phase_can_reach_every_end(phase):
    ends = {p for p in Phase if p.is_terminal}
    expected = {Phase.CANCELLED, Phase.SUCCEEDED} if phase is Phase.CANCELLING else ends
    assert expected <= reachable(phase)


def test_every_phase_can_be_reached_from_pending():
    assert reachable(Phase.PENDING) == set(Phase)


@pytest.mark.parametrize("phase", LIVE)
@pytest.mark.parametrize("trigger", REQUESTS)
def test_people_may_ask_for_anything_at_any_time(phase, trigger):
    assert (phase, trigger) in TRANSITIONS


@pytest.mark.parametrize("phase", HOLDING)
@pytest.mark.parametrize("trigger", REPORTS)
def test_every_report_has_a_place_in_every_phase_that_holds_gpus(phase, trigger):
    assert (phase, trigger) in TRANSITIONS


@pytest.mark.parametrize("trigger", REQUESTS)
@pytest.mark.parametrize("phase", LIVE)
def test_asking_twice_is_asking_once(phase, trigger):
    once = TRANSITIONS[phase, trigger]
    assert once.is_terminal or TRANSITIONS[once, trigger] in (once, Phase.STOPPING, Phase.PENDING)
    if trigger is not Trigger.RESUME and not once.is_terminal:
        assert TRANSITIONS[once, trigger] is once


@pytest.mark.parametrize("trigger", [Trigger.STOPPED, Trigger.FINISH, Trigger.RETRY, Trigger.FAIL])
@pytest.mark.parametrize("phase", HOLDING)
def test_gpus_are_free_after_every_last_report(phase, trigger):
    assert not TRANSITIONS[phase, trigger].holds_gpus


@pytest.mark.parametrize("phase", LIVE)
def test_a_cancelled_job_never_comes_back(phase):
    cancelled = TRANSITIONS[phase, Trigger.CANCEL]
    assert reachable(cancelled) <= {Phase.CANCELLING, Phase.CANCELLED, Phase.SUCCEEDED}


def test_gpus_come_only_by_a_start():
    gains = {t for (before, t), after in TRANSITIONS.items() if after.holds_gpus and not before.holds_gpus}
    assert gains == {Trigger.START}


def test_an_ordinary_life():
    t = Trigger
    assert walk(t.START, t.READY, t.RESIZE, t.READY, t.STOP, t.STOPPED, t.START, t.READY, t.FINISH) is Phase.SUCCEEDED


@pytest.mark.parametrize(
    ("triggers", "expected"),
    [
        ((Trigger.START, Trigger.READY, Trigger.RESIZE, Trigger.FINISH), Phase.SUCCEEDED),
        ((Trigger.START, Trigger.READY, Trigger.RESIZE, Trigger.ABANDON), Phase.RUNNING),
        ((Trigger.START, Trigger.READY, Trigger.RESIZE, Trigger.STOP, Trigger.READY), Phase.STOPPING),
        ((Trigger.START, Trigger.ABANDON), Phase.PENDING),
        ((Trigger.START, Trigger.READY, Trigger.STOPPED), Phase.PENDING),
        ((Trigger.START, Trigger.READY, Trigger.STOP, Trigger.PAUSE, Trigger.STOPPED), Phase.PAUSED),
        ((Trigger.START, Trigger.READY, Trigger.PAUSE, Trigger.RESUME, Trigger.STOPPED), Phase.PENDING),
        ((Trigger.START, Trigger.READY, Trigger.PAUSE, Trigger.RETRY, Trigger.RESUME), Phase.PENDING),
        ((Trigger.START, Trigger.READY, Trigger.CANCEL, Trigger.FAIL), Phase.CANCELLED),
        ((Trigger.START, Trigger.READY, Trigger.CANCEL, Trigger.FINISH), Phase.SUCCEEDED),
        ((Trigger.START, Trigger.RETRY, Trigger.START, Trigger.FAIL), Phase.FAILED),
        ((Trigger.START, Trigger.READY, Trigger.STOPPED, Trigger.FINISH), Phase.SUCCEEDED),
        ((Trigger.PAUSE, Trigger.CANCEL), Phase.CANCELLED),
    ],
)
def test_races_end_as_told(triggers, expected):
    assert walk(*triggers) is expected


@pytest.mark.parametrize(("phase", "trigger"), sorted({(p, t) for p in Phase for t in Trigger} - TRANSITIONS.keys()))
def test_every_other_step_raises_with_the_story_of_the_job(phase, trigger):
    with pytest.raises(IllegalTransition) as caught:
        next_phase(phase, trigger, "bert-1", ["submitted", "started"])
    message = str(caught.value)
    for part in ("bert-1", phase.value, trigger.value, "submitted → started"):
        assert part in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        TRANSITIONS[Phase.FAILED, Trigger.START] = Phase.RUNNING


def test_the_document_shows_this_very_table():
    text = (Path(__file__).parents[2] / "docs" / "job-lifecycle.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    header = next(row for row in rows if row[0] == "trigger")
    shown = {
        (Phase(column), Trigger(row[0])): cell
        for row in rows
        if row[0] in set(Trigger) and len(row) == len(header)
        for column, cell in zip(header[1:], row[1:], strict=True)
        if re.search(r"\w", cell)
    }
    assert shown == {step: after.value if after is not step[0] else "stays" for step, after in TRANSITIONS.items()}
