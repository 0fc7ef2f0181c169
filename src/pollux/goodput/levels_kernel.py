"""The hot loops of the paper's model family: loss with exact slopes, the fit, and iteration times.

Machine code where numba is installed (see `compiled`). Parameters are α, β of compute, α, β of each level, γ. The fit
is a projected Levenberg–Marquardt with re-weighting: each iteration solves a weighted linear problem whose gradient is
the loss's, steps, clips to the bounds, and keeps the step only if the loss fell. So the loss never rises and any start
is safe. `generic_fit` minimises the same loss with SciPy and is the specification that the tests compare with.

Loops over arrays are written out: sums of whole arrays bring NumPy's rules of broadcasting with them, and the texts of
its errors, which more than double the time to load the machine code.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray

FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-7, 1e8
EASE, TIGHTEN = 0.2, 8.0
"""How damping follows success and failure of a step: common values, and no fit here is sensitive to them."""
NO_ERROR = 1e-9
"""A root mean square below this is a perfect fit; its slope is not defined at zero."""


@lean
def sync_seconds(theta: FloatArray, K: float, level: int) -> float:
    """T_sync without overlap: zero for one GPU."""
    if K <= 1.0:
        return 0.0
    seconds: float = theta[2 + 2 * level] + theta[3 + 2 * level] * (K - 2.0)
    return seconds


@compiled
def cheapest(
    theta: FloatArray, K: float, level: int, m: FloatArray, s: FloatArray, factor: FloatArray, a: float, b: float
) -> tuple[int, float]:
    """Index and cost of the candidate [C] with the lowest T_iter·(a + b·factor); the first of equals."""
    gamma = theta[-1]
    sync_power = sync_seconds(theta, K, level) ** gamma
    lowest, index = math.inf, 0
    for i in range(len(m)):
        grad = theta[0] + theta[1] * m[i]
        last = grad if sync_power == 0.0 else (grad**gamma + sync_power) ** (1.0 / gamma)
        cost = (s[i] * grad + last) * (a + b * factor[i])
        if cost < lowest:
            lowest, index = cost, i
    return index, lowest


@compiled
def cheapest_of_classes(
    theta: FloatArray,
    share: FloatArray,
    K: FloatArray,
    level: FloatArray,
    first: FloatArray,
    length: FloatArray,
    m: FloatArray,
    s: FloatArray,
    factor: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """`cheapest` for jobs [J, P] with noise shares [J] in each class laid end to end: cost and line [J, C]."""
    jobs, classes = len(theta), len(first)
    cost = np.empty((jobs, classes))
    line = np.empty((jobs, classes), dtype=np.int64)
    for j in range(jobs):
        for c in range(classes):
            begin, end = first[c], first[c] + length[c]
            index, cost[j, c] = cheapest(
                theta[j],
                K[begin],
                int(level[begin]),
                m[begin:end],
                s[begin:end],
                factor[begin:end],
                1.0 - share[j],
                share[j],
            )
            line[j, c] = begin + index
    return cost, line


@compiled
def iteration_seconds(
    theta: FloatArray,
    low: FloatArray,
    high: FloatArray,
    level: FloatArray,
    first: FloatArray,
    size: FloatArray,
    s: FloatArray,
    sizes: FloatArray,
    seconds: FloatArray,
) -> None:
    """T_iter of every candidate of low[c] … high[c] GPUs, class by class, written into `seconds` [J, Σ candidates].

    Powers take nearly all of the time, and batch sizes recur: each power is taken once.

    theta  [J, P]
    level  [C]           of each class
    first  [K + 1]       where the candidates of low[0], low[0] + 1 … GPUs begin in the next two
    size   [candidates]  index of m in `sizes` [U]
    s      [candidates]
    """
    grad, power, last = np.empty(len(sizes)), np.empty(len(sizes)), np.empty(len(sizes))
    cell_of = np.zeros(len(sizes), dtype=np.int64)  # that `last` is for
    cell = 0
    for j in range(len(theta)):
        gamma, root = theta[j, -1], 1.0 / theta[j, -1]
        before, count = cell, 0  # of earlier jobs
        for u in range(len(sizes)):
            grad[u] = theta[j, 0] + theta[j, 1] * sizes[u]
        for c in range(len(low)):
            for K in range(low[c], high[c] + 1):
                sync = sync_seconds(theta[j], float(K), int(level[c]))
                sync_power = sync**gamma
                cell += 1
                for i in range(first[K - low[0]], first[K - low[0] + 1]):
                    u = size[i]
                    if sync_power == 0.0:
                        seconds[j, count] = s[i] * grad[u] + grad[u]
                    elif gamma == 1.0:
                        seconds[j, count] = s[i] * grad[u] + (grad[u] + sync)
                    else:
                        if cell_of[u] != cell:
                            if cell_of[u] <= before:
                                power[u] = grad[u] ** gamma
                            last[u] = (power[u] + sync_power) ** root
                            cell_of[u] = cell
                        seconds[j, count] = s[i] * grad[u] + last[u]
                    count += 1


@compiled
def loss_and_slopes(
    theta: FloatArray,
    rows: FloatArray,
    half_weight: FloatArray,
    delta: float,
    penalty: FloatArray,
    ties: FloatArray,
    gradient: FloatArray,
    curvature: FloatArray,
) -> float:
    """Loss at theta; its gradient [P] and Gauss–Newton curvature [P, P] are written into the last two arguments.

    rows         [n, 5]  K, level, m, ln measured T_grad, ln measured T_iter
    half_weight  [2]     of the errors of T_grad and of T_iter
    delta                > 0: mean of √(r² + δ²) − δ;  0: root of the mean of r²
    penalty      [2]     weights of (γ − 1)² and of each (β/α)²
    ties         [T, 3]  parameter, other, factor: counts as factor × the other where it is smaller (unseen levels)
    """
    P, n = len(theta), len(rows)
    for p in range(P):
        gradient[p] = 0.0
        for q in range(P):
            curvature[p, q] = 0.0
    slope = np.zeros((2, 5))  # by α_grad, β_grad, α_level, β_level, γ
    half_gradient = np.zeros((2, P))
    half_curvature = np.zeros((2, P, P))
    half_error = np.zeros(2)
    column = np.zeros(5, dtype=np.int64)
    column[1], column[4] = 1, P - 1
    gamma = theta[P - 1]
    residual = np.zeros(2)
    for i in range(n):
        K, level, m = rows[i, 0], int(rows[i, 1]), rows[i, 2]
        column[2], column[3] = 2 + 2 * level, 3 + 2 * level
        grad = theta[0] + theta[1] * m
        log_grad = math.log(grad)
        slope[0, 0], slope[0, 1] = 1.0 / grad, m / grad
        residual[0] = log_grad - rows[i, 3]
        slope[1, 0], slope[1, 1] = slope[0, 0], slope[0, 1]
        residual[1] = log_grad - rows[i, 4]
        sync = sync_seconds(theta, K, level)
        if sync > 0.0:
            log_sync = math.log(sync)
            # shares of the two powers, from their ratio: nothing overflows whatever the times
            sync_share = 1.0 / (1.0 + math.exp(gamma * (log_grad - log_sync)))
            grad_share = 1.0 - sync_share
            log_step = max(log_grad, log_sync) + math.log1p(math.exp(-gamma * abs(log_grad - log_sync))) / gamma
            residual[1] = log_step - rows[i, 4]
            slope[1, 0], slope[1, 1] = grad_share / grad, grad_share * m / grad
            slope[1, 2], slope[1, 3] = sync_share / sync, sync_share * (K - 2.0) / sync
            slope[1, 4] = (grad_share * log_grad + sync_share * log_sync - log_step) / gamma
        for half in range(2):
            r = residual[half]
            size = math.sqrt(r * r + delta * delta)
            half_error[half] += size - delta if delta > 0.0 else r * r
            weight = 1.0 / size if delta > 0.0 else 1.0
            entries = 2 if half == 0 or sync <= 0.0 else 5
            for p in range(entries):
                weighted = weight * slope[half, p]
                half_gradient[half, column[p]] += weighted * r
                for q in range(entries):
                    half_curvature[half, column[p], column[q]] += weighted * slope[half, q]
    value = 0.0
    for half in range(2):
        if delta > 0.0:
            scale = half_weight[half] / n
            value += scale * half_error[half]
        else:
            error = math.sqrt(half_error[half] / n)
            scale = half_weight[half] / (n * max(error, NO_ERROR))
            value += half_weight[half] * error
        for p in range(P):
            gradient[p] += scale * half_gradient[half, p]
            for q in range(P):
                curvature[p, q] += scale * half_curvature[half, p, q]
    return float(value + _penalties(theta, penalty, ties, gradient, curvature))


@compiled
def _penalties(
    theta: FloatArray, penalty: FloatArray, ties: FloatArray, gradient: FloatArray, curvature: FloatArray
) -> float:
    """Overlap must be earned (γ → 1) and scaling is believed until disproved (β/α → 0)."""
    P = len(theta)
    value = penalty[0] * (theta[P - 1] - 1.0) ** 2
    gradient[P - 1] += 2.0 * penalty[0] * (theta[P - 1] - 1.0)
    curvature[P - 1, P - 1] += 2.0 * penalty[0]
    source_of = np.arange(P)
    factor_of = np.ones(P)
    for t in range(len(ties)):
        index, other = int(ties[t, 0]), int(ties[t, 1])
        factor = ties[t, 2] * factor_of[other]
        if factor * theta[source_of[other]] > factor_of[index] * theta[source_of[index]]:
            source_of[index], factor_of[index] = source_of[other], factor
    for alpha in range(2, P - 1, 2):
        source, beta_source = source_of[alpha], source_of[alpha + 1]
        factor, beta_factor = factor_of[alpha], factor_of[alpha + 1]
        top, bottom = beta_factor * theta[beta_source], factor * theta[source]
        ratio = top / bottom
        by_alpha, by_beta = -ratio / theta[source], beta_factor / bottom
        weight = penalty[1]
        value += weight * ratio * ratio
        gradient[source] += 2.0 * weight * ratio * by_alpha
        gradient[beta_source] += 2.0 * weight * ratio * by_beta
        curvature[source, source] += 2.0 * weight * by_alpha * by_alpha
        curvature[beta_source, beta_source] += 2.0 * weight * by_beta * by_beta
        curvature[source, beta_source] += 2.0 * weight * by_alpha * by_beta
        curvature[beta_source, source] += 2.0 * weight * by_alpha * by_beta
    return float(value)


@compiled
def _damped_step(
    gradient: FloatArray, curvature: FloatArray, active: FloatArray, damping: float, step: FloatArray
) -> None:
    """Solve (H + damping·diag H)·step = −gradient over the active parameters; the others stay.

    Scaled by diag H first: parameters differ by seven orders of magnitude. Cholesky, by hand: the systems are tiny.
    """
    P = len(gradient)
    scale = np.zeros(P)
    for p in range(P):
        if active[p] > 0.0:
            scale[p] = 1.0 / math.sqrt(max(curvature[p, p], 1e-100))
    lower = np.zeros((P, P))
    for p in range(P):
        for q in range(p + 1):
            total = curvature[p, q] * scale[p] * scale[q]
            if p == q:
                total += damping + 1e-12 if active[p] > 0.0 else 1.0
            for k in range(q):
                total -= lower[p, k] * lower[q, k]
            lower[p, q] = math.sqrt(max(total, 1e-30)) if p == q else total / lower[q, q]
    for p in range(P):
        total = -gradient[p] * scale[p]
        for k in range(p):
            total -= lower[p, k] * step[k]
        step[p] = total / lower[p, p]
    for p in range(P - 1, -1, -1):
        total = step[p]
        for k in range(p + 1, P):
            total -= lower[k, p] * step[k]
        step[p] = total / lower[p, p]
    for p in range(P):
        step[p] *= scale[p]


@compiled
def minimise(
    theta: FloatArray,
    free: FloatArray,
    lower: FloatArray,
    upper: FloatArray,
    rows: FloatArray,
    half_weight: FloatArray,
    delta: float,
    penalty: FloatArray,
    ties: FloatArray,
    max_iterations: int,
    tolerance: float,
) -> tuple[FloatArray, float, bool, int]:
    """Parameters of the lowest loss reached from theta (moved inside the bounds), that loss, whether it settled, and
    the iterations used.

    `free` [P] is 1 for parameters to fit, 0 for those to keep. Settled: no step promises a relative gain above
    `tolerance` any more.
    """
    P = len(theta)
    here, gradient, curvature = np.zeros(P), np.zeros(P), np.zeros((P, P))
    tried_gradient, tried_curvature = np.zeros(P), np.zeros((P, P))
    active, step, tried = np.zeros(P), np.zeros(P), np.zeros(P)
    for p in range(P):
        here[p] = min(max(theta[p], lower[p]), upper[p])
    value = loss_and_slopes(here, rows, half_weight, delta, penalty, ties, gradient, curvature)
    damping = FIRST_DAMPING
    for iteration in range(1, max_iterations + 1):
        for p in range(P):
            at_wall = (here[p] <= lower[p] and gradient[p] > 0.0) or (here[p] >= upper[p] and gradient[p] < 0.0)
            active[p] = 0.0 if at_wall else free[p]
        _damped_step(gradient, curvature, active, damping, step)
        promised = 0.0
        for p in range(P):
            promised -= gradient[p] * step[p]
            tried[p] = min(max(here[p] + step[p], lower[p]), upper[p])
        tried_value = loss_and_slopes(tried, rows, half_weight, delta, penalty, ties, tried_gradient, tried_curvature)
        settled = promised * (1.0 + damping) <= tolerance * (value + NO_ERROR)
        if tried_value < value:
            here, tried = tried, here
            gradient, tried_gradient = tried_gradient, gradient
            curvature, tried_curvature = tried_curvature, curvature
            value = tried_value
            damping = max(damping * EASE, LEAST_DAMPING)
        else:
            settled = settled or damping > MOST_DAMPING
            damping *= TIGHTEN
        if settled:
            return here, value, math.isfinite(value), iteration
    return here, value, False, max_iterations
