"""JSON both ways, with the same bytes for equal data.

`encode`/`decode` go to plain data and back, `to_json`/`from_json` to text of a type that both sides know, and
`dumps`/`loads` wrap that in a document that names its type and schema: `{"body": …, "schema": 1, "type": "RoundDue"}`.
What cannot be read raises `InvalidDocument` with the path of the culprit. Fields that an older log lacks take their
defaults; fields that we do not know are refused, for they belong to a newer schema.
"""

from __future__ import annotations

import json
import reprlib
import typing
from types import UnionType
from typing import Any, TypeVar, overload

from pollux.core.actions import Action
from pollux.core.allocation import Allocation, Shape
from pollux.core.cluster import Cluster, Node
from pollux.core.events import Event
from pollux.core.hints import Mismatch, compile_hint, known
from pollux.core.job import Job, JobSpec
from pollux.core.kinds import ProfileRegistry
from pollux.core.model import JobModel
from pollux.core.plan import Plan, Snapshot
from pollux.core.profile import Profile
from pollux.errors import InvalidDocument

T = TypeVar("T")

SCHEMA_VERSION = 1
"""Grows when a reader of the version before could misread; not when a field with a default is added."""

_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_TYPES: dict[str, type[Any]] = {}


def register(kind: type[T]) -> type[T]:
    """Let a dataclass be a document of its own; usable as a decorator. Names are taken for ever."""
    if _TYPES.setdefault(kind.__name__, kind) is not kind:
        raise TypeError(f"{kind.__name__!r} is the name of another document type: {_TYPES[kind.__name__]!r}")
    return kind


for _kind in (*typing.get_args(Event), *typing.get_args(Action)):
    register(_kind)
for _kind in (Allocation, Cluster, Job, JobModel, JobSpec, Node, Plan, Profile, ProfileRegistry, Shape, Snapshot):
    register(_kind)


def encode(obj: object, as_type: Any = None) -> Any:
    """Plain dicts, lists, texts and numbers. `as_type` is needed only for what is not a dataclass or an enum."""
    try:
        return compile_hint(type(obj) if as_type is None else as_type).encode(obj)
    except Mismatch as mismatch:
        raise _invalid(mismatch) from None


@overload
def decode(plain: Any, kind: type[T]) -> T: ...
@overload
def decode(plain: Any, kind: Any) -> Any: ...
def decode(plain: Any, kind: Any) -> Any:
    """The opposite of `encode`: a checked object of that type, which may also be a union such as `Event`."""
    try:
        return compile_hint(kind).decode(plain)
    except Mismatch as mismatch:
        raise _invalid(mismatch) from mismatch.__cause__


def to_json(obj: object, as_type: Any = None) -> str:
    """Compact text on one line, keys sorted, ASCII only: equal objects give equal bytes."""
    return _JSON.encode(encode(obj, as_type))


@overload
def from_json(text: str | bytes, kind: type[T]) -> T: ...
@overload
def from_json(text: str | bytes, kind: Any) -> Any: ...
def from_json(text: str | bytes, kind: Any) -> Any:
    """The opposite of `to_json`."""
    return decode(_parse(text), kind)


def dumps(obj: object) -> str:
    """A document that says what it is: one of the registered types in an envelope with the schema version."""
    name = type(obj).__name__
    if _TYPES.get(name) is not type(obj):
        raise InvalidDocument("type", name, "is no document type", f"Register the class. {known(name, _TYPES)}")
    return _JSON.encode({"schema": SCHEMA_VERSION, "type": name, "body": encode(obj)})


@overload
def loads(text: str | bytes, expected: type[T]) -> T: ...
@overload
def loads(text: str | bytes, expected: UnionType | None = None) -> Any: ...
def loads(text: str | bytes, expected: Any = None) -> Any:
    """The opposite of `dumps`. With `expected` (a class, or a union such as `Event`) other types are refused."""
    return unwrap(_parse(text), expected)


@overload
def unwrap(document: Any, expected: type[T]) -> T: ...
@overload
def unwrap(document: Any, expected: UnionType | None = None) -> Any: ...
def unwrap(document: Any, expected: Any = None) -> Any:
    """What `loads` does, once the text has been read as JSON."""
    if not isinstance(document, dict) or "schema" not in document:
        raise _invalid(Mismatch(document, "is not one of our documents", 'Expected {"schema", "type", "body"}'))
    if document["schema"] != SCHEMA_VERSION or isinstance(document["schema"], bool):
        raise _invalid(
            Mismatch(
                document["schema"],
                f"this version of Pollux reads schema {SCHEMA_VERSION}",
                "Use the version of Pollux that wrote it, or migrate it",
                "schema",
            )
        )
    if document.keys() != {"schema", "type", "body"}:
        raise _invalid(Mismatch(sorted(document), "has other fields", 'Expected {"schema", "type", "body"}'))
    name = document["type"]
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise _invalid(Mismatch(name, "is no document type", known(name, _TYPES), "type"))
    if expected is not None and not issubclass(kind, expected):
        wanted = sorted(member.__name__ for member in typing.get_args(expected) or (expected,))
        raise _invalid(Mismatch(name, "is not a type that may stand here", known(name, wanted), "type"))
    try:
        return compile_hint(kind).decode(document["body"])
    except Mismatch as mismatch:
        mismatch.steps.append("body")
        raise _invalid(mismatch) from mismatch.__cause__


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidDocument(
            "document", _short(text), f"is not JSON ({error})", "Check where it was cut off"
        ) from None


def _invalid(mismatch: Mismatch) -> InvalidDocument:
    return InvalidDocument(mismatch.path or "document", _short(mismatch.value), mismatch.problem, mismatch.fix)


def _short(value: object) -> object:
    """The value itself if it is small: an error message must not carry a whole log."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, str) and len(value) <= 80):
        return value
    if isinstance(value, int) and abs(value) < 10**80:
        return value
    return reprlib.repr(value)
