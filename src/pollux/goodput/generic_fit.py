"""Fitting any throughput model, with SciPy: bounded robust least squares, slopes by finite differences.

Much slower than `levels_kernel`, and in need of nothing but `t_grad` and `t_step`. On the
built-in models it is the specification of what the kernel computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pollux.errors import InvalidModel
from pollux.goodput.numerics import FloatArray
from pollux.goodput.observations import Observations

if TYPE_CHECKING:
    from pollux.goodput.fit_options import FitOptions
    from pollux.goodput.throughput import Prior, ThroughputModel


def minimise_generic(
    model: ThroughputModel, seen: Observations, prior: Prior, start: FloatArray, options: FitOptions
) -> tuple[FloatArray, float, bool, int]:
    """(theta, loss, converged, evaluations) of the robust loss from one start, over the parameters not held."""
    if options.delta == 0.0:
        raise InvalidModel("FitOptions.delta", 0.0, f"not defined for the model {model.name!r}", "Give delta > 0")
    from scipy.optimize import least_squares  # 0.3 s to import, and only the user's own models need it

    n, delta = len(seen), options.delta
    level = model.level(seen.N, seen.R)
    measured = np.log(np.concatenate([seen.t_grad, seen.t_iter]))
    scale = 2.0 * delta * np.repeat([options.grad_weight / n, 1.0 / n], n)
    penalty = 2.0 * options.penalty_weight / (n if options.penalty_fades else 1.0)
    free = np.array([index for index in range(len(start)) if index not in prior.held], dtype=int)
    lower, upper = np.array(model.lower)[free], np.array(model.upper)[free]

    def whole(part: FloatArray) -> FloatArray:
        theta = start.copy()
        theta[free] = part
        return theta

    def residuals(part: FloatArray) -> FloatArray:
        theta = whole(part)
        grad = np.broadcast_to(model.t_grad(theta, seen.m), n)
        step = np.broadcast_to(model.t_step(theta, seen.K, level, seen.m), n)
        errors = np.log(np.concatenate([grad, step])) - measured
        return np.concatenate([errors / delta, model.penalties(prior.settle(theta))])

    def loss(squares: FloatArray) -> FloatArray:
        """Value and two derivatives by the squared residual: pseudo-Huber for errors, linear for penalties."""
        root = np.sqrt(1.0 + squares[: 2 * n])
        errors = np.array([scale * (root - 1.0), 0.5 * scale / root, -0.25 * scale / root**3])
        rest = squares[2 * n :]
        return np.hstack([errors, [penalty * rest, np.full_like(rest, penalty), np.zeros_like(rest)]])

    found = least_squares(
        residuals,
        np.clip(start[free], lower, upper),
        bounds=(lower, upper),
        loss=loss,
        x_scale="jac",
        ftol=options.tolerance,
        xtol=1e-12,
        gtol=1e-12,
        max_nfev=options.max_iterations,
    )
    return whole(found.x), float(found.cost), bool(found.status > 0), int(found.nfev)
