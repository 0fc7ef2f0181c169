"""Cells that a log may leave open, and times as logs write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pollux.simulator.csv_table import Row

MISSING = frozenset({"", "None", "none", "null", "NULL", "nan", "NaN", "NaT", "Unknown"})
"""How logs say that they do not know; the last is Slurm's."""
TIME_FIX = "write it as 2017-10-09 05:08:23"

_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}.*", re.ASCII)


def parse_time(text: str) -> float | None:
    """POSIX seconds of a date with a time of day; None: it is no such thing. Without an offset it counts as UTC."""
    if not _TIME.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def is_open(row: Row, column: str) -> bool:
    """Whether the log does not know. A row that ends early is damaged, not open."""
    return row.cells.get(column) in MISSING


def recorded_time(row: Row, column: str) -> float | None:
    """A time; None where it is left open, or is wrong and noted."""
    if is_open(row, column) or (text := row.get(column)) is None:
        return None
    if (time := parse_time(text)) is None:
        row.wrong(column, "is not a time", TIME_FIX)
    return time


def recorded_seconds(row: Row, column: str) -> float | None:
    """Seconds of 0 or more; None where they are left open, or are wrong and noted."""
    return None if is_open(row, column) else row.at_least_zero(column, "give seconds, 0 or more")


def optional_text(row: Row, column: str) -> str | None:
    """The text of a column that need not be there."""
    text = row.cells.get(column)
    return None if text in MISSING else text
