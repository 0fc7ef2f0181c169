"""`pollux logs`, `events`, `top`, `submit` and `run`, against the REST API of a fake service."""

import io
import json
import time
from dataclasses import replace

import pytest
from rich.console import Console
from tests.cli.live_cluster import LiveFake, serving, short_folder
from typer.testing import CliRunner

from pollux.cli import finding, follow, following, job_output, output, top
from pollux.cli import submit as cli_submit
from pollux.cli.main import app
from pollux.core import JobFailed, JobFinished, JobId, Progress, RoundDue
from pollux.errors import InvalidJob, Temporary
from pollux.service.place import ClusterFolder
from pollux.wire.api import Fault
from pollux.wire.entries import BatchSetting, LearningRateChanged, RunState
from pollux.wire.service_client import ServiceClient

runner = CliRunner()
JOB = JobId("j-1")


@pytest.fixture
def home(monkeypatch):
    monkeypatch.delenv("POLLUX_URL", raising=False)
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    monkeypatch.setattr(following, "LOOK_S", 0.01)
    monkeypatch.setattr(finding, "LOOK_S", 0.01)
    with short_folder() as path:
        monkeypatch.setenv("POLLUX_HOME", str(path))
        yield path


@pytest.fixture
def service(home):
    service = LiveFake()
    with serving(service, ClusterFolder()):
        yield service


