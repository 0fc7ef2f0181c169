"""`pollux fidelity`: what it makes of events, how both sides are compared, what it prints, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from tests.cli.fidelity_scenes import SETTING, a_result, course
from typer.testing import CliRunner

from pollux.cli.fidelity import command, report
from pollux.cli.fidelity import running as fidelity
from pollux.cli.fidelity.course import (
    Change,
    changes_of,
    planning_of,
    report_ages,
    reported_pauses,
    rounds_of,
    waits_for_round,
)
from pollux.cli.fidelity.delays import Side, Spread, delays
from pollux.cli.fidelity.result import Pair, ranks, spearman
from pollux.cli.trial.running import Trial, TrialJob
from pollux.core import FrozenMap, JobId, Phase
from pollux.errors import InvalidInput, Permanent
from pollux.service.options import ServiceOptions
from pollux.wire.api import EventView, JobView
from pollux.wire.jobspec import parse

app = typer.Typer()
app.command()(command.fidelity)
runner = CliRunner()

WORKLOAD = """name,time,application,num_replicas,batch_size
a,0,cifar10,2,256
b,40,ncf,1,1024
"""


def event(at_s, kind, job="", /, **detail):
    return EventView(1, float(at_s), kind, job, "…", FrozenMap(detail))


def plan(at_s, number, **jobs):
    """`a={"n0": 2}`: what each job is to hold."""
    return event(
        at_s, "PlanMade", round=number, plan={"allocations": {job: {"gpus": gpus} for job, gpus in jobs.items()}}
    )


def ready(at_s, job, generation):
    return event(at_s, "ReplicasReady", job, generation=generation)


def reported(at_s, job, delay_s=None):
    return event(at_s, "JobReported", job, generation=1, model={"realloc_delay_s": delay_s})


class TestACourse:
    def test_of_a_job_that_starts_grows_and_ends(self):
        events = [
            event(0, "JobSubmitted", "a"),
            plan(2, 1, a={"n0": 1}),
            ready(32, "a", 1),
            plan(60, 2, a={"n0": 1}),
            plan(120, 3, a={"n0": 2, "n1": 2}, b={"n1": 1}),
            ready(150, "b", 1),
            ready(160, "a", 2),
            event(300, "JobFinished", "a", generation=2),
            plan(301, 4),
        ]
        assert changes_of(JobId("a"), events) == ((Change(2.0, 32.0, 1, 0), Change(120.0, 160.0, 4, 1)), ())

    def test_another_node_is_a_change_and_a_second_word_is_none(self):
        events = [plan(0, 1, a={"n0": 1}), ready(5, "a", 1), plan(6, 2, a={"n1": 1}), ready(9, "a", 2)]
        moved, _ = changes_of(JobId("a"), [*events, ready(11, "a", 2)])
        assert moved == (Change(0.0, 5.0, 1, 0), Change(6.0, 9.0, 1, 1))

    def test_a_plan_that_comes_during_a_change_waits_for_its_end(self):
        events = [plan(0, 1, a={"n0": 1}), ready(5, "a", 1), plan(6, 2, a={"n0": 2}), plan(7, 3, a={"n0": 3})]
        found, _ = changes_of(JobId("a"), [*events, ready(9, "a", 2), ready(14, "a", 3)])
        assert found[1:] == (Change(6.0, 9.0, 2, 1), Change(9.0, 14.0, 3, 2))

    def test_a_job_that_is_stopped_starts_again(self):
        events = [plan(0, 1, a={"n0": 1}), ready(5, "a", 1), plan(60, 2), event(62, "JobStopped", "a", generation=1)]
        events += [plan(120, 3, a={"n0": 2}), ready(150, "a", 2)]
        found, stops = changes_of(JobId("a"), events)
        assert stops == (62.0,)
        assert found == (Change(0.0, 5.0, 1, 0), Change(120.0, 150.0, 2, 0))
        whole = course(changes=found, stopped_at_s=stops, pauses_s=())
        assert whole.waiting_s == 0.0 + 58.0
        assert whole.starting_s == 5.0 + 30.0
        assert whole.gpus == ((0.0, 1), (62.0, 0), (120.0, 2), (1000.0, 0))

    def test_a_generation_that_is_given_up_is_none(self):
        events = [plan(0, 1, a={"n0": 1}), ready(5, "a", 1), plan(6, 2, a={"n0": 2})]
        events += [event(8, "GenerationAbandoned", "a", generation=2), plan(60, 3, a={"n0": 1})]
        found, _ = changes_of(JobId("a"), events)
        assert found == (Change(0.0, 5.0, 1, 0),)

    def test_its_parts_add_up_to_its_jct(self):
        whole = course(ending_s=8.0)
        parts = (whole.waiting_s, whole.starting_s, whole.pausing_s, whole.training_s, whole.ending_s)
        assert parts == (10.0, 30.0, 30.0, 922.0, 8.0)
        assert sum(parts) == whole.jct_s
        assert whole.first_step_after_s == 40.0

    def test_pauses_that_were_not_measured_are_assumed_and_not_shown(self):
        silent = course(pauses_s=(), assumed_pause_s=25.0)
        assert (silent.pausing_s, silent.training_s) == (25.0, 1000.0 - 10.0 - 30.0 - 25.0)
        assert course(assumed_pause_s=25.0).pausing_s == 30.0
        found = {delay.name: delay for delay in delays(Side([], [silent]), Side([], [course()]))}
        assert found["resize pause"].live == Spread(None, None)
        assert found["resize pause"].explains_s == -5.0
        assert found["newcomers"].live == Spread(10.0, 10.0)

    def test_of_a_job_that_never_had_gpus_waits(self):
        assert course(changes=(), pauses_s=()).first_step_after_s is None


class TestWhatEventsTell:
    EVENTS = (
        event(0, "JobSubmitted", "a"),
        event(1, "RoundDue", round=1),
        plan(3, 1, a={"n0": 1}),
        event(20, "JobSubmitted", "b"),
        reported(31, "a"),
        event(61, "RoundDue", round=2),
        plan(65, 2, a={"n0": 1}, b={"n0": 1}),
        reported(62, "a", 1.5),
        reported(92, "a", 1.5),
        reported(122, "a", 1.25),
        event(121, "RoundDue", round=3),
        event(130, "JobFinished", "a"),
        event(181, "RoundDue", round=4),
    )

    def test_how_long_a_job_waits_for_a_round_and_a_round_for_its_plan(self):
        assert waits_for_round(self.EVENTS) == [1.0, 41.0]
        assert planning_of(self.EVENTS) == [2.0, 4.0]

    def test_how_old_reports_are_when_a_round_begins(self):
        known = course(reported_at_s=(31.0, 62.0), finished_at_s=130.0)
        assert report_ages(rounds_of(self.EVENTS), [known, course()]) == [30.0, 59.0]

    def test_what_re_allocations_cost_each_figure_once(self):
        assert reported_pauses(self.EVENTS) == [1.5, 1.25]


class TestDelays:
    def test_explain_all_of_the_difference(self):
        events = [event(0, "JobSubmitted", "a"), event(6, "RoundDue", round=1)]
        live = course(
            changes=(Change(12.0, 52.0, 1, 0), Change(100.0, 150.0, 4, 1)),
            pauses_s=(36.0,),
            finished_at_s=1040.0,
            ending_s=9.0,
            pacing_slip=0.02,
        )
        found = delays(Side(events, [live]), Side([replace(events[0]), event(0, "RoundDue", round=1)], [course()]))
        explained = {delay.name: delay.explains_s for delay in found}
        assert sum(value for value in explained.values() if value is not None) == pytest.approx(40.0)
        assert explained["round phase"] == 6.0
        assert explained["waiting for GPUs"] == pytest.approx(-4.0)
        assert explained["start"] == 10.0
        assert explained["resize pause"] == 6.0
        assert explained["end"] == 9.0
        assert explained["pacing"] == pytest.approx(live.training_s * 0.02 / 1.02)
        of_name = {delay.name: delay for delay in found}
        assert of_name["newcomers"].live == Spread(14.0, 14.0)
        assert of_name["newcomers"].simulated == Spread(5.0, 5.0)
        assert of_name["planning"].live == Spread(None, None)

    def test_of_equal_sides_explain_nothing(self):
        side = Side([], [course()])
        assert {delay.explains_s or 0.0 for delay in delays(side, side)} == {0.0}


class TestRanks:
    def test_are_correlated_as_spearman_has_it(self):
        assert ranks([30.0, 10.0, 20.0, 20.0]) == [4.0, 1.0, 2.5, 2.5]
        assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
        assert spearman([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1.0)
        assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)

    def test_of_jobs_without_an_order(self):
        assert spearman([5.0], [7.0]) == 1.0
        assert spearman([1.0, 1.0], [1.0, 2.0]) == 0.0


FAR = (
    Pair("a", "cifar10:0.2", 2, course(finished_at_s=1200.0, reallocations=3, pacing_slip=0.04), course()),
    Pair("b", "ncf:20", 1, course(finished_at_s=900.0, reallocations=2), course(finished_at_s=1100.0)),
)


class TestAResult:
    def test_of_equal_sides_is_faithful(self):
        result = a_result()
        assert (result.avg_jct_error, result.rank_correlation, result.realloc_error) == (0.0, 1.0, 0.0)
        assert result.is_faithful

    def test_with_faults_is_not_faithful_whatever_its_figures_are(self, tmp_path):
        result = a_result(faults=("a has lost replicas 1 time, and trained on with the others.",))
        assert all(bound.is_met for bound in result.bounds)
        assert not result.is_faithful
        assert not result.document()["is_faithful"]
        page = report.write(result, tmp_path).read_text("utf-8")
        assert "Not as it should be: a has lost replicas 1 time" in page

    def test_compares_averages_ranks_and_re_allocations(self):
        result = a_result(*FAR)
        assert result.avg_jct_error == 0.0
        assert result.rank_correlation == -1.0
        assert result.realloc_error == 1.5
        assert (result.pacing_slip, result.mean_pacing_slip) == (0.04, 0.02)
        assert [bound.is_met for bound in result.bounds] == [True, False, False, True]
        assert result.jobs[0].jct_difference == pytest.approx(0.2)

    def test_counts_re_allocations_where_the_simulator_has_none(self):
        still = course(reallocations=0)
        assert a_result(Pair("a", "ncf", 1, still, still)).realloc_error == 0.0
        assert a_result(Pair("a", "ncf", 1, course(reallocations=2), still)).realloc_error == 2.0

    def test_is_printed_and_written_as_emulated(self, tmp_path, capsys):
        result = a_result(*FAR, cpu_share=0.6)
        report.print_summary(result)
        page = report.write(result, tmp_path).read_text("utf-8")
        printed = capsys.readouterr().out
        for said in (printed, page):
            assert "emulated" in said
            assert "missed" in said
            assert "resize pause" in said
            assert "60% busy" in said
            assert "compressed 20 times" in " ".join(said.split())
        assert "<title>Emulated live (× 20) and simulated: two under pollux</title>" in page
        assert "pollux fidelity two --compress 20 --policy pollux --nodes 2 --slots 4" in page
        document = json.loads((tmp_path / "report.json").read_text("utf-8"))
        assert document["is_emulated"]
        assert document["rank_correlation"] == -1.0
        assert document["jobs"][0]["live"]["gpus"] == [[10.0, 1], [100.0, 4], [1200.0, 0]]
        names = {"gpus-live-and-simulated.png", "batch-sizes-live-and-simulated.png"}
        assert {path.name for path in tmp_path.glob("*.png")} == names

    def test_of_jobs_that_told_nothing_is_written_too(self, tmp_path):
        mute = course(changes=(), batch_sizes=(), pauses_s=())
        report.write(a_result(Pair("a", "ncf", 1, mute, mute)), tmp_path)


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text(WORKLOAD)
    return str(path)


def as_live(twin, compress, begin_s=5000.0):
    """A live run that did to the second what the simulated one did."""
    events = [replace(event, at_s=begin_s + event.at_s / compress) for event in twin.events()]
    jobs = []
    for job in twin.outcome.jobs:
        facts = {"id": JobId(job.name), "name": job.name, "team": "", "phase": Phase.SUCCEEDED, "is_rigid": False}
        facts |= {"priority": 0, "min_gpus": 1, "max_gpus": None, "gpus": 0, "allocation": FrozenMap(), "retries": 0}
        facts |= {"next_allocation": None, "generation": 1, "failures": 0, "attained_gpu_s": job.gpu_s / compress}
        facts |= {"reallocations": job.num_reallocations, "started_at_s": begin_s + job.started_at_s / compress}
        facts |= {"submitted_at_s": begin_s + job.submitted_at_s / compress}
        view = JobView(**facts, finished_at_s=begin_s + job.finished_at_s / compress)
        ended_s = view.finished_at_s - 0.1
        state = {"replicas": 1, "batch": {"batch_size": 128}}
        notice = event(ended_s, "TrainingFinished", job.name, at_s=ended_s, state=state)
        pauses = [reported(begin_s, job.name, 30.0 / compress)] if job.num_reallocations else []
        result = '{"metric": "progress", "value": 1.0, "pacing_slip": 0.01}\n'
        jobs.append(TrialJob(job.name, view, (notice, *pauses), ("started\n", result)))
    return Trial(begin_s, 8, tuple(jobs), tuple(events), True, None, 0.5)


class TestBothSides:
    def test_a_live_run_that_does_what_is_simulated_is_no_different(self, workload):
        setting = replace(SETTING, workload=workload)
        twin = fidelity.Twin.of(setting)
        result = fidelity.compared(setting, as_live(twin, 20.0), twin)
        assert result.avg_jct_error == pytest.approx(0.0, abs=1e-9)
        assert result.realloc_error == 0.0
        assert result.reallocations_live > 0
        for job in result.jobs:
            assert len(job.live.changes) == len(job.simulated.changes) == job.simulated.reallocations + 1
            for ours, theirs in zip(job.live.changes, job.simulated.changes, strict=True):
                assert ours.ready_at_s == pytest.approx(theirs.ready_at_s)
                assert ours.gpus == theirs.gpus
            assert job.simulated.batch_sizes
        explained = {delay.name: delay.explains_s for delay in result.delays}
        assert explained["start"] == pytest.approx(0.0, abs=1e-6)
        assert explained["end"] == pytest.approx(2.0, abs=1e-6)
        assert (result.pacing_slip, result.cpu_share) == (0.01, 0.5)
        assert result.seconds == pytest.approx(max(job.live.finished_at_s for job in result.jobs) / 20.0)

    def test_what_went_wrong_live_is_a_fault(self, workload):
        setting = replace(SETTING, workload=workload)
        twin = fidelity.Twin.of(setting)
        trial = as_live(twin, 20.0)
        assert fidelity.compared(setting, trial, twin).faults == ()
        first, second = trial.jobs
        lost = event(5010, "ReplicaLost", "a", generation=1, membership=2, survivors={})
        jobs = (replace(first, events=(*first.events, lost)), replace(second, printed=("started\n",)))
        result = fidelity.compared(setting, replace(trial, jobs=jobs), twin)
        assert result.faults == (
            "a has lost replicas 1 time, and trained on with the others.",
            "b has not printed how late its steps were (pacing_slip).",
        )
        assert not result.is_faithful

    def test_pauses_that_a_job_did_not_measure_are_not_made_up(self, workload):
        setting = replace(SETTING, workload=workload)
        twin = fidelity.Twin.of(setting)
        trial = as_live(twin, 20.0)
        silent = tuple(replace(job, events=job.events[:1]) for job in trial.jobs)
        result = fidelity.compared(setting, replace(trial, jobs=silent), twin)
        assert {job.live.pauses_s for job in result.jobs} == {()}
        assert sum(job.live.pausing_s for job in result.jobs) == 30.0 * result.reallocations_live > 0

    def test_the_twin_is_told_what_the_live_cluster_does_by_itself(self):
        options = fidelity.twin_options(SETTING)
        service = ServiceOptions(Path("/nowhere"))
        assert (options.interval_s, options.early_gap_s) == (service.interval_s, service.early_gap_s)
        assert options.scheduler.in_place
        assert options.world.realloc_delay_s == options.policy["unmeasured_delay_s"] == 30.0
        assert (options.world.warm_up_s, options.agent.first_report_s) == (10.0, 38.0)
        assert not fidelity.twin_options(replace(SETTING, policy="fifo")).policy

    def test_the_agents_of_the_twin_do_as_live_ones(self):
        pytest.importorskip("torch")
        from pollux.agent.options import Options

        options, agent = Options(), fidelity.twin_options(SETTING).agent
        assert (agent.report_interval_s, agent.hysteresis) == (options.report_every_s, options.hysteresis)

    @pytest.mark.parametrize(("policy", "is_fixed"), [("pollux", False), ("fifo", True)])
    def test_jobs_are_submitted_as_their_owners_would_under_that_policy(self, workload, policy, is_fixed):
        twin = fidelity.Twin.of(replace(SETTING, workload=workload, policy=policy))
        first, second = fidelity.submissions(twin.ready, 20.0)
        assert (first.at_s, second.at_s) == (0.0, 2.0)
        assert first.document["command"] == ["python", "emulated.py", "cifar10"]
        assert first.document["requested_gpus"] == 2
        assert first.document.get("batch_size") == (256 if is_fixed else None)
        assert first.document.get("fixed_batch", False) == is_fixed
        parse(first.document, base_dir="/")

    def test_a_policy_that_knows_the_future_is_refused(self, workload):
        with pytest.raises(InvalidInput, match="future"):
            fidelity.Twin.of(replace(SETTING, workload=workload, policy="optimus"))


class TestAFailure:
    def live(self, workload, **changed):
        twin = fidelity.Twin.of(replace(SETTING, workload=workload))
        trial = as_live(twin, 20.0)
        job = trial.jobs[0]
        slipped = "step 1\nPacingSlipped: 7 % behind. Lower --compress.\n"
        failed = TrialJob(job.name, replace(job.view, phase=Phase.FAILED, exit_reason="exit code 1"), (), (slipped,))
        return replace(trial, jobs=(failed, *trial.jobs[1:]), has_ended=False)

    def test_names_the_job_and_the_end_of_its_log(self, workload):
        with pytest.raises(Permanent, match=r"(?s)Emulated job a is failed: exit code 1.*PacingSlipped: 7 %"):
            fidelity._check(self.live(workload), None)

    def test_to_come_to_an_end_is_said_too(self, workload, tmp_path):
        trial = self.live(workload)
        job = trial.jobs[1]
        endless = replace(job, view=replace(job.view, phase=Phase.RUNNING, finished_at_s=None))
        with pytest.raises(Permanent, match="b had not ended"):
            fidelity._check(replace(trial, jobs=(endless,)), tmp_path)


class TestTheCommand:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["nowhere.csv"],
            ["four", "--compress", "0"],
            ["four", "--interval", "-1"],
            ["four", "--realloc-delay", "nan"],
            ["four", "--realloc-delay", "61", "--compress", "1"],
            ["four", "--policy", "none"],
            ["four", "--policy", "optimus"],
            ["four", "--report", "/dev/null"],
            ["four", "--keep", "/proc"],
        ],
    )
    def test_refuses_what_it_cannot_do_before_anything_is_started(self, monkeypatch, arguments):
        monkeypatch.setattr(fidelity, "TrialCluster", lambda *given, **named: pytest.fail("it has begun"))
        refused = runner.invoke(app, arguments)
        assert isinstance(refused.exception, InvalidInput), refused.output

    def test_ends_with_1_if_a_bound_is_missed_and_that_is_asked_for(self, monkeypatch, tmp_path):
        monkeypatch.setattr(fidelity, "run_fidelity", lambda *given, **named: a_result(*FAR))
        arguments = ["four", "--report", str(tmp_path), "--json", str(tmp_path / "all.json")]
        assert runner.invoke(app, arguments).exit_code == 0
        done = runner.invoke(app, [*arguments, "--check"])
        assert done.exit_code == 1
        assert "rank correlation of JCTs, number of re-allocations" in done.output
        assert json.loads((tmp_path / "all.json").read_text("utf-8"))["setting"]["compress"] == 20.0

    def test_ends_with_1_after_a_fault_if_that_is_asked_for_and_always_tells_it(self, monkeypatch, tmp_path):
        lost = a_result(faults=("a has started from scratch 2 times.",))
        monkeypatch.setattr(fidelity, "run_fidelity", lambda *given, **named: lost)
        for arguments, code in ([], 0), (["--check"], 1):
            done = runner.invoke(app, ["four", "--report", str(tmp_path), *arguments])
            assert done.exit_code == code
            assert "a has started from scratch 2 times." in done.output
            assert "The simulator is not" not in done.output
