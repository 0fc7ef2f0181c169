"""What jobs did in time, from their histories: who held the GPUs, and how a job and its GPUs adapted to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pollux.simulator.metrics import JobOutcome, Outcome
from pollux.simulator.report.samples import Floats, end_s
from pollux.simulator.report.style import (
    APPLICATIONS,
    MUTED,
    SMALL,
    WIDE,
    colours,
    legend,
    new_figure,
    plain,
    plain_log_ticks,
    shades,
    styled,
    whole_ticks,
)
from pollux.simulator.timeline import History
from pollux.simulator.workload import base_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

COLUMNS = 1000
"""Moments at which the stack of jobs is looked at: about one for each point of a screen."""


def gpus_figure(outcomes: Sequence[Outcome]) -> Figure:
    """GPUs of every job, stacked: a panel an outcome, a colour an application, a shade a job. Needs histories."""
    applications = colours(sorted({base_name(job.application) for run in outcomes for job in run.jobs}), APPLICATIONS)
    last_s = max(map(end_s, outcomes))
    with styled():
        figure, panels = new_figure((WIDE[0], 0.9 + 2.0 * len(outcomes)), len(outcomes))
        for axes, outcome in zip(panels, outcomes, strict=True):
            _plot_stack(axes, outcome, applications, last_s)
            axes.set(title=plain(outcome.policy), ylabel="GPUs", ylim=(0, None), xlim=(0, last_s / 3600))
            whole_ticks(axes)
        panels[-1].set_xlabel("hours")
        handles = [_swatch(colour) for colour in applications.values()]
        labels = [plain(name or "no application") for name in applications]
        figure.legend(handles, labels, loc="outside lower left", ncols=8, handlelength=1.0, handleheight=1.0)
    return figure


def _swatch(colour: str) -> Patch:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour)


def _plot_stack(axes: Axes, outcome: Outcome, applications: dict[str, str], last_s: float) -> None:
    """From bottom to top application by application, and in each in the order of submission."""
    histories = outcome.histories or {}
    moments = np.linspace(0.0, last_s, COLUMNS)
    below = np.zeros(COLUMNS)
    for application, colour in applications.items():
        jobs = [job for job in outcome.jobs if base_name(job.application) == application and job.name in histories]
        for job, shade in zip(jobs, shades(colour, len(jobs)), strict=True):
            held = at(histories[job.name], moments)
            above = below + held
            _plot_band(axes, moments / 3600, below, above, shade)
            below = above
    timeline = outcome.timeline
    axes.step(np.array(timeline.time_s) / 3600, timeline.num_gpus, where="post", color=MUTED, linewidth=1.0)
    axes.grid(visible=False)


def _plot_band(axes: Axes, hours: Floats, below: Floats, above: Floats, colour: str) -> None:
    """One job, from its first to its last moment, as pixels: the outlines of hundreds would weigh megabytes."""
    shown = np.flatnonzero(above > below)
    if shown.size:
        span = slice(shown[0], shown[-1] + 2)
        axes.fill_between(
            hours[span], below[span], above[span], step="post", color=colour, linewidth=0, rasterized=True
        )


def at(history: History, moments: Floats) -> Floats:
    """GPUs that a job held at each of these moments."""
    gpus = np.array([0, *history.num_gpus])
    return gpus[np.searchsorted(history.time_s, moments, side="right")].astype(float)


def adaptive_jobs(outcomes: Sequence[Outcome], most: int = 2) -> list[JobOutcome]:
    """Jobs worth a closer look: of each application the one with the most GPU-hours, the largest of them first.

    Only one outcome is looked at: see `most_adaptive`.
    """
    chosen = most_adaptive(outcomes)
    of_application: dict[str, JobOutcome] = {}
    for job in sorted(chosen.jobs if chosen else (), key=lambda job: (-job.gpu_s, job.name)):
        of_application.setdefault(base_name(job.application), job)
    return list(of_application.values())[:most]


def most_adaptive(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The first outcome with histories whose policy adapts batch sizes, or GPUs at least."""
    adaptive = [run for run in outcomes if run.histories and is_adaptive(run)]
    return max(adaptive, key=lambda run: bool(run.inputs.get("adapts_batch")), default=None)


def is_adaptive(outcome: Outcome) -> bool:
    return bool(outcome.inputs.get("adapts_gpus") or outcome.inputs.get("adapts_batch"))


def coadaptation_figure(outcomes: Sequence[Outcome], name: str) -> Figure:
    """One job under each policy that adapts jobs: its GPUs, batch size and efficiency, from its submission on."""
    of_policy = colours(outcome.policy for outcome in outcomes)
    with styled():
        figure, panels = new_figure((SMALL[0], 2 * SMALL[1]), 3)
        for outcome in outcomes:
            job = next((job for job in outcome.jobs if job.name == name), None)
            history = (outcome.histories or {}).get(name)
            if job is not None and history is not None and is_adaptive(outcome):
                _plot_job(panels, job, history, of_policy[outcome.policy], plain(outcome.policy))
        panels[0].set(title=plain(name), ylabel="GPUs", ylim=(0, None), xlim=(0, None))
        whole_ticks(panels[0])
        panels[1].set(ylabel="batch size")
        plain_log_ticks(panels[1], "y")
        panels[2].set(ylabel="statistical efficiency", xlabel="hours since its submission", ylim=(0, 1.05))
        legend(figure, panels[0], 4)
    return figure


def _plot_job(panels: Sequence[Axes], job: JobOutcome, history: History, colour: str, label: str) -> None:
    hours = (np.array(history.time_s) - job.submitted_at_s) / 3600
    holds = np.array(history.num_gpus) > 0
    for axes, column in zip(panels, (history.num_gpus, history.batch_size, history.efficiency), strict=True):
        values = np.array(column, float)
        shown = values if axes is panels[0] else np.where(holds, values, np.nan)
        axes.step(hours, shown, where="post", color=colour, linewidth=1.5, label=label)
