"""Castor: who goes first, what must pay, and that nobody starves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import (
    Allocation,
    Cluster,
    FrozenMap,
    GradientStats,
    Job,
    JobModel,
    Phase,
    Plan,
    Progress,
    Snapshot,
)
from pollux.errors import InvalidSpec
from pollux.policies import make
from pollux.policies.castor.policy import Castor, packed_sizes
from pollux.policies.castor.pricing import balanced, wanted
from pollux.testing.snapshots import MODEL, job, snapshot

ONE = Cluster.uniform(1, 4)
TWO = Cluster.uniform(2, 4)
LATER_S = 600.0
"""Long enough after the first start for a job to be moved."""


def measured(left: float | None = 1000.0, noise: float = 1000.0, delay_s: float = 30.0, observed: int = 16) -> JobModel:
    fits = {kind: replace(fit, max_gpus_observed=observed) for kind, fit in MODEL.throughput.items()}
    progress = None if left is None else Progress(10.0, 10.0 + left)
    return replace(
        MODEL,
        throughput=FrozenMap(fits),
        gradient=GradientStats(1.0, noise),
        progress=progress,
        realloc_delay_s=delay_s,
    )


def known(name: str, sequence: int = 0, model: JobModel | None = None, **facts: object) -> Job:
    found = job(name, sequence, **facts)
    started = 0.0 if found.allocation else None
    return replace(found, model=model or measured(), first_started_at_s=started)


def counts(moment: Snapshot, **options: object) -> dict[str, int]:
    plan = make("castor", options).plan(moment, 0)
    plan.check(moment)
    return {str(job_id): allocation.num_gpus for job_id, allocation in plan.allocations.items()}


def test_of_two_that_want_all_the_one_with_less_left_gets_more() -> None:
    short, long = known("short", model=measured(100.0)), known("long", 1, model=measured(10_000.0))
    found = counts(snapshot(ONE, short, long, time_s=LATER_S), rank_exponent=1.0)
    assert found["short"] > found.get("long", 0)


def test_without_ranks_length_does_not_matter() -> None:
    jobs = known("a", model=measured(100.0)), known("b", 1, model=measured(10_000.0))
    swapped = known("a", model=measured(10_000.0)), known("b", 1, model=measured(100.0))
    of = [counts(snapshot(TWO, *pair, time_s=LATER_S), rank_exponent=0.0) for pair in (jobs, swapped)]
    assert of[0] == of[1]


def test_a_job_that_never_ran_starts_at_once_on_one_node() -> None:
    found = counts(snapshot(TWO, job("new"), time_s=LATER_S))
    assert found == {"new": 4}


def test_a_job_is_left_alone_after_its_first_start() -> None:
    running = known("running", held={"node-0": 1})
    assert counts(snapshot(TWO, running, time_s=50.0)) == {"running": 1}
    assert counts(snapshot(TWO, running, time_s=LATER_S))["running"] > 1


def test_a_job_that_is_nearly_done_is_not_moved() -> None:
    almost = known("almost", model=measured(0.5), held={"node-0": 1})
    assert counts(snapshot(TWO, almost, time_s=LATER_S)) == {"almost": 1}


def test_a_cheap_change_is_made_where_a_dear_one_does_not_pay() -> None:
    def after(delay_s: float) -> int:
        running = known("running", model=measured(600.0, delay_s=delay_s), held={"node-0": 2})
        return counts(snapshot(ONE, running, time_s=LATER_S), rest=0.0)["running"]

    assert after(1.0) == 4
    assert after(150.0) == 2


def test_nobody_waits_beside_a_free_gpu() -> None:
    jobs = [known(f"job-{i}", i, model=measured(10.0**i)) for i in range(8)]
    assert sum(counts(snapshot(TWO, *jobs, time_s=LATER_S)).values()) == 8
    narrow = [known(f"job-{i}", i, model=measured(10.0**i), max_gpus=2) for i in range(3)]
    assert counts(snapshot(TWO, *narrow, time_s=LATER_S)) == {"job-0": 2, "job-1": 2, "job-2": 2}


def test_without_a_declared_length_age_stands_in() -> None:
    old = known("old", 0, model=measured(None))
    young = replace(known("young", 1, model=measured(None)), submitted_at_s=LATER_S - 60.0)
    found = counts(snapshot(ONE, old, young, time_s=LATER_S), rank_exponent=1.0)
    assert found["young"] >= found.get("old", 0)


@pytest.mark.parametrize(("option", "value"), [("rank_exponent", -1.0), ("start_gpus", 0), ("horizon_s", 0.0)])
def test_options_that_make_no_sense_are_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidSpec, match=f"castor.{option}"):
        make("castor", {option: value})


def test_sizes_that_pack_well() -> None:
    assert packed_sizes(np.array([4, 4, 4])).tolist() == [1, 2, 4, 8, 12]
    assert packed_sizes(np.array([2, 8])).tolist() == [1, 2, 4, 8, 10]


@given(
    st.lists(st.tuples(st.floats(1.0, 1e6), st.floats(1e-3, 1e3), st.floats(0.1, 1.0)), min_size=1, max_size=12),
    st.integers(1, 64),
    st.floats(0.0, 1.0),
)
@settings(deadline=None, max_examples=60)
def test_at_the_price_no_more_gpus_are_wanted_than_there_are(
    jobs: list[tuple[float, float, float]], num_gpus: int, exponent: float
) -> None:
    sizes = np.array([1, 2, 4, 8], dtype=np.int64)
    first = np.arange(len(jobs) + 1, dtype=np.int64) * len(sizes)
    rate = np.concatenate([pace * sizes**power for _, pace, power in jobs])
    size = np.tile(sizes, len(jobs))
    left = np.array([work for work, _, _ in jobs])
    price, worth = balanced(first, size, rate, left, np.zeros(len(jobs)), exponent, num_gpus)
    assert price > 0.0
    assert (worth > 0.0).all()
    if price < 999.0:
        assert wanted(first, size, rate, worth, price) <= num_gpus
    doubled = balanced(first, size, 2.0 * rate, 2.0 * left, np.zeros(len(jobs)), exponent, num_gpus)
    assert doubled[0] == pytest.approx(price), "the unit of work does not matter"


class Endless:
    """Jobs that never end, whatever they say of their length, round after round under castor."""

    def __init__(self, cluster: Cluster, jobs: list[Job], policy: Castor, interval_s: float = 60.0) -> None:
        self.cluster, self.policy, self.interval_s = cluster, policy, interval_s
        self.jobs = {job.id: job for job in jobs}
        self.now_s = 0.0
        self.waited_s = dict.fromkeys(self.jobs, 0.0)
        self.longest_s = 0.0
        self.num_changes = 0

    def advance(self) -> None:
        self.now_s += self.interval_s
        moment = Snapshot(self.now_s, 1, self.cluster, FrozenMap(self.jobs))
        plan = self.policy.plan(moment, 0)
        plan.check(moment)
        self.jobs = {job_id: self._after(job, plan) for job_id, job in self.jobs.items()}

    def _after(self, job: Job, plan: Plan) -> Job:
        allocation = plan[job.id]
        self.waited_s[job.id] = 0.0 if allocation else self.waited_s[job.id] + self.interval_s
        self.longest_s = max(self.longest_s, self.waited_s[job.id])
        if allocation == job.allocation:
            return job
        self.num_changes += bool(job.allocation)
        return replace(
            job,
            phase=Phase.RUNNING if allocation else Phase.PENDING,
            allocation=allocation or Allocation(),
            attained_gpu_s=job.attained_gpu_s_at(self.now_s),
            held_since_s=self.now_s if allocation else None,
            first_started_at_s=self.now_s if job.first_started_at_s is None else job.first_started_at_s,
        )


@pytest.mark.parametrize("seed", range(6))
def test_nobody_starves_however_others_lie(seed: int) -> None:
    """Each waits at most for its patience, and until those before it, who are overdue as well, have had their turn."""
    rng = np.random.default_rng(seed)
    policy = Castor(patience_s=600.0)
    lengths = rng.choice([0.01, 1.0, 100.0, 1e7], rng.integers(3, 10)).tolist()
    jobs = [known(f"job-{i}", i, model=measured(left)) for i, left in enumerate(lengths)]
    world = Endless(Cluster.uniform(1, int(rng.integers(1, 4))), jobs, policy)
    for _ in range(60):
        world.advance()
    turn_s = max(policy.hold_s, 30.0 * policy.rest) + world.interval_s
    assert world.longest_s <= policy.patience_s + turn_s * len(jobs)


def test_rounds_shorter_than_the_delay_leave_jobs_time_to_train() -> None:
    jobs = [known(f"job-{i}", i, model=measured(1000.0 + i)) for i in range(6)]
    world = Endless(ONE, jobs, Castor(), interval_s=10.0)
    for _ in range(60):
        world.advance()
    # 600 s, 4 GPUs: whoever is moved rests for 60 s before the next move.
    assert world.num_changes <= 4 * 600.0 / 60.0
