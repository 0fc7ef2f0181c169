"""The figures of the solver's benchmark, on tiny rounds and made-up outcomes: nothing long is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import jct, snapshots
from benchmarks.areas import solver
from benchmarks.measurement import Finding, LeftOut, Measurement, Table
from benchmarks.processes import Cost
from benchmarks.report import meets_bound
from benchmarks.snapshots import Planned

from pollux.core import Allocation, Cluster, FrozenMap, Plan
from pollux.policies.pollux.policy import Pollux
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.rounds import Rounds
from pollux.simulator.scenario import Scenario
from pollux.simulator.workload import Workload, WorkloadJob

REQUIRED = {
    *(f"solver.plan_p99_ms.{size}" for size in ("64x20", "64x160", "1024x400", "1024x1000", "16384x10000")),
    *("solver.gap_median", "solver.gap_p99", "solver.vs_genetic_min"),
    *(f"castor.jct_ratio.{load}" for load in ("0.5", "1.0", "1.5", "2.0")),
    *("castor.jct_ratio_registry.1.0", "castor.makespan_ratio.1.0", "castor.worst_rho.1.0", "castor.jct_ratio_delay1s"),
}


def figures(found: list[Finding]) -> dict[str, Measurement]:
    return {one.key: one for one in found if isinstance(one, Measurement)}


def missed(found: list[Finding]) -> set[str]:
    return {key for key, one in figures(found).items() if not meets_bound(one.record())}


def test_all_keys_that_were_promised_are_there_once():
    assert set(solver.KEYS) >= REQUIRED
    assert len(set(solver.KEYS)) == len(solver.KEYS)


def test_every_key_has_a_variant_that_is_run_at_its_load():
    for key in jct.KEYS.values():
        assert key.load in jct.VARIANTS[key.variant].loads
    assert all(jct.VARIANTS[key.variant].fairness for key in jct.KEYS.values() if key.figure == "worst_rho")


class TestPlans:
    def test_tiny_clusters_give_a_key_and_rows(self):
        size = solver.Size(8, 3, "standard", 2, 1e6)
        measurement, table = solver._plans([size])
        assert isinstance(measurement, Measurement)
        assert (measurement.key, measurement.bound) == ("solver.plan_p99_ms.8x3", 1e6)
        assert measurement.baseline is not None
        assert isinstance(table, Table)
        assert [row[:4] for row in table.rows][:3] == [
            ["pollux", "8", "3", "standard"],
            ["pollux, `genetic`", "8", "3", "standard"],
            ["pollux", "8", "3", "elastic"],
        ]


class TestRecordedRounds:
    def test_rounds_of_a_run_are_planned_again_from_the_same_state(self):
        jobs = tuple(WorkloadJob(f"job-{k}", 100.0 * k, "cifar10:0.1", 1, 128) for k in range(4))
        cluster = ClusterFile(Cluster.uniform(2, 4, "t4"))
        scenario = Scenario("made", "pollux", cluster, content=Workload("made", jobs))
        found = snapshots.recorded(scenario, 4)
        assert len(found) == 4
        times = [one.snapshot.time_s for one in found]
        assert times == sorted(set(times))
        assert all(one.before is not None and one.before.time_s < one.snapshot.time_s for one in found[1:])
        ours, theirs = (snapshots.planned(found[1], options) for options in ({}, {"solver": "genetic"}))
        assert ours.num_jobs == theirs.num_jobs == len(found[1].snapshot.jobs)
        assert min(ours.fitness, theirs.fitness) > 0.0

    @pytest.mark.parametrize("options", [{}, {"solver": "genetic", "generations": 3}, {"p": 0.0}])
    def test_fitness_is_what_the_policy_believes_it_to_be(self, options):
        policy, rounds = Pollux(**options, churn_factor=1.0), Rounds(16, 6)
        for _ in range(3):
            plan = policy.plan(rounds.snapshot, 0)
            assert snapshots.fitness(rounds.snapshot, plan, policy) == pytest.approx(policy.stats()["fitness"])
            rounds.advance(plan)

    def test_jobs_on_several_nodes_that_meet_are_refused(self):
        rounds = Rounds(8, 2)
        (a, b), (first, second) = rounds.snapshot.jobs, rounds.snapshot.cluster.nodes
        apart = Allocation(FrozenMap({first: 1, second: 1}))
        with pytest.raises(ValueError, match="meets another one"):
            snapshots.fitness(rounds.snapshot, Plan.of({a: apart, b: apart}))

    def test_gaps_and_fitness_are_held_to_their_bounds(self):
        good = (Planned(5, 1.0, 0.0005, 1), Planned(5, 0.9, None, 3))
        lower = (Planned(5, 0.8, 0.02, 1), Planned(5, 0.9, None, 3))
        found = list(solver.judged({"1.0": [good] * 99, "2.0": [good]}))
        assert missed(found) == set()
        assert figures(found)["solver.gap_median"].value == 0.0005
        found = list(solver.judged({"1.0": [good] * 10, "2.0": [lower]}))
        assert missed(found) == {"solver.gap_p99", "solver.vs_genetic_min"}
        assert "below 1 in 1" in figures(found)["solver.vs_genetic_min"].note
        assert [row[:3] for row in found[-1].rows] == [["1.0", 10, "5 … 5"], ["2.0", 1, "5 … 5"]]

    def test_a_solver_that_proves_nothing_leaves_its_gaps_out(self):
        unproven = (Planned(5, 1.0, None, 1), Planned(5, 0.9, None, 3))
        found = list(solver.judged({"1.0": [unproven]}))
        assert {one.key for one in found if isinstance(one, LeftOut)} == {"solver.gap_median", "solver.gap_p99"}


PUBLISHED = {load: {"avg_jct_s": 1000.0, "p99_jct_s": 9000.0, "makespan_s": 20_000.0} for load in jct.LOADS}


class TestCompletionTimes:
    def outcomes(self, jct_s: float, rho: float | None = None) -> dict[tuple[str, str], jct.Figures]:
        run = {"avg_jct_s": jct_s, "p99_jct_s": 9000.0, "makespan_s": 20_000.0, "reallocations_per_job": 2.0}
        return {
            (name, load): {**run, "worst_rho": rho if variant.fairness else None}
            for name, variant in jct.VARIANTS.items()
            for load in variant.loads
        }

    def test_ratios_are_held_to_their_bounds(self):
        found = list(jct.findings(self.outcomes(700.0, 1.5), PUBLISHED))
        assert tuple(figures(found)) == tuple(jct.KEYS)
        assert missed(found) == set()
        assert figures(found)["castor.jct_ratio.2.0"].value == 0.7
        assert figures(found)["castor.worst_rho.1.0"].value == 1.5
        table = found[-1]
        assert isinstance(table, Table)
        assert len(table.rows) == len(self.outcomes(1.0))
        worse = list(jct.findings(self.outcomes(900.0, 2.5), PUBLISHED))
        assert {"castor.jct_ratio.1.0", "castor.worst_rho.1.0"} <= missed(worse)
        assert "pollux.jct_ratio.1.0" not in missed(worse)

    def test_what_no_policy_is_there_for_is_left_out(self):
        only = {case: run for case, run in self.outcomes(700.0).items() if case[0].startswith("pollux")}
        found = list(jct.findings(only, PUBLISHED))
        assert {one.key for one in found if isinstance(one, LeftOut)} == {
            key for key in jct.KEYS if key.startswith("castor")
        }

    @pytest.mark.data
    def test_published_figures_are_those_of_the_artifact(self, pollux_data: Path):
        theirs = jct.published(pollux_data / "pollux-osdi21" / "traces", "1.0")
        assert theirs["avg_jct_s"] == pytest.approx(2642, abs=1)
        assert theirs["avg_jct_s"] < theirs["p99_jct_s"] < theirs["makespan_s"]


def test_a_scale_run_gives_cpu_time_and_memory_or_says_why_not():
    found = list(solver.scaled("solver", "pollux", Cost(12.5, 300.0), "jobs"))
    assert [(one.key, one.value) for one in found if isinstance(one, Measurement)] == [
        ("solver.scale_10k_jobs_cpu_s", 12.5),
        ("solver.scale_10k_jobs_mib", 300.0),
    ]
    assert all(isinstance(one, LeftOut) for one in solver.scaled("castor", "castor", None, "jobs"))