@pytest.fixture
def running(service):
    service.add("first", retries=0)
    service.place(**{JOB: {"n0": 1}})
    return service


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("from pollux.torch import Job\n")
    (tmp_path / "plain.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments, code=0, **more):
    result = runner.invoke(app, list(arguments), **more)
    assert result.exit_code == code, (result.stdout, result.stderr)
    return result


def at_look(service, acts):
    """Do that when the logs are asked for so often."""

    def on_look(looks):
        if act := acts.pop(looks, None):
            act()

    service.on_look = on_look


class TestLogs:
    def test_the_main_replica_alone_is_shown(self, running):
        running.prints("n0", "1-1", "epoch 1\nepoch 2\n")
        running.prints("n1", "1-2", "epoch 1, too\n")
        assert run("logs", "first").stdout == "epoch 1\nepoch 2\n"

    def test_all_replicas_are_told_apart(self, running):
        running.prints("n0", "1-1", "epoch 1\n")
        running.prints("n1", "1-2", "a\nb\rc\nd")
        assert run("logs", JOB, "--all").stdout == "epoch 1\n[1-2] a\n[1-2] c\n[1-2] d\n"

    def test_one_replica_is_shown_and_unknown_ones_are_told(self, running):
        running.prints("n0", "1-1", "epoch 1\n")
        running.prints("n1", "1-2", "mine\n")
        assert run("logs", JOB, "--replica", "1-2").stdout == "mine\n"
        assert "1-1, 1-2" in run("logs", JOB, "--replica", "7", code=2).stderr
        assert "--all" in run("logs", JOB, "--replica", "1-1", "--all", code=2).stderr

    def test_the_last_lines(self, running):
        running.prints("n0", "1-1", "".join(f"{number}\n" for number in range(100)))
        assert run("logs", JOB, "--tail", "2").stdout == "98\n99\n"
        assert run("logs", JOB, "--tail", "0").stdout == ""

    def test_long_logs_come_in_parts(self, running, monkeypatch):
        monkeypatch.setattr(job_output, "PART_BYTES", 10)
        text = "".join(f"line {number}\n" for number in range(50))
        running.prints("n0", "1-1", text)
        assert run("logs", JOB).stdout == text

    def test_json_is_an_object_a_line(self, running):
        running.prints("n0", "1-1", "epoch 1\n")
        found = [json.loads(line) for line in run("logs", JOB, "--json").stdout.splitlines()]
        assert found == [{"replica": "1-1", "node": "n0", "is_main": True, "text": "epoch 1\n"}]

    def test_following_goes_over_to_the_next_replica_without_repeating(self, running):
        running.prints("n0", "1-1", "epoch 1\n")
        running.prints("n1", "2-2", "epoch 1\n")

        def leave():
            running.prints("n0", "1-1", "epoch 2\n", is_running=False)
            running.prints("n1", "2-2", "epoch 2\nepoch 3\n")

        def end():
            running.prints("n1", "2-2", "epoch 4", is_running=False)
            running.hear(JobFinished(JOB, 1))

        at_look(running, {3: leave, 6: end})
        assert run("logs", "-f", JOB).stdout == "epoch 1\nepoch 2\nepoch 3\nepoch 4\n"

    def test_another_try_shows_its_lines_though_they_are_the_same(self, running):
        running.prints("n0", "1-1", "loading\nepoch 1\n")

        def fail():
            running.prints("n0", "1-1", "", is_running=False)

        def try_again():
            running.prints("n0", "2-2", "loading\nepoch 1\nepoch 2\n")

        def end():
            running.prints("n0", "2-2", "", is_running=False)
            running.hear(JobFinished(JOB, 1))

        at_look(running, {3: fail, 4: try_again, 6: end})
        story = "loading\nepoch 1\nloading\nepoch 1\nepoch 2\n"
        assert run("logs", "-f", JOB).stdout == story

    def test_tries_that_all_have_ended_are_shown_one_after_the_other(self, running):
        running.prints("n0", "1-1", "loading\n", is_running=False, at_s=10.0)
        running.prints("n0", "2-1", "loading\n", is_running=False, at_s=20.0)
        assert run("logs", JOB).stdout == "loading\nloading\n"

    def test_what_another_replica_printed_long_ago_is_left_out(self, running, monkeypatch):
        monkeypatch.setattr(job_output, "OVERLAP_S", 0.0)
        running.prints("n0", "1-1", "mine 1\n")
        running.prints("n1", "1-2", "other 1\n")

        def leave():
            running.prints("n0", "1-1", "mine 2\n", is_running=False)

        def go_on():
            running.prints("n1", "1-2", "other 2\n", is_running=False)
            running.hear(JobFinished(JOB, 1))

        at_look(running, {3: leave, 5: go_on})
        assert run("logs", "-f", JOB).stdout == "mine 1\nmine 2\nother 2\n"

    def test_the_story_of_a_job_that_was_stopped_and_went_on(self, running):
        running.prints("n0", "1-1", "epoch 1\n", is_running=False, at_s=10.0)
        running.prints("n0", "1-2", "epoch 1 of another\n", is_running=False, at_s=10.5)
        running.prints("n1", "2-3", "epoch 2\n", is_running=False, at_s=20.0)
        running.prints("n1", "2-4", "epoch 2 of another\n", is_running=False, at_s=20.0)
        running.prints("n0", "3-5", "epoch 3\n", at_s=30.0)
        assert run("logs", JOB).stdout == "epoch 1\nepoch 2\nepoch 3\n"

    def test_following_survives_a_restart_of_the_service(self, running, monkeypatch):
        monkeypatch.setattr(finding, "SILENT_S", 0.0)
        running.prints("n0", "1-1", "epoch 1\n")
        asked = []
        real = ServiceClient.logs

        def flaky(client, job):
            asked.append(job)
            if 2 <= len(asked) <= 4:
                raise Temporary("nobody is there.", 1.0)
            if len(asked) == 6:
                running.hear(JobFinished(JOB, 1))
            return real(client, job)

        monkeypatch.setattr(ServiceClient, "logs", flaky)
        result = run("logs", "-f", JOB)
        assert result.stdout == "epoch 1\n"
        assert "does not answer" in result.stderr
        assert "is back" in result.stderr

    def test_the_end_of_the_cluster_ends_following(self, running, monkeypatch):
        def gone(client, job):
            folder = ClusterFolder()
            monkeypatch.setattr(ClusterFolder, "is_locked", False)
            folder.remove_service_file()
            raise Temporary("nobody is there.", 1.0)

        monkeypatch.setattr(finding, "RESTART_S", 0.0)
        monkeypatch.setattr(ServiceClient, "logs", gone)
        assert "was ended" in run("logs", "-f", JOB, code=1).stderr


class TestEvents:
    def test_the_last_ones_of_all_or_of_one_job(self, running):
        running.add("second")
        assert len(run("events", "--all").stdout.splitlines()) == len(running.log.stored)
        assert len(run("events", "--limit", "2").stdout.splitlines()) == 2
        text = run("events", "second", "--limit", "0").stdout
        assert "JobSubmitted" in text
        assert JOB not in text

    def test_json_has_all_details_but_secrets(self, running):
        lines = run("events", "--json", "--all", "--limit", "0").stdout.splitlines()
        assert [json.loads(line)["sequence"] for line in lines] == list(range(1, len(lines) + 1))
        assert "hidden" not in "".join(lines)

    def test_what_changes_nothing_is_left_out(self, running):
        running.place(**{JOB: {"n0": 1}})  # as before
        running.place(**{JOB: {"n1": 2}})
        text = run("events").stdout
        assert text.count("PlanMade") == 2
        assert "RoundDue" not in text
        assert "RoundDue" in run("events", "--all").stdout
        assert run("events", "--json").stdout.count("PlanMade") == 2

    def test_a_plan_that_starts_a_job_again_where_it_was_is_news(self, service):
        service.add(retries=1)
        service.place(**{JOB: {"n0": 1}})
        quote = "Last lines of /nodes/n0/1-1.log: Traceback: | KeyError: 'k'"
        service.hear(JobFailed(JOB, 1, f"replica 1-1 on node n0 ended with exit code 1. {quote}", 1))
        service.place(**{JOB: {"n0": 1}})
        text = run("events").stdout
        assert text.count("PlanMade") == 2
        assert "replica 1-1 on node n0 ended with exit code 1: KeyError: 'k'." in text

    def test_small_steps_of_a_learning_rate_add_up(self, running):
        def moved(before, after):
            state = RunState(1, Progress(1.0, 2.0), 1, BatchSetting(8, 8), (after,), 0, 0)
            running.log.note(1.0, LearningRateChanged(1.0, state, (before,)), JOB)

        for step in range(6):
            moved(1.0 + 0.04 * step, 1.04 + 0.04 * step)
        text = run("events", JOB).stdout
        assert [line.split("→")[1].split()[1] for line in text.splitlines() if "LearningRate" in line] == [
            "1.12",
            "1.24",
        ]

    def test_the_last_so_many_are_looked_for_behind_what_is_left_out(self, running, monkeypatch):
        monkeypatch.setattr(follow, "MAX_LAST", 4)
        plan = running.log.stored[-2].document
        for number in range(2, 20):
            running.hear(RoundDue(number))
            running.hear(replace(plan, round=number))
        text = run("events", "--limit", "3").stdout
        assert [line.split()[2] for line in text.splitlines()] == ["JobSubmitted", "PlanMade", "ReplicasReady"]

    def test_following_goes_on_until_it_is_interrupted(self, running, monkeypatch):
        pages = []

        def stop(event, as_json):
            pages.append(event)
            if len(pages) == len(running.log.stored):
                raise KeyboardInterrupt

        monkeypatch.setattr(follow, "_print", stop)
        run("events", "-f", "--all", "--limit", "1000", code=130)


class TestTop:
    def test_without_a_terminal_it_prints_once(self, running):
        running.add("second")
        text = run("top").stdout
        assert "1 of 4 GPUs used on 2 nodes · fifo, round 1" in text
        assert "running" in text
        assert "pending" in text

    def test_json_has_cluster_and_jobs(self, running):
        document = json.loads(run("top", "--json").stdout)
        assert document["cluster"]["gpus"] == 4
        assert document["jobs"][0]["id"] == JOB

    def test_jobs_that_ended_stay_for_a_while(self, running):
        running.now_s = time.time()
        with finding.find() as client:
            jobs = top.RecentJobs()
            assert [job.id for job in jobs.look(client).jobs] == [JOB]
            running.add("second")
            jobs.look(client)
            running.hear(JobFinished(JOB, 1))
            found = jobs.look(client).jobs
        assert [(job.id, job.phase.is_terminal) for job in found] == [("j-2", False), (JOB, True)]

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_the_screen_fits_the_terminal(self, running, width):
        running.away.add("n1")
        with finding.find() as client:
            look = top.RecentJobs().look(client)
        target = io.StringIO()
        Console(file=target, width=width, force_terminal=True, color_system=None).print(top.screen(look, width))
        lines = target.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert "j-1" in target.getvalue()
        assert "running" in target.getvalue()
        assert "out of reach: n1" in " ".join(target.getvalue().split())

    @pytest.mark.parametrize("width", [80, 100, 200])
    def test_what_is_shown_is_shown_whole(self, running, width, monkeypatch):
        with finding.find() as client:
            look = top.RecentJobs().look(client)
        job = replace(look.jobs[0], id=JobId("language_model_adaptive-12"), name="language_model_adaptive")
        job = replace(job, progress=0.13, batch_size=1024, eta_s=7500.0)
        target = io.StringIO()
        console = Console(file=target, width=width, force_terminal=True, color_system=None)
        monkeypatch.setattr(output, "console", console)
        console.print(top.screen(top.Look(look.cluster, (job,)), width))
        text = target.getvalue()
        for word in ("language_model_adaptive-12", "running", "13 %", "1024", "2 h 5 min"):
            assert word in text
        assert ("━━──────────" in text) == (width > 100)
        assert "…" not in text


class TestSubmit:
    def test_the_id_alone_is_printed(self, service, script):
        assert (
            run("submit", "--name", "mine", "--min-gpus", "2", "--", "python", "train.py", "--lr", "1").stdout
            == "j-1\n"
        )
        spec = service.job(JOB).spec
        assert (spec.name, spec.min_gpus, spec.command) == ("mine", 2, ("python", "train.py", "--lr", "1"))

    def test_files_hold_jobs_and_options_win(self, service, script):
        (script / "a.yaml").write_text("command: python train.py\nteam: vision\n")
        (script / "b.yaml").write_text("command: python train.py\n---\ncommand: python train.py\n")
        assert run("submit", "a.yaml", "b.yaml", "--team", "speech").stdout == "j-1\nj-2\nj-3\n"
        assert {job.spec.team for job in service.scheduler.state.jobs.values()} == {"speech"}

    def test_all_faults_of_all_files_are_told_and_nothing_is_submitted(self, service, script):
        (script / "a.yaml").write_text("command: python train.py\ncolour: red\n")
        (script / "b.yaml").write_text("command: python absent.py\n")
        result = run("submit", "a.yaml", "b.yaml", code=2)
        assert "a.yaml:2: colour" in result.stderr
        assert "b.yaml:1: command" in result.stderr
        assert not service.scheduler.state.jobs

    def test_what_the_service_refuses_is_told_and_nothing_is_submitted(self, service, script):
        service.refuses = InvalidJob([Fault("min_gpus", "9", "more than there are", "Ask for fewer")])
        result = run("submit", "--min-gpus", "9", "--", "python", "train.py", code=2)
        assert "min_gpus = 9: more than there are. Ask for fewer." in result.stderr

    def test_a_dry_run_changes_nothing(self, service, script):
        result = run("submit", "--dry-run", "--", "python", "train.py")
        assert (result.stdout, result.stderr) == ("", "1 job would be taken.\n")
        assert not service.scheduler.state.jobs

    def test_a_script_without_pollux_runs_as_it_is(self, service, script):
        result = run("submit", "--", "python", "plain.py")
        assert "plain.py does not import pollux.torch" in result.stderr
        assert service.job(JOB).spec.rigid

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            ([], "nothing to submit"),
            (["python", "train.py"], "pollux submit -- python train.py"),
            (["a.yaml", "--", "python", "train.py"], "a command is given, too"),
        ],
    )
    def test_what_cannot_be_meant_is_told(self, service, script, arguments, word):
        assert word in " ".join(run("submit", *arguments, code=2).stderr.split())


