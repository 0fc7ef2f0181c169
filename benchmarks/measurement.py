"""What an area yields: figures, tables beside them, and what had to be left out. And how CPU time is taken."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Input = TypeVar("Input")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure under one key, such as `goodput.fit20_ms`."""

    key: str
    value: float
    unit: str
    baseline: float | None = None
    """The same figure of what Pollux is compared with, taken in the same run."""
    baseline_name: str = ""
    bound: float | None = None
    """What the value must not pass."""
    better: Literal["lower", "higher"] = "lower"
    spread: float | None = None
    """Interquartile range of the repetitions over their median; None where there was only one."""
    note: str = ""

    def __post_init__(self) -> None:
        for field in ("value", "baseline", "bound", "spread"):
            number = getattr(self, field)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{self.key}: {field} = {number} cannot be stored. Yield LeftOut with the reason")

    @property
    def ratio(self) -> float | None:
        """value / baseline."""
        return self.value / self.baseline if self.baseline else None

    def record(self) -> dict[str, Any]:
        """As results.json holds it: value, unit, baseline and ratio, and what explains them."""
        return {
            "value": significant(self.value),
            "unit": self.unit,
            "baseline": significant(self.baseline),
            "ratio": significant(self.ratio),
            "baseline_name": self.baseline_name,
            "bound": self.bound,
            "better": self.better,
            "spread": significant(self.spread, 2),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Table:
    """Figures that belong together and deserve no keys of their own; cells are text or numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A key that could not be measured here, and why."""

    key: str
    reason: str


Finding = Measurement | Table | LeftOut


def significant(number: float | None, digits: int = 4) -> float | None:
    """Rounded to so many digits: the rest is noise, and would make every diff unreadable."""
    return None if number is None else float(f"{number:.{digits}g}")


def cpu_times(work: Callable[[Input], object], inputs: Iterable[Input]) -> list[float]:
    """CPU seconds of `work` on each of the inputs, of all threads of this process, garbage collection held back.

    One clock reading costs under a microsecond: for work of milliseconds. Caches are as the work itself leaves them.
    """
    times = []
    gc.disable()
    try:
        for item in list(inputs):
            start = time.process_time()
            work(item)
            times.append(time.process_time() - start)
    finally:
        gc.enable()
    return times


def cpu_seconds(work: Callable[[Input], object], inputs: Iterable[Input]) -> float:
    """Mean CPU seconds over the inputs, with one reading of the clock around all of them: for work of microseconds."""

    def whole(items: list[Input]) -> None:
        for item in items:
            work(item)

    prepared = list(inputs)
    return cpu_times(whole, [prepared])[0] / len(prepared)


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def spread(samples: Sequence[float]) -> float | None:
    """Interquartile range over median; None for fewer than three samples."""
    if len(samples) < 3:
        return None
    first, middle, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / middle
