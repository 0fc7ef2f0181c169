"""Live and simulated in one picture: the GPUs and the batch size of each job over time."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pollux.cli.fidelity.course import Course, Steps
from pollux.cli.fidelity.result import FidelityResult

if TYPE_CHECKING:
    from pollux.simulator.report import Picture

LANE = 0.42
"""Height of a lane with all GPUs of the cluster; a job has two of them and a gap."""
PALE = 0.35
MINUTE_S = 60.0


def gpus_picture(result: FidelityResult) -> Picture:
    """Two lanes a job, live above simulated; the first job on top."""
    from pollux.simulator.report import Picture
    from pollux.simulator.report.style import MUTED, SERIES, WIDE, legend, new_figure, plain, styled

    setting, jobs = result.setting, result.jobs
    lane = LANE / (setting.nodes * setting.slots)
    with styled():
        figure, (axes,) = new_figure((WIDE[0], 1.2 + 0.62 * len(jobs)))
        for row, job in enumerate(jobs):
            for course, bottom, colour, label in (
                (job.live, -row + 0.02, SERIES[0], "live (emulated)"),
                (job.simulated, -row - LANE - 0.02, SERIES[1], "simulated"),
            ):
                axes.axhline(bottom, color=MUTED, linewidth=0.4)
                _lane(axes, course, bottom, lane, colour, label if row == 0 else "")
        axes.set(title="GPUs over time", xlabel="emulated minutes", ylim=(-len(jobs) + 0.5, 0.5), xlim=(0, None))
        axes.set_yticks([-row for row in range(len(jobs))], [plain(job.name) for job in jobs])
        axes.grid(visible=False, axis="y")
        legend(figure, axes)
    return Picture(
        "gpus-live-and-simulated",
        figure,
        "GPUs of each job over time, two lanes a job: live above simulated.",
        "A lane is as high as the job has GPUs, from the plan that gave them; it is pale while replicas are awaited.",
    )


def _lane(axes: Any, course: Course, bottom: float, height: float, colour: str, label: str) -> None:
    steps = course.gpus
    for (begin_s, gpus), (end_s, _) in pairwise(steps):
        cuts = sorted({begin_s, end_s, *(at for span in course.getting_ready for at in span if begin_s < at < end_s)})
        for since_s, until_s in pairwise(cuts):
            awaits = any(start <= since_s < ready for start, ready in course.getting_ready)
            times = [since_s / MINUTE_S, until_s / MINUTE_S]
            top = bottom + height * gpus
            axes.fill_between(times, bottom, top, color=colour, alpha=PALE if awaits else 1.0, linewidth=0)
    if label:
        axes.fill_between([], [], color=colour, label=label)


def batch_picture(result: FidelityResult) -> Picture:
    """A panel a job."""
    from pollux.simulator.report import Picture
    from pollux.simulator.report.style import SERIES, WIDE, legend, new_figure, plain, plain_log_ticks, styled

    jobs = result.jobs
    with styled():
        figure, panels = new_figure((WIDE[0], 0.9 + 1.15 * len(jobs)), len(jobs))
        for axes, job in zip(panels, jobs, strict=True):
            for course, colour, label in (
                (job.live, SERIES[0], "live (emulated)"),
                (job.simulated, SERIES[1], "simulated"),
            ):
                times, sizes = _line(course.batch_sizes, course.finished_at_s)
                axes.step(times, sizes, where="post", color=colour, linewidth=1.4, label=label)
            axes.set_title(plain(job.name), fontsize=9)
            plain_log_ticks(axes, "y")
        panels[-1].set(xlabel="emulated minutes", xlim=(0, None))
        legend(figure, panels[0])
    return Picture(
        "batch-sizes-live-and-simulated",
        figure,
        "Batch size of each job over time, live and simulated.",
        "The simulated ones are those at its rounds, the live ones from each change on.",
    )


def _line(steps: Steps, end_s: float) -> tuple[list[float], list[int]]:
    """Up to the end, where the last value still holds."""
    ended = [*steps, (end_s, steps[-1][1])] if steps else []
    return [at_s / MINUTE_S for at_s, _ in ended], [size for _, size in ended]
