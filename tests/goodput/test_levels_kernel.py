"""The kernel of the paper's model family: slopes, descent, and the same minimum as SciPy finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pollux
from pollux.core import BatchLimits, GradientStats, Shape
from pollux.goodput import PAPER, PUBLISHED, RACKS, FitOptions, Observations, Prior, best, fit
from pollux.goodput import levels_kernel as kernel
from pollux.goodput.generic_fit import minimise_generic

from .strategies import any_observations, observe, rack_thetas, typical_keys, typical_theta

LOSSES = pytest.mark.parametrize("options", [FitOptions(), PUBLISHED], ids=["robust", "root mean square"])
LOCAL_ONLY = Prior({}, ((4, 2, 1.1), (5, 3, 1.1)))
"""Nodes were never seen: their pair counts as 1.1 × the local one wherever it is smaller."""


def problem(seed: int, max_racks: int = 1) -> Observations:
    rng = np.random.default_rng(seed)
    return observe(PAPER, typical_theta(rng), typical_keys(rng, 15, max_racks), 0.1, seed)


def loss_and_gradient(model, seen, prior, options, theta):
    P = len(theta)
    gradient = np.zeros(P)
    loss = kernel.loss_and_slopes(theta, *model._loss(seen, prior, options), gradient, np.zeros((P, P)))
    return loss, gradient


def numeric_gradient(model, seen, prior, options, theta):
    found = np.zeros(len(theta))
    for p in range(len(theta)):
        step = 1e-5 * theta[p]
        ends = []
        for sign in (-1.0, 1.0):
            moved = theta.copy()
            moved[p] += sign * step
            ends.append(loss_and_gradient(model, seen, prior, options, moved)[0])
        found[p] = (ends[1] - ends[0]) / (2.0 * step)
    return found


@LOSSES
@pytest.mark.parametrize(
    ("model", "prior"),
    [(PAPER, Prior({})), (PAPER, LOCAL_ONLY), (RACKS, Prior({}))],
    ids=["paper", "paper with ties", "racks"],
)
@pytest.mark.parametrize("seed", range(6))
def test_the_slopes_are_those_of_the_loss(model, prior, options, seed):
    rng = np.random.default_rng(seed)
    seen = problem(seed, max_racks=3)
    theta = np.exp(rng.uniform(np.log(1e-3), np.log(1.0), len(model.parameters)))
    theta[-1] = rng.uniform(1.0, 9.0)
    if prior.at_least and seed % 2:  # ties bite on either side
        theta[4:6] = 1e-8
    _, gradient = loss_and_gradient(model, seen, prior, options, theta)
    # By relative change of each parameter: they differ by seven orders of magnitude.
    numeric = numeric_gradient(model, seen, prior, options, theta)
    np.testing.assert_allclose(theta * gradient, theta * numeric, rtol=1e-4, atol=1e-7)


@settings(max_examples=60)
@given(any_observations, rack_thetas, st.sampled_from([FitOptions(max_iterations=60), PUBLISHED]))
def test_minimising_never_raises_the_loss_nor_moves_what_is_held(seen, theta, options):
    start = np.array(theta)
    prior = RACKS.prior(seen)
    free = np.ones(len(start))
    free[list(prior.held)] = 0.0
    parts = RACKS._loss(seen, prior, options)
    before, _ = loss_and_gradient(RACKS, seen, prior, options, start)
    bounds = np.array(RACKS.lower), np.array(RACKS.upper)
    found, loss, _, iterations = kernel.minimise(start, free, *bounds, *parts, 60, options.tolerance)
    assert loss <= before
    assert iterations <= 60
    assert (found[free == 0.0] == start[free == 0.0]).all()
    assert loss == loss_and_gradient(RACKS, seen, prior, options, found)[0]


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_and_scipy_reach_the_same_loss(seed):
    rng = np.random.default_rng(seed)
    seen = problem(seed)
    if seed % 3 == 1:
        seen = seen.subset(seen.N == 1)  # ties bite
    options = FitOptions(tolerance=1e-10, max_iterations=2000)
    prior = PAPER.prior(seen)
    starts = np.array([PAPER.starts(seen)[0], typical_theta(rng)])
    for index, value in prior.held.items():
        starts[:, index] = value
    ours = min(PAPER.minimise(seen, prior, start, options).loss for start in starts)
    theirs = min(minimise_generic(PAPER, seen, prior, start, options)[1] for start in starts)
    assert ours <= theirs * (1 + 1e-4)


@pytest.mark.parametrize("keys", [[(1, 1, 1, 32)], [(1, 1, 1, 32), (2, 1, 1, 32), (4, 1, 1, 64)]], ids=["one", "node"])
@pytest.mark.parametrize("model", [PAPER, RACKS], ids=["paper", "racks"])
def test_at_the_same_parameters_the_kernel_and_scipy_see_the_same_loss(model, keys):
    seen = observe(PAPER, typical_theta(np.random.default_rng(1)), keys, 0.1)
    options = FitOptions(max_iterations=1000, tolerance=1e-12)
    prior = model.prior(seen)
    start = np.clip(model.starts(seen)[0], model.lower, model.upper)
    for index, value in prior.held.items():
        start[index] = value
    theta, loss, _, _ = minimise_generic(model, seen, prior, start, options)
    assert loss_and_gradient(model, seen, prior, options, theta)[0] == pytest.approx(loss, rel=1e-6)


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None  # as if it were not installed
sys.path[:0] = [{src!r}, {root!r}]
import json
from pollux.goodput.levels_kernel import minimise
assert not hasattr(minimise, "py_func")
from tests.goodput.test_levels_kernel import numbers
print(json.dumps(numbers()))
"""


