"""What the demo on emulated GPUs has found: tables in the terminal, and a page. All times are emulated but where
something else is said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pollux.cli import output, words
from pollux.cli.demo.emulated import EmulatedDemo
from pollux.cli.demo.story import REFERENCE, changes
from pollux.cli.fidelity.course import Course
from pollux.cli.fidelity.report import differences
from pollux.cli.fidelity.result import FidelityResult, Pair

if TYPE_CHECKING:
    from pollux.simulator.report import Cell, Section

TITLE = "Pollux, live on emulated GPUs of this machine"
MINUTE_S = 60.0


def print_summary(demo: EmulatedDemo) -> None:
    """Job by job and in all, on standard output."""
    first, reference = demo.runs[0], demo.reference
    twins = {job.name: job for job in reference.jobs} if reference else {}
    output.table(
        [
            *("job", "application", "JCT, min", "predicted"),
            *((f"{REFERENCE}, min", "predicted") if reference else ()),
            *("GPUs", "batch size", "re-allocations"),
        ],
        [
            [
                job.name,
                job.application,
                *_times(job),
                *(_times(twins[job.name]) if reference else ()),
                *_ways(job.live),
                job.live.reallocations,
            ]
            for job in first.jobs
        ],
        title=f"Emulated, under {first.setting.policy}",
    )
    for sentence in sentences(demo):
        output.console.print(sentence, soft_wrap=True)


def sentences(demo: EmulatedDemo) -> list[str]:
    """What there is to say in words."""
    first = demo.runs[0]
    found = [_average(run) for run in demo.runs]
    if (ratio := demo.jct_ratio) is not None and (predicted := demo.predicted_ratio) is not None:
        found.append(
            f"Average JCT under {first.setting.policy} is {ratio:.2f} × that under {REFERENCE}, which gives each job "
            f"the GPUs and the batch size that its owner asked for; the simulator predicted {predicted:.2f} ×."
        )
    if first.outage is not None:
        found.append(f"{first.outage.sentence} These seconds are real ones, and the simulator knew nothing of it.")
    setting = first.setting
    found.append(
        f"These GPUs are emulated: up to {setting.nodes * setting.slots} replicas share the cores of this machine and "
        f"take real steps at the pace of T4 GPUs, {setting.compress:g} times as fast. Service, daemons, process groups "
        "and re-allocations are real; progress, gradient noise and step times are those of the built-in profiles."
    )
    return found


def _average(run: FidelityResult) -> str:
    seconds = run.avg_jct_live_s / run.setting.compress
    live, predicted = run.avg_jct_live_s / MINUTE_S, run.avg_jct_simulated_s / MINUTE_S
    moves = words.count(run.reallocations_live, "re-allocation")
    return (
        f"{run.setting.policy}: average JCT {live:.1f} emulated minutes ({seconds:.0f} s here), predicted "
        f"{predicted:.1f}; {moves}, predicted {run.reallocations_simulated}; "
        f"all done after {words.duration(run.seconds)} here."
    )


def write(demo: EmulatedDemo, folder: Path) -> Path:
    """The page, its figures as PNG, and everything as report.json; the path of the page."""
    from pollux.simulator.report import Section, write_page

    faults = [f"Not as it should be: {fault}" for fault in demo.faults]
    sections = [Section("Summary", [*faults, *sentences(demo)]), _gpus(demo), _batches(demo.runs[0])]
    sections += [_jobs(run) for run in demo.runs]
    sections += [differences(run) for run in demo.runs]
    return write_page(folder, f"{TITLE} (× {demo.runs[0].setting.compress:g})", sections, demo.document())


def _gpus(demo: EmulatedDemo) -> Section:
    """Who held the emulated GPUs."""
    from pollux.cli.demo.bands import Panel, bands
    from pollux.simulator.report import Section

    panels = [
        Panel(
            f"{run.setting.policy} (live, emulated)",
            run.setting.nodes * run.setting.slots,
            {job.name: [(at_s / MINUTE_S, gpus) for at_s, gpus in job.live.gpus] for job in run.jobs},
            max(job.live.finished_at_s for job in run.jobs) / MINUTE_S,
        )
        for run in demo.runs
    ]
    alt = (
        f"Emulated GPUs of each job over time, stacked, under {' and '.join(run.setting.policy for run in demo.runs)}."
    )
    caption = "Each band is one job, as high as plans gave it GPUs"
    picture = bands(panels, "emulated GPUs", "emulated minutes after the first submission", alt, caption)
    return Section("Emulated GPUs by job", figures=[picture])


def _batches(run: FidelityResult) -> Section:
    from pollux.cli.fidelity.figures import batch_picture
    from pollux.simulator.report import Section

    text = f"Under {run.setting.policy}. Emulated jobs choose them as real ones do, by the noise of their profile."
    return Section("Batch sizes", text, [batch_picture(run)])


def _jobs(run: FidelityResult) -> Section:
    from pollux.simulator.report import Cell, Section, Table

    def row(job: Pair) -> list[Cell | str | float | None]:
        return [
            job.name,
            job.application,
            job.requested_gpus,
            Cell(f"{job.live.submitted_at_s / MINUTE_S:.1f}", job.live.submitted_at_s),
            Cell(f"{job.live.jct_s / MINUTE_S:.1f}", job.live.jct_s),
            Cell(f"{job.simulated.jct_s / MINUTE_S:.1f}", job.simulated.jct_s),
            *_ways(job.live),
            job.live.reallocations,
            job.simulated.reallocations,
            Cell(f"{job.live.pacing_slip:.1%}", job.live.pacing_slip),
        ]

    headings = ["job", "application", "owner asks for", "submitted, min", "JCT, min", "predicted, min", "GPUs"]
    headings += ["batch size", "re-allocations", "predicted", "pacing slip"]
    title = f"Emulated jobs under {run.setting.policy}"
    return Section(title, "In emulated time.", tables=[Table(headings, [row(job) for job in run.jobs])])


def _times(job: Pair) -> tuple[object, object]:
    return output.number(job.live.jct_s / MINUTE_S, 1), output.number(job.simulated.jct_s / MINUTE_S, 1)


def _ways(course: Course) -> tuple[str, str]:
    return changes(change.gpus for change in course.changes), changes(size for _, size in course.batch_sizes)
