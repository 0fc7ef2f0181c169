"""Type hint → a pair of functions: value to plain JSON data, and plain data back to a checked value.

Each hint is compiled once. Failures travel upwards and collect their path on the way, so that the ordinary case pays
nothing for good messages. The codec of core, `codec`, is the face of this module.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from math import isfinite
from typing import Any, NamedTuple

from pollux.core.frozenmap import FrozenMap
from pollux.errors import InvalidInput

BRIEF: typing.Final = types.MappingProxyType({"brief": True})
"""Metadata of a field that came later: it is written only if it is not its default, so that older texts stay equal."""


class Codec(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Mismatch(Exception):  # noqa: N818 - never leaves core: `codec` turns it into InvalidDocument
    """Data that do not fit the hint, with the path from the root, innermost step first."""

    def __init__(self, value: object, problem: str, fix: str, *steps: str) -> None:
        super().__init__(problem)
        self.value = value
        self.problem = problem
        self.fix = fix
        self.steps = list(steps)

    @property
    def path(self) -> str:
        return "".join(reversed(self.steps)).removeprefix(".")


def compile_hint(hint: Any) -> Codec:
    """The codec of a type hint; `TypeError` for hints that core data do not use."""
    return _compiled(hint)


@cache
def _compiled(hint: Any) -> Codec:
    if isinstance(hint, typing.NewType):
        return compile_hint(hint.__supertype__)
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _union(args)
    if origin is FrozenMap:
        return _map(*args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _tuple(args[0])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint)
    raise TypeError(f"the codec knows no type {hint!r}; use dataclasses, FrozenMap, tuple[X, …], enums and scalars")


def _same(value: Any) -> Any:
    return value


def _float_to_plain(value: Any) -> float:
    number = float(value) + 0.0  # equal numbers, equal bytes: 1 becomes 1.0, and -0.0 becomes 0.0
    if not isfinite(number):
        raise Mismatch(value, "JSON has no such number", "Use finite numbers, or None where the field allows it")
    return number


def _plain_to_float(plain: Any) -> float:
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise _wrong(plain, "a number")
    try:
        number = float(plain)
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise Mismatch(plain, "must be finite", "Give a finite number")
    return number


def _plain_to_int(plain: Any) -> int:
    if isinstance(plain, int) and not isinstance(plain, bool):
        return plain
    raise _wrong(plain, "a whole number")


def _plain_to_str(plain: Any) -> str:
    if isinstance(plain, str):
        return plain
    raise _wrong(plain, "text")


def _plain_to_bool(plain: Any) -> bool:
    if isinstance(plain, bool):
        return plain
    raise _wrong(plain, "true or false")


_SCALARS: dict[Any, Codec] = {
    str: Codec(_same, _plain_to_str),
    int: Codec(_same, _plain_to_int),
    bool: Codec(_same, _plain_to_bool),
    float: Codec(_float_to_plain, _plain_to_float),
}


def _enum(kind: type[Enum]) -> Codec:
    members = {member.value: member for member in kind}

    def decode(plain: Any) -> Enum:
        if isinstance(plain, str) and plain in members:
            return members[plain]
        raise Mismatch(plain, f"is no {kind.__name__}", known(plain, members))

    return Codec(lambda member: member.value, decode)


def _tuple(item_hint: Any) -> Codec:
    item = compile_hint(item_hint)

    def decode(plain: Any) -> tuple[Any, ...]:
        if not isinstance(plain, list):
            raise _wrong(plain, "a list")
        return tuple(_step(item.decode, part, f"[{position}]") for position, part in enumerate(plain))

    return Codec(lambda values: [_step(item.encode, v, f"[{i}]") for i, v in enumerate(values)], decode)


def _map(key_hint: Any, value_hint: Any) -> Codec:
    """A JSON object if the keys are text, else a list of [key, value] pairs in order of the keys."""
    key_codec, value_codec = compile_hint(key_hint), compile_hint(value_hint)
    if key_codec is not _SCALARS[str]:
        return _pairs(key_codec, value_codec)

    def encode(values: FrozenMap[str, Any]) -> dict[str, Any]:
        return {key: _step(value_codec.encode, value, f'["{key}"]') for key, value in values.items()}

    def decode(plain: Any) -> FrozenMap[str, Any]:
        if not isinstance(plain, dict):
            raise _wrong(plain, "an object")
        return FrozenMap({key: _step(value_codec.decode, part, f'["{key}"]') for key, part in plain.items()})

    return Codec(encode, decode)


def _pairs(key_codec: Codec, value_codec: Codec) -> Codec:
    def encode(values: FrozenMap[Any, Any]) -> list[list[Any]]:
        return [
            [_step(key_codec.encode, key, f"[{i}][0]"), _step(value_codec.encode, value, f"[{i}][1]")]
            for i, (key, value) in enumerate(values.items())
        ]

    def decode(plain: Any) -> FrozenMap[Any, Any]:
        if not isinstance(plain, list):
            raise _wrong(plain, "a list of [key, value] pairs")
        content: dict[Any, Any] = {}
        for i, pair in enumerate(plain):
            if not isinstance(pair, list) or len(pair) != 2:
                raise Mismatch(pair, "must be a pair", "Give [key, value]", f"[{i}]")
            key = _step(key_codec.decode, pair[0], f"[{i}][0]")
            if key in content:
                raise Mismatch(pair[0], "occurs twice", "Leave one of them out", f"[{i}][0]")
            content[key] = _step(value_codec.decode, pair[1], f"[{i}][1]")
        return FrozenMap(content)

    return Codec(encode, decode)


def _union(args: tuple[Any, ...]) -> Codec:
    """`X | None`, or several dataclasses told apart by a tag: {"type": name, "body": …}."""
    members = [arg for arg in args if arg is not types.NoneType]
    codec = compile_hint(members[0]) if len(members) == 1 else _tagged(members)
    if len(members) == len(args):
        return codec
    return Codec(
        lambda value: None if value is None else codec.encode(value),
        lambda plain: None if plain is None else codec.decode(plain),
    )


def _tagged(members: list[Any]) -> Codec:
    if not all(dataclasses.is_dataclass(member) for member in members):
        raise TypeError(f"the codec can tell dataclasses of a union apart, but not {members!r}")
    codecs = {member.__name__: compile_hint(member) for member in members}

    def encode(value: Any) -> dict[str, Any]:
        name = type(value).__name__
        if name not in codecs:
            raise Mismatch(name, "is not one of the types that may stand here", known(name, codecs))
        return {"type": name, "body": _step(codecs[name].encode, value, ".body")}

    def decode(plain: Any) -> Any:
        if not isinstance(plain, dict) or plain.keys() != {"type", "body"}:
            raise _wrong(plain, "an object with exactly the fields type and body")
        name = plain["type"]
        if not isinstance(name, str) or name not in codecs:
            raise Mismatch(name, "is not one of the types that may stand here", known(name, codecs), ".type")
        return _step(codecs[name].decode, plain["body"], ".body")

    return Codec(encode, decode)


def _record(kind: type[Any]) -> Codec:
    """A dataclass: an object with all of its fields, but for `BRIEF` ones that have their default.

    Reading fills fields that have defaults and are absent.
    """
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    codecs = {field.name: compile_hint(hints[field.name]) for field in fields}
    steps = {name: f".{name}" for name in codecs}
    required = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    defaults = {f.name: _default(f) for f in fields if f.metadata.get("brief")}
    written = {name: codec for name, codec in codecs.items() if name not in defaults}

    def encode(value: Any) -> dict[str, Any]:
        plain = {name: _step(codec.encode, getattr(value, name), steps[name]) for name, codec in written.items()}
        for name, default in defaults.items():
            if (part := getattr(value, name)) != default:
                plain[name] = _step(codecs[name].encode, part, steps[name])
        return plain

    def decode(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise _wrong(plain, f"an object ({kind.__name__})")
        for name in sorted(plain.keys() - codecs.keys()):
            raise Mismatch(plain[name], f"{kind.__name__} has no such field", known(name, codecs), f".{name}")
        for name in sorted(required - plain.keys()):
            raise Mismatch(None, "is missing", f"{kind.__name__} needs {', '.join(sorted(required))}", f".{name}")
        values = {name: _step(codecs[name].decode, part, steps[name]) for name, part in plain.items()}
        try:
            return kind(**values)
        except InvalidInput as error:
            raise Mismatch(error.value, error.problem, error.fix, f".{error.field}") from error

    return Codec(encode, decode)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _step(convert: Callable[[Any], Any], value: Any, step: str) -> Any:
    """Convert one part; a failure in it learns through which step it was reached."""
    try:
        return convert(value)
    except Mismatch as mismatch:
        mismatch.steps.append(step)
        raise


def _wrong(plain: Any, wanted: str) -> Mismatch:
    return Mismatch(plain, f"must be {wanted}", f"Give {wanted}")


def known(name: object, names: Iterable[str]) -> str:
    """The fix for a wrong name: the nearest right one, and all of them."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"{f'Did you mean {close[0]!r}? ' if close else ''}Known: {', '.join(names)}"
