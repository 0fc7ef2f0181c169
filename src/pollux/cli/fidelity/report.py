"""What a comparison has found: tables in the terminal, and a page with figures. All times are emulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.cli import output, words
from pollux.cli.fidelity.course import Course
from pollux.cli.fidelity.delays import Delay
from pollux.cli.fidelity.figures import batch_picture, gpus_picture
from pollux.cli.fidelity.result import MAX_SLIP, TOO_BUSY, Bound, FidelityResult, Pair, Setting

if TYPE_CHECKING:
    from pollux.simulator.report import Cell, Section

MINUTE_S = 60.0


def print_summary(result: FidelityResult) -> None:
    """Job by job, the bounds, and what explains the differences, on standard output."""
    output.table(
        [
            "job",
            "application",
            "JCT, min",
            "simulated",
            "difference",
            "first step, s",
            "simulated",
            "moved",
            "simulated",
        ],
        [
            [
                job.name,
                job.application,
                output.number(job.live.jct_s / MINUTE_S, 2),
                output.number(job.simulated.jct_s / MINUTE_S, 2),
                _percent(job.jct_difference),
                output.number(job.live.first_step_after_s, 0),
                output.number(job.simulated.first_step_after_s, 0),
                job.live.reallocations,
                job.simulated.reallocations,
            ]
            for job in result.jobs
        ],
        title=f"{_name(result.setting)}, emulated time",
    )
    output.table(
        ["what", "live, s", "at most", "simulated, s", "at most", "explains, s"],
        [[delay.name, *(output.number(value, 1) for value in _values(delay))] for delay in result.delays],
        title="Where time goes: emulated seconds, and what each adds to the average JCT",
    )
    output.table(
        ["bound", "found", "limit", ""],
        [[bound.name, _found(bound), bound.limit, "ok" if bound.is_met else "missed"] for bound in result.bounds],
    )
    for sentence in sentences(result):
        output.console.print(sentence, soft_wrap=True)


def sentences(result: FidelityResult) -> list[str]:
    """What there is to say in words."""
    setting = result.setting
    live, simulated = result.avg_jct_live_s / MINUTE_S, result.avg_jct_simulated_s / MINUTE_S
    moves = f"{result.reallocations_live} and {result.reallocations_simulated}"
    found = [
        f"Average JCT of {words.count(result.num_jobs, 'emulated job')}: {live:.2f} min live, {simulated:.2f} min "
        f"simulated, {result.avg_jct_error:.1%} apart; rank correlation of JCTs {result.rank_correlation:.2f}; "
        f"re-allocations: {moves}.",
        f"Live means emulated: real processes at the pace of {setting.nodes} × {setting.slots} T4 GPUs, compressed "
        f"{setting.compress:g} times; the run took {words.duration(result.seconds)} here. Steps came "
        f"{result.mean_pacing_slip:.1%} late on average over jobs, at most {result.pacing_slip:.1%}; above "
        f"{MAX_SLIP:.0%} a job fails.",
    ]
    if result.cpu_share is not None:
        late = " Above 90 % starts and ends come late, too." if result.cpu_share > TOO_BUSY else ""
        found.append(f"All cores of this machine were {result.cpu_share:.0%} busy, with whatever else ran here.{late}")
    return found


def write(result: FidelityResult, folder: Path) -> Path:
    """The page, its figures as PNG, and everything as report.json; the path of the page."""
    from pollux.simulator.report import write_page

    sections = [_summary(result), _jobs(result), *_courses(result), differences(result), _again(result)]
    return write_page(folder, title(result.setting), sections, result.document())


def title(setting: Setting) -> str:
    return f"Emulated live (× {setting.compress:g}) and simulated: {_name(setting)}"


def _name(setting: Setting) -> str:
    return f"{Path(setting.workload).stem} under {setting.policy}"


def _summary(result: FidelityResult) -> Section:
    from pollux.simulator.report import Section, Table

    rows = [[bound.name, _found(bound), bound.limit, "ok" if bound.is_met else "missed"] for bound in result.bounds]
    faults = [f"Not as it should be: {fault}" for fault in result.faults]
    return Section("Summary", [*faults, *sentences(result)], tables=[Table(["bound", "found", "limit", ""], rows)])


def _jobs(result: FidelityResult) -> Section:
    from pollux.simulator.report import Cell, Section, Table

    def row(job: Pair) -> list[Cell | str | float | None]:
        return [
            job.name,
            job.application,
            job.requested_gpus,
            _seconds(job.live.submitted_at_s),
            Cell(f"{job.live.jct_s / MINUTE_S:.2f}", job.live.jct_s),
            Cell(f"{job.simulated.jct_s / MINUTE_S:.2f}", job.simulated.jct_s),
            Cell(_percent(job.jct_difference), job.jct_difference),
            _seconds(job.live.first_step_after_s),
            _seconds(job.simulated.first_step_after_s),
            _way(job.live),
            _way(job.simulated),
            job.live.reallocations,
            job.simulated.reallocations,
            Cell(f"{job.live.pacing_slip:.1%}", job.live.pacing_slip),
        ]

    headings = ["job", "application", "owner asks for", "submitted, s", "JCT live, min", "JCT simulated, min"]
    headings += [
        "difference",
        "first step live, s",
        "simulated, s",
        "GPUs live",
        "GPUs simulated",
        "re-allocations live",
    ]
    headings += ["simulated", "pacing slip"]
    text = "All times are emulated. The first step counts from the submission."
    return Section("Jobs", text, tables=[Table(headings, [row(job) for job in result.jobs])])


def _courses(result: FidelityResult) -> list[Section]:
    from pollux.simulator.report import Section

    return [
        Section("GPUs over time", figures=[gpus_picture(result)]),
        Section("Batch sizes over time", figures=[batch_picture(result)]),
    ]


def differences(result: FidelityResult) -> Section:
    """Where time goes on both sides, and what that explains."""
    from pollux.simulator.report import Section, Table

    apart_s = result.avg_jct_live_s - result.avg_jct_simulated_s
    text = [
        f"The average live JCT is {abs(apart_s):.1f} emulated seconds {'longer' if apart_s >= 0 else 'shorter'} than "
        "the simulated one. The last column splits this up: its figures add up to it, but for those that act through "
        "decisions and have none of their own.",
        f"Rounds while jobs ran: {len(result.live_rounds)} live, {len(result.simulated_rounds)} simulated.",
    ]
    rows = [[delay.name, *map(_seconds, _values(delay)), delay.meaning] for delay in result.delays]
    headings = [
        "what",
        "live mean, s",
        "live max, s",
        "simulated mean, s",
        "simulated max, s",
        "explains, s",
        "meaning",
    ]
    title = f"Where live and simulated differ under {result.setting.policy}, and why"
    return Section(title, text, tables=[Table(headings, rows)])


def _again(result: FidelityResult) -> Section:
    from pollux.simulator.report import Section, Table

    setting = result.setting
    command = (
        f"pollux fidelity {setting.workload} --compress {setting.compress:g} --policy {setting.policy} "
        f"--nodes {setting.nodes} --slots {setting.slots} --interval {setting.interval_s:g} "
        f"--realloc-delay {setting.realloc_delay_s:g}"
    )
    rows = [
        ["cluster", f"{setting.nodes} × {setting.slots} emulated T4 GPUs"],
        ["compression", f"{setting.compress:g}: one real second is {setting.compress:g} emulated ones"],
        ["from round to round", f"{setting.interval_s:g} s"],
        ["re-allocation delay", f"{setting.realloc_delay_s:g} s"],
    ]
    rows += [[f"told to the simulator: {name}", _told(value)] for name, value in result.told.items()]
    text = (
        f"Command: {command} . The live side is real processes on this machine: figures differ a little from run to "
        "run. The simulator is told what the live service does by itself, so it says something else than a plain "
        "pollux simulate; world.warm_up_s and agent.first_report_s grow with the compression, for processes do not "
        "start faster."
    )
    return Section("How to run it again", text, tables=[Table(["what", "value"], rows)])


def _told(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _values(delay: Delay) -> Sequence[float | None]:
    live, simulated = delay.live, delay.simulated
    return live.mean_s, live.max_s, simulated.mean_s, simulated.max_s, delay.explains_s


def _seconds(value: float | None) -> Cell | None:
    from pollux.simulator.report import Cell

    return None if value is None else Cell(f"{value:.1f}", value)


def _percent(share: float) -> str:
    return f"{share:+.1%}"


def _found(bound: Bound) -> str:
    return f"{bound.value:.1%}" if bound.limit.endswith("%") else f"{bound.value:.3f}"


def _way(course: Course) -> str:
    return "→".join(str(change.gpus) for change in course.changes) or "–"
