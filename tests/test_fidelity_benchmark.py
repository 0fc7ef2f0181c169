"""The figures of the benchmark of emulated clusters, from made-up runs: nothing is started or timed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from benchmarks import scale
from benchmarks.areas import fidelity, service
from benchmarks.measurement import Finding, LeftOut, Measurement, Table
from benchmarks.report import meets_bound

from pollux.cli.demo.emulated import EmulatedDemo
from pollux.cli.fidelity.course import Change, Course
from pollux.cli.fidelity.delays import Delay, Spread
from pollux.cli.fidelity.result import FidelityResult, Pair, Setting
from pollux.cli.top import Look
from pollux.cli.trial.running import Trial, TrialJob
from pollux.core import FrozenMap, JobId, Phase
from pollux.errors import PolluxError
from pollux.wire.api import ClusterView, EventView, JobView
from pollux.wire.jobspec import parse

REQUIRED = {
    "fidelity.avg_jct_error",
    "fidelity.rank_correlation",
    "fidelity.pacing_slip",
    "demo.jct_ratio_vs_fifo",
    "scale.live_slots",
    "scale.live_jobs",
}


def course(jct_s: float, *gpus: int, slip: float = 0.0) -> Course:
    moves = [(0, gpus[0]), *pairwise(gpus)]
    changes = tuple(Change(10.0 * at, 10.0 * at + 5.0, now, before) for at, (before, now) in enumerate(moves))
    return Course(0.0, jct_s, len(gpus) - 1, changes, (), (), (), pacing_slip=slip)


def result(policy: str, live_s: float, simulated_s: float) -> FidelityResult:
    """Two jobs, one of which takes so long, and the other one twice that."""
    pairs = tuple(
        Pair(name, "cifar10", 1, course(k * live_s, 1, 4, slip=0.01 * k), course(k * simulated_s, 1, 2, 4))
        for name, k in (("a", 1), ("b", 2))
    )
    delays = (Delay("start", Spread(31.0, 33.0), Spread(30.0, 30.0), 1.0, "why"),)
    delays += (Delay("planning", Spread(0.5, 1.0), Spread(None, None), None, "why"),)
    return FidelityResult(Setting("two", policy, 20.0, 2, 4, 60.0, 30.0), pairs, delays, (), (), 99.0, 0.6)


def figures(found: list[Finding]) -> dict[str, Measurement]:
    return {one.key: one for one in found if isinstance(one, Measurement)}


def missed(found: list[Finding]) -> set[str]:
    return {key for key, one in figures(found).items() if not meets_bound(one.record())}


def test_all_keys_that_were_promised_are_there_and_no_other_area_has_them():
    assert set(fidelity.KEYS) >= REQUIRED
    assert len(set(fidelity.KEYS)) == len(fidelity.KEYS)
    assert not set(fidelity.KEYS) & set(service.KEYS)


def test_what_is_measured_is_what_is_left_out_without_torch(monkeypatch: pytest.MonkeyPatch):
    both = EmulatedDemo((result("pollux", 60.0, 66.0), result("fifo", 120.0, 110.0)))
    parts = (fidelity.faithful(both.runs[0]), fidelity.demo(both), fidelity.scaled(CROWD))
    measured = [key for part in parts for key in figures(list(part))]
    assert tuple(measured) == fidelity.KEYS
    monkeypatch.setattr(fidelity.importlib.util, "find_spec", lambda name: None)
    left_out = list(fidelity.measure())
    assert all(isinstance(one, LeftOut) for one in left_out)
    assert tuple(one.key for one in left_out if isinstance(one, LeftOut)) == fidelity.KEYS


class TestLiveAndSimulated:
    def test_both_are_compared_and_held_to_their_bounds(self):
        found = list(fidelity.faithful(result("pollux", 66.0, 60.0)))
        made = figures(found)
        assert made["fidelity.avg_jct_error"].value == pytest.approx(0.1)
        assert "99 s live, 90 s simulated" in made["fidelity.avg_jct_error"].note
        assert made["fidelity.rank_correlation"].value == pytest.approx(1.0)
        assert made["fidelity.realloc_error"].value == pytest.approx(0.5)
        assert made["fidelity.pacing_slip"].value == 0.02
        assert made["fidelity.cpu_share"].value == 0.6
        assert missed(found) == {"fidelity.realloc_error"}
        assert missed(list(fidelity.faithful(result("pollux", 70.0, 60.0)))) >= {"fidelity.avg_jct_error"}

    def test_jobs_and_delays_are_told(self):
        jobs, delays = (one for one in fidelity.faithful(result("pollux", 66.0, 60.0)) if isinstance(one, Table))
        assert jobs.rows[0] == ("a", "cifar10", "66", "60", "+10.0%", "1 → 4", "1 → 2 → 4")
        assert delays.rows == [("start", "31.0", "30.0", "1.0"), ("planning", "0.5", "", "")]

    def test_where_nobody_knows_how_busy_cores_are_there_is_no_figure(self):
        found = fidelity.faithful(replace(result("pollux", 60.0, 60.0), cpu_share=None))
        assert "fidelity.cpu_share" not in figures(list(found))

    def test_a_run_that_left_processes_gives_no_figure(self):
        with pytest.raises(PolluxError, match="2 processes had to be killed"):
            list(fidelity.faithful(replace(result("pollux", 60.0, 60.0), faults=("2 processes had to be killed.",))))


class TestDemo:
    def test_it_is_compared_with_fifo_and_with_what_was_predicted(self):
        found = list(fidelity.demo(EmulatedDemo((result("pollux", 60.0, 66.0), result("fifo", 120.0, 120.0)))))
        made = figures(found)
        assert made["demo.jct_ratio_vs_fifo"].value == pytest.approx(0.5)
        assert made["demo.predicted_jct_ratio"].value == pytest.approx(0.55)
        assert made["demo.prediction_error"].value == pytest.approx(0.1)
        assert made["demo.reallocations"].value == 2
        (table,) = (one for one in found if isinstance(one, Table))
        assert table.rows[0] == ("a", "cifar10", "60", "66", "120", "120", "1 → 4", "1 → 4")

    def test_a_ratio_that_is_too_high_and_a_wrong_prediction_miss_their_bounds(self):
        found = list(fidelity.demo(EmulatedDemo((result("pollux", 90.0, 60.0), result("fifo", 100.0, 100.0)))))
        assert missed(found) == {"demo.jct_ratio_vs_fifo", "demo.prediction_error"}


CROWD = scale.ScaleResult(8, 32, 20.0, 40, 40, 32, 31, 30, 25, 12, 61.5, 0.01, 0.9)


class TestScale:
    def test_slots_and_jobs_meet_their_bounds_only_if_all_were_there(self):
        made = figures(list(fidelity.scaled(CROWD)))
        assert (made["scale.live_slots"].value, made["scale.live_jobs"].value) == (32, 40)
        assert missed(list(fidelity.scaled(CROWD))) == set()
        unwell = replace(CROWD, succeeded=39, most_slots=31, faults=("cifar10-0 is failed: it slipped",))
        found = list(fidelity.scaled(unwell))
        assert missed(found) == {"scale.live_slots", "scale.live_jobs"}
        assert "it slipped" in figures(found)["scale.live_jobs"].note

    def test_all_applications_come_in_turns_and_are_jobs_that_a_service_takes(self):
        documents = list(scale.documents(13, 0.5))
        assert len({document["name"] for document in documents}) == 13
        assert {document["name"].partition("-")[0] for document in documents} == set(scale.SHARES)
        assert documents[0]["application"] == "cifar10:0.035"
        assert all(parse(document).name == document["name"] for document in documents)

    def test_the_most_at_once_is_counted_and_told_now_and_then(self):
        said: list[str] = []
        seen = scale.Seen(said.append)
        jobs = (job("a", Phase.RUNNING, 3), job("b", Phase.STARTING, 2), job("c", Phase.PENDING))
        seen.look(Look(cluster(100.0, free=3, pending=1, succeeded=2, failed=1), jobs))
        seen.look(Look(cluster(101.0, free=6), jobs[:1]))
        seen.look(Look(cluster(111.0, free=7), (job("a", Phase.RESIZING, 1),)))
        assert (seen.slots, seen.training, seen.jobs) == (5, 3, 2)
        assert said == [
            "pollux: 2 jobs on 5 of 8 slots, 3 of which train; 1 wait, 3 have ended",
            "pollux: 1 jobs on 1 of 8 slots, 1 of which train; 0 wait, 0 have ended",
        ]

    def test_facts_are_told_from_a_trial(self):
        printed = ('{"pacing_slip": 0.02}\n', '{"pacing_slip": 0.01}\n')
        jobs = (
            TrialJob("a", job("a", Phase.SUCCEEDED, finished_at_s=70.0), (), printed),
            TrialJob("b", job("b", FAILED, finished_at_s=60.0), (), ("Traceback\n",)),
        )
        rounds = tuple(EventView(n, float(n), "RoundDue", "", "", FrozenMap()) for n in range(3))
        seen = scale.Seen(print)
        seen.slots, seen.training, seen.jobs = 8, 7, 2
        trial = Trial(10.0, 8, jobs, rounds, True, cpu_share=0.5)
        found = scale.told(trial, seen, nodes=2, jobs=3, compress=20.0, killed=1)
        assert (found.slots, found.jobs, found.succeeded, found.rounds, found.reallocations) == (8, 3, 1, 3, 4)
        assert (found.most_slots, found.most_training, found.most_jobs) == (8, 7, 2)
        assert (found.seconds, found.pacing_slip, found.cpu_share) == (60.0, 0.02, 0.5)
        assert found.faults == (
            "b is failed: it fell over",
            "1 of 3 jobs could not be submitted in time.",
            "Processes that had to be killed: 1.",
        )

    def test_a_job_that_lost_replicas_or_does_not_tell_its_slip_does_not_count(self):
        gone = EventView(1, 1.0, "ReplicaLost", "a", "", FrozenMap({"generation": 1, "membership": 2}))
        jobs = (
            TrialJob("a", job("a", Phase.SUCCEEDED, finished_at_s=70.0), (gone,), ('{"pacing_slip": 0.02}\n',)),
            TrialJob("b", job("b", Phase.SUCCEEDED, finished_at_s=60.0), (), ("done\n",)),
            TrialJob("c", job("c", Phase.SUCCEEDED, finished_at_s=50.0), (), ('{"pacing_slip": 0.0}\n',)),
        )
        trial = Trial(10.0, 8, jobs, (), True)
        found = scale.told(trial, scale.Seen(print), nodes=2, jobs=3, compress=20.0, killed=0)
        assert found.succeeded == 1
        assert [fault.split(" has ")[0] for fault in found.faults] == ["a", "b"]


FAILED = Phase.FAILED


def job(name: str, phase: Phase, gpus: int = 0, finished_at_s: float | None = None) -> JobView:
    return JobView(
        *(JobId(name), name, "", phase, False, 0, 1, None, gpus, FrozenMap(), None, 1, 2, 0, 0, 0.0, 0.0),
        finished_at_s,
        1.0,
        exit_reason="it fell over" if phase is FAILED else "",
    )


def cluster(time_s: float, free: int, **num_jobs: int) -> ClusterView:
    return ClusterView("1", 1, "pollux", 3.0, 1, time_s, 0.0, False, 8, free, (), FrozenMap(num_jobs))
