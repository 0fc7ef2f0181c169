"""The number of the last record of a log, kept beside it: tells that records are missing which were there once.

A log whose end is damaged looks like a shorter one, and so does a backup that was put in its place. The number is
written after each record, without waiting for the disk: it survives kill -9, and after a loss of power it may be too
low, never too high.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_DIGITS = 20


class HighWaterMark:
    """One file. What cannot be read or written is passed over: the log works without it."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            log.warning("it will not be noticed if the end of the log is lost: %s", error)

    def read(self) -> int:
        """The highest number that was kept; 0: none was."""
        if self._file is not None:
            with suppress(OSError, ValueError):
                return int(os.pread(self._file, _DIGITS, 0))
        return 0

    def write(self, number: int) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, b"%0*d" % (_DIGITS, number), 0)

    def close(self) -> None:
        """May be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
