from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pollux.core import BatchLimits, Cluster, FrozenMap, GradientStats, JobModel, Node, NodeId, Shape, Snapshot
from pollux.errors import InvalidSpec, UnknownName
from pollux.goodput import GoodputModel
from pollux.policies import make
from pollux.policies.pollux import policy
from pollux.policies.pollux.genetic.problem import Problem
from pollux.policies.pollux.policy import Pollux
from pollux.policies.pollux.values import choices_of
from pollux.testing.snapshots import LIMITS, MODEL, job, snapshot, snapshots

FOUR = Cluster.uniform(4, 4)
TWO = Cluster.uniform(2, 4)
MIXED = Cluster.of(Node(NodeId("a0"), 4, "a100"), Node(NodeId("t0"), 4, "t4"))


def measured(observed: int = 64, noise: float = 1000.0, limits: BatchLimits = LIMITS, **facts) -> JobModel:
    """Of a job that was measured with up to so many GPUs, the same for every type of them."""
    fits = {kind: replace(fit, max_gpus_observed=observed) for kind, fit in MODEL.throughput.items()}
    return replace(MODEL, throughput=FrozenMap(fits), gradient=GradientStats(1.0, noise), limits=limits, **facts)


def known(name: str, sequence: int = 0, *, model: JobModel | None = None, **facts):
    """A job with a model; what is true of a job but not in its specification comes after `model`."""
    of_job = {key: facts.pop(key) for key in ("num_reallocations", "first_started_at_s") if key in facts}
    return replace(job(name, sequence, **facts), model=model or measured(), **of_job)


def given_out(moment: Snapshot, policy: Pollux | None = None) -> dict[str, dict[str, int]]:
    """Job → node → GPUs."""
    plan = (policy or Pollux()).plan(moment, 0)
    plan.check(moment)
    return {job_id: dict(allocation.gpus) for job_id, allocation in plan.allocations.items()}


def counts(moment: Snapshot, policy: Pollux | None = None) -> dict[str, int]:
    return {job_id: sum(gpus.values()) for job_id, gpus in given_out(moment, policy).items()}


@pytest.fixture
def asked(monkeypatch) -> list[Problem]:
    """What solvers were asked, one question after the other."""
    seen: list[Problem] = []

    def listening(question):
        seen.append(Problem.of(question, None))
        return choices_of(question)

    monkeypatch.setattr(policy, "choices_of", listening)
    return seen


class TestBounds:
    @pytest.mark.parametrize(
        ("facts", "options", "bounds"),
        [
            ({"model": measured(3)}, {}, (1, 6)),
            ({"model": measured(3)}, {"growth": 4}, (1, 12)),
            ({"model": measured(64)}, {}, (1, 16)),
            ({"model": measured(0)}, {}, (1, 1)),
            ({"model": measured(1), "held": {"node-0": 4}}, {}, (1, 4)),
            ({"model": measured(1), "min_gpus": 3}, {}, (3, 3)),
            ({"model": measured(4), "max_gpus": 5}, {}, (1, 5)),
            ({"model": measured(4)}, {"max_gpus": 7}, (1, 7)),
            ({"model": measured(1), "gpus": 3, "rigid": True}, {}, (3, 3)),
            ({"limits": LIMITS, "model": measured(limits=BatchLimits(64, 100, 20, 64))}, {}, (1, 5)),
            ({"model": measured(limits=BatchLimits(64, 100, 20, 64)), "min_gpus": 6}, {}, (6, 6)),
            ({"requested_batch_size": 48, "fixed_batch": True}, {}, (1, 3)),
            ({"limits": LIMITS, "fixed_batch": True}, {}, (1, 8)),
        ],
    )
    def test_of_a_job_with_a_model(self, asked, facts, options, bounds):
        counts(snapshot(FOUR, known("a", **facts)), Pollux(**options))
        assert (int(asked[0].least[0]), int(asked[0].most[0])) == bounds

    def test_a_job_without_a_model_starts_with_its_minimum(self):
        assert counts(snapshot(FOUR, job("a"), job("b", 1, min_gpus=3))) == {"a": 1, "b": 3}

    def test_a_job_grows_to_twice_what_it_was_measured_with(self):
        policy, sizes = Pollux(), []
        for observed in (0, 1, 2, 4, 8):
            sizes += counts(snapshot(FOUR, known("a", model=measured(observed))), policy).values()
        assert sizes == [1, 2, 4, 8, 16]

    def test_a_rigid_job_gets_its_size_or_nothing(self):
        assert counts(snapshot(FOUR, known("a", gpus=6, rigid=True))) == {"a": 6}
        assert counts(snapshot(TWO, known("a", gpus=9, rigid=True))) == {}

    def test_nobody_gets_more_nodes_than_allowed(self):
        assert counts(snapshot(FOUR, known("a")), Pollux(max_nodes=2)) == {"a": 8}


