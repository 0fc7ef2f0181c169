"""The reproduction of the paper as a page: a summary, then a section for each of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pollux.simulator.report import (
    Cell,
    Picture,
    Section,
    Table,
    cluster_figures,
    jct_figure,
    line_figure,
    rho_figure,
)
from pollux.simulator.report.samples import first_workload
from pollux.simulator.report.standard import coadaptation_pictures
from pollux.simulator.studies.cases import Measured, spread_of
from pollux.simulator.studies.cells import fixed, percent, ratio, time
from pollux.simulator.studies.claims import HEADINGS as CLAIM_HEADINGS
from pollux.simulator.studies.claims import UNAVOIDED, Claim, verdict
from pollux.simulator.studies.paper import EIGHT, GENETIC_NOT_AVOIDING, MeasuredPart, World

Row = list[Cell | str | float | None]
Line = list[tuple[float, float]]


def paper_sections(world: World, parts: Sequence[MeasuredPart], claims: Sequence[Claim]) -> list[Section]:
    """The summary, then a section for each part."""
    return [_summary(world, claims), *(_SECTIONS[part.part.name](part) for part in parts)]


def _summary(world: World, claims: Sequence[Claim]) -> Section:
    cluster = world.samples.cluster.cluster
    rules = f"the rules of the preset “{world.compat}”" if world.compat else "our own rules (docs/deviations.md)"
    text = [
        f"Workloads: {world.samples.description}. World: {len(list(cluster))} nodes with {cluster.num_gpus} GPUs in "
        f"all, a round a minute, 30 seconds without training after each re-allocation, {rules}.",
        verdict(claims),
        "Where they come from: “paper” is what the paper says and plots, means over its eight samples or a run on its "
        "testbed; “artifact” is what its published simulator gave for the very samples run here. Compare absolute "
        "times with the latter only, for samples differ by a factor of two.",
        " ".join(["Why they differ.", *_reasons(world, claims)]),
    ]
    rows = [
        [claim.text, *(_claimed(claim, share) for share in (claim.paper, claim.published, claim.here))]
        for claim in claims
    ]
    return Section("Summary", text, tables=[Table(CLAIM_HEADINGS, rows)] if rows else [])


def _reasons(world: World, claims: Sequence[Claim]) -> list[str]:
    found = [
        "The testbed is not simulated; its figures are there for orientation.",
        "How finish-time fairness was measured the paper does not say; docs/simulator.md tells how it is done here.",
    ]
    if not world.compat:
        found.append(
            "Pollux is planned by a solver of our own instead of the paper's genetic search, and ncf is an application "
            "like any other: the artifact pins its jobs to one GPU with their largest batch, here they find out."
        )
        if any(claim.text == UNAVOIDED and not claim.holds for claim in claims):
            found.append(
                "That solver packs jobs, so those on several nodes seldom meet even where nothing keeps them apart: "
                "interference costs less than it did in the paper. The line with the genetic search shows its cost "
                "where jobs do meet."
            )
    return found


def _claimed(claim: Claim, share: float | None) -> Cell | None:
    return None if share is None else Cell(claim.shown(share), share)


def _table_section(part: MeasuredPart) -> Section:
    pollux = part.case("pollux")
    here: list[Row] = [
        [
            case.case.label,
            time(case.figures["avg_jct_s"]),
            fixed(case.avg_jct_s / pollux.avg_jct_s),
            time(case.figures["p50_jct_s"]),
            time(case.figures["p99_jct_s"], 1),
            time(case.figures["makespan_s"], 1),
            fixed(case.figures["reallocations_per_job"]),
            percent(case.figures["avg_efficiency"]),
        ]
        for case in part.cases
    ]
    headings = ["policy", "avg JCT, h", "× pollux", "p50, h", "p99, h", "makespan, h", "re-allocs a job", "efficiency"]
    tables = [Table(headings, here, "Here"), _published_table(part)]
    tuned = [outcome for case in part.cases[:3] for outcome in case.outcomes]
    first = first_workload(tuned)
    drawn = cluster_figures(first)
    pictures = [
        Picture(
            "jct",
            jct_figure(tuned),
            "Share of jobs that had ended within a time, on a logarithmic axis, a curve each for pollux, optimus and "
            "tiresias.",
            "Share of jobs that had ended within a time after their submission; all samples, tuned jobs.",
        ),
        *(
            Picture(
                f"cluster-{name}",
                drawn[name],
                f"{title} over time, a line a policy.",
                f"{title}; {first[0].workload}.",
                True,
            )
            for name, title in (("efficiency", "Statistical efficiency of the cluster"), ("gpus", "GPUs held"))
        ),
    ]
    text = "Optimus knows the true remaining work and speed of each job. Tuned jobs ask for sizes that suit them, "
    text += "realistic ones for what owners chose on Microsoft's Philly cluster."
    return Section(part.part.title, text, pictures, tables)


def _published_table(part: MeasuredPart) -> Table:
    """The artifact's figures for these samples, where they are known, and those of the testbed."""
    is_known = any("avg_jct_s" in case.case.published for case in part.cases)
    headings = ["policy"]
    headings += ["artifact: avg JCT, h", "p99, h", "makespan, h", "avg JCT, here / artifact"] if is_known else []
    headings += ["testbed: avg JCT, h", "p99, h", "makespan, h"]
    rows = []
    for case in part.cases:
        known = case.case.published
        row: Row = [case.case.label]
        if is_known:
            row += [time(known.get("avg_jct_s")), time(known.get("p99_jct_s"), 1), time(known.get("makespan_s"), 1)]
            row.append(ratio(case.avg_jct_s, known.get("avg_jct_s")))
        rows.append([*row, *_testbed(case)])
    return Table(headings, rows, "Published")


