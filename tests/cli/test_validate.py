"""`pollux validate`, and the documents that are made of the table of fields."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from tests.wire.test_jobspec import complaints
from typer.testing import CliRunner

from pollux.cli.job_file import check_file
from pollux.cli.validate import validate
from pollux.wire.jobspec import json_schema, markdown_table

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "job-specification.md").read_text(encoding="utf-8")

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(validate)


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def good(tmp_path):
    (tmp_path / "train.py").touch()
    path = tmp_path / "good.yaml"
    path.write_text("command: python train.py\n---\ncommand: sh -c true\ngpus: 1\n")
    return path


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("command: python train.py\nmin_gpus: 0\nnmae: x\n")
    return path


def test_a_good_file_is_fine(good):
    result = invoke(good)
    assert result.exit_code == 0
    assert result.stdout == f"{good}: 2 jobs, all fine\n"


def test_every_fault_is_a_line(good, bad):
    result = invoke(good, bad)
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [
        f"{good}: 2 jobs, all fine",
        f"{bad}:2: min_gpus = 0: less than 1. Give a number from 1 to 65536.",
        f"{bad}:3: nmae: no such field. Write name if that is meant.",
    ]


def test_files_of_this_machine_can_be_left_alone(good):
    (good.parent / "train.py").unlink()
    assert invoke(good).exit_code == 2
    assert invoke("--no-check-files", good).exit_code == 0


def test_json_for_programs(bad):
    result = invoke("--json", bad)
    assert result.exit_code == 2
    (file,) = json.loads(result.stdout)["files"]
    assert (file["file"], file["jobs"]) == (str(bad), 1)
    assert [fault["line"] for fault in file["faults"]] == [2, 3]


def test_without_a_file_there_is_nothing_to_do():
    assert "no file to check" in str(invoke().exception)


def test_the_schema_that_is_published_is_that_of_the_code():
    printed = invoke("--schema").stdout
    assert json.loads(printed) == json_schema()
    renew = "renew it: pollux validate --schema > docs/job.schema.json"
    assert (DOCS / "job.schema.json").read_text(encoding="utf-8") == printed, renew


def test_the_table_of_the_docs_is_that_of_the_code():
    assert markdown_table() in PAGE, "paste pollux.wire.jobspec.markdown_table() into docs/job-specification.md"


def test_the_examples_of_the_docs_are_right(tmp_path):
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        path = tmp_path / "example.yaml"
        path.write_text(example)
        assert check_file(path, None).faults == []
        for document in yaml.safe_load_all(example):
            assert complaints(json_schema(), document) == []
