"""Options by their dotted names: `world.interference=0.25`, `policy.service_threshold_gpu_s=3200`."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from pollux.core import FrozenMap, decode
from pollux.errors import InvalidDocument, InvalidSpec, UnknownName
from pollux.simulator.options import Options

POLICY = "policy"
PLAIN = ("interval_s", "early_gap_s", "seed")
SECTIONS = ("world", "agent", "scheduler")
HIDDEN = (
    "scheduler.seed",
    "scheduler.retry_pause_s",
    "scheduler.max_retry_pause_s",
    "scheduler.abandoned_starts_fail",
)
"""The first follows from `seed`; the others are about failures, and no simulated job fails."""


def parse(
    assignments: Iterable[str], option: str = "--set", example: str = "world.interference=0.25"
) -> dict[str, object]:
    """From `key=value` texts to plain values: JSON where it is JSON, else the text itself."""
    found: dict[str, object] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise InvalidSpec(option, assignment, "is not key=value", f"Write for example {example}")
        found[key.strip()] = _value(text.strip())
    return found


def applied(options: Options, settings: Mapping[str, object]) -> Options:
    """The options with these changed; later ones of the same name win."""
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section == POLICY and name:
            options = replace(options, policy=FrozenMap({**options.policy, name: value}))
        elif section in SECTIONS and name:
            changed = _changed(getattr(options, section), section, name, value)
            options = replace(options, **{section: changed})
        elif key in PLAIN:
            options = _changed(options, "", key, value)
        else:
            raise UnknownName("setting", key, known(options))
    return options


def known(options: Options) -> tuple[str, ...]:
    """Every name that can be set; a policy's own are `policy.<option>`."""
    nested = [f"{section}.{field.name}" for section in SECTIONS for field in fields(getattr(options, section))]
    return (*PLAIN, *(name for name in nested if name not in HIDDEN), "policy.<option>")


def _changed(target: Any, section: str, name: str, value: object) -> Any:
    path = f"{section}.{name}" if section else name
    hints = typing.get_type_hints(type(target))
    if name not in hints or path in HIDDEN:
        names = [f"{section}.{known}" for known in hints]
        raise UnknownName("setting", path, [known for known in names if known not in HIDDEN])
    if typing.get_origin(hints[name]) is tuple and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        decoded = decode(value, hints[name])
    except InvalidDocument as error:
        raise InvalidSpec(path, error.value, error.problem, error.fix) from error
    return replace(target, **{name: decoded})


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
