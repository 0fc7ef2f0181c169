"""What a GPU costs, and what progress is worth to each job at that price.

The price λ is in job-seconds per GPU-second: how much later others end because one GPU is taken for a second. A job
that pays it is best off with the k GPUs of lowest (1 + λ·k)/r(k), r being its rate: its own second, and the seconds of
others that it takes. That minimum, c, is what an iteration of it is worth to all; it does not depend on how long the
job is or in which unit its work is counted. The *remaining cost*, c times the work that is left, orders jobs: by its
position i of J, the costliest first, c is multiplied by (i/J)^β. λ is such that all GPUs are wanted.
"""

from __future__ import annotations

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray

LOWEST, HIGHEST = 1e-6, 1e3
"""Of all prices: below, GPUs are free; above, a second of one job is worth a thousand seconds of a GPU."""
HALVINGS = 20
"""Of the logarithm of their ratio: the price is known to 2e-5 then, far better than any rate."""
PASSES = 3
"""Ranks follow from a price and the price from ranks: after so many passes both stand still, but for near ties."""


@compiled
def rank_shares(
    first: FloatArray,
    size: FloatArray,
    rate: FloatArray,
    left: FloatArray,
    age_s: FloatArray,
    price: float,
) -> FloatArray:
    """[J]: i/J of each job at that price. Where the work left is unknown (NaN), a job is taken to last as long again as
    its age, on one GPU: what it has at the moment would let equal jobs change places from round to round."""
    jobs = len(left)
    cost = np.zeros(jobs)
    for j in range(jobs):
        lowest = np.inf
        for at in range(first[j], first[j + 1]):
            lowest = min(lowest, (1.0 + price * size[at]) / rate[at])
        if lowest < np.inf:
            cost[j] = (1.0 + price) * age_s[j] if np.isnan(left[j]) else lowest * left[j]
    order = np.argsort(-cost, kind="mergesort")  # among equals in order of priority
    share = np.empty(jobs)
    for position in range(jobs):
        share[order[position]] = (position + 1.0) / jobs
    return share


@compiled
def worths(first: FloatArray, size: FloatArray, rate: FloatArray, weight: FloatArray, price: float) -> FloatArray:
    """[J]: what an iteration of each job is worth at that price; 0 for one that can run on no size."""
    found = np.zeros(len(weight))
    for j in range(len(weight)):
        lowest = np.inf
        for at in range(first[j], first[j + 1]):
            lowest = min(lowest, (1.0 + price * size[at]) / rate[at])
        if lowest < np.inf:
            found[j] = lowest * weight[j]
    return found


@compiled
def wanted(first: FloatArray, size: FloatArray, rate: FloatArray, worth: FloatArray, price: float) -> int:
    """GPUs that jobs would take at that price."""
    total = 0
    for j in range(len(worth)):
        gain, best = 0.0, 0
        for at in range(first[j], first[j + 1]):
            each = worth[j] * rate[at] - price * size[at]
            if each > gain:
                gain, best = each, size[at]
        total += best
    return total


@compiled
def balanced(
    first: FloatArray,
    size: FloatArray,
    rate: FloatArray,
    left: FloatArray,
    age_s: FloatArray,
    exponent: float,
    num_gpus: int,
) -> tuple[float, FloatArray]:
    """λ and c·(i/J)^β [J]. Sizes of job j and its rates there are at first[j] … first[j + 1] − 1."""
    price = 1.0
    share = rank_shares(first, size, rate, left, age_s, price)
    for _ in range(PASSES):
        weight = share**exponent
        low, high = np.log(LOWEST), np.log(HIGHEST)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            price = np.exp(middle)
            if wanted(first, size, rate, worths(first, size, rate, weight, price), price) > num_gpus:
                low = middle
            else:
                high = middle
        price = np.exp(high)
        before, share = share, rank_shares(first, size, rate, left, age_s, price)
        if (share == before).all():
            break  # the same ranks have the same price
    return price, worths(first, size, rate, weight, price)
