"""What a demo has found: tables in the terminal, and a page with figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.cli import output, words
from pollux.cli.demo.story import REFERENCE, DemoResult, JobStory, Moment, PolicyRun, changes

if TYPE_CHECKING:
    from pollux.simulator.report import Picture, Section

TITLE = "Pollux, live on this machine"


def print_summary(result: DemoResult) -> None:
    """Job by job and in all, on standard output."""
    first, reference = result.runs[0], _reference(result)
    headings = ["job", "submitted, s", "first GPU, s", "JCT, s", *([f"{REFERENCE}, s"] if reference else [])]
    output.table(
        [*headings, "re-allocations", "metric", "value", "target"],
        [
            [
                job.name,
                output.number(job.submitted_at_s, 0),
                output.number(job.first_gpu_at_s, 1),
                output.number(job.jct_s, 1),
                *([output.number(_twin(reference, job).jct_s, 1)] if reference else []),
                job.reallocations,
                job.target.metric,
                output.number(job.value, 3),
                str(job.target),
            ]
            for job in first.jobs
        ],
        title=f"Under {first.policy}",
    )
    output.table(
        ["job", "GPUs", "batch size", "learning rate ×"],
        [[job.name, *_ways(job)] for job in first.jobs],
        title="How they moved",
    )
    for sentence in sentences(result):
        output.console.print(sentence, soft_wrap=True)


def sentences(result: DemoResult) -> list[str]:
    """What there is to say in words: the totals, the outage, and what CPU slots are not."""
    first, reference = result.runs[0], _reference(result)
    in_place = words.count(sum(job.in_place for job in first.jobs), "change")
    resumes = sum(job.resumes for job in first.jobs)
    found = [
        f"{first.policy}: {first.reallocations} re-allocations, {in_place} of replicas in place and {resumes} by "
        f"checkpoint, within {first.seconds:.0f} s."
    ]
    if (ratio := result.jct_ratio_vs_fifo) is not None and reference is not None:
        found.append(
            f"Average JCT: {first.avg_jct_s:.1f} s under {first.policy}, {reference.avg_jct_s:.1f} s under {REFERENCE} "
            f"(as many GPUs as its owner asked for, and the script's batch size): ratio {ratio:.2f}."
        )
    if first.outage is not None:
        found.append(first.outage.sentence)
    if not result.is_on_gpus:
        found.append(
            f"These are CPU slots: {first.gpus} of them share the {result.cores} cores of this machine, and a job with "
            "more slots than there are idle cores is not faster for it. Re-allocation and adaptation are real; what "
            "more GPUs would gain is not to be seen here."
        )
    return found


def _reference(result: DemoResult) -> PolicyRun | None:
    found = result.run(REFERENCE)
    return None if found is result.runs[0] else found


def _twin(run: PolicyRun, job: JobStory) -> JobStory:
    return next(other for other in run.jobs if other.name == job.name)


def _ways(job: JobStory) -> tuple[str, str, str]:
    """GPUs, batch size and learning-rate factor over time."""
    trained = [moment for moment in job.moments if moment.gpus]
    return (
        changes(moment.gpus for moment in job.moments[:-1] or job.moments),
        changes(moment.batch_size for moment in trained),
        changes((round(moment.learning_rate_factor, 1) for moment in trained), least=0.1),
    )


def write(result: DemoResult, folder: Path) -> Path:
    """The page, its figures as PNG, and all figures as report.json; the path of the page."""
    from pollux.simulator.report import write_page

    found = [_summary(result), _gpus(result), *_adaptation(result), *(_jobs(run) for run in result.runs)]
    return write_page(folder, TITLE, [*found, *(_events(run) for run in result.runs)], result.document())


def _summary(result: DemoResult) -> Section:
    from pollux.simulator.report import Cell, Section, Table

    averages = [run.avg_jct_s for run in result.runs]
    best = min((average for average in averages if average is not None), default=None)
    rows = [
        (
            run.policy,
            None if average is None else Cell(f"{average:.1f}", average, is_best=average == best),
            Cell(f"{run.seconds:.1f}", run.seconds),
            run.reallocations,
            sum(job.in_place for job in run.jobs),
            Cell(f"{sum(job.gpu_s for job in run.jobs):.0f}", sum(job.gpu_s for job in run.jobs)),
            f"{sum(not job.faults for job in run.jobs)} of {len(run.jobs)}",
        )
        for run, average in zip(result.runs, averages, strict=True)
    ]
    headings = [
        "policy",
        "avg JCT, s",
        "all done, s",
        "re-allocations",
        "changes in place",
        "slot-seconds",
        "on target",
    ]
    faults = [f"Not as it should be: {fault}" for fault in result.faults]
    return Section("Summary", [*faults, *sentences(result)], tables=[Table(headings, rows)])


def _gpus(result: DemoResult) -> Section:
    """Who held the slots."""
    from pollux.cli.demo.bands import Panel, bands
    from pollux.simulator.report import Section

    panels = [
        Panel(
            run.policy,
            run.gpus,
            {job.name: [(moment.at_s, moment.gpus) for moment in job.moments] for job in run.jobs},
            run.seconds,
        )
        for run in result.runs
    ]
    alt = f"Slots of each job over time, stacked, under {' and '.join(run.policy for run in result.runs)}."
    caption = "Each band is one job, as high as it has replicas that train"
    return Section("Slots by job", figures=[bands(panels, "slots", "seconds after the first submission", alt, caption)])


def _adaptation(result: DemoResult) -> list[Section]:
    """Batch sizes and learning rates of the first run; nothing if no job trained."""
    from pollux.simulator.report import Section

    run = result.runs[0]
    if not any(job.moments for job in run.jobs):
        return []
    text = (
        f"Under {run.policy}. A job grows its batch as the noise of its gradients allows, and with the number of its "
    )
    text += "replicas; the learning rate follows by the job's scaling rule."
    pictures = [
        _lines(run, "batch-size", "Batch size", "examples a step, over all replicas", lambda moment: moment.batch_size),
        _lines(
            run,
            "learning-rate",
            "Learning rate",
            "factor of the script's own",
            lambda moment: moment.learning_rate_factor,
        ),
    ]
    return [Section("Batch sizes and learning rates", text, pictures)]


def _lines(run: PolicyRun, name: str, title: str, ylabel: str, read: Callable[[Moment], float]) -> Picture:
    from pollux.simulator.report import Picture
    from pollux.simulator.report.style import (
        APPLICATIONS,
        WIDE,
        colours,
        legend,
        new_figure,
        plain,
        plain_log_ticks,
        styled,
    )

    of_job = colours((job.name for job in run.jobs), APPLICATIONS)
    with styled():
        figure, (axes,) = new_figure(WIDE)
        for job in run.jobs:
            times = [moment.at_s for moment in job.moments]
            values = [read(moment) for moment in job.moments]
            axes.step(times, values, where="post", color=of_job[job.name], label=plain(job.name))
        axes.set(title=title, xlabel="seconds after the first submission", ylabel=ylabel, xlim=(0, run.seconds))
        plain_log_ticks(axes, "y")
        legend(figure, axes)
    return Picture(name, figure, f"{title} of each job over time under {run.policy}.")


def _jobs(run: PolicyRun) -> Section:
    from pollux.simulator.report import Cell, Section, Table

    def seconds(value: float | None) -> Cell | None:
        return None if value is None else Cell(f"{value:.1f}", value)

    rows = [
        (
            job.name,
            job.command,
            job.requested_gpus,
            seconds(job.submitted_at_s),
            seconds(job.first_gpu_at_s),
            seconds(job.jct_s),
            *_ways(job),
            job.reallocations,
            job.target.metric,
            None if job.value is None else Cell(f"{job.value:.4g}", job.value),
            str(job.target),
        )
        for job in run.jobs
    ]
    headings = ["job", "command", "owner asks for", "submitted, s", "first GPU, s", "JCT, s", "GPUs", "batch size"]
    headings += ["learning rate ×", "re-allocations", "metric", "value", "target"]
    return Section(f"Jobs under {run.policy}", tables=[Table(headings, rows)])


def _events(run: PolicyRun) -> Section:
    from pollux.simulator.report import Cell, Section, Table

    rows = [(Cell(f"{at_s:.1f}", at_s), text) for at_s, text in run.events]
    table = Table(["seconds", "event"], rows, f"{len(rows)} events", is_folded=True)
    return Section(f"What happened under {run.policy}", tables=[table])
