"""`pollux profile`: what people see, and what programs read."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app

runner = CliRunner()
FIGURES = {"mean_relative_error", "published_procedure_error", "heldout_mean_relative_error", "theta"}


def test_show_lists_the_built_in_applications():
    result = runner.invoke(app, ["profile", "show"])
    assert result.exit_code == 0
    assert "ResNet-50 on ImageNet" in result.stdout


def test_show_one_application_gives_parameters_and_best_batch_sizes():
    result = runner.invoke(app, ["profile", "show", "cifar10"])
    assert result.exit_code == 0
    assert "alpha_node" in result.stdout
    assert "goodput at 90%" in result.stdout


def test_show_as_json_is_the_application_file():
    result = runner.invoke(app, ["profile", "show", "bert", "--json"])
    assert json.loads(result.stdout)["bert"]["limits"]["initial_batch_size"] == 12


def test_an_unknown_application_is_a_clear_error_without_a_traceback():
    result = runner.invoke(app, ["profile", "show", "brt"])
    assert result.exit_code == 2
    assert "Did you mean 'bert'" in result.stderr
    assert "Traceback" not in result.output


def test_plot_writes_one_picture_an_application_and_an_overview(tmp_path):
    result = runner.invoke(app, ["profile", "plot", "bert", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [path.rsplit("/", 1)[1] for path in found["files"]] == ["bert.png", "overview.png"]
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("bert.png", "overview.png"))
    errors = [fit["error"] for fit in found["fits"]]
    assert errors[-1] < 0.05 < errors[0], "a job that has seen all sizes knows more than one that saw one GPU"


def test_plot_is_the_same_for_the_same_seed(tmp_path):
    first, second, other = (
        runner.invoke(app, ["profile", "plot", "ncf", "--out", str(tmp_path), "--seed", seed, "--json"]).stdout
        for seed in ("1", "1", "2")
    )
    assert first == second != other


@pytest.mark.data
def test_fit_writes_figures_and_application_files(pollux_data, tmp_path):
    traces = str(pollux_data / "pollux-osdi21" / "traces")
    out, files = tmp_path / "fit.json", tmp_path / "files"
    command = ["profile", "fit", traces, "-a", "bert", "--json", str(out), "--write", str(files)]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "held out" in result.stdout
    figures = json.loads(out.read_text())["bert"]
    assert figures.keys() >= FIGURES
    assert figures["mean_relative_error"] < figures["published_procedure_error"]
    assert json.loads((files / "bert.json").read_text())["name"] == "bert"


@pytest.mark.data
def test_fit_prints_only_json_when_asked_to(pollux_data):
    traces = str(pollux_data / "pollux-osdi21" / "traces")
    result = runner.invoke(app, ["profile", "fit", traces, "-a", "bert", "--json", "-", "--model", "racks"])
    assert json.loads(result.stdout)["bert"]["theta"].keys() >= {"alpha_rack", "beta_rack"}
    assert json.loads(result.stdout)["bert"]["priors"] == ["alpha_rack", "beta_rack"]


def test_fit_on_a_wrong_folder_says_what_to_do(tmp_path):
    result = runner.invoke(app, ["profile", "fit", str(tmp_path)])
    assert result.exit_code == 2
    assert "Name the folder above the applications" in result.stderr
