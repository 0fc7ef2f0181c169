"""Clusters that cannot be started or are not there: people get a sentence, and what to do."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator

import pytest
from tests.live.cluster import LiveCluster, assert_told

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def nothing() -> Iterator[LiveCluster]:
    """A cluster that was never started."""
    made = LiveCluster()
    yield made
    assert not made.processes()
    shutil.rmtree(made.home)


def test_without_a_cluster_everybody_is_told_how_to_start_one(nothing: LiveCluster) -> None:
    for command in (("ps",), ("submit", "--gpus", "1", "--", "/bin/true"), ("logs", "-f", "job")):
        assert_told(nothing.run(*command), 1, "No cluster runs in", "Start one with pollux up")
    assert "Nothing runs in" in nothing.pollux("down")


def test_a_taken_port_is_named(nothing: LiveCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_told(nothing.run("up", "--port", port), 1, f"Port {port}", "taken by another program", "--port N")


def test_a_home_that_cannot_be_written_to_is_named(nothing: LiveCluster) -> None:
    wall = nothing.home / "wall"
    wall.mkdir(mode=0o500)
    if os.access(wall, os.W_OK):  # root
        wall.rmdir()
        wall.touch()
    home = wall / "home"
    assert_told(nothing.run("up", env={"POLLUX_HOME": str(home)}), 2, str(home), "POLLUX_HOME")


def test_the_file_of_a_service_that_is_gone_is_not_believed(nothing: LiveCluster) -> None:
    nothing.folder.make()
    # Its pid belongs to somebody else by now: this very process.
    stale = f'{{"pid": {os.getpid()}, "url": "http://127.0.0.1:1", "version": "0", "started_at_s": 1.0}}'
    (nothing.folder.path / "service.json").write_text(stale)
    assert_told(nothing.run("ps"), 1, "was killed", "pollux up")
    nothing.pollux("down")
    assert_told(nothing.run("ps"), 1, "No cluster runs in")
