"""How members agree on a step, and what one makes of the cards of the others. With real processes: tests/elastic."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.agent.agreement import StepAgreement
from pollux.agent.environment import Environment
from pollux.agent.membership import Membership
from pollux.agent.rendezvous import Card, Rendezvous
from pollux.agent.transfer import take
from pollux.core import JobId
from pollux.wire.replicas import Join, Leave

PATIENCE_S = 30.0


class Store:
    """What of a TCPStore is used here."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> str:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


def join(rank: int = 0, size: int = 2, **changes: Any) -> Join:
    return Join(JobId("j"), 2, changes.pop("membership", 0), rank, size, 1, "127.0.0.1:1", **changes)


@settings(max_examples=300)
@given(data=st.data())
def test_all_members_switch_after_the_same_step_whenever_they_hear_of_it(data: st.DataObject) -> None:
    """A step is finished by all or by none: nobody is more than one boundary ahead of another."""
    size = data.draw(st.integers(2, 5))
    store = Store()
    members = [StepAgreement(store, join(rank, size), rank, size) for rank in range(size)]
    hears_at = [data.draw(st.integers(1, 6)) for _ in range(size)]
    switched: dict[int, int] = {}
    for step in range(1, 20):
        for rank in data.draw(st.permutations(range(size))):
            if step >= hears_at[rank] and members[rank].is_due(step):
                switched[rank] = step
        if switched:
            break
    assert len(switched) == size
    assert len(set(switched.values())) == 1


def test_a_member_that_told_at_once_saves_the_others_a_step() -> None:
    store = Store()
    first, second = (StepAgreement(store, join(rank), rank, 2) for rank in (0, 1))
    StepAgreement(store, join(1), 1, 2).tell()
    assert not first.is_due(7)
    assert not second.is_due(7)
    assert first.is_due(8)
    assert second.is_due(8)


def test_a_step_that_could_not_be_named_is_not_switched_at() -> None:
    class Broken(Store):
        def set(self, key: str, value: str) -> None:
            if key.endswith("/step"):
                raise RuntimeError("gone")
            super().set(key, value)

    first = StepAgreement(Broken(), join(0, 1), 0, 1)
    with pytest.raises(RuntimeError, match="gone"):
        first.is_due(3)
    with pytest.raises(RuntimeError, match="gone"):
        first.is_due(4)


class Held:
    step, is_inside = 10, True

    def small(self) -> dict[str, Any]:
        return {"small": True}

    def full(self) -> dict[str, Any]:
        return {"full": True}


class Told:
    """What of a link is used here."""

    newest: Any = None


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_leaver_gives_on_when_those_who_take_its_state_change(store: dist.TCPStore, monkeypatch) -> None:
    """One of them was lost: another one may be taking the state just then, or know of this offer alone."""
    address = f"127.0.0.1:{store.port}"
    told, begun, goes_on = Told(), threading.Event(), threading.Event()

    class Slow(Held):
        def full(self) -> dict[str, Any]:
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            return {"full": True}

    leaver = Membership(Environment())
    leaver._link = told  # type: ignore[assignment]
    leaves = [Leave(JobId("j"), 2, membership, address, hands_over=True) for membership in (0, 1)]
    told.newest = leaves[0]
    with ThreadPoolExecutor() as threads:
        left = threads.submit(leaver._hand_over, leaves[0], Slow())
        member = Rendezvous(address)
        offered = member.await_offer(join(), lambda: False)
        assert offered is not None
        state = threads.submit(take, offered.address, offered.key, full=True)
        assert begun.wait(PATIENCE_S)
        assert store.delete_key("2/offer")
        told.newest = leaves[1]
        again = member.await_offer(join(membership=1), left.done)
        goes_on.set()
        assert state.result(PATIENCE_S) == {"full": True}
        assert again == offered
        member.tell_taken(join(membership=1))
        assert left.result(PATIENCE_S)


