"""Policies by name: built-in ones, those that installed packages announce, and a user's own by its dotted path.

Nothing is imported before it is asked for. A package announces its policies as entry points of the group
`pollux.policies`; a path is written `my_package.my_module:MyPolicy`, and the current folder is searched for it first.
Built-in names cannot be taken by others.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from pollux.core import FrozenMap, decode
from pollux.errors import InvalidDocument, InvalidSpec, PolicyFailed, PolluxError, UnknownName
from pollux.policies.base import Policy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

ENTRY_POINTS = "pollux.policies"
_NO_OPTIONS: Mapping[str, object] = FrozenMap()


class Entry(NamedTuple):
    """Where a policy is, and the options that its name stands for."""

    path: str
    preset: Mapping[str, object] = _NO_OPTIONS
    summary: str | None = None
    """What it does with these options; None: as the class says."""
    is_own: bool = False
    """A path that a user wrote: its module may be in the current folder."""


BUILT_IN: Mapping[str, Entry] = {
    "castor": Entry("pollux.policies.castor.policy:Castor"),
    "fifo": Entry("pollux.policies.fifo:Fifo"),
    "fifo-backfill": Entry(
        "pollux.policies.fifo:Fifo",
        {"backfill": True},
        "First come, first served, but jobs that fit pass one that does not; nobody is pre-empted.",
    ),
    "optimus": Entry("pollux.policies.optimus:Optimus"),
    "pollux": Entry("pollux.policies.pollux.policy:Pollux"),
    "srtf": Entry("pollux.policies.srtf:Srtf"),
    "tiresias": Entry("pollux.policies.tiresias:Tiresias"),
}


def names() -> tuple[str, ...]:
    """Every name that `make` knows, in alphabetical order; dotted paths come on top of them."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in _entry_points())}))


def policy_class(name: str) -> type[Policy]:
    """The class behind a name or a dotted path, imported now."""
    return _load(_entry(name))


def make(name: str, options: Mapping[str, object] = _NO_OPTIONS) -> Policy:
    """A new policy. Options are plain values (numbers, truth values, text, None), checked against the class's fields.

    An option given here goes before one that the name stands for.
    """
    entry = _entry(name)
    kind = _load(entry)
    with _blaming(name, "being made"):
        return kind(**_values(name, kind, {**entry.preset, **options}))


class Description(TypedDict):
    """What there is to know about a policy before choosing it."""

    summary: str
    needs: str
    options: dict[str, Any]
    """With the values that its name stands for."""


def describe(name: str) -> Description:
    """A policy in a few words."""
    entry = _entry(name)
    kind = _load(entry)
    facts = {"oracle": bool(kind.needs_oracle), "models": kind.reads_models}
    made = make(name) if not _required(kind) else None
    return Description(
        summary=entry.summary or (kind.__doc__ or "").strip().partition("\n")[0],
        needs=", ".join(fact for fact, holds in facts.items() if holds) or "nothing",
        options={option: getattr(made, option, None) for option in _options(kind)},
    )


def _entry(name: str) -> Entry:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return Entry(name, is_own=True)
    for point in _entry_points():
        if point.name == name:
            return Entry(f"{point.module}:{point.attr}")
    raise UnknownName("policy", name, names())


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # takes as long to import as all policies together

    return entry_points(group=ENTRY_POINTS)


def _load(entry: Entry) -> type[Policy]:
    path = entry.path
    module_name, _, class_name = path.partition(":")
    fix = "Write my_package.my_module:MyPolicy; the module must be installed or in the current folder"
    if not module_name or module_name.startswith("."):
        raise InvalidSpec("policy", path, "names no module", fix)
    with _blaming(path, "being imported"), _current_folder() if entry.is_own else nullcontext():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, but something that it needs is not
            raise InvalidSpec("policy", path, f"cannot be imported ({error})", fix) from error
    kind = getattr(module, class_name, None)
    if kind is None:
        raise InvalidSpec("policy", path, f"{module_name} has no {class_name!r}", fix)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise InvalidSpec("policy", path, "is not a policy", "Derive the class from pollux.policies.Policy")
    return kind


@contextmanager
def _current_folder() -> Iterator[None]:
    """Modules are looked for in the current folder first, as by `python -m`; the `pollux` script does not do so."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")  # what is imported later must not come from wherever the user happens to be


@contextmanager
def _blaming(policy: str, doing: str) -> Iterator[None]:
    """Whatever is raised in here, but not on purpose, is the fault of the policy."""
    try:
        yield
    except PolluxError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise PolicyFailed(policy, doing, what) from error


def _values(name: str, kind: type[Policy], options: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of the class: plain values as its type hints want them."""
    hints = _options(kind)
    values: dict[str, Any] = {}
    for option, plain in options.items():
        if option not in hints:
            raise UnknownName(f"option of policy {name}", option, hints)
        try:
            values[option] = decode(plain, hints[option])
        except InvalidDocument as error:
            raise InvalidSpec(f"{name}.{option}", error.value, error.problem, error.fix) from error
    missing = [option for option in _required(kind) if option not in values]
    if missing:
        raise InvalidSpec(f"{name}.{missing[0]}", None, "has no default", f"Give {', '.join(missing)}")
    return values


def _fields(kind: type[Policy]) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(kind) if field.init) if dataclasses.is_dataclass(kind) else ()


def _options(kind: type[Policy]) -> dict[str, Any]:
    """Option → type hint. A class that is not a dataclass has none."""
    fields = _fields(kind)
    hints = typing.get_type_hints(kind) if fields else {}
    return {field.name: hints[field.name] for field in fields}


def _required(kind: type[Policy]) -> list[str]:
    missing = dataclasses.MISSING
    return [field.name for field in _fields(kind) if field.default is missing and field.default_factory is missing]
