import contextlib
import json
import logging
import os
import socket
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.core import (
    Allocation,
    FrozenMap,
    GenerationAbandoned,
    JobFailed,
    JobId,
    JobStopped,
    ReplicaLost,
    ReplicasReady,
    StopReason,
)
from pollux.errors import InvalidSpec, Permanent, StaleGeneration, Temporary
from pollux.node import daemon, hosting, links, roster
from pollux.node.accounts import account_of
from pollux.node.daemon import count_slots
from pollux.node.folder import StateFolder, last_lines
from pollux.wire.credentials import ReplicaIdentity, credential
from pollux.wire.entries import CheckpointSaved
from pollux.wire.frames import ask, parse_address
from pollux.wire.messages import MAX_MESSAGE_BYTES, pack
from pollux.wire.nodes import (
    DescribeNode,
    Done,
    Forget,
    HostStore,
    Kill,
    ListRuns,
    NodeDescription,
    Refused,
    ReplicaNews,
    ReportNews,
    ResizeRun,
    RunJob,
    RunPhase,
    Seat,
    Spawn,
    StopRun,
    StoreAt,
    Tell,
)
from pollux.wire.replicas import Join, Leave, ReplicaPhase

from .daemons import PATIENT_S, Node, Replica, freeze, launch, report, short_folder, until

pytestmark = pytest.mark.usefixtures("nobody_closes")


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path


@pytest.fixture
def nodes(folder):
    """Makes nodes, and leaves nothing of them behind."""
    made = []

    def make(name="a", **settings):
        made.append(Node(folder / name, name, **settings))
        return made[-1].start()

    yield make
    for node in made:
        node.end()


@pytest.fixture
def node(nodes):
    return nodes()


def spawn(folder, *replicas, job="j", generation=1, is_newcomer=False):
    seats = tuple(Seat(name, rank, len(replicas), 1, is_newcomer) for rank, name in enumerate(replicas))
    return Spawn(job, generation, launch(folder, job), seats, "127.0.0.1:5")


def on(**gpus):
    return Allocation.of(gpus)


def frame(body):
    return len(body).to_bytes(4, "big") + body


