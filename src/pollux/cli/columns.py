"""Tables of jobs that fit their terminal: columns that matter less go first, and no word is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.text import Text

from pollux.cli import output
from pollux.wire.api import JobView

PIPE_WIDTH = 100_000
"""Where there is no terminal, nothing is cut."""


class Column(NamedTuple):
    title: str
    cell: Callable[[JobView], Text]
    rank: int = 0
    """Those of the highest rank are dropped first; 0: stays."""
    justify: JustifyMethod = "right"
    fewest: int | None = None
    """Is cut to so many letters before another column goes, and to what is left if no other can go."""


def width() -> int:
    """Of what is printed on standard output."""
    return output.console.width if output.console.is_terminal else PIPE_WIDTH


def fitted(
    columns: Sequence[Column], jobs: Sequence[JobView], room: int, between: int
) -> tuple[list[Column], list[list[Text]]]:
    """The columns that there is room for, and a row for each job. `between`: what a column takes beside its text."""
    cells = {column: [_cell(column, job) for job in jobs] for column in columns}
    widths = {column: max(map(cell_len, (column.title, *(cell.plain for cell in cells[column])))) for column in columns}

    def needed(column: Column) -> int:
        least = widths[column] if column.fewest is None else min(column.fewest, widths[column])
        return least + between

    kept = list(columns)
    while sum(map(needed, kept)) > room and (least := max(kept, key=lambda column: column.rank)).rank:
        kept.remove(least)
    spare = room - sum(map(needed, kept))
    for column in kept:
        if column.fewest is not None:
            for cell in cells[column]:
                cell.truncate(max(len(column.title), needed(column) - between + spare), overflow="ellipsis")
    return kept, [[cells[column][row] for column in kept] for row in range(len(jobs))]


def _cell(column: Column, job: JobView) -> Text:
    text = column.cell(job)
    text.justify = column.justify
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
