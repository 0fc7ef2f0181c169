"""`pollux workload` and `pollux policies`."""

from __future__ import annotations

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app
from pollux.policies import registry
from pollux.simulator.generator import BUILT_IN

runner = CliRunner()


def invoke(*arguments: object):
    return runner.invoke(app, [str(argument) for argument in arguments])


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


class TestGenerate:
    def test_writes_what_simulate_reads(self, tmp_path):
        path = tmp_path / "made.csv"
        result = invoke("workload", "generate", path, "--jobs", 5, "--hours", 0.2, "--mix", "ncf=1", "--max-gpus", 8)
        assert result.exit_code == 0, result.output
        assert "5 jobs are in" in result.stderr
        assert len(rows(path.read_text())) == 5
        assert invoke("simulate", path, "--nodes", 2).exit_code == 0

    def test_prints_nothing_but_csv_when_asked_to(self):
        result = invoke("workload", "generate", "-", "--jobs", 7)
        assert len(rows(result.stdout)) == 7
        assert result.stderr == ""

    def test_same_seed_same_bytes(self):
        first, second, other = (
            invoke("workload", "generate", "-", "--jobs", 20, "--seed", seed).stdout for seed in (1, 1, 2)
        )
        assert first == second != other

    def test_options_shape_the_workload(self):
        arguments = (
            "--jobs",
            40,
            "--hours",
            2,
            "--arrivals",
            "uniform",
            "--max-gpus",
            2,
            "--configuration",
            "realistic",
        )
        mix = ("--mix", "ncf=1", "--mix", "bert=1")
        found = rows(invoke("workload", "generate", "-", *arguments, *mix).stdout)
        assert {row["application"] for row in found} == {"ncf", "bert"}
        assert max(int(row["num_replicas"]) for row in found) <= 2
        assert [float(row["time"]) for row in found] == [180.0 * index for index in range(40)]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--mix", "ncff=1"), "ncf"),
            (("--mix", "ncf=much"), "is not a share"),
            (("--mix", "ncf"), "is not key=value"),
            (("--mix", "ncf=0"), "Make one of them positive"),
            (("--arrivals", "bursts"), "poisson or uniform or daily"),
            (("--configuration", "x"), "tuned or realistic"),
            (("--jobs", "0"), "--jobs"),
            (("--hours", "0"), "--hours"),
        ],
    )
    def test_wrong_options_are_refused(self, arguments, message):
        result = invoke("workload", "generate", "-", *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert result.stdout == ""

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path):
        result = invoke("workload", "generate", tmp_path, "--jobs", 2)
        assert result.exit_code == 2
        assert str(tmp_path) in result.stderr


class TestList:
    def test_shows_every_built_in_workload(self):
        result = invoke("workload", "list")
        assert result.exit_code == 0
        for name, found in BUILT_IN.items():
            assert name in result.stdout
            assert found.title in result.stdout

    def test_as_json(self):
        found = json.loads(invoke("workload", "list", "--json").stdout)
        assert found["demo"] == {"title": BUILT_IN["demo"].title, "jobs": 24, "nodes": 4, "gpus_per_node": 4}


class TestPolicies:
    def test_shows_every_policy_what_it_needs_and_its_options(self):
        result = invoke("policies")
        assert result.exit_code == 0, result.output
        for text in (*registry.BUILT_IN, "oracle", "service_threshold_gpu_s=57600", "backfill=True"):
            assert text in result.stdout

    def test_as_json(self):
        found = json.loads(invoke("policies", "--json").stdout)
        assert found.keys() >= registry.BUILT_IN.keys()
        assert found["optimus"]["needs"] == "oracle"
        assert found["tiresias"]["needs"] == "nothing"
        assert found["fifo"]["options"] == {"backfill": False}
        assert found["fifo-backfill"]["options"] == {"backfill": True}
        assert all(facts["summary"] for facts in found.values())
