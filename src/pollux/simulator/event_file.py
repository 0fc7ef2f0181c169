"""An event log as a file: one JSON document a line, written as it happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from pollux.core import dumps
from pollux.scheduler import Record, SavedState


class EventFile:
    """An event log that can only be written: whoever reads it opens the file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def append(self, record: Record) -> None:
        self._stream.write(dumps(record) + "\n")

    def records(self, after: int = 0) -> Iterator[Record]:
        """None: a run begins with an empty log."""
        return iter(())

    def save(self, saved: SavedState) -> None:
        """Nothing: the events say it all."""

    def latest(self) -> None:
        """None, for the same reason."""
