"""An arena of lower envelopes: the best goodput of many jobs whose gradients change more often than their parameters.

For fixed parameters the cost of a candidate, T_iter·(a + b·M0/M) with a + b = 1, is a straight line in the noise share
b. What is lowest somewhere is kept, a block of lines a job, all blocks in a few flat arrays; new gradients then cost
one walk along a few lines for each class of spread and number of GPUs, for all jobs at once. Exact: the same costs as
in `tables`. Memory is linear in jobs × GPUs that each may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from pollux.core import BatchLimits
from pollux.goodput.candidates import BatchOptions, candidates
from pollux.goodput.envelope_kernel import HEAD, fill_blocks, join_blocks, search_blocks
from pollux.goodput.numerics import FloatArray
from pollux.goodput.segments import Segments
from pollux.goodput.throughput import ThroughputModel

AT_ONCE = 1 << 15
"""Numbers of the blocks that are made in one go: few enough to stay near."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Which cells a block has: low … high GPUs (none if low > high) at a level of spread, class by class.

    No class begins below the first. Equal by content, and what is derived from equal ones is shared.
    """

    of: tuple[tuple[int, int, float], ...]
    low: FloatArray = field(init=False, repr=False, compare=False)
    high: FloatArray = field(init=False, repr=False, compare=False)
    level: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        low, high, level = zip(*self.of, strict=True)
        object.__setattr__(self, "low", np.array(low, dtype=np.int64))
        object.__setattr__(self, "high", np.array(high, dtype=np.int64))
        object.__setattr__(self, "level", np.array(level, dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Candidates of lowest, lowest + 1 … GPUs, end to end; those of one number of GPUs in order of their batch size."""

    lowest: int
    first: FloatArray  # [number of GPUs + 1] int64
    K: FloatArray  # [L], float64 like all that follow
    m: FloatArray
    s: FloatArray
    initial_share: FloatArray  # M0/M
    sizes: FloatArray  # [U]: all m that occur
    size: FloatArray  # [L] int64: which of them

    def slice(self, low: int, high: int) -> slice:
        """Where the candidates of low … high GPUs are."""
        if low > high:
            return slice(0, 0)
        return slice(int(self.first[low - self.lowest]), int(self.first[high - self.lowest + 1]))


