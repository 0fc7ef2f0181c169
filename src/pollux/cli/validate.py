"""`pollux validate`: whether files of jobs are right, without a service."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import output
from pollux.cli.job_file import check_file
from pollux.errors import InvalidInput, fault_text
from pollux.wire.jobspec import json_schema

INVALID_INPUT = 2


def validate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", allow_dash=True, help="YAML or JSON; - is standard input."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of jobs instead, for editors and other programs.")
    ] = False,
    check_files: Annotated[
        bool,
        typer.Option(
            "--check-files/--no-check-files",
            help="Also look whether scripts, folders and variables that the jobs need are there on this machine.",
        ),
    ] = True,
    as_json: output.JsonOption = False,
) -> None:
    """Check files of jobs: every fault at once, with its line and what to do. Ends with 2 if there is one.

    Whether the cluster is large enough is asked at submission: pollux submit --dry-run.
    """
    if schema:
        output.print_json(json_schema())
        return
    if not files:
        raise InvalidInput("FILE", "", "no file to check", "Name one or several, or use --schema")
    found = [check_file(path, os.environ if check_files else None) for path in files]
    if as_json:
        output.print_json(
            {
                "files": [
                    {"file": file.path, "jobs": len(file.requests), "faults": [asdict(fault) for fault in file.faults]}
                    for file in found
                ]
            }
        )
    else:
        for file in found:
            count = "1 job" if len(file.requests) == 1 else f"{len(file.requests)} jobs"
            lines = [fault_text(fault, str(file.path)) for fault in file.faults]
            for line in lines or [f"{file.path}: {count}, all fine"]:
                typer.echo(line)
    if any(file.faults for file in found):
        raise typer.Exit(INVALID_INPUT)
