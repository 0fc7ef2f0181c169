"""Runs in compressed time, at a pace that the machine can keep: what is late by real seconds tells nothing there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def at_a_pace_it_can_keep(run: Callable[[float], T], paces: Sequence[float], is_kept: Callable[[T], bool]) -> T:
    """The result at the first of these that was kept, the quickest first; else at the last, whatever it is."""
    *quicker, slowest = paces
    for pace in quicker:
        if is_kept(result := run(pace)):
            return result
    return run(slowest)