def _testbed(case: Measured) -> list[Cell | None]:
    digits = {"avg_jct": 2, "p99_jct": 0, "makespan": 0}
    return [time(case.case.published.get(f"testbed_{key}_s"), count) for key, count in digits.items()]


def _line_section(part: MeasuredPart, xlabel: str, text: str, logx: bool = False, unit_s: float = 1.0) -> Section:
    """A line for each label, the published one dashed, and all of it as a table.

    Where other samples were published than were run, only changes can be compared, and only they are drawn.
    """
    is_relative = part.part.source == EIGHT
    solid: dict[str, Line] = {}
    dashed: dict[str, Line] = {}
    for case in part.cases:
        x, published = (case.case.value or 0.0) / unit_s, case.case.published.get("avg_jct_s")
        here, there = case.avg_jct_s / 3600, None if published is None else published / 3600
        if is_relative:
            here, there = 1 + (part.change(case) or 0.0), 1 + (part.published_change(case) or 0.0)
        solid.setdefault(case.case.label, []).append((x, here))
        if there is not None:
            dashed.setdefault(case.case.label, []).append((x, there))
    title = part.part.title
    ylabel = f"average JCT over that at {(part.part.base or 0.0) / unit_s:g}" if is_relative else "average JCT, hours"
    figure = line_figure(f"{title}: average JCT", xlabel, ylabel, solid, dashed, logx=logx)
    alt = f"Average job completion time over {xlabel}; solid lines are ours, dashed ones published."
    caption = f"Solid: here. Dashed: {part.part.source}." if dashed else ""
    table = _changes_table(part, xlabel, unit_s, bool(dashed))
    return Section(title, text, [Picture(part.part.name, figure, alt, caption)], [table])


