"""Tables that people and programs write: the rows of a CSV text, and what is wrong with their cells.

Shared by workloads and by the importers of job lists. UTF-8 text comes from `documents.read_text`; a problem is one
line, as `documents` has it. What the columns mean is the reader's.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pollux.simulator.documents import shown

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one row. A method that returns None has noted what is wrong in `problems`."""

    line: int
    """Where the row begins."""
    cells: Mapping[str, str | None]
    """By column; None where the row ends early. A column that the whole file lacks is noted already, and not here."""
    problems: list[str] = field(default_factory=list)

    def wrong(self, column: str, what: str, fix: str) -> None:
        self.problems.append(f"line {self.line}, {column} = {shown(self.cells[column])}: {what}; {fix}")

    def get(self, column: str) -> str | None:
        """A cell that must not be empty."""
        text = self.cells.get(column)
        if text is None and column in self.cells:
            self.problems.append(f"line {self.line}, {column}: the row ends before it; complete the row")
        elif text == "":
            self.wrong(column, "is empty", "fill the cell")
        return text or None

    def number(self, column: str) -> float | None:
        """A finite number."""
        if (text := self.get(column)) is None:
            return None
        fix = "give digits, such as 16"
        if not _NUMBER.fullmatch(text) and not _NOT_FINITE.fullmatch(text):
            self.wrong(column, "is not a number", fix)
            return None
        if not math.isfinite(value := float(text)):
            self.wrong(column, "is not finite", fix)
            return None
        return value

    def at_least_zero(self, column: str, fix: str) -> float | None:
        """A finite number that is not negative; a zero has no sign. `fix` says what to give instead."""
        if (value := self.number(column)) is None:
            return None
        if value < 0.0:
            self.wrong(column, "is negative", fix)
            return None
        return value + 0.0

    def whole(self, column: str, minimum: int = 1) -> int | None:
        """A whole number of `minimum` or more; `4.0` is one."""
        if (value := self.number(column)) is None:
            return None
        if not value.is_integer():
            fix = f"give {max(math.ceil(value), minimum)} or another whole number"
            self.wrong(column, "is not a whole number", fix)
        elif value < minimum:
            self.wrong(column, f"is less than {minimum}", f"give a whole number of {minimum} or more")
        else:
            return int(value)
        return None


def read_rows(
    text: str, columns: Sequence[str], problems: list[str], *, unnamed: Sequence[str] | None = None
) -> Iterator[Row]:
    """The rows below the names of the columns, blank ones left out.

    What is wrong with the table as a whole goes to `problems`: no rows, a column that is missing or there twice, a
    quote that is never closed. `columns` are those that must be there; others are kept, in any order. A table may come
    without names if `unnamed` says what its columns are: a first row with none of `columns` is then a row of values.
    """
    rows = _cells(text, problems)
    line, header = next(rows, (1, []))
    if not header:
        if not problems:
            problems.append(f"the file is empty; begin it with the line {','.join(columns)}")
        return
    if unnamed is not None and not set(header) & set(columns):
        rows, header = itertools.chain([(line, header)], rows), list(unnamed)
    if not _knows_columns(line, header, columns, problems):
        return
    is_bare = True
    for line, cells in rows:
        is_bare = False
        row = Row(line, dict(itertools.zip_longest(header, cells[: len(header)])))
        if any(cells[len(header) :]):
            fix = "quote the cell that holds a comma"
            row.problems.append(f"line {line}: {len(cells)} cells for {len(header)} columns; {fix}")
        yield row
    if is_bare and not problems:
        problems.append(f"line {line}: no jobs follow the names of the columns; add one line a job")


def _cells(text: str, problems: list[str]) -> Iterator[tuple[int, list[str]]]:
    """First line and cells of each row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    before = 0
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield before + 1, cells
            before = reader.line_num
    except csv.Error as error:
        problems.append(f"line {before + 1}: {error}; close every quote, and put one job on a line")


def _knows_columns(line: int, header: list[str], columns: Sequence[str], problems: list[str]) -> bool:
    """Whether each column occurs once at most. Without names of columns nothing below them can be told apart."""
    missing = [column for column in columns if column not in header]
    if len(missing) == len(columns):
        fix = f"begin the file with {','.join(columns)}"
        problems.append(f"line {line}: {shown(','.join(header))} names none of the columns; {fix}")
        return False
    for column in missing:
        problems.append(f"line {line}: column {column!r} is missing; add it, also to each row")
    twice = [column for column in columns if header.count(column) > 1]
    for column in twice:
        problems.append(f"line {line}: column {column!r} occurs twice; keep one of them")
    return not twice
