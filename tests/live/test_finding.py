"""Somebody removes or damages what a running service is found by, or stops it: commands find it, or say what to do."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from tests.live.cluster import PATIENCE_S, LiveCluster, assert_told, until

from pollux.core import Phase
from pollux.node.folder import NodeFiles
from pollux.node.processes import began_at

pytestmark = pytest.mark.timeout(400)
NODES = 1


def pid_of(cluster: LiveCluster) -> int:
    file = cluster.folder.running()
    assert file is not None
    return file.pid


def kill_daemons(cluster: LiveCluster) -> None:
    for path in cluster.folder.node_folders():
        node = NodeFiles(path)
        os.kill(node.daemon, signal.SIGKILL)
        until(lambda node=node: not node.daemon, f"the daemon of {path} is gone")


@pytest.mark.parametrize("name", ["token", "service.json", "cluster.json", "lock"])
def test_what_is_removed_while_it_runs_is_there_again(cluster: LiveCluster, name: str) -> None:
    pid, token = pid_of(cluster), cluster.folder.token()
    path = cluster.folder.path / name
    path.unlink()
    if name == "token":  # nobody makes another one meanwhile
        assert_told(cluster.run("up"), 1, f"A cluster runs already in {cluster.folder.path} (pid {pid}, http://")
    until(path.exists, f"{name} is there again")
    assert path.stat().st_mode & 0o777 == 0o600
    assert cluster.folder.token() == token
    assert pid_of(cluster) == pid
    assert cluster.json("ps") == []
    assert f"{name} was gone or changed, and is written again" in cluster.folder.log.read_text()


def test_a_stopped_service_is_told_with_its_pid(cluster: LiveCluster) -> None:
    pid = pid_of(cluster)
    (cluster.folder.path / "service.json").unlink()
    os.kill(pid, signal.SIGSTOP)
    try:
        (cluster.folder.path / "service.json").unlink(missing_ok=True)
        for command in (("ps",), ("up",), ("down",)):
            assert_told(cluster.run(*command), 1, f"(pid {pid}) is stopped", f"kill -CONT {pid}", f"kill -9 {pid}")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert cluster.json("ps") == []


def test_a_killed_service_whose_token_is_lost_finds_its_jobs(cluster: LiveCluster) -> None:
    course = cluster.train("tokens", options=("--max-gpus", 2, "--min-gpus", 2))
    cluster.wait_gpus(course.job, lambda gpus: gpus == 2)
    cluster.wait_step(course, 5)
    before = course.pids
    cluster.kill_service()
    cluster.folder.token_file.unlink()
    assert_told(cluster.run("ps"), 1, "was killed")
    cluster.up()
    assert "was lost, and is taken from" in cluster.folder.log.read_text()
    cluster.wait_step(course, course.last_step + 5)
    assert course.pids == before

    # And if the daemons are gone, too, which knew it as well.
    file = cluster.folder.running()
    assert file is not None
    cluster.kill_service()
    kill_daemons(cluster)
    cluster.folder.token_file.unlink()
    told = f"were killed; {len(before)} processes of jobs run on without them: pollux up finds them, pollux down ends"
    for name in ("service.json", "none of them"):
        (cluster.folder.path / name).unlink(missing_ok=True)
        assert_told(cluster.run("ps"), 1, told)
        assert told in cluster.pollux("down", "--leave-jobs")
    assert_told(cluster.run("ps"), 1, told)
    # The port is the one that was taken before: connections to the killed service may linger there.
    port = int(file.url.rpartition(":")[2])
    cluster.up("--port", port)
    assert cluster.phase(course.job) is Phase.RUNNING
    cluster.wait_step(course, course.last_step + 5)
    assert course.pids == before
    assert cluster.succeed(course).failures == 0
    course.assert_each_step_once()


def test_jobs_save_and_go_on_under_a_token_that_is_new(cluster: LiveCluster) -> None:
    options = ("--max-gpus", 2, "--min-gpus", 2, "--retries", 0)
    course = cluster.train("renewed", options=options)
    plain = cluster.pollux("submit", "--gpus", 1, "--", "sleep", 1000).strip()
    cluster.wait_gpus(course.job, lambda gpus: gpus == 2)
    cluster.wait(plain, "running")
    cluster.wait_step(course, 5)
    before = course.pids
    cluster.down("--leave-jobs")
    cluster.folder.token_file.write_text("another-token-of-the-owner")
    cluster.up()
    assert cluster.folder.token() == "another-token-of-the-owner"
    assert "knows another token" in cluster.folder.log.read_text()
    until(lambda: course.pids and not course.pids & before, lambda: f"others train: {cluster.story(course.job)}")
    assert cluster.succeed(course).failures == 0
    course.assert_each_step_once()
    assert cluster.phase(plain) is Phase.RUNNING
    cluster.pollux("cancel", plain)


def test_down_ends_what_neither_service_nor_daemon_looks_after(cluster: LiveCluster) -> None:
    course = cluster.train("orphaned", options=("--max-gpus", 1))
    cluster.wait_step(course, 5)
    pids = {pid: began_at(pid) for pid in course.pids}
    cluster.kill_service()
    kill_daemons(cluster)
    for name in ("token", "service.json", "nodes/n0/keeper.sock"):
        (cluster.folder.path / name).unlink(missing_ok=True)
    assert "has ended" in cluster.pollux("down")
    assert not any(began_at(pid) == began for pid, began in pids.items())
    assert not cluster.processes()
    cluster.up()
    assert cluster.succeed(course).failures == 0


ODD_NAMES = (
    "..",
    "%2e%2e",
    "..%2f..%2ftoken",
    "%2e%2e%2f%2e%2e%2ftoken",
    "..%5c..",
    "%00",
    "a%0Ab",
    "%2fetc%2fpasswd",
    "x" * 300,
)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_that_lead_elsewhere_are_unknown(cluster: LiveCluster, name: str) -> None:
    job = cluster.pollux("submit", "--gpus", 1, "--", "echo", "hello").strip()
    cluster.wait(job, "succeeded")
    (log,) = cluster.client.logs(job).logs
    gets = (f"jobs/{job}/logs/{log.node}/{name}", f"jobs/{job}/logs/{name}/{log.replica}", f"jobs/{name}/logs/n0/1-1")
    gets += (f"jobs/{name}", f"jobs/{name}/logs", f"events?job={name}")
    posts = (f"jobs/{name}/cancel", f"jobs/{name}/pause", f"nodes/{name}/drain", f"nodes/{name}/undrain")
    asked = [("GET", path) for path in gets] + [("POST", path) for path in posts]
    secret = cluster.folder.token()
    for method, path in asked:
        address = urlsplit(cluster.client.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)
        connection.request(method, f"/v1/{path}", headers={"Authorization": f"Bearer {secret}"})
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        assert answer.status == 404, (path, body)
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert json.loads(body)["status"] == 404
        assert secret not in body


def test_another_program_on_the_port_of_the_killed_service_is_named(cluster: LiveCluster) -> None:
    file = cluster.folder.running()
    assert file is not None
    port = int(file.url.rpartition(":")[2])
    cluster.down("--leave-jobs")
    with socket.socket() as taken:
        with suppress(OSError):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            taken.listen(1)
        assert_told(cluster.run("up", "--port", port), 1, f"Port {port} of 127.0.0.1 is taken by another program")
    cluster.up("--port", port)
    assert cluster.folder.running() is not None