def _changes_table(part: MeasuredPart, xlabel: str, unit_s: float, published: bool) -> Table:
    headings = [xlabel, "policy", "avg JCT, h", "change", "p99, h", "makespan, h", "re-allocs a job"]
    headings += ["published: avg JCT, h", "change"] if published else []
    rows = []
    for case in part.cases:
        figures = case.figures
        row: Row = [
            (case.case.value or 0.0) / unit_s,
            case.case.label,
            time(figures["avg_jct_s"]),
            percent(part.change(case), signed=True),
            time(figures["p99_jct_s"], 1),
            time(figures["makespan_s"], 1),
            fixed(figures["reallocations_per_job"]),
        ]
        if published:
            row += [time(case.case.published.get("avg_jct_s")), percent(part.published_change(case), signed=True)]
        rows.append(row)
    return Table(headings, rows)


def _load_section(part: MeasuredPart) -> Section:
    text = "More or fewer jobs in the same eight hours. Changes are relative to load 1 under the same policy."
    return _line_section(part, "load", text)


def _interval_section(part: MeasuredPart) -> Section:
    text = "How often Pollux plans anew. Published figures are means over eight samples: compare the changes."
    return _line_section(part, "minutes from round to round", text, logx=True, unit_s=60.0)


def _interference_section(part: MeasuredPart) -> Section:
    text = "A job on several nodes loses this share of its speed while it shares a node with another such job. "
    text += "Avoidance keeps them apart; the paper took its JCT to be the same at any slowdown."
    if any(case.case.label == GENETIC_NOT_AVOIDING for case in part.cases):
        text += " What was published without avoidance came from the paper's genetic search: hold it against the line "
        text += "that searches so too. The solver of our own hands out whole nodes where it can, and jobs seldom meet."
    return _line_section(part, "share of speed lost", text)


def _p_section(part: MeasuredPart) -> Section:
    headings = ["policy", "avg JCT, h", "p50, h", "p99, h", "makespan, h", "re-allocs a job"]
    headings += ["testbed: avg JCT, h", "p99, h", "makespan, h"]
    rows = []
    for case in part.cases:
        figures = case.figures
        rows.append(
            [
                case.case.label,
                time(figures["avg_jct_s"]),
                time(figures["p50_jct_s"]),
                time(figures["p99_jct_s"], 1),
                time(figures["makespan_s"], 1),
                fixed(figures["reallocations_per_job"]),
                *_testbed(case),
            ]
        )
    text = "The power mean of speedups: 1 seeks throughput, −1 is the paper's choice, −10 looks at the slowest job."
    return Section(part.part.title, text, tables=[Table(headings, rows)])


def _fairness_section(part: MeasuredPart) -> Section:
    rows = [
        [case.case.label, fixed(found.worst), percent(found.above_1, digits=1), percent(found.below_2, digits=1)]
        for case in part.cases
        if (found := spread_of(case)) is not None
    ]
    picture = Picture(
        "rho",
        rho_figure([outcome for case in part.cases for outcome in case.outcomes]),
        "Share of jobs with at most some finish-time fairness ρ, a curve a policy; a line marks 1.",
        "ρ is a job's completion time over the one it would have had alone on its fair share. All samples.",
    )
    text = "The paper: under p = −1, 99 % of jobs have ρ < 2; p = 1 and Tiresias have a tail beyond 4."
    return Section(part.part.title, text, [picture], [Table(["policy", "worst ρ", "ρ > 1", "ρ < 2"], rows)])


def _adaptation_section(part: MeasuredPart) -> Section:
    outcomes = [outcome for case in part.cases for outcome in case.outcomes]
    text = "The two largest jobs of different applications, ImageNet first as in the paper. Noise grows as training "
    text += (
        "goes on, so larger batches lose less efficiency, and more GPUs are of use. Optimus adapts GPUs as well, but "
    )
    text += "keeps the batch size that the owner chose."
    return Section(part.part.title, text, coadaptation_pictures(outcomes, "adaptation"))


_SECTIONS: Mapping[str, Callable[[MeasuredPart], Section]] = {
    "table": _table_section,
    "load": _load_section,
    "interval": _interval_section,
    "interference": _interference_section,
    "p": _p_section,
    "fairness": _fairness_section,
    "adaptation": _adaptation_section,
}