class TestOneNode:
    """Jobs that must be on one node."""

    @pytest.mark.parametrize("solver", ["priced", "genetic"])
    def test_a_job_on_several_nodes_moves_together_for_a_rigid_one(self, solver):
        """Enough GPUs are free for it, but of two nodes: it must not wait until the first job ends."""
        spread_out = known("a", 0, held={"node-0": 1, "node-1": 1}, max_gpus=2)
        rigid = job("b", 1, 2, rigid=True, single_node=True)
        moment = snapshot(Cluster.uniform(2, 2), spread_out, rigid, time_s=600.0)
        found = given_out(moment, Pollux(solver=solver))
        assert sorted(map(len, found.values())) == [1, 1]
        assert sum(found["b"].values()) == 2

    def test_elastic_jobs_shrink_for_a_rigid_one(self):
        jobs = [known("a", 0, held={"node-0": 4}), known("b", 1, held={"node-1": 4})]
        found = given_out(snapshot(TWO, *jobs, job("c", 2, 4, rigid=True, single_node=True), time_s=6000.0))
        assert len(found["c"]) == 1
        assert sum(found["c"].values()) == 4
        assert found.keys() == {"a", "b", "c"}

    def test_an_elastic_one_has_any_number_of_one_node(self):
        assert given_out(snapshot(TWO, known("a", 0, single_node=True))) in ({"a": {"node-0": 4}}, {"a": {"node-1": 4}})

    def test_nobody_is_stopped_for_one_that_fits_nowhere_else(self):
        jobs = [
            known(name, i, gpus=3, held={f"node-{i}": 3}, rigid=True, single_node=True) for i, name in enumerate("ab")
        ]
        moment = snapshot(TWO, *jobs, job("c", 2, 2, rigid=True, single_node=True), time_s=600.0)
        assert counts(moment) == {"a": 3, "b": 3}

    def test_goes_to_the_type_that_has_such_a_node(self):
        nodes = Cluster.of(*(Node(NodeId(f"a{i}"), 1, "a100") for i in range(8)), Node(NodeId("t0"), 4, "t4"))
        assert given_out(snapshot(nodes, job("a", 0, 2, rigid=True, single_node=True))) == {"a": {"t0": 2}}

    def test_one_that_no_node_can_hold_waits(self):
        assert given_out(snapshot(TWO, job("a", 0, 5, rigid=True, single_node=True))) == {}


