"""The kinds of values that the document of a job holds: how each is read, and what JSON Schema says of it.

A value that cannot be used leaves a `Fault` behind and reads as None; nothing raises, so that all faults are found at
once. Sizes are limited, so that a hostile document costs little. Values of environment variables are secrets: they
are in no fault.
"""

from __future__ import annotations

import math
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pollux.core import FrozenMap
from pollux.wire.api import Fault
from pollux.wire.jobspec.reading import MAX_BITS, MAX_SHOWN, Reading, number_text, shortened

MAX_TEXT = 80
MAX_PATH = 4096
MAX_ARGUMENTS = 1000
MAX_ARGUMENT = 1 << 16
MAX_COMMAND = 1 << 18
MAX_VARIABLES = 1000
MAX_VARIABLE = 1 << 15
MAX_ENV = 1 << 18
MAX_SECONDS = 10 * 366 * 86400

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}"
TASK_NAME = rf"{NAME}(:[0-9.][0-9.e+-]{{0,19}})?"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,199}"
DURATION = r"(\d{1,9}(\.\d{1,9})?[dhms])+"
SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
SHELL_WORDS = frozenset({"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1", "&>"})


def _is_writable(text: str) -> bool:
    """Whether a file, a command line and a database can hold it: no zero byte, no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _written(place: str, value: object, reading: Reading) -> str | None:
    """Text, numbers and flags as they were written; None for anything else."""
    match value:
        case str():
            return value
        case int() if value.bit_length() > MAX_BITS:
            return None
        case bool() | int() | float():
            return reading.texts.get(place, number_text(value))
    return None


class Kind(ABC):
    """A kind of value."""

    label: str
    """In the table of fields."""
    metavar: str | None
    """On the command line; None: a switch."""

    @abstractmethod
    def read(self, place: str, value: object, reading: Reading) -> Any:
        """What it stands for, or None and a fault."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The keywords of JSON Schema that restrict it."""


def _text(place: str, value: object, reading: Reading, most: int) -> str | None:
    """Printable text of 1 to `most` characters."""
    if isinstance(value, str) and 0 < len(value) <= most and value.isprintable():
        return value
    if isinstance(value, bool | int | float):
        read_as = f"read as {number_text(value)}, not as text" if place in reading.texts else "not text"
        reading.fault(place, value, read_as, "Put it in quotes")
    elif not isinstance(value, str):
        reading.fault(place, value, "not text", "Give one text")
    elif not value:
        reading.fault(place, value, "empty", "Give a text, or leave the field out")
    elif len(value) > most:
        reading.fault(place, value, f"longer than {most} characters", "Shorten it")
    else:
        reading.fault(place, value, "holds characters that cannot be printed", "Leave them out")
    return None


@dataclass(frozen=True)
class Text(Kind):
    label = "text"
    metavar = "TEXT"

    def read(self, place: str, value: object, reading: Reading) -> str | None:
        return _text(place, value, reading, MAX_TEXT)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}


@dataclass(frozen=True)
class Name(Kind):
    label = "name"
    metavar = "NAME"

    def read(self, place: str, value: object, reading: Reading) -> str | None:
        text = _text(place, value, reading, MAX_TEXT)
        if text is not None and not re.fullmatch(NAME, text):
            fix = "Use letters, digits, '_', '.' and '-', with a letter or digit first"
            reading.fault(place, value, "cannot be a name", fix)
            return None
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{NAME}$"}


@dataclass(frozen=True)
class TaskName(Name):
    """A name that may say how long the training is: `cifar10:0.2`."""

    def read(self, place: str, value: object, reading: Reading) -> str | None:
        text = _text(place, value, reading, MAX_TEXT)
        if text is not None and re.fullmatch(TASK_NAME, text):
            return text
        return None if text is None else super().read(place, value, reading)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{TASK_NAME}$"}


@dataclass(frozen=True)
class FolderPath(Kind):
    label = "path"
    metavar = "DIR"

    def read(self, place: str, value: object, reading: Reading) -> str | None:
        return _text(place, value, reading, MAX_PATH)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": MAX_PATH}


