"""The commands for jobs and nodes, against the REST API of a fake service."""

import fcntl
import json
import os
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.cli.live_cluster import LiveFake, serving, short_folder
from typer.testing import CliRunner

from pollux.cli import jobs as cli_jobs
from pollux.cli import standing
from pollux.cli.columns import fitted
from pollux.cli.finding import find
from pollux.cli.main import app
from pollux.core import JobFailed, JobFinished, JobId, Phase
from pollux.service.place import ClusterFolder, ServiceFile

runner = CliRunner()


@pytest.fixture
def home(monkeypatch):
    monkeypatch.delenv("POLLUX_URL", raising=False)
    with short_folder() as path:
        monkeypatch.setenv("POLLUX_HOME", str(path))
        yield path


@pytest.fixture
def service(home):
    service = LiveFake()
    with serving(service, ClusterFolder()):
        yield service


def run(*arguments, code=0):
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, (result.stdout, result.stderr)
    return result


@contextmanager
def daemon_of(folder, node):
    """As if a daemon ran there."""
    lock = folder.nodes / node / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def service_view(service):
    service.add()
    with find() as client:
        view = client.jobs().jobs[0]
    why = "replica 1-1 on node n0 ended with exit code 1" * 3
    name = "language_model_adaptive"
    return replace(view, id=JobId(f"{name}-12"), name=name, phase=Phase.SUCCEEDED, exit_reason=why)


