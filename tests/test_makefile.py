"""The two commands, the pins and what CI runs stay in step with each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Extras that `make setup` installs; torch, the service and the engines are left to those who use them.
INSTALLED_EXTRAS = ("plot", "bench", "torch", "tensorboard", "dev")


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env={**outer, **variables}, capture_output=True, text=True)


def test_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (help .*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert phony
    listed = {line.split()[0] for line in make("help").stdout.splitlines()[1:]}
    assert listed == set(phony[1].split())
    assert {"setup", "run", "test", "lint", "bench", "help"} <= listed


def test_help_is_what_make_does_without_a_target() -> None:
    assert make().stdout == make("help").stdout


@pytest.mark.parametrize(
    ("variables", "flag"), [({}, "demo \n"), ({"EMULATE": "0"}, "--no-emulate"), ({"EMULATE": "1"}, " --emulate")]
)
def test_run_emulates_gpus_unless_it_is_told_otherwise(variables: dict[str, str], flag: str) -> None:
    assert flag.strip() in make("--dry-run", "run", **variables).stdout
    assert variables or "emulate" not in make("--dry-run", "run").stdout


@pytest.mark.parametrize(("variables", "expected"), [({}, False), ({"ONLY": "goodput"}, True)])
def test_bench_hands_its_area_on(variables: dict[str, str], expected: bool) -> None:
    planned = make("--dry-run", "bench", **variables).stdout
    assert ("--only goodput" in planned) is expected


@pytest.mark.parametrize(
    ("shared", "quiet", "is_fine"),
    [
        (0, 0, True),
        (0, 5, True),
        (5, 0, True),
        (1, 0, False),
        (0, 1, False),
        (1, 5, False),
        (5, 1, False),
        (5, 5, False),
    ],
)
def test_both_kinds_of_tests_run_and_either_may_fail_the_target(
    tmp_path: Path, shared: int, quiet: int, is_fine: bool
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Stands in for pytest, whose 5 is that nothing was selected.
    python.write_text(
        f'#!/bin/sh\necho "$@" >> "{tmp_path}/said"\n'
        f'case "$*" in *compileall*) ;; *"not quiet"*) exit {shared} ;; *) exit {quiet} ;; esac\n'
    )
    (tmp_path / "chromium").write_text("#!/bin/sh\n")
    for program in (python, tmp_path / "chromium"):
        program.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv" / ".stamp").write_text(str(tmp_path))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ARGS": "-k fit"}
    done = subprocess.run(["make", "test"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) is is_fine, done.stderr
    compiles, first, second = (tmp_path / "said").read_text().splitlines()
    assert compiles == "-m compileall -q src/pollux"
    assert re.search(r"-n [1-9]\d* ", first)
    assert "-m not quiet" in first
    assert "-n" not in second.split()
    assert "-m quiet" in second
    assert all(line.endswith("-k fit") for line in (first, second))


def test_quiet_tests_are_where_they_are_looked_for() -> None:
    folder = re.search(r"-m quiet -o testpaths=(\S+)", (ROOT / "Makefile").read_text("utf-8"))
    assert folder
    mark = re.compile(r"^\s*(@|pytestmark\b.*)pytest\.mark\.quiet", re.MULTILINE)
    marked = {path for path in (ROOT / "tests").rglob("*.py") if mark.search(path.read_text("utf-8"))}
    assert marked
    assert marked == {path for path in marked if ROOT / folder[1] in path.parents}, "make test would not run them all"


def test_without_a_usable_python_setup_says_what_is_missing(tmp_path: Path) -> None:
    for tool in ("sh", "cat", "make"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    (tmp_path / "python3").write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.9.2' && exit\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(["make", "setup"], cwd=copy, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr


def test_ci_runs_lint_and_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "export CI=true", "make lint", "make test"]


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_without_the_measured_data_a_test_is_skipped_here_and_fails_in_ci(
    tmp_path: Path, ci: str, outcome: str
) -> None:
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_it.py").write_text("def test_it(pollux_data):\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "POLLUX_DATA": str(tmp_path / "gone")},
        capture_output=True,
        text=True,
    )
    assert outcome in done.stdout
    assert (done.returncode == 0) is (not ci)


def test_every_dependency_is_pinned_to_a_version_that_is_allowed() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [*PROJECT["dependencies"], "hatchling", "editables"]
    wanted += [text for extra in INSTALLED_EXTRAS for text in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, wanted):
        if requirement.name == "pollux":
            continue
        assert canonicalize_name(requirement.name) in pinned, f"{requirement} is not pinned: make constraints"
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow the pin {version}"
    # One version of it, which has a build without CUDA; the package itself allows a range.
    assert "+" not in pinned["torch"]
    assert PROJECT["optional-dependencies"]["torch"] == ["torch>=2.6"]
