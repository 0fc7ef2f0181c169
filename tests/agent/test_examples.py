"""The examples run, alone and on two replicas, on little data. Whether they learn is for `make bench` to say."""

import ast
import difflib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
LITTLE = {
    "classifier": ["--samples", "400"],
    "language_model": ["--samples", "300"],
    "recommender": ["--users", "20"],
}
METRIC = {"classifier": "accuracy", "language_model": "validation_loss", "recommender": "hit_rate_at_10"}

ONE_AFTER_THE_OTHER = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def on_little_data(script: str, *arguments: str) -> list[str]:
    """The command line of a short run."""
    return [str(EXAMPLES / f"{script}.py"), *LITTLE[script.removesuffix("_adaptive")], "--epochs", "1", *arguments]


def results_of(*command: str) -> list[dict[str, Any]]:
    """Run Python with this command line; the results that it prints."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("POLLUX_")}
    done = subprocess.run(
        [sys.executable, *command],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    # Two replicas may print at the same moment, and then on the same line.
    return [json.loads(result) for result in re.findall(r"\{[^{}]*\}", done.stdout)]


def check(result: dict[str, Any], name: str) -> None:
    assert set(result) == {"metric", "value", "seconds", "steps"}
    assert result["metric"] == METRIC[name]
    assert math.isfinite(result["value"])
    assert result["seconds"] > 0
    assert result["steps"] > 0


def test_every_example_ends_with_its_result_as_json() -> None:
    scripts = [f"{name}{twin}" for name in LITTLE for twin in ("", "_adaptive")]
    calls = [on_little_data(script) for script in scripts]
    for script in ("classifier", "classifier_adaptive"):
        scripts.append(script)
        calls.append(on_little_data(script, "--batch-norm"))
    # In one process: starting Python and torch takes longer than the scripts do.
    results = results_of("-c", ONE_AFTER_THE_OTHER, json.dumps(calls))
    assert len(results) == len(scripts)
    for result, script in zip(results, scripts, strict=True):
        check(result, script.removesuffix("_adaptive"))


# The recommender would run no other code, in three more processes.
@pytest.mark.parametrize(("name", "printed"), [("classifier", 2), ("language_model", 1)])
def test_two_replicas_of_an_adaptive_example_agree_on_the_result(name: str, printed: int) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    results = results_of(*torchrun, *on_little_data(f"{name}_adaptive"))
    assert len(results) == printed
    for result in results:
        check(result, name)
    assert len({result["value"] for result in results}) == 1


@pytest.mark.parametrize("name", ["classifier", "recommender"])
def test_the_adaptive_twin_differs_in_five_lines(name: str) -> None:
    plain, adaptive = (_code(f"{name}{twin}.py") for twin in ("", "_adaptive"))
    changes = [line for line in difflib.ndiff(plain, adaptive) if line.startswith("+ ")]
    assert [change.split("#")[0].split("(")[0].strip("+ ") for change in changes] == [
        "from pollux.torch import Job",
        "job = Job",
        "model, optimizer, train_loader, scheduler = job.prepare",
        "for epoch in job.epochs",
        "job.backward",
    ]


def _code(file: str) -> list[str]:
    """The lines of an example below its docstring, without blank ones."""
    text = (EXAMPLES / file).read_text()
    docstring = ast.parse(text).body[0]
    return [line for line in text.splitlines()[docstring.end_lineno :] if line.strip()]


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_imports_only_torch_numpy_and_the_standard_library(file: str) -> None:
    allowed = {"torch", "numpy", "datasets", *sys.stdlib_module_names}
    if file.endswith("_adaptive.py"):
        allowed.add("pollux.torch")
    if file == "emulated.py":
        allowed |= {"pollux", "pollux.torch"}
    for node in ast.walk(ast.parse((EXAMPLES / file).read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            assert module in allowed or module.split(".")[0] in allowed, f"{file} imports {module}"
