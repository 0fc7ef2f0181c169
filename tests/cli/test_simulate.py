"""`pollux simulate` and `pollux compare`: what people see, and what programs read."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app
from pollux.core import JobFinished, NodeLost, ProfileRegistry, loads
from pollux.scheduler import MemoryLog, Record, Scheduler
from pollux.simulator.options import Options

runner = CliRunner()

FIGURES = {
    "avg_jct_s",
    "p50_jct_s",
    "p90_jct_s",
    "p99_jct_s",
    "makespan_s",
    "reallocations_per_job",
    "gpu_hours",
    "utilisation",
    "policy_cpu_ms_mean",
    "policy_cpu_ms_p99",
    "cpu_s",
}
HEADER = "name,time,application,num_replicas,batch_size\n"


@pytest.fixture
def workload(tmp_path) -> str:
    path = tmp_path / "small.csv"
    path.write_text(f"{HEADER}a,0,ncf,1,256\nb,30,ncf,4,1024\nc,60,cifar10,2,512\n")
    return str(path)


def invoke(*arguments: object):
    return runner.invoke(app, [str(argument) for argument in arguments])


def figures(*arguments: object) -> dict:
    result = invoke(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class TestSimulate:
    def test_prints_the_figures_that_people_ask_for(self, workload):
        result = invoke("simulate", workload, "--nodes", 2)
        assert result.exit_code == 0, result.output
        for text in ("small under pollux", "average JCT", "makespan", "GPU-hours held", "re-allocations a job"):
            assert text in result.stdout
        assert result.stderr == ""

    def test_json_on_standard_output_is_nothing_but_json(self, workload):
        found = figures("simulate", workload, "--policy", "fifo", "--nodes", 1)
        assert found.keys() >= FIGURES | {"workload", "policy", "jobs", "timeline"}
        assert (found["workload"], found["policy"]) == ("small", "fifo")
        assert found["jobs"].keys() == {"a", "b", "c"}
        jcts = [job["jct_s"] for job in found["jobs"].values()]
        assert found["avg_jct_s"] == pytest.approx(sum(jcts) / 3)
        assert all(isinstance(found[key], float | int) for key in FIGURES)

    def test_json_to_a_file_leaves_the_table_on_standard_output(self, workload, tmp_path):
        path = tmp_path / "new" / "out.json"
        result = invoke("simulate", workload, "--json", path)
        assert result.exit_code == 0
        assert json.loads(path.read_text())["num_jobs"] == 3
        assert "average JCT" in result.stdout
        assert str(path) in result.stderr

    def test_events_are_the_log_of_the_scheduler(self, workload, tmp_path):
        path = tmp_path / "events.jsonl"
        assert invoke("simulate", workload, "--policy", "srtf", "--events", path).exit_code == 0
        records = [loads(line) for line in path.read_text().splitlines()]
        assert all(isinstance(record, Record) for record in records)
        assert sum(isinstance(record.event, JobFinished) for record in records) == 3
        state = Scheduler(MemoryLog(records), Options().scheduler).state
        assert state.ended.keys() == {"a", "b", "c"}

    def test_events_can_be_printed_and_nothing_else_is(self, workload):
        result = invoke("simulate", workload, "--policy", "fifo", "--events", "-")
        assert all(isinstance(loads(line), Record) for line in result.stdout.splitlines())

    def test_only_one_thing_can_be_printed(self, workload):
        result = invoke("simulate", workload, "--events", "-", "--json", "-")
        assert result.exit_code == 2
        assert "--events" in result.stderr

    def test_a_built_in_workload_has_a_cluster_of_its_own(self):
        assert set(figures("simulate", "demo", "--policy", "fifo")["timeline"]["num_gpus"]) == {16}
        assert set(figures("simulate", "demo", "--policy", "fifo", "--nodes", 5)["timeline"]["num_gpus"]) == {20}
        assert set(figures("simulate", "demo", "--policy", "fifo", "--gpus-per-node", 8)["timeline"]["num_gpus"]) == {
            32
        }

    def test_a_cluster_file_brings_uneven_nodes_and_changes(self, workload, tmp_path):
        path, events = tmp_path / "cluster.toml", tmp_path / "events.jsonl"
        nodes = '[[nodes]]\nname = "big"\ngpus = 4\n[[nodes]]\nname = "small"\ngpus = 2\n'
        path.write_text(f'{nodes}[[changes]]\nat_s = 200\nlose = "small"\n')
        found = figures("simulate", workload, "--cluster", path, "--events", events)
        assert found["timeline"]["num_gpus"][0] == 6
        assert found["timeline"]["num_gpus"][-1] == 4
        assert any(isinstance(loads(line).event, NodeLost) for line in events.read_text().splitlines())

    def test_the_same_seed_gives_the_same_bytes(self, workload, tmp_path):
        texts = []
        for index, seed in enumerate((3, 3, 4)):
            path = tmp_path / f"{index}.jsonl"
            mtbf = ("--set", "world.node_mtbf_s=900", "--set", "world.node_repair_s=60")
            assert invoke("simulate", workload, "--seed", seed, *mtbf, "--events", path).exit_code == 0
            texts.append(path.read_text())
        assert texts[0] == texts[1] != texts[2]


class TestOptions:
    def started(self, workload: str, *arguments: object) -> float:
        return figures("simulate", workload, *arguments)["jobs"]["a"]["started_at_s"]

    def test_what_one_run_has_learnt_another_may_begin_with(self, workload, tmp_path):
        file, events, both = (tmp_path / name for name in ("registry.json", "events.jsonl", "both.json"))
        first = figures("simulate", workload, "--nodes", 2, "--save-registry", file)
        assert first["inputs"]["registry"] == {}
        learnt = loads(file.read_text(), ProfileRegistry).kinds
        assert {kind: known.num_jobs for kind, known in learnt.items()} == {"cifar10": 1, "ncf": 2}
        assert all(known.gradients and known.profile and known.limits for known in learnt.values())
        options = ("--nodes", 2, "--registry", file, "--save-registry", both, "--events", events)
        assert figures("simulate", workload, *options)["inputs"]["registry"] == {"cifar10": 1, "ncf": 2}
        assert {loads(line).time_s for line in events.read_text().splitlines() if "KindsImported" in line} == {0.0}
        assert loads(both.read_text(), ProfileRegistry).kinds["ncf"].num_jobs == 4
        result = invoke("simulate", workload, "--registry", workload)
        assert result.exit_code == 2
        assert "--registry" in result.stderr
        assert "is no profile registry" in result.stderr

    def test_flags_change_the_run(self, workload):
        assert self.started(workload, "--interval", 17) == 17.0
        usual = figures("simulate", workload)
        assert figures("simulate", workload, "--realloc-delay", 0)["avg_jct_s"] < usual["avg_jct_s"]

    def test_what_is_set_by_name_goes_before_flags_and_flags_before_the_preset(self, workload):
        assert self.started(workload, "--interval", 17, "--set", "interval_s=23") == 23.0
        artifact = ("simulate", workload, "--policy", "tiresias", "--compat", "artifact")
        usual, quick, precise = (
            figures(*artifact, *more)["avg_jct_s"]
            for more in ((), ("--realloc-delay", 0), ("--set", "world.whole_seconds=false"))
        )
        assert 3 * usual % 1 == 0.0, "whole seconds"
        assert quick < usual
        assert 3 * precise % 1 != 0.0

    def test_interference_slows_jobs_that_meet(self, tmp_path):
        path = tmp_path / "meet.csv"
        path.write_text(f"{HEADER}a,0,ncf,3,1024\nb,0,ncf,3,1024\n")
        arguments = ("simulate", path, "--policy", "fifo", "--nodes", 3, "--gpus-per-node", 2)
        assert figures(*arguments, "--interference", 0.5)["avg_jct_s"] > figures(*arguments)["avg_jct_s"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--policy", "tiresius"), "Did you mean 'tiresias'"),
            (("--compat", "artefact"), "Did you mean 'artifact'"),
            (("--set", "world.interferance=1"), "Did you mean 'world.interference'"),
            (("--set", "interference"), "is not key=value"),
            (("--set", "world.whole_seconds=maybe"), "must be true or false"),
            (("--set", "policy.nonsense=1"), "setting = 'policy.nonsense'"),
            (("--interval", "0"), "interval_s"),
            (("--interference", "1"), "must be below 1"),
            (("--traces", "/no/such/folder"), "/no/such/folder"),
            (("--nodes", "0"), "--nodes"),
            (("--nodes", "1", "--gpus-per-node", "2"), "more GPUs than the 2 of the cluster"),
            (("--cluster", "no-such.toml"), "no-such.toml"),
        ],
    )
    def test_wrong_ones_are_a_clear_error_without_a_traceback(self, workload, arguments, message):
        result = invoke("simulate", workload, *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert "Traceback" not in result.output
        assert result.stdout == ""

    def test_a_cluster_is_described_once(self, workload, tmp_path):
        path = tmp_path / "cluster.toml"
        path.write_text('[[nodes]]\nname = "n"\ngpus = 4\n')
        for option in ("--nodes", "--gpus-per-node"):
            result = invoke("simulate", workload, "--cluster", path, option, 4)
            assert result.exit_code == 2
            assert "Leave one of them out" in result.stderr


class TestWorkloads:
    def test_every_wrong_row_is_named(self, tmp_path):
        path = tmp_path / "bad.csv"
        path.write_text(f"{HEADER}a,0,ncf,1,256\na,x,ncf,1,256\nc,5,nfc,0,256\nd,5,ncf,1,9999999\n")
        result = invoke("simulate", path)
        assert result.exit_code == 2
        for text in (
            "line 3, name",
            "line 3, time",
            "line 4, application",
            "line 4, num_replicas",
            "line 5, batch_size",
        ):
            assert text in result.stderr

    def test_a_name_that_is_nothing_is_answered_with_what_there_is(self):
        result = invoke("simulate", "dmeo")
        assert result.exit_code == 2
        assert "demo, paper" in result.stderr

    def test_a_job_that_no_node_can_ever_hold_again_is_named(self, tmp_path):
        workload, cluster = tmp_path / "w.csv", tmp_path / "cluster.toml"
        workload.write_text(f"{HEADER}wide,100,ncf,4,1024\n")
        cluster.write_text('[[nodes]]\nname = "n"\ncount = 2\ngpus = 2\n[[changes]]\nat_s = 10\nlose = "n-1"\n')
        result = invoke("simulate", workload, "--policy", "tiresias", "--cluster", cluster)
        assert result.exit_code == 2
        assert "'wide'" in result.stderr
        assert "2 GPUs" in result.stderr


class TestCompare:
    def test_sets_policies_side_by_side(self, workload):
        result = invoke("compare", workload, "--policies", "fifo,srtf", "--jobs", 1)
        assert result.exit_code == 0, result.output
        assert "fifo" in result.stdout
        assert "srtf" in result.stdout
        assert "mean" not in result.stdout, "of one workload there is none"

    def test_averages_over_workloads(self, workload, tmp_path):
        other = tmp_path / "other.csv"
        other.write_text(f"{HEADER}a,0,ncf,1,256\n")
        found = figures("compare", workload, other, "--policies", "fifo, tiresias", "--jobs", 1)
        assert [(run["workload"], run["policy"]) for run in found["runs"]] == [
            ("small", "fifo"),
            ("small", "tiresias"),
            ("other", "fifo"),
            ("other", "tiresias"),
        ]
        assert found["means"].keys() == {"fifo", "tiresias"}
        of_fifo = [run["avg_jct_s"] for run in found["runs"] if run["policy"] == "fifo"]
        assert found["means"]["fifo"]["avg_jct_s"] == pytest.approx(sum(of_fifo) / 2)
        assert "mean" in invoke("compare", workload, other, "--policies", "fifo", "--jobs", 1).stdout

    def test_a_run_is_the_same_as_alone(self, workload):
        alone = figures("simulate", workload, "--policy", "srtf", "--nodes", 2)
        (run,) = figures("compare", workload, "--policies", "srtf", "--nodes", 2)["runs"]
        assert run["jobs"] == alone["jobs"]

    def test_several_processes_give_the_same(self, workload):
        runs = [figures("compare", workload, "--policies", "fifo,srtf", "--jobs", jobs)["runs"] for jobs in (1, 2)]
        assert [run["jobs"] for run in runs[0]] == [run["jobs"] for run in runs[1]]

    @pytest.mark.parametrize(
        ("policies", "message"), [("fifo,nonsense", "nonsense"), (" , ", "names no policy"), ("fifo,strf", "'srtf'")]
    )
    def test_wrong_policies_are_refused_before_anything_runs(self, workload, policies, message):
        result = invoke("compare", workload, "--policies", policies)
        assert result.exit_code == 2
        assert message in result.stderr

    def test_json_goes_to_a_file_too(self, workload, tmp_path):
        path = tmp_path / "out.json"
        result = invoke("compare", workload, "--policies", "fifo", "--json", path)
        assert result.exit_code == 0
        assert json.loads(path.read_text())["runs"][0]["policy"] == "fifo"
        assert str(path) in result.stderr


FAULTY = """
from pollux.core import Allocation, Plan
from pollux.policies import Policy

