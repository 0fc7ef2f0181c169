"""The artifact's way to fit, kept as a baseline to measure against: its loss, its priors, one start, L-BFGS-B.

It can stop early and end far from the optimum of its own loss; `fit(…, options=PUBLISHED)` minimises that loss to the
end.
"""

from __future__ import annotations

import numpy as np

from pollux.goodput.fit import Fit, report
from pollux.goodput.fit_options import PUBLISHED
from pollux.goodput.levels import PAPER, ThetaSys
from pollux.goodput.numerics import FLOOR, FloatArray
from pollux.goodput.observations import Observations
from pollux.goodput.throughput import Minimum, Prior

START = ThetaSys(0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)


def published_procedure(seen: Observations) -> Fit:
    """Fit the paper's model as the published code does."""
    from scipy.optimize import minimize  # slow to import, and only comparisons need it

    prior = _published_prior(seen)
    start, lower, upper = np.array(START), np.array(PAPER.lower), np.array(PAPER.upper)
    for index, value in prior.held.items():
        start[index] = lower[index] = upper[index] = value

    def value_and_slopes(theta: FloatArray) -> tuple[float, FloatArray]:
        return PAPER.loss_and_slopes(seen, theta, PUBLISHED)

    found = minimize(value_and_slopes, start, jac=True, method="L-BFGS-B", bounds=list(zip(lower, upper, strict=True)))
    return report(seen, PAPER, prior, Minimum(found.x, float(found.fun), bool(found.success), int(found.nit)))


def _published_prior(seen: Observations) -> Prior:
    """What the artifact freezes; unlike ours, K > 2 at any level frees the growth of all."""
    alpha_grad, _, alpha_local, beta_local, alpha_node, beta_node, _ = range(len(START))
    held: dict[int, float] = {}
    at_least: tuple[tuple[int, int, float], ...] = ()
    if (seen.m == seen.m[0]).all():
        held[alpha_grad] = float(seen.t_grad.mean()) / 2.0
    if (seen.N <= 1).all():
        held |= {alpha_node: FLOOR, beta_node: FLOOR}
        at_least = ((alpha_node, alpha_local, 1.1), (beta_node, beta_local, 1.1))
    if not ((seen.N == 1) & (seen.K >= 2)).any():
        held |= {alpha_local: FLOOR, beta_local: FLOOR}
    if (seen.K <= 2).all():
        held |= {beta_local: FLOOR, beta_node: FLOOR}
    return Prior(held, at_least)
