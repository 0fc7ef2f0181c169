"""The command, and what it refuses. All else is loaded when it is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pollux.cli import output, report, run_options
from pollux.cli.trial.checking import check_before
from pollux.cli.trial.folder import KeepOption
from pollux.errors import InvalidInput, UnknownName


def demo(
    only: Annotated[str | None, typer.Option(metavar="POLICY", help="Run under this one only: pollux or fifo.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer jobs: four emulated ones, or three small ones.")
    ] = False,
    kill_service: Annotated[
        bool, typer.Option("--kill-service", help="Kill the service (-9) halfway under pollux, and start it again.")
    ] = False,
    emulate: Annotated[
        bool | None,
        typer.Option(
            "--emulate/--no-emulate",
            help="Eight emulated GPUs, or four plain CPU slots with small real trainings.",
            show_default="emulated if there is no GPU, else the GPUs",
        ),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="Use the GPUs of this machine.")] = False,
    folder: Annotated[
        Path,
        typer.Option(
            "--report", metavar="DIR", parser=report.folder_named, help="Where report.html and its figures go."
        ),
    ] = Path("out/demo"),
    keep: KeepOption = None,
    json_file: output.JsonFileOption = None,
) -> None:
    """See Pollux at work: six training jobs share a cluster of this machine, for about five minutes.

    They run under Pollux and then, live as well, under FIFO with the GPUs that their owners asked for. Without a GPU
    they are emulated: real processes at the pace of eight T4. It uses clusters of its own and leaves nothing running.
    Exit code 1: a job failed, missed its target or started from scratch; or an
    emulated one lost replicas.
    """
    from pollux.cli.demo.running import POLICIES
    from pollux.cli.demo.story import REFERENCE

    if only is not None and only not in POLICIES:
        raise UnknownName("--only", only, POLICIES)
    if kill_service and only == REFERENCE:
        raise InvalidInput("--kill-service", only, "is for the run under pollux", "Leave out --only")
    if gpus and emulate:
        raise InvalidInput("--gpus", "--emulate", "are two things", "Leave one of them out")
    check_before("The demo", keep, folder, json_file)

    policies = POLICIES if only is None else [only]
    has_gpus = gpus or (emulate is None and _has_gpus())
    if emulate or (emulate is None and not has_gpus):
        faults, document, page = _emulated(policies, quick, kill_service, keep, folder)
    else:
        faults, document, page = _plain(policies, quick, kill_service, keep, folder, has_gpus)
    output.note(f"The report is in {page}")
    if json_file is not None:
        output.write_json(document, json_file)
    for fault in faults:
        output.error(fault)
    if faults:
        raise typer.Exit(1)


Shown = tuple[list[str], dict[str, Any], Path]
"""Faults, everything as plain data, and where the page is."""


def _emulated(policies: Sequence[str], is_quick: bool, kills_service: bool, keep: Path | None, folder: Path) -> Shown:
    run_options.use_one_thread()
    from pollux.cli.demo import emulated_report
    from pollux.cli.demo.emulated import run_emulated_demo
    from pollux.cli.trial.cluster import ended_by_sigterm
    from pollux.cli.trial.screen import show_on_terminal

    with ended_by_sigterm(), show_on_terminal() as (tell, show):
        found = run_emulated_demo(
            policies, is_quick=is_quick, kills_service=kills_service, keep=keep, tell=tell, show=show
        )
    emulated_report.print_summary(found)
    return found.faults, found.document(), emulated_report.write(found, folder)


def _plain(
    policies: Sequence[str], is_quick: bool, kills_service: bool, keep: Path | None, folder: Path, use_gpus: bool
) -> Shown:
    from pollux.cli.demo import report as demo_report
    from pollux.cli.demo.running import run_demo
    from pollux.cli.trial.cluster import ended_by_sigterm
    from pollux.cli.trial.screen import show_on_terminal

    with ended_by_sigterm(), show_on_terminal() as (tell, show):
        found = run_demo(
            policies,
            is_quick=is_quick,
            kills_service=kills_service,
            use_gpus=use_gpus,
            keep=keep,
            tell=tell,
            show=show,
        )
    demo_report.print_summary(found)
    return found.faults, found.document(), demo_report.write(found, folder)


def _has_gpus() -> bool:
    """Some that can be used. What is wrong with others is said."""
    from pollux.providers.local.devices import describe_devices

    found = describe_devices()
    if found.problem:
        output.note(found.problem)
    return bool(found.devices)
