"""`pollux registry`, against the REST API of a fake service."""

import json

import pytest
from tests.cli.live_cluster import LiveFake, serving, short_folder
from tests.core.kinds import registry
from tests.fixtures.recorded import VERSIONS, unpack
from typer.testing import CliRunner

from pollux.cli.main import app
from pollux.core import KindsImported, Plan, ProfileRegistry, dumps, loads
from pollux.service.place import ClusterFolder

runner = CliRunner()


@pytest.fixture
def service(monkeypatch):
    monkeypatch.delenv("POLLUX_URL", raising=False)
    with short_folder() as home:
        monkeypatch.setenv("POLLUX_HOME", str(home))
        service = LiveFake()
        with serving(service, ClusterFolder()):
            yield service


def run(*arguments, code=0):
    result = runner.invoke(app, ["registry", *map(str, arguments)])
    assert result.exit_code == code, (result.stdout, result.stderr)
    return result


def test_an_empty_registry_is_no_error(service):
    assert run("list").stderr == "0 kinds of jobs.\n"
    assert json.loads(run("list", "--json").stdout) == {"kinds": []}


def test_kinds_are_listed(service):
    service.hear(KindsImported(registry("net").kinds))
    result = run("list")
    for word in ("net", "t4", "most GPUs", "3200"):
        assert word in result.stdout
    assert result.stderr == "1 kind of jobs.\n"
    (kind,) = json.loads(run("list", "--json").stdout)["kinds"]
    assert (kind["kind"], kind["jobs"], kind["max_gpus"]) == ("net", 3, 4)


def test_a_registry_goes_to_a_file_and_comes_back(service, tmp_path):
    service.hear(KindsImported(registry("net", "other").kinds))
    kinds, file = service.scheduler.state.pool.kinds, tmp_path / "there" / "registry.json"
    assert f"pollux registry import {file}" in run("export", file).stderr
    assert loads(file.read_text(), ProfileRegistry).kinds == kinds
    assert run("export", "-").stdout == file.read_text()
    run("import", file, "--replace")
    assert service.scheduler.state.pool.kinds == kinds
    jobs = {each["kind"]: each["jobs"] for each in json.loads(run("import", file, "--json").stdout)["kinds"]}
    assert jobs == {"net": 6, "other": 6}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("cannot be read", "No such file")),
        ("no JSON", ("is no profile registry", "is not JSON")),
        (dumps(Plan()), ("is no profile registry", "not a type that may stand here")),
        (dumps(registry()).replace('"num_jobs":3', '"num_jobs":-3'), ('kinds["net"].num_jobs', "at least 0")),
    ],
)
def test_a_file_that_is_no_registry_is_told_so_before_anybody_is_asked(monkeypatch, tmp_path, text, words):
    monkeypatch.setenv("POLLUX_HOME", str(tmp_path))  # where no cluster runs
    file = tmp_path / "registry.json"
    if text is not None:
        file.write_text(text)
    told = run("import", file, code=2).stderr
    for word in ("FILE", str(file), *words):
        assert word in told


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_an_earlier_version_is_taken(service, tmp_path, version):
    recorded = unpack(version, tmp_path)
    known = json.loads(run("import", recorded.registry, "--json").stdout)["kinds"]
    assert {kind["kind"]: kind["jobs"] for kind in known} == recorded.expected["kinds"]
    assert all(kind["observations"] > 0 for kind in known)
