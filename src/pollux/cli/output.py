"""The one place of the command line that prints.

Figures and tables go to standard output; errors, notes and progress go to standard error, so that
`pollux … --json | jq` always reads clean JSON. Text is never taken for rich's markup: `pollux[plot]` stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleRenderable, RenderableType, RichCast
from rich.table import Table
from rich.text import Text

from pollux.errors import InvalidInput

console = Console(highlight=False, markup=False)
err_console = Console(highlight=False, markup=False, stderr=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
"""For commands that print: `--json` is a switch."""

JsonFileOption = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", allow_dash=True, help="Write the figures as JSON to FILE; - prints them instead."
    ),
]
"""For commands with a longer result: `--json FILE`, where `-` is standard output. Hand it to `write_json`."""

STDOUT = Path("-")


def note(message: str) -> None:
    """One line for the person at the terminal, on standard error."""
    err_console.print(message, soft_wrap=True)


def error(message: str) -> None:
    """One `error: …` line on standard error, red where there are colours."""
    err_console.print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)


def json_text(obj: object) -> str:
    """JSON with two spaces of indent and the keys in the order of insertion.

    Takes numpy's scalars and arrays and paths as well. What is not a finite number becomes null: JSON has no nan.
    """
    return json.dumps(_plain(obj), indent=2, ensure_ascii=False, allow_nan=False)


def print_json(obj: object) -> None:
    """JSON on standard output, unwrapped and without colours."""
    typer.echo(json_text(obj))


def write_json(obj: object, path: Path) -> None:
    """JSON to a file, whole or not at all; to standard output when `path` is `-`."""
    write_text([json_text(obj), "\n"], path, "--json")


def write_text(parts: Iterable[str], path: Path, option: str) -> None:
    """Text to the file that an option names, whole or not at all; to standard output when `path` is `-`."""
    if path == STDOUT:
        for part in parts:
            typer.echo(part, nl=False)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, parts)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise InvalidInput(option, str(path), f"cannot be written: {reason}", "Name a file you may write") from None


def _replace(path: Path, parts: Iterable[str]) -> None:
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: nothing to swap
        with path.open("w", encoding="utf-8") as stream:
            stream.writelines(parts)
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.writelines(parts)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp gives 0600, which suits secrets, not results
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _plain(obj: object) -> Any:
    match obj:
        case bool() | int() | str() | None:
            return obj
        case float():
            return float(obj) if math.isfinite(obj) else None
        case Mapping():
            return {str(key): _plain(value) for key, value in obj.items()}
        case Path():
            return str(obj)
    if callable(as_list := getattr(obj, "tolist", None)):
        return _plain(as_list())
    if isinstance(obj, Iterable):
        return [_plain(value) for value in obj]
    raise TypeError(f"no JSON form for {type(obj).__name__}")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table on standard output.

    Columns of numbers are set to the right; a float shows four significant digits (a large one
    all before the point), None a dash. A cell may be text,
    a number or anything that rich renders. Without a terminal nothing is cut: pipes and files get the full width.
    """
    cells = [list(row) for row in rows]
    numeric = [
        any(isinstance(row[i], int | float) for row in cells)
        and all(row[i] is None or isinstance(row[i], int | float) for row in cells)
        for i in range(len(columns))
    ]
    grid = Table(title=Text(title) if title else None, title_justify="left")
    for name, is_numeric in zip(columns, numeric, strict=True):
        grid.add_column(Text(name), justify="right" if is_numeric else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(_cell, row))
    if console.is_terminal:
        console.print(grid)
    else:
        width = console.measure(grid, options=console.options.update(width=100_000)).maximum
        Console(highlight=False, markup=False, width=width).print(grid)


def _cell(value: object) -> RenderableType:
    match value:
        case None:
            return Text("–")
        case bool():
            return Text("yes" if value else "no")
        case float():
            return Text(f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}")
        case ConsoleRenderable() | RichCast():
            return value
    return Text(str(value))


def number(value: float | None, digits: int) -> Text:
    """A cell with so many digits after the point; a dash for None."""
    return Text("–" if value is None else f"{value:.{digits}f}", justify="right")


def check_writable(path: Path | None, option: str) -> None:
    """Refuse a file that cannot be written before hours of work are done for it."""
    if path is not None and path != STDOUT and not path.exists():
        write_text([""], path, option)
        path.unlink()
    elif path is not None and path != STDOUT and (path.is_dir() or not os.access(path, os.W_OK)):
        raise InvalidInput(option, str(path), "cannot be written", "Name a file you may write")


class Bar:
    """A progress bar that may not be there. Calling it moves it forward."""

    def __init__(self, advance: Callable[[float], None], expect: Callable[[float], None]) -> None:
        self._advance = advance
        self.expect = expect
        """Tell it how much there is to do, where that was not known at first."""

    def __call__(self, amount: float) -> None:
        self._advance(amount)


@contextlib.contextmanager
def progress(description: str, total: float | None = None) -> Iterator[Bar]:
    """A bar with the time left, on standard error; gone when done, and never shown without a terminal.

    `with progress("fitting", 6) as advance: advance(1)`.
    """
    if not err_console.is_terminal:
        yield Bar(lambda amount: None, lambda total: None)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=err_console,
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=total)
        yield Bar(lambda amount: bar.advance(task, amount), lambda total: bar.update(task, total=total))