class TestStaying:
    def test_jobs_that_must_not_be_preempted_keep_what_they_have(self):
        keeps = known("keeps", held={"node-0": 1, "node-1": 2}, preemptible=False)
        others = [known(f"other-{i}", i + 1) for i in range(3)]
        assert given_out(snapshot(TWO, keeps, *others))["keeps"] == {"node-0": 1, "node-1": 2}

    def test_those_with_more_than_their_maximum_keep_the_maximum(self):
        keeps = known("keeps", held={"node-0": 1, "node-1": 4}, preemptible=False, max_gpus=3)
        assert given_out(snapshot(TWO, keeps)) == {"keeps": {"node-1": 3}}

    def test_those_without_gpus_are_served_like_others(self):
        assert counts(snapshot(TWO, known("a", preemptible=False, max_gpus=2))) == {"a": 2}

    @pytest.mark.parametrize("cluster", [Cluster.uniform(1, 4), TWO.drained(NodeId("node-1"))])
    def test_a_job_whose_node_is_gone_or_drained_is_placed_anew(self, cluster):
        jobs = known("a", held={"node-1": 4}, max_gpus=2), known("b", 1, held={"node-0": 1}, max_gpus=2)
        assert given_out(snapshot(cluster, *jobs, time_s=600.0)) == {"a": {"node-0": 2}, "b": {"node-0": 2}}

    def test_a_plan_that_was_followed_is_kept(self):
        jobs = [known(f"job-{i}", i, model=measured(noise=10.0**i)) for i in range(4)]
        first = given_out(snapshot(FOUR, *jobs))
        running = [
            known(each.id, each.sequence, model=each.model, held=first[each.id], first_started_at_s=0.0)
            for each in jobs
        ]
        assert given_out(snapshot(FOUR, *running, time_s=60.0)) == first
        plan = Pollux().plan(snapshot(FOUR, *running, time_s=60.0), 0)
        assert all(plan[each.id] is each.allocation for each in running)

    def test_a_job_whose_node_has_fewer_gpus_now_is_placed_anew(self):
        smaller = Cluster.of(Node(NodeId("node-0"), 2), Node(NodeId("node-1"), 4))
        moment = snapshot(smaller, known("a", held={"node-0": 4}, max_gpus=4), time_s=600.0)
        assert given_out(moment) == {"a": {"node-1": 4}}


class TestFairShare:
    @pytest.mark.parametrize(
        ("options", "num_jobs", "fair"),
        [
            ({}, 2, Shape(8, 2)),
            ({"one_node_fair_share": True}, 2, Shape(8, 1)),
            ({}, 5, Shape(4, 1)),
            ({}, 17, Shape(1)),
            ({}, 1, Shape(16, 4)),
        ],
    )
    def test_speedups_are_over_an_equal_part_of_the_cluster(self, asked, options, num_jobs, fair):
        jobs = [known(f"job-{i}", i) for i in range(num_jobs)]
        counts(snapshot(FOUR, *jobs), Pollux(**options))
        goodput = GoodputModel.of(jobs[0].model, "gpu")
        for shape, spread in [(Shape(1), 0), (Shape(4), 0), (Shape(2, 2), 1), (Shape(16, 4), 1)]:
            expected = goodput.best(shape).goodput / goodput.best(fair).goodput
            np.testing.assert_allclose(asked[0].speedup[:, spread, shape.num_gpus], expected)

    def test_the_objective_counts_nodes_per_gpu_and_the_floor(self, asked):
        counts(snapshot(FOUR, known("a")), Pollux(p=-2.0, floor=0.01))
        objective = asked[0].objective
        assert (objective.p, objective.scale, objective.floor) == (-2.0, 0.25, 0.01)


class TestReallocation:
    def factor(self, asked, facts, options=None, time_s=600.0) -> float:
        counts(snapshot(FOUR, known("a", **facts), time_s=time_s), Pollux(**(options or {})))
        return float(asked[-1].factor[0])

    def test_costs_what_the_paper_says_without_the_churn_factor(self, asked):
        runs, paper = {"held": {"node-0": 1}, "first_started_at_s": 0.0}, {"churn_factor": 1.0}
        assert self.factor(asked, runs | {"num_reallocations": 2}, paper) == pytest.approx(0.85714, abs=5e-6)
        assert self.factor(asked, runs, time_s=0.0) == 0.0
        assert self.factor(asked, runs | {"num_reallocations": 21}) == 0.0

    def test_costs_what_the_job_has_measured_unless_told_otherwise(self, asked):
        ran = {"first_started_at_s": 10.0, "model": measured(realloc_delay_s=100.0)}
        assert self.factor(asked, ran) == pytest.approx(600 / 700)
        assert self.factor(asked, ran, {"realloc_delay_s": 0.0}) == 1.0
        assert self.factor(asked, ran, {"realloc_delay_s": 200.0}) == pytest.approx(600 / 800)

    def test_the_churn_factor_is_for_jobs_that_run(self, asked):
        runs = {"held": {"node-0": 1}, "first_started_at_s": 0.0}
        assert self.factor(asked, runs, {"churn_factor": 0.9}) == pytest.approx(0.9 * 600 / 630)
        assert self.factor(asked, {"first_started_at_s": 10.0}, {"churn_factor": 0.9}) == pytest.approx(600 / 630)
        assert self.factor(asked, {}, {"churn_factor": 0.9}) == 1.0

    def test_a_first_start_is_free_unless_told_otherwise(self, asked):
        assert self.factor(asked, {}) == 1.0
        assert self.factor(asked, {}, {"penalise_first_start": True}) == pytest.approx(600 / 630)
        assert self.factor(asked, {}, {"penalise_first_start": True}, time_s=0.0) == 0.0

    def test_to_resume_is_not(self, asked):
        assert self.factor(asked, {"first_started_at_s": 10.0}) == pytest.approx(600 / 630)

    def test_jobs_start_at_once_even_if_the_objective_sees_no_gain_in_it(self):
        moment = snapshot(FOUR, *(known(f"job-{i}", i) for i in range(3)))
        assert len(counts(moment, Pollux(penalise_first_start=True))) == 3


