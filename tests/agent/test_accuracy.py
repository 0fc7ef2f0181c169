"""Adaptive training is as good as plain training: the examples with one seed, shorter than in `make bench`."""

from __future__ import annotations

import statistics

import pytest
from benchmarks.training.examples import pairs

SEEDS = {"classifier": (1,), "language_model": (1,), "recommender": (0, 1)}
"""One each; the recommender's hit rate scatters by a third of a point from run to run, so its bound is for two."""

SHORT = {
    "classifier": ["--epochs", "3"],
    "language_model": ["--epochs", "2"],
    "recommender": ["--epochs", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "worst"),
    [("classifier", -0.5), ("language_model", 1.005), ("recommender", -0.5)],
    ids=["accuracy within half a point", "validation loss within half a percent", "hit rate within half a point"],
)
def test_adaptive_training_ends_as_well_as_plain_training_and_the_guard_stays_silent(name: str, worst: float) -> None:
    runs = pairs(name, SEEDS[name], SHORT[name])
    plain, adaptive = (statistics.mean(run.metric for run in side) for side in zip(*runs, strict=True))
    if name == "language_model":
        assert adaptive <= worst * plain
    else:
        assert adaptive - plain >= worst
    assert [run.guard_fired for _, run in runs] == [0] * len(runs)
