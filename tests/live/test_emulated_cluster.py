"""`pollux up --emulate`, with real processes: nodes say what they act as, and commands find it in their environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.live.cluster import LiveCluster

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def emulated() -> Iterator[LiveCluster]:
    made = LiveCluster()
    try:
        yield made.up("--emulate", "--compress", 10, "--nodes", 2, "--slots", 2, "--port", 0)
    finally:
        made.end()


def test_nodes_and_commands_know_what_they_are(emulated: LiveCluster) -> None:
    view = emulated.client.cluster()
    assert [(node.gpus, node.gpu_type, node.labels) for node in view.nodes] == [
        (2, "emulated-t4", {"compress": "10"}),
        (2, "emulated-t4", {"compress": "10"}),
    ]
    assert view.interval_s == 6.0
    printed = emulated.pollux("run", "--gpus", 1, "--env", "POLLUX_COMPRESS=1", "--", "env")
    found = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
    assert found["POLLUX_GPU_TYPE"] == "emulated-t4"
    assert (found["POLLUX_COMPRESS"], found["POLLUX_REALLOC_DELAY_S"]) == ("10", "30")
    assert found["POLLUX_MACHINE_SLOTS"] == "4"
    assert found["CUDA_VISIBLE_DEVICES"] == ""

    emulated.down("--leave-jobs")
    refused = emulated.run("up", "--compress", 20)
    assert refused.returncode == 1
    assert "pollux down" in refused.stderr
