"""`pollux demo`: its workload, what it makes of events, what it prints, and small demos with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from pollux.cli.demo import command, emulated
from pollux.cli.demo import report as demo_report
from pollux.cli.demo import running as demo
from pollux.cli.demo.story import DemoResult, Moment, PolicyRun, changes, printed_value, story
from pollux.cli.demo.workload import FULL, QUICK, Arrival, Target, read_workload
from pollux.cli.examples import examples_folder
from pollux.cli.trial.cluster import processes_of
from pollux.cli.trial.running import Outage, journal
from pollux.core import FrozenMap, JobId, Phase
from pollux.errors import InvalidInput, InvalidSpec
from pollux.wire.api import EventView, JobView
from pollux.wire.jobspec import parse

PATIENT_S = 100.0
BEGIN_S = 1000.0
ARRIVAL = Arrival(0.0, Target("accuracy", at_least=90.0), {"name": "a", "command": "python a.py", "requested_gpus": 2})

app = typer.Typer()
app.command()(command.demo)
runner = CliRunner()


def view(**changed):
    facts = {
        "id": JobId("a-1"),
        "name": "a",
        "team": "",
        "phase": Phase.SUCCEEDED,
        "is_rigid": False,
        "priority": 0,
        "min_gpus": 1,
        "max_gpus": None,
        "gpus": 0,
        "allocation": FrozenMap(),
        "next_allocation": None,
        "generation": 2,
        "reallocations": 1,
        "failures": 0,
        "retries": 3,
        "submitted_at_s": BEGIN_S,
        "started_at_s": BEGIN_S + 1,
        "finished_at_s": BEGIN_S + 30,
        "attained_gpu_s": 50.0,
    }
    return JobView(**{**facts, **changed})


def notice(at_s, kind, replicas, batch_size, factor):
    state = {"replicas": replicas, "batch": {"batch_size": batch_size}, "learning_rate_factors": [factor]}
    detail = FrozenMap({"at_s": BEGIN_S + at_s, "state": state})
    return EventView(1, BEGIN_S + at_s + 0.5, kind, "a-1", "…", detail)  # the service hears of it later


NOTICES = [
    EventView(1, BEGIN_S, "JobSubmitted", "a-1", "…", FrozenMap({"spec": {}})),
    notice(2, "TrainingStarted", 1, 16, 1.0),
    notice(9, "BatchChanged", 1, 32, 1.9),
    notice(12, "ReplicasChanged", 2, 32, 1.9),
    notice(12.5, "BatchChanged", 2, 64, 2.8),
    notice(29, "TrainingFinished", 2, 64, 3.0),
]
READY = [
    EventView(1, BEGIN_S + at_s, "ReplicasReady", "a-1", "…", FrozenMap({"generation": generation}))
    for at_s, generation in ((2, 1), (12, 2), (20, 2))
]
RESULT = '{"metric": "accuracy", "value": 93.5, "seconds": 1, "steps": 7}'


def told(events=NOTICES, printed=(f"epoch 1\n{RESULT}\n",), **changed):
    return story(ARRIVAL, view(**changed), events, printed, BEGIN_S)


class TestTheWorkload:
    def test_of_the_demo_is_six_different_jobs_within_a_minute(self):
        arrivals = read_workload(examples_folder() / FULL).arrivals
        assert len({str(arrival.document["command"]) for arrival in arrivals}) == len(arrivals) == 6
        assert 45 <= arrivals[-1].at_s <= 75
        assert {arrival.document["requested_gpus"] for arrival in arrivals} == {1, 2}

    @pytest.mark.parametrize("file", [FULL, QUICK])
    def test_holds_jobs_that_the_service_would_take(self, file):
        folder = examples_folder()
        for arrival in read_workload(folder / file).arrivals:
            parse(arrival.document, base_dir=str(folder))
            assert (folder / str(arrival.document["command"]).split()[1]).is_file()

    @pytest.mark.parametrize("text", ["jobs: 3", "- a", "jobs: []", "jobs: [{at_s: 0}]", ": ]"])
    def test_that_is_none_is_refused_by_name(self, tmp_path, text):
        path = tmp_path / "broken.yaml"
        path.write_text(text)
        with pytest.raises(InvalidInput) as refused:
            read_workload(path)
        assert "broken.yaml" in str(refused.value) or "line" in str(refused.value)

    def test_a_target_has_one_bound(self):
        for bounds in ({}, {"at_least": 1.0, "at_most": 2.0}):
            with pytest.raises(InvalidSpec, match="one bound"):
                Target("loss", **bounds)

    def test_a_target_knows_what_reaches_it_and_which_replica_counts(self):
        high, low = Target("accuracy", at_least=90.0), Target("loss", at_most=0.5)
        assert high.is_reached_by(90.0)
        assert not high.is_reached_by(89.9)
        assert low.is_reached_by(0.5)
        assert not low.is_reached_by(0.51)
        assert high.worst([91.0, 92.0]) == 91.0
        assert low.worst([0.1, 0.2]) == 0.2


class TestAStory:
    def test_follows_gpus_batch_size_and_learning_rate(self):
        job = told([*NOTICES, *READY])
        assert job.moments[0] == Moment(2.0, 1, 16, 1.0)
        assert [moment.gpus for moment in job.moments] == [1, 1, 2, 2, 2, 0]
        assert [moment.batch_size for moment in job.moments] == [16, 32, 32, 64, 64, 64]
        assert (job.starts, job.in_place, job.resumes, job.reallocations) == (1, 1, 0, 1)
        assert (job.submitted_at_s, job.first_gpu_at_s, job.jct_s) == (0.0, 1.0, 30.0)
        assert job.faults == []

    def test_a_job_that_is_stopped_holds_nothing(self):
        stopped = [*NOTICES[:3], notice(10, "TrainingStopped", 1, 32, 1.9), notice(15, "TrainingResumed", 1, 32, 1.9)]
        job = told(stopped)
        assert [moment.gpus for moment in job.moments] == [1, 1, 0, 1, 0]
        assert job.resumes == 1

    def test_counts_what_the_journal_tells_too_only_once(self, tmp_path):
        file = tmp_path / "journal.jsonl"
        documents = [{"type": event.kind, "body": dict(event.detail), "schema": 1} for event in NOTICES[1:]]
        file.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
        entries = journal(file, JobId("a-1"))
        assert told([*NOTICES, *entries]) == told(NOTICES) == told(entries) == told([*NOTICES[:2], *entries])
        assert journal(tmp_path / "none.jsonl", JobId("a-1")) == []

    def test_takes_the_worst_of_what_the_replicas_printed(self):
        assert told(printed=[RESULT, RESULT.replace("93.5", "92.5"), "nothing"]).value == 92.5

    @pytest.mark.parametrize(
        ("job", "fault"),
        [
            (told(printed=[RESULT.replace("93.5", "80")]), "a has not reached its target: accuracy 80, not ≥ 90."),
            (told(printed=["no result"]), "a has not printed its accuracy."),
            (told([*NOTICES, notice(20, "TrainingStarted", 1, 16, 1.0)]), "a has started from scratch 2 times."),
            (told(phase=Phase.FAILED, exit_reason="it broke"), "a is failed: it broke."),
            (told(failures=1), "a has failed 1 times on its way."),
        ],
    )
    def test_tells_what_must_not_happen(self, job, fault):
        assert job.faults == [fault]

    def test_reads_the_last_result_among_other_lines(self):
        text = f'warning: {{\n{RESULT}\n{{"metric": "loss", "value": 1}}\n{RESULT.replace("93.5", "94")}\n[1]\n'
        assert printed_value(text, "accuracy") == 94.0
        assert printed_value(text, "loss") == 1.0
        assert printed_value(text, "hit rate") is None

    def test_changes_read_as_a_way(self):
        assert changes([1, 1, 3, 2, 1]) == "1→3→2→1"
        assert changes([]) == "–"
        assert changes([16, 2048]) == "16→2048"
        assert changes([1, 2, 3, 9, 4, 3, 0.5, 5, 6]) == "1→…→9→…→0.5→…→6"
        assert changes([1.0, 1.05, 1.2, 1.1, 2.0], least=0.1) == "1→1.2→2"


def a_run(policy="pollux", job=None, **changed):
    return PolicyRun(policy, 4, 30.0, (job or told(),), ((0.0, "a-1 was submitted"),), **changed)


class TestAResult:
    def test_compares_the_first_run_with_fifo(self):
        slow = a_run("fifo", told(finished_at_s=BEGIN_S + 60))
        result = DemoResult((a_run(), slow), 2, False)
        assert result.jct_ratio_vs_fifo == 0.5
        assert result.reallocations == 1
        assert DemoResult((slow,), 2, False).jct_ratio_vs_fifo is None

    def test_of_a_job_without_end_has_no_ratio(self):
        endless = a_run("fifo", told(phase=Phase.RUNNING, finished_at_s=None))
        assert DemoResult((a_run(), endless), 2, False).jct_ratio_vs_fifo is None

    def test_gathers_the_faults_of_runs_and_jobs(self):
        runs = (a_run(faults=("1 process had to be killed.",)), a_run("fifo", told(failures=2)))
        faults = DemoResult(runs, 2, False).faults
        assert faults == ["pollux: 1 process had to be killed.", "fifo: a has failed 2 times on its way."]

    def test_is_printed_and_written_with_all_its_figures(self, tmp_path, capsys):
        outage = Outage(20.0, 24.0, {"a": (100, 150)})
        result = DemoResult((a_run(outage=outage), a_run("fifo")), 2, False)
        demo_report.print_summary(result)
        page = demo_report.write(result, tmp_path)
        printed, text = capsys.readouterr().out, page.read_text("utf-8")
        assert "1→2" in printed
        assert "16→32→64" in printed
        for said in (printed, text):
            assert "share the 2 cores" in said
            assert "a 100→150" in said
            assert "ratio 1.00" in said
        document = json.loads((tmp_path / "report.json").read_text("utf-8"))
        assert document["runs"][0]["jobs"][0]["moments"][2] == {
            "at_s": 12.0,
            "gpus": 2,
            "batch_size": 32,
            "learning_rate_factor": 1.9,
        }
        assert {path.name for path in tmp_path.glob("*.png")} == {
            "gpus-by-job.png",
            "batch-size.png",
            "learning-rate.png",
        }

    def test_of_jobs_that_never_trained_is_written_too(self, tmp_path):
        silent = told([], [], phase=Phase.PENDING, started_at_s=None, finished_at_s=None, reallocations=0)
        result = DemoResult((a_run(job=silent),), 2, True)
        demo_report.print_summary(result)
        assert "share the" not in demo_report.write(result, tmp_path).read_text("utf-8")


class TestTheCommand:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--only", "srtf"],
            ["--only", "fifo", "--kill-service"],
            ["--keep", "."],
            ["--report", "/dev/null"],
            ["--gpus", "--emulate"],
        ],
    )
    def test_refuses_what_it_cannot_do_before_anything_is_started(self, monkeypatch, arguments):
        monkeypatch.setattr(demo, "run_demo", lambda *given, **named: pytest.fail("it has begun"))
        monkeypatch.setattr(emulated, "run_emulated_demo", lambda *given, **named: pytest.fail("it has begun"))
        refused = runner.invoke(app, arguments)
        assert isinstance(refused.exception, InvalidInput)

    def test_ends_with_1_and_says_why_if_a_job_missed_its_target(self, monkeypatch, tmp_path):
        missed = DemoResult((a_run(job=replace(told(), value=12.0)),), 2, False)
        monkeypatch.setattr(demo, "run_demo", lambda *given, **named: missed)
        done = runner.invoke(app, ["--no-emulate", "--report", str(tmp_path), "--json", str(tmp_path / "all.json")])
        assert done.exit_code == 1
        assert "has not reached its target: accuracy 12, not ≥ 90" in done.output
        assert json.loads((tmp_path / "all.json").read_text("utf-8"))["reallocations"] == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
class TestWithRealProcesses:
    def test_all_jobs_reach_their_targets_though_the_service_is_killed(self, tmp_path):
        pytest.importorskip("torch")
        said = []
        result = demo.run_demo(["pollux"], is_quick=True, kills_service=True, keep=tmp_path / "kept", tell=said.append)
        assert result.faults == [], said
        (run,) = result.runs
        assert [job.starts for job in run.jobs] == [1, 1, 1]
        assert all(job.resumes == 0 for job in run.jobs)
        assert any(len({moment.batch_size for moment in job.moments}) > 1 for job in run.jobs)
        assert run.outage is not None
        assert run.outage.back_at_s > run.outage.killed_at_s
        assert all(after >= before for before, after in run.outage.steps.values())
        assert (tmp_path / "kept" / "pollux" / "pollux.db").is_file()

    def test_after_ctrl_c_nothing_runs_on(self, tmp_path):
        pytest.importorskip("torch")
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", "pollux.cli.main", "demo", "--no-emulate", "--quick", "--report", str(tmp_path)],
            env={**os.environ, "GLOO_TEST_MARK": mark},  # by that name it reaches keepers and replicas, too
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stderr is not None
        lines = []
        while "submitted" not in (line := process.stderr.readline()):
            lines.append(line)
            assert line, lines
        assert len(processes_of(mark)) > 3  # the demo, the service, two daemons
        until_s = time.monotonic() + PATIENT_S
        while len(processes_of(mark)) < 7 and time.monotonic() < until_s:  # and their keepers, and a replica
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENT_S) == 130
        process.stderr.close()
        assert processes_of(mark) == []
