"""`pollux launch`, `pollux resize` and `pollux node`: what a person sees, and exit codes. Daemons are fake."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli import launch as cli_launch
from pollux.cli import tending
from pollux.cli.main import app
from pollux.cli.replica_output import ReplicaOutput
from pollux.errors import PolluxError
from pollux.node import daemon as node_daemon
from pollux.node import launching
from pollux.node.folder import StateFolder
from pollux.node.launched import Launched
from pollux.node.launching import LocalCluster
from pollux.wire.nodes import Launch, ReplicaHere

FAKE = Path(__file__).parents[1] / "node" / "fake_daemon.py"
PATIENT_S = 60.0

runner = CliRunner()


@pytest.fixture(autouse=True)
def home(monkeypatch):
    path = Path(tempfile.mkdtemp(prefix="launch-", dir="/tmp"))
    monkeypatch.setenv("POLLUX_HOME", str(path))
    monkeypatch.setattr(launching, "COMMAND", (sys.executable, str(FAKE)))
    monkeypatch.setattr(cli_launch, "find_spec", lambda name: name)  # torch is not needed here
    monkeypatch.setattr(tending, "FIRST_PAUSE_S", 0.01)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def when_it_trains(base, job, act):
    """Call that in another thread as soon as the job trains."""

    def watch():
        until_s = time.monotonic() + PATIENT_S
        while time.monotonic() < until_s:
            try:
                with Launched(base / job) as launched:
                    status = launched.status(job)
            except PolluxError:
                status = None
            if status is not None and status.phase == "training":
                act()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


class TestLaunch:
    def test_shows_the_replicas_lines_and_ends_well(self, script):
        result = runner.invoke(app, ["launch", "--replicas", "2", script, "finish", "--lr", "0.1"])
        assert result.exit_code == 0, result.output
        assert result.stdout == "1-1 begins finish --lr 0.1\n[1-2] 1-2 begins finish --lr 0.1\n"
        assert "train: 2 replicas train after" in result.stderr
        assert result.stderr.startswith("train: starting 2 replicas; logs in /")
        assert result.stderr.endswith("train: finished.\n")

    def test_options_before_the_script_are_checked(self, script):
        result = runner.invoke(app, ["launch", "--replcas", "2", script])
        assert result.exit_code == 2
        assert "--replicas" in result.stderr

    def test_a_script_that_is_not_there_is_wrong_input(self):
        result = runner.invoke(app, ["launch", "no.py"])
        assert result.exit_code == 2
        assert "SCRIPT = 'no.py': no such file" in result.stderr

    def test_more_replicas_than_slots_are_wrong_input(self, script):
        result = runner.invoke(app, ["launch", "--replicas", "3", "--slots", "2", script])
        assert result.exit_code == 2
        assert "more than there is room for on 2 slots" in result.stderr

    def test_a_name_that_was_used_before_gets_a_number(self, script, home):
        for _ in range(2):
            assert runner.invoke(app, ["launch", script, "finish"]).exit_code == 0
        assert {path.name for path in (home / "launch").iterdir()} == {"train", "train-2"}

    def test_a_name_that_is_given_again_goes_on_from_its_checkpoint(self, script, home):
        saved = home / "launch" / "mine" / "checkpoints" / "checkpoint-000007-step-9"
        saved.mkdir(parents=True)
        result = runner.invoke(app, ["launch", "--name", "mine", script, "finish"])
        assert result.exit_code == 0
        assert f"mine goes on from its checkpoint in {saved.parent}." in result.stderr

    def test_what_was_printed_under_that_name_before_is_not_shown_again(self, script):
        command = ["launch", "--name", "mine", script, "finish"]
        assert runner.invoke(app, command).stdout == runner.invoke(app, command).stdout == "1-1 begins finish\n"

    @pytest.mark.parametrize("name", ["a/b", "..", "x" * 60])
    def test_an_impossible_name_is_wrong_input(self, script, name):
        result = runner.invoke(app, ["launch", "--name", name, script, "finish"])
        assert result.exit_code == 2
        assert name in result.stderr

    def test_a_failure_after_training_is_tried_again(self, script):
        result = runner.invoke(app, ["launch", script, "fail:2"])
        assert result.exit_code == 0
        assert "holds no checkpoint (try 1 of 3)." in result.stderr
        assert "(try 2 of 3)" in result.stderr

    def test_a_crash_loop_ends_with_the_reason_and_the_jobs_exit_code(self, script):
        result = runner.invoke(app, ["launch", "--retries", "1", script, "fail:9"])
        assert result.exit_code == 3
        words = "failed for the second time: replica 2-1 ended with exit code 3. Its log: /x/2-1.log."
        assert words in result.stderr
        assert "Boom" not in result.stderr

    def test_a_script_that_fails_before_its_first_step_is_not_tried_again(self, script):
        result = runner.invoke(app, ["launch", script, "break"])
        assert result.exit_code == 3
        assert "train: failed: replica 1-1 ended with exit code 3." in result.stderr
        assert "again" not in result.stderr

    def test_unless_that_was_asked_for(self, script):
        result = runner.invoke(app, ["launch", "--retries", "2", script, "break"])
        assert "failed for the third time" in result.stderr

    @pytest.mark.parametrize(
        ("plan", "words"),
        [
            ("train:save", "saved and stopped. Go on: pollux launch --name train"),
            ("train", "stopped; nothing is saved."),
            ("train:late", "did not save within 60 s and was killed; nothing is saved."),
        ],
    )
    def test_ctrl_c_lets_the_job_save_and_stop(self, script, home, plan, words):
        thread = when_it_trains(home / "launch", "train", lambda: os.kill(os.getpid(), signal.SIGINT))
        result = runner.invoke(app, ["launch", script, plan])
        thread.join()
        assert result.exit_code == 130
        assert "train: saving; Ctrl-C again kills." in result.stderr
        assert f"train: {words}" in result.stderr

    @pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
    def test_what_it_is_to_ignore_it_ignores(self, script, home, number):
        """As under nohup, or in the background of a script; SIGTERM is always heard."""
        before = signal.signal(number, signal.SIG_IGN)

        def act():
            for each in (number, signal.SIGTERM):
                os.kill(os.getpid(), each)

        try:
            thread = when_it_trains(home / "launch", "train", act)
            result = runner.invoke(app, ["launch", script, "train"])
            thread.join()
            assert signal.getsignal(number) is signal.SIG_IGN
        finally:
            signal.signal(number, before)
        assert result.exit_code == 128 + signal.SIGTERM
        assert "Ctrl-C again kills" in result.stderr  # and not: it was killed by the second one

    def test_a_checkpoint_of_an_earlier_run_is_not_taken_for_a_new_one(self, script, home):
        (home / "launch" / "mine" / "checkpoints" / "checkpoint-000007-step-9").mkdir(parents=True)
        thread = when_it_trains(home / "launch", "mine", lambda: os.kill(os.getpid(), signal.SIGINT))
        result = runner.invoke(app, ["launch", "--name", "mine", script, "train"])
        thread.join()
        assert "mine: stopped; nothing new is saved. Go on: pollux launch --name mine" in result.stderr

    def test_without_torch_it_says_how_to_get_it(self, script, monkeypatch):
        monkeypatch.setattr(cli_launch, "find_spec", lambda name: None)
        result = runner.invoke(app, ["launch", script, "train"])
        assert result.exit_code == 1
        assert "needs the package 'torch'. Install it with: pip install 'pollux[torch]'." in result.stderr

    @pytest.mark.parametrize("options", [[], ["--name", "mine"]])
    def test_a_folder_that_is_none_is_named(self, script, home, options):
        (home / "file").touch()
        result = runner.invoke(app, ["launch", "--dir", str(home / "file"), *options, script, "train"])
        assert result.exit_code == 2
        assert "--dir = " in result.stderr
        assert "Give one that you may write to, or set POLLUX_HOME." in result.stderr

    def test_a_name_that_runs_is_refused_with_what_to_do(self, script, home):
        with LocalCluster(home / "launch" / "mine"):
            result = runner.invoke(app, ["launch", "--name", "mine", script, "finish"])
        assert result.exit_code == 2
        assert "pollux resize mine N" in result.stderr

    def test_a_daemon_that_is_killed_is_started_again(self, script, home):
        node_file = home / "launch" / "train" / "n1" / "node.json"

        def kill():
            first = json.loads(node_file.read_text())["pid"]
            os.kill(first, signal.SIGKILL)
            until_s = time.monotonic() + PATIENT_S
            while json.loads(node_file.read_text() or '{"pid": 0}')["pid"] in (0, first) and time.monotonic() < until_s:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = when_it_trains(home / "launch", "train", kill)
        result = runner.invoke(app, ["launch", "--nodes", "2", script, "train"])
        thread.join()
        assert result.exit_code == 128 + signal.SIGTERM
        assert "the daemon of node n1 has ended and is started again" in result.stderr

    def test_a_resize_is_told(self, script, home):
        def change():
            with Launched(home / "launch" / "train") as launched:
                _ = launched.news
                launched.wait("train", launched.resize("train", 3), PATIENT_S)
            os.kill(os.getpid(), signal.SIGINT)

        thread = when_it_trains(home / "launch", "train", change)
        result = runner.invoke(app, ["launch", "--replicas", "2", script, "train"])
        thread.join()
        assert result.exit_code == 130
        assert "train: 2 → 3 replicas in" in result.stderr
        assert "[2-3] 2-3 begins train" in result.stdout


class TestResize:
    @pytest.fixture
    def cluster(self, home):
        with LocalCluster(home / "launch" / "train", nodes=2, slots=8) as cluster:
            cluster.wait("train", cluster.run(Launch("train", "/no/train.py", ("train",)), 2), PATIENT_S)
            yield cluster

    @pytest.mark.usefixtures("cluster")
    def test_prints_old_and_new_and_how_long_it_took(self):
        result = runner.invoke(app, ["resize", "train", "4"])
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith("train: 2 → 4 replicas in 0.")

    def test_as_json(self, cluster):
        result = runner.invoke(app, ["resize", "train", "3", "--json"])
        answer = json.loads(result.stdout)
        assert answer.pop("seconds") > 0
        assert answer == {
            "job": "train",
            "generation": 2,
            "from": {"n0": 2},
            "to": {"n0": 2, "n1": 1},
            "outcome": "ready",
        }
        assert cluster.status("train").allocation.gpus == {"n0": 2, "n1": 1}

    def test_moves_to_the_nodes_that_are_named(self, cluster):
        result = runner.invoke(app, ["resize", "train", "2", "--nodes", "n1"])
        assert result.stdout.startswith("train: 2 replicas, on n1 in")
        assert cluster.status("train").allocation.gpus == {"n1": 2}

    @pytest.mark.usefixtures("cluster")
    def test_says_so_if_nothing_changes(self):
        assert runner.invoke(app, ["resize", "train", "2"]).stdout == "train has 2 replicas already.\n"

    @pytest.mark.usefixtures("cluster")
    def test_does_not_wait_if_told_so(self):
        result = runner.invoke(app, ["resize", "train", "7", "--no-wait"])
        assert result.stdout == "train: 2 → 7 replicas, asked for as generation 2.\n"

    @pytest.mark.usefixtures("cluster")
    def test_a_change_that_is_given_up_fails_with_the_reason(self):
        result = runner.invoke(app, ["resize", "train", "7"])
        assert result.exit_code == 1
        assert "given up, since replica 2-7 on node n0 ended with exit code 1." in result.stderr
        result = runner.invoke(app, ["resize", "train", "7", "--json"])
        assert result.exit_code == 1
        assert json.loads(result.stdout)["outcome"] == "abandoned"

    @pytest.mark.usefixtures("cluster")
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["train", "17"], "2 nodes with 8 slots each"),
            (["train", "3", "--nodes", "3"], "not from 1 to 2"),
            (["train", "3", "--nodes", "n0,n7"], "Known: n0, n1"),
            (["trains", "3"], "Did you mean 'train'?"),
        ],
    )
    def test_wrong_input_is_named(self, arguments, words):
        result = runner.invoke(app, ["resize", *arguments])
        assert result.exit_code == 2
        assert words in result.stderr

    def test_a_job_that_has_ended_is_not_resized(self, cluster):
        cluster.wait_end("train", cluster.stop("train"), PATIENT_S)
        result = runner.invoke(app, ["resize", "train", "4"])
        assert result.exit_code == 1
        assert "train is ended" in result.stderr

    def test_one_that_is_still_starting_says_so(self, home):
        state = StateFolder(home / "launch" / "train")
        state.lock()
        result = runner.invoke(app, ["resize", "train", "4"])
        state.close()
        assert result.exit_code == 1
        assert "train is still starting: try again in a few seconds." in result.stderr

    @pytest.mark.usefixtures("cluster")
    def test_a_restart_says_why(self):
        result = runner.invoke(app, ["resize", "train", "6"])
        assert result.exit_code == 0
        assert "train: its code has changed: it saves and starts anew." in result.stderr

    def test_a_launch_that_is_over_says_how_to_start_it_again(self, home):
        (home / "launch" / "train").mkdir(parents=True)
        result = runner.invoke(app, ["resize", "train", "4"])
        assert result.exit_code == 1
        assert "train does not run. Start it again with pollux launch --name train" in result.stderr


class TestReplicaOutput:
    @pytest.fixture
    def replica(self, tmp_path):
        def make(name, exit_code=None):
            return ReplicaHere(name, 1, 1, None, exit_code, str(tmp_path / f"{name}.log"))

        return make

    def write(self, here, text):
        with Path(here.log).open("a", newline="") as file:
            file.write(text)

    def test_half_a_line_waits_for_the_rest_unless_the_replica_has_ended(self, tmp_path, replica, capsys):
        shown = ReplicaOutput(tmp_path)
        shown.know(replica("1-1"))
        self.write(replica("1-1"), "one\ntw")
        assert shown.show()
        assert capsys.readouterr().out == "one\n"
        assert not shown.show()
        shown.know(replica("1-1", 0))
        assert shown.show()
        assert capsys.readouterr().out == "tw\n"
        assert not shown.show()

    def test_progress_bars_of_the_main_one_are_kept_those_of_others_not(self, tmp_path, replica, capsys):
        shown = ReplicaOutput(tmp_path)
        for name in ("1-1", "1-2"):
            shown.know(replica(name))
            self.write(replica(name), "10 %\r20 %\r")
        shown.show()
        assert capsys.readouterr().out == "10 %\r20 %\r"
        self.write(replica("1-2"), "30 %\r\n")
        shown.show()
        assert capsys.readouterr().out == "[1-2] 30 %\n"

    def test_the_oldest_survivor_becomes_the_main_one(self, tmp_path, replica, capsys):
        shown = ReplicaOutput(tmp_path)
        for name in ("1-1", "1-2", "2-10"):
            shown.know(replica(name))
        shown.choose_main()
        shown.know(replica("1-1", -9))
        self.write(replica("1-1"), "last words\n")
        shown.show()
        assert capsys.readouterr().out == "last words\n"
        shown.choose_main()
        self.write(replica("1-2"), "now mine\n")
        self.write(replica("2-10"), "not mine\n")
        shown.finish()
        assert capsys.readouterr().out == "now mine\n[2-10] not mine\n"


class TestNode:
    @pytest.fixture
    def served(self, monkeypatch):
        calls = []
        monkeypatch.setattr(node_daemon, "serve", lambda *arguments: calls.append(arguments) or 0)
        return calls

    def test_serves_with_usual_settings(self, served, home):
        result = runner.invoke(app, ["node"])
        assert result.exit_code == 0, result.stderr
        (folder, node, host, port, slots, options, token_file) = served[0]
        assert (folder, host, port, slots, token_file) == (home / "node", "127.0.0.1", 0, None, None)
        assert node
        assert not options.is_ephemeral
        assert f"its token in {home / 'node' / 'token'}." in result.stderr

    def test_takes_all_settings(self, served, home):
        (home / "t").write_text("0123456789abcdef")
        text = f"node --dir {home}/d --node a --host 0.0.0.0 --port 7 --slots 3 --token-file {home}/t --ephemeral"
        result = runner.invoke(app, [*text.split(), "--hang-after", "5"])
        assert result.exit_code == 0, result.stderr
        (folder, node, host, port, slots, options, token_file) = served[0]
        assert (folder, node, host, port, slots) == (home / "d", "a", "0.0.0.0", 7, 3)
        assert (options.is_ephemeral, options.hang_after_s, token_file) == (True, 5.0, home / "t")

    def test_hands_variables_and_the_name_of_its_slots_on(self, served):
        result = runner.invoke(app, ["node", "--gpu-type", "x1", "--env", "A=b=c", "--env", "_B2=", "--env", "A=d"])
        assert result.exit_code == 0, result.stderr
        options = served[0][5]
        assert (options.gpu_type, options.replica_env) == ("x1", {"A": "d", "_B2": ""})

    @pytest.mark.parametrize("text", ["A", "=b", "2A=b", "A B=c", ""])
    def test_a_variable_without_name_or_value_is_wrong_input(self, served, text):
        result = runner.invoke(app, ["node", "--env", text])
        assert result.exit_code == 2
        assert "--env = " in result.stderr
        assert "is not NAME=VALUE" in result.stderr
        assert not served

    @pytest.mark.parametrize("name", ["", "a b", "-x", "a/b"])
    def test_slots_cannot_be_called_anything(self, served, name):
        result = runner.invoke(app, ["node", f"--gpu-type={name}"])
        assert result.exit_code == 2
        assert "--gpu-type = " in result.stderr
        assert not served

    @pytest.mark.parametrize("name", ["a b/c", "..", "a,b"])
    def test_an_impossible_name_is_wrong_input(self, served, name):
        result = runner.invoke(app, ["node", "--node", name])
        assert result.exit_code == 2
        assert "--node = " in result.stderr
        assert not served

    def test_silence_must_be_longer_than_a_heartbeat(self, served):
        result = runner.invoke(app, ["node", "--hang-after", "1", "--heartbeat", "2"])
        assert result.exit_code == 2
        assert not served
