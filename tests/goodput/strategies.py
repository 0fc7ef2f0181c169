"""Hypothesis strategies for the goodput model, and the slow twins that its fast parts are compared with."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from pollux.core import BatchLimits, GradientStats, Shape
from pollux.goodput import BatchOptions, LevelsModel, Observations, ThetaRacks, ThetaSys, t_iter

gammas = st.sampled_from([1.0, 1.5, 2.0, 4.0, 10.0])


def log_uniform(low: float, high: float):
    """Floats whose logarithm is spread evenly: as many between 1e-6 and 1e-5 as between 1 and 10."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


def log_integers(low: int, high: int):
    return log_uniform(low, high).map(lambda value: min(high, max(low, round(value))))


seconds = st.just(1e-8) | log_uniform(1e-5, 30.0)
per_example = st.just(1e-8) | log_uniform(1e-7, 1.0)
thetas = st.builds(ThetaSys, seconds, per_example, seconds, seconds, seconds, seconds, gammas)
rack_thetas = st.builds(ThetaRacks, seconds, per_example, *[seconds] * 6, gammas)


@st.composite
def shapes(draw, max_gpus=64, max_racks=1):
    num_gpus = draw(log_integers(1, max_gpus))
    num_nodes = draw(st.integers(1, min(num_gpus, 16)))
    return Shape(num_gpus, num_nodes, draw(st.integers(1, min(num_nodes, max_racks))))


@st.composite
def limits(draw):
    initial = draw(log_integers(1, 1000))
    smallest = draw(log_integers(1, 2000))
    return BatchLimits(
        initial, draw(log_integers(initial, 150 * initial)), smallest, draw(log_integers(smallest, 2000))
    )


NO_NOISE, ONLY_NOISE = GradientStats(1.0, 0.0), GradientStats(0.0, 1.0)
gradients = st.sampled_from([NO_NOISE, ONLY_NOISE]) | st.builds(
    GradientStats, log_uniform(1e-6, 1e12), log_uniform(1e-6, 1e12)
)
batch_options = st.builds(BatchOptions, accumulation=st.booleans(), single_gpu_accumulation=st.booleans()) | st.builds(
    BatchOptions, accumulation=st.booleans(), fixed_batch=st.just(True)
)


def every_config(K: int, limits: BatchLimits, options: BatchOptions) -> tuple[np.ndarray, np.ndarray]:
    """All (m, s) that the limits and options allow, without any thought of which is good: the twin of `candidates`."""
    m = np.arange(limits.min_per_gpu_batch_size, limits.max_per_gpu_batch_size + 1)
    fewest = np.maximum(1, -(-limits.initial_batch_size // (K * m)))
    most = limits.max_batch_size // (K * m)
    if not options.accumulation:
        most = np.minimum(most, 1)
    count = np.maximum(most - fewest + 1, 0)
    first = np.concatenate([[0], np.cumsum(count)[:-1]])
    m, passes = np.repeat(m, count), np.arange(count.sum()) - np.repeat(first - fewest, count)
    allowed = np.ones(len(m), dtype=bool)
    if K == 1 and options.single_gpu_accumulation:
        allowed &= (passes > 1) | (m <= limits.initial_batch_size)
    if options.fixed_batch and allowed.any():
        allowed &= m * passes == (m * passes)[allowed].min()
    return m[allowed], passes[allowed] - 1


def goodput_by_hand(theta: ThetaSys, shape: Shape, gradient: GradientStats, limits: BatchLimits, m, s):
    """Examples per second × efficiency, from the paper's formulas alone."""
    K, M0 = shape.num_gpus, limits.initial_batch_size
    per_m, place = np.unique(np.asarray(m, dtype=float), return_inverse=True)
    step = t_iter(theta, K, shape.num_nodes, per_m)[place]
    M = K * m * (s + 1.0)
    rate = M / (s * (theta.alpha_grad + theta.beta_grad * m) + step)
    return rate * (gradient.var + gradient.sqr) / (gradient.var * M0 / M + gradient.sqr) * M0 / M


# What a job measured.

rack_shapes = shapes(max_gpus=512, max_racks=4)
any_time = log_uniform(1e-6, 1e5)
observation_rows = st.builds(
    lambda shape, m, grad, step: (shape.num_gpus, shape.num_nodes, shape.num_racks, m, grad, step),
    rack_shapes,
    log_integers(1, 10**5),
    any_time,
    any_time,
)
any_observations = st.lists(observation_rows, min_size=1, max_size=12).map(Observations.from_rows)
"""Valid, and otherwise arbitrary: T_iter below T_grad, the same point twice with different times, and so on."""


def observe(model: LevelsModel, theta, keys, noise: float = 0.0, seed: int = 0) -> Observations:
    """What a job with these parameters would measure under keys (K, N, R, m), times exp(noise · normal)."""
    K, N, R, m = np.array(keys, dtype=float).reshape(-1, 4).T
    rng = np.random.default_rng(seed)
    grad = model.t_grad(theta, m) * np.exp(noise * rng.standard_normal(len(K)))
    step = model.t_step(theta, K, model.level(N, R), m) * np.exp(noise * rng.standard_normal(len(K)))
    return Observations.from_rows(zip(K, N, R, m, grad, step, strict=True))


def typical_keys(rng: np.random.Generator, count: int, max_racks: int = 1) -> list[tuple[int, int, int, int]]:
    """Keys (K, N, R, m) as a job meets them while it grows: all levels, several batch sizes."""
    keys = [(1, 1, 1, 32), (2, 1, 1, 64), (4, 1, 1, 32), (2, 2, 1, 64), (8, 2, 1, 128), (16, 4, max_racks, 64)]
    while len(keys) < count:
        K = int(np.exp(rng.uniform(0.0, np.log(64.0))))
        N = int(rng.integers(1, min(K, 16) + 1))
        keys.append((K, N, int(rng.integers(1, min(N, max_racks) + 1)), int(np.exp(rng.uniform(2.0, 6.0)))))
    return keys[:count]


def typical_theta(rng: np.random.Generator) -> ThetaSys:
    """Parameters of the size that the paper's applications have."""
    alpha, local, node = np.exp(rng.uniform(np.log([0.02, 0.01, 0.03]), np.log([0.3, 0.2, 0.6]))).tolist()
    beta = float(alpha * np.exp(rng.uniform(np.log(1e-3), np.log(0.05))))
    ratio = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), 2)).tolist()
    return ThetaSys(alpha, beta, local, local * ratio[0], node, node * ratio[1], float(rng.uniform(1.0, 4.0)))


def predicted(fit, seen: Observations) -> np.ndarray:
    """T_iter of a fit under the circumstances of these observations."""
    model = fit.model
    return model.t_step(fit.theta, seen.K, model.level(seen.N, seen.R), seen.m)
