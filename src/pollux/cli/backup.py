"""`pollux backup`: a copy of the event log, while the service writes to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import output
from pollux.cli.finding import DirOption
from pollux.errors import InvalidInput, Permanent


def backup(
    file: Annotated[Path, typer.Argument(help="Where the copy goes; must not exist.")],
    folder: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Copy the cluster's event log, as it is at one moment, also while the service runs.

    Checkpoints of jobs are not in it. How to restore: docs/operations.md.
    """
    from pollux.service.place import ClusterFolder
    from pollux.service.store import SqliteLog

    place = ClusterFolder(folder)
    if not place.database.is_file():
        raise Permanent(f"There is no event log in {place.path}. Start a cluster with pollux up, or give its --dir.")
    if file.exists():
        raise InvalidInput("FILE", str(file), "is there already", "Name a new file")
    with SqliteLog(place.database, read_only=True) as log:
        log.backup(file)
        last = log.last_number
    if as_json:
        output.print_json({"file": str(file), "events": last, "bytes": file.stat().st_size})
    else:
        typer.echo(f"{file}: {last} events. It holds the environment of jobs: keep it to yourself.")
