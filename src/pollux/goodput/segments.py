"""A store of blocks of numbers that grows without being copied: a few flat arrays, one address for all.

It knows nothing of what is in the blocks. Memory is linear in what is taken, if whoever uses it moves blocks out of
segments that are mostly garbage.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pollux.goodput.numerics import FloatArray

SPARE = 1 << 15
"""Numbers of the first segment: never worth tidying up for."""
SEGMENT = 1 << 20
"""Numbers of a segment once there are many: 8 MiB, which are moved in a few milliseconds."""


class Segments:
    """Segment i has the addresses from i·SEGMENT on. Blocks lie within one segment."""

    def __init__(self) -> None:
        self._arrays: list[FloatArray] = []
        """Short ones at first. One of a block that is longer than a segment is followed by empty ones."""
        self._used: list[int] = []
        """Numbers of each segment that are taken or were."""
        self._garbage: list[int] = []
        """Those that were."""
        self._open = -1
        """The segment that is being filled."""
        self._left = -1
        """The segment that was given up last. Its addresses are not given out yet: blocks are moved from there."""
        self._freed: dict[int, list[int]] = {}

    @property
    def size(self) -> int:
        """Numbers in use, those of freed blocks included."""
        return sum(self._used)

    def take(self, size: int) -> int:
        """The address of a block of that size, one that was freed if there is such a one."""
        freed = self._freed.get(size)
        if freed:
            at = freed.pop()
            self._garbage[at // SEGMENT] -= size
            return at
        if self._open < 0 or self._used[self._open] + size > len(self._arrays[self._open]):
            self._begin(size)
        begin = self._used[self._open]
        self._used[self._open] += size
        return self._open * SEGMENT + begin

    def free(self, at: int, size: int) -> None:
        self._freed.setdefault(size, []).append(at)
        self._garbage[at // SEGMENT] += size

    def block(self, at: int, size: int) -> FloatArray:
        """To be read and written."""
        begin = at % SEGMENT
        return self._arrays[at // SEGMENT][begin : begin + size]

    def by_segment(self, at: FloatArray) -> Iterator[tuple[FloatArray, int, FloatArray]]:
        """Which blocks are where: a segment, the address where it begins, and the indices of its blocks in `at` [J].

        Negative ones are nowhere.
        """
        if len(self._arrays) == 1:
            yield self._arrays[0], 0, (at >= 0).nonzero()[0]
            return
        segment = (at // SEGMENT).astype(np.int16)  # which is sorted ten times as fast
        order = np.argsort(segment, kind="stable")
        ends = np.searchsorted(segment[order], np.arange(-1, len(self._arrays)), side="right").tolist()
        for index, array in enumerate(self._arrays):
            if ends[index] < ends[index + 1]:
                yield array, index * SEGMENT, order[ends[index] : ends[index + 1]]

    def wasted(self) -> range:
        """The addresses of the segment with the most garbage, if that is more than half of it; otherwise none."""
        if self.size <= SPARE:
            return range(0)
        index = max(range(len(self._used)), key=lambda each: 2 * self._garbage[each] - self._used[each])
        if 2 * self._garbage[index] <= self._used[index]:
            return range(0)
        return range(index * SEGMENT, index * SEGMENT + len(self._arrays[index]))

    def give_up(self, wasted: range) -> FloatArray:
        """Forget such a segment; its content, for whoever has blocks there."""
        index = wasted.start // SEGMENT
        self._freed = {size: [at for at in places if at not in wasted] for size, places in self._freed.items()}
        content, self._arrays[index] = self._arrays[index], np.empty(0)
        self._used[index] = self._garbage[index] = 0
        self._left = index
        if self._open == index:
            self._open = -1
        return content

    def _begin(self, size: int) -> None:
        """Another segment, with room for that: as long as all together so far."""
        length = max(min(sum(map(len, self._arrays)), SEGMENT), SPARE, size)
        needed = -(-length // SEGMENT)
        free = [index for index in range(len(self._arrays)) if self._is_free(index)]
        if needed == 1 and free:
            self._open = free[0]
            self._arrays[self._open] = np.empty(length)
            return
        self._open = len(self._arrays)
        self._arrays += [np.empty(length), *(np.empty(0) for _ in range(needed - 1))]
        self._used += [0] * needed
        self._garbage += [0] * needed

    def _is_free(self, index: int) -> bool:
        """Whether nothing is there, and its addresses do not belong to a longer segment before it."""
        if len(self._arrays[index]) or index == self._left:
            return False
        return all(before * SEGMENT + len(self._arrays[before]) <= index * SEGMENT for before in range(index))
