"""Tables that are cut short: nobody is given what they leave out, bounds hold for it, who may want it is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.policies.pollux.brute_force import best_sum, sum_of
from tests.policies.pollux.small_rounds import small_round

from pollux.goodput.numerics import FloatArray
from pollux.policies import registry
from pollux.policies.pollux import reach
from pollux.policies.pollux.solver import Budget, Choices, Priced, Solution
from pollux.simulator.rounds import Rounds

POWERS = (-10.0, -1.0)
"""Those with a highest value, which is 0."""


def tables(choices: Choices) -> list[FloatArray]:
    """[C, K + 1] of each job."""
    parts = np.split(choices.value, choices.first[1:-1])
    return [part.reshape(choices.num_classes, -1) for part in parts]


def cut(choices: Choices, most: FloatArray) -> Choices:
    """With values up to so many GPUs [J], but at least of what is held."""
    whole = tables(choices)
    held = choices.held.matrix(choices.num_nodes).sum(axis=1)
    length = [min(table.shape[1], max(int(most[job]), int(held[job])) + 1) for job, table in enumerate(whole)]
    parts = [table[:, :end].ravel() for table, end in zip(whole, length, strict=True)]
    is_cut = np.array([end < table.shape[1] for table, end in zip(whole, length, strict=True)]) & ~choices.pinned
    return replace(
        choices,
        first=np.concatenate([[0], np.cumsum([len(part) for part in parts])]),
        value=np.concatenate(parts),
        beyond=np.where(is_cut, 0.0, -np.inf),
    )


def solved(choices: Choices) -> Solution:
    return Priced().solve(choices, Budget(), np.random.default_rng(0))


@pytest.mark.parametrize("p", POWERS)
def test_no_plan_with_what_was_left_out_exceeds_the_bound(p):
    for seed in range(80):
        whole = small_round(seed, p)
        part = cut(whole, np.random.default_rng(seed).integers(1, 4, whole.num_jobs))
        found = solved(part)
        assert found.value == pytest.approx(sum_of(part, found.rows), rel=1e-12), seed
        assert found.bound >= best_sum(whole) - 1e-12 * abs(found.value), seed
        assert set(found.cut_short.tolist()) <= set(np.flatnonzero(part.beyond > -np.inf).tolist()), seed


@pytest.mark.parametrize("p", POWERS)
def test_whoever_is_told_of_nobody_has_a_plan_as_good_as_any(p):
    """As the policy asks: twice as far for those who may want more, until there are none."""
    for seed in range(80):
        whole = small_round(seed, p)
        most = np.ones(whole.num_jobs, dtype=np.int64)
        while len((found := solved(cut(whole, most))).cut_short):
            most[found.cut_short] *= 2
        uncut = solved(whole)
        assert found.bound >= uncut.value - 1e-12 * abs(uncut.value), seed
        assert found.value >= uncut.value - (found.bound - found.value) - 1e-12 * abs(uncut.value), seed


@pytest.mark.parametrize("shares", [1, 4])
def test_rounds_of_many_jobs_are_planned_as_well_as_if_nothing_was_cut(monkeypatch, shares):
    monkeypatch.setattr(reach, "SHARES", shares)
    rounds = Rounds(1024, 400)
    whole, part = registry.make("pollux", {}), registry.make("pollux", {})
    for number in range(4):
        monkeypatch.setattr(reach, "MANY_JOBS", 1 << 30)
        whole.plan(rounds.snapshot, number)
        monkeypatch.setattr(reach, "MANY_JOBS", 0)
        plan = part.plan(rounds.snapshot, number)
        told, found = whole.stats(), part.stats()
        assert found["bound"] >= told["fitness"] * (1.0 - 1e-12)
        assert found["fitness"] >= told["fitness"] * (1.0 - 1e-3)
        rounds.advance(plan)


def test_no_more_is_worked_out_than_could_be_wanted(monkeypatch):
    monkeypatch.setattr(reach, "MANY_JOBS", 100)
    rounds, policy = Rounds(256, 200), registry.make("pollux", {})
    for number in range(3):
        rounds.advance(policy.plan(rounds.snapshot, number))
    (roster,) = policy._rosters.values()
    held = max(job.allocation.num_gpus for job in rounds.snapshot.jobs.values())
    assert roster._length.max() <= max(4 * reach.SHARES, held)
