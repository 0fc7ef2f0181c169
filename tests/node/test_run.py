"""One test for each rule of `JobRun`: what comes in, and which orders go out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pollux.core import (
    Allocation,
    Event,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobStopped,
    ReplicaLost,
    ReplicasReady,
    StopReason,
    dumps,
    loads,
)
from pollux.errors import InvalidSpec, StaleGeneration
from pollux.node.orders import Announce, ForgetJob, KillReplica, Order, SpawnOn, TellReplica
from pollux.node.run import JobRun, RunOptions, SavedRun
from pollux.wire.nodes import ReplicaHere, RunPhase, Seat
from pollux.wire.replicas import Instruction, Join, Leave, ReplicaPhase, ReplicaStatus

OPTIONS = RunOptions()
READY, JOINING, TRAINING = ReplicaPhase.READY, ReplicaPhase.JOINING, ReplicaPhase.TRAINING
WAITING, LEAVING, STARTING = ReplicaPhase.WAITING, ReplicaPhase.LEAVING, ReplicaPhase.STARTING


def gpus(**counts: int) -> Allocation:
    return Allocation.of(counts)


def here(
    name: str,
    phase: ReplicaPhase,
    at: tuple[int, int],
    has_state: bool = True,
    code: int | None = None,
    has_finished: bool = False,
):
    status = ReplicaStatus(
        "job", name, 1, phase, *at, step=5, has_state=has_state, since_s=0.0, has_finished=has_finished
    )
    return ReplicaHere(name, at[0], 1, status, code)


class Home:
    """A run, and the orders that it gave since one last looked."""

    def __init__(self) -> None:
        self.run = JobRun("job", OPTIONS)
        self.run.store = "home:1"
        self.now_s = 100.0
        self.orders: list[Order] = []
        self.node_of: dict[str, str] = {}
        self.last: dict[str, ReplicaHere] = {}

    def do(self, action: Callable[..., list[Order]], *arguments: object) -> None:
        for order in action(*arguments, self.now_s):
            self.orders.append(order)
            if isinstance(order, SpawnOn):
                self.node_of.update({seat.replica: order.node for seat in order.seats})

    def start(self, generation: int, allocation: Allocation) -> None:
        self.do(self.run.start, generation, allocation)

    def resize(self, generation: int, allocation: Allocation, in_place: bool = True) -> None:
        self.do(self.run.resize, generation, allocation, in_place)

    def stop(self, generation: int, reason: StopReason = StopReason.PREEMPTED) -> None:
        self.do(self.run.stop, generation, reason)

    def say(self, name: str, phase: ReplicaPhase, at: tuple[int, int], has_state: bool = True) -> None:
        self.last[name] = here(name, phase, at, has_state)
        self.do(self.run.status, self.node_of[name], self.last[name])

    def train(self, at: tuple[int, int], *names: str) -> None:
        for name in names:
            self.say(name, TRAINING, at)

    def end(self, name: str, code: int) -> None:
        status = self.last[name].status if name in self.last else None
        self.do(self.run.status, self.node_of[name], ReplicaHere(name, 1, 1, status, code))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(self.run.tick)

    def recover(self) -> None:
        self.run = JobRun.restored(loads(dumps(self.run.saved()), SavedRun), OPTIONS)

    def taken(self) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    def told(self) -> dict[str, Instruction]:
        return {order.replica: order.instruction for order in self.taken() if isinstance(order, TellReplica)}

    def killed(self) -> list[tuple[str, int]]:
        return [(order.replica, order.signal) for order in self.taken() if isinstance(order, KillReplica)]

    def events(self) -> list[Event]:
        return [order.event for order in self.taken() if isinstance(order, Announce)]


@pytest.fixture
def home() -> Home:
    return Home()


@pytest.fixture
def pair(home: Home) -> Home:
    """Replicas 1-1 on a and 1-2 on b train as (1, 0)."""
    home.start(1, gpus(a=1, b=1))
    home.train((1, 0), "1-1", "1-2")
    home.taken()
    return home


def join(generation: int, membership: int, rank: int, size: int, num_nodes: int, **flags: bool) -> Join:
    return Join("job", generation, membership, rank, size, num_nodes, "home:1", **flags)


# Starts


def test_a_start_seats_replicas_in_order_of_the_nodes(home: Home) -> None:
    home.start(3, gpus(b=2, a=1))
    assert home.taken() == [
        SpawnOn("a", 3, (Seat("3-1", 0, 3, 2, False),)),
        SpawnOn("b", 3, (Seat("3-2", 1, 3, 2, False), Seat("3-3", 2, 3, 2, False))),
    ]
    assert home.run.phase is RunPhase.STARTING


def test_a_start_is_ready_when_all_of_its_replicas_train(home: Home) -> None:
    home.start(1, gpus(a=2))
    home.say("1-1", STARTING, (1, 0))
    home.train((1, 0), "1-1")
    assert home.events() == []
    home.train((1, 0), "1-2")
    assert home.taken() == [Announce(ReplicasReady("job", 1))]
    assert home.run.phase is RunPhase.TRAINING


def test_a_loss_that_was_made_good_is_not_what_the_job_fails_of_later(pair: Home) -> None:
    pair.end("1-2", -9)
    pair.train((1, 1), "1-1")
    pair.taken()
    pair.end("1-1", 3)
    assert pair.events() == [JobFailed("job", 1, "replica 1-1 on node a ended with exit code 3", 3)]


def test_a_status_that_says_nothing_new_gives_no_orders(pair: Home) -> None:
    pair.train((1, 0), "1-1", "1-2", "1-1")
    pair.wait(1000)
    assert pair.taken() == []


def test_a_loss_while_starting_leaves_a_smaller_generation(home: Home) -> None:
    home.start(1, gpus(a=2))
    home.say("1-1", STARTING, (1, 0))
    home.end("1-2", 1)
    assert home.told() == {"1-1": join(1, 1, 0, 1, 1, is_repair=True)}
    home.train((1, 1), "1-1")
    assert home.events() == [ReplicasReady("job", 1), ReplicaLost("job", 1, 1, gpus(a=1))]


def test_a_start_of_a_running_job_ends_what_runs_first(pair: Home) -> None:
    pair.start(2, gpus(c=1))
    assert pair.killed() == [("1-1", 9), ("1-2", 9)]
    pair.end("1-1", -9)
    pair.end("1-2", -9)
    assert pair.taken() == [SpawnOn("c", 2, (Seat("2-3", 0, 1, 1, False),))]


def test_a_job_that_ended_can_start_again_with_new_names(pair: Home) -> None:
    pair.stop(1)
    pair.end("1-1", 143)
    pair.end("1-2", 143)
    pair.taken()
    pair.start(2, gpus(a=1))
    assert pair.taken() == [SpawnOn("a", 2, (Seat("2-3", 0, 1, 1, False),))]


# Resizes


def test_members_are_told_nothing_while_newcomers_get_ready(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    assert pair.taken() == [SpawnOn("a", 2, (Seat("2-3", 2, 3, 2, True),))]
    assert pair.run.phase is RunPhase.RESIZING


def test_stayers_come_first_in_their_old_order_and_newcomers_after_them(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    pair.taken()
    pair.say("2-3", READY, (2, 0), has_state=False)
    assert pair.told() == {
        "1-1": join(2, 0, 0, 3, 2),
        "1-2": join(2, 0, 1, 3, 2),
        "2-3": join(2, 0, 2, 3, 2),
    }
    pair.train((2, 0), "1-1", "2-3")
    assert pair.events() == []
    pair.train((2, 0), "1-2")
    assert pair.events() == [ReplicasReady("job", 2)]


def test_each_node_keeps_its_lowest_ranks(home: Home) -> None:
    home.start(1, gpus(a=2, b=2))
    home.train((1, 0), "1-1", "1-2", "1-3", "1-4")
    home.taken()
    home.resize(2, gpus(a=1, b=1))
    assert home.told() == {
        "1-1": join(2, 0, 0, 2, 2),
        "1-3": join(2, 0, 1, 2, 2),
        "1-2": Leave("job", 2, 0, "home:1"),
        "1-4": Leave("job", 2, 0, "home:1"),
    }


def test_a_generation_is_ready_only_when_the_leavers_are_gone(pair: Home) -> None:
    pair.resize(2, gpus(a=1))
    pair.taken()
    pair.train((2, 0), "1-1")
    assert pair.taken() == []
    pair.end("1-2", 0)
    assert pair.events() == [ReplicasReady("job", 2)]


def test_a_leaver_that_stays_too_long_is_killed_once_the_others_train(pair: Home) -> None:
    pair.resize(2, gpus(a=1))
    pair.wait(OPTIONS.stop_timeout_s + 1)
    assert pair.killed() == []  # nobody has switched yet
    pair.train((2, 0), "1-1")
    pair.wait(OPTIONS.stop_timeout_s + 1)
    assert pair.killed() == [("1-2", 9)]
    pair.end("1-2", -9)
    assert pair.events() == [ReplicasReady("job", 2)]


def test_without_stayers_the_first_leaver_hands_over(pair: Home) -> None:
    pair.resize(2, gpus(c=1))
    pair.taken()
    pair.say("2-3", READY, (2, 0), has_state=False)
    assert pair.told() == {
        "2-3": join(2, 0, 0, 1, 1, takes_from_leaver=True),
        "1-1": Leave("job", 2, 0, "home:1", hands_over=True),
        "1-2": Leave("job", 2, 0, "home:1"),
    }


def test_a_resize_asked_for_during_a_start_waits_for_it(home: Home) -> None:
    home.start(1, gpus(a=2))
    home.resize(2, gpus(a=1))
    assert home.told() == {}
    home.train((1, 0), "1-1", "1-2")
    assert [type(order) for order in home.taken()] == [Announce, TellReplica, TellReplica]


def test_a_second_resize_takes_the_place_of_the_first(pair: Home) -> None:
    pair.resize(2, gpus(a=1, b=1, c=1))
    pair.say("2-3", STARTING, (2, 0), has_state=False)
    pair.taken()
    pair.resize(3, gpus(a=1, b=2))
    assert pair.killed() == [("2-3", 9)]
    pair.end("2-3", -9)
    assert pair.events() == [GenerationAbandoned("job", 2, "generation 3 takes its place")]
    pair.say("3-4", READY, (3, 0), has_state=False)
    assert set(pair.told()) == {"1-1", "1-2", "3-4"}


# Resizes that are abandoned


def test_a_newcomer_that_ends_has_the_resize_abandoned(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=2))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.taken()
    pair.end("2-4", 1)
    assert pair.taken() == [KillReplica("a", "2-3", 9)]
    pair.end("2-3", -9)
    reason = "replica 2-4 on node b ended with exit code 1 before it was ready"
    assert pair.taken() == [Announce(GenerationAbandoned("job", 2, reason))]
    assert pair.run.phase is RunPhase.TRAINING


def test_newcomers_that_are_not_ready_in_time_have_the_resize_abandoned(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    pair.taken()
    assert pair.run.next_deadline_s == pair.now_s + OPTIONS.ready_timeout_s
    pair.wait(OPTIONS.ready_timeout_s)
    assert pair.killed() == [("2-3", 9)]
    pair.end("2-3", -9)
    assert pair.events() == [GenerationAbandoned("job", 2, "replica 2-3 was not ready after 300 s")]


def test_a_newcomer_that_is_ready_too_late_joins_nothing(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    pair.wait(OPTIONS.ready_timeout_s)
    pair.taken()
    pair.say("2-3", READY, (2, 0), has_state=False)
    assert pair.taken() == []


def test_the_number_of_an_abandoned_generation_is_not_used_again(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    pair.end("2-3", 1)
    with pytest.raises(StaleGeneration, match="generation 2"):
        pair.resize(2, gpus(a=3, b=1))


def test_a_loss_while_newcomers_get_ready_abandons_the_resize_and_repairs(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    pair.say("2-3", STARTING, (2, 0), has_state=False)
    pair.taken()
    pair.end("1-2", -9)
    assert pair.taken() == [
        TellReplica("a", "1-1", join(1, 1, 0, 1, 1, is_repair=True)),
        KillReplica("a", "2-3", 9),
    ]


# Repairs


def test_survivors_form_the_next_membership_in_their_old_order(home: Home) -> None:
    home.start(1, gpus(a=2, b=1))
    home.train((1, 0), "1-1", "1-2", "1-3")
    home.taken()
    home.end("1-1", -9)
    assert home.told() == {
        "1-2": join(1, 1, 0, 2, 2, is_repair=True),
        "1-3": join(1, 1, 1, 2, 2, is_repair=True),
    }
    assert home.run.phase is RunPhase.REPAIRING
    home.train((1, 1), "1-2", "1-3")
    assert home.events() == [ReplicaLost("job", 1, 1, gpus(a=1, b=1))]


def test_a_second_loss_while_repairing_is_told_once_with_the_first(home: Home) -> None:
    home.start(1, gpus(a=2, b=1))
    home.train((1, 0), "1-1", "1-2", "1-3")
    home.end("1-1", -9)
    home.taken()
    home.train((1, 1), "1-2")
    home.end("1-3", -9)
    assert home.told() == {"1-2": join(1, 2, 0, 1, 1, is_repair=True)}
    home.train((1, 2), "1-2")
    assert home.events() == [ReplicaLost("job", 1, 2, gpus(a=1))]


def test_a_member_that_waits_is_given_a_new_membership_after_the_grace(pair: Home) -> None:
    pair.say("1-1", WAITING, (1, 0))
    assert pair.taken() == []
    pair.wait(OPTIONS.repair_grace_s)
    assert set(pair.told()) == {"1-1", "1-2"}
    pair.wait(1000)
    assert pair.taken() == []  # 1-1 has not answered yet: asking again would not help
    pair.train((1, 1), "1-1", "1-2")
    assert pair.events() == []  # nobody was lost


def test_a_member_that_waits_beside_one_that_finished_goes_on_alone(pair: Home) -> None:
    pair.end("1-2", 0)
    pair.say("1-1", WAITING, (1, 0))
    pair.wait(OPTIONS.repair_grace_s)
    assert pair.told() == {"1-1": join(1, 1, 0, 1, 1, is_repair=True)}
    pair.end("1-1", 0)
    assert pair.events() == [JobFinished("job", 1)]


def test_a_member_that_gathers_with_one_that_finished_goes_on_without_it(home: Home) -> None:
    home.start(1, gpus(a=3))
    home.train((1, 0), "1-1", "1-2", "1-3")
    home.end("1-1", -9)
    home.say("1-2", JOINING, (1, 1))
    home.taken()
    home.end("1-3", 0)  # it had finished the last step before it was told to join
    home.wait(OPTIONS.repair_grace_s)
    assert home.told() == {"1-2": join(1, 2, 0, 1, 1, is_repair=True)}


def test_a_resize_during_a_repair_waits_for_it(pair: Home) -> None:
    pair.end("1-2", -9)
    pair.taken()
    pair.resize(2, gpus(a=1, b=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    assert pair.told() == {}
    pair.train((1, 1), "1-1")
    assert [order.event for order in pair.orders if isinstance(order, Announce)] == [
        ReplicaLost("job", 1, 1, gpus(a=1))
    ]
    assert pair.told() == {"1-1": join(2, 0, 0, 2, 2), "2-3": join(2, 0, 1, 2, 2)}


# Losses in the middle of a switch


@pytest.fixture
def switch(pair: Home) -> Home:
    """1-1 stays, 1-2 leaves, 2-3 on c is new; all have been told."""
    pair.resize(2, gpus(a=1, c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.taken()
    return pair


def test_a_newcomer_lost_after_the_join_leaves_a_smaller_generation(switch: Home) -> None:
    switch.end("2-3", -9)
    assert switch.told() == {
        "1-1": join(2, 1, 0, 1, 1, is_repair=True),
        "1-2": Leave("job", 2, 1, "home:1"),
    }
    switch.train((2, 1), "1-1")
    switch.end("1-2", 0)
    assert switch.events() == [ReplicasReady("job", 2), ReplicaLost("job", 2, 1, gpus(a=1))]


def test_a_leaver_lost_before_the_switch_changes_nothing_but_the_membership(switch: Home) -> None:
    switch.end("1-2", -9)
    assert switch.told() == {
        "1-1": join(2, 1, 0, 2, 2, is_repair=True),
        "2-3": join(2, 1, 1, 2, 2, is_repair=True),
    }
    switch.train((2, 1), "1-1", "2-3")
    assert switch.events() == [ReplicasReady("job", 2)]


def test_a_leaver_lost_after_the_switch_does_not_matter(switch: Home) -> None:
    switch.train((2, 0), "1-1", "2-3")
    switch.end("1-2", -11)
    assert switch.taken() == [Announce(ReplicasReady("job", 2))]


def test_a_leaver_hands_over_when_the_only_stayer_is_lost(switch: Home) -> None:
    switch.end("1-1", -9)
    assert switch.told() == {
        "2-3": join(2, 1, 0, 1, 1, is_repair=True, takes_from_leaver=True),
        "1-2": Leave("job", 2, 1, "home:1", hands_over=True),
    }


def test_another_leaver_hands_over_when_the_first_one_is_lost(pair: Home) -> None:
    pair.resize(2, gpus(c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.taken()
    pair.end("1-1", -9)
    assert pair.told() == {
        "2-3": join(2, 1, 0, 1, 1, is_repair=True, takes_from_leaver=True),
        "1-2": Leave("job", 2, 1, "home:1", hands_over=True),
    }


def test_the_job_fails_when_the_last_state_is_lost_before_it_is_handed_over(pair: Home) -> None:
    pair.resize(2, gpus(c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.end("1-1", -9)
    pair.end("1-2", -9)
    assert pair.killed() == []  # it may have got the state just before
    pair.wait(OPTIONS.repair_grace_s)
    assert pair.killed() == [("2-3", 9)]
    pair.end("2-3", -9)
    assert pair.events() == [JobFailed("job", 2, "replica 1-1 on node a ended by signal 9", -9)]


def test_a_state_that_was_handed_over_just_before_the_loss_is_kept(pair: Home) -> None:
    pair.resize(2, gpus(c=2))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.say("2-4", READY, (2, 0), has_state=False)
    pair.end("1-2", 0)
    pair.end("1-1", -9)
    pair.taken()
    pair.say("2-4", WAITING, (2, 0), has_state=True)
    assert set(pair.told()) == {"2-3", "2-4"}


def test_a_handed_over_state_is_waited_for_when_the_leavers_have_gone(pair: Home) -> None:
    pair.resize(2, gpus(c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    for leaver in ("1-1", "1-2"):
        pair.say(leaver, LEAVING, (1, 0))
        pair.end(leaver, 0)
    pair.wait(OPTIONS.ready_timeout_s - 1)
    pair.taken()
    pair.train((2, 0), "2-3")
    assert pair.events() == [ReplicasReady("job", 2)]


def test_leavers_that_finished_instead_of_handing_over_end_the_job_well(pair: Home) -> None:
    pair.resize(2, gpus(c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    for leaver in ("1-1", "1-2"):
        pair.last[leaver] = here(leaver, LEAVING, (1, 0), has_finished=True)
        pair.end(leaver, 0)
    pair.taken()
    pair.wait(0.0)
    assert pair.killed() == []
    pair.wait(OPTIONS.repair_grace_s)  # and not until it is too late for newcomers: nobody has handed over anything
    assert pair.killed() == [("2-3", 9)]
    pair.end("2-3", -9)
    assert pair.events() == [JobFinished("job", 2)]


def test_leavers_that_finished_end_nobody_who_is_out_of_reach(pair: Home) -> None:
    """One of them may have handed over before, and the newcomer could not say so yet."""
    pair.resize(2, gpus(c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.do(pair.run.node_gone, "c")
    for leaver in ("1-1", "1-2"):
        pair.last[leaver] = here(leaver, LEAVING, (1, 0), has_finished=True)
        pair.end(leaver, 0)
    for _ in range(3):
        pair.wait(OPTIONS.repair_grace_s)
    assert pair.killed() == []
    pair.do(pair.run.node_back, "c", [here("2-3", TRAINING, (2, 0))])
    assert pair.events() == [ReplicasReady("job", 2)]
    pair.wait(OPTIONS.repair_grace_s)
    assert pair.taken() == []


def test_stayers_that_wait_in_the_middle_of_a_switch_are_given_a_new_membership(switch: Home) -> None:
    switch.say("1-1", WAITING, (1, 0))
    switch.wait(OPTIONS.repair_grace_s)
    assert switch.told()["1-1"] == join(2, 1, 0, 2, 2, is_repair=True)


def test_stayers_that_finished_instead_of_switching_end_the_job_well(switch: Home) -> None:
    switch.end("1-1", 0)
    switch.wait(OPTIONS.repair_grace_s)
    switch.wait(OPTIONS.repair_grace_s)
    assert switch.killed() == [("2-3", 9), ("1-2", 15)]
    switch.end("1-2", 0)
    switch.end("2-3", -9)
    assert switch.events() == [JobFinished("job", 2)]


def test_a_state_that_nobody_shows_after_a_loss_is_lost(switch: Home) -> None:
    switch.end("1-1", -9)
    switch.end("1-2", 0)  # it left as it was told before, and handed nothing over
    switch.taken()
    switch.wait(OPTIONS.ready_timeout_s)
    assert switch.killed() == [("2-3", 9)]
    switch.end("2-3", -9)
    assert switch.events() == [JobFailed("job", 2, "replica 1-1 on node a ended by signal 9", -9)]


def test_the_first_leaver_saves_when_nobody_is_left_to_leave_to(pair: Home) -> None:
    pair.resize(2, gpus(a=1))
    pair.taken()
    pair.end("1-1", -9)
    assert pair.taken() == [
        TellReplica("b", "1-2", Leave("job", 2, 1, "home:1", hands_over=True)),
        KillReplica("b", "1-2", 15),
    ]
    pair.end("1-2", 143)
    assert pair.events() == [JobStopped("job", 2)]  # and can go on from there


def test_a_leaver_that_hands_over_saves_when_all_newcomers_are_lost(pair: Home) -> None:
    pair.resize(2, gpus(c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.taken()
    pair.end("2-3", 1)
    assert pair.killed() == [("1-1", 15), ("1-2", 15)]
    pair.end("1-1", -9)
    assert pair.told() == {"1-2": Leave("job", 2, 1, "home:1", hands_over=True)}
    pair.end("1-2", 143)
    assert pair.events() == [JobStopped("job", 2)]


def test_a_job_whose_leavers_could_not_save_has_failed(pair: Home) -> None:
    pair.resize(2, gpus(c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.end("2-3", 1)
    pair.wait(OPTIONS.stop_timeout_s)
    pair.end("1-1", -9)
    pair.end("1-2", -9)
    assert pair.events() == [JobFailed("job", 2, "replica 2-3 on node c ended with exit code 1", 1)]


# Ends


def test_a_job_has_finished_when_all_members_ended_well(pair: Home) -> None:
    pair.end("1-1", 0)
    assert pair.taken() == []
    pair.end("1-2", 0)
    assert pair.taken() == [Announce(JobFinished("job", 1)), ForgetJob("a", 1), ForgetJob("b", 1)]
    assert pair.run.is_over
    assert pair.run.phase is RunPhase.ENDED


def test_a_resize_that_a_finished_job_can_no_longer_make_is_abandoned_first(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    pair.say("2-3", STARTING, (2, 0), has_state=False)
    pair.taken()
    pair.end("1-1", 0)
    pair.end("1-2", 0)
    assert pair.taken() == [KillReplica("a", "2-3", 9)]
    pair.end("2-3", -9)
    assert pair.events() == [GenerationAbandoned("job", 2, "the job is ending"), JobFinished("job", 1)]


def test_a_job_whose_replicas_all_ended_badly_fails_with_the_first_code(pair: Home) -> None:
    pair.end("1-1", 3)
    pair.end("1-2", 4)
    assert pair.events() == [JobFailed("job", 1, "replica 1-1 on node a ended with exit code 3", 3)]


def test_a_resize_of_a_job_that_has_ended_is_abandoned(pair: Home) -> None:
    pair.end("1-1", 0)
    pair.end("1-2", 0)
    pair.taken()
    pair.resize(2, gpus(a=1))
    assert pair.taken() == [Announce(GenerationAbandoned("job", 2, "the job has ended"))]


# Stops


def test_a_stop_lets_the_members_save_and_kills_the_newcomers(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    pair.say("2-3", STARTING, (2, 0), has_state=False)
    pair.taken()
    pair.stop(2)
    assert pair.killed() == [("1-1", 15), ("1-2", 15), ("2-3", 9)]
    assert pair.run.phase is RunPhase.STOPPING
    pair.end("2-3", -9)
    pair.end("1-1", 143)
    assert pair.events() == [GenerationAbandoned("job", 2, "the job was told to stop")]
    pair.end("1-2", 1)
    assert pair.events() == [JobStopped("job", 2)]


def test_those_that_do_not_leave_in_time_are_killed(pair: Home) -> None:
    pair.stop(1)
    pair.end("1-1", 143)
    pair.taken()
    pair.wait(OPTIONS.stop_timeout_s)
    assert pair.killed() == [("1-2", 9)]
    pair.wait(OPTIONS.stop_timeout_s)
    assert pair.killed() == [("1-2", 9)]  # perhaps the order was lost


@pytest.mark.parametrize("reason", [StopReason.CANCELLED, StopReason.SUPERSEDED])
def test_what_need_not_save_is_killed_at_once(pair: Home, reason: StopReason) -> None:
    pair.stop(1)
    pair.taken()
    pair.stop(1, reason)
    assert pair.killed() == [("1-1", 9), ("1-2", 9)]


def test_a_job_that_finishes_while_it_is_stopped_has_finished(pair: Home) -> None:
    pair.stop(1)
    pair.end("1-1", 0)
    pair.end("1-2", 0)
    assert pair.events() == [JobFinished("job", 1)]


def test_a_stop_in_the_middle_of_a_switch_ends_everybody(switch: Home) -> None:
    switch.stop(2)
    assert switch.killed() == [("1-1", 15), ("2-3", 15), ("1-2", 15)]
    for name in ("1-1", "1-2", "2-3"):
        switch.end(name, 143)
    assert switch.events() == [JobStopped("job", 2)]


def test_survivors_of_a_loss_gather_to_save_while_a_job_stops(home: Home) -> None:
    home.start(1, gpus(a=2, b=1))
    home.train((1, 0), "1-1", "1-2", "1-3")
    home.stop(1)
    home.taken()
    home.end("1-1", -9)
    assert home.taken() == [
        TellReplica("a", "1-2", join(1, 1, 0, 2, 2, is_repair=True)),
        TellReplica("b", "1-3", join(1, 1, 1, 2, 2, is_repair=True)),
    ]
    home.train((1, 1), "1-2", "1-3")
    home.end("1-2", 143)
    home.end("1-3", 143)
    assert home.events() == [JobStopped("job", 1)]


def test_a_newcomer_that_dies_of_the_stop_while_it_joins_is_done_without(switch: Home) -> None:
    switch.stop(2)
    switch.taken()
    switch.end("2-3", -15)
    assert switch.told()["1-1"] == join(2, 1, 0, 1, 1, is_repair=True)


def test_one_that_was_out_of_reach_is_asked_to_save_once_it_is_back(home: Home) -> None:
    home.start(1, gpus(a=1, b=1))
    home.train((1, 0), "1-1", "1-2")
    home.do(home.run.node_gone, "b")
    home.stop(1)
    home.end("1-1", -9)
    home.taken()
    home.do(home.run.node_back, "b", [home.last["1-2"]])
    assert home.taken() == [
        TellReplica("b", "1-2", join(1, 1, 0, 1, 1, is_repair=True)),
        KillReplica("b", "1-2", 15),
    ]


def test_the_request_to_save_is_given_again_where_it_may_be_lost(pair: Home) -> None:
    pair.stop(1)
    assert pair.killed() == [("1-1", 15), ("1-2", 15)]
    pair.wait(1.0)
    pair.do(pair.run.node_gone, "b")
    assert pair.killed() == []
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    assert pair.killed() == [("1-2", 15)]
    pair.recover()
    for node, name in (("a", "1-1"), ("b", "1-2")):
        pair.do(pair.run.node_back, node, [pair.last[name]])
    assert pair.killed() == [("1-1", 15), ("1-2", 15)]
    pair.wait(OPTIONS.stop_timeout_s)
    assert pair.killed() == [("1-1", 9), ("1-2", 9)]
    pair.do(pair.run.node_gone, "b")
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    assert pair.killed() == [("1-2", 9)]


def test_a_member_that_ends_without_saving_is_a_warning(pair: Home, caplog: pytest.LogCaptureFixture) -> None:
    pair.stop(1)
    pair.end("1-1", 143)
    pair.end("1-2", -9)
    assert pair.events() == [JobStopped("job", 1)]
    assert len(caplog.records) == 1
    assert "replica 1-2 on node b ended by signal 9: it was told to save and leave, and may have lost" in caplog.text


@pytest.mark.parametrize(("reason", "code"), [(StopReason.PREEMPTED, 143), (StopReason.CANCELLED, -9)])
def test_an_end_as_it_was_asked_for_is_no_warning(
    pair: Home, caplog: pytest.LogCaptureFixture, reason: StopReason, code: int
) -> None:
    pair.stop(1, reason)
    pair.end("1-1", code)
    pair.end("1-2", code)
    assert pair.events() == [JobStopped("job", 1)]
    assert not caplog.records


def test_what_is_forgotten_is_what_this_home_has_started(pair: Home) -> None:
    pair.do(pair.run.node_gone, "b")
    pair.resize(2, gpus(a=1))
    pair.stop(2, StopReason.CANCELLED)
    pair.wait(OPTIONS.node_timeout_s)
    pair.end("1-1", -9)
    assert ForgetJob("a", 2) in pair.taken()
    of_another_home = ReplicaHere("3-1", 3, 1, None)
    pair.do(pair.run.node_back, "b", [of_another_home])
    assert pair.taken() == [ForgetJob("b", 2)]


def test_those_that_have_saved_do_not_gather_again(pair: Home) -> None:
    pair.stop(1)
    pair.taken()
    pair.say("1-2", LEAVING, (1, 0))
    pair.end("1-1", -6)
    pair.wait(2 * OPTIONS.repair_grace_s)
    assert pair.taken() == []


def test_one_that_gathers_with_a_member_that_has_saved_gathers_alone(home: Home) -> None:
    home.start(1, gpus(a=3))
    home.train((1, 0), "1-1", "1-2", "1-3")
    home.stop(1)
    home.end("1-3", -9)
    home.say("1-1", JOINING, (1, 1))
    home.end("1-2", 143)
    home.taken()
    home.wait(OPTIONS.repair_grace_s)
    assert home.told() == {"1-1": join(1, 2, 0, 1, 1, is_repair=True)}


def test_no_repair_is_made_for_what_need_not_save(pair: Home) -> None:
    pair.stop(1, StopReason.CANCELLED)
    pair.taken()
    pair.end("1-1", -9)
    pair.say("1-2", WAITING, (1, 0))
    pair.wait(2 * OPTIONS.repair_grace_s)
    assert pair.taken() == []


def test_newcomers_that_wait_for_a_leaver_that_has_saved_instead_are_killed(pair: Home) -> None:
    pair.resize(2, gpus(c=1))
    pair.say("2-3", READY, (2, 0), has_state=False)
    pair.say("2-3", JOINING, (2, 0), has_state=False)
    pair.stop(2)
    pair.end("1-1", 143)
    pair.end("1-2", 0)
    pair.taken()
    pair.wait(OPTIONS.repair_grace_s)
    pair.wait(OPTIONS.repair_grace_s)
    assert pair.killed() == [("2-3", 9)]
    pair.end("2-3", -9)
    assert pair.events() == [JobStopped("job", 2)]


def test_every_stop_is_answered_even_if_nothing_runs(home: Home) -> None:
    home.stop(4)
    assert home.taken() == [Announce(JobStopped("job", 4))]


def test_a_stop_that_comes_after_the_finish_hears_of_it_again(pair: Home) -> None:
    pair.end("1-1", 0)
    pair.end("1-2", 0)
    pair.taken()
    pair.stop(1)
    assert pair.events() == [JobFinished("job", 1)]


def test_a_start_that_is_asked_for_again_after_its_end_hears_how_it_ended(pair: Home) -> None:
    pair.stop(1)
    pair.end("1-1", 143)
    pair.end("1-2", 143)
    pair.taken()
    pair.start(1, pair.run.saved().requested)
    assert pair.taken() == [Announce(JobStopped("job", 1))]


def test_what_was_never_started_need_not_be_waited_for(home: Home) -> None:
    home.do(home.run.node_gone, "a")
    home.start(1, gpus(a=1))
    home.stop(1)
    assert home.taken() == []  # a start before the loss of the node would be on its way
    home.do(home.run.node_back, "a", [])
    assert home.taken() == [Announce(JobStopped("job", 1)), ForgetJob("a", 1)]


# Restarts by checkpoint


def test_a_resize_that_is_not_in_place_saves_ends_and_starts(pair: Home) -> None:
    pair.resize(2, gpus(a=1), in_place=False)
    assert pair.killed() == [("1-1", 15), ("1-2", 15)]
    assert pair.run.phase is RunPhase.RESTARTING
    pair.say("1-2", LEAVING, (1, 0))
    pair.end("1-1", -6)
    pair.end("1-2", 143)
    assert pair.taken() == [SpawnOn("a", 2, (Seat("2-3", 0, 1, 1, False),))]
    pair.train((2, 0), "2-3")
    assert pair.events() == [ReplicasReady("job", 2)]


def test_a_loss_before_a_restart_does_not_fail_the_job(pair: Home) -> None:
    pair.end("1-2", -9)
    pair.resize(2, gpus(a=1), in_place=False)
    pair.taken()
    pair.end("1-1", 143)
    assert [type(order) for order in pair.taken()] == [SpawnOn]


def test_a_job_that_finishes_instead_of_restarting_has_finished(pair: Home) -> None:
    pair.resize(2, gpus(a=1), in_place=False)
    pair.end("1-1", 0)
    pair.end("1-2", 0)
    assert pair.events() == [GenerationAbandoned("job", 2, "the job has finished"), JobFinished("job", 1)]


def test_a_stop_while_restarting_starts_nothing(pair: Home) -> None:
    pair.resize(2, gpus(a=1), in_place=False)
    pair.stop(2)
    pair.end("1-1", 143)
    pair.end("1-2", 143)
    assert pair.events() == [GenerationAbandoned("job", 2, "the job was told to stop"), JobStopped("job", 2)]


# Requests that come twice or late


def test_a_request_that_was_heard_before_gives_no_orders(pair: Home) -> None:
    pair.start(1, gpus(a=1, b=1))
    pair.resize(2, gpus(a=2, b=1))
    pair.taken()
    pair.resize(2, gpus(a=2, b=1))
    assert pair.taken() == []


def test_a_stale_generation_is_refused(pair: Home) -> None:
    pair.resize(5, gpus(a=1, b=2))
    with pytest.raises(StaleGeneration):
        pair.resize(4, gpus(a=1))
    with pytest.raises(StaleGeneration):
        pair.start(5, gpus(a=1))
    with pytest.raises(StaleGeneration):
        pair.stop(4)


def test_the_number_of_a_stop_is_not_used_again(pair: Home) -> None:
    pair.stop(2)
    with pytest.raises(StaleGeneration):
        pair.start(2, gpus(a=1, b=1))


def test_a_job_cannot_be_resized_to_nothing(pair: Home) -> None:
    with pytest.raises(InvalidSpec, match="allocation"):
        pair.resize(2, Allocation())


# Nodes


def test_the_replicas_of_a_node_out_of_reach_are_not_lost_at_once(pair: Home) -> None:
    pair.do(pair.run.node_gone, "b")
    pair.wait(OPTIONS.node_timeout_s - 1)
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    pair.wait(1000)
    assert pair.taken() == []


def test_the_replicas_of_a_lost_node_are_lost(pair: Home) -> None:
    pair.do(pair.run.node_gone, "b")
    pair.wait(OPTIONS.node_timeout_s)
    assert pair.told() == {"1-1": join(1, 1, 0, 1, 1, is_repair=True)}


def test_a_replica_that_was_given_up_is_killed_when_its_node_comes_back(pair: Home) -> None:
    pair.do(pair.run.node_gone, "b")
    pair.wait(OPTIONS.node_timeout_s)
    pair.taken()
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    assert pair.taken() == [KillReplica("b", "1-2", 9)]


def test_a_job_that_lost_all_of_its_nodes_has_stopped_and_not_failed(pair: Home) -> None:
    pair.do(pair.run.node_gone, "a")
    pair.do(pair.run.node_gone, "b")
    pair.wait(OPTIONS.node_timeout_s)
    assert pair.taken() == [Announce(JobStopped("job", 1))]
    pair.do(pair.run.node_back, "a", [pair.last["1-1"]])
    assert pair.taken() == [KillReplica("a", "1-1", 9), ForgetJob("a", 1)]


def test_a_replica_that_its_node_no_longer_knows_is_lost(pair: Home) -> None:
    pair.do(pair.run.node_gone, "b")
    pair.do(pair.run.node_back, "b", [])
    assert pair.told() == {"1-1": join(1, 1, 0, 1, 1, is_repair=True)}


def test_nothing_is_ordered_for_a_node_out_of_reach_before_it_is_back(home: Home) -> None:
    home.do(home.run.node_gone, "b")
    home.start(1, gpus(a=1, b=1))
    assert [order.node for order in home.taken() if isinstance(order, SpawnOn)] == ["a"]
    home.do(home.run.node_back, "b", [])
    assert home.taken() == [SpawnOn("b", 1, (Seat("1-2", 1, 2, 2, False),))]


def test_a_start_that_was_lost_on_the_way_is_ordered_again(home: Home) -> None:
    home.start(1, gpus(a=1))
    spawn = home.taken()
    home.do(home.run.node_gone, "a")
    home.do(home.run.node_back, "a", [])
    assert home.taken() == spawn


def test_an_instruction_that_may_be_lost_is_told_again(pair: Home) -> None:
    pair.end("1-1", -9)
    told = pair.taken()
    pair.do(pair.run.node_gone, "b")
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    assert pair.taken() == told


# Recovery of the home


def test_a_recovered_run_orders_nothing_before_its_nodes_are_back(pair: Home) -> None:
    pair.resize(2, gpus(a=2, b=1))
    pair.taken()
    pair.recover()
    pair.wait(1)
    assert pair.taken() == []
    assert pair.run.nodes == {"a", "b"}
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    assert pair.taken() == []
    pair.do(pair.run.node_back, "a", [pair.last["1-1"]])
    assert pair.taken() == [SpawnOn("a", 2, (Seat("2-3", 2, 3, 2, True),))]


def test_a_recovered_home_learns_what_ended_while_it_was_away(pair: Home) -> None:
    pair.recover()
    pair.do(pair.run.node_back, "a", [pair.last["1-1"]])
    pair.do(pair.run.node_back, "b", [here("1-2", TRAINING, (1, 0), code=-9)])
    assert pair.told() == {"1-1": join(1, 1, 0, 1, 1, is_repair=True)}


def test_a_recovered_home_gives_the_newest_signal_again(pair: Home) -> None:
    pair.stop(1)
    pair.taken()
    pair.recover()
    pair.do(pair.run.node_back, "a", [pair.last["1-1"]])
    assert pair.killed() == [("1-1", 15)]
    pair.stop(1, StopReason.CANCELLED)
    pair.recover()
    pair.taken()
    pair.do(pair.run.node_back, "a", [pair.last["1-1"]])
    assert pair.killed() == [("1-1", 9)]


def test_replicas_that_nobody_knows_are_killed(pair: Home) -> None:
    pair.recover()
    pair.do(pair.run.node_back, "a", [pair.last["1-1"], here("1-9", TRAINING, (1, 0))])
    assert pair.taken() == [KillReplica("a", "1-9", 9)]


def test_replicas_that_a_later_home_has_started_are_let_be(pair: Home) -> None:
    pair.do(pair.run.status, "a", here("9-1", TRAINING, (9, 0)))
    assert pair.taken() == []


def test_members_that_were_gathering_in_a_lost_store_gather_in_the_new_one(pair: Home) -> None:
    pair.end("1-1", -9)
    pair.taken()
    pair.recover()
    pair.run.store = "home:2"
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    assert pair.told() == {"1-2": Join("job", 1, 2, 0, 1, 1, "home:2", is_repair=True)}


def test_members_that_train_need_no_store(pair: Home) -> None:
    pair.recover()
    pair.run.store = "home:2"
    pair.do(pair.run.node_back, "a", [pair.last["1-1"]])
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    assert pair.taken() == []


def test_who_begins_to_watch_hears_what_still_holds(pair: Home) -> None:
    pair.end("1-2", -9)
    pair.train((1, 1), "1-1")
    pair.resize(2, gpus(a=2))
    pair.end("2-3", 1)
    pair.recover()
    assert pair.run.standing() == [
        ReplicasReady("job", 1),
        ReplicaLost("job", 1, 1, gpus(a=1)),
        GenerationAbandoned("job", 2, "replica 2-3 on node a ended with exit code 1 before it was ready"),
    ]
    pair.end("1-1", 0)
    assert pair.run.standing() == [JobFinished("job", 1)]


def test_the_description_says_who_trains_and_how_far(pair: Home) -> None:
    status = pair.run.description()
    assert (status.generation, status.membership, status.issued_generation) == (1, 0, 1)
    assert (status.phase, status.allocation, status.step) == (RunPhase.TRAINING, gpus(a=1, b=1), 5)
    assert [replica.replica for replica in status.replicas] == ["1-1", "1-2"]
    assert pair.run.description(step=9).step == 9


def test_a_job_whose_machine_was_restarted_has_stopped(home: Home) -> None:
    home.start(1, gpus(a=2))
    home.say("1-1", STARTING, (1, 0))  # of 1-2 nobody has heard yet
    home.recover()
    home.taken()
    home.do(home.run.node_lost, "a")
    assert home.taken() == [Announce(JobStopped("job", 1)), ForgetJob("a", 1)]
    assert home.run.is_over
    assert home.run.standing() == [JobStopped("job", 1)]


def test_survivors_of_a_machine_that_was_restarted_train_on(pair: Home) -> None:
    pair.recover()
    pair.do(pair.run.node_lost, "a")
    assert not pair.run.is_over
    pair.taken()
    pair.do(pair.run.node_back, "b", [pair.last["1-2"]])
    assert pair.told()["1-2"].membership == 1


def test_a_failure_has_the_last_words_of_the_replica_that_failed_first(home: Home) -> None:
    home.start(1, gpus(a=2))
    home.train((1, 0), "1-1", "1-2")
    home.taken()
    for name, words in (("1-2", "disk full"), ("1-1", "connection lost")):
        home.do(home.run.status, "a", ReplicaHere(name, 1, 1, None, 1, f"/logs/{name}", words))
    reason = "replica 1-2 on node a ended with exit code 1. Last lines of /logs/1-2: disk full"
    assert home.events() == [JobFailed("job", 1, reason, 1)]
    home.recover()
    assert home.run.standing() == [JobFailed("job", 1, reason, 1)]  # whoever asks late hears it, too


def test_a_resize_that_fails_says_what_its_newcomer_said(home: Home) -> None:
    home.start(1, gpus(a=1))
    home.train((1, 0), "1-1")
    home.resize(2, gpus(a=2))
    home.taken()
    home.do(home.run.status, "a", ReplicaHere("2-2", 2, 1, None, 1, "/logs/2-2", "no data"))
    (event,) = home.events()
    assert event.reason == (
        "replica 2-2 on node a ended with exit code 1 before it was ready. Last lines of /logs/2-2: no data"
    )


def test_one_that_could_not_even_be_started_has_no_log_to_quote(home: Home) -> None:
    home.start(1, gpus(a=1))
    home.taken()
    home.do(home.run.status, "a", ReplicaHere("1-1", 1, 0, None, 255, "", "Its node refuses it: no."))
    assert home.events()[0].reason.endswith("ended with exit code 255. Its node refuses it: no.")
