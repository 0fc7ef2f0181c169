"""The tables of a report: figures of each run, what they came from, and every job with its timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.simulator.metrics import JobOutcome, Outcome, means
from pollux.simulator.report.page import Cell, Markup, Table
from pollux.simulator.report.samples import end_s
from pollux.simulator.report.sparkline import strip, tracks

MAX_TIMELINES = 2000
"""Jobs of a page that are drawn: about a kilobyte each."""
MAX_ROWS = 4000
"""Jobs of a page; all others are in report.json."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a run as a table shows it."""

    heading: str
    key: str
    show: Callable[[float], str]
    less_is_better: bool = False


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _columns(unit: str, unit_s: float) -> list[Column]:
    def time(seconds: float) -> str:
        return f"{seconds / unit_s:.2f}"

    return [
        Column(f"avg JCT, {unit}", "avg_jct_s", time, True),
        Column("p50", "p50_jct_s", time, True),
        Column("p90", "p90_jct_s", time, True),
        Column("p99", "p99_jct_s", time, True),
        Column(f"makespan, {unit}", "makespan_s", time, True),
        Column("re-allocs a job", "reallocations_per_job", "{:.2f}".format),
        Column("utilisation", "utilisation", _percent),
        Column("efficiency", "avg_efficiency", _percent),
        Column("worst ρ", "worst_rho", "{:.2f}".format, True),
        Column("unfair jobs", "unfair_fraction", _percent, True),
        Column("CPU, s", "cpu_s", "{:.2f}".format),
    ]


def time_unit(outcomes: Sequence[Outcome]) -> tuple[str, float]:
    """One for all times of a report: columns are for comparing."""
    longest = max(job.jct_s for outcome in outcomes for job in outcome.jobs)
    return ("h", 3600.0) if longest >= 6000 else ("min", 60.0)


def figures_table(outcomes: Sequence[Outcome]) -> Table:
    """A row a run, and the means of each policy where there are several workloads; the best of its kind is bold."""
    of_workload: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for outcome in outcomes:
        of_workload.setdefault(outcome.workload, []).append((outcome.policy, outcome.figures()))
    groups = list(of_workload.items())
    if len(groups) > 1:
        groups.append(("mean", list(means(outcomes).items())))
    runs = [figures for _, group in groups for _, figures in group]
    columns = [column for column in _columns(*time_unit(outcomes)) if any(run[column.key] is not None for run in runs)]
    rows = [
        [workload, policy, *(_figure(column, figures, [other for _, other in group]) for column in columns)]
        for workload, group in groups
        for policy, figures in group
    ]
    return Table(["workload", "policy", *(column.heading for column in columns)], rows)


def _figure(column: Column, figures: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> Cell | None:
    value = figures[column.key]
    if value is None:
        return None
    rivals = {other[column.key] for other in group if other[column.key] is not None}
    return Cell(column.show(value), value, is_best=column.less_is_better and len(rivals) > 1 and value == min(rivals))


def inputs_table(outcomes: Sequence[Outcome]) -> Table:
    """What the runs came from: one row where all agree, else one a policy."""
    found: dict[tuple[str, str], list[str]] = {}
    policies = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    for outcome in outcomes:
        for name, value in _inputs(outcome.inputs).items():
            users = found.setdefault((name, value), [])
            if outcome.policy not in users:
                users.append(outcome.policy)
    order = list(dict.fromkeys(name for name, _ in found))
    rows = [
        (name, value, "all" if users == policies else ", ".join(users))
        for (name, value), users in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    ]
    return Table(("input", "value", "policies"), rows)


def _inputs(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Names as `--set` takes them, with the values of this run."""
    found = {
        "workload": inputs.get("workload"),
        "cluster": _cluster(inputs.get("nodes", ())),
        "changes of the cluster": len(inputs.get("changes", ())) or None,
        "traces": inputs.get("traces") or "built-in applications",
        "interval_s": inputs.get("interval_s"),
        "early_gap_s": inputs.get("early_gap_s"),
        "seed": inputs.get("seed"),
        "version": inputs.get("version"),
    }
    options = {"policy": inputs.get("policy_options", {})}
    options |= {section: inputs.get(section, {}) for section in ("world", "agent", "scheduler")}
    return {
        **{name: _shown(value) for name, value in found.items() if value is not None},
        **{f"{section}.{name}": _shown(value) for section, its in options.items() for name, value in its.items()},
    }


def _shown(value: object) -> str:
    match value:
        case None | []:
            return "none"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:,.10g}"
        case list() | tuple():
            return ", ".join(map(str, value))
    return str(value)


def _cluster(nodes: Sequence[Mapping[str, Any]]) -> str:
    """`16 × 4 t4`, and with `+` between them where nodes differ."""
    counts: dict[tuple[int, str], int] = {}
    for node in nodes:
        kind = (node["num_gpus"], node["gpu_type"])
        counts[kind] = counts.get(kind, 0) + 1
    return " + ".join(f"{count} × {gpus} {gpu_type}" for (gpus, gpu_type), count in counts.items())


def jobs_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Every job of every run, a table a run, as many runs as a page can take; the first stands open."""
    tables: list[Table] = []
    num_rows = num_drawn = 0
    unit, unit_s = time_unit(outcomes)
    for outcome in outcomes:
        num_rows += len(outcome.jobs)
        if tables and num_rows > MAX_ROWS:
            break
        num_drawn += len(outcome.jobs)
        is_drawn = bool(outcome.histories) and num_drawn <= MAX_TIMELINES
        tables.append(_jobs_table(outcome, unit, unit_s, is_drawn, is_folded=bool(tables)))
    return tables


def _jobs_table(outcome: Outcome, unit: str, unit_s: float, is_drawn: bool, is_folded: bool) -> Table:
    headings = ["job", "application", f"submitted, {unit}", f"JCT, {unit}", f"queued, {unit}", "re-allocations"]
    headings.append("GPU-hours")
    fairness = outcome.fairness
    headings += ["ρ"] if fairness is not None else []
    headings += ["GPUs over time"] if is_drawn else []
    histories = (outcome.histories or {}) if is_drawn else {}
    most_gpus = max((gpus for history in histories.values() for gpus in history.num_gpus), default=0)
    last_s = end_s(outcome)

    def row(index: int, job: JobOutcome) -> list[Cell | str | float | None]:
        times = (job.submitted_at_s, job.jct_s, job.started_at_s - job.submitted_at_s)
        cells: list[Cell | str | float | None] = [
            job.name,
            job.application,
            *(Cell(f"{time_s / unit_s:.2f}", time_s) for time_s in times),
            job.num_reallocations,
            Cell(f"{job.gpu_s / 3600:.2f}", job.gpu_s),
        ]
        if fairness is not None:
            cells.append(Cell(f"{fairness.rho[index]:.2f}", fairness.rho[index]))
        if is_drawn:
            cells.append(_timeline(job, histories.get(job.name), last_s, most_gpus))
        return cells

    rows = [row(index, job) for index, job in enumerate(outcome.jobs)]
    title = f"{outcome.workload} under {outcome.policy}: {len(outcome.jobs):,} jobs"
    return Table(headings, rows, title, is_folded)


def _timeline(job: JobOutcome, history: Any, last_s: float, most_gpus: int) -> Cell | None:
    if history is None:
        return None
    opened = f"<details><summary>{strip(history, last_s, most_gpus)}</summary>{tracks(history, job)}</details>"
    return Cell(Markup(opened), f"{job.started_at_s:020.3f}")