class Raises(Policy):
    def plan(self, snapshot, seed):
        return 1 / 0

class ReturnsNothing(Policy):
    def plan(self, snapshot, seed):
        pass

class GivesTooMuch(Policy):
    def plan(self, snapshot, seed):
        return Plan.of({job: Allocation.of({"node-0": 99}) for job in snapshot.jobs})

class IsAbstract(Policy):
    pass
"""


class TestPoliciesOfOthers:
    @pytest.fixture(autouse=True)
    def module(self, tmp_path, monkeypatch):
        (tmp_path / "faulty_policies.py").write_text(FAULTY)
        monkeypatch.syspath_prepend(tmp_path)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Raises", "policy Raises failed while planning round 1: ZeroDivisionError"),
            ("ReturnsNothing", "plan() returned NoneType"),
            ("GivesTooMuch", "has 4 GPUs, "),
            ("IsAbstract", "IsAbstract failed"),
        ],
    )
    def test_that_fail_are_named_as_the_culprit(self, workload, name, message):
        result = invoke("simulate", workload, "--policy", f"faulty_policies:{name}", "--nodes", 2)
        assert result.exit_code == 1, result.output
        assert message in result.stderr
        assert "this is a bug" not in result.stderr

    def test_leave_the_events_up_to_there(self, workload, tmp_path):
        events = tmp_path / "events.jsonl"
        result = invoke("simulate", workload, "--policy", "faulty_policies:Raises", "--nodes", 2, "--events", events)
        assert result.exit_code == 1
        assert not events.exists()
        partial = tmp_path / "events.jsonl.partial"
        assert str(partial) in result.stderr
        assert loads(partial.read_text().splitlines()[-1], Record).time_s == 60.0


OWN = """
from dataclasses import dataclass, field
from enum import Enum

