"""Daemons that end or are killed, and what their successors find. The second half is done with real processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.core import (
    Allocation,
    FrozenMap,
    JobFailed,
    JobFinished,
    JobId,
    JobStopped,
    ReplicaLost,
    ReplicasReady,
    StopReason,
)
from pollux.errors import PolluxError
from pollux.node import home
from pollux.node.folder import StateFolder
from pollux.node.hosted import Hosted
from pollux.node.hosting import Hosting
from pollux.node.processes import began_at
from pollux.wire.frames import Channel, ask
from pollux.wire.nodes import (
    DescribeNode,
    Done,
    Forget,
    Kill,
    Launch,
    ListReplicas,
    ListRuns,
    NodeNews,
    ResizeRun,
    RunJob,
    RunNews,
    RunPhase,
    Seat,
    Spawn,
    StopRun,
    Watch,
)
from pollux.wire.replicas import Join, ReplicaPhase

from .daemons import PATIENT_S, QUICK, Node, freeze, launch, short_folder, until

pytestmark = pytest.mark.usefixtures("nobody_closes")


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path


@pytest.fixture
def nodes(folder):
    made = []

    def make(name="a", **settings):
        made.append(Node(folder / name, name, **settings))
        return made[-1].start()

    yield make
    for node in made:
        node.end()


def on(**gpus):
    return Allocation.of(gpus)


def train(node, folder, count=2, **others):
    """A job that trains with that many replicas on the node, and with those on others."""
    addresses = FrozenMap({name: other.address for name, (other, _) in others.items()})
    allocation = on(**{node.name: count}, **{name: number for name, (_, number) in others.items()})
    with node.watching("j") as watching:
        node.ask(RunJob("j", 1, launch(folder), allocation, addresses))
        links = [link.say() for link in node.living(count)]
        for other, number in others.values():
            links += [link.say() for link in other.living(number)]
        watching.event(ReplicasReady)
    return links


def phase(node):
    return node.ask(ListRuns()).runs[0].phase


class TestSuccessors:
    def test_replicas_live_on_and_are_found(self, nodes, folder):
        node = nodes()
        train(node, folder)
        before, address = node.replicas(), node.address
        node.stop()
        node.start()
        assert node.address == address  # others look for it there
        assert {name: here.pid for name, here in node.replicas().items()} == {n: h.pid for n, h in before.items()}
        assert phase(node) is RunPhase.TRAINING
        for link in node.living(2):
            link.say(step=9)
        until(lambda: node.ask(ListRuns()).runs[0].step == 9)

    def test_they_know_what_the_next_first_replica_is_to_be_told(self, nodes, folder):
        node = nodes()
        node.ask(RunJob("j", 1, launch(folder), on(a=2), experience="known"))
        for link in node.living(2):
            link.say()
        until(lambda: phase(node) is RunPhase.TRAINING)
        node.stop()
        path = node.daemon.folder.experience_file(JobId("j"))
        path.unlink()
        node.start()
        first, second = node.living(2)
        second.say()
        node.keeper.end(f"j/{first.replica}")
        assert second.hears().rank == 0
        assert path.read_text() == "known"

    def test_after_a_restart_of_the_machine_jobs_have_stopped_and_not_failed(self, nodes, folder):
        node = nodes()
        train(node, folder)
        node.ask(RunJob("new", 1, launch(folder, "new"), on(a=1)))  # perhaps not even started
        node.stop()
        node.keeper.kill_all()
        node.keeper.kept.clear()
        (node.folder / "boot_id").write_text("another one")
        node.start()
        for job in ("j", "new"):
            with node.watching(job) as watching:
                assert watching.news().event == JobStopped(job, 1)
            assert node.replicas(job) == {}
        assert {run.phase for run in node.ask(ListRuns()).runs} == {RunPhase.ENDED}
        node.stop()
        node.start()
        with node.watching("j") as watching:
            assert watching.news().event == JobStopped("j", 1)
        node.ask(RunJob("j", 2, launch(folder), on(a=1)))
        node.living(1)[0].say(generation=2)
        until(lambda: {run.phase for run in node.ask(ListRuns()).runs if run.job == "j"} == {RunPhase.TRAINING})

    def test_replicas_that_were_killed_without_a_restart_of_the_machine_have_failed(self, nodes, folder):
        node = nodes()
        train(node, folder)
        node.stop()
        node.keeper.kill_all()
        node.keeper.kept.clear()
        node.start()
        with node.watching("j") as watching:
            failed = watching.event(JobFailed)
            assert failed.exit_code is None
            assert "its exit code is unknown" in failed.reason

    def test_what_other_nodes_have_outlives_a_restart_of_the_machine(self, nodes, folder):
        token_file = folder / "token"
        token_file.write_text("x" * 64)
        patient = replace(QUICK, node_timeout_s=PATIENT_S)  # the machine is away for as long as it takes
        node, other = (nodes(name, token_file=token_file, run=patient) for name in "ab")
        _, survivor = train(node, folder, 1, b=(other, 1))
        node.stop()
        node.keeper.kill_all()
        node.keeper.kept.clear()
        (node.folder / "boot_id").write_text("another one")
        node.start()
        join = survivor.hears()
        assert (join.membership, join.size) == (1, 1)

    def test_what_happened_meanwhile_is_learnt(self, nodes, folder):
        node = nodes()
        first, _ = train(node, folder)
        node.stop()
        node.keeper.end(f"j/{first.replica}")
        until(lambda: node.keeper.kept[f"j/{first.replica}"] == -9)
        node.start()
        assert node.replicas()[first.replica].exit_code == -9
        with node.watching("j") as watching:
            survivor = node.living(1)[0].say()
            join = survivor.hears()
            assert isinstance(join, Join)
            assert (join.membership, join.size, join.is_repair) == (1, 1, True)
            survivor.say(membership=1)
            assert watching.event(ReplicaLost).membership == 1

    def test_the_end_of_a_job_meanwhile_is_announced_to_whoever_watches_later(self, nodes, folder):
        node = nodes()
        for link in train(node, folder):
            node.keeper.end(f"j/{link.replica}")
            until(lambda link=link: node.keeper.kept.get(f"j/{link.replica}", 0) is not None)
        node.stop()
        node.start()
        with node.watching("j") as watching:
            assert watching.event(JobFailed).exit_code == -9
        node.stop()
        node.start()
        with node.watching("j") as watching:
            assert watching.event(JobFailed).exit_code == -9
        node.stop()
        run = node.daemon.folder.run_file("j")
        os.utime(run, (0, 0))
        node.start()
        assert node.ask(ListRuns()).runs == ()
        assert not run.exists()

    def test_a_replica_that_fell_silent_meanwhile_is_killed(self, nodes, folder):
        node = nodes(hang_after_s=3.0)
        first, second = train(node, folder)
        node.stop()
        node.start()
        live = next(link for link in node.living(2) if link.replica == second.replica)

        def is_killed():
            live.say()
            return node.replicas()[first.replica].exit_code == -9

        until(is_killed)
        assert node.replicas()[second.replica].exit_code is None

    def test_processes_without_their_keeper_are_watched(self, nodes, folder):
        node = nodes()
        first, second = train(node, folder)
        node.stop()
        node.keeper.kept.clear()  # a new keeper, which knows nothing
        node.start()
        assert len(node.living(2)) == 2
        node.keeper.on_exit = lambda *end: None
        node.keeper.end(f"j/{first.replica}")
        until(lambda: node.replicas()[first.replica].has_unknown_end)
        assert not node.replicas()[second.replica].has_ended

    def test_damaged_files_are_set_aside(self, nodes, folder, caplog):
        node = nodes()
        train(node, folder)
        node.stop()
        state = node.daemon.folder
        state.run_file("j").write_text("{")
        state.replicas_file("j").write_text('{"replicas":3}')
        node.start()
        assert node.ask(ListRuns()).runs == ()
        assert node.replicas() == {}
        assert {process.wait(PATIENT_S) for process in node.keeper.processes.values()} == {-9}
        assert "cannot be read" in caplog.text
        assert state.run_file("j").with_suffix(".unreadable").exists()

    def test_files_of_earlier_versions_are_read(self, nodes, folder):
        node = nodes()
        links = train(node, folder)
        node.stop()
        path = node.daemon.folder.replicas_file("j")
        saved = json.loads(path.read_text())
        del saved["newest"]
        for replica in saved["replicas"]:
            del replica["is_forgotten"]
        path.write_text(json.dumps(saved))
        node.start()
        assert [link.replica for link in node.living(2)] == [link.replica for link in links]

    def test_what_was_forgotten_right_before_is_ended(self, nodes, folder):
        node = nodes()
        node.ask(Spawn("j", 1, launch(folder), (Seat("1-0", 0, 1, 1, False),), ""))
        node.pid("1-0")
        node.stop()
        path = node.daemon.folder.replicas_file("j")
        saved = json.loads(path.read_text())
        saved["replicas"][0]["is_forgotten"] = True
        path.write_text(json.dumps(saved))
        node.start()
        assert node.keeper.processes["j/1-0"].wait(PATIENT_S) == -9
        until(lambda: node.replicas() == {} and not path.exists())

    @pytest.mark.parametrize("is_restarted", [False, True])
    def test_a_store_whose_members_are_elsewhere_is_not_forgotten_with_an_earlier_run(
        self, nodes, folder, is_restarted
    ):
        home = nodes("a")
        other = nodes("b", token_file=home.daemon.folder.token_file)
        home.ask(RunJob("j", 3, launch(folder), on(b=1), FrozenMap({"b": other.address})))
        other.living(1)
        if is_restarted:
            home.stop()
            home.start()
        home.ask(Forget("j", 2))  # of a home before this one
        assert home.keeper.forgotten == []
        assert home.keeper.stores["j"][0].poll() is None
        home.ask(Forget("j", 3))
        until(lambda: home.keeper.forgotten == ["j"])

    def test_a_signal_counts_as_given_only_after_it_was(self, nodes, folder, monkeypatch):
        node = nodes()
        node.ask(Spawn("j", 1, launch(folder), (Seat("1-0", 0, 1, 1, False),), ""))
        freeze(node.pid("1-0"))  # so that it does not end
        path = node.daemon.folder.replicas_file("j")
        sent = []

        def send(hosted, number):
            sent.append((number, json.loads(path.read_text())["replicas"][0]["is_leaving"]))

        monkeypatch.setattr(Hosted, "send", send)
        node.ask(Kill("j", "1-0", 15))
        assert sent == [(15, False)]
        assert json.loads(path.read_text())["replicas"][0]["is_leaving"]
        node.stop()
        node.start()
        node.ask(Kill("j", "1-0", 15))  # by a home that cannot know
        assert len(sent) == 1

    def test_a_signal_that_waits_for_a_pid_was_not_given(self, folder):
        hosted = Hosted("j", "1-0", 1, (0,), folder / "log", 0.0, is_leaving=True)
        assert not hosted.record.is_leaving
        hosted.pid = 5
        assert hosted.record.is_leaving

    def test_a_store_that_ends_gets_a_successor(self, nodes, folder):
        node = nodes()
        first, second = train(node, folder)
        node.keeper.end_store("j")
        until(lambda: node.keeper.num_stores == 2)
        node.keeper.end(f"j/{first.replica}")
        assert second.hears().store == "127.0.0.1:1002"

    @pytest.mark.parametrize("problem", ["is_lost", "is_broken"])
    def test_it_gets_one_as_soon_as_that_is_possible(self, nodes, folder, monkeypatch, problem):
        monkeypatch.setattr(home, "STORE_PAUSE_S", 0.05)
        node = nodes()
        first, second = train(node, folder)
        setattr(node.keeper, problem, True)
        node.keeper.end_store("j")
        node.keeper.end(f"j/{first.replica}")
        until(lambda: node.replicas()[first.replica].exit_code)
        assert phase(node) is RunPhase.REPAIRING  # requests are answered meanwhile
        setattr(node.keeper, problem, False)
        until(lambda: second.hears().store == "127.0.0.1:1002")

    def test_a_stop_does_not_wait_for_it(self, nodes, folder):
        node = nodes()
        links = train(node, folder)
        node.keeper.is_lost = True
        node.keeper.end_store("j")
        with node.watching("j") as watching:
            node.ask(StopRun("j", 1, StopReason.CANCELLED))
            assert watching.event(JobStopped)
        node.keeper.is_lost = False
        assert len(links) == 2


class TestAKeeperThatIsReplaced:
    def test_those_that_are_wanted_meanwhile_are_started_by_the_next_one(self, nodes, folder):
        node = nodes()
        train(node, folder)
        node.keeper.is_lost = True
        node.ask(ResizeRun("j", 2, on(a=3)))
        until(lambda: len(node.replicas()) == 3)
        node.keeper.is_lost = False
        assert len(node.living(3)) == 3

    def test_those_that_are_killed_meanwhile_have_ended(self, nodes, folder):
        node = nodes()
        node.keeper.is_lost = True
        node.ask(Spawn("j", 1, launch(folder), (Seat("1-0", 0, 1, 1, False),), "127.0.0.1:5"))
        node.ask(Kill("j", "1-0", 9))
        until(lambda: node.replicas()["1-0"].exit_code == -9)
        assert not node.keeper.processes

    def test_is_not_waited_for_for_ever(self, nodes, folder):
        node = nodes(run=replace(QUICK, ready_timeout_s=0.2))
        node.keeper.is_lost = True
        node.ask(Spawn("j", 1, launch(folder), (Seat("1-0", 0, 1, 1, False),), "127.0.0.1:5"))
        until(lambda: node.replicas()["1-0"].has_unknown_end)

    def test_a_job_that_is_stopped_after_its_loss_has_not_finished(self, nodes, folder):
        node = nodes()
        (link,) = train(node, folder, count=1)
        node.loop.call_soon_threadsafe(node.keeper.on_lost)
        node.keeper.on_exit = lambda *end: None  # nobody tells its exit code
        with node.watching("j", replicas=True) as watching:
            link.say(ReplicaPhase.LEAVING)
            watching.replica(lambda news: news.replica.status.phase is ReplicaPhase.LEAVING)
            node.ask(StopRun("j", 1, StopReason.PAUSED))
            assert watching.event((JobStopped, JobFinished)) == JobStopped("j", 1)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
    @pytest.mark.parametrize("has_finished", [False, True])
    def test_what_another_users_replica_said_was_done_is_not_done_again(self, nodes, folder, has_finished):
        """Such a replica cannot write its exit code down, and daemon and keeper are gone when it ends."""
        node = nodes(job_user="nobody")
        (link,) = train(node, folder, count=1)
        with node.watching("j", replicas=True) as watching:
            link.say(step=2, has_finished=has_finished)
            watching.replica(lambda news: news.replica.status is not None and news.replica.status.step == 2)
        node.stop()
        node.keeper.end(f"j/{link.replica}")
        until(lambda: node.keeper.kept[f"j/{link.replica}"] is not None)
        node.keeper.kept.clear()
        node.start()
        with node.watching("j") as watching:
            end = watching.event(JobFailed)
        assert (end.exit_code, end.may_retry) == (None, not has_finished)

    def test_ends_with_a_daemon_that_has_nothing_left(self, nodes, folder, caplog):
        caplog.set_level("INFO")
        node = nodes()
        node.stop()
        assert node.keeper.has_ended
        assert "Node a ends." in caplog.text
        train(node.start(), folder)
        node.stop()
        assert not node.keeper.has_ended
        assert "Node a ends; 2 replicas train on." in caplog.text


class TestOtherNodes:
    def test_a_daemon_that_comes_back_in_time_changes_nothing(self, nodes, folder, caplog):
        home = nodes("a", run=replace(QUICK, node_timeout_s=PATIENT_S))
        other = nodes("b", token_file=home.daemon.folder.token_file)
        train(home, folder, 1, b=(other, 1))
        other.stop()
        until(lambda: "out of reach" in caplog.text)
        other.start()
        back = other.living(1)[0].say(step=50)
        until(lambda: home.ask(ListRuns()).runs[0].step == 50)
        assert phase(home) is RunPhase.TRAINING
        assert back.replica in other.replicas()

    def test_a_request_to_save_that_was_lost_is_given_again(self, nodes, folder, monkeypatch):
        home = nodes("a", run=replace(QUICK, node_timeout_s=PATIENT_S, stop_timeout_s=2 * PATIENT_S))
        other = nodes("b", token_file=home.daemon.folder.token_file)
        home.ask(RunJob("j", 1, launch(folder), on(b=1), FrozenMap({"b": other.address})))
        other.living(1)[0].say()
        until(lambda: phase(home) is RunPhase.TRAINING)
        with monkeypatch.context() as patch, home.watching("j") as watching:
            patch.setattr(Hosting, "kill", lambda *_: None)  # the daemon ends before it has read it
            home.ask(StopRun("j", 1, StopReason.PREEMPTED))
            other.stop()
            patch.undo()
            other.start()
            watching.event(JobStopped)
        assert [process.wait(PATIENT_S) for process in other.keeper.processes.values()] == [-15]

    def test_an_old_home_does_not_end_what_a_new_one_has_started(self, nodes, folder, caplog):
        old = nodes("a")
        new = nodes("b", token_file=old.daemon.folder.token_file)
        train(old, folder, 1, b=(new, 1))
        new.stop()
        with old.watching("j") as watching:
            old.ask(StopRun("j", 1, StopReason.CANCELLED))
            watching.event(JobStopped)  # b has still to forget it
        old.stop()
        new.start()
        new.ask(RunJob("j", 2, launch(folder), on(b=1)))
        until(lambda: any(here.generation == 2 and here.pid for here in new.replicas().values()))
        old.start()
        until(lambda: [here.generation for here in new.replicas().values()] == [2])  # it has forgotten the others
        (replica,) = new.living(1)
        replica.say(generation=2)
        until(lambda: phase(new) is RunPhase.TRAINING)
        assert new.keeper.forgotten == []
        assert new.keeper.stores["j"][0].poll() is None

    def test_one_that_stays_away_is_lost(self, nodes, folder):
        home = nodes("a")
        other = nodes("b", token_file=home.daemon.folder.token_file)
        here, there = train(home, folder, 1, b=(other, 1))
        with home.watching("j") as watching:
            other.stop()
            assert here.hears().is_repair
            here.say(membership=1)
            assert watching.event(ReplicaLost).survivors == on(a=1)
        other.start()  # too late: its replica is of another life
        assert other.keeper.processes[f"j/{there.replica}"].wait(PATIENT_S) == -9

    def test_a_home_that_comes_back_finds_the_others(self, nodes, folder):
        home = nodes("a")
        other = nodes("b", token_file=home.daemon.folder.token_file)
        _, there = train(home, folder, 1, b=(other, 1))
        home.stop()
        other.keeper.end(f"j/{there.replica}")
        until(lambda: other.replicas()[there.replica].exit_code == -9)
        home.start()
        here = home.living(1)[0].say()
        assert here.hears().is_repair
        with home.watching("j") as watching:
            home.ask(StopRun("j", 1, StopReason.CANCELLED))
            watching.event(JobStopped)
        until(lambda: other.keeper.forgotten == ["j"])


# Real processes

REPLICA = """
import os, signal, sys, time
from pollux.errors import PolluxError
from pollux.wire.frames import Channel
from pollux.wire.replicas import Instruction, ReplicaPhase, ReplicaStatus

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("began", flush=True)
generation, membership, step = int(os.environ["POLLUX_GENERATION"]), 0, 0
from pollux.agent.environment import Environment
credential = Environment.read().credential
while True:
    try:
        with Channel.connect(os.environ["POLLUX_SOCKET"], credential) as channel:
            while True:
                step += 1
                channel.send(ReplicaStatus(os.environ["POLLUX_JOB"], os.environ["POLLUX_REPLICA"], os.getpid(),
                    ReplicaPhase.TRAINING, generation, membership, step, True, time.time()))
                try:
                    told = channel.receive(Instruction, 0.1)
                    generation, membership = told.generation, getattr(told, "membership", membership)
                except TimeoutError:
                    pass
    except PolluxError:
        time.sleep(0.05)
