"""Exit codes that outlive the keeper, and starts that happen once: real keepers, witnesses and commands."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from pollux.core import JobFailed, JobFinished, JobStopped, ReplicasReady
from pollux.errors import Permanent
from pollux.node import daemon, exits
from pollux.node.claims import NOT_MINE, make_claim, new_claim, settle_claim, settle_last_claim
from pollux.node.exit_codes import HOPELESS
from pollux.node.keeper_client import LostKeeper
from pollux.node.processes import began_at, command_of, is_running, parent_of, start_ticks
from pollux.node.starting_keeper import KEEPER, WITNESS
from pollux.wire.nodes import Launch, ListRuns, ReadLog, RunJob

from .daemons import short_folder, until
from .kept import Kept, command, on, run

ENDS = (JobFinished, JobFailed, JobStopped)


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path


@pytest.fixture
def node(folder):
    made = Kept(folder / "a", "a", preload=("json",))
    yield made.start()
    made.end()


def started(node, *words, **more):
    """A command that runs: itself, its shim, their keeper and its witness."""
    with node.watching("j") as watching:
        run(node, *words, **more)
        watching.event(ReplicasReady)
    pid = node.replicas()["1-1"].pid
    shim = parent_of(pid)
    keeper = parent_of(shim)
    assert KEEPER in command_of(keeper)
    assert WITNESS in command_of(parent_of(keeper))
    return Watched(pid, shim, keeper, parent_of(keeper))


class Watched(NamedTuple):
    pid: int
    shim: int
    keeper: int
    witness: int


def until_file(script, gate):
    """A command that waits for a file, and then ends as the script says."""
    return "sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.02; done; {script}"


def kill(pid):
    began = start_ticks(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid, began))


class TestAKeeperThatIsKilled:
    @pytest.mark.parametrize(("script", "expected"), [("exit 0", None), ("exit 7", 7), ("kill -6 $$", -6)])
    def test_its_commands_end_as_they_really_do(self, node, folder, script, expected):
        keeper = started(node, *until_file(script, folder / "gate")).keeper
        with node.watching("j") as watching:
            kill(keeper)
            (folder / "gate").touch()
            end = watching.event(ENDS)
        if expected is None:
            assert end == JobFinished("j", 1)
        else:
            assert (type(end), end.exit_code, end.may_retry) == (JobFailed, expected, True)
        assert not list((node.folder / "exits").iterdir())

    def test_it_takes_the_daemon_along_and_the_command_ends_before_the_next_one(self, node, folder):
        pid, _, keeper, _ = started(node, *until_file("exit 0", folder / "gate"))
        began = start_ticks(pid)
        node.stop()
        kill(keeper)
        (folder / "gate").touch()
        until(lambda: not is_running(pid, began))
        node.start()
        with node.watching("j") as watching:
            assert watching.event(ENDS) == JobFinished("j", 1)

    def test_what_it_knew_while_no_daemon_was_there_is_not_lost_with_it(self, node, folder):
        pid, _, keeper, _ = started(node, *until_file("exit 5", folder / "gate"))
        node.stop()
        (folder / "gate").touch()
        until(lambda: exits.read(node.folder, pid, 0) == 5)
        kill(keeper)
        node.start()
        with node.watching("j") as watching:
            assert watching.event(ENDS).exit_code == 5

    @pytest.mark.parametrize(("script", "expected"), [("exit 0", None), ("exit 7", 7)])
    def test_a_command_needs_nobody_but_its_shim(self, node, folder, script, expected):
        _, _, keeper, witness = started(node, *until_file(script, folder / "gate"))
        with node.watching("j") as watching:
            kill(witness)
            kill(keeper)
            (folder / "gate").touch()
            end = watching.event(ENDS)
        assert getattr(end, "exit_code", None) == expected

    def test_a_command_ends_with_its_shim(self, node, folder):
        """Nobody would know how it ended: so it does not go on, and may be tried again."""
        pid, shim, _, _ = started(node, *until_file(f"touch {folder / 'ran'}", folder / "gate"))
        began = start_ticks(pid)
        with node.watching("j") as watching:
            kill(shim)
            until(lambda: not is_running(pid, began))
            (folder / "gate").touch()
            end = watching.event(ENDS)
        assert (type(end), end.exit_code, end.may_retry) == (JobFailed, -9, True)
        assert not (folder / "ran").exists()

    def test_what_a_command_left_behind_ends_with_it_without_any_keeper(self, node, folder):
        left = folder / "left"
        script = f"setsid sh -c 'echo $$ > {left}; sleep 1000' & while [ ! -s {left} ]; do :; done"
        _, _, keeper, witness = started(node, *until_file(script, folder / "gate"))
        with node.watching("j") as watching:
            kill(witness)
            kill(keeper)
            (folder / "gate").touch()
            assert watching.event(ENDS) == JobFinished("j", 1)
        until(lambda: not began_at(int(left.read_text())))

    def test_where_all_are_killed_at_once_it_has_not_come_to_its_end(self, node, folder):
        pid, shim, keeper, witness = started(node, *until_file(f"touch {folder / 'ran'}", folder / "gate"))
        began = start_ticks(pid)
        node.stop()
        for other in (witness, keeper, shim):
            kill(other)
        until(lambda: not is_running(pid, began))
        (folder / "gate").touch()
        node.start()
        with node.watching("j") as watching:
            end = watching.event(ENDS)
        assert (type(end), end.exit_code, end.may_retry) == (JobFailed, None, True)
        assert "was killed with those who watched it; its exit code is unknown" in end.reason
        assert not (folder / "ran").exists()

    def test_a_witness_ends_with_its_last_child(self, node, folder):
        _, shim, keeper, witness = started(node, *until_file("exit 0", folder / "gate"))
        began = start_ticks(witness)
        kill(keeper)
        until(lambda: parent_of(shim) == witness)
        (folder / "gate").touch()
        until(lambda: not is_running(witness, began))

    def test_a_witness_is_not_missed_while_its_keeper_lives(self, node, folder):
        witness = started(node, *until_file("exit 3", folder / "gate")).witness
        with node.watching("j") as watching:
            kill(witness)
            (folder / "gate").touch()
            assert watching.event(ENDS).exit_code == 3

    def test_one_that_hangs_is_replaced(self, folder, monkeypatch):
        monkeypatch.setattr(daemon, "KEEPER_EVERY_S", 0.05)
        node = Kept(folder / "h", "a", preload=("json",), keeper_hang_after_s=0.5).start()
        try:
            keeper = started(node, *until_file("exit 6", folder / "gate")).keeper
            os.kill(keeper, signal.SIGSTOP)
            with node.watching("k") as watching:
                node.ask(RunJob("k", 1, command("true", job="k"), on(a=1)))
                assert watching.event(ENDS) == JobFinished("k", 1)
            with node.watching("j") as watching:
                (folder / "gate").touch()
                assert watching.event(ENDS).exit_code == 6
        finally:
            node.end()

    def test_before_it_has_heard_of_a_start_its_successor_runs_the_command_once(self, node, folder):
        keeper = started(node, "sleep", "1000").keeper
        os.kill(keeper, signal.SIGSTOP)
        until(lambda: _state(keeper) == "T")
        script = f"echo x >> {folder / 'ran'}; exit 4"
        with node.watching("k") as watching:
            launch = command("sh", "-c", script, job="k")
            node.ask(RunJob("k", 1, launch, on(a=1)))
            until(lambda: "1-1" in node.replicas("k"))
            os.kill(keeper, signal.SIGKILL)
            assert watching.event(ENDS).exit_code == 4
        assert (folder / "ran").read_text() == "x\n"

    def test_right_after_a_start_that_nobody_heard_of_the_command_runs_once(self, node, folder, monkeypatch):
        keeper, spawn = started(node, "sleep", "1000").keeper, node.keeper.spawn
        ran, gate = folder / "ran", folder / "gate"

        async def lost(*start):
            pid = await spawn(*start)
            if node.keeper.pid != keeper:
                return pid
            while not ran.exists():
                await asyncio.sleep(0.01)
            os.kill(keeper, signal.SIGKILL)
            gate.touch()
            raise LostKeeper("It was lost before it answered.", 1.0)

        monkeypatch.setattr(node.keeper, "spawn", lost)
        with node.watching("k") as watching:
            script = f"echo x >> {ran}; while [ ! -e {gate} ]; do sleep 0.02; done; exit 4"
            node.ask(RunJob("k", 1, command("sh", "-c", script, job="k"), on(a=1)))
            assert watching.event(ENDS).exit_code == 4
        assert ran.read_text() == "x\n"

    def test_with_the_daemon_in_the_middle_of_a_start_the_command_runs_once(self, node, folder):
        """It comes to run when no daemon is there; the next one finds it by its mark alone."""
        keeper, ran = started(node, "sleep", "1000").keeper, folder / "ran"
        os.kill(keeper, signal.SIGSTOP)
        until(lambda: _state(keeper) == "T")
        script = f"echo x >> {ran}; while [ ! -e {folder / 'gate'} ]; do sleep 0.02; done; exit 4"
        node.ask(RunJob("k", 1, command("sh", "-c", script, job="k"), on(a=1)))
        until(lambda: "1-1" in node.replicas("k"))
        node.stop()
        os.kill(keeper, signal.SIGCONT)
        until(ran.exists)
        kill(keeper)
        node.start()
        with node.watching("k") as watching:
            (folder / "gate").touch()
            assert watching.event(ENDS).exit_code == 4
        assert ran.read_text() == "x\n"


class TestClaims:
    def test_a_process_makes_its_mark_once(self, tmp_path):
        claim = new_claim(tmp_path / "1-1.log")
        pid = os.fork()
        if pid == 0:
            make_claim(str(claim))
            os._exit(0)
        began = start_ticks(pid)
        assert os.waitpid(pid, 0)[1] == 0
        assert settle_claim(claim) == (pid, began)
        assert settle_last_claim(tmp_path / "1-1.log") == (pid, began)
        assert new_claim(tmp_path / "1-1.log") != claim

    def test_a_start_that_was_taken_back_never_happens(self, tmp_path):
        claim = new_claim(tmp_path / "1-1.log")
        assert settle_claim(claim) is None
        pid = os.fork()
        if pid == 0:
            make_claim(str(claim))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == NOT_MINE
        assert settle_last_claim(tmp_path / "1-1.log") is None

    def test_the_start_under_way_is_taken_back_although_it_left_no_trace(self, tmp_path):
        log = tmp_path / "1-1.log"
        under_way = new_claim(log)
        assert settle_last_claim(log) is None
        assert under_way.is_symlink()

    def test_where_the_folder_is_gone_nothing_can_begin(self, tmp_path):
        assert settle_claim(tmp_path / "gone" / "1-1.start1") is None


class TestRecords:
    def test_a_record_is_of_one_process_and_written_once(self, tmp_path):
        exits.prepare(tmp_path)
        pid = os.getpid()
        exits.record(tmp_path, pid, 3)
        exits.record(tmp_path, pid, 4)
        assert exits.read(tmp_path, pid, start_ticks(pid)) == 3
        assert exits.read(tmp_path, pid, start_ticks(pid) + 1) is None
        assert exits.read(tmp_path, pid, 0) == 3
        exits.remove_others(tmp_path, [pid])
        assert exits.read(tmp_path, pid, 0) == 3
        exits.remove_others(tmp_path, [])
        assert exits.read(tmp_path, pid, 0) is None

    def test_a_witness_waits_for_room_to_write(self, tmp_path):
        """The kernel keeps an exit code for as long as nobody reaps the process."""
        exits.prepare(tmp_path)
        program = (
            "import os, sys; from pathlib import Path; from pollux.node import exits, witness\n"
            "def full(*end):\n"
            "    os.write(2, b'.')\n"
            "    if not Path(sys.argv[1], 'room').exists(): raise OSError(28, 'full')\n"
            "    record(*end)\n"
            "exits.RETRY_S, record, exits.record = 0.02, exits.record, full\n"
            "pid = os.fork()\n"
            "if pid == 0: os._exit(9)\n"
            "print(pid, flush=True)\n"
            "sys.exit(witness.watch(Path(sys.argv[1]), 0))"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as witness:
            pid = int(witness.stdout.readline())
            assert witness.stderr.read(3) == "..."  # it has tried several times
            assert _state(pid) == "Z"
            (tmp_path / "room").touch()
            assert witness.wait() == 0
        assert exits.read(tmp_path, pid, 0) == 9


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class TestAnotherJobOfTheSameId:
    def test_a_daemon_does_not_answer_for_the_one_before(self, node, folder):
        with node.watching("j") as watching:
            launch = replace(command("sh", "-c", "echo first"), submission="1.0")
            node.ask(RunJob("j", 1, launch, on(a=1)))
            assert watching.event(ENDS) == JobFinished("j", 1)
        until(lambda: not node.replicas())
        with node.watching("j") as watching:
            launch = replace(command("sh", "-c", f"echo second; touch {folder / 'X'}; exit 3"), submission="2.0")
            node.ask(RunJob("j", 1, launch, on(a=1)))
            until(lambda: (folder / "X").exists())
            while (end := watching.event(ENDS)) == JobFinished("j", 1):
                pass  # what was announced of the one before, before the second was asked for
            assert end.exit_code == 3
        assert node.ask(ReadLog("j", "1-1")).text == "second\n"
        (aside,) = (path for path in (node.folder / "jobs").iterdir() if path.name != "j")
        assert (aside / "logs" / "1-1.log").read_text() == "first\n"
        node.start_again()
        assert [run.job for run in node.ask(ListRuns()).runs] == ["j"]

    def test_one_that_runs_is_not_disturbed(self, node):
        node.ask(RunJob("j", 1, replace(command("sleep", "1000"), submission="1.0"), on(a=1)))
        with pytest.raises(Permanent, match="Another job with the id j runs"):
            node.ask(RunJob("j", 2, replace(command("true"), submission="2.0"), on(a=1)))

    def test_the_same_one_is_answered_again(self, node):
        launch = replace(command("true"), submission="1.0")
        with node.watching("j") as watching:
            node.ask(RunJob("j", 1, launch, on(a=1)))
            watching.event(ENDS)
            node.ask(RunJob("j", 1, launch, on(a=1)))
            assert watching.event(ENDS) == JobFinished("j", 1)


@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise SystemExit(5)", 5), ("os.kill(os.getpid(), 6)", None)])
def test_a_script_writes_its_own_end_down(node, folder, last, code):
    """Without keeper and witness nobody else can; one that ends by a signal was killed, whoever sent it."""
    script = folder / "train.py"
    script.write_text(
        f"import os, time\nwhile not os.path.exists({str(folder / 'gate')!r}): time.sleep(0.02)\n{last}\n"
    )
    with node.watching("j") as watching:
        node.ask(RunJob("j", 1, Launch("j", str(script), directory=str(folder)), on(a=1)))
        pid = until(lambda: node.replicas() and node.replicas()["1-1"].pid)
        keeper = parent_of(pid)
        witness = parent_of(keeper)
        assert WITNESS in command_of(witness)
        until(lambda: os.readlink(f"/proc/{pid}/cwd") == str(folder))  # it has made its mark, and runs
        kill(witness)
        kill(keeper)
        (folder / "gate").touch()
        end = watching.event(ENDS)
    assert end == JobFinished("j", 1) if code == 0 else (end.exit_code, end.may_retry) == (code, True)


def test_a_script_that_can_never_go_on_says_so(node, folder):
    """A checkpoint that nobody can read will be as unreadable at the next try."""
    script = folder / "train.py"
    script.write_text(
        "from pollux.errors import CheckpointError\n"
        "raise CheckpointError('here', 'none can be used', 'Remove the folder', is_lasting=True)\n"
    )
    with node.watching("j") as watching:
        node.ask(RunJob("j", 1, Launch("j", str(script), directory=str(folder)), on(a=1)))
        end = watching.event(ENDS)
    assert (end.exit_code, end.may_retry) == (HOPELESS, False)
    assert "none can be used" in end.reason
