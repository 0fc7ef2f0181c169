"""The published procedure, written anew from its formulas (`docs/deviations.md` names where ours differs).

Fit: root mean square of log errors of both times plus two penalties, one start, L-BFGS-B inside bounds, gradients by
`autograd`; what the observations cannot tell is frozen. Best (m, s): 50 geometric batch sizes, evaluated in NumPy.
Parameters are in the order of `ThetaSys`. A baseline: correct and plainly written, not tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd import value_and_grad
from scipy.optimize import minimize

TINY = 1e-8
START = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)
ALPHA_GRAD, ALPHA_LOCAL, BETA_LOCAL, ALPHA_NODE, BETA_NODE = 0, 2, 3, 4, 5
SAMPLES = 50


class Points(NamedTuple):
    """Parallel arrays of what was measured."""

    N: Any
    K: Any
    m: Any
    t_grad: Any
    t_iter: Any


class Limits(NamedTuple):
    """M0, M_max, and the per-GPU range."""

    M0: int
    M_max: int
    m_min: int
    m_max: int


def t_grad(theta: Any, m: Any) -> Any:
    return theta[0] + theta[1] * m


def t_sync(theta: Any, N: Any, K: Any, xp: Any = np) -> Any:
    """Tiny rather than zero for one GPU, so that powers of it can be differentiated."""
    more = xp.maximum(K - 2.0, TINY)
    local = theta[2] + theta[3] * more
    node = theta[4] + theta[5] * more
    return xp.where(K > 1, xp.where(N > 1, node, local), TINY)


def t_iter(theta: Any, N: Any, K: Any, m: Any, s: Any = 0, xp: Any = np) -> Any:
    grad, sync, gamma = t_grad(theta, m), t_sync(theta, N, K, xp), theta[6]
    return s * grad + (grad**gamma + sync**gamma) ** (1.0 / gamma)


def loss(theta: Any, seen: Points, xp: Any = np) -> Any:
    """RMSE of ln T_grad, plus that of ln T_iter, plus the penalties on overlap and on poor scaling."""
    grad_error = xp.log(t_grad(theta, seen.m)) - xp.log(seen.t_grad)
    iter_error = xp.log(t_iter(theta, seen.N, seen.K, seen.m, 0, xp)) - xp.log(seen.t_iter)
    ratios = (theta[5] / theta[4]) ** 2 + (theta[3] / theta[2]) ** 2
    fit_error = xp.sqrt(xp.mean(grad_error**2)) + xp.sqrt(xp.mean(iter_error**2))
    return fit_error + 1e-3 * (theta[6] - 1.0) ** 2 + 1e-2 * ratios


def frozen(seen: Points) -> dict[int, float]:
    """{parameter: value} of what the observations cannot tell."""
    held: dict[int, float] = {}
    if len(set(seen.m.tolist())) == 1:
        held[ALPHA_GRAD] = float(seen.t_grad.mean()) / 2.0
    if not (seen.N > 1).any():
        held[ALPHA_NODE] = held[BETA_NODE] = TINY
    if not ((seen.N == 1) & (seen.K > 1)).any():
        held[ALPHA_LOCAL] = held[BETA_LOCAL] = TINY
    if not (seen.K > 2).any():
        held[BETA_LOCAL] = held[BETA_NODE] = TINY
    return held


def fit(seen: Points) -> np.ndarray:
    """Fitted parameters [7]. There is no warm start: a refit is a fit."""
    start = np.array(START)
    bounds = [(TINY, None)] * 6 + [(1.0, 10.0)]
    for index, value in frozen(seen).items():
        start[index] = value
        bounds[index] = (value, value)
    objective = value_and_grad(lambda theta: loss(theta, seen, anp))
    theta = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    if not (seen.N > 1).any():
        theta[ALPHA_NODE] = max(theta[ALPHA_NODE], 1.1 * theta[ALPHA_LOCAL])
        theta[BETA_NODE] = max(theta[BETA_NODE], 1.1 * theta[BETA_LOCAL])
    return np.array(theta)


def best(theta: Sequence[float], N: int, K: int, sqr: float, var: float, limits: Limits) -> tuple[int, int, float]:
    """(m, s, goodput) of one placement; zeros if nothing fits."""
    m, s, goodput = best_many(theta, np.array([N]), np.array([K]), sqr, var, limits)
    return int(m[0]), int(s[0]), float(goodput[0])


def best_many(theta: Sequence[float], N: Any, K: Any, sqr: float, var: float, limits: Limits) -> tuple[Any, Any, Any]:
    """`best` of many placements [S] in one NumPy call, with accumulation."""
    M0, M_max, m_min, m_max = limits
    N, K = N[:, None], K[:, None]
    lowest = np.maximum(M0, m_min * K)
    feasible = lowest <= M_max
    batch = np.geomspace(np.minimum(lowest, M_max)[:, 0], M_max, SAMPLES, axis=1)  # [S, 50]
    share = batch / K
    s = np.ceil(share / m_max - TINY) - 1.0
    s = np.where((K == 1) & (share > M0 + TINY), np.maximum(s, 1.0), s)
    m = np.ceil(share / (s + 1.0) - TINY)
    total = K * m * (s + 1.0)
    scale = total / M0
    efficiency = (var + sqr) / (var / scale + sqr) / scale
    goodput = total / t_iter(theta, N, K, m, s) * efficiency
    goodput = np.where(feasible & (m >= m_min) & (m <= m_max), goodput, 0.0)
    rows, index = np.arange(len(batch)), goodput.argmax(axis=1)
    value, passes = goodput[rows, index], s[rows, index]
    m_best = np.minimum(m[rows, index], M_max // (K[:, 0] * (passes + 1.0)))
    fits = value > 0.0
    return np.where(fits, m_best, 0.0), np.where(fits, passes, 0.0), value


def table(
    theta: Sequence[float], shapes: Sequence[tuple[int, int]], sqr: float, var: float, limits: Limits
) -> list[tuple[int, int, float]]:
    """`best` of each (N, K), one after the other, each distinct pair once: how the published search asks for them."""
    known: dict[tuple[int, int], tuple[int, int, float]] = {}
    for N, K in shapes:
        if (N, K) not in known:
            known[N, K] = best(theta, N, K, sqr, var, limits)
    return [known[shape] for shape in shapes]