"""

DAEMON = """
import sys
from pathlib import Path
from pollux.node.daemon import DaemonOptions, serve
from pollux.node.run import RunOptions
is_ephemeral, run = "ephemeral" in sys.argv, RunOptions(repair_grace_s=0.1)
options = DaemonOptions(preload=(), end_grace_s=5.0, is_ephemeral=is_ephemeral, run=run)
sys.exit(serve(Path(sys.argv[1]), "a", slots=4, options=options))
"""


DEAF = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command as nohup, a script's background, or worse would."""

OF_LIBC = 3 << 31
"""Its own signals 32 and 33: what started us may ignore them, and no program can change that."""
PYTHON_IGNORES = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1


class Process:
    """`pollux node` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, is_deaf: bool = False) -> None:
        self.folder = folder
        wrapped = (sys.executable, "-c", DEAF) if is_deaf else ()
        self.process = subprocess.Popen(
            [*wrapped, sys.executable, "-c", DAEMON, str(folder), *arguments], stderr=subprocess.DEVNULL
        )
        self.state = StateFolder(folder)
        until(self.answers)

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "node.log").read_text()
        with contextlib.suppress(PolluxError):
            return self.ask(DescribeNode()).pid == self.process.pid
        return False

    def ask(self, request):
        return ask(self.state.address, self.state.token, request, PATIENT_S)

    def replicas(self, job="j"):
        return {here.replica: here for here in self.ask(ListReplicas(job)).replicas}

    def speaking(self, job="j"):
        return {name: here for name, here in self.replicas(job).items() if here.status and here.exit_code is None}

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENT_S)


@pytest.fixture
def start(folder):
    """Starts daemons on one folder after the other; at the end, the last one ends all."""
    made = []

    def make(*arguments, **more):
        made.append(Process(folder / "n", *arguments, **more))
        return made[-1]

    (folder / "train.py").write_text(REPLICA)
    yield make
    if made[-1].process.poll() is not None and (folder / "n" / "node.json").exists():
        make()
    if made[-1].process.poll() is None:
        made[-1].end(signal.SIGINT)
    assert _processes(folder) == []


def _processes(folder: Path) -> list[str]:
    """Those that have to do with the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            texts = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            if str(folder).encode() in texts:
                found.append(f"{path.name}: {(path / 'cmdline').read_bytes()!r}")
    return found


