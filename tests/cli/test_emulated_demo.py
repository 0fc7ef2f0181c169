"""`pollux demo --emulate`: what is run, what it makes of both runs, and how it says that all of it is emulated."""

import json
from dataclasses import replace

import pytest
import typer
from tests.cli.fidelity_scenes import SETTING, a_result, course
from typer.testing import CliRunner

from pollux.cli.demo import command, emulated, emulated_report
from pollux.cli.demo import running as plain
from pollux.cli.demo.emulated import EmulatedDemo, run_emulated_demo
from pollux.cli.fidelity.result import Pair
from pollux.cli.fidelity.running import Twin
from pollux.cli.trial.running import Outage
from pollux.errors import Permanent
from pollux.providers.local import devices
from pollux.simulator.generator import BUILT_IN

app = typer.Typer()
app.command()(command.demo)
runner = CliRunner()


def a_run(policy, live_s, simulated_s, **changed):
    """One job of so many seconds on each side."""
    live, simulated = course(finished_at_s=live_s), course(finished_at_s=simulated_s)
    found = a_result(Pair("a", "cifar10:0.2", 2, live, simulated), **changed)
    return replace(found, setting=replace(found.setting, policy=policy, compress=30.0))


DEMO = EmulatedDemo((a_run("pollux", 600.0, 660.0), a_run("fifo", 1200.0, 1100.0)))


class TestAResult:
    def test_compares_live_with_fifo_and_with_what_was_predicted(self):
        assert DEMO.jct_ratio == 0.5
        assert DEMO.predicted_ratio == 0.6
        assert DEMO.reallocations == 1
        assert DEMO.faults == []

    def test_of_one_run_has_no_ratio(self):
        assert EmulatedDemo(DEMO.runs[1:]).jct_ratio is None
        assert EmulatedDemo(DEMO.runs[:1]).predicted_ratio is None

    def test_is_printed_and_written_as_emulated(self, tmp_path, capsys):
        outage = Outage(20.0, 26.0, {"a": (100, 150)})
        found = EmulatedDemo((replace(DEMO.runs[0], outage=outage), DEMO.runs[1]))
        emulated_report.print_summary(found)
        printed = " ".join(capsys.readouterr().out.split())
        page = emulated_report.write(found, tmp_path).read_text("utf-8")
        for said in (printed, page):
            assert "pollux: average JCT 10.0 emulated minutes (20 s here), predicted 11.0" in said
            assert "is 0.50 × that under fifo" in said
            assert "the simulator predicted 0.60 ×" in said
            assert "a 100→150" in said
            assert "These GPUs are emulated" in said
            assert "1→4" in said
        assert "<title>Pollux, live on emulated GPUs of this machine (× 30)</title>" in page
        document = json.loads((tmp_path / "report.json").read_text("utf-8"))
        assert document["is_emulated"]
        assert document["predicted_ratio_vs_fifo"] == 0.6
        assert [run["setting"]["policy"] for run in document["runs"]] == ["pollux", "fifo"]
        assert (tmp_path / "gpus-by-job.png").is_file()

    def test_of_one_run_is_printed_too(self, tmp_path, capsys):
        emulated_report.print_summary(EmulatedDemo(DEMO.runs[:1]))
        assert "fifo" not in capsys.readouterr().out
        emulated_report.write(EmulatedDemo(DEMO.runs[:1]), tmp_path)


class TestTheRuns:
    @pytest.mark.parametrize("is_quick", [False, True])
    def test_are_of_built_in_workloads_on_eight_gpus_and_only_the_first_loses_its_service(self, monkeypatch, is_quick):
        asked = []

        def run(workload, **named):
            asked.append((workload, named))
            return a_run(named["policy"], 600.0, 600.0)

        monkeypatch.setattr(emulated, "run_fidelity", run)
        found = run_emulated_demo(is_quick=is_quick, kills_service=True)
        assert [run.setting.policy for run in found.runs] == ["pollux", "fifo"]
        assert {workload for workload, _ in asked} == {"four" if is_quick else "six"} <= BUILT_IN.keys()
        kill_at_s = emulated.KILL_SERVICE_AT_S["four" if is_quick else "six"]
        assert [named["kill_service_at_s"] for _, named in asked] == [kill_at_s, None]
        assert all(named["nodes"] * named["slots"] == 8 for _, named in asked)

    @pytest.mark.parametrize("workload", [emulated.WORKLOAD, emulated.QUICK_WORKLOAD])
    def test_lose_it_when_all_jobs_have_come_and_none_has_ended(self, workload):
        setting = replace(SETTING, workload=workload, compress=emulated.COMPRESS)
        jobs = Twin.of(setting).outcome.jobs
        kill_at_s = emulated.KILL_SERVICE_AT_S[workload]
        assert max(job.submitted_at_s for job in jobs) < kill_at_s < min(job.finished_at_s for job in jobs)


class TestTheCommand:
    @pytest.fixture
    def asked(self, monkeypatch):
        """Which demo was asked for; none is run."""
        asked = []
        monkeypatch.setattr(emulated, "run_emulated_demo", lambda *given, **named: asked.append("emulated") or DEMO)

        def run(*given, **named):
            asked.append("GPUs" if named["use_gpus"] else "slots")
            raise Permanent("enough")

        monkeypatch.setattr(plain, "run_demo", run)
        return asked

    @pytest.mark.parametrize(
        ("found", "arguments", "expected"),
        [
            ([], [], "emulated"),
            (["0"], [], "GPUs"),
            (["0"], ["--emulate"], "emulated"),
            ([], ["--no-emulate"], "slots"),
            (["0"], ["--no-emulate"], "slots"),
            (["0"], ["--gpus"], "GPUs"),
        ],
    )
    def test_emulates_if_there_is_no_gpu_or_it_is_told_to(
        self, monkeypatch, tmp_path, asked, found, arguments, expected
    ):
        monkeypatch.setattr(devices, "describe_devices", lambda: devices.DeviceReport(found))
        runner.invoke(app, [*arguments, "--report", str(tmp_path)])
        assert asked == [expected]

    def test_ends_with_1_if_something_was_left_running(self, monkeypatch, tmp_path):
        left = EmulatedDemo((replace(DEMO.runs[0], faults=("1 process had to be killed.",)),))
        monkeypatch.setattr(emulated, "run_emulated_demo", lambda *given, **named: left)
        arguments = ["--emulate", "--only", "pollux", "--report", str(tmp_path), "--json", str(tmp_path / "all.json")]
        done = runner.invoke(app, arguments)
        assert done.exit_code == 1
        assert "pollux: 1 process had to be killed." in done.output
        assert json.loads((tmp_path / "all.json").read_text("utf-8"))["is_emulated"]
