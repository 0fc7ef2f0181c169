"""Outcomes as people see them: what succeeded has run, exit codes are those of processes, and nothing is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.live.cluster import LiveCluster, until

from pollux.node.exits import SHIM
from pollux.node.processes import command_of, name_of, parent_of
from pollux.node.starting_keeper import KEEPER

NODES = 1


def gated(cluster: LiveCluster, name: str, script: str) -> tuple[str, Path]:
    """A plain command that waits for a file before it does what the script says; it runs when this returns."""
    gate = cluster.home / f"{name}.gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.05; done; {script}"
    job = cluster.pollux("submit", "--name", name, "--retries", 2, "--gpus", 1, "--", "sh", "-c", wait).strip()
    cluster.wait(job, "running")
    return job, gate


def keepers(cluster: LiveCluster) -> list[int]:
    """Without what was forked from them."""
    found = [pid for pid in cluster.processes() if KEEPER in command_of(pid)]
    return [pid for pid in found if KEEPER not in command_of(parent_of(pid)) and name_of(pid) != SHIM]


def test_a_job_after_the_log_was_moved_away_is_another_one(cluster: LiveCluster) -> None:
    first = cluster.pollux("run", "--name", "cnt", "--gpus", 1, "--", "echo", "first")
    assert "first" in first
    cluster.down()
    cluster.folder.database.rename(cluster.home / "old.db")
    told = cluster.run("up")
    assert "The event log has lost the last" in told.stderr
    ran = cluster.home / "ran"
    again = ("run", "--name", "cnt", "--retries", 0, "--gpus", 1)
    done = cluster.run(*again, "--", "sh", "-c", f"touch {ran}; echo second; exit 3")
    assert done.returncode == 3
    assert ran.exists()
    assert "second" in done.stdout
    assert "first" not in done.stdout


@pytest.mark.parametrize(("script", "phase", "code"), [("exit 0", "succeeded", None), ("exit 78", "failed", 78)])
def test_how_a_command_ended_is_known_although_its_keeper_was_killed(
    cluster: LiveCluster, script: str, phase: str, code: int | None
) -> None:
    ran = cluster.home / f"ran-{phase}"
    job, gate = gated(cluster, phase, f"echo x >> {ran}; {script}")
    for pid in keepers(cluster):
        os.kill(pid, signal.SIGKILL)
    gate.touch()
    view = cluster.wait(job, "succeeded", "failed")
    assert (view.phase, view.exit_code, view.failures) == (phase, code, 0 if code is None else 1)
    assert ran.read_text() == "x\n"


def test_an_acknowledged_job_outlives_a_log_whose_end_is_damaged(cluster: LiveCluster) -> None:
    running, gate = gated(cluster, "running", f"echo x >> {cluster.home / 'ran-again'}")
    waiting = cluster.pollux("submit", "--name", "waiting", "--gpus", 4, "--", "true").strip()
    cluster.kill_service()
    wal = cluster.folder.database.with_name("pollux.db-wal")
    wal.write_bytes(wal.read_bytes()[: wal.stat().st_size // 3])
    told = cluster.run("up")
    assert told.returncode == 0
    assert "The event log has lost the last" in told.stderr
    assert "has lost the last" in cluster.run("ps").stderr
    view = cluster.job(running)
    assert (view.phase, view.generation) == ("running", 1), "it is not disturbed"
    gate.touch()
    assert cluster.wait(waiting, "succeeded", "failed").phase == "succeeded"
    assert cluster.wait(running, "succeeded", "failed").phase == "succeeded"
    until(lambda: (cluster.home / "ran-again").exists(), "it ran")
    assert (cluster.home / "ran-again").read_text() == "x\n"
