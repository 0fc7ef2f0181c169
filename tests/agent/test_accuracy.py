"""Adaptive training is as good as plain training: the examples with one seed, shorter than in `make bench`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from benchmarks.training.examples import Outcome
from tests.agent.scripts import EXAMPLES, printed_by

from pollux.agent.journal import read_journal

SEEDS = {"classifier": (1,), "language_model": (1,), "recommender": (0, 1)}
"""One each; the recommender's hit rate scatters by a third of a point from run to run, so its bound is for two."""

PATIENT_S = 400.0
"""Trainings compute, so that a busy machine takes many times the 15 seconds that an idle one needs."""

SHORT = {
    "classifier": ["--epochs", "3"],
    "language_model": ["--epochs", "1", "--width", "32", "--layers", "1"],
    "recommender": ["--epochs", "2"],
}


def outcome(script: str, seed: int, arguments: list[str], folder: str) -> Outcome:
    command = [str(EXAMPLES / f"{script}.py"), "--seed", str(seed), *arguments]
    said = json.loads(printed_by([command], {"POLLUX_CHECKPOINT_DIR": folder}).splitlines()[-1])
    journal = read_journal(Path(folder) / "journal.jsonl") if script.endswith("_adaptive") else ()
    return Outcome(said["value"], said["seconds"], said["steps"], journal)


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENT_S)
@pytest.mark.parametrize(
    ("name", "worst"),
    [("classifier", -0.5), ("language_model", 1.005), ("recommender", -0.5)],
    ids=["accuracy within half a point", "validation loss within half a percent", "hit rate within half a point"],
)
def test_adaptive_training_ends_as_well_as_plain_training_and_the_guard_stays_silent(
    fork, tmp_path: Path, name: str, worst: float
) -> None:
    pairs = []
    for seed in SEEDS[name]:
        scripts = (name, f"{name}_adaptive")
        each = ((script, seed, SHORT[name], str(tmp_path / f"{seed}")) for script in scripts)
        pairs.append(fork(outcome, *each, patience_s=PATIENT_S))
    plain, adaptive = (statistics.mean(run.metric for run in side) for side in zip(*pairs, strict=True))
    if name == "language_model":
        assert adaptive <= worst * plain
    else:
        assert adaptive - plain >= worst
    assert [run.guard_fired for _, run in pairs] == [0] * len(pairs)
