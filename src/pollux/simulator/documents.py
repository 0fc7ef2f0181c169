"""Files that people write: reading their text, and refusing them with everything that is wrong at once.

Shared by the readers of workloads, clusters and job lists. A problem is one line: where, the value, what is wrong, what
to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pollux.errors import InvalidDocument

MAX_LISTED = 20
MAX_SHOWN = 60
"""Longest value that a problem quotes in full, in characters."""

PACKED: Mapping[str, tuple[int, bytes]] = {
    "gzip": (0, b"\x1f\x8b"),
    "zip": (0, b"PK\x03\x04"),
    "xz": (0, b"\xfd7zXZ\x00"),
    "bzip2": (0, b"BZh91AY&SY"),
    "zstd": (0, b"\x28\xb5\x2f\xfd"),
    "tar": (257, b"ustar\x00"),
}
"""What archives are known by: where in the file, and the bytes there. None of them is found in a text."""


def read_text(kind: str, path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark; line ends are kept."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidDocument(
            kind, str(path), f"cannot be read: {reason}", "Name a file that is there and may be read"
        ) from error
    for name, (place, sign) in PACKED.items():
        if content.startswith(sign, place):
            raise InvalidDocument(kind, str(path), f"is compressed or an archive ({name})", "Unpack it first")
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
    return parsed_text(kind, path, read_text(kind, path), language, parse)


def parsed_text(kind: str, path: Path, text: str, language: str, parse: Callable[[str], object]) -> object:
    """The same of a text that was read already."""
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
    """A value as an error quotes it: text in single quotes, and null, true and arrays as JSON writes them."""
    try:
        text = repr(value) if isinstance(value, str | float) else json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:  # an int of more digits than Python prints
        text = "a very long number"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