class TestRun:
    def test_it_shows_output_and_what_becomes_of_the_job(self, service, script):
        def start():
            service.place(**{JOB: {"n0": 2}})
            service.prints("n0", "1-1", "epoch 1\n")

        def end():
            service.prints("n0", "1-1", "epoch 2\n", is_running=False)
            service.hear(JobFinished(JOB, 1))

        at_look(service, {2: start, 4: end})
        result = run("run", "--name", "mine", "--", "python", "train.py")
        assert result.stdout == "epoch 1\nepoch 2\n"
        assert "waits: free GPUs" in result.stderr
        assert "trains on 2 GPUs (n0×2)" in result.stderr
        assert "succeeded after" in result.stderr

    def test_a_failure_is_told_after_its_output_and_before_the_next_try(self, service, script, monkeypatch):
        said = []
        monkeypatch.setattr(following, "as_text", lambda file, is_main, text: said.append(text))
        monkeypatch.setattr(following.Follower, "_say", lambda follower, what: said.append(what))

        def fail():
            service.place(**{JOB: {"n0": 1}})
            service.prints("n0", "1-1", "last words\n", is_running=False)
            service.hear(JobFailed(JOB, 1, "it broke", 7))

        at_look(service, {2: fail, 6: lambda: service.cancel(JOB)})
        monkeypatch.setattr(service, "waits_for", lambda job: "its next try" if job.num_failures else "free GPUs")
        run("run", "python", "train.py", code=3)
        assert said[:2] == ["waits: free GPUs", "last words\n"]
        assert said[2].startswith("failed with exit code 7")
        assert said[3:] == ["waits: its next try"]

    def test_a_plain_command_runs(self, service, script):
        def end():
            service.place(**{JOB: {"n0": 1}})

        def finish():
            service.hear(JobFinished(JOB, 1))

        at_look(service, {2: end, 4: finish})
        assert "runs on 1 GPU (n0×1)" in run("run", "python", "plain.py").stderr

    def test_it_ends_as_the_job_does(self, service, script):
        def end():
            service.place(**{JOB: {"n0": 1}})
            service.hear(JobFailed(JOB, 1, "it broke", 7))

        at_look(service, {2: end})
        assert "it broke" in run("run", "--retries", "0", "python", "train.py", code=7).stderr

    def test_json_prints_the_job_and_nothing_else(self, service, script, monkeypatch):
        def end(*_):
            if service.job(JOB).phase == "pending":
                service.place(**{JOB: {"n0": 1}})
                service.hear(JobFinished(JOB, 1))

        monkeypatch.setattr(following.Follower, "_tell_events", end)
        assert json.loads(run("run", "--json", "--", "python", "train.py").stdout)["phase"] == "succeeded"

    def test_without_a_terminal_ctrl_c_detaches(self, service, script, interrupted):
        result = run("run", "--", "python", "train.py", code=130)
        assert "pollux logs -f j-1" in result.stderr
        assert service.job(JOB).phase == "pending"

    @pytest.mark.parametrize(("answer", "code", "phase"), [("x\nc\n", 3, "cancelled"), ("d\n", 130, "pending")])
    def test_at_a_terminal_it_asks(self, service, script, monkeypatch, interrupted, answer, code, phase):
        monkeypatch.setattr(cli_submit, "_has_terminal", lambda: True)
        result = run("run", "--", "python", "train.py", code=code, input=answer)
        assert "Cancel the job, or detach" in result.stderr
        assert service.job(JOB).phase == phase

    def test_a_second_ctrl_c_detaches_at_once(self, service, script, monkeypatch, interrupted):
        def interrupt():
            raise KeyboardInterrupt

        monkeypatch.setattr(cli_submit, "_has_terminal", interrupt)
        run("run", "--", "python", "train.py", code=130)
        assert service.job(JOB).phase == "pending"

    @pytest.fixture
    def interrupted(self, monkeypatch):
        """Somebody presses Ctrl-C once, while the job is followed."""
        left = [KeyboardInterrupt()]

        def sleep(seconds):
            if left:
                raise left.pop()

        monkeypatch.setattr(following, "sleep", sleep)