def seats(folder, *names):
    taken = tuple(Seat(name, rank, len(names), 1, False) for rank, name in enumerate(names))
    return Spawn("j", 1, launch(folder), taken, "127.0.0.1:1")


class TestRealProcesses:
    def test_logs_of_the_daemon_do_not_grow_for_ever(self, start, folder):
        (folder / "n").mkdir()
        for name in ("node.log", "keeper.log"):
            with (folder / "n" / name).open("wb") as file:
                file.truncate(10 * 2**20 + 1)
        start()
        for name in ("node.log", "keeper.log"):
            assert (folder / "n" / name).stat().st_size < 10_000
            assert (folder / "n" / f"{name}.1").stat().st_size > 10 * 2**20

    def test_a_killed_daemon_loses_nothing(self, start, folder):
        daemon = start()
        daemon.ask(seats(folder, "x", "y", "z"))
        before = until(lambda: len(daemon.speaking()) == 3 and daemon.speaking())
        daemon.end(signal.SIGKILL)
        os.kill(before["y"].pid, signal.SIGKILL)  # nobody is there to see it but the keeper
        os.kill(before["z"].pid, signal.SIGTERM)
        daemon = start()
        after = until(lambda: len(daemon.speaking()) == 1 and daemon.replicas())
        assert (after["y"].exit_code, after["z"].exit_code) == (-9, 0)
        assert after["x"].pid == before["x"].pid
        assert after["x"].status.step > before["x"].status.step
        daemon.ask(seats(folder, "x", "w"))
        until(lambda: set(daemon.speaking()) == {"x", "w"})
        assert Path(after["x"].log).read_text() == "began\n"

    def test_a_killed_keeper_takes_no_replica_along(self, start, folder):
        daemon = start()
        daemon.ask(seats(folder, "x", "y"))
        before = until(lambda: len(daemon.speaking()) == 2 and daemon.speaking())
        keeper = _parent(before["x"].pid)
        os.kill(keeper, signal.SIGKILL)
        until(lambda: "A keeper is started" in (folder / "n" / "node.log").read_text().split("gone")[-1])
        os.kill(before["y"].pid, signal.SIGKILL)
        until(lambda: daemon.replicas()["y"].exit_code is not None)

        def has_started():
            daemon.ask(seats(folder, f"w{time.monotonic_ns()}"))
            return len(daemon.speaking()) > 1

        until(has_started)
        assert daemon.speaking()["x"].pid == before["x"].pid

    def test_a_job_goes_on_under_the_next_daemon(self, start, folder):
        daemon = start()
        daemon.ask(RunJob("j", 1, launch(folder), on(a=2)))
        before = until(lambda: len(daemon.speaking()) == 2 and daemon.speaking())
        until(lambda: daemon.ask(ListRuns()).runs[0].phase is RunPhase.TRAINING)
        first, second = before.values()
        daemon.end(signal.SIGKILL)
        os.kill(first.pid, signal.SIGKILL)
        daemon = start()
        with Channel.connect(daemon.state.address, daemon.state.token, PATIENT_S) as channel:
            channel.send(Watch("j"))
            channel.receive(Done, PATIENT_S)
            news: RunNews = channel.receive(NodeNews, PATIENT_S)
            while not isinstance(news.event, ReplicaLost):
                news = channel.receive(NodeNews, PATIENT_S)
        assert (news.event.membership, news.event.survivors) == (1, on(a=1))
        assert until(daemon.speaking)[second.replica].pid == second.pid
        daemon.ask(StopRun("j", 1, StopReason.PREEMPTED))
        until(lambda: daemon.ask(ListRuns()).runs[0].phase is RunPhase.ENDED)
        assert began_at(second.pid) == 0

    def test_sigterm_leaves_replicas_and_sigint_ends_them(self, start, folder):
        daemon = start()
        daemon.ask(seats(folder, "x"))
        pid = until(daemon.speaking)["x"].pid
        assert daemon.end(signal.SIGTERM) == 0
        assert began_at(pid) != 0
        assert "ends; 1 replica trains on" in (folder / "n" / "node.log").read_text()
        daemon = start()
        until(daemon.speaking)
        assert daemon.end(signal.SIGINT) == 0
        assert _processes(folder) == []
        assert not list((folder / "n").glob("*.sock"))

    def test_what_the_daemon_ignores_or_blocks_its_jobs_do_not(self, start, folder):
        daemon = start(is_deaf=True)
        (folder / "train.py").write_text("print(open('/proc/self/status').read(), flush=True)\n")
        plain = Launch(JobId("plain"), "cat", ("/proc/self/status",), str(folder), is_plain=True)
        for job, what, ignored in (("plain", plain, 0), ("j", launch(folder), PYTHON_IGNORES)):
            seat = Seat("1-0", 0, 1, 1, False)
            daemon.ask(Spawn(job, 1, what, (seat,), "127.0.0.1:1"))
            until(lambda job=job: daemon.replicas(job)["1-0"].exit_code == 0)
            said = Path(daemon.replicas(job)["1-0"].log).read_text()
            sets = {name: int(bits, 16) for name, bits in re.findall(r"^(Sig\w+):\s*(\w+)$", said, re.MULTILINE)}
            assert (sets["SigIgn"] & ~OF_LIBC, sets["SigBlk"]) == (ignored, 0), job
        daemon.process.kill()  # it cannot hear any more polite word
        daemon.process.wait(PATIENT_S)

    def test_sigterm_leaves_no_keeper_that_has_nothing_to_keep(self, start, folder):
        assert start().end(signal.SIGTERM) == 0
        assert _processes(folder) == []

    def test_an_ephemeral_daemon_ends_with_its_parent(self, folder):
        (folder / "train.py").write_text(REPLICA)
        launcher = (
            "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL); time.sleep(99)"
        )
        state = StateFolder(folder / "n")
        command = [sys.executable, "-c", DAEMON, str(folder / "n"), "ephemeral"]
        with subprocess.Popen([sys.executable, "-c", launcher, *command]) as parent:
            try:
                until(state.socket.exists)
                ask(state.address, state.token, seats(folder, "x"), PATIENT_S)
            finally:
                parent.kill()
        until(lambda: not _processes(folder))
        assert not state.socket.exists()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
