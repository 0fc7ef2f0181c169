"""Which (m, s) are worth trying for K GPUs: per-GPU batch sizes and extra accumulation passes within a job's limits.

The list depends only on K and the limits, never on fitted parameters, so it is made once and kept. Facts behind it
(derived in docs/goodput.md): at equal total batch size fewer passes are never slower, so each number of passes needs
only the batch sizes that fewer passes cannot hold; and 1/goodput is convex in m for a fixed s, so a fine geometric
grid with both ends loses next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pollux.core import BatchLimits
from pollux.goodput.numerics import ROUNDING_SLACK, FloatArray, ceil_div, floor_div


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What the agent may do with the batch; the defaults are ours, `PUBLISHED_BATCH` is the artifact's."""

    accumulation: bool = True
    """False: one pass an iteration, s = 0."""
    single_gpu_accumulation: bool = False
    """True: with one GPU a batch above M0 takes at least two passes (the artifact's noise estimator needs them)."""
    fixed_batch: bool = False
    """True: the total batch size stays at M0 (or as little above it as K allows); only GPUs change."""
    published_grid: bool = False
    """True: the artifact's 50 geometric batch sizes instead of our grid."""


DEFAULT_BATCH = BatchOptions()
PUBLISHED_BATCH = BatchOptions(single_gpu_accumulation=True, published_grid=True)

GRID_RATIO = 1.06
"""Neighbouring sizes on the grid; the worst loss beside trying all integers is about 0.1 % (docs/goodput.md)."""

COARSE = 12
"""Below this per-GPU limit, and up to this many passes, integers are so coarse that sizes with needlessly many passes
are worth trying too: they reach batch sizes that nothing else does."""

SEARCHED_PASSES = 512
"""How many numbers of passes are searched for the integers nearest to an end of the range."""

FEW = 64
"""Up to this many (m, s) in all, every one is tried."""


class Candidates(NamedTuple):
    """Parallel arrays [C] of floats, empty if no configuration fits the limits; initial_share = M0/M."""

    m: FloatArray
    s: FloatArray
    initial_share: FloatArray


@lru_cache(maxsize=65536)
def candidates(K: int, limits: BatchLimits, options: BatchOptions = DEFAULT_BATCH) -> Candidates:
    """All (m, s) worth trying with K GPUs; M0 ≤ M ≤ M_max and m within its limits for each."""
    if options.published_grid:
        return _published(K, limits, options)
    pairs = _nearest_to_initial(K, limits, options) if options.fixed_batch else _grid(K, limits, options)
    m, s = np.array(pairs, dtype=float).reshape(-1, 2).T
    return _frozen(K, limits, m, s)


def _frozen(K: int, limits: BatchLimits, m: FloatArray, s: FloatArray) -> Candidates:
    initial_share = limits.initial_batch_size / (K * m * (s + 1.0))
    found = Candidates(*(np.ascontiguousarray(array) for array in (m, s, initial_share)))
    for array in found:
        array.flags.writeable = False  # shared by all callers through the cache
    return found


def _range(K: int, passes: int, limits: BatchLimits) -> tuple[int, int]:
    """Smallest and largest m for that many passes an iteration; empty if the first exceeds the second."""
    low = max(limits.min_per_gpu_batch_size, ceil_div(limits.initial_batch_size, K * passes))
    return low, min(limits.max_per_gpu_batch_size, floor_div(limits.max_batch_size, K * passes))


