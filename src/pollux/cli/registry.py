"""`pollux registry`: what the cluster has learnt of each kind of job; shown, kept as a file, taken elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pollux import __version__
from pollux.cli import output
from pollux.cli.finding import DirOption, find
from pollux.cli.words import clock, count
from pollux.core import FrozenMap, KindProfile, ProfileRegistry, dumps, loads
from pollux.errors import InvalidDocument, InvalidInput
from pollux.wire.answers import to_plain
from pollux.wire.api import KindList

app = typer.Typer(no_args_is_help=True, help="Show, export and import what was learnt of each kind of job.")


@app.command("list")
def list_kinds(path: DirOption = None, as_json: output.JsonOption = False) -> None:
    """Show the kinds of jobs that the cluster knows, and how much of each."""
    with find(path) as client:
        found = client.kinds()
    _show(found, as_json)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="Where to write it; - prints it.", allow_dash=True)],
    path: DirOption = None,
) -> None:
    """Write the registry to a file: times, counts and names of kinds, and nothing else of any job."""
    output.check_writable(file, "FILE")
    with find(path) as client:
        document = client.export_kinds()
    output.write_text([json.dumps(document, sort_keys=True, separators=(",", ":")), "\n"], file, "FILE")
    if file != output.STDOUT:
        output.note(f"The registry is in {file}; elsewhere: pollux registry import {file}")


@app.command("import")
def import_kinds(
    file: Annotated[Path, typer.Argument(help="What pollux registry export has written.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="In place of all that the cluster knows; else it is added.")
    ] = False,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Add what another cluster has learnt. Twice the same file counts twice: --replace it then."""
    document = json.loads(dumps(read(file, "FILE")))
    with find(path) as client:
        found = client.import_kinds(document, replace=replace)
    _show(found, as_json)


def read(file: Path, option: str) -> ProfileRegistry:
    """The registry in a file; what is wrong with it is told by the name of the option."""
    try:
        return loads(file.read_bytes(), ProfileRegistry)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise InvalidInput(option, str(file), f"cannot be read: {reason}", "Name a file that is there") from None
    except InvalidDocument as error:
        problem = f"is no profile registry: {error.field} = {error.value!r} {error.problem}"
        raise InvalidInput(option, str(file), problem, error.fix) from error


def write(kinds: FrozenMap[str, KindProfile], file: Path, option: str) -> None:
    """As `pollux registry export` does."""
    output.write_text([dumps(ProfileRegistry(kinds, f"pollux {__version__}")), "\n"], file, option)


def _show(found: KindList, as_json: bool) -> None:
    if as_json:
        output.print_json(to_plain(found))
        return
    rows = [
        (
            kind.kind,
            kind.jobs,
            kind.observations,
            ", ".join(kind.gpu_types) or "–",
            kind.max_gpus,
            kind.work,
            kind.realloc_delay_s,
            clock(kind.updated_at_s),
        )
        for kind in found.kinds
    ]
    output.table(
        ["kind", "jobs", "observations", "GPU types", "most GPUs", "examples", "re-allocation, s", "updated"], rows
    )
    output.note(f"{count(len(found.kinds), 'kind')} of jobs.")