@dataclass(frozen=True)
class Whole(Kind):
    low: int
    high: int
    label = "whole number"
    metavar = "N"

    def read(self, place: str, value: object, reading: Reading) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int):
            reading.fault(place, value, "not a whole number", self._meant(value))
            return None
        written = reading.texts.get(place)
        if written is not None and not re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", written):
            fix = f"Write {number_text(value)} if that is meant"
            reading.fault(place, value, f"YAML reads this as {number_text(value)}", fix)
            return None
        if not self.low <= value <= self.high:
            problem = f"less than {self.low}" if value < self.low else f"more than {self.high}"
            reading.fault(place, value, problem, f"Give a number from {self.low} to {self.high}")
            return None
        return value

    def _meant(self, value: object) -> str:
        if isinstance(value, float | str) and not (isinstance(value, str) and len(value) > MAX_SHOWN):
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if number.is_integer() and self.low <= number <= self.high:
                quoted = isinstance(value, str) and value.strip().isdecimal()
                return f"Write {int(number)}{', without quotes' if quoted else ''}"
        return f"Give a number from {self.low} to {self.high}"

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Flag(Kind):
    label = "true or false"
    metavar = None

    def read(self, place: str, value: object, reading: Reading) -> bool | None:
        if isinstance(value, bool):
            return value
        quoted = isinstance(value, str) and value.lower() in ("true", "false")
        fix = f"Write {str(value).lower()}, without quotes" if quoted else "Write true or false"
        reading.fault(place, value, "neither true nor false", fix)
        return None

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Duration(Kind):
    """Read as seconds."""

    label = "seconds, or text like 2h"
    metavar = "TIME"

    def read(self, place: str, value: object, reading: Reading) -> float | None:
        fix = "Give seconds, or text like 90m, 2h, 1d or 1h30m"
        written = reading.texts.get(place, "")
        if ":" in written:
            reading.fault(place, value, "not a duration", fix)
            return None
        seconds: float
        match value:
            case bool():
                seconds = math.nan
            case int() | float():
                seconds = min(value, MAX_SECONDS + 1.0)
            case str() if len(value) <= MAX_TEXT and re.fullmatch(DURATION, value, re.ASCII):
                seconds = sum(float(part[:-1]) * SECONDS[part[-1]] for part in re.findall(r"[\d.]+[dhms]", value))
            case _:
                seconds = math.nan
        if math.isnan(seconds):
            reading.fault(place, value, "not a duration", fix)
        elif seconds <= 0:
            reading.fault(place, value, "not above 0", fix)
        elif seconds > MAX_SECONDS:
            reading.fault(place, value, "more than ten years", "Give less, or leave it out")
        else:
            return float(seconds)
        return None

    def schema(self) -> dict[str, Any]:
        text = {"pattern": f"^{DURATION}$", "maxLength": MAX_TEXT}
        return {"type": ["number", "string"], "exclusiveMinimum": 0, "maximum": MAX_SECONDS, **text}