def _grid(K: int, limits: BatchLimits, options: BatchOptions) -> list[tuple[int, int]]:
    """Our grid: pairs (m, s), at most one for each total batch size, the fewest passes first."""
    top = limits.max_per_gpu_batch_size
    fewest = max(1, ceil_div(limits.initial_batch_size, K * top))
    most = max(1, floor_div(limits.max_batch_size, K * limits.min_per_gpu_batch_size)) if options.accumulation else 1
    alone = K == 1 and options.single_gpu_accumulation
    few = _few_in_all(K, fewest, most, limits)
    if not few:
        enough = max(fewest, ceil_div(limits.max_batch_size, K * top), 2 if alone else 1, COARSE if top < COARSE else 1)
        most = min(most, enough)
    by_batch_size: dict[int, tuple[int, int]] = {}
    for passes in range(fewest, most + 1) if few else _integers(fewest, most):
        low, high = _range(K, passes, limits)
        if alone and passes == 1:
            high = min(high, limits.initial_batch_size)
        if not few and passes > (COARSE if top < COARSE else 2 if alone else fewest):
            low = max(low, min(high, top * (passes - 1) // passes))  # smaller ones are cheaper with fewer passes
        for m in range(low, high + 1) if few else _integers(low, high):
            by_batch_size.setdefault(m * passes, (m, passes - 1))
    if not few and options.accumulation:
        for m, passes in _ends(K, max(fewest, 2 if alone else 1), limits):
            by_batch_size.setdefault(m * passes, (m, passes - 1))
    return list(by_batch_size.values())


def _ends(K: int, fewest: int, limits: BatchLimits) -> list[tuple[int, int]]:
    """Pairs (m, passes) that come closest to M0 from above and to M_max from below, each closer with more passes.

    Goodput may have its maximum at either end without being flat there, so the ends must be met as exactly as integers
    allow; in between the grid is fine enough.
    """
    found = []
    lowest, highest = ceil_div(limits.initial_batch_size, K), floor_div(limits.max_batch_size, K)
    closest = math.inf
    for passes in range(fewest, fewest + SEARCHED_PASSES):
        m = max(limits.min_per_gpu_batch_size, ceil_div(lowest, passes))
        if m * passes < closest and m <= limits.max_per_gpu_batch_size and m * passes <= highest:
            closest = m * passes
            found.append((m, passes))
        if closest == lowest:
            break
    closest = 0
    enough = max(fewest, highest // limits.max_per_gpu_batch_size)
    for passes in range(enough, enough + SEARCHED_PASSES):
        m = min(limits.max_per_gpu_batch_size, highest // passes)
        if m * passes > closest and m >= limits.min_per_gpu_batch_size and m * passes >= lowest:
            closest = m * passes
            found.append((m, passes))
        if closest == highest:
            break
    return found


def _few_in_all(K: int, fewest: int, most: int, limits: BatchLimits) -> bool:
    """Whether all (m, s) within the limits are few enough to try each."""
    total = 0
    for passes in range(fewest, most + 1):
        low, high = _range(K, passes, limits)
        total += max(0, high - low + 1)
        if total > FEW:
            return False
    return True


def _integers(low: int, high: int) -> list[int]:
    """low … high: all of them while their steps are fine enough, else in geometric steps; both ends always."""
    if low > high:
        return []
    chosen = [low]
    while chosen[-1] < high:
        chosen.append(min(high, max(chosen[-1] + 1, int(chosen[-1] * GRID_RATIO))))
    return chosen


def _nearest_to_initial(K: int, limits: BatchLimits, options: BatchOptions) -> list[tuple[int, int]]:
    """The smallest M ≥ M0 that K equal replicas can form, with the fewest passes among equals."""
    best: tuple[int, int, int] | None = None
    for passes in range(1, 2 + (limits.initial_batch_size // K if options.accumulation else 0)):
        low, high = _range(K, passes, limits)
        if low <= high and (best is None or K * low * passes < best[0]):
            best = (K * low * passes, low, passes - 1)
    return [best[1:]] if best is not None else []


def _published(K: int, limits: BatchLimits, options: BatchOptions) -> Candidates:
    """The artifact's grid: 50 geometric batch sizes, the fewest passes that hold each, m rounded up.

    Rounding may pass M_max, and `best` then lowers m; a size whose m leaves its limits is dropped (the artifact scores
    it 0).
    """
    lowest = max(limits.initial_batch_size, limits.min_per_gpu_batch_size * K)
    if lowest > limits.max_batch_size:
        return _frozen(K, limits, np.zeros(0), np.zeros(0))
    batch = np.geomspace(lowest, limits.max_batch_size, 50)
    share = batch / K
    s = np.zeros_like(share)
    if options.accumulation:
        s = np.ceil(share / limits.max_per_gpu_batch_size - ROUNDING_SLACK) - 1.0
        if K == 1 and options.single_gpu_accumulation:
            s = np.where(share > limits.initial_batch_size + ROUNDING_SLACK, np.maximum(s, 1.0), s)
    m = np.ceil(share / (s + 1.0) - ROUNDING_SLACK)
    fits = (m >= limits.min_per_gpu_batch_size) & (m <= limits.max_per_gpu_batch_size)
    return _frozen(K, limits, m[fits], s[fits])
