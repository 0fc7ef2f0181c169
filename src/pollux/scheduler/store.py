"""The event log: the truth that scheduling state is computed from. The protocol, and a log in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from pollux.core import Event, codec


@codec.register
@dataclass(frozen=True, slots=True)
class Record:
    """One event and when it was handled."""

    time_s: float
    event: Event


class EventLog(Protocol):
    """Append-only. A record that `append` has returned from is there after a crash; the order is that of appending."""

    def append(self, record: Record) -> None: ...

    def records(self) -> Iterator[Record]:
        """All records so far, oldest first."""
        ...


class MemoryLog:
    """A log that lives as long as the process: for tests, and for worlds that are cheap to run again."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records = list(records)

    def append(self, record: Record) -> None:
        self._records.append(record)

    def records(self) -> Iterator[Record]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)
