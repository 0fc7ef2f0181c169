"""No policy acts on what nobody has observed: the truth about what never happened may be anything.

Runs are repeated in worlds whose truth differs only where the first run never was; their logs must be the same. Where
it differs in one place, or from one epoch on, they must be the same until a job has been there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from itertools import takewhile
from math import nextafter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.scenes import EQUAL_SHARE, run_jobs

from pollux.applications import PassTime
from pollux.core import Cluster, GradientStats, Snapshot
from pollux.policies import Policy, registry
from pollux.scheduler import Record
from pollux.simulator.truth import Placement, Truth, truths_built_in
from pollux.simulator.workload import WorkloadJob
from pollux.simulator.world import World

BLIND = tuple(name for name in registry.BUILT_IN if not registry.policy_class(name).needs_oracle)
SEEING = tuple(name for name in registry.BUILT_IN if registry.policy_class(name).needs_oracle)
CLUSTER = Cluster.uniform(2, 2, "t4")
JOBS = (
    WorkloadJob("a", 0, "ncf", 2, 2048),
    WorkloadJob("b", 10, "ncf", 3, 4096),
    WorkloadJob("c", 65, "cifar10", 2, 512),
    WorkloadJob("d", 300, "ncf", 1, 1024),
    WorkloadJob("e", 310, "ncf", 4, 8192),
)
TRUTHS = truths_built_in(["cifar10", "ncf"])
Place = tuple[str, Placement, int]
Epoch = tuple[str, int]


class Changed:
    """A truth that differs from another one by a factor where `factor_at` says so, and that notes who asks for what."""

    def __init__(self, truth: Truth, factor_at: Mapping[Place, float], elsewhere: float, visited: dict[Place, float]):
        self.name, self.limits, self.epochs, self.gpu_types = truth.name, truth.limits, truth.epochs, truth.gpu_types
        self.gradient, self.epoch_end, self.iterations = truth.gradient, truth.epoch_end, truth.iterations
        self.world: World | None = None
        self._truth, self._factor_at, self._elsewhere, self._visited = truth, factor_at, elsewhere, visited

    def passes(self, gpu_type: str, placement: Placement, per_gpu_batch_size: int) -> PassTime:
        place = self.name, placement, per_gpu_batch_size
        assert self.world is not None
        self._visited.setdefault(place, self.world.now)
        factor = self._factor_at.get(place, self._elsewhere)
        grad_time_s, iteration_time_s = self._truth.passes(gpu_type, placement, per_gpu_batch_size)
        return PassTime(grad_time_s * factor, iteration_time_s * factor)


def run(
    policy: str, factor_at: Mapping[Place, float], elsewhere: float = 1.0
) -> tuple[list[Record], dict[Place, float]]:
    """The log of a run, and when each place was first visited."""
    visited: dict[Place, float] = {}
    truths = {name: Changed(truth, factor_at, elsewhere, visited) for name, truth in TRUTHS.items()}
    world = run_jobs(policy, JOBS, truths, CLUSTER, prepare=lambda world: introduce(truths, world))
    return list(world.scheduler.log.records()), visited


def introduce(truths: Mapping[str, Changed | ChangedLater], world: World) -> None:
    for truth in truths.values():
        truth.world = world


@cache
def base(policy: str) -> tuple[list[Record], dict[Place, float]]:
    return run(policy, {})


@pytest.mark.parametrize("policy", [*BLIND, EQUAL_SHARE])
@settings(max_examples=6)
@given(factor=st.floats(0.05, 20.0))
def test_what_was_never_visited_makes_no_difference(policy, factor):
    log, visited = base(policy)
    other, also_visited = run(policy, dict.fromkeys(visited, 1.0), elsewhere=factor)
    assert also_visited == visited
    assert other == log


@pytest.mark.parametrize("policy", [*BLIND, EQUAL_SHARE])
@settings(max_examples=15)
@given(which=st.integers(0), factor=st.sampled_from([0.2, 0.9, 1.1, 5.0]))
def test_what_differs_in_one_place_makes_no_difference_before_somebody_was_there(policy, which, factor):
    log, visited = base(policy)
    place = sorted(visited)[which % len(visited)]
    other, _ = run(policy, {place: factor})
    assert until(other, visited[place]) == until(log, visited[place])


@pytest.mark.parametrize("policy", [*BLIND, EQUAL_SHARE])
def test_what_was_visited_does_make_a_difference(policy):
    log, visited = base(policy)
    assert run(policy, dict.fromkeys(visited, 1.01))[0] != log


class ChangedLater:
    """A truth whose gradients and epoch ends differ from an epoch on; noted is when any job first is in each epoch.

    The length of the whole run stays: it is declared to whoever reads reports, not found out.
    """

    def __init__(self, truth: Truth, from_epoch: int, noise: float, bend: float, begun: dict[Epoch, float]) -> None:
        self.name, self.limits, self.epochs, self.gpu_types = truth.name, truth.limits, truth.epochs, truth.gpu_types
        self.passes, self.iterations = truth.passes, truth.iterations
        self.world: World | None = None
        self._truth, self._from, self._noise, self._bend, self._begun = truth, from_epoch, noise, bend, begun

    def gradient(self, epoch: int, batch_size: int) -> GradientStats:
        found = self._truth.gradient(epoch, batch_size)
        return found if epoch < self._from else GradientStats(found.sqr, found.var * self._noise)

    def epoch_end(self, epoch: int) -> float:
        self._note()
        if epoch < self._from or epoch == self.epochs - 1:
            return self._truth.epoch_end(epoch)
        start = self._truth.epoch_end(self._from - 1) if self._from else 0.0
        length = self._truth.epoch_end(self.epochs - 1) - start
        return start + length * ((self._truth.epoch_end(epoch) - start) / length) ** self._bend

    def _note(self) -> None:
        """Every job that enters an epoch asks for its end at once. Where it is, it says itself, not its question."""
        assert self.world is not None
        for training in self.world._trainings.values():
            if training.truth.name == self.name and not training.is_done:
                self._begun.setdefault((self.name, training.epoch), self.world.now)


def run_later(policy: str, epoch: Epoch, noise: float, bend: float) -> tuple[list[Record], dict[Epoch, float]]:
    """The log of a run whose truth differs from that epoch on, and when each epoch began for the first job in it."""
    begun: dict[Epoch, float] = {}
    name, number = epoch
    truths = {
        key: ChangedLater(truth, number if key == name else truth.epochs, noise, bend, begun)
        for key, truth in TRUTHS.items()
    }
    world = run_jobs(policy, JOBS, truths, CLUSTER, prepare=lambda world: introduce(truths, world))
    return list(world.scheduler.log.records()), begun


@cache
def base_later(policy: str) -> tuple[list[Record], dict[Epoch, float]]:
    return run_later(policy, ("none of them", 0), noise=1.0, bend=1.0)


@pytest.mark.parametrize("policy", [*BLIND, EQUAL_SHARE])
@settings(max_examples=15)
@given(which=st.integers(0), noise=st.sampled_from([0.0, 0.1, 1.0, 10.0]), bend=st.sampled_from([0.5, 1.0, 3.0]))
def test_what_differs_in_later_epochs_makes_no_difference_before_somebody_is_in_one(policy, which, noise, bend):
    log, begun = base_later(policy)
    epoch = sorted(begun)[which % len(begun)]
    other, also_begun = run_later(policy, epoch, noise, bend)
    assert also_begun[epoch] == begun[epoch]
    just_before = nextafter(begun[epoch], 0.0)  # a report of the very moment may tell of the new epoch
    assert until(other, just_before) == until(log, just_before)


@pytest.mark.parametrize("policy", [*BLIND, EQUAL_SHARE])
def test_what_differs_in_epochs_that_were_reached_does_make_a_difference(policy):
    log, begun = base_later(policy)
    assert {number for name, number in begun if name == "ncf"} == set(range(TRUTHS["ncf"].epochs))
    assert run_later(policy, ("ncf", 5), noise=0.1, bend=1.0)[0] != log


def until(log: list[Record], time_s: float) -> list[Record]:
    """What happened up to then, the round of that very moment included."""
    return list(takewhile(lambda record: record.time_s <= time_s, log))


@pytest.mark.parametrize("policy", [*BLIND, EQUAL_SHARE])
def test_a_policy_that_does_not_ask_for_the_truth_never_sees_it(policy):
    snapshots = seen_by(policy)
    assert len(snapshots) > 5
    assert all(snapshot.oracle is None for snapshot in snapshots)


@pytest.mark.parametrize("policy", SEEING)
def test_a_policy_that_asks_for_the_truth_gets_what_it_asked_for_and_no_more(policy):
    asked = registry.policy_class(policy).needs_oracle
    for snapshot in seen_by(policy):
        assert snapshot.oracle is not None
        assert snapshot.oracle.keys() == snapshot.jobs.keys()
        for known in snapshot.oracle.values():
            told = {field.name for field in fields(known) if getattr(known, field.name)}
            assert told == set(asked)


def test_models_are_sent_only_to_those_who_read_them():
    assert all(job.model is None for snapshot in seen_by("tiresias") for job in snapshot.jobs.values())
    assert any(job.model is not None for snapshot in seen_by(EQUAL_SHARE) for job in snapshot.jobs.values())


def seen_by(name: str) -> list[Snapshot]:
    """All that a policy is shown during a run."""
    policy, snapshots = registry.make(name), []
    plan = policy.plan

    def watched(snapshot, seed):
        snapshots.append(snapshot)
        return plan(snapshot, seed)

    _put(policy, watched)
    run_jobs(policy, JOBS, TRUTHS, CLUSTER)
    return snapshots


def _put(policy: Policy, watched: object) -> None:
    policy.plan = watched  # type: ignore[method-assign, assignment]
