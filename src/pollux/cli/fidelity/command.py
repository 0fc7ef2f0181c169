"""The command, and what it refuses. All else is loaded when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import output, report, run_options
from pollux.cli.compressed import check_pace, haste_of
from pollux.cli.trial.checking import check_before
from pollux.cli.trial.folder import KeepOption
from pollux.core import checks
from pollux.errors import InvalidInput


def fidelity(
    workload: Annotated[str, typer.Argument(help=run_options.WORKLOAD_HELP)],
    compress: Annotated[float, typer.Option(metavar="F", help="How much faster than real the live side runs.")] = 20.0,
    policy: Annotated[str, typer.Option(help="Who decides on both sides; `pollux policies` lists them.")] = "pollux",
    nodes: Annotated[int, typer.Option(min=1, help="Emulated nodes.")] = 2,
    slots: Annotated[int, typer.Option(min=1, help="Emulated GPUs of each node.")] = 4,
    realloc_delay: Annotated[
        float, typer.Option(metavar="S", help="Emulated seconds without training at each start and re-allocation.")
    ] = 30.0,
    interval: Annotated[float, typer.Option(metavar="S", help="Emulated seconds from round to round.")] = 60.0,
    folder: Annotated[
        Path,
        typer.Option(
            "--report", metavar="DIR", parser=report.folder_named, help="Where report.html and its figures go."
        ),
    ] = Path("out/fidelity"),
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a bound is missed or a fault found.")] = False,
    keep: KeepOption = None,
    json_file: output.JsonFileOption = None,
) -> None:
    """Run a workload live on emulated GPUs of this machine and in the simulator, and set both side by side.

    Live is all but the devices: service, daemons, replicas, process groups and resizes are real, and keep the pace of
    the built-in applications. It uses a cluster of its own and leaves nothing running.
    """
    run_options.use_one_thread()
    from pollux.cli.fidelity import report as fidelity_report
    from pollux.cli.fidelity.running import run_fidelity
    from pollux.cli.trial.cluster import ended_by_sigterm
    from pollux.cli.trial.screen import show_on_terminal

    check_pace(compress, realloc_delay)
    if haste := haste_of(compress, realloc_delay):
        output.note(haste)
    checks.finite(InvalidInput, "--interval", interval, 0, above=True)
    check_before("An emulated cluster", keep, folder, json_file)

    with ended_by_sigterm(), show_on_terminal() as (tell, show):
        result = run_fidelity(
            workload,
            compress=compress,
            policy=policy,
            nodes=nodes,
            slots=slots,
            interval_s=interval,
            realloc_delay_s=realloc_delay,
            keep=keep,
            tell=tell,
            show=show,
        )
    if json_file != output.STDOUT:
        fidelity_report.print_summary(result)
    output.note(f"The report is in {fidelity_report.write(result, folder)}")
    if json_file is not None:
        output.write_json(result.document(), json_file)
    for fault in result.faults:
        output.error(fault)
    if check and not result.is_faithful:
        if missed := ", ".join(bound.name for bound in result.bounds if not bound.is_met):
            output.error(f"The simulator is not as it should be: {missed}.")
        raise typer.Exit(1)
