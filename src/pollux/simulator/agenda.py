"""What lies ahead in a virtual world: time jumps from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from itertools import count


class Rank(IntEnum):
    """The order of events of the same moment: what happens in the world, then reports, then the round, then what the
    round left to do, then the sample for the timeline."""

    WORLD = 0
    REPORT = 1
    ROUND = 2
    AFTER_ROUND = 3
    SAMPLE = 4


HAPPENING = (Rank.WORLD, Rank.AFTER_ROUND)
"""Ranks of events that change something; all others come by themselves, again and again."""


class Agenda:
    """Events by time, then by rank, then in the order in which they were foreseen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_happening = 0
        """Of the events ahead, those of a rank in `HAPPENING`."""
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = count()

    def at(self, time_s: float, rank: Rank, happen: Callable[..., None], *arguments: object) -> None:
        """Call `happen(*arguments)` then."""
        if rank in HAPPENING:
            self.num_happening += 1
        heapq.heappush(self._heap, (time_s, rank, next(self._sequence), happen, arguments))

    def step(self) -> None:
        """Go on to the next event, and let it happen."""
        self.now, rank, _, happen, arguments = heapq.heappop(self._heap)
        if rank in HAPPENING:
            self.num_happening -= 1
        happen(*arguments)
