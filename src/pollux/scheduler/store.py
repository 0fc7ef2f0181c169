"""The event log: the truth that scheduling state is computed from. The protocol, and a log in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from pollux.core import Event, codec
from pollux.scheduler.saving import SavedState


@codec.register
@dataclass(frozen=True, slots=True)
class Record:
    """One event and when it was handled."""

    time_s: float
    event: Event


class EventLog(Protocol):
    """Append-only. A record that `append` has returned from is there after a crash; the order is that of appending.

    Records have numbers, from 1 on, that grow in that order; a log may leave numbers out. A state that was saved stands
    for all records up to its number, and a log may drop those.
    """

    def append(self, record: Record) -> None: ...

    def records(self, after: int = 0) -> Iterator[Record]:
        """Those with a number above `after`, oldest first."""
        ...

    def save(self, saved: SavedState) -> None:
        """Keep the state that all records so far lead to; it is there after a crash once this has returned."""
        ...

    def latest(self) -> tuple[int, SavedState] | None:
        """The state that was saved last, and the number of the last record in it; None if none ever was."""
        ...


class MemoryLog:
    """A log that lives as long as the process: for tests, and for worlds that are cheap to run again."""

    def __init__(self, records: Iterable[Record] = (), latest: tuple[int, SavedState] | None = None) -> None:
        self._records = list(records)
        self._latest = latest

    def append(self, record: Record) -> None:
        self._records.append(record)

    def records(self, after: int = 0) -> Iterator[Record]:
        return islice(self._records, after, None) if after else iter(self._records)

    def save(self, saved: SavedState) -> None:
        self._latest = len(self._records), saved

    def latest(self) -> tuple[int, SavedState] | None:
        return self._latest

    def __len__(self) -> int:
        return len(self._records)
