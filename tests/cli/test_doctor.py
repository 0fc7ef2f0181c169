"""`pollux doctor` tells what is missing and never falls over it."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from pollux import __version__
from pollux.cli import doctor
from pollux.cli.doctor import Status
from pollux.cli.main import app

runner = CliRunner()


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[str, ...], str]) -> None:
    """Commands are run by the first test that needs them: loading torch takes seconds."""
    ask = doctor._run

    def run(command: list[str]) -> str:
        if tuple(command) not in answers:
            answers[tuple(command)] = ask(command)
        return answers[tuple(command)]

    monkeypatch.setattr(doctor, "_run", run)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, ...], str]:
    return {}


def checks_by_name() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.examine()}


def hide(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    seen = doctor._is_installed
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name not in missing and seen(name))


def show(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen = doctor._is_installed
    monkeypatch.setattr(doctor, "_is_installed", lambda other: other == name or seen(other))


def test_json_has_a_verdict_and_every_check() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["pollux"] == __version__
    assert answer["ok"] is True
    names = [check["name"] for check in answer["checks"]]
    expected = [
        "python",
        "numpy",
        "scipy",
        "typer",
        "rich",
        "numba",
        "matplotlib",
        "torch",
        "starlette",
        "uvicorn",
        "yaml",
        "ray",
    ]
    assert names == [*expected, "measured data", "git", "cluster", "cores", "memory"]
    assert set(answer["checks"][0]) == {"name", "purpose", "required", "status", "version", "detail", "fix"}


def test_text_says_that_pollux_works() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "Pollux works here." in result.stdout


def test_a_missing_base_package_fails_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "scipy")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert f"scipy: {shlex.quote(sys.executable)} -m pip install scipy" in result.stdout
    assert "does not work here yet" in result.stdout


def test_a_base_package_that_does_not_load_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    load = importlib.import_module

    def import_module(name: str) -> ModuleType:
        if name == "numpy":
            raise RuntimeError("built for\nanother machine")
        return load(name)

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    numpy = checks_by_name()["numpy"]
    assert numpy.status is Status.BROKEN
    assert numpy.detail == "RuntimeError: built for another machine"
    assert "--force-reinstall numpy" in (numpy.fix or "")


@pytest.mark.parametrize(
    ("package", "extra"), [("matplotlib", "plot"), ("torch", "torch"), ("uvicorn", "service"), ("ray", "ray")]
)
def test_a_missing_optional_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, package: str, extra: str) -> None:
    hide(monkeypatch, package)
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    check = checks_by_name()[package]
    assert (check.status, check.required) == (Status.MISSING, False)
    assert f"pip install 'pollux[{extra}]'" in (check.fix or "")


def test_from_sources_that_are_not_installed_the_public_index_is_not_asked_for_pollux(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide(monkeypatch, "ray")
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert (checks_by_name()["ray"].fix or "").endswith("pip install ray")


@pytest.mark.parametrize(
    ("answer", "status", "detail"),
    [
        ("2\n", Status.OK, "2 CUDA devices"),
        ("a banner\n0\n", Status.OK, "0 CUDA devices"),
        ("", Status.BROKEN, "does not load"),
        (subprocess.SubprocessError("libcudart.so: cannot open"), Status.BROKEN, "libcudart.so"),
        (subprocess.TimeoutExpired("python", 1), Status.BROKEN, "TimeoutExpired"),
    ],
)
def test_torch_is_tried_in_another_process(
    monkeypatch: pytest.MonkeyPatch, answer: str | Exception, status: Status, detail: str
) -> None:
    def run(command: list[str]) -> str:
        if command[0] == "git":
            return "git version 2"
        if isinstance(answer, Exception):
            raise answer
        return answer

    show(monkeypatch, "torch")
    monkeypatch.setattr(doctor, "_run", run)
    check = checks_by_name()["torch"]
    assert check.status is status
    assert detail in (check.detail or "")


def test_a_failing_probe_is_told_by_its_last_line() -> None:
    crash = [sys.executable, "-c", "raise OSError('no driver')"]
    with pytest.raises(subprocess.SubprocessError, match="OSError: no driver"):
        doctor._run(crash)


def test_measured_data_is_found_by_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLLUX_DATA", str(tmp_path))
    assert checks_by_name()["measured data"].detail == str(tmp_path)
    monkeypatch.setenv("POLLUX_DATA", str(tmp_path / "gone"))
    check = checks_by_name()["measured data"]
    assert check.status is Status.MISSING
    assert "POLLUX_DATA" in (check.fix or "")


def test_git_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert checks_by_name()["git"].status is Status.MISSING
