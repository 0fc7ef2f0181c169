"""Daemons as processes: started, found, asked, killed, restarted, and gone at the end. Most of them are fake."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pollux.core import (
    Allocation,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobId,
    JobStopped,
    NodeId,
    ReplicasReady,
    StopReason,
)
from pollux.errors import InvalidSpec, Permanent, StaleGeneration
from pollux.node import launching
from pollux.node.launched import HOME, Launched, launches_in, spread
from pollux.node.launching import LocalCluster, slots_per_node, visible_devices
from pollux.wire.nodes import Launch, ReplicaNews, ResizeRun, RunNews, RunPhase

FAKE = Path(__file__).parent / "fake_daemon.py"
PATIENT_S = 60.0
N0, N1, N2 = (NodeId(f"n{position}") for position in range(3))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(launching, "COMMAND", (sys.executable, str(FAKE)))


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="launching-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def program(*arguments, job="train"):
    return Launch(JobId(job), "/no/train.py", arguments)


def is_process(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(is_so):
    until_s = time.monotonic() + PATIENT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


class TestSpread:
    def test_fills_node_after_node(self):
        assert spread(5, [N0, N1, N2], 2).gpus == {N0: 2, N1: 2, N2: 1}
        assert spread(2, [N0, N1], 2).gpus == {N0: 2}

    def test_evenly_leaves_no_node_far_behind(self):
        assert spread(4, [N0, N1, N2], 8, evenly=True).gpus == {N0: 2, N1: 1, N2: 1}
        assert spread(2, [N0, N1, N2], 8, evenly=True).gpus == {N0: 1, N1: 1}
        assert spread(6, [N0, N1, N2], 2, evenly=True).gpus == {N0: 2, N1: 2, N2: 2}

    @pytest.mark.parametrize(("count", "words"), [(0, "at least one"), (5, "2 nodes with 2 slots each")])
    def test_refuses_what_does_not_fit(self, count, words):
        with pytest.raises(InvalidSpec, match=words):
            spread(count, [N0, N1], 2)


class TestSlots:
    @pytest.fixture
    def two_gpus(self, monkeypatch):
        monkeypatch.setattr(os, "listdir", lambda path: ["null", "nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm"])

    @pytest.mark.usefixtures("two_gpus")
    @pytest.mark.parametrize(
        ("listed", "expected"),
        [(None, ["0", "1"]), ("1", ["1"]), ("", []), ("-1", []), ("GPU-8a, GPU-9b", ["GPU-8a", "GPU-9b"])],
    )
    def test_gpus_are_those_that_cuda_would_show(self, listed, expected):
        assert visible_devices({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == expected

    def test_a_machine_without_gpus_has_none_whatever_is_listed(self, monkeypatch):
        monkeypatch.setattr(os, "listdir", lambda path: ["null"])
        assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,1"}) == []

    def test_nodes_share_the_gpus_of_the_machine(self):
        assert slots_per_node(2, ["0", "1", "2", "3", "4"]) == 2
        with pytest.raises(InvalidSpec, match="more than the 1 GPUs"):
            slots_per_node(2, ["0"])

    def test_a_small_machine_without_gpus_still_has_room_to_grow(self):
        assert slots_per_node(1, []) >= launching.MIN_CPU_SLOTS

    @pytest.mark.usefixtures("two_gpus", "fake")
    def test_each_node_sees_its_own_gpus(self):
        with LocalCluster(nodes=2, start_timeout_s=PATIENT_S) as cluster:
            shown = [
                Path(f"/proc/{daemon.pid}/environ").read_bytes().split(b"CUDA_VISIBLE_DEVICES=")[1].split(b"\0")[0]
                for daemon in cluster.daemons
            ]
        assert shown == [b"0", b"1"]


@pytest.mark.usefixtures("fake")
class TestWithFakeDaemons:
    def test_a_job_starts_grows_and_stops(self):
        with LocalCluster(nodes=2, slots=2) as cluster:
            assert cluster.nodes == (N0, N1)
            assert cluster.status("train") is None
            assert cluster.wait("train", cluster.run(program("train"), 2), PATIENT_S) == ReplicasReady("train", 1)
            assert cluster.resize("train", 3) == 2
            assert cluster.wait("train", 2, PATIENT_S) == ReplicasReady("train", 2)
            status = cluster.status("train")
            assert (status.phase, status.allocation.gpus) == (RunPhase.TRAINING, {N0: 2, N1: 1})
            assert cluster.wait_end("train", cluster.stop("train"), PATIENT_S) == JobStopped("train", 2)

    def test_a_resize_that_is_given_up_is_told(self):
        with LocalCluster(slots=8) as cluster:
            cluster.wait("train", cluster.run(program("train")), PATIENT_S)
            told = cluster.wait("train", cluster.resize("train", 7), PATIENT_S)
            assert isinstance(told, GenerationAbandoned)

    def test_generations_go_on_after_a_failure(self):
        with LocalCluster(slots=2) as cluster:
            assert cluster.run(program("fail:1")) == 1
            assert cluster.wait_end("train", 1, PATIENT_S).exit_code == 3
            assert cluster.run(program("fail:1")) == 2
            assert cluster.wait_end("train", 2, PATIENT_S) == JobFinished("train", 2)

    def test_the_news_come_as_an_iterator_that_ends_with_the_cluster(self):
        cluster = LocalCluster(slots=2)
        listener = cluster.watch()
        with cluster:
            cluster.run(program("break"), 2)
            cluster.wait_end("train", 1, PATIENT_S)
        news = list(listener)
        assert [one.replica.replica for one in news if isinstance(one, ReplicaNews)] == ["1-1", "1-2"]
        assert [type(one.event) for one in news if isinstance(one, RunNews)] == [JobFailed]

    def test_whoever_waits_in_vain_is_told_what_happened_last(self):
        with LocalCluster(slots=2) as cluster:
            cluster.wait("train", cluster.run(program("train")), PATIENT_S)
            with pytest.raises(TimeoutError, match="ReplicasReady"):
                cluster.wait_end("train", timeout_s=0.1)

    def test_a_job_that_does_not_run_is_not_resized(self):
        with LocalCluster(slots=2) as cluster:
            with pytest.raises(Permanent, match="Job train does not run"):
                cluster.resize("train", 2)
            cluster.wait_end("train", cluster.run(program("finish")), PATIENT_S)
            with pytest.raises(Permanent, match="does not run any more"):
                cluster.resize("train", 2)

    def test_a_stale_generation_is_refused(self):
        with LocalCluster(slots=2) as cluster:
            cluster.wait("train", cluster.run(program("train")), PATIENT_S)
            with pytest.raises(StaleGeneration):
                cluster.ask(ResizeRun(JobId("train"), 1, Allocation.of({HOME: 2})))

    def test_nothing_is_left_of_it(self):
        with LocalCluster(nodes=2, slots=2) as cluster:
            pids, folder = [daemon.pid for daemon in cluster.daemons], cluster.folder
            assert all(map(is_process, pids))
        assert not any(map(is_process, pids))
        assert not folder.exists()

    def test_a_killed_daemon_comes_back_and_is_heard(self):
        with LocalCluster(slots=2) as cluster:
            pid = cluster.daemons[0].pid
            cluster.kill_daemon(0)
            assert not cluster.is_running
            cluster.restart_daemon(0)
            assert cluster.daemons[0].pid != pid
            assert cluster.wait("train", cluster.run(program("train")), PATIENT_S) == ReplicasReady("train", 1)

    def test_what_a_killed_daemon_left_is_ended(self, folder):
        with LocalCluster(folder, slots=2) as cluster:
            cluster.kill_daemon(0)
            assert cluster.daemons[0].has_left_something
        assert not (folder / "n0" / "keeper.sock").exists()

    def test_at_once_means_that_nothing_is_saved(self):
        cluster = LocalCluster(slots=2)
        listener = cluster.watch()
        cluster.wait("train", cluster.run(program("train")), PATIENT_S)
        cluster.close(at_once=True)
        assert JobStopped("train", 1) in [one.event for one in listener if isinstance(one, RunNews)]

    def test_a_daemon_that_does_not_start_is_quoted(self, folder):
        with pytest.raises(Permanent, match=r"n0 ended with exit code 1.* no such luck"):
            LocalCluster(folder, options=["--breaks"])

    def test_a_folder_has_one_launcher(self, folder):
        with LocalCluster(folder), pytest.raises(InvalidSpec, match="runs already"):
            LocalCluster(folder)

    def test_launches_are_found_by_their_folders(self, folder):
        (folder / "other").mkdir()
        with LocalCluster(folder / "train", nodes=2, slots=3):
            assert list(launches_in(folder)) == ["train"]
            with Launched(folder / "train") as found:
                assert (found.nodes, found.slots) == ((N0, N1), 3)
        assert list(launches_in(folder)) == []

    def test_daemons_end_when_their_launcher_is_killed_and_its_folder_is_used_again(self, folder):
        script = (
            "import sys, time; from pathlib import Path; from pollux.node import launching\n"
            f"launching.COMMAND = (sys.executable, {str(FAKE)!r})\n"
            f"cluster = launching.LocalCluster(Path({str(folder)!r}), nodes=2, slots=2)\n"
            "print(*(daemon.pid for daemon in cluster.daemons), flush=True); time.sleep(100)\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
            pids = [int(pid) for pid in launcher.stdout.readline().split()]
            os.kill(pids[1], signal.SIGKILL)  # what it left is somebody's to end
            launcher.kill()
        with LocalCluster(folder, nodes=1, slots=2) as cluster:
            assert cluster.nodes == (N0,)
            assert not (folder / "n1" / "keeper.sock").exists()
            cluster.wait("train", cluster.run(program("train")), PATIENT_S)
        wait_until(lambda: not is_process(pids[0]))


@pytest.mark.slow
def test_real_daemons_run_a_script_on_two_nodes_and_leave_nothing(folder):
    script = folder / "hello.py"
    script.write_text(
        "import os, time\nprint('rank', os.environ['RANK'])\ntime.sleep(float(os.environ.get('NAP', 0)))\n"
    )
    with LocalCluster(folder / "l", nodes=2, slots=1, environment={**os.environ, "NAP": "300"}) as cluster:
        generation = cluster.run(Launch(JobId("hello"), str(script)), 2)
        wait_until(lambda: all(here.pid for _, here in cluster.replicas("hello").values()))
        wait_until(lambda: len(cluster.replicas("hello")) == 2)
        for position in (0, 1):
            cluster.restart_daemon(position)
        replicas = cluster.replicas("hello")
        assert {node for node, _ in replicas.values()} == {N0, N1}
        assert cluster.wait_end("hello", cluster.stop("hello", StopReason.CANCELLED), PATIENT_S) == JobStopped(
            "hello", generation
        )
        printed = sorted(Path(here.log).read_text() for _, here in replicas.values())
        assert printed == ["rank 0\n", "rank 1\n"]
        pids = [here.pid for _, here in replicas.values()] + [daemon.pid for daemon in cluster.daemons]
    assert not any(map(is_process, pids))
    assert not list(folder.rglob("*.sock"))
