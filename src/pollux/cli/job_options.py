"""The fields of a job as options of `pollux submit` and `pollux run`: made of the table that the YAML is read by."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from pollux.errors import InvalidJob
from pollux.wire.jobspec import JobRequest, check_files, parse, resolve_env
from pollux.wire.jobspec.fields import FIELDS, Field
from pollux.wire.jobspec.kinds import Environment, Flag, Whole

PANEL = "The job"
SIZES_PANEL = "Its GPUs and batch sizes"
SWITCHES_PANEL = "What Pollux may do with it"
RECEIVER = "fields"


def with_job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a command with a parameter `fields: dict[str, Any]`: gives it one option for each field instead.

    `fields` then holds those that were given, as a document has them; `command` is never among them, since it comes
    after `--`. Nothing is checked here: `parse` finds all faults at once.
    """
    options = {field.name: field for field in FIELDS if field.name != "command"}
    signature = inspect.signature(function, eval_str=True)
    if RECEIVER not in signature.parameters or options.keys() & signature.parameters.keys():
        raise TypeError(f"{function.__name__} must take {RECEIVER}, and none of its options itself")

    @wraps(function)
    def command(**given: Any) -> Any:
        raw = {name: given.pop(name) for name in options}
        fields = {name: _value(options[name], value) for name, value in raw.items() if value not in (None, [])}
        return function(**given, **{RECEIVER: fields})

    kept = [parameter for parameter in signature.parameters.values() if parameter.name != RECEIVER]
    made = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(field))
        for name, field in options.items()
    ]
    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in kept]
    # typer reads the signature for the order and the annotations for the types.
    command.__signature__ = signature.replace(parameters=[*keyword, *made])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*keyword, *made)}
    del command.__wrapped__
    return command


def document_of(fields: dict[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The document of a job that was given all by options."""
    return {**fields, **({"command": list(command)} if command else {})}


def request_of(document: Mapping[str, Any], environ: Mapping[str, str]) -> JobRequest:
    """The job that was given by options, in the current folder; `InvalidJob` with all faults, or all missing files."""
    request = parse(resolve_env(document, environ), base_dir=os.getcwd())
    if faults := check_files(request):
        raise InvalidJob(faults)
    return request


def _annotation(field: Field) -> Any:
    default = field.default_text or (None if field.default == {} else str(field.default).lower())
    if isinstance(field.kind, Flag):
        switch = typer.Option(
            f"{field.flag}/--no-{field.flag[2:]}",
            help=field.description,
            show_default=default or False,
            rich_help_panel=SWITCHES_PANEL,  # of its own: the second names would take the room of all others
        )
        return Annotated[bool | None, switch]
    names = (field.flag, "-e") if field.name == "env" else (field.flag,)
    option = typer.Option(
        *names,
        metavar=field.kind.metavar,
        help=field.description,
        show_default=default or False,
        rich_help_panel=SIZES_PANEL if field.is_elastic or "gpu" in field.name else PANEL,
    )
    return Annotated[list[str] | None, option] if field.name == "env" else Annotated[str | None, option]


def _value(field: Field, given: Any) -> Any:
    """As a document would have it; what is no number stays text, for `parse` to complain about."""
    match field.kind:
        case Whole() if re.fullmatch(r"[-+]?[0-9]{1,20}", given):
            return int(given)
        case Environment():
            pairs = (text.partition("=") for text in given)
            return {name: value if equals else None for name, equals, value in pairs}
    return given
