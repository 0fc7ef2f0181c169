"""Daemons, keepers and whole nodes are killed while a job trains: nothing is lost, and later changes work."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.elastic_soak import leftovers
from tests.elastic.conftest import Trials
from tests.elastic.trial import Trial, on, until

from pollux.core import Allocation, ReplicaLost, ReplicasReady
from pollux.node.launching import LocalCluster
from pollux.node.processes import began_at, is_running
from pollux.wire.nodes import ReplicaNews
from pollux.wire.replicas import ReplicaPhase

PASSES, STEP_S = 15, 0.2
"""A minute, unless it is told to hurry: all that befalls a job does so before its end."""
OPTIONS = ("--hang-after", "6", "--heartbeat", "0.2", "--stuck-timeout", "1")
WAITS, SOON = ("--node-timeout", "45"), ("--node-timeout", "3")
"""A daemon is back before its node counts as lost, however slow the machine is; or it never comes back in time."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two nodes that lose patience with replicas soon, and with one another late."""
    with LocalCluster(nodes=2, slots=4, options=(*OPTIONS, *WAITS)) as cluster:
        yield cluster


def begin(trial: Trials, where: Allocation, *arguments: object, **environment: str) -> Trial:
    script = Path(__file__).with_name("fault_points.py")
    arguments = ("--passes", PASSES, "--step-s", STEP_S, *arguments)
    return trial(*arguments, script=script, environment=environment).start(where)


def check_end(made: Trial, survivors: int) -> None:
    results = made.finish()
    assert len(results) == survivors, made.logs()
    for result in results.values():
        assert {round(count, 6) for count in result["uses"]} == {PASSES}
    assert len({tuple(result["weights"]) for result in results.values()}) == 1


def keeper_of(folder: Path) -> int:
    """The first of the processes with its command line: the others are forks of it."""
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"pollux.node.keeper\0--dir\0{folder}\0".encode() in _bytes(path)
    ]
    return min(found, key=began_at)


def _bytes(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def kill(pid: int) -> None:
    began = began_at(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid, began), f"process {pid} ends")


def wait_lost(made: Trial) -> None:
    made.cluster.news.wait_for(lambda event: isinstance(event, ReplicaLost) and event.job == made.job, 60.0)


@pytest.mark.parametrize("node", [0, 1], ids=["home", "other"])
def test_a_daemon_is_killed_while_the_job_trains(trial, cluster, node):
    made = begin(trial, on(n0=1, n1=1))
    pids = made.pids()
    cluster.restart_daemon(node)
    assert made.pids() == pids
    made.resize(on(n0=1, n1=2))
    assert made.pids().items() > pids.items()
    check_end(made, 3)


def test_both_daemons_are_killed_while_a_resize_gets_ready(trial, cluster):
    made = begin(trial, on(n0=1, n1=1))
    made.resize(on(n0=2, n1=2), waits=False)
    for node in (0, 1):
        cluster.restart_daemon(node)
    made.expect_ready(made.wait())
    check_end(made, 4)


@pytest.mark.parametrize(
    ("node", "phase"), [(0, ReplicaPhase.READY), (0, ReplicaPhase.JOINING), (1, ReplicaPhase.JOINING)]
)
def test_a_daemon_is_killed_as_the_members_change(trial, cluster, node, phase):
    made = begin(trial, on(n0=1, n1=1))
    with cluster.watch() as listener:
        made.resize(on(n0=2, n1=1), waits=False)
        for news in listener:
            said = news.replica.status if isinstance(news, ReplicaNews) and news.job == made.job else None
            if said is not None and said.phase is phase:
                break
    cluster.restart_daemon(node)
    made.expect_ready(made.wait())
    check_end(made, 3)


@pytest.mark.parametrize("node", [0, 1], ids=["home", "other"])
def test_a_daemon_is_away_when_a_replica_is_killed(trial, cluster, node):
    made = begin(trial, on(n0=2, n1=2))
    victim = made.pids()[f"1-{2 * node + 2}"]
    cluster.kill_daemon(node)
    kill(victim)
    cluster.restart_daemon(node)
    wait_lost(made)
    made.resize(on(n0=2, n1=2))
    check_end(made, 4)


def test_a_keeper_is_killed_and_replicas_live_on(trial, cluster):
    made = begin(trial, on(n0=2))
    pids = made.pids()
    kill(keeper_of(cluster.folder / "n0"))

    def can_grow() -> bool:
        """Not before another keeper has loaded all it needs."""
        return isinstance(made.resize(on(n0=3), waits=False).wait(), ReplicasReady)

    until(can_grow, "there is another keeper")
    assert made.pids().items() > pids.items()
    kill(pids["1-2"])
    wait_lost(made)
    check_end(made, 2)


def test_a_whole_node_is_lost(tmp_path):
    with LocalCluster(nodes=2, slots=4, options=(*OPTIONS, *SOON)) as cluster:
        made = begin(Trials(cluster, tmp_path), on(n0=2, n1=2))
        victims = [here.pid for node, here in cluster.replicas(made.job).values() if node == "n1"]
        cluster.kill_daemon(1)
        for pid in (keeper_of(cluster.folder / "n1"), *victims):
            kill(pid)
        wait_lost(made)
        cluster.restart_daemon(1)
        made.resize(on(n0=1, n1=2))
        check_end(made, 3)


def test_a_replica_that_is_stopped_counts_as_lost(trial):
    made = begin(trial, on(n0=3))
    os.kill(made.pids()["1-1"], signal.SIGSTOP)
    wait_lost(made)
    check_end(made, 2)


def test_a_replica_whose_script_hangs_counts_as_lost(trial):
    made = begin(trial, on(n0=3), FAULTS="reduce:1-2:10:sleep", POLLUX_GROUP_TIMEOUT_S="1")
    wait_lost(made)
    check_end(made, 2)


def test_nothing_is_left_behind_by_a_cluster_whose_daemon_was_killed(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="pollux-", dir="/tmp"))
    with LocalCluster(folder / "nodes", slots=2) as cluster:
        Trial(cluster, tmp_path, "left", "--step-s", 0.01, "--passes", 1000).start(2)
        cluster.kill_daemon(0)
    assert list(leftovers(folder)) == []
    shutil.rmtree(folder)
