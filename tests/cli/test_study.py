"""`pollux sweep` and `pollux reproduce`: what people see, and what programs read."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app
from pollux.core import Cluster, FrozenMap
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.generator import GeneratorOptions
from pollux.simulator.studies import samples

runner = CliRunner()


def invoke(*arguments: object):
    return runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def workload(tmp_path) -> str:
    path = tmp_path / "small.csv"
    path.write_text(
        "name,time,application,num_replicas,batch_size\na,0,ncf,1,256\nb,30,ncf,4,1024\nc,60,cifar10,2,512\n"
    )
    return str(path)


class TestSweep:
    def test_prints_a_row_a_value_and_policy(self, workload):
        result = invoke("sweep", "interval", workload, "--policies", "fifo,tiresias", "--values", "30,60", "--jobs", 1)
        assert result.exit_code == 0, result.output
        lines = [line for line in result.stdout.splitlines() if "fifo" in line or "tiresias" in line]
        assert len(lines) == 4
        assert "change of avg JCT" in result.stdout
        assert "+0.0 %" in lines[1]

    def test_json_holds_rows_and_runs(self, workload):
        arguments = ("load", workload, "demo", "--policies", "fifo", "--values", "0.5,1", "--jobs", 1, "--json", "-")
        result = invoke("sweep", *arguments)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["axis"], found["policies"]) == ("load", ["fifo"])
        assert [(row["value"], row["label"]) for row in found["rows"]] == [(0.5, "fifo"), (1.0, "fifo")]
        assert found["rows"][0]["change"] < 0
        assert [run["workload"] for run in found["cases"][0]["runs"]] == ["small × 0.5", "demo × 0.5"]

    def test_writes_a_page_with_a_plot(self, workload, tmp_path):
        folder = tmp_path / "page"
        arguments = ("interference", workload, "--policies", "fifo", "--nodes", 2, "--jobs", 1, "--report", folder)
        result = invoke("sweep", *arguments)
        assert result.exit_code == 0, result.output
        assert str(folder / "report.html") in result.stderr
        assert (folder / "sweep-interference.png").exists()
        assert "Average JCT by interference" in (folder / "report.html").read_text()
        assert len(json.loads((folder / "report.json").read_text())) == 3

    def test_settings_reach_the_runs(self, workload):
        sweep = ("sweep", "load", workload, "--policies", "fifo", "--values", "1", "--jobs", 1, "--json", "-")
        usual, late = (json.loads(invoke(*sweep, *more).stdout) for more in ((), ("--interval", 600)))
        assert late["rows"][0]["avg_jct_s"] > usual["rows"][0]["avg_jct_s"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("speed", "demo", "--policies", "fifo"), "Known: interference, interval, load, p"),
            (("load", "demo", "--policies", "fifo", "--values", "one"), "'one' is no number"),
            (("load", "demo", "--policies", "fifo", "--values", "1,0"), "--values = 0.0: must be greater than 0"),
            (("load", "demo", "--policies", "fifo", "--values", "1e9"), "--values = 1000000000.0: makes more than"),
            (("interval", "demo", "--policies", "fifo", "--values", "60,-5"), "--values = -5.0: must be greater than"),
            (("interference", "demo", "--policies", "fifo", "--values", "1"), "--values = 1.0: must be below 1"),
            (("p", "demo", "--policies", "pollux", "--values", "-1e9"), "--values = -1000000000.0: too steep"),
            (("load", "demo", "--policies", "fifo", "--interval", "0"), "interval_s = 0"),
            (("p", "demo", "--policies", "fifo"), "Name policies that have it: pollux"),
            (("load", "demo", "--policies", ","), "names no policy"),
            (("load", "nowhere.csv", "--policies", "fifo"), "neither a file nor a built-in workload"),
        ],
    )
    def test_says_what_is_wrong_and_what_is_known(self, arguments, message):
        result = invoke("sweep", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> None:
    """No data anywhere, and generated workloads of three jobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLLUX_DATA", raising=False)
    base = GeneratorOptions(num_jobs=3, duration_s=300.0, mix=FrozenMap({"ncf": 1.0}), max_gpus=4)
    cluster = ClusterFile(Cluster.uniform(2, 2, "t4"))
    made = samples.GeneratedSamples(["tiny"], base, cluster)
    monkeypatch.setattr(samples, "generated_samples", lambda count: made)


@pytest.mark.usefixtures("tiny")
class TestReproduce:
    def test_writes_the_page_and_prints_the_claims(self, tmp_path):
        result = invoke("reproduce", "--only", "table,p,fairness", "--jobs", 1, "--json", "figures.json")
        assert result.exit_code == 0, result.output
        for text in ("tiresias, realistic", "pollux, p = −10", "worst ρ", "average JCT below that of optimus"):
            assert text in result.stdout
        found = json.loads((tmp_path / "figures.json").read_text())
        assert list(found["parts"]) == ["table", "p", "fairness"]
        assert (found["workloads"], found["num_runs"]) == (["tiny"], 7)
        assert found["claims"][0]["published"] is None
        folder = tmp_path / "out" / "paper"
        assert "generated workload" in (folder / "report.html").read_text()
        assert {path.name for path in folder.glob("*.png")} >= {"jct.png", "rho.png", "cluster-efficiency.png"}
        assert json.loads((folder / "report.json").read_text())["parts"].keys() == found["parts"].keys()

    def test_json_on_standard_output_is_nothing_but_json(self):
        result = invoke("reproduce", "--only", "adaptation", "--jobs", 1, "--json", "-")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["claims"] == []

    def test_says_what_is_wrong_and_what_is_known(self, tmp_path):
        result = invoke("reproduce", "--only", "figure-7")
        assert result.exit_code == 2
        assert "Known: adaptation, fairness, interference, interval, load, p, table" in result.stderr
        result = invoke("reproduce", "--data", tmp_path)
        assert result.exit_code == 2
        assert f"--data = '{tmp_path}'" in result.stderr
        assert "no pollux-osdi21/workloads" in result.stderr

    @pytest.mark.parametrize("only", [",", "", " , "])
    def test_a_list_of_no_parts_is_not_taken_for_all(self, only):
        result = invoke("reproduce", "--only", only)
        assert result.exit_code == 2
        assert "names no part. Known: table, load, interval, interference, p, fairness, adaptation" in result.stderr

    def test_the_environment_may_name_the_data(self, tmp_path, monkeypatch):
        monkeypatch.setenv("POLLUX_DATA", str(tmp_path / "there"))
        result = invoke("reproduce")
        assert result.exit_code == 2
        assert f"$POLLUX_DATA = '{tmp_path / 'there'}'" in result.stderr
        assert "--data" not in result.stderr
