"""Who held how many GPUs when: a panel a policy, a band a job."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pollux.simulator.report import Picture

Steps = Sequence[tuple[float, int]]
"""From when on a job held how many."""


class Panel(NamedTuple):
    title: str
    gpus: int
    """Of the cluster."""
    jobs: Mapping[str, Steps]
    end: float
    """Of the last job."""


def bands(panels: Sequence[Panel], ylabel: str, xlabel: str, alt: str, caption: str) -> Picture:
    """The picture `gpus-by-job`; times are in the unit of the x axis."""
    from pollux.simulator.report import Picture
    from pollux.simulator.report.style import (
        APPLICATIONS,
        MUTED,
        WIDE,
        colours,
        legend,
        new_figure,
        plain,
        styled,
        whole_ticks,
    )

    of_job = colours((name for panel in panels for name in panel.jobs), APPLICATIONS)
    with styled():
        figure, drawn = new_figure((WIDE[0], 0.9 + 2.2 * len(panels)), len(panels))
        for axes, panel in zip(drawn, panels, strict=True):
            times = sorted({0.0, panel.end, *(at for steps in panel.jobs.values() for at, _ in steps)})
            held = [[_held(steps, at) for at in times] for steps in panel.jobs.values()]
            names, hues = [plain(name) for name in panel.jobs], [of_job[name] for name in panel.jobs]
            axes.stackplot(times, held, labels=names, colors=hues, step="post")
            axes.axhline(panel.gpus, color=MUTED, linewidth=1.0)
            axes.set(title=plain(panel.title), ylabel=ylabel)
            axes.set(ylim=(0, panel.gpus * 1.07), xlim=(0, max(each.end for each in panels)))
            axes.grid(visible=False)
            whole_ticks(axes)
        drawn[-1].set_xlabel(xlabel)
        legend(figure, drawn[0])
    return Picture("gpus-by-job", figure, alt, f"{caption}; the line on top is the size of the cluster.")


def _held(steps: Steps, at: float) -> int:
    index = bisect_right([begin for begin, _ in steps], at) - 1
    return steps[index][1] if index >= 0 else 0