@pytest.fixture(name="member")
def a_member(monkeypatch: pytest.MonkeyPatch) -> Membership:
    """Alone, and told from whom it would take a state."""
    made = Membership(Environment())
    monkeypatch.setattr(Membership, "_take_from", lambda _, source, join, full: {"from": source.rank, "full": full})
    return made


def card(rank: int, step: int = 10, **changes: Any) -> Card:
    return Card(rank, step, changes.pop("has_state", True), f"h:{rank + 1}", "key", **changes)


def taken(member: Membership, told: Join, cards: list[Card], offered: Card | None = None) -> Any:
    return member._take(told, cards, offered, Held())


def test_members_keep_their_state_in_a_planned_change(member: Membership) -> None:
    cards = [card(0), card(1), card(2, 0, has_state=False)]
    assert taken(member, join(0, 3), cards) == (None, False)
    assert taken(member, join(1, 3), cards) == (None, False)


def test_newcomers_are_shared_among_those_who_have_the_state(member: Membership) -> None:
    cards = [card(0), card(1), *(card(rank, 0, has_state=False) for rank in (2, 3))]
    sources = [taken(member, join(rank, 4), cards)[0]["from"] for rank in (2, 3)]
    assert sources == [0, 1]


def test_who_is_a_step_behind_takes_all_of_the_state(member: Membership) -> None:
    cards = [card(0, 9), card(1, 10)]
    repair = {"membership": 1, "is_repair": True}
    assert taken(member, join(0, **repair), cards) == ({"from": 1, "full": True}, True)
    assert taken(member, join(1, **repair), cards) == ({"small": True}, False)


def test_of_those_with_as_many_steps_the_one_with_the_most_sums_is_furthest(member: Membership) -> None:
    cards = [card(0, 7, sums=3), card(1, 8, sums=1), card(2, 8, sums=2)]
    repair = {"membership": 1, "is_repair": True}
    assert taken(member, join(0, 3, **repair), cards) == ({"from": 2, "full": True}, True)
    assert taken(member, join(1, 3, **repair), cards) == ({"from": 2, "full": False}, False)


def test_after_a_loss_those_who_are_equally_far_agree_on_what_they_may_differ_in(member: Membership) -> None:
    cards = [card(0, is_inside=True), card(1, is_inside=False)]  # the second has left its loop: it is further
    repair = {"membership": 1, "is_repair": True}
    assert taken(member, join(0, **repair), cards) == ({"from": 1, "full": False}, False)


def test_a_sum_that_one_member_has_seen_is_handed_to_those_who_have_not(member: Membership) -> None:
    cards = [card(0, sums=3, last_sum=(1.0,)), card(1, sums=4, last_sum=(2.0, 5.0))]
    taken(member, join(0, membership=1, is_repair=True), cards)
    assert member._missed_sum == [2.0, 5.0]
    taken(member, join(1, membership=1, is_repair=True), cards)
    assert member._missed_sum is None


def test_a_newcomer_counts_sums_like_the_others(member: Membership) -> None:
    cards = [card(0, sums=3, last_sum=(1.0,)), card(1, 0, has_state=False)]
    taken(member, join(1), cards)
    assert (member._sums, member._last_sum) == (3, [1.0])


def test_nobody_joins_between_two_loops_after_a_loss(member: Membership) -> None:
    cards = [card(0, is_inside=False), card(1, 0, has_state=False)]
    with pytest.raises(SystemExit, match="the next resize brings others"):
        taken(member, join(1, membership=1, is_repair=True), cards)


def test_replicas_that_have_all_just_started_take_nothing(member: Membership) -> None:
    cards = [card(rank, 0, has_state=False) for rank in (0, 1)]
    assert taken(member, join(0), cards) == (None, False)


def test_alone_sums_are_the_replicas_own(member: Membership) -> None:
    assert member.sum(torch.tensor([2.0])).tolist() == [2.0]
    assert not member.is_pending
    assert not member.is_loss(RuntimeError("gloo/transport/tcp/pair.cc:537 Connection reset by peer"))
