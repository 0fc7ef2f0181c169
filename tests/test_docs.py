"""The documents stay true: their Python runs, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pollux.goodput import Observations, fit

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "RESULTS.md"])


def python_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_example_runs(capsys):
    for block in python_blocks("README.md"):
        exec(compile(block, "README.md", "exec"), {})
    assert "per_gpu_batch_size" in capsys.readouterr().out


def test_the_simulation_in_the_documentation_runs(capsys):
    (block,) = python_blocks("docs/simulator.md")
    exec(compile(block, "docs/simulator.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) == 2


def test_the_throughput_model_in_the_documentation_can_be_fitted():
    (block,) = python_blocks("docs/goodput.md")
    names: dict[str, object] = {}
    exec(compile(block, "docs/goodput.md", "exec"), names)
    rows = [(K, 1, 1, m, 0.1 + 0.01 * m, 0.1 + 0.01 * m + 0.05 * np.log2(K)) for K in (1, 2, 4, 8) for m in (8, 16)]
    found = fit(Observations.from_rows(rows), names["TreeAllReduce"]())
    assert found.converged
    assert found.mean_relative_error < 0.01


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_left_to_be_filled_in(document):
    assert not re.findall(
        r"\b(?:TODO|TBD|FIXME|XXX)\b|^[A-Z]+_[A-Z_]+$", document.read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
