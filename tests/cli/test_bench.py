"""`pollux bench plan`: figures of made-up rounds, and what it says to wrong options."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app

runner = CliRunner()


def invoke(*arguments: object):
    return runner.invoke(app, ["bench", "plan", *map(str, arguments)])


def test_shows_times_changes_and_memory_beside_the_genetic_search():
    result = invoke("--gpus", 8, "--jobs", 3, "--rounds", 2, "--beside", "genetic")
    assert result.exit_code == 0, result.output
    assert "8 GPUs (2 × 4), 3 jobs, standard mix, 2 rounds" in result.stdout
    for part in ("CPU ms a plan, p99", "proven gap, median", "jobs moved", "peak memory", "pollux, genetic", "lowest"):
        assert part in result.stdout


def test_json_has_every_round_and_is_all_that_is_printed():
    result = invoke("--gpus", 16, "--jobs", 5, "--rounds", 3, "--mix", "elastic", "--gpus-per-node", 8, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["gpus"], found["gpus_per_node"], found["jobs"], found["mix"]) == (16, 8, 5, "elastic")
    assert len(found["cpu_ms"]["rounds"]) == 3
    assert found["cpu_ms"]["p99"] <= found["cpu_ms"]["max"]
    assert found["planning_mib"] >= 0.0
    assert found["beside"] is found["fitness_ratio"] is None


def test_other_policies_and_their_options_can_be_measured():
    found = json.loads(
        invoke("--gpus", 8, "--jobs", 4, "--rounds", 2, "--policy", "fifo", "--set", "backfill=true", "--json").stdout
    )
    assert found["policy"] == "fifo"
    assert found["gap"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "polux"), "--policy = 'polux': no such name. Did you mean 'pollux'?"),
        (("--policy", "optimus"), "--policy = 'optimus': needs the truth about jobs"),
        (("--set", "q=1"), "Known: "),
        (("--gpus", 30), "--gpus = 30: is no multiple of --gpus-per-node = 4"),
        (("--mix", "heavy"), "--mix = 'heavy': no such name. Known: elastic, standard"),
        (("--beside", "random"), "--beside = 'random': no such name. Known: genetic"),
        (("--gpus", 512, "--beside", "genetic"), "up to 256 GPUs"),
        (("--jobs", 0), "--jobs"),
        (("--rounds", 0), "--rounds"),
    ],
)
def test_wrong_options_are_named_with_what_would_be_right(arguments, told):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert result.stdout == ""
