"""From a document to a request: every fault at once, or the request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pollux.errors import InvalidJob
from pollux.wire.api import Fault
from pollux.wire.jobspec.command import Complaint, default_name, find_script
from pollux.wire.jobspec.fields import BY_NAME, FIELDS, meant_by
from pollux.wire.jobspec.reading import Reading, shortened
from pollux.wire.jobspec.request import JobRequest

MAX_UNKNOWN = 20

ORDERED = (
    ("min_gpus", "max_gpus"),
    ("min_gpus", "requested_gpus"),
    ("requested_gpus", "max_gpus"),
    ("initial_batch_size", "max_batch_size"),
    ("initial_batch_size", "batch_size"),
    ("batch_size", "max_batch_size"),
    ("min_per_gpu_batch_size", "max_per_gpu_batch_size"),
    ("min_per_gpu_batch_size", "max_batch_size"),
)
"""Pairs of fields of which the first may not be greater than the second."""


def resolve_env(document: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The document with variables of null taken from `environ`. Those missing there stay null: a fault of `parse`."""
    env = document.get("env")
    if not isinstance(env, Mapping):
        return dict(document)
    found = {name: environ.get(name) if value is None else value for name, value in env.items()}
    return {**document, "env": found}


def parse(
    document: object,
    *,
    lines: Mapping[str, int] | None = None,
    texts: Mapping[str, str] | None = None,
    base_dir: str | None = None,
) -> JobRequest:
    """Read a document; raises `InvalidJob` with all its faults, in the order of lines, and nothing else.

    lines     where values stand in their file, by place: `min_gpus`, `env.HOME`, `command[2]`, and `` for the whole
    texts     how values were written that YAML reads as something else than text
    base_dir  what a relative working_dir starts from, and its default; None: it must be given, and absolute
    """
    reading = Reading(lines or {}, texts or {})
    if not isinstance(document, Mapping):
        fix = "Begin with a line like command: python train.py"
        reading.fault("", document, "a job is a mapping of fields to values", fix, hidden=True)
        raise InvalidJob(reading.sorted_faults())
    meant = _find_unknown(document, reading)
    values: dict[str, Any] = {}
    for entry in FIELDS:
        if entry.name in document:
            value = _read(entry.name, document[entry.name], reading)
            if value is not None:
                values[entry.attribute] = value
    if "command" not in document and "command" not in meant:
        reading.fault("command", "", "missing", "Give for instance command: python train.py", hidden=True)
    _find_contradictions(document, values, reading)
    _check_command(document, values, reading)
    _make_absolute(document, values, base_dir, reading)
    _raise_if_any(reading)
    return JobRequest(**{"name": default_name(values["command"]), **values})


def _raise_if_any(reading: Reading) -> None:
    if reading.faults:
        raise InvalidJob(reading.sorted_faults())


def _read(name: str, value: object, reading: Reading) -> object:
    if value is not None:
        return BY_NAME[name].kind.read(name, value, reading)
    if reading.texts.get(name) == "~":
        reading.fault(name, value, "YAML reads ~ as nothing", "Put it in quotes")
    else:
        reading.fault(name, value, "no value", "Give one, or leave the field out")
    return None


def _find_unknown(document: Mapping[Any, Any], reading: Reading) -> set[str]:
    """Returns the fields that were meant."""
    unknown = [str(key) for key in document if key not in BY_NAME]
    found = set()
    for name in unknown[:MAX_UNKNOWN]:
        meant = meant_by(name)
        if meant:
            found.add(meant)
        fix = f"Write {meant} if that is meant" if meant else f"Known: {', '.join(BY_NAME)}"
        # Without its value, which may be a secret in a misspelt env, as may be what stands behind a "=".
        shown = shortened(name.split("=")[0]) or "''"
        reading.faults.append(Fault(shown, "", "no such field", fix, reading.line_of(name)))
    if len(unknown) > MAX_UNKNOWN:
        problem = f"{len(unknown) - MAX_UNKNOWN} more fields that do not exist"
        reading.fault("", "", problem, "See docs/job-specification.md", hidden=True)
    return found


def _find_contradictions(document: Mapping[Any, Any], values: Mapping[str, Any], reading: Reading) -> None:
    if "gpus" in document:
        for entry in FIELDS:
            if entry.is_elastic and entry.name in document:
                problem = "does not go with gpus, which makes it a plain command that runs as it is"
                fix = "Leave it out, or leave gpus out to let Pollux choose"
                reading.fault(entry.name, document[entry.name], problem, fix)
        return
    for lower, upper in ORDERED:
        if lower in values and upper in values and values[lower] > values[upper]:
            _fault_pair(lower, upper, values, reading)
    least = values.get("min_gpus", 1)
    kept = values.get("batch_size", values.get("initial_batch_size")) if values.get("fixed_batch") else None
    for name, most in (("batch_size", kept), ("max_batch_size", values.get("max_batch_size"))):
        if most is not None and least > most:
            problem = f"each needs an example of every batch, and there are at most {most} in one"
            reading.fault("min_gpus", least, problem, f"Lower min_gpus or raise {name}")
            break


def _fault_pair(lower: str, upper: str, values: Mapping[str, Any], reading: Reading) -> None:
    """At the one of both that stands later in the file."""
    fix = f"Lower {lower} or raise {upper}"
    if (reading.line_of(lower) or 0) > (reading.line_of(upper) or 0):
        reading.fault(lower, values[lower], f"more than {upper} = {values[upper]}", fix)
    else:
        reading.fault(upper, values[upper], f"less than {lower} = {values[lower]}", fix)


def _check_command(document: Mapping[Any, Any], values: Mapping[str, Any], reading: Reading) -> None:
    if "command" not in values or "gpus" in document:
        return
    found = find_script(values["command"])
    if isinstance(found, Complaint):
        is_list = not isinstance(document["command"], str)
        place = f"command[{found.position}]" if is_list else "command"
        reading.fault(place, values["command"][found.position], found.problem, found.fix)


def _make_absolute(document: Mapping[Any, Any], values: dict[str, Any], base_dir: str | None, reading: Reading) -> None:
    given = os.path.expanduser(values.get("working_dir", ""))
    folder = os.path.normpath(os.path.join(base_dir or "", given))
    if os.path.isabs(folder):
        values["working_dir"] = folder
    elif "working_dir" in values:
        reading.fault("working_dir", values["working_dir"], "not an absolute path", "Give one that begins with /")
    elif "working_dir" not in document:
        reading.fault("working_dir", "", "missing", "Give the absolute path of a folder", hidden=True)
    if "checkpoint_dir" in values:
        values["checkpoint_dir"] = os.path.normpath(os.path.join(folder, os.path.expanduser(values["checkpoint_dir"])))
