"""Files that people write: reading their text, and refusing them with everything that is wrong at once.

Shared by the readers of workloads, clusters and job lists. A problem is one line: where, the value, what is wrong, what
to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pollux.errors import InvalidDocument

MAX_LISTED = 20
MAX_SHOWN = 60
"""Longest value that a problem quotes in full, in characters."""


def read_text(kind: str, path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark; line ends are kept."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidDocument(
            kind, str(path), f"cannot be read: {reason}", "Name a file that is there and may be read"
        ) from error
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise InvalidDocument(kind, str(path), f"line {line} holds a NUL byte", "Give a text file in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8: byte 0x{content[error.start]:02x} on line {line}"
        raise InvalidDocument(kind, str(path), problem, "Save the file as UTF-8") from error


def parsed(kind: str, path: Path, language: str, parse: Callable[[str], object]) -> object:
    """The content of a text file, by a parser that raises ValueError for what is not of its language."""
    text = read_text(kind, path)
    try:
        return parse(text)
    except RecursionError as error:
        raise InvalidDocument(kind, str(path), "is nested too deeply", "Flatten the file") from error
    except ValueError as error:  # not of the language, or a number too long to be one
        raise InvalidDocument(kind, str(path), f"is no {language}: {error}", "Mend the file at that place") from error


def refusal(kind: str, path: Path, problems: Sequence[str], fix: str) -> InvalidDocument:
    """The one error for a file: each problem on its own line, the first MAX_LISTED of them."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{count}:", *problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        lines.append(f"… and {len(problems) - MAX_LISTED} more")
    return InvalidDocument(kind, str(path), "\n  ".join(lines), fix)


def shown(value: object) -> str:
    """A value as an error quotes it."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = "a very long number"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
