"""`--report DIR` of the commands that simulate: refused early, measured for, written, told of."""

from __future__ import annotations

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

ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="DIR", help="Write report.html with plots and every job, PNGs and report.json into DIR."
    ),
]


def check(folder: Path | None) -> None:
    """Refuse what would fail after the run: a folder that is none, or nobody who could draw."""
    if folder is None:
        return
    from pollux.simulator.report import require_matplotlib

    require_matplotlib()
    if folder.exists() and not folder.is_dir():
        raise InvalidInput("--report", str(folder), "is a file", "Name a folder; it is made if it is not there")
    output.check_writable(folder / "report.html", "--report")


def prepared(scenarios: Sequence[Scenario], folder: Path | None) -> list[Scenario]:
    """The runs, measured for a report if there is to be one: with histories, and with fairness if jobs are few."""
    if folder is None:
        return list(scenarios)
    from pollux.simulator.comparison import prepare_once

    found, too_large = [], {}
    for scenario in scenarios:
        ready = prepare_once(scenario)
        num_jobs = len(ready.workload.jobs)
        is_quick = num_jobs <= MAX_FAIR_JOBS and ready.cluster.cluster.num_gpus > 0
        found.append(replace(scenario, histories=True, fairness=scenario.fairness or is_quick))
        if num_jobs > MAX_FAIR_JOBS and not scenario.fairness:
            too_large[scenario.workload] = num_jobs
    for workload, num_jobs in too_large.items():
        output.note(f"{workload} has {num_jobs:,} jobs: its report goes without fairness, which --fairness measures")
    return found


def write(outcomes: Sequence[Outcome], folder: Path | None, title: str) -> None:
    if folder is None:
        return
    from pollux.simulator.report import write_report

    output.note(f"The report is in {write_report(outcomes, folder, title=title)}")
