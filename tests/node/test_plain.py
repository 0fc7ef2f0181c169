"""Plain commands: programs that know nothing of Pollux, under a real keeper that has loaded next to nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pollux.core import (
    FrozenMap,
    JobFailed,
    JobFinished,
    JobId,
    JobStopped,
    ReplicasReady,
    StopReason,
)
from pollux.errors import Permanent
from pollux.node import daemon as daemon_module
from pollux.node.fingerprint import fingerprint
from pollux.node.folder import StateFolder
from pollux.node.hosted import Hosted, Record
from pollux.node.processes import began_at, send_signal
from pollux.node.roster import Roster
from pollux.node.run import RunOptions
from pollux.wire.nodes import ListLogs, ListRuns, ReadLog, ResizeRun, RunJob, RunPhase, StopRun
from pollux.wire.replicas import ReplicaPhase

from .daemons import short_folder, until
from .kept import Kept, command, on, run

IMPATIENT = RunOptions(stop_timeout_s=0.3, node_timeout_s=1.0)


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path


@pytest.fixture
def nodes(folder):
    made = []

    def make(name="a", **settings):
        made.append(Kept(folder / name, name, preload=("json",), **settings))
        return made[-1].start()

    yield make
    for node in made:
        node.end()


@pytest.fixture
def node(nodes):
    return nodes()


def output(node, job="j", replica="1-1"):
    return node.ask(ReadLog(job, replica)).text


def outcome(node, *words, **more):
    """How it ended, and what it printed."""
    with node.watching("j") as watching:
        run(node, *words, **more)
        event = watching.event((JobFinished, JobFailed, JobStopped))
    return event, output(node)


class TestRunning:
    def test_a_command_runs_in_its_directory_and_finishes(self, node, folder):
        event, said = outcome(
            node, "sh", "-c", 'pwd; echo "$1"; echo aside >&2; cat', "sh", "a  b", directory=str(folder)
        )
        assert event == JobFinished("j", 1)
        assert said == f"{folder}\na  b\naside\n"

    def test_it_is_ready_as_soon_as_it_has_begun_and_needs_no_store_and_no_template(self, node):
        with node.watching("j") as watching:
            run(node, "sleep", "1000")
            assert watching.event(ReplicasReady).generation == 1
        here = node.replicas()["1-1"]
        assert here.status.phase is ReplicaPhase.TRAINING
        until(lambda: Path(f"/proc/{here.pid}/cmdline").read_bytes() == b"sleep\x001000\0")
        log = (node.folder / "keeper.log").read_text()
        assert "template" not in log
        assert "store" not in log

    def test_no_shell_is_involved(self, node):
        event, said = outcome(node, "echo", "$HOME; false", "*")
        assert isinstance(event, JobFinished)
        assert said == "$HOME; false *\n"

    def test_it_is_searched_in_its_own_path(self, node, folder):
        program = folder / "only-here"
        program.write_text("#!/bin/sh\necho found\n")
        program.chmod(0o700)
        _, said = outcome(node, "only-here", PATH=f"{folder}:{os.environ['PATH']}")
        assert said == "found\n"

    def test_it_inherits_no_descriptor_and_no_odd_signal(self, node):
        source = (
            "import os, signal; print(sorted(os.listdir('/proc/self/fd'))[:3]); "
            "print(len(os.listdir('/proc/self/fd')), os.getsid(0) == os.getpid(), signal.pthread_sigmask(0, ()))\n"
            "for line in open('/proc/self/status'):\n    if line.startswith('SigIgn'): print(int(line.split()[1], 16))"
        )
        _, said = outcome(node, sys.executable, "-S", "-c", source)
        alone = subprocess.run(
            [sys.executable, "-S", "-c", source], capture_output=True, text=True, start_new_session=True, check=True
        )
        assert said == alone.stdout

    def test_its_environment_holds_nothing_of_the_daemon(self, nodes, monkeypatch):
        for name in ("POLLUX_TOKEN_FILE", "POLLUX_URL", "HF_TOKEN", "NVIDIA_API_KEY", "OTHER"):
            monkeypatch.setenv(name, "of the shell")
        monkeypatch.setenv("NAMED", "by the operator")
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        node = nodes(job_env=("NAMED",))
        _, said = outcome(node, "env", checkpoint_dir="/checkpoints", MINE="2", gpus=2)
        found = dict(line.split("=", 1) for line in said.splitlines())
        assert (found["MINE"], found["PATH"]) == ("2", os.environ["PATH"])
        assert (found["NAMED"], found["NCCL_DEBUG"]) == ("by the operator", "WARN")
        assert "of the shell" not in said
        ours = {name: value for name, value in found.items() if name.startswith("POLLUX_")}
        assert ours == {"POLLUX_JOB": "j", "POLLUX_CHECKPOINT_DIR": "/checkpoints"}
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & found.keys()
        assert node.token not in said

    def test_it_finds_what_the_daemon_was_told_to_hand_on(self, nodes):
        given = FrozenMap({"POLLUX_PACE": "2", "WHERE": "here", "MINE": "theirs"})
        node = nodes(gpu_type="x1", replica_env=given)
        _, said = outcome(node, "env", MINE="mine", POLLUX_PACE="3")
        found = dict(line.split("=", 1) for line in said.splitlines())
        assert (found["WHERE"], found["MINE"]) == ("here", "mine")
        assert (found["POLLUX_PACE"], found["POLLUX_GPU_TYPE"]) == ("2", "x1")

    def test_it_sees_the_gpus_of_its_slots(self, nodes, monkeypatch):
        monkeypatch.setattr(daemon_module, "visible_devices", lambda given: ["0", "GPU-7", "2", "3"])
        node = nodes()
        run(node, "sleep", "1000", job="other")
        node.pid("1-1", "other")
        _, said = outcome(node, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", gpus=2, CUDA_VISIBLE_DEVICES="9")
        assert said == "GPU-7,2\n"

    def test_cpu_slots_are_threads(self, nodes, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        _, said = outcome(nodes(), "sh", "-c", "echo $OMP_NUM_THREADS", gpus=3)
        assert said == "3\n"


class TestFailing:
    def test_its_last_lines_are_the_reason(self, node):
        event, _ = outcome(node, "sh", "-c", "echo fine; echo no such file: data >&2; exit 3")
        assert isinstance(event, JobFailed)
        assert event.exit_code == 3
        assert "replica 1-1 on node a ended with exit code 3. Last lines of /" in event.reason
        assert event.reason.endswith("fine | no such file: data")
        with node.watching("j") as late:
            assert late.event(JobFailed) == event

    @pytest.mark.parametrize(
        ("words", "directory", "exit_code", "problem"),
        [
            (["no-such-program"], "/tmp", 127, "cannot run 'no-such-program': it is in no folder of its PATH."),
            (["/no/such"], "/tmp", 127, "cannot run '/no/such': there is no such file."),
            (["/etc/passwd"], "/tmp", 126, "cannot run '/etc/passwd' (Permission denied)."),
            (["/tmp"], "/tmp", 126, "cannot run '/tmp' (Permission denied)."),
            (["true"], "/no/such", 126, "cannot run in directory '/no/such' (No such file or directory)."),
            (["echo", "a\0b"], "/tmp", 126, "cannot run 'echo': its arguments or its environment"),
        ],
    )
    def test_what_cannot_be_run_says_so(self, node, words, directory, exit_code, problem):
        event, said = outcome(node, *words, directory=directory)
        assert (type(event), event.exit_code) == (JobFailed, exit_code)
        assert said.startswith(f"pollux: {problem}")
        assert problem in event.reason

    @pytest.mark.parametrize(
        ("text", "exit_code", "problem"),
        [
            ("echo no\n", 126, "a script needs a first line"),
            ("#!/no/such/interpreter\n", 127, "the interpreter that its first line names does not exist"),
        ],
    )
    def test_a_script_without_a_good_first_line_is_not_given_to_a_shell(self, node, folder, text, exit_code, problem):
        script = folder / "script"
        script.write_text(text)
        script.chmod(0o700)
        event, said = outcome(node, str(script))
        assert event.exit_code == exit_code
        assert problem in said

    def test_one_that_is_killed_leaves_nothing_behind(self, node):
        tree = "setsid sh -c 'sleep 1000 & echo $$ $!; wait' & sleep 1000"
        run(node, "sh", "-c", tree)
        until(lambda: len(output(node).split()) == 2)
        others = [int(word) for word in output(node).split()]
        pid = node.pid("1-1")
        with node.watching("j") as watching:
            os.kill(pid, signal.SIGKILL)
            assert watching.event(JobFailed).exit_code == -9
        until(lambda: not any(began_at(other) for other in others))


class TestStopping:
    def test_all_of_its_processes_are_asked_to_end(self, node):
        run(node, "sh", "-c", "trap 'echo told; exit 1' TERM; sleep 1000 & echo $!; wait")
        until(lambda: output(node))
        child = int(output(node))
        with node.watching("j") as watching:
            node.ask(StopRun("j", 1, StopReason.PREEMPTED))
            assert watching.event(JobStopped).generation == 1
        assert output(node).splitlines()[1:] == ["told"]
        assert began_at(child) == 0

    def test_a_good_end_on_request_is_a_stop(self, node, folder):
        self.ask_to_save(node, folder)
        (folder / "go").touch()
        with node.watching("j") as watching:
            assert watching.event((JobStopped, JobFinished)) == JobStopped("j", 1)

    def test_a_good_end_on_request_is_a_stop_for_the_next_daemon_as_well(self, node, folder):
        self.ask_to_save(node, folder)
        node.stop()
        (folder / "go").touch()
        node.start()
        with node.watching("j") as watching:
            assert watching.event((JobStopped, JobFinished)) == JobStopped("j", 1)

    def ask_to_save(self, node, folder):
        """It says that it saves, and ends with 0 when it may."""
        saves = f"echo saving; until [ -e {folder}/go ]; do sleep 0.01; done; exit 0"
        run(node, "sh", "-c", f"trap '{saves}' TERM; echo ready; while true; do sleep 0.01; done")
        until(lambda: output(node) == "ready\n")
        node.ask(StopRun("j", 1, StopReason.PREEMPTED))
        until(lambda: "saving" in output(node))

    def test_one_that_does_not_want_to_is_killed(self, nodes):
        node = nodes(run=IMPATIENT)
        run(node, "sh", "-c", "trap '' TERM; echo $$; while true; do sleep 0.01; done")
        until(lambda: output(node))
        with node.watching("j") as watching:
            node.ask(StopRun("j", 1, StopReason.PAUSED))
            assert watching.event(JobStopped).generation == 1
        assert began_at(int(output(node))) == 0

    def test_it_ends_at_once_if_it_is_cancelled(self, node):
        run(node, "sh", "-c", "trap '' TERM; echo $$; sleep 1000")
        until(lambda: output(node))
        with node.watching("j") as watching:
            node.ask(StopRun("j", 1, StopReason.CANCELLED))
            watching.event(JobStopped)
        assert began_at(int(output(node))) == 0


class TestAcrossRestarts:
    def test_it_runs_on_and_its_silence_is_no_fault(self, nodes, folder):
        node = nodes(hang_after_s=0.1, heartbeat_s=0.05)
        run(node, "sh", "-c", f"until [ -e {folder}/go ]; do sleep 0.01; done; echo done")
        pid = node.pid("1-1")
        node.stop()
        node.start()
        here = node.replicas()["1-1"]
        assert (here.pid, here.status.phase) == (pid, ReplicaPhase.TRAINING)
        assert node.ask(ListRuns()).runs[0].phase is RunPhase.TRAINING
        time.sleep(0.5)  # many times as long as a replica may be silent here
        with node.watching("j") as watching:
            (folder / "go").touch()
            assert watching.event((JobFinished, JobFailed)) == JobFinished("j", 1)

    def test_its_end_meanwhile_is_learnt(self, node, folder):
        run(node, "sh", "-c", f"until [ -e {folder}/go ]; do sleep 0.01; done; exit 4")
        pid = node.pid("1-1")
        node.stop()
        (folder / "go").touch()
        until(lambda: not began_at(pid))
        node.start()
        with node.watching("j") as watching:
            assert watching.event(JobFailed).exit_code == 4

    def test_its_slots_stay_its_own(self, node):
        run(node, "sleep", "1000", gpus=3)
        node.pid("1-1")
        node.stop()
        node.start()
        node.ask(RunJob("k", 1, command("sleep", "1000", job="k"), on(a=1)))
        node.pid("1-1", "k")
        roster = Roster(StateFolder(node.folder))
        assert [one.slots for job in ("j", "k") for one in roster.load(JobId(job))] == [(0, 1, 2), (3,)]

    def test_it_lives_on_without_its_keeper(self, node):
        run(node, "sleep", "1000")
        pid = node.pid("1-1")
        until(lambda: node.ask(ListRuns()).runs[0].phase is RunPhase.TRAINING)
        keeper = node.keeper.pid
        os.kill(keeper, signal.SIGKILL)
        until(lambda: node.keeper.pid != keeper)
        node.stop()
        node.start()
        assert node.replicas()["1-1"].status.phase is ReplicaPhase.TRAINING
        with node.watching("j") as watching:
            node.ask(StopRun("j", 1, StopReason.PREEMPTED))
            watching.event(JobStopped)
        assert began_at(pid) == 0


class TestRefusals:
    def test_a_plain_command_is_not_resized(self, node):
        run(node, "sleep", "1000")
        with pytest.raises(Permanent, match="plain command, which keeps its GPUs"):
            node.ask(ResizeRun("j", 2, on(a=2)))
        assert node.ask(ListRuns()).runs[0].issued_generation == 1

    def test_a_plain_command_is_one_process(self, node):
        with pytest.raises(Permanent, match="a plain command is one process"):
            node.ask(RunJob("j", 1, command("true"), on(a=2)))

    def test_its_code_is_not_looked_at(self):
        assert fingerprint(command("no-such-program")) == ""


def test_on_another_node_it_fails_with_its_last_lines(nodes, folder):
    token_file = folder / "token"
    token_file.write_text("x" * 64)
    home, other = (nodes(name, token_file=token_file) for name in "ab")
    with home.watching("j") as watching:
        launch = command("sh", "-c", "echo out of luck; exit 5")
        home.ask(RunJob("j", 1, launch, on(b=1), FrozenMap({"b": other.address})))
        failed = watching.event(JobFailed)
    assert "replica 1-1 on node b ended with exit code 5. Last lines of " in failed.reason
    assert failed.reason.endswith("out of luck")
    assert home.ask(ListLogs("j")).logs == ()
    assert [log.replica for log in other.ask(ListLogs("j")).logs] == ["1-1"]


def test_a_file_of_a_daemon_before_plain_commands_is_read(folder):
    state = StateFolder(folder)
    path = state.replicas_file(JobId("j"))
    path.parent.mkdir(parents=True)
    old = (
        '{"replicas":[{"replica":"1-1","generation":1,"slot":2,"pid":7,"began":8,"has_spoken":true,"exit_code":null}]}'
    )
    path.write_text(old)
    (hosted,) = Roster(state).load(JobId("j"))
    assert (hosted.slots, hosted.is_plain, hosted.is_leaving) == ((2,), False, False)
    assert hosted.record == Record("1-1", 1, 2, 7, 8, True)


def test_slots_beyond_the_last_are_given_out_with_a_warning(folder, caplog):
    roster = Roster(StateFolder(folder))
    roster.add(Hosted(JobId("j"), "1-1", 1, (0, 2), folder / "log", 0.0, is_plain=True))
    slots = roster.free_slots(3)
    assert [next(slots), next(slots)] == [1, 3]
    assert "All 3 slots of this node are taken" in caplog.text


def test_no_process_is_signalled_for_a_replica_without_one():
    send_signal(0, signal.SIGTERM, to_session=True)
