"""Curves over each other: a study's lines, distributions of completion times and of fairness, the cluster in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pollux.simulator.metrics import Outcome
from pollux.simulator.report.samples import (
    CURVES,
    Binned,
    Floats,
    binned,
    by_policy,
    nice_bin_s,
    pooled_jcts,
    pooled_rho,
)
from pollux.simulator.report.style import (
    MUTED,
    SMALL,
    WIDE,
    colours,
    legend,
    new_figure,
    plain,
    plain_log_ticks,
    styled,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Sequence[tuple[float, float]]
MAX_TICKS = 8
"""Up to so many places of a logarithmic axis are named themselves, instead of round numbers between them."""
MAX_STEPS = 400
"""Points of a distribution: more than a screen can tell apart would only make the page heavy."""


def line_figure(
    title: str,
    xlabel: str,
    ylabel: str,
    series: Mapping[str, Line],
    dashed: Mapping[str, Line] | None = None,
    logx: bool = False,
) -> Figure:
    """One line a name through its points (x, y). A dashed line has the colour of the solid one of its name."""
    dashed = dashed or {}
    of_name = colours([*series, *dashed])
    with styled():
        figure, (axes,) = new_figure(WIDE)
        for name, line in series.items():
            x, y = _columns(line)
            axes.plot(x, y, color=of_name[name], marker="o", markersize=4.5, label=plain(name))
        for name, line in dashed.items():
            label = plain(f"{name}, published" if name in series else name)
            x, y = _columns(line)
            axes.plot(x, y, color=of_name[name], linestyle="--", marker="o", markerfacecolor="none", label=label)
        axes.set(title=plain(title), xlabel=plain(xlabel), ylabel=plain(ylabel))
        low, high = axes.get_ylim()
        bottom = min(0.0, low)
        axes.set_ylim(bottom, high + 0.04 * (high - bottom))  # a flat line's own margin is thinner than the line
        if logx:
            plain_log_ticks(axes, "x", _few([*series.values(), *dashed.values()]))
        legend(figure, axes)
    return figure


def jct_figure(outcomes: Sequence[Outcome]) -> Figure:
    """Share of jobs that had ended within a time, a curve a policy; the jobs of all workloads together."""
    with styled():
        figure, (axes,) = new_figure(WIDE)
        _plot_distributions(axes, {name: pooled_jcts(runs) / 3600 for name, runs in by_policy(outcomes).items()})
        axes.set(title="Job completion time", xlabel="hours, from submission to end", ylabel="share of jobs")
        plain_log_ticks(axes, "x")
        legend(figure, axes)
    return figure


def rho_figure(outcomes: Sequence[Outcome]) -> Figure:
    """Share of jobs with at most some finish-time fairness ρ; right of the line at 1 a job lost by sharing."""
    with styled():
        figure, (axes,) = new_figure(WIDE)
        _plot_distributions(axes, {name: pooled_rho(runs) for name, runs in by_policy(outcomes).items()})
        axes.axvline(1.0, color=MUTED, linestyle="--", linewidth=1.2)
        axes.set(title="Finish-time fairness", xlabel="ρ: JCT over that on a fair share, alone", ylabel="share of jobs")
        plain_log_ticks(axes, "x")
        axes.annotate("fair", (1.0, 0.02), xytext=(4, 0), textcoords="offset points", color=MUTED)
        legend(figure, axes)
    return figure


def cluster_figures(outcomes: Sequence[Outcome]) -> dict[str, Figure]:
    """By the names of `CURVES`: how each quantity went in time, a line a policy. Meant for outcomes of one workload."""
    of_policy = colours(outcome.policy for outcome in outcomes)
    bin_s = nice_bin_s(outcomes)
    samples = list(zip((outcome.policy for outcome in outcomes), binned(outcomes, bin_s), strict=True))
    drawn = {}
    for curve, (title, ylabel, read) in CURVES.items():
        with styled():
            figure, (axes,) = new_figure(SMALL)
            for policy, bins in samples:
                _plot_steps(axes, bins, read(bins), of_policy[policy], plain(policy))
            axes.set(title=title, xlabel="hours", ylabel=ylabel, xlim=(0, None))
            if curve == "gpus":
                for size in {max(outcome.timeline.num_gpus, default=0) for outcome in outcomes}:
                    axes.axhline(size, color=MUTED, linestyle=":", linewidth=1.2)
            _scale(axes, curve)
            legend(figure, axes, 4)
        drawn[curve] = figure
    return drawn


def _scale(axes: Axes, curve: str) -> None:
    """Applications differ in examples a second by orders of magnitude; all else begins at zero."""
    if curve in ("goodput", "throughput"):
        plain_log_ticks(axes, "y")
    elif curve == "efficiency":
        axes.set_ylim(0, 1.05)
    else:
        axes.set_ylim(bottom=0)
        whole_ticks(axes)


def _plot_steps(axes: Axes, bins: Binned, values: Floats, colour: str, label: str) -> None:
    edges = bins.start_s / 3600
    axes.plot(edges, values, color=colour, linewidth=1.5, drawstyle="steps-post", label=label)


def _plot_distributions(axes: Axes, values: Mapping[str, Floats]) -> None:
    of_name = colours(values)
    for name, found in values.items():
        if found.size:
            shares = np.linspace(0, 1, min(found.size, MAX_STEPS) + 1)[1:]
            x = np.quantile(found, shares, method="inverted_cdf")
            axes.step([x[0], *x], [0.0, *shares], where="post", color=of_name[name], label=plain(name))
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")


def _few(lines: Sequence[Line]) -> list[float]:
    """Where the lines have their points, if those are few."""
    places = sorted({x for line in lines for x, _ in line if x > 0})
    return places if len(places) <= MAX_TICKS else []


def _columns(line: Line) -> tuple[list[float], list[float]]:
    return [x for x, _ in line], [y for _, y in line]
