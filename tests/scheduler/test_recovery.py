"""Jobs that the log had lost: what becomes of them, whatever the log still believes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import (
    Allocation,
    FrozenMap,
    Job,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobPaused,
    JobRecovered,
    JobSpec,
    JobStopped,
    JobSubmitted,
    Node,
    NodeJoined,
    Phase,
    Plan,
    PlanMade,
    ReplicasReady,
    ResizeJob,
    RoundDue,
    StartJob,
    StopJob,
    StopReason,
)
from pollux.errors import InvalidSpec
from pollux.scheduler import SchedulerState
from pollux.scheduler.invariants import violations

SPEC = JobSpec("a", min_gpus=1)
HELD = Allocation.of({"n": 1})
PLAN = Plan(FrozenMap({"a": HELD}))


def cluster(gpus: int = 4) -> SchedulerState:
    state = SchedulerState()
    state.apply(NodeJoined(Node("n", gpus)), 0.0)
    return state


def known(*events: object) -> SchedulerState:
    state = cluster()
    for event in (JobSubmitted(SPEC), *events):
        state.apply(event, 1.0)
    return state


RUNS = (RoundDue(1), PlanMade(1, PLAN), ReplicasReady("a", 1))


def test_one_that_nobody_remembers_waits() -> None:
    state = cluster()
    assert state.apply(JobRecovered(SPEC, -5.0), 1.0) == []
    assert (state.jobs["a"].phase, state.jobs["a"].submitted_at_s) == (Phase.PENDING, -5.0)
    assert violations(state) == []


def test_one_that_runs_is_stopped_and_goes_on_with_the_next_generation() -> None:
    state = cluster()
    assert state.apply(JobRecovered(SPEC, 0.0, 7, HELD), 1.0) == [StopJob("a", 7, StopReason.PREEMPTED)]
    assert state.jobs["a"].phase is Phase.STOPPING
    state.apply(JobStopped("a", 7), 2.0)
    state.apply(RoundDue(1), 3.0)
    assert state.apply(PlanMade(1, PLAN), 3.0) == [StartJob("a", 8, HELD)]
    assert violations(state) == []


def test_one_that_trains_is_not_disturbed() -> None:
    state = cluster()
    assert state.apply(JobRecovered(SPEC, 0.0, 7, HELD, trains=True, membership=2), 1.0) == []
    job = state.jobs["a"]
    assert (job.phase, job.generation, job.membership, job.allocation) == (Phase.RUNNING, 7, 2, HELD)
    assert state.target == {"a": HELD}
    assert violations(state) == []
    state.apply(RoundDue(1), 2.0)
    wider = Allocation.of({"n": 2})
    assert state.apply(PlanMade(1, Plan(FrozenMap({"a": wider}))), 2.0) == [ResizeJob("a", 8, wider)]


@pytest.mark.parametrize(
    ("end", "phase"), [(JobFinished("a", 7), Phase.SUCCEEDED), (JobFailed("a", 7, "broke", 3), Phase.PENDING)]
)
def test_how_it_ends_while_it_is_stopped_counts(end, phase) -> None:
    state = cluster()
    state.apply(JobRecovered(SPEC, 0.0, 7, HELD), 1.0)
    state.apply(end, 2.0)
    assert state.job("a").phase is phase
    assert violations(state) == []


def test_what_the_log_knows_is_not_changed_by_less() -> None:
    state = known(*RUNS)
    before = state.jobs["a"]
    assert state.apply(JobRecovered(SPEC, 0.0, 1, HELD), 9.0) == []
    assert state.jobs["a"] == before


def test_an_end_stays_an_end() -> None:
    state = known(*RUNS, JobFinished("a", 1))
    assert state.apply(JobRecovered(SPEC, 0.0, 5, HELD), 9.0) == []
    assert state.job("a").phase is Phase.SUCCEEDED


@pytest.mark.parametrize("outcome", [Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED])
def test_one_that_has_ended_gives_back_what_it_held(outcome) -> None:
    state = known(*RUNS)
    state.apply(JobRecovered(SPEC, 0.0, outcome=outcome, reason="said so", exit_code=3), 9.0)
    ended = state.ended["a"]
    assert (ended.phase, ended.exit_reason, ended.exit_code, ended.finished_at_s) == (outcome, "said so", 3, 9.0)
    assert not state.occupancy.used
    assert violations(state) == []


@pytest.mark.parametrize(
    ("asked", "phase", "reason"),
    [
        (JobPaused("a"), Phase.PAUSING, StopReason.PAUSED),
        (None, Phase.STOPPING, StopReason.PREEMPTED),
    ],
)
def test_what_its_owner_asked_for_holds(asked, phase, reason) -> None:
    state = known(*([asked] if asked else []))
    assert state.apply(JobRecovered(SPEC, 0.0, 4, HELD), 2.0) == [StopJob("a", 4, reason)]
    assert state.jobs["a"].phase is phase


def test_one_that_is_being_cancelled_and_runs_no_more_is_cancelled() -> None:
    state = known(*RUNS, JobCancelled("a"))
    state.apply(JobRecovered(SPEC, 0.0, 4), 2.0)
    assert state.ended["a"].phase is Phase.CANCELLED
    assert violations(state) == []


def test_bad_ones_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="outcome"):
        JobRecovered(SPEC, 0.0, outcome=Phase.RUNNING)
    with pytest.raises(InvalidSpec, match="generation"):
        JobRecovered(SPEC, 0.0, 0, HELD)


@given(st.data())
def test_a_recovery_at_any_moment_breaks_nothing(data) -> None:
    """Whatever phase the log has for the job, and whatever is said: the invariants hold, and a replay agrees."""
    steps = [*RUNS, JobPaused("a"), JobCancelled("a"), JobStopped("a", 1), JobFailed("a", 1, "x"), RoundDue(2)]
    said = st.builds(
        JobRecovered,
        st.just(SPEC),
        st.just(0.0),
        st.integers(1, 6),
        st.sampled_from([HELD, Allocation.of({"gone": 2})]),
        st.booleans(),
        st.integers(0, 2),
        st.none() | st.sampled_from([Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED]),
    )
    gone = st.builds(JobRecovered, st.just(SPEC), st.just(0.0), st.integers(1, 6))
    events = data.draw(st.lists(st.sampled_from(steps) | said | gone, max_size=12))
    state, replayed = known(), known()
    highest = 0
    for at_s, event in enumerate(events, 2):
        state.apply(event, at_s)
        replayed.apply(event, at_s)
        assert violations(state) == []
        job: Job = state.job("a")
        assert job.issued_generation >= highest, "a generation was given out twice"
        highest = job.issued_generation
    assert replace(state.job("a")) == replace(replayed.job("a"))
