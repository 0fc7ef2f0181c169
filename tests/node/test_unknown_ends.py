"""What a run makes of replicas that ended while nobody watched, and of those that say another try is useless."""

from __future__ import annotations

import pytest

from pollux.core import Allocation, Event, JobFailed, JobFinished, JobStopped, StopReason, dumps, loads
from pollux.node.exit_codes import HOPELESS
from pollux.node.orders import Announce, SpawnOn
from pollux.node.run import JobRun, SavedRun
from pollux.wire.nodes import ReplicaHere, RunPhase
from pollux.wire.replicas import ReplicaPhase, ReplicaStatus

TRAINING, LEAVING = ReplicaPhase.TRAINING, ReplicaPhase.LEAVING


class Home:
    """A run whose replicas all train; they are called 1-1, 1-2 …"""

    def __init__(self, count: int = 1) -> None:
        self.run = JobRun("job")
        self.run.store = "home:1"
        self.events: list[Event] = []
        self.spawned = 0
        self.do(self.run.start(1, Allocation.of({"n": count}), 0.0))
        for number in range(1, count + 1):
            self.say(f"1-{number}")
        self.events.clear()

    def do(self, orders) -> None:
        self.events += [order.event for order in orders if isinstance(order, Announce)]
        self.spawned += sum(len(order.seats) for order in orders if isinstance(order, SpawnOn))

    def say(self, name: str, phase: ReplicaPhase = TRAINING, has_finished: bool = False, **end: object) -> None:
        status = ReplicaStatus("job", name, 1, phase, 1, 0, 5, True, 0.0, has_finished)
        self.do(self.run.status("n", ReplicaHere(name, 1, 1, status, **end), 1.0))

    def vanish(self, name: str, *, may_have_finished: bool) -> None:
        self.say(name, has_unknown_end=True, may_have_finished=may_have_finished)

    @property
    def end(self) -> Event:
        (event,) = [one for one in self.events if isinstance(one, JobFailed | JobFinished | JobStopped)]
        return event


def test_one_that_may_have_finished_is_not_run_again() -> None:
    home = Home()
    home.vanish("1-1", may_have_finished=True)
    assert isinstance(home.end, JobFailed)
    assert (home.end.exit_code, home.end.may_retry) == (None, False)
    assert "exit code is unknown" in home.end.reason
    assert home.run.phase is RunPhase.ENDED
    assert home.run.description().end == home.end
    assert home.spawned == 1


def test_one_that_cannot_have_finished_has_failed_and_may_be_tried_again() -> None:
    home = Home()
    home.vanish("1-1", may_have_finished=False)
    assert (home.end.exit_code, home.end.may_retry) == (None, True)
    assert "exit code is unknown" in home.end.reason


def test_the_others_are_not_disturbed_by_one_that_may_have_finished() -> None:
    home = Home(2)
    home.vanish("1-1", may_have_finished=True)
    assert home.events == []
    assert home.run.saved().membership == 0
    home.say("1-2", LEAVING, has_finished=True, exit_code=0)
    assert (type(home.end), home.end.may_retry) == (JobFailed, False)


def test_a_known_failure_of_another_says_more() -> None:
    home = Home(2)
    home.vanish("1-1", may_have_finished=True)
    home.say("1-2", exit_code=3)
    assert (home.end.exit_code, home.end.may_retry) == (3, True)


def test_one_that_was_asked_to_leave_has_left() -> None:
    home = Home()
    home.do(home.run.stop(1, StopReason.PAUSED, 2.0))
    home.vanish("1-1", may_have_finished=False)
    assert home.end == JobStopped("job", 1)


def test_it_is_remembered_by_the_next_daemon() -> None:
    home = Home(2)
    home.vanish("1-1", may_have_finished=True)
    saved = loads(dumps(home.run.saved()), SavedRun)
    assert saved.members[0].ended_unseen
    restored = JobRun.restored(saved)
    assert restored.saved() == saved or dumps(restored.saved()) == dumps(saved)


def test_one_that_was_never_started_says_so() -> None:
    home = Home(0 + 1)
    home.do(home.run.status("n", ReplicaHere("1-1", 1, 0, None, None, "", "no room", has_unknown_end=True), 1.0))
    assert home.end.reason == "replica 1-1 on node n was not started. no room"
    assert home.end.exit_code is None


@pytest.mark.parametrize("code", [1, HOPELESS, 255])
def test_only_one_that_says_so_is_not_tried_again(code: int) -> None:
    home = Home()
    home.say("1-1", exit_code=code)
    assert (home.end.exit_code, home.end.may_retry) == (code, code != HOPELESS)
