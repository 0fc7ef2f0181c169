"""Numerical care in one place: types, the overlap norm, lines through few points.

Everything broadcasts: a Python float, an array over observations [n], over jobs [J, 1] or both, in and out alike.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[Any]
Real: TypeAlias = float | FloatArray
"""A number, or an array of them: the kernels take and return both."""

FLOOR = 1e-8
"""Smallest fitted time in seconds: stands for "nothing" where a logarithm or a ratio needs more than zero."""


def overlap(grad: Real, sync: Real, gamma: Real) -> Real:
    """Seconds of a pass whose compute (`grad`) and communication (`sync`) overlap: their γ-norm.

    γ = 1 adds them up, γ → ∞ hides the shorter behind the longer. Times of 1e-30 … 1e30 s are safe for γ ≤ 10.
    """
    return (grad**gamma + sync**gamma) ** (1.0 / gamma)


def line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Intercept and slope, both ≥ FLOOR, of a line through (x, y > 0) with least squared *relative* error.

    A single distinct x cannot tell the two apart: the intercept takes all. A slope or an intercept that would turn
    negative gives way, so that a start of a fit is always inside its bounds.
    """
    weight = 1.0 / (y * y)
    total = float(weight.sum())
    x_mean, y_mean = float((weight * x).sum()) / total, float((weight * y).sum()) / total
    spread = float((weight * (x - x_mean) ** 2).sum()) / total
    if spread <= 1e-12 * max(x_mean * x_mean, 1.0):
        return max(y_mean, FLOOR), FLOOR
    slope = max(float((weight * (x - x_mean) * (y - y_mean)).sum()) / total / spread, FLOOR)
    intercept = y_mean - slope * x_mean
    if intercept < 0.0:
        # Through the origin, keeping a tenth for the intercept: a fit that starts on a bound may never leave it.
        return max(0.1 * y_mean, FLOOR), max(0.9 * y_mean / x_mean, FLOOR)
    return max(intercept, FLOOR), slope
