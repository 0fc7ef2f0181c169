"""What the launcher tells a replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.agent.environment import Environment
from pollux.errors import InvalidSpec

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
}


def test_without_a_launcher_there_is_one_replica_and_nobody_to_report_to():
    assert Environment.read({}) == Environment(0, 1, 0, 1, "local", 1, None, None, None)


def test_variables_of_torchrun_and_of_pollux_are_read(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    pollux = {
        "POLLUX_JOB": "ncf-3",
        "POLLUX_GENERATION": "4",
        "POLLUX_CHECKPOINT_DIR": "/checkpoints",
        "POLLUX_REPORT_URL": "http://127.0.0.1:1",
        "POLLUX_TOKEN_FILE": str(token),
    }
    read = Environment.read({**TORCHRUN, **pollux})
    assert (read.rank, read.size, read.local_rank, read.num_nodes) == (5, 8, 1, 2)
    assert (read.job, read.generation) == ("ncf-3", 4)
    assert read.checkpoint_dir == Path("/checkpoints")
    assert (read.report_url, read.token) == ("http://127.0.0.1:1", "secret")


def test_the_number_of_nodes_follows_from_the_replicas_on_this_one():
    without = {name: value for name, value in TORCHRUN.items() if name != "GROUP_WORLD_SIZE"}
    assert Environment.read(without).num_nodes == 2
    assert Environment.read({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}).num_nodes == 3


def test_empty_variables_are_as_good_as_none():
    assert Environment.read(dict.fromkeys((*TORCHRUN, "POLLUX_JOB", "POLLUX_GENERATION"), "")) == Environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "-1"),
        ("RANK", "8"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "two"),
        ("LOCAL_RANK", "1.5"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("GROUP_WORLD_SIZE", "x"),
        ("POLLUX_GENERATION", "0"),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(InvalidSpec) as caught:
        Environment.read({**TORCHRUN, name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidSpec, match="POLLUX_TOKEN_FILE"):
        Environment.read({"POLLUX_TOKEN_FILE": str(tmp_path / "none")})
