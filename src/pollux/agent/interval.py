"""How often gradients are measured, so that it costs no more than a given share of the training time."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Hashable
from dataclasses import dataclass, field

from pollux.errors import InvalidSpec


class Interval:
    """How often to measure: every `every`-th step, so that measuring takes at most `budget` of the training time.

    A measured step is compared with the median of the unmeasured ones just before it and of the same batch, and the
    excess is taken relative to that: what slows the whole machine down for a while cancels. The median of the last
    excesses is what a measurement costs. No clock in here; the answer is one process's, so one replica decides for all.
    """

    KNOWN_FROM = 5
    """Measurements of one batch before their cost is believed."""
    REMEMBERED = 33
    BATCHES = 8

    def __init__(self, budget: float = 0.01, smallest: int = 4, largest: int = 64, start: int = 8) -> None:
        if not 0.0 < budget < math.inf:
            raise InvalidSpec("budget", budget, "not a positive share of the time", "Give 0.01 for one percent")
        if not 2 <= smallest <= largest:
            raise InvalidSpec("smallest", smallest, f"outside [2, largest = {largest}]", "Give a number of steps")
        self._budget, self._smallest, self._largest = budget, smallest, largest
        self._every = min(max(start, smallest), largest)
        self._batches: dict[Hashable, _Cycle] = {}

    @property
    def every(self) -> int:
        return self._every

    def observe(self, seconds: float, measured: bool, batch_key: Hashable) -> None:
        """One step. Two measured steps in a row (a difference) are one measurement, which costs what both do."""
        cycle = self._batches.pop(batch_key, None) or _Cycle(collections.deque(maxlen=self.REMEMBERED))
        self._batches[batch_key] = cycle  # the most recent is last
        if len(self._batches) > self.BATCHES:
            del self._batches[next(iter(self._batches))]
        if measured:
            cycle.measured.append(seconds)
            return
        if cycle.measured:
            cycle.close()
            if len(cycle.excesses) >= self.KNOWN_FROM:
                needed = math.ceil(statistics.median(cycle.excesses) / self._budget)
                self._every = min(max(needed, self._smallest), self._largest)
        cycle.unmeasured.append(seconds)


@dataclass(slots=True)
class _Cycle:
    """Steps of one batch since the last measurement, and what measurements before cost in unmeasured steps."""

    excesses: collections.deque[float]
    unmeasured: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    def close(self) -> None:
        usual = statistics.median(self.unmeasured) if self.unmeasured else 0.0
        if usual > 0.0:
            self.excesses.append(sum(self.measured) / usual - len(self.measured))
        self.unmeasured, self.measured = [], []
