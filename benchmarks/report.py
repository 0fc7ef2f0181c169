"""Figures as text: RESULTS.md, and the lines that a run prints. A pure function of what results.json holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADER = """# Results

Made by `make bench`, never by hand; one area alone: `make bench ONLY=area`. Times are CPU seconds of the process with
one BLAS thread, medians over repetitions, with the baseline measured in turns in the same run.

*ratio* is ours / baseline: below 1 is better where less is better (times, errors). *spread* is the interquartile range
of the repetitions over their median. *bound* is what a value has to meet; ✗ marks one that it misses.
"""

COLUMNS = ("key", "value", "unit", "bound", "baseline", "ratio", "spread", "note")


def render(results: Mapping[str, Mapping[str, Any]], context: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole of RESULTS.md, areas in alphabetical order."""
    parts = [HEADER]
    for area in sorted({record["area"] for record in results.values()} | set(context)):
        records = {key: record for key, record in results.items() if record["area"] == area}
        parts.append(_section(area, records, context.get(area, {})))
    return "\n".join(parts)


def _section(area: str, records: Mapping[str, Mapping[str, Any]], context: Mapping[str, Any]) -> str:
    lines = [f"## {area}", ""]
    if context.get("title"):
        lines += [context["title"], ""]
    if context.get("machine"):
        lines += [f"Measured {context['measured_at']}: {machine_line(context['machine'])}", ""]
    lines += _markdown(COLUMNS, [_row(key, record) for key, record in records.items()])
    for key, reason in context.get("left_out", {}).items():
        lines += ["", f"Left out: `{key}`: {reason}"]
    for table in context.get("tables", []):
        lines += ["", f"### {table['title']}", ""]
        lines += _markdown(table["columns"], [[number(cell) for cell in row] for row in table["rows"]])
        if table["note"]:
            lines += ["", table["note"]]
    return "\n".join([*lines, ""])


def _row(key: str, record: Mapping[str, Any]) -> list[str]:
    note = record["note"]
    if record["baseline_name"]:
        note = f"baseline: {record['baseline_name']}" + (f"; {note}" if note else "")
    return [
        f"`{key}`",
        number(record["value"]),
        record["unit"],
        bound_text(record),
        number(record["baseline"]),
        number(record["ratio"], 3),
        "" if record["spread"] is None else f"{record['spread']:.0%}",
        note,
    ]


def meets_bound(record: Mapping[str, Any]) -> bool:
    if record["bound"] is None:
        return True
    within: bool = (
        record["value"] <= record["bound"] if record["better"] == "lower" else record["value"] >= record["bound"]
    )
    return within


def bound_text(record: Mapping[str, Any]) -> str:
    if record["bound"] is None:
        return ""
    sign = "≤" if record["better"] == "lower" else "≥"
    return f"{sign} {number(record['bound'])}" + ("" if meets_bound(record) else " ✗")


def number(cell: object, digits: int = 4) -> str:
    """Numbers with so many significant digits and no exponent where that is readable; text as it is."""
    if cell is None:
        return ""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    text = f"{cell:.{digits}g}"
    return f"{cell:,.0f}" if "e+" in text else text


def machine_line(machine: Mapping[str, Any]) -> str:
    """Hardware, then versions, in one sentence."""
    parts = [machine["cpu"], f"{machine['cores']} cores"]
    if machine["memory_gib"] is not None:
        parts.append(f"{machine['memory_gib']} GiB")
    if machine["load"] is not None:
        parts.append(f"load {machine['load']}")
    versions = [f"{name} {version}" for name, version in machine["packages"].items()]
    return ", ".join([*parts, machine["system"], f"Python {machine['python']}", *versions]) + "."


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(columns), "|".join(["", *("---" for _ in columns), ""]), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def plain(records: Mapping[str, Mapping[str, Any]]) -> str:
    """For the terminal: the figures in columns, without notes."""
    rows = [COLUMNS[:-1], *(tuple(_row(key, record)[:-1]) for key, record in records.items())]
    rows = [tuple(cell.strip("`") for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