from pollux.policies.fifo import Fifo

class Colour(Enum):
    RED = "red"

@dataclass
class Nested:
    x: int = 1

@dataclass(kw_only=True)
class Mine(Fifo):
    needed: int
    many: tuple[str, ...] = ("a", "b")
    colour: Colour = Colour.RED
    limit: float = float("inf")
    nested: Nested = field(default_factory=Nested)
    odd: object = field(default_factory=object)
"""


class TestInputs:
    def test_the_result_tells_what_it_came_from(self, workload):
        found = figures("simulate", workload, "--nodes", 2, "--seed", 3, "--compat", "artifact", "--interference", 0.25)
        inputs = found["inputs"]
        assert (inputs["seed"], inputs["traces"], inputs["interval_s"]) == (3, None, 60.0)
        assert inputs["world"]["interference"] == 0.25
        assert inputs["world"]["whole_seconds"] is True
        assert [node["num_gpus"] for node in inputs["nodes"]] == [4, 4]

    def test_and_of_options_that_nobody_set(self, workload):
        options = figures("simulate", workload, "--policy", "pollux", "--set", "policy.p=1")["inputs"]["policy_options"]
        assert (options["p"], options["solver"], options["max_gpus"]) == (1, "priced", None)
        assert figures("simulate", workload, "--policy", "fifo-backfill")["inputs"]["policy_options"] == {
            "backfill": True
        }

    def test_also_of_a_policy_of_ones_own(self, workload, tmp_path, monkeypatch):
        (tmp_path / "own_policies.py").write_text(OWN)
        monkeypatch.syspath_prepend(tmp_path)
        found = figures("simulate", workload, "--policy", "own_policies:Mine", "--set", "policy.needed=2")
        assert found["inputs"]["policy_options"] == {
            "needed": 2,
            "many": ["a", "b"],
            "colour": "red",
            "limit": "inf",
            "nested": {"x": 1},
            "odd": "object",
            "backfill": False,
        }

    def test_a_built_in_workload_is_checked_like_a_file(self):
        result = invoke("simulate", "demo", "--nodes", 1, "--gpus-per-node", 1)
        assert result.exit_code == 2
        assert "more GPUs than" in result.stderr

    def test_a_file_that_cannot_be_written_is_refused_before_the_run(self, workload, tmp_path):
        (tmp_path / "file").write_text("")
        for option in ("--json", "--events", "--save-registry"):
            for target in (tmp_path, tmp_path / "file" / "below"):
                result = invoke("simulate", workload, option, target)
                assert result.exit_code == 2
                assert f"{option} = " in result.stderr

    def test_checking_that_a_file_can_be_written_leaves_it_as_it_is(self, workload, tmp_path):
        old = tmp_path / "old.json"
        old.write_text("precious")
        assert invoke("simulate", workload, "--nodes", 2, "--json", old, "--policy", "nope").exit_code == 2
        assert old.read_text() == "precious"


class TestComparing:
    def test_everything_is_checked_before_the_first_run(self, workload, tmp_path):
        bad = tmp_path / "bad.csv"
        bad.write_text(f"{HEADER}a,0,nope,1,256\n")
        result = invoke("compare", workload, bad, "--policies", "fifo", "--nodes", 2, "--jobs", 1)
        assert result.exit_code == 2
        assert "nope" in result.stderr

    def test_files_of_the_same_name_are_told_apart(self, workload, tmp_path):
        (tmp_path / "other").mkdir()
        other = tmp_path / "other" / "small.csv"
        other.write_text(f"{HEADER}a,0,ncf,1,256\n")
        found = figures("compare", workload, other, "--policies", "fifo", "--nodes", 2, "--jobs", 1)
        assert [run["workload"] for run in found["runs"]] == [f"{tmp_path.name}/small", "other/small"]

    def test_each_policy_takes_the_options_that_it_has(self, workload):
        arguments = ("compare", workload, "--policies", "fifo,tiresias", "--nodes", 2, "--jobs", 1)
        found = figures(*arguments, "--set", "policy.service_threshold_gpu_s=1000")
        of_fifo, of_tiresias = (run["inputs"]["policy_options"] for run in found["runs"])
        assert "service_threshold_gpu_s" not in of_fifo
        assert of_tiresias["service_threshold_gpu_s"] == 1000
        result = invoke(*arguments, "--set", "policy.nope=1")
        assert result.exit_code == 2
        assert "policy.service_threshold_gpu_s" in result.stderr


class TestFairness:
    def test_is_measured_only_when_asked_for(self, workload):
        usual, measured = (figures("simulate", workload, "--nodes", 1, *more) for more in ((), ("--fairness",)))
        assert usual["worst_rho"] is None
        assert "rho" not in usual["jobs"]["a"]
        rhos = [job["rho"] for job in measured["jobs"].values()]
        assert measured["worst_rho"] == max(rhos)
        assert measured["unfair_fraction"] == pytest.approx(sum(rho > 1 for rho in rhos) / 3)
        assert measured["jobs"]["a"]["jct_s"] == usual["jobs"]["a"]["jct_s"]

    def test_is_in_the_tables_only_when_measured(self, workload):
        simulate, compare = ("simulate", workload), ("compare", workload, "--policies", "fifo,srtf", "--jobs", 1)
        for arguments in (simulate, compare):
            assert "ρ" not in invoke(*arguments).stdout
            assert "worst ρ" in invoke(*arguments, "--fairness").stdout

    def test_of_a_comparison_is_that_of_each_run(self, workload):
        alone = figures("simulate", workload, "--policy", "srtf", "--nodes", 1, "--fairness")
        arguments = ("compare", workload, "--policies", "fifo,srtf", "--nodes", 1, "--fairness")
        found = figures(*arguments, "--jobs", 2)
        assert found["runs"][1]["jobs"] == alone["jobs"]
        assert found["means"]["srtf"]["worst_rho"] == alone["worst_rho"]

    def test_a_time_limit_that_the_run_keeps_is_enough(self, workload):
        shared = figures("simulate", workload, "--policy", "pollux", "--nodes", 1)
        limit = f"world.max_time_s={shared['makespan_s'] + 60}"
        measured = figures("simulate", workload, "--policy", "pollux", "--nodes", 1, "--set", limit, "--fairness")
        assert measured["worst_rho"] > 0

    def test_over_workloads_the_worst_is_the_worst_of_all(self, workload, tmp_path):
        other = tmp_path / "other.csv"
        other.write_text(f"{HEADER}a,0,ncf,1,256\n")
        arguments = ("compare", workload, other, "--policies", "fifo", "--nodes", 1, "--fairness", "--jobs", 1)
        found = figures(*arguments)
        worst = [run["worst_rho"] for run in found["runs"]]
        assert worst[0] != worst[1]
        assert found["means"]["fifo"]["worst_rho"] == max(worst)
        assert found["means"]["fifo"]["max_contention"] == 3


class TestReport:
    """What is on the page: tests/simulator/test_report.py."""

    def test_a_comparison_writes_page_figures_and_data(self, workload, tmp_path):
        folder = tmp_path / "new" / "report"
        result = invoke("compare", workload, "--policies", "fifo,optimus", "--jobs", 1, "--report", folder)
        assert result.exit_code == 0, result.output
        assert str(folder / "report.html") in result.stderr
        document = json.loads((folder / "report.json").read_text())
        assert [run["policy"] for run in document["runs"]] == ["fifo", "optimus"]
        assert all(run["worst_rho"] is not None and run["histories"].keys() == set("abc") for run in document["runs"])
        assert (folder / "jct.png").exists()

    def test_a_run_has_one_too(self, workload, tmp_path, monkeypatch):
        told = []
        monkeypatch.setattr("pollux.simulator.report.write_report", lambda *given, title: told.append((given, title)))
        assert invoke("simulate", workload, "--policy", "srtf", "--report", tmp_path).exit_code == 0
        (((outcome,), folder), title) = told[0]
        assert (outcome.policy, folder, title) == ("srtf", tmp_path, "small under srtf")
        assert outcome.histories.keys() == set("abc")

    def test_many_jobs_go_without_fairness_unless_it_is_asked_for(self, workload, tmp_path, monkeypatch):
        measured = []
        monkeypatch.setattr("pollux.cli.report.MAX_FAIR_JOBS", 2)
        monkeypatch.setattr(
            "pollux.simulator.report.write_report", lambda outcomes, *_, title: measured.append(outcomes[0].fairness)
        )
        arguments = ("simulate", workload, "--policy", "fifo", "--report", tmp_path)
        first, second = invoke(*arguments), invoke(*arguments, "--fairness")
        assert [fairness is None for fairness in measured] == [True, False]
        assert "--fairness" in first.stderr
        assert "--fairness" not in second.stderr

    def test_fairness_can_be_declined(self, workload, tmp_path, monkeypatch):
        measured = []
        monkeypatch.setattr(
            "pollux.simulator.report.write_report", lambda outcomes, *_, title: measured.extend(outcomes)
        )
        result = invoke("simulate", workload, "--policy", "fifo", "--report", tmp_path, "--no-fairness")
        assert result.exit_code == 0, result.output
        assert measured[0].fairness is None
        assert measured[0].histories
        assert "--fairness" not in result.stderr

    @pytest.mark.parametrize("command", [("simulate",), ("compare", "--policies", "fifo")])
    def test_what_is_refused_leaves_no_folder(self, tmp_path, command):
        assert invoke(*command, "nofile", "--report", tmp_path / "new" / "folder").exit_code == 2
        assert not (tmp_path / "new").exists()
        (tmp_path / "old").mkdir()
        assert invoke(*command, "nofile", "--report", tmp_path / "old").exit_code == 2
        assert (tmp_path / "old").exists(), "it was there before"

    def test_a_folder_that_cannot_be_made_is_named(self, workload):
        result = invoke("simulate", workload, "--report", "/proc/x")
        assert result.exit_code == 2
        assert "--report = '/proc/x': cannot be written" in result.stderr
        assert "Name a folder" in result.stderr

    @pytest.mark.parametrize("command", [("simulate",), ("compare", "--policies", "fifo")])
    def test_an_empty_name_is_refused(self, workload, tmp_path, monkeypatch, command):
        monkeypatch.chdir(tmp_path)
        before = set(tmp_path.iterdir())
        result = invoke(*command, workload, "--report", "")
        assert result.exit_code == 2
        assert "--report" in result.stderr
        assert set(tmp_path.iterdir()) == before

    @pytest.mark.parametrize("command", [("simulate",), ("compare", "--policies", "fifo")])
    def test_a_folder_that_cannot_be_is_refused_before_the_run(self, workload, tmp_path, command):
        (tmp_path / "file").write_text("precious")
        for target in (tmp_path / "file", tmp_path / "file" / "below"):
            result = invoke(*command, workload, "--report", target)
            assert result.exit_code == 2
            assert "--report = " in result.stderr
            assert result.stdout == ""
        assert (tmp_path / "file").read_text() == "precious"

    def test_without_matplotlib_nothing_runs(self, workload, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        result = invoke("simulate", workload, "--report", tmp_path)
        assert result.exit_code != 0
        assert "pip install 'pollux[plot]'" in result.stderr
        assert result.stdout == ""