@dataclass(frozen=True)
class Command(Kind):
    """Read as a tuple of texts. One text is split as a shell would split it, but no shell ever sees it."""

    label = "text, or list of texts"
    metavar = "COMMAND"

    def read(self, place: str, value: object, reading: Reading) -> tuple[str, ...] | None:
        match value:
            case str() if len(value) > MAX_COMMAND:
                found = None
                reading.fault(place, value, f"longer than {MAX_COMMAND} characters", "Shorten it")
            case str():
                found = self._split(place, value, reading)
            case list() | tuple() if len(value) > MAX_ARGUMENTS:
                found = None
                reading.fault(place, value, f"more than {MAX_ARGUMENTS} items", "Shorten it")
            case list() | tuple():
                found = self._items(place, list(value), reading)
            case _:
                found = None
                problem = "neither a text nor a list of texts"
                reading.fault(place, value, problem, "Give for instance: python train.py --epochs 10")
        if found is None:
            return None
        if not found or not found[0].strip():
            reading.fault(place, value, "names no program", "Give for instance: python train.py --epochs 10")
            return None
        if sum(map(len, found)) > MAX_COMMAND:
            reading.fault(place, value, f"longer than {MAX_COMMAND} characters in all", "Shorten it")
            return None
        return tuple(found)

    def _split(self, place: str, text: str, reading: Reading) -> list[str] | None:
        if not _is_writable(text):
            reading.fault(place, text, "holds characters that no command line can hold", "Leave them out")
            return None
        try:
            words = shlex.split(text.replace("\\\n", " "))
        except ValueError:
            reading.fault(place, text, "a quote is not closed", "Close it, or give a list of texts")
            return None
        if len(words) > MAX_ARGUMENTS:
            reading.fault(place, text, f"more than {MAX_ARGUMENTS} words", "Shorten it")
            return None
        if shell := SHELL_WORDS.intersection(words):
            problem = f"no shell reads it, so that {min(shell)} would be an argument"
            fix = 'Call a shell yourself (command: [bash, -c, "…"] and gpus: n), or give a list if it is meant as one'
            reading.fault(place, text, problem, fix)
            return None
        return words

    def _items(self, place: str, items: list[object], reading: Reading) -> list[str] | None:
        found: list[str] = []
        for position, item in enumerate(items):
            where = f"{place}[{position}]"
            text = _written(where, item, reading)
            if text is None:
                reading.fault(where, item, "not text", "Give one text for each argument")
            elif len(text) > MAX_ARGUMENT:
                reading.fault(where, text, f"longer than {MAX_ARGUMENT} characters", "Shorten it")
            elif not _is_writable(text):
                reading.fault(where, text, "holds characters that no command line can hold", "Leave them out")
            else:
                found.append(text)
        return found if len(found) == len(items) else None

    def schema(self) -> dict[str, Any]:
        text = {"minLength": 1, "maxLength": MAX_COMMAND}
        item = {"type": ["string", "number", "boolean"], "maxLength": MAX_ARGUMENT}
        return {"type": ["string", "array"], **text, "items": item, "minItems": 1, "maxItems": MAX_ARGUMENTS}


@dataclass(frozen=True)
class Environment(Kind):
    """Read as a FrozenMap. Numbers and flags count as they were written."""

    label = "mapping of texts"
    metavar = "NAME[=VALUE]"

    def read(self, place: str, value: object, reading: Reading) -> FrozenMap[str, str] | None:
        before = len(reading.faults)
        if not isinstance(value, Mapping):
            fix = "Give a mapping with one line for each: NAME: value"
            reading.fault(place, value, "not a mapping of names to values", fix, hidden=True)
            return None
        if len(value) > MAX_VARIABLES:
            reading.fault(place, value, f"more than {MAX_VARIABLES} variables", "Give fewer", hidden=True)
            return None
        found: dict[str, str] = {}
        for name, item in value.items():
            if not isinstance(name, str) or not re.fullmatch(VARIABLE, name):
                # What stands behind a "=" may be the secret itself.
                shown = shortened(str(name)[:MAX_TEXT].split("=")[0])
                problem = "cannot be the name of a variable"
                fix = "Use letters, digits and '_', with no digit first"
                reading.faults.append(
                    Fault(f"{place}.{shown}", "", problem, fix, reading.line_of(f"{place}.{name}")),
                )
                continue
            where = f"{place}.{name}"
            if (text := self._value(where, item, reading)) is not None:
                found[name] = text
        if sum(len(name) + len(text) for name, text in found.items()) > MAX_ENV:
            problem = f"longer than {MAX_ENV} characters in all"
            reading.fault(place, value, problem, "Keep large values in files", hidden=True)
        return FrozenMap(found) if len(reading.faults) == before else None

    def _value(self, where: str, item: object, reading: Reading) -> str | None:
        problem = fix = ""
        text = _written(where, item, reading)
        if item is None:
            problem = "no value: null takes it from the environment of who submits, where it is not set"
            fix = "Set it there, or give a value"
        elif text is None:
            problem, fix = "not text", "Give one text, or null to take it from your environment"
        elif len(text) > MAX_VARIABLE:
            problem, fix = f"longer than {MAX_VARIABLE} characters", "Keep large values in files"
        elif not _is_writable(text):
            problem, fix = "holds characters that no environment can hold", "Leave them out"
        if problem:
            reading.fault(where, item, problem, fix, hidden=True)
            return None
        return text

    def schema(self) -> dict[str, Any]:
        value = {"type": ["string", "number", "boolean", "null"], "maxLength": MAX_VARIABLE}
        names = {"pattern": f"^{VARIABLE}$"}
        return {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": value,
            "maxProperties": MAX_VARIABLES,
        }