class TestStrangers:
    def test_a_wrong_token_is_refused_and_logged(self, node, caplog):
        with pytest.raises(Permanent, match="refuses the token"):
            ask(node.address, "x" * 64, DescribeNode())
        until(lambda: "does not know the token" in caplog.text)
        assert node.token not in caplog.text
        assert isinstance(node.ask(DescribeNode()), NodeDescription)

    @pytest.mark.parametrize(
        "sent",
        [
            frame(b"{}"),
            frame(b""),
            frame(b"\xff\xfe\xfd\xfc"),
            (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big") + b"x" * 1000,
            frame(pack(on(a=1))),
            frame(b'{"schema":1,"type":"NoSuchThing","body":{}}'),
            frame(b'{"schema":2,"type":"ListRuns","body":{}}'),
        ],
    )
    def test_what_is_no_request_ends_its_own_connection_and_no_other(self, node, caplog, sent):
        with node.connect() as other, node.connect() as channel:
            channel._socket.send(sent)
            with contextlib.suppress(Temporary):  # the refusal may be lost with the rest of the frame
                channel.receive(Refused, PATIENT_S)
            with pytest.raises(Temporary):
                channel.receive(Refused, PATIENT_S)
            until(lambda: "Refused" in caplog.text)
            other.send(DescribeNode())
            assert other.receive(NodeDescription, PATIENT_S).node == "a"

    def test_one_that_leaves_at_once_is_named_and_not_waited_for(self, node, caplog):
        with socket.create_connection(parse_address(node.address)) as stranger:
            host, port = stranger.getsockname()
        until(lambda: f"A connection came to nothing: The connection to {host}:{port} is lost" in caplog.text)
        assert "Trying again" not in caplog.text

    def test_silent_and_half_open_clients_disturb_nobody(self, node):
        target = parse_address(node.address)
        with socket.create_connection(target), socket.create_connection(target) as half, node.connect() as mute:
            half.send(b"\0\0")
            mute._socket.send(b"\0\0\1\0{")
            assert node.ask(DescribeNode()).node == "a"

    def test_a_watcher_that_does_not_read_is_dropped(self, node, folder, caplog):
        node.ask(spawn(folder, "1-0"))
        replica = Replica(node, "1-0").say()
        large = report(notices=(CheckpointSaved(0.0, report().state, "x" * 2_000_000),))
        with node.watching(replicas=True) as lazy, node.watching(replicas=True) as keen:
            heard = threading.Thread(target=lambda: keen.replica(lambda news: news.replica.status.step == 77))
            heard.start()
            while "A watcher is dropped" not in caplog.text:
                replica.channel.send(large)
            replica.say(step=77)
            heard.join(PATIENT_S)
            assert not heard.is_alive()
            assert lazy


class TestReplicas:
    def test_a_node_describes_itself(self, node):
        description = node.ask(DescribeNode())
        assert (description.node, description.slots, description.pid) == ("a", 4, os.getpid())

    def test_a_node_knows_its_gpus(self, nodes, monkeypatch):
        monkeypatch.setattr(daemon, "visible_devices", lambda given: [])
        description = nodes("cpus").ask(DescribeNode())
        assert (description.gpu_type, description.devices) == ("cpu", ())
        monkeypatch.setattr(daemon, "visible_devices", lambda given: ["0", "1", "2", "3", "4"])
        monkeypatch.setattr(daemon, "gpu_type", lambda devices: "t4")
        description = nodes("gpus").ask(DescribeNode())
        assert (description.gpu_type, description.devices) == ("t4", ("0", "1", "2", "3"))

    def test_replicas_get_the_lowest_free_slots_and_their_environment(self, node, folder):
        node.ask(spawn(folder, "1-0", "1-1", "1-2"))
        for name in ("1-0", "1-1", "1-2"):
            node.pid(name)
        node.keeper.end("j/1-1")
        until(lambda: node.replicas()["1-1"].exit_code == -9)
        node.ask(spawn(folder, "2-3", "2-4", generation=2, is_newcomer=True))
        node.pid("2-4")
        environments = node.keeper.environments
        assert [environments[f"j/{name}"]["LOCAL_RANK"] for name in ("1-0", "1-1", "1-2", "2-3", "2-4")] == list(
            "01213"
        )
        told = environments["j/2-3"]
        assert told["POLLUX_SOCKET"] == str(node.daemon.folder.address)
        assert told["POLLUX_NEWCOMER"] == "1"
        assert "POLLUX_NEWCOMER" not in environments["j/1-0"]
        assert (told["RANK"], told["WORLD_SIZE"], told["POLLUX_STORE"]) == ("0", "2", "127.0.0.1:5")
        assert node.token not in str(environments)

    def test_a_spawn_that_comes_twice_starts_one(self, node, folder):
        node.ask(spawn(folder, "1-0"))
        pid = node.pid("1-0")
        node.ask(spawn(folder, "1-0"))
        assert node.pid("1-0") == pid
        node.keeper.end("j/1-0")
        until(lambda: node.replicas()["1-0"].exit_code is not None)
        node.ask(spawn(folder, "1-0"))
        assert node.replicas()["1-0"].exit_code == -9

    def test_what_is_stale_or_odd_is_refused(self, node, folder):
        node.ask(spawn(folder, "3-0", generation=3))
        with pytest.raises(StaleGeneration) as caught:
            node.ask(spawn(folder, "2-0", generation=2))
        assert caught.value.current == 3
        with pytest.raises(Permanent, match="name of a file"):
            node.ask(spawn(folder, "../../x", generation=3))
        with pytest.raises(Permanent, match="name of a file"):
            node.ask(Forget("../..", 1))
        with pytest.raises(Permanent, match="name of a file"):
            node.ask(HostStore(".."))
        with pytest.raises(Permanent, match="15 or 9"):
            node.ask(Kill("j", "3-0", 1))
        with pytest.raises(Permanent, match="not on this node"):
            node.ask(Tell("j", "9-9", Leave("j", 4)))
        assert node.ask(Kill("j", "9-9", 9)) == Done()
        assert set(node.replicas()) == {"3-0"}

    def test_one_that_cannot_be_started_has_ended(self, node, folder):
        node.keeper.is_broken = True
        with node.watching(replicas=True) as watching:
            node.ask(spawn(folder, "1-0"))
            ended = watching.news().replica
            assert (ended.has_ended, ended.exit_code, ended.may_have_finished) == (True, None, False)
            assert "bad day" in ended.last_words

    def test_it_is_told_the_newest_instruction_and_told_again_when_it_comes_back(self, node, folder):
        node.ask(spawn(folder, "1-0"))
        early = Join("j", 2, 0, 0, 2, 1, "s:1")
        node.ask(Tell("j", "1-0", early))
        replica = Replica(node, "1-0").say()
        assert replica.hears() == early
        join = Join("j", 2, 1, 0, 1, 1, "s:1", is_repair=True)
        node.ask(Tell("j", "1-0", join))
        assert replica.hears() == join
        for stale in (Leave("j", 1, 7), early):
            with pytest.raises(StaleGeneration):
                node.ask(Tell("j", "1-0", stale))
        replica.close()
        again = Replica(node, "1-0").say()
        assert again.hears() == join
        newer = Replica(node, "1-0").say()  # the one before may be half open
        assert newer.hears() == join
        with pytest.raises(Temporary):
            again.hears_to_the_end()

    def test_nobody_speaks_for_another_replica(self, node, folder, caplog):
        node.ask(spawn(folder, "1-0", "1-1"))
        for stranger in (Replica(node, "1-0", pid=os.getpid()), Replica(node, "7-7", pid=os.getpid())):
            stranger.say()
            assert "not a replica of this node" in stranger.channel.receive(Refused, PATIENT_S).problem
        turncoat = Replica(node, "1-0").say()
        turncoat.replica = "1-1"
        turncoat.say()
        assert "speaks for another" in turncoat.channel.receive(Refused, PATIENT_S).problem

    def test_signals_reach_it_and_a_second_15_does_not(self, node, folder, caplog):
        caplog.set_level(logging.INFO)
        node.ask(spawn(folder, "1-0", "1-1"))
        freeze(node.pid("1-0"))
        for _ in range(2):
            node.ask(Kill("j", "1-0", 15))
        assert caplog.text.count("gets signal 15") == 1
        assert node.replicas()["1-0"].exit_code is None
        node.ask(Kill("j", "1-0", 9))
        node.ask(Kill("j", "1-1", 15))
        until(lambda: node.replicas()["1-0"].exit_code == -9 and node.replicas()["1-1"].exit_code == -15)

    def test_a_kill_before_it_has_a_pid_is_not_forgotten(self, node, folder):
        with node.connect() as channel:
            channel.send(spawn(folder, "1-0"))
            channel.send(Kill("j", "1-0", 9))
            until(lambda: node.replicas()["1-0"].exit_code == -9)

    def test_a_silent_one_is_killed_and_called_hung(self, nodes, folder):
        node = nodes(hang_after_s=3.0, heartbeat_s=0.1)
        node.ask(spawn(folder, "1-0", "1-1", "1-2"))
        live = Replica(node, "1-1").say()
        with node.watching(replicas=True) as watching:
            Replica(node, "1-0").say()
            news = None
            while news is None or news.replica.exit_code is None:
                live.say()
                news = watching.replica(lambda news: True)  # of itself, at the latest
        assert (news.replica.replica, news.replica.exit_code, news.is_hung) == ("1-0", -9, True)
        assert node.replicas()["1-2"].exit_code is None  # it has not come to its first word: others wait for that

    def test_time_in_which_the_daemon_slept_is_no_silence(self, nodes, folder):
        node = nodes(hang_after_s=3.0)
        node.ask(spawn(folder, "1-0"))
        replica = Replica(node, "1-0").say()
        until(lambda: node.replicas()["1-0"].status)
        node.loop.call_soon_threadsafe(time.sleep, 3.5)
        node.ask(DescribeNode())
        replica.say()
        until(lambda: node.replicas()["1-0"].status)
        assert node.replicas()["1-0"].exit_code is None

    def test_forget_ends_what_is_left(self, node, folder):
        assert node.ask(HostStore("j")) == StoreAt("127.0.0.1:1001")
        assert node.ask(HostStore("j")) == StoreAt("127.0.0.1:1001")
        node.ask(spawn(folder, "1-0"))
        node.pid("1-0")
        log = node.replicas()["1-0"].log
        with node.watching("j", replicas=True) as watching:
            node.ask(Forget("j", 1))
            node.ask(Forget("j", 1))
            assert node.keeper.processes["j/1-0"].wait(PATIENT_S) == -9
            assert watching.replica(lambda news: news.replica.exit_code == -9).replica.replica == "1-0"
        assert node.replicas() == {}
        until(lambda: node.keeper.forgotten == ["j", "j"])
        assert "RuntimeError" in Path(log).read_text()
        assert not node.daemon.folder.replicas_file("j").exists()

    def test_what_is_forgotten_frees_its_slot_at_once(self, node, folder):
        node.ask(spawn(folder, "1-0"))
        freeze(node.pid("1-0"))
        with node.connect() as channel:
            channel.send(Forget("j", 1))
            channel.send(spawn(folder, "2-0", generation=2))
            node.pid("2-0")
        told = node.keeper.environments["j/2-0"]
        assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("0", "1")
        until(lambda: set(node.replicas()) == {"2-0"})

    def test_forget_spares_what_is_newer(self, node, folder):
        node.ask(spawn(folder, "2-0", generation=2))
        node.pid("2-0")
        node.ask(spawn(folder, "3-0", generation=3))
        node.ask(HostStore("j"))
        pid = node.pid("3-0")
        with node.watching("j", replicas=True) as watching:
            node.ask(Forget("j", 2))
            assert watching.replica(lambda news: news.replica.exit_code is not None).replica.replica == "2-0"
        assert set(node.replicas()) == {"3-0"}
        assert (node.pid("3-0"), node.replicas()["3-0"].exit_code) == (pid, None)
        assert node.keeper.forgotten == []
        assert node.keeper.stores["j"][0].poll() is None
        node.ask(Forget("j", 3))
        until(lambda: node.replicas() == {} and node.keeper.forgotten == ["j"])

    def test_a_full_disk_hides_no_end(self, node, folder, monkeypatch, caplog):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        node.ask(spawn(folder, "1-0"))
        node.pid("1-0")
        monkeypatch.setattr(roster, "write", full)
        node.ask(spawn(folder, "1-1", "1-2"))
        with node.watching("j", replicas=True) as watching:
            Replica(node, "1-1").say()
            watching.replica(lambda news: news.replica.status is not None)
            node.keeper.end("j/1-0")
            assert watching.replica(lambda news: news.replica.exit_code == -9).replica.replica == "1-0"
            node.ask(Kill("j", "1-2", 15))
            assert watching.replica(lambda news: news.replica.exit_code == -15).replica.replica == "1-2"
        assert "No space left on device" in caplog.text

    def test_reports_reach_the_watchers_of_replicas(self, node, folder):
        node.ask(spawn(folder, "1-0"))
        replica = Replica(node, "1-0").say()
        with node.watching("other", replicas=True) as deaf, node.watching("j", replicas=True) as watching:
            replica.channel.send(report(7))
            while not isinstance(news := watching.news(), ReportNews):
                pass
            assert news.report == report(7)
            with pytest.raises(TimeoutError):
                deaf.channel.receive(ReportNews, 0.05)

    def test_what_it_said_last_is_heard_before_its_end(self, node, folder, monkeypatch):
        monkeypatch.setattr(links, "LAST_WORDS_S", PATIENT_S)
        node.ask(spawn(folder, "1-0"))
        replica = Replica(node, "1-0").say()

        def finish():
            replica.say(has_finished=True).channel.send(report(7))
            replica.close()
            node.keeper.on_exit("j/1-0", replica.pid, 0)  # before the loop has read any of that

        until(lambda: node.replicas()["1-0"].status)
        with node.watching("j", replicas=True) as watching:
            node.loop.call_soon_threadsafe(finish)
            news = [watching.news()]
            while not (isinstance(news[-1], ReplicaNews) and news[-1].replica.exit_code == 0):
                news.append(watching.news())
        assert [one.report for one in news if isinstance(one, ReportNews)] == [report(7)]
        assert news[-1].replica.status.has_finished

    def test_its_report_may_come_on_a_connection_that_is_younger_than_its_end(self, node, folder):
        node.ask(spawn(folder, "1-0"))
        replica = Replica(node, "1-0")
        node.keeper.end("j/1-0")
        until(lambda: node.replicas()["1-0"].exit_code)
        with node.watching("j", replicas=True) as watching:
            replica.say().channel.send(report(7))
            while not isinstance(news := watching.news(), ReportNews):
                pass
        assert news.report == report(7)
        assert node.replicas()["1-0"].status is None

    def test_a_connection_that_outlives_it_does_not_hide_its_end(self, node, folder):
        node.ask(spawn(folder, "1-0"))
        replica = Replica(node, "1-0").say()
        until(lambda: node.replicas()["1-0"].status)
        node.keeper.end("j/1-0")
        assert until(lambda: node.replicas()["1-0"].exit_code) == -9
        with pytest.raises(Temporary):
            replica.hears_to_the_end()


class TestHome:
    def test_a_job_starts_grows_and_finishes(self, node, folder):
        with node.watching("j") as watching:
            assert node.ask(RunJob("j", 1, launch(folder), on(a=1))) == Done()
            first = node.living(1)[0].say(generation=1)
            assert watching.event(ReplicasReady).generation == 1
            node.ask(ResizeRun("j", 2, on(a=2)))
            second = node.living(2)[1].say(ReplicaPhase.READY, 2, has_state=False)
            join = second.hears()
            assert (join.generation, join.rank, join.size) == (2, 1, 2)
            assert first.hears().rank == 0
            assert join.store == "127.0.0.1:1001"
            first.say(generation=2)
            second.say(generation=2)
            assert watching.event(ReplicasReady).generation == 2
            status = node.ask(ListRuns()).runs[0]
            assert (status.phase, status.generation, status.allocation) == (RunPhase.TRAINING, 2, on(a=2))

    def test_a_failure_quotes_the_log(self, node, folder):
        with node.watching("j") as watching:
            node.ask(RunJob("j", 1, launch(folder), on(a=1)))
            replica = node.living(1)[0].say()
            watching.event(ReplicasReady)
            node.keeper.end(f"j/{replica.replica}")
            failed = watching.event(JobFailed)
        assert failed.exit_code == -9
        assert "ended by signal 9. Last lines of /" in failed.reason
        assert "second | RuntimeError: it broke" in failed.reason
        assert node.ask(ListRuns()).runs[0].phase is RunPhase.ENDED
        until(lambda: node.keeper.forgotten == ["j"])
        with node.watching("j") as late:
            assert late.event(JobFailed).generation == 1
        with pytest.raises(StaleGeneration):
            node.ask(RunJob("j", 1, launch(folder), on(a=2)))
        node.ask(RunJob("j", 2, launch(folder), on(a=2)))
        assert node.ask(ListRuns()).runs[0].phase is RunPhase.STARTING

    def test_a_failure_on_another_node_quotes_its_log(self, nodes, folder):
        token_file = folder / "token"
        token_file.write_text("x" * 64)
        node, other = (nodes(name, token_file=token_file) for name in "ab")
        with node.watching("j") as watching:
            node.ask(RunJob("j", 1, launch(folder), on(b=1), FrozenMap({"b": other.address})))
            replica = other.living(1)[0].say()
            watching.event(ReplicasReady)
            other.keeper.end(f"j/{replica.replica}")
            failed = watching.event(JobFailed)
        assert "on node b ended by signal 9. Last lines of /" in failed.reason
        assert "second | RuntimeError: it broke" in failed.reason
        with node.watching("j") as late:
            assert late.event(JobFailed) == failed

    def test_survivors_of_a_loss_are_told_to_go_on(self, node, folder):
        with node.watching("j") as watching:
            node.ask(RunJob("j", 1, launch(folder), on(a=2)))
            first, second = (replica.say() for replica in node.living(2))
            watching.event(ReplicasReady)
            node.keeper.end(f"j/{first.replica}")
            join = second.hears()
            assert (join.membership, join.rank, join.size, join.is_repair) == (1, 0, 1, True)
            second.say(membership=1)
            assert watching.event(ReplicaLost).survivors == on(a=1)

    def test_the_first_replica_finds_what_others_of_its_kind_have_measured(self, node, folder):
        with node.watching("j") as watching:
            node.ask(RunJob("j", 1, launch(folder), on(a=2), experience="known"))
            first, second = node.living(2)
            path = Path(node.keeper.environments[f"j/{first.replica}"]["POLLUX_EXPERIENCE"])
            assert path.read_text() == "known"
            assert path.stat().st_mode & 0o077 == 0
            first.say()
            second.say()
            watching.event(ReplicasReady)
            node.ask(ResizeRun("j", 2, on(a=1), experience="known by now"))
            assert first.hears().rank == 0
            assert path.read_text() == "known by now"
            second.hears()
            first.say(generation=2)
            # A leaver that ends before those who stay train without it is a loss.
            until(lambda: node.replicas()[first.replica].status.generation == 2)
            node.keeper.end(f"j/{second.replica}", 15)
            watching.event(ReplicasReady)
            node.ask(ResizeRun("j", 3, on(a=2)))
            node.living(2)[1].say(ReplicaPhase.READY, 3, has_state=False)
            first.hears()
            assert not path.exists()  # the policy is another one, and tells nothing

    def test_wherever_that_is_and_whoever_takes_its_place(self, nodes, folder):
        token_file = folder / "token"
        token_file.write_text("x" * 64)
        node, other = (nodes(name, token_file=token_file) for name in "ab")
        here, there = (one.daemon.folder.experience_file(JobId("j")) for one in (node, other))
        with node.watching("j") as watching:
            request = RunJob("j", 1, launch(folder), on(a=1, b=1), FrozenMap({"b": other.address}), "known")
            node.ask(request)
            first, second = node.living(1)[0].say(), other.living(1)[0].say()
            watching.event(ReplicasReady)
            assert (here.read_text(), there.exists()) == ("known", False)
            node.keeper.end(f"j/{first.replica}")
            assert second.hears().rank == 0
            assert there.read_text() == "known"
            second.say(membership=1)
            watching.event(ReplicaLost)
            node.ask(StopRun("j", 1, StopReason.CANCELLED))
            watching.event(JobStopped)
        until(lambda: not here.exists() and not there.exists())

    def test_a_job_starts_also_where_that_cannot_be_written(self, node, folder, monkeypatch, caplog):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(hosting, "write", full)
        with node.watching("j") as watching:
            node.ask(RunJob("j", 1, launch(folder), on(a=1), experience="known"))
            node.living(1)[0].say()
            watching.event(ReplicasReady)
        assert "cannot be told to job j" in caplog.text

    def test_a_stop_is_always_answered(self, node, folder):
        with node.watching() as watching:
            node.ask(StopRun("unknown", 3, StopReason.PREEMPTED))
            assert watching.event(JobStopped) == JobStopped("unknown", 3)
            node.ask(ResizeRun("unknown", 4, on(a=1)))
            assert watching.event(GenerationAbandoned).generation == 4
            node.ask(RunJob("j", 1, launch(folder), on(a=1)))
            node.living(1)
            node.ask(StopRun("j", 1, StopReason.CANCELLED))
            assert watching.event(JobStopped).job == "j"
        assert [process.wait(PATIENT_S) for process in node.keeper.processes.values()] == [-9]

    def test_changed_code_means_checkpoint_and_restart(self, node, folder):
        with node.watching("j") as watching:
            node.ask(RunJob("j", 1, launch(folder), on(a=1)))
            old = node.living(1)[0].say()
            watching.event(ReplicasReady)
            (folder / "train.py").write_text("print('new')\n")
            node.ask(ResizeRun("j", 2, on(a=2)))
            assert node.keeper.processes[f"j/{old.replica}"].wait(PATIENT_S) == -15
            replicas = [replica.say(generation=2) for replica in node.living(2)]
            assert watching.event(ReplicasReady).generation == 2
            assert node.keeper.environments[f"j/{replicas[0].replica}"]["WORLD_SIZE"] == "2"
            node.ask(ResizeRun("j", 3, on(a=1)))
            assert {type(replica.hears()) for replica in replicas} == {Join, Leave}  # in place again

    def test_what_cannot_be_run_is_refused(self, node, folder):
        with pytest.raises(Permanent, match="'b' is missing"):
            node.ask(RunJob("j", 1, launch(folder), on(a=1, b=1)))
        with pytest.raises(Permanent, match="allocation"):
            node.ask(RunJob("j", 1, launch(folder), on()))
        with pytest.raises(Permanent, match="is not the job"):
            node.ask(RunJob("k", 1, launch(folder), on(a=1)))
        assert node.ask(ListRuns()).runs == ()

    def test_two_daemons_are_two_nodes_with_one_token(self, nodes, folder):
        first = nodes("a")
        second = nodes("b", token_file=first.daemon.folder.token_file)
        until((folder / "b" / "token").exists)
        assert (folder / "b" / "token").read_text() == first.daemon.folder.token, "a copy, and no token of its own"
        with first.watching("j") as watching:
            addresses = FrozenMap({"b": second.address})
            first.ask(RunJob("j", 1, launch(folder), on(a=1, b=1), addresses))
            here, there = first.living(1)[0].say(), second.living(1)[0].say()
            watching.event(ReplicasReady)
            there.channel.send(report())
            while not isinstance(watching.news(), ReportNews):
                pass
            second.keeper.end(f"j/{there.replica}")
            assert here.hears().is_repair
            first.ask(StopRun("j", 1, StopReason.CANCELLED))
            watching.event(JobStopped)
        until(lambda: second.keeper.forgotten == ["j"] and first.keeper.forgotten == ["j"])

    def test_the_daemon_of_another_node_has_to_be_who_it_is_said_to_be(self, nodes, folder, caplog):
        first = nodes("a")
        other = nodes("c", token_file=first.daemon.folder.token_file)
        with first.watching("j") as watching:
            first.ask(RunJob("j", 1, launch(folder), on(b=1), FrozenMap({"b": other.address})))
            assert watching.event(JobFailed | JobStopped | GenerationAbandoned).generation == 1
        assert "not the daemon of node b" in caplog.text
        assert other.replicas() == {}


class TestTheFolder:
    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
    def test_lets_jobs_of_another_user_through_to_what_is_theirs(self, folder):
        def mode(*names):
            state = (folder / "b").joinpath(*names).stat()
            return stat.S_IMODE(state.st_mode), state.st_uid

        uid = account_of("nobody").uid
        node = Node(folder / "b", "b", job_user="nobody").start()
        try:
            node.ask(replace(spawn(folder, "1-0"), experience="told"))
            node.pid("1-0")
            assert {mode(), mode("jobs"), mode("jobs", "j")} == {(0o711, 0)}
            assert {mode("node.sock"), mode("jobs", "j", "experience.json")} == {(0o600, uid)}
            assert mode("jobs", "j", "logs") == (0o700, 0)
            assert {mode("token"), mode("node.json"), mode("jobs", "j", "replicas.json")} == {(0o600, 0)}
            node.stop()
            node.options = replace(node.options, job_user="")
            node.start()
            assert {mode(), mode("jobs"), mode("jobs", "j"), mode("jobs", "j", "logs")} == {(0o700, 0)}
            assert mode("node.sock") == (0o600, 0)
        finally:
            node.end()

    def test_refuses_the_credential_of_a_job_as_its_token(self, folder):
        given = folder / "given"
        given.write_text(credential("0123456789abcdef", ReplicaIdentity("j", "1-0")))
        with pytest.raises(InvalidSpec, match="credential of a job"):
            StateFolder(folder / "c", given)

    def test_is_private_and_has_a_token(self, node, folder):
        assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "a" / "token").stat().st_mode) == 0o600
        assert len(node.token) == 64
        path = folder / "a" / "node.json"
        until(path.exists)  # it is written once the daemon listens
        file = json.loads(path.read_text())
        assert f"{file['host']}:{file['port']}" == node.address

    def test_belongs_to_one_daemon(self, node, folder):
        with pytest.raises(Permanent, match=f"in use by the daemon of node a, pid {os.getpid()}"):
            Node(folder / "a", "b").start()

    def test_has_a_short_path(self, folder):
        with pytest.raises(InvalidSpec, match="too long"):
            StateFolder(folder / ("x" * 100))

    def test_has_to_be_a_folder(self, folder):
        (folder / "file").touch()
        with pytest.raises(InvalidSpec, match=r"--dir = .*Not a directory.*POLLUX_HOME"):
            StateFolder(folder / "file" / "node")

    def test_a_token_file_that_holds_none_is_refused(self, folder):
        for text in (None, "short", "é" * 30):
            path = folder / "t"
            if text is not None:
                path.write_text(text)
            with pytest.raises(InvalidSpec, match="token file"):
                StateFolder(folder / "d", path)

    def test_is_left_tidy(self, nodes, folder):
        node = nodes("z")
        node.stop(end_all=True)
        assert not (folder / "z" / "node.sock").exists()
        assert not (folder / "z" / "node.json").exists()

    def test_last_lines_fit_for_a_message(self, folder):
        path = folder / "log"
        path.write_bytes(b"a\n\n b\tc \n\xff\x1b[0m\n" * 3)
        assert last_lines(path, 2) == "b c | \ufffd [0m"
        path.write_text("x" * 1000)
        assert last_lines(path, 2, 10) == "…" + "x" * 10
        assert last_lines(folder / "none", 2) == ""


def test_slots_are_counted():
    assert count_slots() >= 1


def test_ending_all_lets_jobs_save_and_stop(nodes, folder):
    node = nodes("e")
    node.ask(RunJob("j", 1, launch(folder), on(e=1)))
    node.living(1)
    node.ask(spawn(folder, "1-0", job="k"))
    node.pid("1-0", "k")
    node.stop(end_all=True)
    assert {process.wait(PATIENT_S) for process in node.keeper.processes.values()} == {-15}
    assert node.failure is None