def numbers() -> list[list[float]]:
    """Fits and a best (m, s) in figures: easy problems, and absurd ones whose powers overflow."""
    absurd = Observations.from_rows([(1, 1, 1, 1, 1e5, 1e-6), (8, 2, 1, 9, 1e-6, 1e5), (512, 1, 1, 5, 1.0, 1e-6)])
    found = []
    for seen in (problem(1), problem(2).subset(np.arange(1)), absurd):
        for options in (FitOptions(max_iterations=40), FitOptions(delta=0.0, max_iterations=40)):
            result = fit(seen, options=options)
            found.append([*result.theta, result.loss])
    box = BatchLimits(128, 4096, 32, 1024)
    found.append(list(best(PAPER, found[0][:7], Shape(8, 2), GradientStats(1.0, 30.0), box)))
    return found


def test_without_numba_plain_python_gives_the_same_numbers():
    root = Path(__file__).resolve().parents[2]
    script = WITHOUT_NUMBA.format(src=str(Path(pollux.__file__).parents[1]), root=str(root))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for plain, compiled in zip(json.loads(done.stdout), numbers(), strict=True):
        np.testing.assert_allclose(plain, compiled, rtol=1e-6)


@pytest.mark.parametrize("theta", [(1e-8,) * 6 + (10.0,), (0.1,) * 6 + (1.0,), (1e6, 1e-8, 1e-8, 1.0, 1e6, 1.0, 10.0)])
def test_the_plain_functions_give_the_numbers_of_the_compiled_ones(theta):
    plain = getattr(kernel.loss_and_slopes, "py_func", kernel.loss_and_slopes)
    cheapest = getattr(kernel.cheapest, "py_func", kernel.cheapest)
    sync = getattr(kernel.sync_seconds, "py_func", kernel.sync_seconds)
    theta, seen = np.array(theta), problem(3)
    parts = PAPER._loss(seen, LOCAL_ONLY, FitOptions())
    gradient, curvature = np.zeros((2, 7)), np.zeros((2, 7, 7))
    one = kernel.loss_and_slopes(theta, *parts, gradient[0], curvature[0])
    assert plain(theta, *parts, gradient[1], curvature[1]) == pytest.approx(one, rel=1e-12)
    np.testing.assert_allclose(gradient[1], gradient[0], rtol=1e-9)
    np.testing.assert_allclose(curvature[1], curvature[0], rtol=1e-9)
    m, s, share = np.array([8.0, 16.0, 16.0]), np.array([0.0, 0.0, 1.0]), np.array([1.0, 0.5, 0.25])
    for K, level in ((1, 0), (2, 0), (8, 1)):
        assert sync(theta, K, level) == kernel.sync_seconds(theta, K, level)
        assert cheapest(theta, K, level, m, s, share, 0.3, 0.7) == pytest.approx(
            kernel.cheapest(theta, K, level, m, s, share, 0.3, 0.7), rel=1e-12
        )
