"""`--report DIR` of the commands that simulate: refused early, measured for, written, told of."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import output
from pollux.errors import InvalidInput

if TYPE_CHECKING:
    from pollux.simulator.metrics import Outcome
    from pollux.simulator.scenario import Scenario

MAX_FAIR_JOBS = 400
"""Up to so many jobs a report measures finish-time fairness by itself: beyond, that takes too long to be a surprise."""


def folder_named(text: str | Path) -> Path:
    """A parser of options; the default of one comes as a path."""
    if not str(text).strip():  # as a path it would be the current folder; who forgot to set a variable means none
        raise typer.BadParameter("an empty name is no folder. Name one; a dot is the current one.")
    return Path(text)


ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="DIR",
        parser=folder_named,
        help="Write report.html with plots and every job, PNGs and report.json into DIR.",
    ),
]


def check(folder: Path | None) -> None:
    """Refuse what would fail after the run: a folder that cannot be written, or nobody who could draw."""
    if folder is None:
        return
    from pollux.simulator.report import require_matplotlib

    require_matplotlib()
    if folder.exists() and not folder.is_dir():
        raise InvalidInput("--report", str(folder), "is a file", "Name a folder; it is made if it is not there")
    if (folder / "report.html").is_dir():
        raise InvalidInput("--report", str(folder), "has a folder report.html in it", "Name another folder")
    try:
        _try_to_write(folder)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise InvalidInput(
            "--report", str(folder), f"cannot be written: {reason}", "Name a folder you may write"
        ) from None


def _try_to_write(folder: Path) -> None:
    """Whoever is refused later, or loses patience, finds no empty folder."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not made after all, or somebody has put something there
                path.rmdir()


def prepared(scenarios: Sequence[Scenario], folder: Path | None, fairness: bool | None) -> list[Scenario]:
    """The runs, measured for a report if there is to be one: with histories, and with fairness if jobs are few.

    `fairness` is what was said about it; None: nothing.
    """
    if folder is None:
        return list(scenarios)
    from pollux.simulator.comparison import prepare_once

    found, too_large = [], {}
    for scenario in scenarios:
        ready = prepare_once(scenario)
        num_jobs = len(ready.workload.jobs)
        is_quick = num_jobs <= MAX_FAIR_JOBS and ready.cluster.cluster.num_gpus > 0
        found.append(replace(scenario, histories=True, fairness=is_quick if fairness is None else fairness))
        if num_jobs > MAX_FAIR_JOBS and fairness is None:
            too_large[scenario.workload] = num_jobs
    for workload, num_jobs in too_large.items():
        output.note(f"{workload} has {num_jobs:,} jobs: its report goes without fairness, which --fairness measures")
    return found


def write(outcomes: Sequence[Outcome], folder: Path | None, title: str) -> None:
    if folder is None:
        return
    from pollux.simulator.report import write_report

    output.note(f"The report is in {write_report(outcomes, folder, title=title)}")
