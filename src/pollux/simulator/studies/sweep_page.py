"""A sweep as a page: a line a policy, and the table below it."""

from __future__ import annotations

from collections.abc import Sequence

from pollux.simulator.metrics import Outcome
from pollux.simulator.report import Cell, Picture, Section, Table, line_figure
from pollux.simulator.report.standard import inputs_section
from pollux.simulator.studies.cells import fixed, percent, time
from pollux.simulator.studies.sweep import Axis, Row

_MORE = (("p50, h", "p50_jct_s"), ("p99, h", "p99_jct_s"), ("makespan, h", "makespan_s"))


def sweep_sections(axis: Axis, rows: Sequence[Row], base: Sequence[Outcome]) -> list[Section]:
    """`base`: outcomes that show what the runs came from."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row.label, []).append((row.value, row.avg_jct_s / 3600))
    ordered = {label: sorted(line) for label, line in lines.items()}
    title = f"Average JCT by {axis.name}"
    figure = line_figure(title, axis.title, "average JCT, hours", ordered, logx=axis.is_logarithmic)
    alt = f"Average job completion time over {axis.title}, a line each for {'; '.join(ordered)}."
    headings = [axis.name, "policy", "avg JCT, h", "change", *(heading for heading, _ in _MORE), "re-allocs a job"]
    table = [
        [
            Cell(f"{row.value:g}".replace("-", "−"), row.value),
            row.label,
            time(row.figures["avg_jct_s"]),
            percent(row.change, signed=True),
            *(time(row.figures[key]) for _, key in _MORE),
            fixed(row.figures["reallocations_per_job"]),
        ]
        for row in rows
    ]
    text = "Means over the workloads. Changes are those of the average JCT, relative to the usual value."
    return [
        Section(title, text, [Picture(f"sweep-{axis.name}", figure, alt)], [Table(headings, table)]),
        inputs_section(base),
    ]
