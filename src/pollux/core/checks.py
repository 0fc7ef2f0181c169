"""The few questions that every `__post_init__` of core asks about a field.

Each returns nothing or raises the given error with field, value, problem and fix. `bool` is not a number here, and
numbers are finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from pollux.core.frozenmap import FrozenMap
from pollux.errors import InvalidInput

Error = type[InvalidInput]


def whole(error: Error, field: str, value: object, minimum: int, optional: bool = False) -> None:
    """An int of at least `minimum`."""
    if type(value) is int and value >= minimum:
        return
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(field, value, "must be a whole number", f"Give an int of {minimum} or more{_or_none(optional)}")
    raise error(field, value, f"must be at least {minimum}", f"Give an int of {minimum} or more{_or_none(optional)}")


def finite(
    error: Error, field: str, value: object, minimum: float | None, above: bool = False, optional: bool = False
) -> None:
    """A finite number: of at least `minimum`, strictly greater with `above`, any at all if `minimum` is None."""
    # Asked at every report of every job: the usual answers come first.
    if value is None and optional:
        return
    if (
        (type(value) is float or (isinstance(value, int | float) and not isinstance(value, bool)))
        and isfinite(value)
        and (minimum is None or value > minimum or (value == minimum and not above))
    ):
        return
    bound = "" if minimum is None else f" {'greater than' if above else 'of at least'} {minimum:g}"
    fix = f"Give a finite number{bound}{_or_none(optional)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise error(field, value, "must be a number", fix)
    if not isfinite(value):
        raise error(field, value, "must be finite", fix)
    raise error(field, value, f"must be{bound.replace(' of', '')}", fix)


def text(error: Error, field: str, value: object, may_be_empty: bool = False) -> None:
    """A str, by default with at least one character."""
    if not isinstance(value, str):
        raise error(field, value, "must be text", "Give a str")
    if not value and not may_be_empty:
        raise error(field, value, "must not be empty", "Give at least one character")


def flag(error: Error, field: str, value: object) -> None:
    """A bool."""
    if not isinstance(value, bool):
        raise error(field, value, "must be true or false", "Give a bool")


def frozen(error: Error, field: str, value: object) -> None:
    """A FrozenMap; a dict in its place would make the owner changeable and unhashable."""
    if not isinstance(value, FrozenMap):
        hint = f"Wrap it: FrozenMap({field})" if isinstance(value, Mapping) else "Give a FrozenMap"
        raise error(field, value, "must be a FrozenMap", hint)


def instance(error: Error, field: str, value: object, kind: type, optional: bool = False) -> None:
    """An object of the class `kind`."""
    if not isinstance(value, kind) and not (value is None and optional):
        raise error(field, value, f"must be a {kind.__name__}", f"Give a {kind.__name__}{_or_none(optional)}")


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""