class TestFinding:
    def test_without_a_cluster_the_way_out_is_named(self, home):
        result = run("ps", code=1)
        assert result.stderr == f"error: No cluster runs in {home}/cluster. Start one with pollux up.\n"

    def test_another_folder_is_named_in_the_way_out(self, home):
        assert f"pollux up --dir {home}/b" in run("ps", "--dir", f"{home}/b", code=1).stderr

    def test_a_service_that_does_not_listen_yet_is_waited_for(self, home, monkeypatch):
        monkeypatch.setattr(standing, "SETTLE_S", 0.1)
        folder = ClusterFolder()
        folder.make()
        folder.lock()
        told = run("top", code=1).stderr
        assert f"is just starting, or its service hangs (pid {os.getpid()})" in told
        assert "kill it with kill -9" in told
        folder.unlock()

    def test_an_address_may_come_from_the_environment(self, service, home, monkeypatch):
        monkeypatch.setenv("POLLUX_URL", ClusterFolder().running().url)
        result = run("ps", code=2)
        assert "POLLUX_TOKEN_FILE" in result.stderr
        monkeypatch.setenv("POLLUX_TOKEN_FILE", str(home / "cluster" / "token"))
        monkeypatch.setenv("POLLUX_HOME", str(home / "elsewhere"))
        assert json.loads(run("ps", "--json").stdout) == []

    def test_a_wrong_token_is_told(self, service, home, monkeypatch):
        monkeypatch.setenv("POLLUX_URL", ClusterFolder().running().url)
        (home / "other").write_text("another-token")
        monkeypatch.setenv("POLLUX_TOKEN_FILE", str(home / "other"))
        result = run("ps", code=1)
        assert "POLLUX_TOKEN_FILE" in result.stderr
        assert "another-token" not in result.stderr
        assert "Authorization" not in result.stderr, "that is for other programs"

    def test_an_address_where_nobody_is_and_a_missing_token_say_what_to_do(self, home, monkeypatch):
        monkeypatch.setenv("POLLUX_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("POLLUX_TOKEN_FILE", str(home / "token"))
        assert "Copy the file token" in run("ps", code=1).stderr
        (home / "token").write_text("a-token")
        assert "See that POLLUX_URL is right" in run("ps", code=1).stderr

    def test_a_service_that_left_its_jobs_is_told_apart_from_none(self, home):
        folder = ClusterFolder()
        folder.make()
        with daemon_of(folder, "n0"):
            told = run("ps", code=1).stderr
            assert "has ended; its daemons and jobs go on: pollux up finds them, pollux down ends them" in told
        assert "No cluster runs" in run("ps", code=1).stderr

    def test_files_that_were_removed_are_waited_for(self, service, home, monkeypatch):
        monkeypatch.setattr(standing, "SETTLE_S", 60.0)
        folder = ClusterFolder()
        running, token = folder.running(), folder.token()
        for name in ("token", "service.json"):
            (folder.path / name).unlink()

        def write_again():
            folder.write_service_file(running)
            (folder.path / "token").write_text(token)

        timer = threading.Timer(0.5, write_again)
        timer.start()
        assert json.loads(run("ps", "--json").stdout) == []
        timer.join()

    def test_what_the_service_warns_of_is_noted(self, service):
        service.warnings = ("The disk is full.",)
        assert run("ps").stderr.startswith("The disk is full.\n")
        assert run("ps", "--json").stderr == "The disk is full.\n"

    def test_a_token_that_cannot_be_read_is_told(self, service, home, monkeypatch):
        monkeypatch.setattr(standing, "SETTLE_S", 0.1)
        (home / "cluster" / "token").rename(home / "cluster" / "gone")
        assert "cannot be read: No such file" in run("ps", code=1).stderr

    def test_a_service_of_another_version_is_noted(self, service):
        folder = ClusterFolder()
        running = folder.running()
        folder.write_service_file(ServiceFile(running.pid, running.url, "0.0.0", running.started_at_s))
        result = run("ps", "--json")
        assert "The service is Pollux 0.0.0" in result.stderr
        assert json.loads(result.stdout) == []

    def test_a_service_that_does_not_answer_is_told_without_promises(self, home):
        folder = ClusterFolder()
        folder.make()
        folder.lock()
        folder.write_service_file(ServiceFile(1, "http://127.0.0.1:9", "0.0.0", 1.0))
        result = run("nodes", code=1)
        assert "does not answer" in result.stderr
        assert "Trying again" not in result.stderr
        folder.unlock()


class TestShowing:
    def test_ps_lists_what_has_not_ended(self, service):
        service.add("first")
        service.add("second", team="vision")
        service.place(**{"j-1": {"n0": 2}})
        service.hear(JobFinished(JobId("j-1"), 1))
        text = run("ps").stdout
        assert "second" in text
        assert "first" not in text
        assert "succeeded" in run("ps", "-a").stdout
        assert [job["id"] for job in json.loads(run("ps", "--json", "-a", "--team", "vision").stdout)] == ["j-2"]

    def test_ps_of_nothing_says_so_beside_the_output(self, service):
        result = run("ps")
        assert result.stdout == ""
        assert "No jobs" in result.stderr

    def test_ps_has_one_line_a_job_and_names_only_where_they_tell_something(self, service):
        service.add(retries=0)
        service.place(**{"j-1": {"n0": 1}})
        quote = "Last lines of /nodes/n0/1-1.log: Traceback (most recent call last): | File x | KeyError: 'k'"
        service.hear(JobFailed(JobId("j-1"), 1, f"replica 1-1 on node n0 ended with exit code 1. {quote}", 1))
        text = run("ps", "-a").stdout
        assert "exit code 1: KeyError: 'k'" in text
        assert "Traceback" not in text
        assert "name" not in text
        assert len(text.splitlines()) == 5, "a head, a line, a frame"
        service.add("second")
        assert "name" in run("ps", "-a").stdout

    @pytest.mark.parametrize("width", [60, 80, 120, 200])
    def test_ps_breaks_no_ids_in_a_narrow_terminal(self, service, width):
        view = service_view(service)
        columns, rows = fitted(cli_jobs._columns([view], 1.0), [view], width - 1, 3)
        shown = zip(columns, rows[0], strict=True)
        assert sum(max(len(cell.plain), len(column.title)) + 3 for column, cell in shown) < width
        assert [cell.plain for cell in rows[0]][:2] == ["language_model_adaptive-12", "succeeded"]
        assert [column.title for column in columns][-1] == "why"

    def test_describe_tells_all_but_secrets(self, service):
        service.add("first", max_gpus=4)
        service.place(**{"j-1": {"n0": 2}})
        text = run("describe", "first").stdout
        for part in ("j-1 (first)", "running", "n0×2", "1 to 4 GPUs", "python train.py", "KEY", "generation 1 runs"):
            assert part in text
        assert "hidden" not in text
        document = json.loads(run("describe", "j-1", "--json").stdout)
        assert document["job"]["phase"] == "running"
        assert document["events"]

    def test_describe_of_an_unknown_job_is_wrong_input(self, service):
        service.add("first")
        result = run("describe", "j-7", code=2)
        assert "j-7" in result.stderr
        assert "pollux ps -a" in result.stderr

    def test_nodes_show_who_is_there(self, service):
        service.add()
        service.place(**{"j-1": {"n0": 2}})
        service.away.add("n1")
        result = run("nodes")
        assert "j-1×2" in result.stdout
        assert "away" in result.stdout
        assert "4 GPUs" in result.stderr

    def test_nodes_are_drained_and_used_again(self, service):
        view = json.loads(run("drain", "n0", "n1", "--json").stdout)
        assert [node["state"] for node in view["nodes"]] == ["drained", "drained"]
        assert "ready" in run("undrain", "n1").stdout


class TestOrders:
    def test_several_jobs_are_paused_and_resumed(self, service):
        service.add("a")
        service.add("b")
        assert run("pause", "a", "j-2").stdout == "j-1 (a): paused\nj-2 (b): paused\n"
        assert [job["phase"] for job in json.loads(run("resume", "a", "b", "--json").stdout)] == ["pending"] * 2

    def test_one_that_fails_does_not_keep_the_others(self, service):
        service.add("a")
        result = run("cancel", "nobody", "a", code=1)
        assert result.stdout == "j-1 (a): cancelled\n"
        assert "nobody" in result.stderr

    def test_bounds_change_one_at_a_time(self, service):
        service.add("a", min_gpus=2, max_gpus=3)
        assert json.loads(run("scale", "a", "--max", "0", "--json").stdout)["max_gpus"] is None
        assert run("scale", "a", "--min", "1").stdout == "j-1 (a): 1 GPU or more\n"
        assert "--max" in run("scale", "a", code=2).stderr
        assert "more than --max 1. Give --max 2" in run("scale", "a", "--min", "2", "--max", "1", code=2).stderr
        run("scale", "a", "--min", "2", "--max", "3")
        assert "Give --max, too" in run("scale", "a", "--min", "4", code=2).stderr
        assert "Give a smaller --min, too" in run("scale", "a", "--max", "1", code=2).stderr


class TestWaiting:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        monkeypatch.setattr(cli_jobs, "LOOK_S", 0.01)

    def test_all_succeeded_is_zero(self, service):
        for job in (service.add(), service.add()):
            service.place(**{job: {"n0": 1}})
            service.hear(JobFinished(job, 1))
        result = run("wait", "j-1", "j-2")
        assert result.stderr.count("succeeded after") == 2

    @pytest.mark.parametrize(("code", "expected"), [(7, 7), (None, 1), (-9, 1), (200, 1)])
    def test_a_failed_job_hands_on_its_exit_code(self, service, code, expected):
        job = service.add(retries=0)
        service.place(**{job: {"n0": 1}})
        service.hear(JobFailed(job, 1, "it broke", code))
        assert "it broke" in run("wait", job, code=expected).stderr

    def test_a_cancelled_job_is_three(self, service):
        job = service.add()
        run("cancel", job)
        assert json.loads(run("wait", job, "--json", code=3).stdout)[0]["phase"] == "cancelled"

    def test_a_job_that_takes_too_long_is_124(self, service):
        job = service.add()
        assert "is still pending" in run("wait", job, "--timeout", "0.05", code=124).stderr

    def test_it_waits_for_the_end(self, service):
        job = service.add()
        service.place(**{job: {"n0": 1}})
        threading.Timer(0.1, service.hear, [JobFinished(job, 1)]).start()
        run("wait", job)


def test_tab_offers_jobs_and_is_silent_without_a_cluster(service, home, monkeypatch):
    service.add("first")
    environment = {"_POLLUX_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "pollux describe "}
    assert "j-1" in runner.invoke(app, [], env=environment, prog_name="pollux").output
    monkeypatch.setenv("POLLUX_HOME", str(home / "elsewhere"))
    assert "error" not in runner.invoke(app, [], env=environment, prog_name="pollux").output
