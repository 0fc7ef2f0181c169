"""Which (m, s) are worth trying for K GPUs: per-GPU batch sizes and extra accumulation passes within a job's limits.

The list depends only on K and the limits, never on fitted parameters, so it is made once and kept. Facts behind it
(derived in docs/goodput.md): at equal total batch size fewer passes are never slower, so each number of passes needs
only the batch sizes that fewer passes cannot hold; and 1/goodput is convex in m for a fixed s, so a fine geometric
grid with both ends loses next to nothing.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pollux.core import BatchLimits
from pollux.goodput.numerics import FloatArray


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

ROUNDING_SLACK = 1e-8
"""What a share of a batch may exceed an integer by and still be rounded down to it (artifact)."""

GRID_RATIO = 1.06
"""Neighbouring sizes on the grid; the worst loss beside trying all integers is about 0.1 % (docs/goodput.md)."""

COARSE = 12
"""Below this per-GPU limit, and up to this many passes, integers are so coarse that sizes with needlessly many passes
are worth trying too: they reach batch sizes that nothing else does."""

FEW = 64
"""Up to this many (m, s) in all, every one is tried."""

NEGLIGIBLE = 1e-3
"""A share of the batch size too small to be worth another candidate."""

MANY_PASSES = 512
"""With more numbers of passes than this there is no point in counting whether the pairs are few."""


class Candidates(NamedTuple):
    """Parallel arrays [C] of floats, empty if no configuration fits the limits; initial_share = M0/M."""

    m: FloatArray
    s: FloatArray
    initial_share: FloatArray


class Layout(NamedTuple):
    """Candidates of all classes end to end, for one set of shapes and limits."""

    K: FloatArray  # [L]
    level: FloatArray  # [L]
    m: FloatArray  # [L]
    s: FloatArray  # [L]
    initial_share: FloatArray  # [L] M0/M
    first: FloatArray  # [C] index of a class's first line; classes without candidates are left out
    length: FloatArray  # [C] how many lines it has
    of_shape: FloatArray  # [S] class of each shape, C (one past the last) where nothing fits


@lru_cache(maxsize=65536)
def candidates(K: int, limits: BatchLimits, options: BatchOptions = DEFAULT_BATCH) -> Candidates:
    """All (m, s) worth trying with K GPUs; M0 ≤ M ≤ M_max and m within its limits for each."""
    if options.published_grid and not options.fixed_batch:
        return _published(K, limits, options)
    rules = _Rules(K, limits, options)
    pairs = _nearest_to_initial(rules) if options.fixed_batch else _grid(rules)
    m, s = np.array(pairs, dtype=float).reshape(-1, 2).T
    return _frozen(K, limits, m, s)


def _frozen(K: int, limits: BatchLimits, m: FloatArray, s: FloatArray) -> Candidates:
    initial_share = limits.initial_batch_size / (K * m * (s + 1.0))
    found = Candidates(*(np.ascontiguousarray(array) for array in (m, s, initial_share)))
    for array in found:
        array.flags.writeable = False  # shared by all callers through the cache
    return found


class _Rules:
    """What K GPUs, the limits and the options allow. Passes are s + 1; batch sizes here are shares of one GPU."""

    def __init__(self, K: int, limits: BatchLimits, options: BatchOptions) -> None:
        self.accumulation = options.accumulation
        self.smallest, self.top = limits.min_per_gpu_batch_size, limits.max_per_gpu_batch_size
        self.lowest = -(-limits.initial_batch_size // K)
        """Smallest share of a GPU that makes M ≥ M0."""
        self.highest = limits.max_batch_size // K
        self.fewest = -(-self.lowest // self.top)
        """Fewest passes that hold M0."""
        self.most = max(1, self.highest // self.smallest) if options.accumulation else 1
        """Most passes that M_max leaves room for."""
        self.is_single_gpu_rule = K == 1 and options.single_gpu_accumulation
        """One GPU must not exceed M0 in a single pass."""

    def sizes(self, passes: int) -> tuple[int, int]:
        """Smallest and largest m for that many passes; none if the first exceeds the second."""
        low = max(self.smallest, -(-self.lowest // passes))
        high = min(self.top, self.highest // passes)
        return low, min(high, self.lowest) if passes == 1 and self.is_single_gpu_rule else high


def _grid(rules: _Rules) -> list[tuple[int, int]]:
    """Our grid: pairs (m, s), at most one for each total batch size, that with the fewest passes."""
    pairs = _all_pairs(rules)
    if pairs is None:
        pairs = _thinned(rules)
        if rules.accumulation:
            pairs += _towards_initial(rules) + _towards_max(rules)
    chosen: dict[int, tuple[int, int]] = {}
    for m, passes in sorted(pairs, key=lambda pair: pair[1]):
        chosen.setdefault(m * passes, (m, passes - 1))
    return list(chosen.values())


def _all_pairs(rules: _Rules) -> list[tuple[int, int]] | None:
    """Every (m, passes), or None if there are more than a few."""
    if rules.most - rules.fewest > MANY_PASSES:
        return None
    pairs: list[tuple[int, int]] = []
    for passes in range(rules.fewest, rules.most + 1):
        low, high = rules.sizes(passes)
        if len(pairs) + high - low + 1 > FEW:
            return None
        pairs += [(m, passes) for m in range(low, high + 1)]
    return pairs


def _thinned(rules: _Rules) -> list[tuple[int, int]]:
    """(m, passes) on a geometric grid, without sizes that fewer passes can hold."""
    top, is_coarse = rules.top, rules.top < COARSE
    first = 2 if rules.is_single_gpu_rule else rules.fewest
    enough = max(first, -(-rules.highest // top), COARSE if is_coarse else 1)
    pairs = []
    for passes in _integers(rules.fewest, min(rules.most, enough)):
        low, high = rules.sizes(passes)
        if passes > (COARSE if is_coarse else first):
            low = max(low, min(high, top * (passes - 1) // passes))
        pairs += [(m, passes) for m in _integers(low, high)]
    return pairs


def _towards_initial(rules: _Rules) -> list[tuple[int, int]]:
    """Pairs (m, passes) ever closer to M0 from above, at the price of ever more passes; the last is the closest of all.

    Goodput may have its maximum at an end of the range without being flat there, so both ends must be met as exactly as
    integers allow; in between the grid is fine enough.
    """
    m = _sizes_downwards(rules, rules.lowest)
    passes = -(-rules.lowest // m)
    if rules.is_single_gpu_rule:
        passes = np.where(m > rules.lowest, 2, passes)
    closest_of_its_passes = m == np.maximum(rules.smallest, -(-rules.lowest // passes))
    allowed = _is_allowed(rules, m, passes) & closest_of_its_passes
    return _ever_closer(m, passes, m * passes - rules.lowest, allowed, NEGLIGIBLE * rules.lowest)


def _towards_max(rules: _Rules) -> list[tuple[int, int]]:
    """As `_towards_initial`, ever closer to M_max from below."""
    m = _sizes_downwards(rules, rules.highest)
    passes = np.maximum(rules.highest // m, 1)
    closest_of_its_passes = m == np.minimum(rules.top, rules.highest // passes)
    allowed = _is_allowed(rules, m, passes) & closest_of_its_passes
    return _ever_closer(m, passes, rules.highest - m * passes, allowed, NEGLIGIBLE * rules.highest)


def _sizes_downwards(rules: _Rules, share: int) -> FloatArray:
    """Per-GPU sizes from the largest that a share of one GPU has room for to the smallest."""
    largest = min(rules.top, max(share, rules.smallest))
    return np.arange(largest, rules.smallest - 1, -1, dtype=np.int64)


def _is_allowed(rules: _Rules, m: FloatArray, passes: FloatArray) -> FloatArray:
    share = m * passes
    inside: FloatArray = (share >= rules.lowest) & (share <= rules.highest)
    return inside & ~((passes == 1) & (share > rules.lowest)) if rules.is_single_gpu_rule else inside


def _ever_closer(
    m: FloatArray, passes: FloatArray, distance: FloatArray, allowed: FloatArray, worth: float
) -> list[tuple[int, int]]:
    """Of the allowed pairs those closer than the one before by at least `worth`, and last the closest of all."""
    m, passes, distance = m[allowed], passes[allowed], distance[allowed]
    if not len(m):
        return []
    closer = np.flatnonzero(np.append(True, distance[1:] < np.minimum.accumulate(distance)[:-1])).tolist()
    chosen = closer[:1]
    for index in closer[1:]:
        if distance[chosen[-1]] - distance[index] >= worth or index == closer[-1]:
            chosen.append(index)
    return [(int(m[index]), int(passes[index])) for index in chosen]


def _nearest_to_initial(rules: _Rules) -> list[tuple[int, int]]:
    """The smallest M ≥ M0 that K equal replicas can form, with the fewest passes among equals."""
    if rules.accumulation:
        pairs = _towards_initial(rules)
    else:
        low, high = rules.sizes(1)
        pairs = [(low, 1)] if low <= high and rules.fewest == 1 else []
    return [(m, passes - 1) for m, passes in pairs[-1:]]


def _ladder() -> list[int]:
    """Integers in steps of about GRID_RATIO, the small ones without gaps."""
    steps = [1]
    while steps[-1] < 2**40:
        steps.append(max(steps[-1] + 1, int(steps[-1] * GRID_RATIO)))
    return steps


_LADDER = _ladder()


def _integers(low: int, high: int) -> list[int]:
    """low … high in steps fine enough; both ends always."""
    if low >= high:
        return [low] if low == high else []
    return [low, *_LADDER[bisect.bisect_right(_LADDER, low) : bisect.bisect_left(_LADDER, high)], high]


def _published(K: int, limits: BatchLimits, options: BatchOptions) -> Candidates:
    """The artifact's grid: 50 geometric batch sizes, the fewest passes that hold each, m rounded up.

    Where rounding passes M_max, m is lowered; a size that then leaves the limits is dropped (the artifact scores it 0).
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
    m = np.minimum(np.ceil(share / (s + 1.0) - ROUNDING_SLACK), limits.max_batch_size // (K * (s + 1.0)))
    fits = (m >= limits.min_per_gpu_batch_size) & (m <= limits.max_per_gpu_batch_size)
    fits &= K * m * (s + 1.0) >= limits.initial_batch_size
    return _frozen(K, limits, m[fits], s[fits])
