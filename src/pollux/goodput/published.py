"""The artifact's way to fit (`policies` that compare with the paper need it): one start, L-BFGS-B, its own loss.

Kept apart from `fit` because it is a baseline, not an option: it can stop early and end far from the optimum of its
own loss. `fit(…, options=PUBLISHED)` minimises the same loss to the end.
"""

from __future__ import annotations

import numpy as np

from pollux.goodput.fit import Fit, report
from pollux.goodput.fit_options import PUBLISHED
from pollux.goodput.levels import PAPER
from pollux.goodput.numerics import FloatArray
from pollux.goodput.observations import Observations
from pollux.goodput.throughput import Minimum, Prior

START = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)


def published_procedure(seen: Observations) -> Fit:
    """Fit the paper's model as the published code does."""
    from scipy.optimize import minimize

    prior = PAPER.prior(seen)
    gamma = len(START) - 1
    held = {index: value for index, value in prior.held.items() if index != gamma}
    start, lower, upper = np.array(START), np.array(PAPER.lower), np.array(PAPER.upper)
    for index, value in held.items():
        start[index] = lower[index] = upper[index] = value

    def value_and_slopes(theta: FloatArray) -> tuple[float, FloatArray]:
        return PAPER.loss_and_slopes(seen, theta, PUBLISHED)

    found = minimize(value_and_slopes, start, jac=True, method="L-BFGS-B", bounds=list(zip(lower, upper, strict=True)))
    prior = Prior(held, prior.at_least)
    return report(seen, PAPER, prior, Minimum(found.x, float(found.fun), bool(found.success), int(found.nit)))