class TestOrder:
    def test_those_who_had_least_go_first(self):
        jobs = [known(f"job-{i}", i, attained_gpu_s=each) for i, each in enumerate([500.0, 0.0, 100.0])]
        assert counts(snapshot(Cluster.uniform(1, 2), *jobs)) == {"job-1": 1, "job-2": 1}

    def test_p_is_between_throughput_and_fairness(self):
        """One job scales well, the other less so."""
        jobs = known("scales", model=measured(noise=1e6)), known("stuck", 1, model=measured(noise=20.0))
        shares = [counts(snapshot(FOUR, *jobs), Pollux(p=p))["scales"] for p in (-10.0, -1.0, 1.0)]
        assert shares == sorted(shares)
        assert shares[0] < shares[-1]


class TestTypes:
    def test_each_job_is_on_one_type_and_they_share_evenly(self):
        jobs = [known(f"job-{i}", i) for i in range(4)]
        answer = given_out(snapshot(MIXED, *jobs))
        assert sorted(node for gpus in answer.values() for node in gpus) == ["a0", "a0", "t0", "t0"]

    def test_a_job_stays_on_its_type_or_goes_where_it_wants(self):
        jobs = known("stays", held={"t0": 1}), known("wants", 1, gpu_type="t4"), known("never", 2, gpu_type="h100")
        answer = given_out(snapshot(MIXED, *jobs, time_s=600.0))
        assert answer == {"stays": {"t0": 2}, "wants": {"t0": 2}}

    def test_a_job_that_comes_away_empty_gets_gpus_of_another_type(self):
        """Fewer jobs share the a100s, but one of them must keep them all."""
        keeps = known("keeps", held={"a0": 4}, preemptible=False)
        jobs = [known(f"on-{i}", 1 + i, held={"t0": 1}, max_gpus=1) for i in range(2)]
        answer = given_out(snapshot(MIXED, keeps, *jobs, known("new", 9), time_s=600.0))
        assert answer == {"keeps": {"a0": 4}, "on-0": {"t0": 1}, "on-1": {"t0": 1}, "new": {"t0": 2}}

    def test_even_if_nobody_was_to_run_there(self):
        """It was given a higher minimum since it was started, and cannot have that where it is."""
        keeps = known("keeps", held={"t0": 3}, preemptible=False)
        moment = snapshot(MIXED, keeps, known("more", 1, held={"t0": 1}, min_gpus=2), time_s=600.0)
        assert given_out(moment) == {"keeps": {"t0": 3}, "more": {"a0": 4}}

    def test_figures_are_told_by_type(self):
        policy = Pollux()
        given_out(snapshot(MIXED, known("a"), known("b", 1)), policy)
        assert {name.partition(".")[0] for name in policy.stats()} == {"a100", "t4"}
        assert {"a100.fitness", "a100.bound", "t4.gap"} <= set(policy.stats())