@lru_cache(maxsize=4096)
def grid(limits: BatchLimits, options: BatchOptions, lowest: int, highest: int) -> Grid:
    """The candidates of so many GPUs."""
    parts = []
    for num_gpus in range(lowest, highest + 1):
        choice = candidates(num_gpus, limits, options)
        order = np.argsort(-choice.initial_share, kind="stable")
        parts.append(np.stack([np.full(len(order), float(num_gpus)), *(array[order] for array in choice)]))
    first = np.cumsum([0, *(part.shape[1] for part in parts)])
    K, m, s, share = map(np.ascontiguousarray, np.concatenate(parts, axis=1))
    sizes, size = np.unique(m, return_inverse=True)
    return Grid(lowest, first.astype(np.int64), K, m, s, share, sizes, size.astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """What a block of these limits, options and spans is made from. The same for equal ones, so that it is a key."""

    limits: BatchLimits
    options: BatchOptions
    spans: Spans
    grid: Grid
    num_candidates: int
    before_lines: int
    """Numbers of a block that are not of its lines."""

    @property
    def most(self) -> int:
        """Numbers that no such block exceeds."""
        return self.before_lines + 2 * self.num_candidates


@lru_cache(maxsize=4096)
def _draft(limits: BatchLimits, options: BatchOptions, spans: Spans) -> _Draft:
    lowest, highest = int(spans.low[0]), max(int(spans.high.max()), int(spans.low[0]))
    # Powers of two: few grids, so that they are shared.
    of = grid(limits, options, lowest, highest if lowest == highest else 1 << (highest - 1).bit_length())
    parts = [of.slice(low, high) for low, high, _ in spans.of]
    num_candidates = sum(part.stop - part.start for part in parts)
    cells = int(np.maximum(spans.high - spans.low + 1, 0).sum())
    return _Draft(limits, options, spans, of, num_candidates, 2 * len(spans.of) + HEAD * cells + 1)


@lru_cache(maxsize=4096)
def _rest(narrow: Spans, wide: Spans) -> Spans | None:
    """The cells that only the second has; None if it does not have all of the first."""
    rest = []
    for (low, high, level), (other_low, other_high, other_level) in zip(narrow.of, wide.of, strict=False):
        if (low, level) != (other_low, other_level) or high > other_high:
            return None
        rest.append((max(low, high + 1), other_high, level))
    if len(narrow.of) != len(wide.of) or min(rest)[0] < rest[0][0]:
        return None
    return Spans(tuple(rest))


_Key = tuple[ThroughputModel, tuple[float, ...], _Draft]


@dataclass(slots=True, eq=False)
class Slot:
    """The envelope of all jobs that have the same parameters, limits, options and spans."""

    key: _Key
    at: int
    """Where its block begins in the store; moves when the arena is tidied up."""
    length: int
    users: int = 0

    @property
    def spans(self) -> Spans:
        return self.key[2].spans

    @property
    def size(self) -> int:
        """Room for it. A few sizes only, at most an eighth too long, so that what one job leaves fits the next."""
        step = 1 << max(self.length.bit_length() - 4, 3)
        return -(-self.length // step) * step


class Arena:
    """Blocks of envelopes. Whoever adds must release; equal additions share one block."""

    def __init__(self) -> None:
        self._slots: dict[_Key, Slot] = {}
        self._store = Segments()
        self._drafts: FloatArray = np.empty(0)
        """Room for blocks that are being made."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def size(self) -> int:
        """Numbers in use, those of freed blocks included."""
        return self._store.size

    def add(
        self, model: ThroughputModel, theta: tuple[float, ...], limits: BatchLimits, options: BatchOptions, spans: Spans
    ) -> Slot:
        """The slot for these, built if there is none yet."""
        return self.add_all(model, [theta], limits, options, spans)[0]

    def add_all(
        self,
        model: ThroughputModel,
        thetas: Sequence[tuple[float, ...]],
        limits: BatchLimits,
        options: BatchOptions,
        spans: Spans,
    ) -> list[Slot]:
        """`add` for many at once, which costs less."""
        draft = _draft(limits, options, spans)
        return self._all([(model, theta, draft) for theta in thetas], {})

    def widen_all(self, slots: Sequence[Slot], spans: Spans) -> list[Slot]:
        """`add_all` for the same but for their spans, which must be equal; made from them as far as they go.

        They are not released.
        """
        model, _, narrow = slots[0].key
        draft = _draft(narrow.limits, narrow.options, spans)
        keys = [(model, slot.key[1], draft) for slot in slots]
        return self._all(keys, dict(zip(keys, slots, strict=True)) if _rest(narrow.spans, spans) else {})

    def _all(self, keys: Sequence[_Key], narrow: Mapping[_Key, Slot]) -> list[Slot]:
        """A slot for each of these keys of one model and draft; all of those that are to be made have a narrow one or
        none has."""
        fresh = [key for key in dict.fromkeys(keys) if key not in self._slots]
        at_once = max(AT_ONCE // keys[0][2].most, 1)
        for begin in range(0, len(fresh), at_once):
            part = fresh[begin : begin + at_once]
            self._make(part, [narrow[key] for key in part] if narrow else [])
        slots = [self._slots[key] for key in keys]
        for slot in slots:
            slot.users += 1
        return slots

    def release(self, slot: Slot) -> None:
        """One user less; without users its block is free."""
        slot.users -= 1
        if not slot.users:
            del self._slots[slot.key]
            self._store.free(slot.at, slot.size)

    def tidy(self) -> range:
        """Move the blocks of one segment elsewhere, if more than half of it is garbage: those that began in the range
        that is returned. One in a call, so that none takes long."""
        wasted = self._store.wasted()
        if wasted:
            before = self._store.give_up(wasted)
            for slot in self._slots.values():
                if slot.at in wasted:
                    begin, slot.at = slot.at - wasted.start, self._store.take(slot.size)
                    self._store.block(slot.at, slot.size)[:] = before[begin : begin + slot.size]
        return wasted

    def search(
        self,
        at: FloatArray,
        noise: FloatArray,
        initial: FloatArray,
        most: FloatArray,
        num_classes: int,
        first: FloatArray,
        goodput: FloatArray,
    ) -> None:
        """Fill `goodput`: see `search_blocks`. All blocks asked for must have so many classes."""
        for store, begin, chosen in self._store.by_segment(at):
            search_blocks(store, begin, chosen, at, noise, initial, most, num_classes, first, goodput)

    def _make(self, keys: Sequence[_Key], narrow: Sequence[Slot]) -> None:
        """Make blocks of one model and draft, from others if there are such, and their slots, which nobody uses yet."""
        model, _, whole = keys[0]
        rest = _rest(narrow[0].spans, whole.spans) if narrow else None
        draft = whole if rest is None else _draft(whole.limits, whole.options, rest)
        spans, of = draft.spans, draft.grid
        if len(keys) * draft.most > len(self._drafts):
            self._drafts = np.empty(max(len(keys) * draft.most, AT_ONCE))
        blocks = self._drafts[: len(keys) * draft.most].reshape(len(keys), draft.most)
        lengths = np.empty(len(keys), dtype=np.int64)
        seconds = model.times(np.array([theta for _, theta, _ in keys]), spans, of, draft.num_candidates)
        fill_blocks(seconds, spans.low, spans.high, of.first, of.initial_share, blocks, lengths)
        for index, (key, length) in enumerate(zip(keys, lengths.tolist(), strict=True)):
            if rest is None:
                self._room(key, length)[:] = blocks[index, :length]
                continue
            known = narrow[index]
            num_lines = known.length - known.key[2].before_lines + length - draft.before_lines
            block = self._room(key, whole.before_lines + num_lines)
            join_blocks(self._store.block(known.at, known.length), blocks[index], len(spans.of), block)

    def _room(self, key: _Key, length: int) -> FloatArray:
        """For the block of a new slot."""
        slot = self._slots[key] = Slot(key, -1, length)
        slot.at = self._store.take(slot.size)
        return self._store.block(slot.at, length)
