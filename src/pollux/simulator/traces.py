"""Reading measured traces in the layout of the paper's artifact.

A folder an application: `placements.csv` (placement as digits, GPUs on each node), `scalability.csv` (GPUs spread over
`num_nodes`), and `validation-<batch size>.csv`, one row an epoch. Every damaged row is named with its file, line and
column, all of them at once.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pollux.applications.measured import EpochStats, Measured, StepTime
from pollux.errors import InvalidDocument, UnknownName

MAX_LISTED = 10
PLACEMENT = re.compile(r"[1-9]+")
STEP_TIMES = ("placements.csv", "scalability.csv")
Row = TypeVar("Row")


def application_names(folder: Path) -> list[str]:
    """Names of the applications that a folder of traces holds."""
    if not folder.is_dir():
        raise InvalidDocument("traces", str(folder), "no such folder", "Name the folder that holds one folder a task")
    names = sorted(path.parent.name for path in folder.glob("*/placements.csv"))
    if not names:
        raise InvalidDocument(
            "traces", str(folder), "holds no <application>/placements.csv", "Name the folder above the applications"
        )
    return names


def step_time_files(folder: Path, name: str) -> list[Path]:
    """The files that an application's step times are in, if they are there."""
    return [path for file in STEP_TIMES if (path := folder / name / file).exists()]


def read_application(folder: Path, name: str) -> Measured:
    """One application's measurements; raises InvalidDocument with every damaged row."""
    if name not in (known := application_names(folder)):
        raise UnknownName("application", name, known)
    here = folder / name
    problems: list[str] = []
    steps = _read(here / "placements.csv", _placement_row, problems)
    if (here / "scalability.csv").exists():
        steps += _read(here / "scalability.csv", _scalability_row, problems)
    epochs: dict[int, Sequence[EpochStats]] = {}
    for path in here.glob("validation-*.csv"):
        if (match := re.fullmatch(r"validation-([1-9]\d*)", path.stem)) is None:
            problems.append(f"{path.name}: the name must end in a batch size")
        else:
            epochs[int(match[1])] = _read(path, _epoch_row, problems)
    if not epochs:
        problems.append("no file validation-<batch size>.csv")
    if problems:
        more = f" … and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        listed = "; ".join(problems[:MAX_LISTED]) + more
        raise InvalidDocument("traces", str(here), listed, "Mend these files (layout: docs/goodput.md, Applications)")
    return Measured(name, steps, dict(sorted(epochs.items())))


def _read(path: Path, parse: Callable[[dict[str, str]], Row], problems: list[str]) -> list[Row]:
    """The file's rows; what is wrong with them is added to `problems`."""
    rows = []
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.reader(stream)  # a DictReader does the same in twice the time
            columns = next(reader, [])
            for cells in filter(None, reader):
                try:
                    rows.append(parse(dict(zip(columns, cells, strict=False))))
                except _DamagedRowError as damage:
                    problems.append(f"{path.name} line {reader.line_num}: {damage}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"{path.name}: {error}")
        return rows
    if not rows and not problems:
        problems.append(f"{path.name}: no rows")
    return rows


class _DamagedRowError(ValueError):
    """A cell that cannot be used; the message names column and value."""


def _number(cells: dict[str, str], column: str, smallest: float = -math.inf) -> float:
    try:
        value = float(cells[column])
    except KeyError:
        raise _DamagedRowError(f"column {column!r} is missing") from None
    except ValueError:
        raise _DamagedRowError(f"{column} = {cells[column]!r} is not a number") from None
    if not math.isfinite(value) or value < smallest:
        raise _DamagedRowError(f"{column} = {cells[column]!r} must be finite and at least {smallest:g}")
    return value


def _whole(cells: dict[str, str], column: str) -> int:
    value = _number(cells, column, 1)
    if value != int(value):
        raise _DamagedRowError(f"{column} = {cells[column]!r} must be a whole number")
    return int(value)


def _step(cells: dict[str, str], placement: tuple[int, ...]) -> StepTime:
    step, sync = _number(cells, "step_time", 1e-9), _number(cells, "sync_time", 0.0)
    if sync >= step:
        raise _DamagedRowError(f"sync_time = {sync:g} must be below step_time = {step:g}")
    return StepTime(placement, _whole(cells, "local_bsz"), step, sync)


def _placement_row(cells: dict[str, str]) -> StepTime:
    return _step(cells, _placement(cells.get("placement") or ""))


@lru_cache(maxsize=4096)
def _placement(text: str) -> tuple[int, ...]:
    """Each is in as many rows as batch sizes were measured on it."""
    if not PLACEMENT.fullmatch(text):
        raise _DamagedRowError(f"placement = {text!r} must be digits 1-9, GPUs on each node")
    return tuple(map(int, text))


def _scalability_row(cells: dict[str, str]) -> StepTime:
    nodes, gpus = _whole(cells, "num_nodes"), _whole(cells, "num_replicas")
    if gpus < nodes:
        raise _DamagedRowError(f"num_replicas = {gpus} is fewer than num_nodes = {nodes}")
    each, over = divmod(gpus, nodes)
    even = (each + 1,) * over + (each,) * (nodes - over)
    return _step(cells, even)._replace(is_placement_known=False)


def _epoch_row(cells: dict[str, str]) -> EpochStats:
    return EpochStats(
        _number(cells, "progress", 0.0),
        _number(cells, "iteration", 0.0),
        _number(cells, "metric"),
        _number(cells, "grad_sqr", 0.0),
        _number(cells, "grad_var", 0.0),
    )
