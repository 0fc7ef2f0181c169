"""The plan of faults: the same for the same seed, every fault in its turn, and names that people can choose."""

from __future__ import annotations

from itertools import islice

import pytest

from pollux.errors import UnknownName
from pollux.testing.chaos.plan import chosen, rounds


def test_the_same_seed_gives_the_same_plan_and_another_one_another():
    def plan(seed: int) -> list[object]:
        return list(islice(rounds(seed, chosen(None)), 50))

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


def test_every_fault_falls_once_before_any_falls_again():
    faults = chosen(None)
    struck = (strike.fault.name for one in rounds(3, faults) for strike in one.strikes)
    for _ in range(3):
        assert sorted(islice(struck, len(faults))) == sorted(fault.name for fault in faults)


def test_a_round_ends_the_service_at_most_once():
    for one in islice(rounds(4, chosen(None)), 200):
        assert sum(strike.fault.ends_service for strike in one.strikes) <= 1


def test_faults_are_chosen_by_name_and_each_says_what_it_does():
    assert [fault.name for fault in chosen(["kill-keeper"])] == ["kill-keeper"]
    with pytest.raises(UnknownName, match="kill-keper"):
        chosen(["kill-keper"])
    assert all(fault.sentence.endswith(".") for fault in chosen(None))
