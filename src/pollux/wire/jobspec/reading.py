"""A document while it is read: where its values stand, how they were written, and what is wrong with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pollux.wire.api import Fault

MAX_FAULTS = 100
MAX_SHOWN = 60
"""Characters of a value in a fault."""
MAX_BITS = 1000
"""Of a number that is written out: Python refuses to print enormous ones."""


@dataclass
class Reading:
    """A document while it is read. Places are named like `min_gpus`, `env.HOME`, `command[2]`; the whole is ``."""

    lines: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    """What was written where YAML reads something else than text: `yes` for true, `1_000` for 1000."""
    faults: list[Fault] = field(default_factory=list)

    def fault(self, place: str, value: object, problem: str, fix: str, *, hidden: bool = False) -> None:
        shown = "" if hidden else self.shown(place, value)
        self.faults.append(Fault(place, shown, problem, fix, self.line_of(place)))

    def line_of(self, place: str) -> int | None:
        """Of the place, or of what is around it."""
        for name in (place, re.split(r"[.\[]", place, maxsplit=1)[0], ""):
            if name in self.lines:
                return self.lines[name]
        return None

    def shown(self, place: str, value: object) -> str:
        """As it was written, on one line and not too long. Lists and mappings are only named: they may hold secrets."""
        if place in self.texts:
            return shortened(self.texts[place])
        match value:
            case None:
                return "null"
            case bool():
                return "true" if value else "false"
            case str():
                return shortened(value) if value else "''"
            case int() | float():
                return shortened(number_text(value))
            case Mapping():
                return "a mapping"
        return "a list"

    def sorted_faults(self) -> tuple[Fault, ...]:
        """In the order of lines; those of the same line, and without one, as they were found."""
        ordered = sorted(self.faults, key=lambda fault: math.inf if fault.line is None else fault.line)
        if len(ordered) > MAX_FAULTS:
            rest = Fault("", "", f"{len(ordered) - MAX_FAULTS} more faults", "Mend these first")
            ordered = [*ordered[:MAX_FAULTS], rest]
        return tuple(ordered)


def shortened(text: str) -> str:
    """Printable, on one line, and not too long."""
    cut = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in cut)


def number_text(value: bool | int | float) -> str:
    """As JSON has it; an enormous one is only named."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > MAX_BITS:
            return "a huge number"
    return repr(value)
