"""Made-up rounds: consistent, the same for the same seed, with the changes that they promise; what plans cost."""

from __future__ import annotations

import pytest

from pollux.core import Allocation, FrozenMap, Plan, Snapshot
from pollux.errors import InfeasiblePlan, InvalidInput
from pollux.policies import Policy, registry
from pollux.simulator.plan_cost import changes, plan_cost, proven_gap, settling_rounds
from pollux.simulator.rounds import INTERVAL_S, LARGEST, Rounds


class OneEach(Policy):
    """Whoever holds something keeps it; the others get a GPU each while there are any."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        self.seen.append(snapshot)
        found = {job.id: job.allocation for job in snapshot.jobs.values() if job.allocation}
        free = dict(snapshot.cluster.capacity)
        for allocation in found.values():
            for node, count in allocation.gpus.items():
                free[node] -= count
        left = [node for node, count in free.items() for _ in range(count)]
        waiting = [job for job in snapshot.jobs if job not in found]
        for job, node in zip(waiting, left, strict=False):
            found[job] = Allocation(FrozenMap({node: 1}))
        return Plan.of(found)

    def stats(self) -> dict[str, float]:
        return {"fitness": 0.9, "bound": 1.0}


def played(rounds: Rounds, count: int) -> list[Snapshot]:
    policy = OneEach()
    for _ in range(count):
        rounds.advance(policy.plan(rounds.snapshot, 0))
    return [*policy.seen, rounds.snapshot]


class TestRounds:
    def test_same_arguments_and_plans_same_snapshots(self):
        first, again, other = (played(Rounds(32, 30, seed=seed), 5) for seed in (1, 1, 2))
        assert first == again != other

    def test_what_a_plan_said_is_in_force_a_round_later(self):
        before, after = played(Rounds(16, 12), 1)
        assert after.time_s == before.time_s + INTERVAL_S
        assert after.round == before.round + 1
        stayed = [job for job in after.jobs.values() if job.id in before.jobs]
        assert stayed
        for job in stayed:
            assert job.allocation.num_gpus == 1
            assert job.held_since_s == before.time_s
            assert job.attained_gpu_s_at(after.time_s) == pytest.approx(before.jobs[job.id].attained_gpu_s + INTERVAL_S)

    def test_jobs_leave_and_as_many_arrive_that_nothing_is_known_of(self):
        snapshots = played(Rounds(64, 50), 20)
        assert {len(snapshot.jobs) for snapshot in snapshots} == {50}
        arrived = [
            (job, after.jobs.get(job.id))
            for before, now, after in zip(snapshots, snapshots[1:], snapshots[2:], strict=False)
            for job in now.jobs.values()
            if job.id not in before.jobs
        ]
        assert 10 < len(arrived) < 60
        for job, later in arrived:
            assert job.model is None
            assert job.first_started_at_s is None
            assert not job.allocation
            if later is not None and later.allocation:
                assert later.model is not None
                assert later.num_reallocations == 0

    def test_who_waits_has_nothing_new_to_tell(self):
        before, after = played(Rounds(4, 40), 2)[1:]
        waiting = [job for job in after.jobs.values() if not job.allocation and job.id in before.jobs]
        assert waiting
        assert all(job.model == before.jobs[job.id].model for job in waiting)

    def test_noise_drifts_and_fits_stay_while_a_job_runs(self):
        before, after = played(Rounds(64, 40), 2)[1:]
        running = [job for job in after.jobs.values() if before.jobs.get(job.id, job) is not job and job.allocation]
        for job in running:
            earlier = before.jobs[job.id].model
            if earlier is None:
                continue
            assert job.model is not None
            assert job.model.gradient != earlier.gradient
            (now,), (then,) = job.model.throughput.values(), earlier.throughput.values()
            assert now.params == then.params
            assert (now is then) == (now == then), "as the scheduler has it after a report"
            assert now.max_gpus_observed in (then.max_gpus_observed, 2 * then.max_gpus_observed)

    def test_in_the_standard_mix_a_third_keeps_one_gpu_and_in_the_elastic_one_nobody_does(self):
        standard, elastic = (Rounds(64, 400, mix=mix).snapshot.jobs.values() for mix in ("standard", "elastic"))
        assert 0.3 < sum(job.spec.max_gpus == 1 for job in standard) / 400 < 0.42
        assert {job.spec.max_gpus for job in elastic} == {LARGEST}
        fits = {job.model.throughput["t4"].params for job in elastic if job.model is not None}
        assert len(fits) == 400

    def test_a_plan_that_the_cluster_cannot_hold_is_refused(self):
        rounds = Rounds(4, 1)
        (job,), (node,) = rounds.snapshot.jobs, rounds.snapshot.cluster.nodes
        with pytest.raises(InfeasiblePlan):
            rounds.advance(Plan.of({job: Allocation(FrozenMap({node: 5}))}))

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ({"num_gpus": 0}, "num_gpus"),
            ({"num_gpus": 6}, "num_gpus"),
            ({"num_jobs": 0}, "num_jobs"),
            ({"mix": "heavy"}, "mix"),
            ({"seed": -1}, "seed"),
        ],
    )
    def test_what_cannot_be_made_is_refused_by_name(self, arguments, field):
        with pytest.raises(InvalidInput) as failure:
            Rounds(**{"num_gpus": 8, "num_jobs": 2, **arguments})
        assert failure.value.field == field


class TestCost:
    def test_counts_rounds_after_those_that_settle(self):
        heard: list[None] = []
        cost, beside = plan_cost(OneEach(), Rounds(16, 20), 4, on_round=lambda: heard.append(None))
        assert len(cost.cpu_ms) == len(cost.gap) == len(cost.started) == 4
        assert len(heard) == settling_rounds(20) + 4
        assert beside is None
        figures = cost.figures()
        assert figures["gap"]["max"] == pytest.approx(0.1)
        assert figures["moved"] == 0.0
        assert figures["cpu_ms"]["median"] <= figures["cpu_ms"]["p99"] <= figures["cpu_ms"]["max"]

    def test_another_policy_plans_the_same_snapshots(self):
        ours, theirs = OneEach(), OneEach()
        _, beside = plan_cost(ours, Rounds(16, 20), 2, theirs)
        assert theirs.seen == ours.seen[settling_rounds(20) - 1 :]
        assert beside is not None
        assert len(beside.cpu_ms) == 2

    def test_the_real_policy_plans_them(self):
        cost, _ = plan_cost(registry.make("pollux"), Rounds(16, 6, mix="elastic"), 2)
        assert all(fitness is not None and fitness > 0.0 for fitness in cost.fitness)

    def test_changes_are_told_apart(self):
        rounds = Rounds(8, 3)
        a, b, c = rounds.snapshot.jobs
        first, second = rounds.snapshot.cluster.nodes

        def plan(**gpus):
            return Plan.of({job: Allocation(FrozenMap(gpus[name])) for name, job in zip("abc", (a, b, c), strict=True)})

        rounds._num_jobs = 0  # nobody arrives
        snapshot = rounds.advance(plan(a={first: 1}, b={first: 2}, c={}))
        if len(snapshot.jobs) == 3:
            assert changes(snapshot, plan(a={first: 1}, b={second: 2}, c={})) == (0, 1, 0)
            assert changes(snapshot, plan(a={}, b={first: 2}, c={second: 1})) == (1, 0, 1)

    @pytest.mark.parametrize(
        ("stats", "gap"),
        [
            ({}, None),
            ({"fitness": 0.5}, None),
            ({"fitness": 0.5, "bound": 1.0}, 0.5),
            ({"fitness": 1.0, "bound": 1.0 - 1e-16}, 0.0),
            ({"fitness": 0.5, "bound": 1.0, "gap": 0.25}, 0.25),
        ],
    )
    def test_a_gap_is_told_or_follows_from_the_bound(self, stats, gap):
        assert proven_gap(stats) == gap
