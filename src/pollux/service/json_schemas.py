"""JSON Schema of the dataclasses in `wire.api`: types from the hints, descriptions from the docstrings under fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import Any

from pollux.core import FrozenMap

Schema = dict[str, Any]

_SCALARS: dict[Any, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}


def schema_of(hint: Any) -> Schema:
    """The schema of a type hint; dataclasses by reference to the components of the document."""
    if isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if hint is object:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # X | None
        inner = schema_of(args[0])
        return {**inner, "type": [inner["type"], "null"]} if "type" in inner else {"anyOf": [inner, {"type": "null"}]}
    if origin is FrozenMap:
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    if origin is tuple:
        return {"type": "array", "items": schema_of(args[0])}
    if issubclass(hint, Enum):
        return {"type": "string", "enum": [member.value for member in hint]}
    return {"$ref": f"#/components/schemas/{hint.__name__}"}


def record_schema(kind: type[Any], *, is_sent: bool) -> Schema:
    """The schema of a dataclass. The service sends every field; what it is sent may lack those with defaults."""
    hints, texts, missing = typing.get_type_hints(kind), field_docs(kind), dataclasses.MISSING
    schema: Schema = {"type": "object"}
    # A dataclass without a docstring is given its signature for one.
    if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
        schema["description"] = inspect.cleandoc(kind.__doc__)
    schema["properties"] = {}
    for field in dataclasses.fields(kind):
        described = {"description": texts[field.name]} if field.name in texts else {}
        schema["properties"][field.name] = {**schema_of(hints[field.name]), **described}
    schema["required"] = [
        field.name
        for field in dataclasses.fields(kind)
        if is_sent or (field.default is missing and field.default_factory is missing)
    ]
    if not is_sent:
        schema["additionalProperties"] = False
    return schema


def reachable(kinds: Iterable[type[Any]]) -> dict[str, type[Any]]:
    """These dataclasses and all that their fields hold, by name in alphabetical order."""
    found: dict[str, type[Any]] = {}
    waiting: list[Any] = list(kinds)
    while waiting:
        hint = waiting.pop()
        waiting += typing.get_args(hint)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint.__name__ not in found:
            found[hint.__name__] = hint
            waiting += typing.get_type_hints(hint).values()
    return dict(sorted(found.items()))


def field_docs(kind: type[Any]) -> dict[str, str]:
    """Field → the text that stands under it. None of them if the source is not there to be read."""
    return _docs_of_module(kind.__module__).get(kind.__name__, {})


@cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, KeyError):
        return {}
    return {node.name: dict(_docs_of_class(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docs_of_class(node: ast.ClassDef) -> Iterable[tuple[str, str]]:
    for before, after in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            yield before.target.id, inspect.cleandoc(after.value.value)
