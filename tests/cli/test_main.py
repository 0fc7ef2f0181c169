"""The root command: help, version, exit codes, errors with and without --debug."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from pollux import __version__
from pollux.cli import output
from pollux.cli.commands import COMMANDS
from pollux.cli.main import PolluxGroup, app, root
from pollux.errors import InvalidModel, MissingDependency, StaleGeneration, UnknownName

runner = CliRunner()


def failing_app(failure: BaseException) -> typer.Typer:
    """The real root group with one command that raises."""
    broken = typer.Typer(cls=PolluxGroup, pretty_exceptions_enable=False)
    broken.callback()(root)

    @broken.command()
    def go() -> None:
        raise failure

    return broken


def test_help_names_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("doctor", "profile", "--version", "--debug", "--install-completion"):
        assert name in result.output


def test_version_is_the_packages() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"pollux {__version__}\n")


def test_a_wrong_command_is_a_usage_error() -> None:
    result = runner.invoke(app, ["docter"])
    assert result.exit_code == 2
    assert "doctor" in result.stderr, "the nearest name is suggested"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (InvalidModel("beta_grad", -1.0, "must not be negative", "Fit the model again"), 2),
        (UnknownName("application", "bret", ["bert", "neumf"]), 2),
        (MissingDependency("matplotlib", "plotting", "plot"), 1),
        (StaleGeneration("job-1", 2, 3), 1),
        (OSError(28, "No space left on device", "out.json"), 1),
    ],
)
def test_an_expected_failure_is_one_line_on_stderr(failure: Exception, code: int) -> None:
    result = runner.invoke(failing_app(failure), ["go"])
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {failure}")
    assert result.stderr.count("\n") == 1


def test_square_brackets_in_a_message_are_kept() -> None:
    result = runner.invoke(failing_app(MissingDependency("matplotlib", "plotting", "plot")), ["go"])
    assert "pip install 'pollux[plot]'" in result.stderr


def test_an_unexpected_exception_is_called_a_bug() -> None:
    result = runner.invoke(failing_app(ZeroDivisionError("division\nby zero")), ["go"])
    assert result.exit_code == 70
    assert result.stderr.startswith("error: ZeroDivisionError: division by zero (this is a bug, run again with --debug")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("failure", "code"), [(InvalidModel("gamma", 0.5, "too small", "Use 1 to 10"), 2), (ZeroDivisionError("oops"), 70)]
)
@pytest.mark.parametrize("how", ["option", "environment"])
def test_debug_adds_the_traceback_and_keeps_the_exit_code(failure: Exception, code: int, how: str) -> None:
    arguments = ["--debug", "go"] if how == "option" else ["go"]
    environment = {"POLLUX_DEBUG": "1"} if how == "environment" else {}
    result = runner.invoke(failing_app(failure), arguments, env=environment)
    assert result.exit_code == code
    assert "Traceback (most recent call last)" in result.stderr
    assert "raise failure" in result.stderr


def test_interrupted_by_the_user_exits_with_130() -> None:
    result = runner.invoke(failing_app(KeyboardInterrupt()), ["go"])
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_a_command_may_choose_its_exit_code() -> None:
    assert runner.invoke(failing_app(typer.Exit(3)), ["go"]).exit_code == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_table_says(name: str) -> None:
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f" {name} [" in result.output, "its own usage"


def test_a_command_does_not_wait_for_the_others() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from pollux.cli.main import app\n"
        "assert CliRunner().invoke(app, ['simulate', '--help']).exit_code == 0\n"
        "print(*(name for name in sys.modules if name.startswith(('pollux.wire', 'pollux.cli.up'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_loads_no_heavy_library() -> None:
    heavy = {"numpy", "scipy", "matplotlib", "torch", "ray", "starlette", "uvicorn", "pydantic"}
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from pollux.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        f"print(*({heavy!r} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


class TestOutput:
    def test_json_keeps_order_and_has_no_nan(self) -> None:
        text = output.json_text(
            {"b": np.float64(1.5), "a": [np.int64(2), float("nan")], "p": Path("x"), "z": np.eye(2)}
        )
        assert list(json.loads(text)) == ["b", "a", "p", "z"]
        assert json.loads(text) == {"b": 1.5, "a": [2, None], "p": "x", "z": [[1.0, 0.0], [0.0, 1.0]]}

    def test_json_of_a_foreign_object_is_refused(self) -> None:
        with pytest.raises(TypeError, match="no JSON form for object"):
            output.json_text({"a": object()})

    def test_json_file_is_written_with_its_folders(self, tmp_path: Path) -> None:
        target = tmp_path / "new" / "figures.json"
        output.write_json({"a": 1}, target)
        assert json.loads(target.read_text()) == {"a": 1}
        assert [entry.name for entry in target.parent.iterdir()] == ["figures.json"], "no temporary file stays behind"

    def test_dash_means_standard_output(self, capsys: pytest.CaptureFixture[str]) -> None:
        output.write_json({"a": 1}, Path("-"))
        assert json.loads(capsys.readouterr().out) == {"a": 1}

    def test_a_file_that_cannot_be_written_is_wrong_input(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(output.InvalidInput, match="--json"):
            output.write_json({}, tmp_path / "file" / "below.json")

    def test_json_file_option_takes_a_dash_and_a_file(self, tmp_path: Path) -> None:
        commands = typer.Typer()

        @commands.command()
        def fit(json_file: output.JsonFileOption = None) -> None:
            if json_file:
                output.write_json({"a": 1}, json_file)

        assert json.loads(runner.invoke(commands, ["--json", "-"]).stdout) == {"a": 1}
        assert runner.invoke(commands, ["--json", str(tmp_path / "f.json")]).stdout == ""
        assert json.loads((tmp_path / "f.json").read_text()) == {"a": 1}

    def test_a_table_in_a_pipe_is_not_cut(self, capsys: pytest.CaptureFixture[str]) -> None:
        output.table(["name", "ms"], [("x" * 300, 1.23456), ("[red]", None)], title="speed [ms]")
        printed = capsys.readouterr().out
        for expected in ("x" * 300, "1.235", "[red]", "–", "speed [ms]"):
            assert expected in printed

    def test_progress_is_silent_without_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        with output.progress("fitting", 2) as advance:
            advance(1)
        assert capsys.readouterr() == ("", "")

    def test_progress_shows_in_a_terminal(self, terminal: Callable[[], str]) -> None:
        with output.progress("fitting [a]", 2) as advance:
            advance(1)
        assert "fitting [a]" in terminal()

    @pytest.fixture
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
        stream = io.StringIO()
        monkeypatch.setattr(output, "err_console", Console(file=stream, force_terminal=True, width=80))
        return stream.getvalue
