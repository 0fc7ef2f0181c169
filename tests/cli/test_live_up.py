"""`pollux up` and `pollux down`: what a person sees when things go right and wrong. The service is a stub."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from tests.cli.live_cluster import LiveFake, serving, short_folder
from typer.testing import CliRunner

from pollux import __version__
from pollux.cli import doctor, up
from pollux.cli import down as cli_down
from pollux.cli.main import app
from pollux.core import FrozenMap
from pollux.errors import InvalidInput, Permanent, UnknownName
from pollux.providers.local import devices
from pollux.service.place import ClusterConfig, ClusterFolder, ServiceFile

runner = CliRunner()
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
STUB = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    from pathlib import Path
    from pollux.service.place import ClusterFolder
    from tests.cli.live_cluster import LiveFake, serving

    class Stub(LiveFake):
        def end(self, *, stop_jobs):
            super().end(stop_jobs=stop_jobs)
            os.kill(os.getpid(), signal.SIGTERM)

    async def go():
        gone = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, gone.set)
        folder = ClusterFolder(Path(sys.argv[-1]))
        with serving(Stub(), folder, pid=os.getpid()):
            await gone.wait()

    asyncio.run(go())
    """
)


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.delenv("POLLUX_URL", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with short_folder() as path:
        monkeypatch.setenv("POLLUX_HOME", str(path))
        yield path


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(up, "COMMAND", (sys.executable, "-c", STUB))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


def run(*arguments, code=0):
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, (result.stdout, result.stderr)
    return result


class TestUp:
    def test_it_waits_until_all_is_ready_and_down_ends_it(self, stub, home):
        text = run("up", "--port", "0").stdout
        assert "Ready: 4 GPUs on 2 nodes (n0: 2, n1: 2)" in text
        assert str(home / "cluster" / "token") in text
        assert "pollux run -- python train.py" in text
        pid = ClusterFolder().running().pid
        again = run("up", code=1)
        assert f"A cluster runs already in {home}/cluster (pid {pid}, http://127.0.0.1:" in again.stderr
        assert "has ended" in run("down").stdout
        assert not ClusterFolder().is_locked

    def test_json_says_where_it_is(self, stub, home):
        answer = json.loads(run("up", "--port", "0", "--json").stdout)
        assert answer["nodes"] == {"n0": 2, "n1": 2}
        assert answer["dir"] == f"{home}/cluster"
        assert json.loads(run("down", "--json").stdout) == {"outcome": "ended"}

    def test_another_folder_is_named_in_what_to_do_next(self, stub, home):
        text = run("up", "--port", "0", "--dir", f"{home}/b").stdout
        assert f"pollux top --dir {home}/b" in text
        told = text.partition("Next:\n")[2].splitlines()
        assert len({len(line) - len(line.rpartition("  ")[2]) for line in told}) == 1, "they stand in columns"
        run("down", "--dir", f"{home}/b")

    def test_a_service_that_dies_shows_its_last_words(self, monkeypatch):
        program = "import sys; print('one'); sys.exit('the disk is full')"
        monkeypatch.setattr(up, "COMMAND", (sys.executable, "-c", program))
        result = run("up", "--port", "0", code=1)
        assert "ended with exit code 1" in result.stderr
        assert "the disk is full" in result.stderr

    def test_one_that_is_killed_without_a_word_is_told(self, monkeypatch):
        monkeypatch.setattr(up, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
        result = run("up", "--port", "0", code=1)
        assert "was killed by signal 9" in result.stderr
        assert "It said nothing" in result.stderr

    def test_a_killed_service_is_gone_over(self, stub, home):
        folder = ClusterFolder()
        folder.make()
        folder.write_service_file(ServiceFile(4242, "http://127.0.0.1:9", "0.1", 1.0))
        assert "was killed" in run("ps", code=1).stderr
        assert "(pid 4242) was killed" in run("up", "--port", "0").stderr
        run("down")

    def test_a_taken_port_is_named(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            assert f"Port {port} of 127.0.0.1 is taken" in run("up", "--port", str(port), code=1).stderr
        assert ClusterFolder().config() is None, "what did not work is not remembered"

    def test_an_address_of_another_machine_is_wrong_input(self):
        with pytest.raises(InvalidInput, match="--host"):
            up.check_port("192.0.2.1", 0)

    def test_an_address_for_others_comes_with_a_warning(self, stub):
        assert "unencrypted" in run("up", "--host", "0.0.0.0", "--port", "0").stderr
        run("down")

    def test_a_folder_that_cannot_be_made_is_told(self, home):
        (home / "file").touch()
        assert "POLLUX_HOME" in run("up", "--dir", f"{home}/file/cluster", code=2).stderr

    def test_a_folder_with_too_long_a_path_is_told(self, home):
        told = run("up", "--dir", f"{home}/{'x' * 90}", code=2).stderr
        assert told.startswith("error: --dir = ")
        assert "longer than 84 bytes" in told

    def test_far_more_slots_than_cores_are_noted(self, stub):
        assert "1000 CPU slots share" in run("up", "--slots", "1000", "--port", "0").stderr
        run("down")

    def test_what_is_awaited_is_told_after_a_while(self, stub, monkeypatch):
        monkeypatch.setattr(up, "FIRST_WORD_S", 0.0)
        assert "Waiting for the service" in run("up", "--port", "0").stderr
        run("down")

    def test_a_missing_driver_is_told(self, stub, monkeypatch):
        report = devices.DeviceReport([], "There is a GPU, but no driver.")
        monkeypatch.setattr(devices, "describe_devices", lambda *_: report)
        assert "There is a GPU, but no driver." in run("up", "--port", "0").stderr
        run("down")

    def test_a_missing_package_is_named_with_its_extra(self, monkeypatch):
        monkeypatch.setattr(up, "find_spec", lambda name: None)
        assert "pollux[service]" in run("up", code=1).stderr

    def test_wrong_options_are_told_before_anything_starts(self):
        assert "no such name" in run("up", "--policy", "polux", code=2).stderr
        assert "nobody does here" in run("up", "--policy", "srtf", code=2).stderr
        assert "--policy = 'srtf'" in run("up", "--policy", "srtf", code=2).stderr
        assert "--interval = -1.0" in run("up", "--interval", "-1", code=2).stderr

    @pytest.mark.parametrize("name", ["A=5ecret", "POLLUX_URL", "A-B"])
    def test_variables_that_jobs_cannot_be_given_are_told(self, name):
        told = run("up", "--job-env", name, code=2).stderr
        assert "--job-env" in told
        assert "5ecret" not in told
        assert "--job-env" in run("node", "--job-env", name, code=2).stderr

    def test_a_variable_that_is_not_set_is_noted(self, stub, monkeypatch):
        monkeypatch.setenv("IS_SET", "1")
        told = run("up", "--job-env", "IS_SET", "--job-env", "IS_NOT_SET", "--port", "0").stderr
        run("down")
        assert "jobs do not find it: IS_NOT_SET." in told

    def test_the_environment_of_root_is_not_for_another_user(self):
        assert "--inherit-env" in run("node", "--inherit-env", "--job-user", "nobody", code=2).stderr

    def test_another_user_for_jobs_is_for_root(self, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        for command in ("up", "node"):
            assert "only root can run jobs as another user" in run(command, "--job-user", "nobody", code=2).stderr

    @needs_root
    def test_a_user_that_will_not_do_is_told(self):
        for command in ("up", "node"):
            assert "no user of this machine" in run(command, "--job-user", "no-such-user", code=2).stderr
        assert "may read everything" in run("up", "--job-user", "root", code=2).stderr

    @needs_root
    def test_a_folder_that_jobs_cannot_get_to_is_told(self, home):
        told = run("up", "--job-user", "nobody", code=2).stderr
        assert f"past {home}" in " ".join(told.split())
        assert "--dir" in told

    @needs_root
    def test_jobs_that_go_on_keep_their_user(self, home, monkeypatch):
        monkeypatch.setattr(up, "left_in", lambda folder: True)
        home.chmod(0o711)
        told = run("up", "--job-user", "nobody", code=1).stderr
        assert "jobs run as the user who started it, and nobody is asked for" in " ".join(told.split())

    def test_in_the_foreground_it_serves_itself(self, monkeypatch):
        from pollux.service import serving as service_process

        served = []
        monkeypatch.setattr(service_process, "main", lambda options: served.append(options) or 3)
        run("up", "--foreground", "--nodes", "2", "--port", "0", code=3)
        assert (served[0].nodes, served[0].port) == (2, 0)


class TestRemembering:
    BEFORE = ClusterConfig(2, 4, "pollux", FrozenMap({"p": -1.0}), 30.0, "127.0.0.1", 7000)

    def merged(self, **given):
        names = ("nodes", "slots", "policy", "settings", "interval", "host", "port")
        return up.merged(self.BEFORE, *(given.get(name) for name in names))

    def test_nothing_given_is_as_before(self):
        assert self.merged() == self.BEFORE

    def test_what_is_given_wins(self):
        now = self.merged(nodes=3, slots=0, settings=["policy.p=-2"], interval=5.0, port=0)
        assert now == ClusterConfig(3, None, "pollux", FrozenMap({"p": -2}), 5.0, "127.0.0.1", 0)

    def test_what_jobs_find_and_whom_they_run_as_is_remembered_until_it_is_taken_back(self, monkeypatch):
        monkeypatch.setattr("pollux.node.accounts.account_of", lambda name: None)
        told = up.with_jobs(self.BEFORE, ["B", "A", "B"], "nobody")
        folder = ClusterFolder()
        folder.make()
        folder.write_config(told)
        assert folder.config() == told
        assert (told.job_env, told.job_user) == (("B", "A"), "nobody")
        assert up.with_jobs(told, None, None) == told
        assert up.with_jobs(told, ["C"], None).job_env == ("C",)
        assert up.with_jobs(told, [""], "") == self.BEFORE

    def test_another_policy_begins_without_options(self):
        assert self.merged(policy="fifo").policy_options == FrozenMap()

    def test_only_options_of_the_policy_can_be_set(self):
        with pytest.raises(UnknownName, match="policy"):
            self.merged(settings=["world.interference=1"])


class TestDown:
    def test_nothing_that_runs_is_no_failure(self, home):
        assert run("down").stdout == f"Nothing runs in {home}/cluster.\n"

    def test_jobs_are_left_if_asked(self, stub):
        run("up", "--port", "0")
        assert "jobs train on" in run("down", "--leave-jobs").stdout

    def test_one_that_does_not_end_is_told(self):
        service = LiveFake()
        with serving(service, ClusterFolder()):
            result = run("down", "--timeout", "1", code=1)
        assert "has not ended after 1 s" in result.stderr
        assert service.ended_with == [True]

    def test_who_is_awaited_is_told_after_a_while(self, monkeypatch):
        monkeypatch.setattr(cli_down, "FIRST_WORD_S", 0.0)
        service = LiveFake()
        service.add()
        service.place(**{"j-1": {"n0": 1}})
        with serving(service, ClusterFolder()):
            result = run("down", "--timeout", "1", code=1)
        assert result.stderr.count("Waiting for j-1 to save and stop.") == 1

    def test_daemons_without_a_service_are_told_and_ended(self, home, monkeypatch):
        folder = ClusterFolder()
        folder.make()
        lock = folder.nodes / "n0" / "lock"
        lock.parent.mkdir(parents=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            again = run("down", "--leave-jobs").stdout
            assert again.startswith("The service has ended already; its daemons and jobs go on: pollux up finds them")
            monkeypatch.setattr(cli_down, "_end_daemons", lambda folder, left: None)
            assert "The service has ended before; what it left on 1 node is ended" in run("down").stderr

    def test_one_that_does_not_answer_is_told_how_to_kill(self):
        folder = ClusterFolder()
        folder.make()
        folder.lock()
        folder.write_service_file(ServiceFile(4242, "http://127.0.0.1:9", "0.1", 1.0))
        assert "kill -9 4242" in run("down", "--timeout", "1", code=1).stderr
        folder.unlock()

    def test_one_that_never_says_where_it_is_is_told_with_its_pid(self, monkeypatch):
        monkeypatch.setattr(cli_down, "HUNG_S", 0.5)
        monkeypatch.setattr(cli_down, "FIRST_WORD_S", 0.0)
        folder = ClusterFolder()
        folder.make()
        folder.lock()
        told = run("down", code=1).stderr
        assert f"Waiting for the service (pid {os.getpid()}) to answer." in told
        assert (
            f"hangs. It does not say where it listens. Kill it with kill -9 {os.getpid()}, and run pollux down" in told
        )
        folder.unlock()

    def test_one_that_loses_its_files_is_waited_for(self):
        place = ClusterFolder()

        class Ending(LiveFake):
            def end(self, *, stop_jobs):
                super().end(stop_jobs=stop_jobs)
                place.unlock()

        service = Ending()
        with serving(service, place) as url:
            folder, token = ClusterFolder(), place.token()
            for name in ("token", "service.json"):
                (folder.path / name).unlink()

            def write_again():
                (folder.path / "token").write_text(token)
                folder.write_service_file(ServiceFile(4242, url, __version__, 1.0))

            timer = threading.Timer(0.5, write_again)
            timer.start()
            assert "has ended" in run("down").stdout
            timer.join()
        assert service.ended_with == [True]

    def test_what_a_killed_service_left_is_ended(self, home, monkeypatch):
        folder = ClusterFolder()
        folder.make()
        (folder.nodes / "n0").mkdir(parents=True)
        (folder.nodes / "n0" / "keeper.sock").touch()
        folder.write_service_file(ServiceFile(4242, "http://127.0.0.1:9", "0.1", 1.0))
        ended = []
        monkeypatch.setattr(cli_down, "_end_daemons", lambda folder, left: ended.extend(left))
        result = run("down")
        assert "what it left on 1 node is ended" in result.stderr
        assert [path.name for path in ended] == ["n0"]
        assert folder.service_file() is None

    def test_nobody_starts_a_service_meanwhile(self, monkeypatch):
        folder = ClusterFolder()
        folder.make()
        folder.lock()
        with pytest.raises(Permanent, match="runs already"):
            cli_down._end_daemons(ClusterFolder(), [])
        folder.unlock()

    def test_a_real_daemon_is_ended_with_all_it_started(self, home):
        folder = ClusterFolder()
        folder.make()
        folder.lock()  # makes the token
        folder.unlock()
        state = folder.nodes / "n0"
        command = [sys.executable, "-P", "-m", "pollux.cli.main", "node", "--dir", str(state), "--node", "n0"]
        state.mkdir(parents=True)
        daemon = subprocess.Popen(
            [*command, "--slots", "1", "--token-file", str(folder.token_file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            until_s = time.monotonic() + 60
            while not (state / "node.json").exists() and time.monotonic() < until_s:
                time.sleep(0.05)
            assert "has ended" in run("down").stdout
            daemon.wait(60)
            assert not (state / "keeper.sock").exists()
        finally:
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGINT)
                daemon.wait(60)


def test_doctor_tells_where_the_cluster_is():
    with serving(LiveFake(), ClusterFolder()) as url:
        check = doctor._service()
    assert (check.status, check.detail) == (doctor.Status.OK, f"ok at {url}, 4 GPUs on 2 nodes")
    assert doctor._service().fix == "pollux up"
