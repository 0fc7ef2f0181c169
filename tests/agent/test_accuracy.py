"""Adaptive training is as good as plain training: the examples with one seed, shorter than in `make bench`."""

from __future__ import annotations

import pytest
from benchmarks.training.examples import pairs

SEED = 1
SHORT = {
    "classifier": ["--epochs", "4"],
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
    ((plain, adaptive),) = pairs(name, (SEED,), SHORT[name])
    if name == "language_model":
        assert adaptive.metric <= worst * plain.metric
    else:
        assert adaptive.metric - plain.metric >= worst
    assert adaptive.guard_fired == 0
