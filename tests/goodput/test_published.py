"""What the published code computes on its own data (reference/values.json): every fit and every best (m, s)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pollux.core import BatchLimits, GradientStats, Shape
from pollux.goodput import PAPER, PUBLISHED, PUBLISHED_BATCH, Observations, ThetaSys, best, fit

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def values(pollux_data):
    return json.loads((pollux_data / "pollux-osdi21/reference/values.json").read_text(encoding="utf-8"))


def theta_of(params) -> ThetaSys:
    """From the file's order α_c β_c α_n β_n α_r β_r γ, where n is between nodes and r within one."""
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = params
    return ThetaSys(alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n, gamma)


def observations_of(case) -> Observations:
    N, K, m, accum, optim = np.array(case["points"]).T
    return Observations.from_rows(zip(K, N, np.ones_like(K), m, accum, optim, strict=True))


def test_the_file_holds_24_fits_and_48_configurations(values):
    assert (len(values["fit"]), len(values["goodput_optimize"])) == (24, 48)


@pytest.mark.parametrize("index", range(24))
def test_our_fit_reaches_a_loss_no_higher_than_the_published_parameters(values, index):
    case = values["fit"][index]
    seen, published = observations_of(case), theta_of(case["params"])
    reference = PAPER.loss(seen, published, PUBLISHED)
    assert reference == pytest.approx(case["objective_at_returned_params"], abs=1e-6)
    assert PAPER.loss(seen, fit(seen, options=PUBLISHED).theta, PUBLISHED) <= reference


@pytest.mark.parametrize("index", range(48))
def test_our_best_configuration_is_the_published_one(values, index):
    case = values["goodput_optimize"][index]
    of_app = values["constants"][case["app"]]
    box = BatchLimits(
        *(of_app[name] for name in ("init_batch_size", "max_batch_size", "min_local_bsz", "max_local_bsz"))
    )
    shape, gradient = Shape(case["replicas"], case["nodes"]), GradientStats(*case["grad_params"])
    theta = theta_of(case["perf_params"])
    found = best(PAPER, theta, shape, gradient, box, PUBLISHED_BATCH)
    assert found[:2] == (case["atomic_bsz"], case["accum_steps"])
    assert found.goodput == pytest.approx(case["goodput"], rel=1e-6)
    assert best(PAPER, theta, shape, gradient, box).goodput >= case["goodput"] * 0.999  # our grid is no worse
