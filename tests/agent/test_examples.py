"""The examples run, alone and on two replicas, on little data. Whether they learn is for `make bench` to say."""

import ast
import difflib
import json
import math
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.agent.scripts import EXAMPLES, printed_by, printed_by_replica

LITTLE = {
    "classifier": ["--samples", "400"],
    "language_model": ["--samples", "300"],
    "recommender": ["--users", "20"],
}
METRIC = {"classifier": "accuracy", "language_model": "validation_loss", "recommender": "hit_rate_at_10"}


def on_little_data(script: str, *arguments: str) -> list[str]:
    """The command line of a short run."""
    return [str(EXAMPLES / f"{script}.py"), *LITTLE[script.removesuffix("_adaptive")], "--epochs", "1", *arguments]


def results_in(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def check(result: dict[str, Any], name: str) -> None:
    assert set(result) == {"metric", "value", "seconds", "steps"}
    assert result["metric"] == METRIC[name]
    assert math.isfinite(result["value"])
    assert result["seconds"] > 0
    assert result["steps"] > 0


def test_every_example_ends_with_its_result_as_json(fork) -> None:
    scripts = [f"{name}{twin}" for name in LITTLE for twin in ("", "_adaptive")]
    calls = [on_little_data(script) for script in scripts]
    for script in ("classifier", "classifier_adaptive"):
        scripts.append(script)
        calls.append(on_little_data(script, "--batch-norm"))
    (printed,) = fork(printed_by, [calls])
    results = results_in(printed)
    assert len(results) == len(scripts)
    for result, script in zip(results, scripts, strict=True):
        check(result, script.removesuffix("_adaptive"))


@pytest.mark.parametrize("name", [*LITTLE, "regression"])
def test_the_result_of_an_adaptive_example_is_known_to_a_replica_that_joins_after_the_last_step(name: str) -> None:
    """It takes over the weights and `job.state`, not the variables that the loop of the others has assigned."""
    body = _main(f"{name}_adaptive.py").body
    (at,) = (index for index, statement in enumerate(body) if isinstance(statement, ast.For))
    in_loop = _names(body[at : at + 1], ast.Store)
    after = [statement for statement in body[at + 1 :] if not isinstance(statement, ast.Assign)]
    computed = _names([one for one in body[at + 1 :] if isinstance(one, ast.Assign)], ast.Store)
    assert (in_loop & _names(after, ast.Load)) - computed <= {"steps"}


def _main(file: str) -> ast.FunctionDef:
    tree = ast.parse((EXAMPLES / file).read_text())
    (main,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "main")
    return main


def _names(statements: list[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


# The recommender would run no other code. Scripts under torchrun itself are in test_signals.
@pytest.mark.parametrize(("name", "printed"), [("classifier", 2), ("language_model", 1)])
def test_two_replicas_of_an_adaptive_example_agree_on_the_result(spawn, name: str, printed: int) -> None:
    results = results_in("".join(spawn(printed_by_replica, 2, on_little_data(f"{name}_adaptive"))))
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
