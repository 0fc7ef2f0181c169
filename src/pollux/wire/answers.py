"""The answers of the REST API (`wire.api`) as plain JSON data, and back.

Not core's codec, which refuses fields that it does not know: an answer of a newer service is read by an older command
line, and what only the newer one knows is passed over. `object` stands for any JSON.
"""

from __future__ import annotations

import dataclasses
import reprlib
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from pollux.core import FrozenMap
from pollux.errors import InvalidDocument

T = TypeVar("T")

_SCALARS: dict[Any, tuple[type | types.UnionType, str]] = {
    str: (str, "text"),
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
}


def to_plain(answer: Any) -> Any:
    """Dicts, lists, texts and numbers: every field of every dataclass."""
    if dataclasses.is_dataclass(answer):
        return {field.name: to_plain(getattr(answer, field.name)) for field in dataclasses.fields(answer)}
    if isinstance(answer, FrozenMap | dict):
        return {str(key): to_plain(value) for key, value in answer.items()}
    if isinstance(answer, tuple | list):
        return [to_plain(item) for item in answer]
    return answer.value if isinstance(answer, Enum) else answer


def from_plain(plain: Any, kind: type[T]) -> T:
    """The opposite, for one of the dataclasses; `InvalidDocument` for what it cannot be."""
    value: T = _read(plain, kind, kind.__name__)
    return value


def _read(plain: Any, hint: Any, path: str) -> Any:
    if isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if hint is object:
        return plain
    if hint in _SCALARS:
        return _scalar(plain, hint, path)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if plain is None else _read(plain, args[0], path)
    if origin is FrozenMap:
        items = _expect(plain, dict, "an object", path).items()
        return FrozenMap({key: _read(value, args[1], f"{path}.{key}") for key, value in items})
    if origin is tuple:
        items = enumerate(_expect(plain, list, "a list", path))
        return tuple(_read(item, args[0], f"{path}[{position}]") for position, item in items)
    if issubclass(hint, Enum):
        known = {member.value: member for member in hint}
        if not isinstance(plain, str) or plain not in known:
            raise _wrong(plain, f"one of {', '.join(known)}", path)
        return known[plain]
    return _record(_expect(plain, dict, "an object", path), hint, path)


def _record(plain: dict[str, Any], kind: Any, path: str) -> Any:
    values: dict[str, Any] = {}
    for name, (hint, is_required) in _fields(kind).items():
        if name in plain:
            values[name] = _read(plain[name], hint, f"{path}.{name}")
        elif is_required:
            raise _wrong(None, "there", f"{path}.{name}")
    return kind(**values)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Name → type hint, and whether a value must be given."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }


def _scalar(plain: Any, hint: Any, path: str) -> Any:
    accepted, name = _SCALARS[hint]
    value = _expect(plain, accepted, name, path)
    if isinstance(value, bool) and hint is not bool:
        raise _wrong(plain, name, path)
    return float(value) if hint is float else value


def _expect(plain: Any, kind: type | types.UnionType, name: str, path: str) -> Any:
    if not isinstance(plain, kind):
        raise _wrong(plain, name, path)
    return plain


def _wrong(plain: object, wanted: str, path: str) -> InvalidDocument:
    fix = "Use the same version of Pollux on both sides, and check that the address is that of its service"
    return InvalidDocument(path, reprlib.repr(plain), f"must be {wanted}", fix)