class TestInterference:
    @settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
    @given(snapshots())
    def test_at_most_one_job_on_several_nodes_uses_any_node(self, moment):
        answer = given_out(moment)
        distributed = [gpus for gpus in answer.values() if len(gpus) > 1]
        stuck = {node for each in moment.jobs.values() if not each.spec.preemptible for node in answer.get(each.id, {})}
        for node in {node for gpus in distributed for node in gpus} - stuck:
            assert sum(node in gpus for gpus in distributed) <= 1

    def test_not_even_where_a_job_of_another_type_is_seated(self):
        """The job that comes away empty fits on fragments only, beside one that is on both nodes already."""
        cluster = Cluster.of(Node(NodeId("a0"), 3, "a100"), Node(NodeId("a1"), 3, "a100"), Node(NodeId("t0"), 2, "t4"))
        jobs = (
            known("wide", 0, held={"a0": 2, "a1": 2}, preemptible=False),
            known("small", 1, held={"t0": 2}, preemptible=False),
            known("empty", 2, min_gpus=2),
        )
        assert set(given_out(snapshot(cluster, *jobs, time_s=600.0))) == {"wide", "small"}

    def test_may_be_ignored(self):
        jobs = (
            known("wide", 0, held={"node-0": 3, "node-1": 3}, preemptible=False),
            known("new", 1, min_gpus=2),
        )
        assert counts(snapshot(TWO, *jobs)) == {"wide": 6}
        assert counts(snapshot(TWO, *jobs), Pollux(avoid_interference=False)) == {"wide": 6, "new": 2}


class TestRacks:
    def test_models_that_know_racks_are_asked_about_them(self, asked):
        racked = Cluster.of(*(Node(NodeId(f"n{i}"), 4, labels=FrozenMap({"rack": f"r{i // 2}"})) for i in range(4)))
        names = ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node")
        params = dict(zip(names, (0.02, 0.001, 0.01, 0.001, 0.05, 0.002), strict=True))
        fit = replace(
            MODEL.throughput["gpu"],
            model="racks",
            params=FrozenMap(params | {"alpha_rack": 0.5, "beta_rack": 0.01, "gamma": 1.5}),
            max_gpus_observed=64,
        )
        counts(snapshot(racked, known("a", model=replace(measured(), throughput=FrozenMap({"gpu": fit})))))
        assert asked[0].rack.tolist() == [0, 0, 1, 1]
        assert asked[0].speedup.shape[1] == 3
        assert asked[0].speedup[0, 1, 8] > asked[0].speedup[0, 2, 8]


class TestStats:
    def test_tell_the_fitness_of_the_last_plan(self, asked):
        policy = Pollux()
        assert policy.stats() == {}
        given_out(snapshot(FOUR, known("a"), known("b", 1)), policy)
        told = policy.stats()
        assert 0.0 < told["fitness"] <= told["bound"]
        assert told["gap"] == pytest.approx(1.0 - told["fitness"] / told["bound"])
        given_out(snapshot(FOUR), policy)
        assert policy.stats() == {}


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"p": float("inf")}, "pollux.p"),
            ({"p": "fair"}, "pollux.p"),
            ({"realloc_delay_s": -1.0}, "pollux.realloc_delay_s"),
            ({"churn_factor": 1.1}, "pollux.churn_factor"),
            ({"growth": 0}, "pollux.growth"),
            ({"growth": 1.5}, "pollux.growth"),
            ({"max_gpus": 0}, "pollux.max_gpus"),
            ({"max_nodes": 0}, "pollux.max_nodes"),
            ({"floor": 0.0}, "pollux.floor"),
            ({"avoid_interference": 3}, "pollux.avoid_interference"),
        ],
    )
    def test_are_checked(self, options, name):
        with pytest.raises(InvalidSpec, match=name):
            make("pollux", options)

    def test_unknown_ones_and_unknown_solvers_are_named(self):
        with pytest.raises(UnknownName, match="gready"):
            make("pollux", {"gready": True})
        with pytest.raises(UnknownName, match="simplex"):
            make("pollux", {"solver": "simplex"})
