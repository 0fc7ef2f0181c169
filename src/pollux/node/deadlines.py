"""What has to happen by when, kept by the conditions that ask for it."""

from __future__ import annotations

from math import inf


class Deadlines:
    """A deadline is set when its condition is first seen to hold, and dropped when it no longer does or nobody asks."""

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}
        self._asked: set[str] = set()
        self._now_s = -inf

    def is_due(self, what: str, holds: bool, after_s: float, now_s: float) -> bool:
        """Whether `holds` has been so for `after_s`."""
        if not holds:
            self._at_s.pop(what, None)
            return False
        self._asked.add(what)
        return now_s >= self._at_s.setdefault(what, now_s + after_s)

    def restart(self, what: str) -> None:
        self._at_s.pop(what, None)

    def forget_unasked(self, now_s: float) -> None:
        """Drop what nobody has asked for since the last call."""
        self._now_s = now_s
        self._at_s = {what: at_s for what, at_s in self._at_s.items() if what in self._asked}
        self._asked.clear()

    @property
    def next_s(self) -> float | None:
        """The next one to come. Those that are due have been heeded as far as they can be."""
        return min((at_s for at_s in self._at_s.values() if at_s > self._now_s), default=None)
