"""`pollux workload` and `pollux policies`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

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
            (("--hours", "inf"), "--hours = inf: must be finite"),
            (("--jobs", 10**7), "--jobs = 10000000: too many"),
            (("--seed", -1), "--seed = -1"),
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


LOG = "timestamp,duration,num_gpus,gpu_time,cluster\n" + "".join(
    f"2017-10-{day:02} {hour:02}:30:00,{duration},1,{duration},{'ab'[day % 2]}\n"
    for day in range(1, 7)
    for hour, duration in ((1, 600), (3, 600), (4, 20), (9, 7200), (12, 600))
)


class TestImport:
    @pytest.fixture
    def log(self, tmp_path):
        path = tmp_path / "log.csv"
        path.write_text(LOG)
        return path

    def test_writes_what_simulate_reads_and_says_what_became_of_the_log(self, log, tmp_path):
        path = tmp_path / "replayed.csv"
        result = invoke("workload", "import", log, path, "--jobs", 3, "--max-gpus", 8)
        assert result.exit_code == 0, result.output
        assert len(rows(path.read_text())) == 3
        for text in ("in the log", "30", "shorter than 60 s", "hours 2–10 of any day", "12", "deepspeech2"):
            assert text in result.stdout
        assert "3 jobs are in" in result.stderr
        assert f"try: pollux simulate {path}" in result.stderr
        assert invoke("simulate", path, "--nodes", 2).exit_code == 0

    @pytest.mark.parametrize("link", [None, Path.symlink_to, Path.hardlink_to])
    def test_the_log_is_never_overwritten(self, log, tmp_path, link):
        file = log if link is None else tmp_path / "link.csv"
        if link is not None:
            link(file, log)
        result = invoke("workload", "import", log, file, "--jobs", 3)
        assert result.exit_code == 2
        assert f"FILE = '{file}': is the log itself" in result.stderr
        assert log.read_text() == LOG
        assert file.is_symlink() == (link is Path.symlink_to)

    def test_one_job_is_no_plural(self, log, tmp_path):
        result = invoke("workload", "import", log, tmp_path / "one.csv", "--jobs", 1)
        assert f"1 job is in {tmp_path / 'one.csv'}; try" in result.stderr

    def test_prints_nothing_but_csv_when_asked_to(self, log):
        result = invoke("workload", "import", log, "-", "--jobs", 4, "--format", "philly-csv")
        assert len(rows(result.stdout)) == 4
        assert result.stderr == ""

    def test_same_seed_same_bytes(self, log):
        first, second, other = (
            invoke("workload", "import", log, "-", "--jobs", 6, "--seed", seed).stdout for seed in (1, 1, 2)
        )
        assert first == second != other

    def test_options_shape_the_workload(self, log):
        arguments = ("--start-hour", 11, "--hours", 2, "--jobs", 3, "--cluster", "a", "--configuration", "realistic")
        found = rows(invoke("workload", "import", log, "-", *arguments).stdout)
        assert [(row["time"], row["num_replicas"]) for row in found] == [("5400", "1")] * 3

    def test_a_stretch_of_the_log_as_it_happened(self, log, tmp_path):
        path = tmp_path / "day.csv"
        arguments = ("--consecutive", "--from", "2017-10-02 03:00", "--hours", 24, "--min-duration", 0)
        result = invoke("workload", "import", log, path, *arguments)
        times = [int(row["time"]) for row in rows(path.read_text())]
        assert times == [1800, 5400, 23400, 34200, 81000]
        assert "within 24 h from 2017-10-02 03:00:00" in result.stdout

    def test_damaged_jobs_are_refused_or_passed_over(self, log, tmp_path):
        log.write_text(LOG + "never,1,1,1,a\n")
        refused = invoke("workload", "import", log, "-", "--jobs", 3)
        assert refused.exit_code == 2
        assert "line 32, timestamp = 'never': is not a time" in refused.stderr
        assert "--skip-damaged" in refused.stderr
        passed = invoke(
            "workload", "import", log, tmp_path / "out.csv", "--jobs", 3, "--skip-damaged", "--cluster", "a"
        )
        assert passed.exit_code == 0
        assert "passed over: damaged" in passed.stdout
        assert "not of cluster a" in passed.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--jobs", 13), "--jobs = 13: only 12 usable jobs"),
            (("--jobs", 0), "--jobs"),
            (("--hours", 0), "--hours"),
            (("--jobs", 10**7), "--jobs = 10000000: too many"),
            (("--hours", 25), "keep the dates with --consecutive"),
            (("--hours", 25), "--hours = 25.0: is longer than the day"),
            (("--hours", "inf", "--consecutive"), "--hours = inf: must be finite"),
            (("--min-duration", -1), "--min-duration = -1.0"),
            (("--max-gpu-hours", "inf"), "--max-gpu-hours = inf"),
            (("--max-gpus", 0), "--max-gpus = 0"),
            (("--seed", -1), "--seed = -1"),
            (("--max-gpu-hours", 0), "--max-gpu-hours"),
            (("--start-hour", 24), "--start-hour = 24.0: is no hour of the day"),
            (("--from", "2017-10-02 03:00"), "--consecutive"),
            (("--consecutive", "--start-hour", 3), "--start-hour"),
            (("--consecutive", "--from", "monday"), "is not a time"),
            (("--consecutive", "--from", "2018-10-02 03:00"), "--from = '2018-10-02 03:00:00'"),
            (("--consecutive", "--from", "2018-10-02 03:00"), "Give a time between 2017-10-01"),
            (("--configuration", "x"), "--configuration = 'x': no such choice. Give tuned or realistic"),
            (("--cluster", "c"), "--cluster = 'c': no such name. Known: a, b"),
            (("--format", "phily"), "--format = 'phily': no such name. Did you mean 'philly'"),
            (("--format", "helios"), "names none of the columns"),
        ],
    )
    def test_wrong_options_are_refused(self, log, arguments, message):
        result = invoke("workload", "import", log, "-", *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert result.stdout == ""


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
