"""`pollux sweep` and `pollux reproduce`: many runs that answer one question."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import output, report, run_options

if TYPE_CHECKING:
    from pollux.simulator.studies.cases import Case, Runs
    from pollux.simulator.studies.claims import Claim
    from pollux.simulator.studies.paper import MeasuredPart
    from pollux.simulator.studies.samples import Samples
    from pollux.simulator.studies.sweep import Axis, Row

DATA_VARIABLE = "POLLUX_DATA"
USUAL_DATA = Path("../shared/data")


def sweep(
    axis: Annotated[str, typer.Argument(help="What is varied: load, interval, interference or p.")],
    workloads: Annotated[list[str], typer.Argument(help=run_options.WORKLOAD_HELP)],
    policies: run_options.PoliciesOption,
    values: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="Values of the axis, with commas between.", show_default="as in the paper"),
    ] = None,
    jobs: run_options.JobsOption = None,
    nodes: run_options.NodesOption = None,
    gpus_per_node: run_options.GpusOption = None,
    cluster: run_options.ClusterOption = None,
    interval: run_options.IntervalOption = None,
    realloc_delay: run_options.DelayOption = None,
    interference: run_options.InterferenceOption = None,
    traces: run_options.TracesOption = None,
    seed: run_options.SeedOption = None,
    compat: run_options.CompatOption = None,
    settings: run_options.SetOption = None,
    json_file: output.JsonFileOption = None,
    report_folder: report.ReportOption = None,
) -> None:
    """Vary one thing and see what it does to completion times, under one or more policies."""
    run_options.use_one_thread()
    from pollux.simulator.scenario import Scenario
    from pollux.simulator.settings import parse
    from pollux.simulator.studies.sweep import Plan, axis_of, cases_of, rows_of, values_of

    found = axis_of(axis)
    wanted = values_of(found, values)
    flags = run_options.flags_of(interval, realloc_delay, interference, seed)
    output.check_writable(json_file, "--json")
    report.check(report_folder)
    names = run_options.policy_names(policies)
    distinct = list(dict.fromkeys(workloads))
    scenarios = [
        Scenario(name, names[0], run_options.cluster_of(name, nodes, gpus_per_node, cluster), traces)
        for name in distinct
    ]
    plan = Plan(scenarios, names, {**flags, **parse(settings or ())}, compat)
    cases = cases_of(found, wanted, plan)
    runs = _run(cases, jobs)
    measured = [runs.measured(case) for case in cases]
    rows = rows_of(found, measured)
    if json_file is not None:
        document = {
            "axis": found.name,
            "policies": names,
            "workloads": distinct,
            "rows": [row.document() for row in rows],
            "cases": [case.document() for case in measured],
        }
        output.write_json(document, json_file)
    if json_file != output.STDOUT:
        _print_sweep(found, rows)
        _note_file(json_file)
    if report_folder is not None:
        from pollux.simulator.report import write_page
        from pollux.simulator.studies.sweep_page import sweep_sections

        shown = found.base if found.base in wanted else wanted[0]
        usual = [outcome for case in measured if case.case.value == shown for outcome in case.outcomes]
        title = f"Sweep of {found.name}: {', '.join(names)} on {', '.join(run_options.labels(distinct))}"
        page = write_page(report_folder, title, sweep_sections(found, rows, usual), [row.document() for row in rows])
        output.note(f"The report is in {page}")


def reproduce(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help=f"The paper's data, else ${DATA_VARIABLE}, else {USUAL_DATA}, else generated."
        ),
    ] = None,
    report_folder: Annotated[
        Path,
        typer.Option(
            "--report",
            metavar="DIR",
            parser=report.folder_named,
            help="Where to put report.html, its plots and report.json.",
        ),
    ] = Path("out/paper"),
    workloads: Annotated[
        int | None, typer.Option(min=1, help="How many samples.", show_default="all, or 4 generated ones")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…", help="Some parts: table, load, interval, interference, p, fairness or adaptation."
        ),
    ] = None,
    jobs: run_options.JobsOption = None,
    compat: run_options.CompatOption = None,
    json_file: output.JsonFileOption = None,
) -> None:
    """Run the simulated evaluation of the OSDI'21 paper and set the results beside what was published.

    All of it on four samples takes about 25 minutes of CPU time; --only and --workloads shorten it.
    With --compat artifact it takes hours: a genetic search of a minute or more plans each run of Pollux.
    """
    run_options.use_one_thread()
    from pollux.simulator.studies.claims import claims_of
    from pollux.simulator.studies.paper import World, parts_of

    output.check_writable(json_file, "--json")
    report.check(report_folder)
    world = World(_samples(data, workloads), compat)
    parts = parts_of(world, _part_names(only))
    runs = _run([case for part in parts for case in part.cases], jobs)
    measured = [part.measured(runs) for part in parts]
    claims = claims_of({part.part.name: part for part in measured})
    document = {
        "workloads": list(world.samples.names),
        "source": world.samples.description,
        "compat": compat,
        "num_runs": len(runs),
        "claims": [claim.document() for claim in claims],
        "parts": {part.part.name: part.document() for part in measured},
    }
    if json_file is not None:
        output.write_json(document, json_file)
    if json_file != output.STDOUT:
        _print_parts(measured)
        _print_fairness(measured)
        _print_claims(claims)
        _note_file(json_file)
    from pollux.simulator.report import write_page
    from pollux.simulator.studies.paper_page import paper_sections

    page = write_page(
        report_folder, "Pollux, OSDI '21, simulated anew", paper_sections(world, measured, claims), document
    )
    output.note(f"The report is in {page}")


def _part_names(only: str | None) -> list[str]:
    """Those that `--only` lists; none without it, which means all."""
    from pollux.errors import InvalidInput
    from pollux.simulator.studies.paper import PARTS

    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    if only is not None and not names:
        raise InvalidInput("--only", only, "names no part", f"Known: {', '.join(PARTS)}")
    return names


def _run(cases: Sequence[Case], jobs: int | None) -> Runs:
    """Every distinct run once, in one pool, under one bar."""
    from pollux.simulator.studies.cases import distinct, run_cases

    scenarios = distinct(cases)
    with output.progress(f"{len(scenarios)} runs", len(scenarios)) as advance:
        return run_cases(scenarios, jobs or os.cpu_count() or 1, advance)


def _samples(data: Path | None, count: int | None) -> Samples:
    from pollux.simulator.studies.samples import FOLDER, generated_samples, paper_samples

    if data is not None:
        return paper_samples(data, count)
    if variable := os.environ.get(DATA_VARIABLE):
        return paper_samples(Path(variable), count, f"${DATA_VARIABLE}")
    if (USUAL_DATA / FOLDER).is_dir():
        return paper_samples(USUAL_DATA, count, "data")
    return generated_samples(count)


def _note_file(json_file: Path | None) -> None:
    if json_file not in (None, output.STDOUT):
        output.note(f"The figures of every run are in {json_file}")


def _print_sweep(axis: Axis, rows: Sequence[Row]) -> None:
    table = [
        (
            output.number(row.value, 2),
            row.label,
            *_times(row.figures),
            f"{100 * row.change:+.1f} %",
        )
        for row in rows
    ]
    output.table((axis.name, "policy", *HEADINGS, "change of avg JCT"), table)


HEADINGS = ("avg JCT, h", "p50, h", "p99, h", "makespan, h", "re-allocs")


def _times(figures: Mapping[str, Any]) -> list[Any]:
    keys = ("avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s")
    return [
        *(output.number(figures[key] / 3600, 2) for key in keys),
        output.number(figures["reallocations_per_job"], 2),
    ]


def _print_parts(parts: Sequence[MeasuredPart]) -> None:
    """Those with completion times of their own; fairness has a table of its own, single jobs are for the page."""
    rows = []
    for part in parts:
        for case in part.cases if part.part.name not in ("fairness", "adaptation") else ():
            known = (case.case.published.get(key) for key in ("avg_jct_s", "testbed_avg_jct_s"))
            published = [output.number(None if seconds is None else seconds / 3600, 2) for seconds in known]
            value = "" if case.case.value is None else f"{case.case.value:g}"
            rows.append((part.part.name, case.case.label, value, *_times(case.figures), *published))
    if rows:
        output.table(("part", "policy", "value", *HEADINGS, "published avg JCT, h", "testbed, h"), rows)


def _print_fairness(parts: Sequence[MeasuredPart]) -> None:
    from pollux.simulator.studies.cases import spread_of

    spreads = [
        (case.case.label, spread)
        for part in parts
        if part.part.name == "fairness"
        for case in part.cases
        if (spread := spread_of(case)) is not None
    ]
    rows = [
        (label, output.number(found.worst, 2), *(output.number(100 * it, 1) for it in (found.above_1, found.below_2)))
        for label, found in spreads
    ]
    if rows:
        output.table(("policy", "worst ρ", "jobs with ρ > 1, %", "ρ < 2, %"), rows)


def _print_claims(claims: Sequence[Claim]) -> None:
    from pollux.simulator.studies.claims import HEADINGS as CLAIM_HEADINGS

    if claims:
        shown = [[claim.shown(share) for share in (claim.paper, claim.published, claim.here)] for claim in claims]
        output.table(CLAIM_HEADINGS, [(claim.text, *shares) for claim, shares in zip(claims, shown, strict=True)])
