"""The command, and what it refuses. All else is loaded when it is run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import output, report
from pollux.errors import InvalidInput, MissingDependency, UnknownName


def demo(
    only: Annotated[str | None, typer.Option(metavar="POLICY", help="Run under this one only: pollux or fifo.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three small jobs instead of six.")] = False,
    kill_service: Annotated[
        bool, typer.Option("--kill-service", help="Kill the service (-9) halfway under pollux, and start it again.")
    ] = False,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Use the GPUs of this machine instead of four CPU slots.")
    ] = False,
    folder: Annotated[
        Path,
        typer.Option(
            "--report", metavar="DIR", parser=report.folder_named, help="Where report.html and its figures go."
        ),
    ] = Path("out/demo"),
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep logs, event logs and checkpoints of the clusters here.")
    ] = None,
    json_file: output.JsonFileOption = None,
) -> None:
    """See Pollux at work: six real training jobs share four CPU slots of this machine, for about five minutes.

    They run under Pollux and then, live as well, under FIFO with the GPUs that their owners asked for. It uses a
    cluster of its own and leaves nothing running. Exit code 1: a job missed its target or started from scratch.
    """
    from pollux.cli.demo import report as demo_report
    from pollux.cli.demo.running import POLICIES, run_demo
    from pollux.cli.demo.screen import show_on_terminal
    from pollux.cli.demo.story import REFERENCE

    if only is not None and only not in POLICIES:
        raise UnknownName("--only", only, POLICIES)
    if kill_service and only == REFERENCE:
        raise InvalidInput("--kill-service", only, "is for the run under pollux", "Leave out --only")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InvalidInput("--keep", str(keep), "is there already", "Name a new or an empty folder")
    report.check(folder)
    output.check_writable(json_file, "--json")
    if find_spec("torch") is None:
        raise MissingDependency("torch", "The demo", "torch")

    with _ended_by_sigterm(), show_on_terminal() as (tell, show):
        result = run_demo(
            POLICIES if only is None else [only],
            is_quick=quick,
            kills_service=kill_service,
            use_gpus=gpus,
            keep=keep,
            tell=tell,
            show=show,
        )
    demo_report.print_summary(result)
    output.note(f"The report is in {demo_report.write(result, folder)}")
    if json_file is not None:
        output.write_json(result.document(), json_file)
    if result.faults:
        for fault in result.faults:
            output.error(fault)
        raise typer.Exit(1)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A polite kill ends the cluster as Ctrl-C does."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
