"""The commands of `pollux`: where each one is, and under which heading the help shows it.

A command is imported when it is asked for. Most runs need one of them; all together take longer than many runs.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand
from typer.main import get_group

CLUSTER, JOBS, SIMULATOR, ALONE = "The cluster", "Jobs", "Simulator and models", "This machine, without a cluster"


class Place(NamedTuple):
    """Where a command is, a function or a group of its own."""

    panel: str
    path: str
    takes_command: bool = False
    """What follows the first argument belongs to the user's own command."""
    class_path: str | None = None
    """If typer's own class does not do."""


COMMANDS: Mapping[str, Place] = {
    "demo": Place(CLUSTER, "demo.command:demo"),
    "up": Place(CLUSTER, "up:up"),
    "down": Place(CLUSTER, "down:down"),
    "nodes": Place(CLUSTER, "nodes:nodes"),
    "drain": Place(CLUSTER, "nodes:drain"),
    "undrain": Place(CLUSTER, "nodes:undrain"),
    "top": Place(CLUSTER, "top:top"),
    "events": Place(CLUSTER, "follow:events"),
    "backup": Place(CLUSTER, "backup:backup"),
    "run": Place(JOBS, "submit:run", takes_command=True),
    "submit": Place(JOBS, "submit:submit", class_path="submit:SubmitCommand"),
    "validate": Place(JOBS, "validate:validate"),
    "ps": Place(JOBS, "jobs:ps"),
    "describe": Place(JOBS, "jobs:describe"),
    "logs": Place(JOBS, "follow:logs"),
    "wait": Place(JOBS, "jobs:wait"),
    "pause": Place(JOBS, "jobs:pause"),
    "resume": Place(JOBS, "jobs:resume"),
    "cancel": Place(JOBS, "jobs:cancel"),
    "scale": Place(JOBS, "jobs:scale"),
    "simulate": Place(SIMULATOR, "simulate:simulate"),
    "compare": Place(SIMULATOR, "simulate:compare"),
    "fidelity": Place(SIMULATOR, "fidelity.command:fidelity"),
    "sweep": Place(SIMULATOR, "study:sweep"),
    "reproduce": Place(SIMULATOR, "study:reproduce"),
    "policies": Place(SIMULATOR, "workload:policies"),
    "launch": Place(ALONE, "launch:launch", takes_command=True),
    "resize": Place(ALONE, "launch:resize"),
    "node": Place(ALONE, "node:node"),
    "doctor": Place(ALONE, "doctor:doctor"),
    "registry": Place(CLUSTER, "registry:app"),
    "workload": Place(SIMULATOR, "workload:app"),
    "profile": Place(SIMULATOR, "profile:app"),
    "bench": Place(SIMULATOR, "bench:app"),
}
"""In the order of the help."""


class Commands(UserDict[str, Any]):
    """All of them by name, each imported when it is first looked up."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, Place):
            found = self.data[name] = _loaded(name, found)
        return found


def _loaded(name: str, place: Place) -> Any:
    """As typer makes it of a function or of a group."""
    found, alone = _found(place.path), typer.Typer()
    alone.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name, rich_help_panel=place.panel)
    else:
        kind = TyperCommand if place.class_path is None else _found(place.class_path)
        settings = {"allow_interspersed_args": False} if place.takes_command else None
        alone.command(name, cls=kind, context_settings=settings, rich_help_panel=place.panel)(found)
    return get_group(alone).commands[name]


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"pollux.cli.{module}"), name)
