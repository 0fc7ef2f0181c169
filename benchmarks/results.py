"""The two files that hold all figures, and merging one area's into them.

results.json is `{key: {value, unit, baseline, ratio, …}}` and nothing else, so that a reader may loop over it.
context.json is `{area: {title, measured_at, machine, tables, left_out}}`: what RESULTS.md shows around the figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.measurement import Finding, LeftOut, Measurement, Table

FOLDER = Path(__file__).resolve().parent


class Store:
    """results.json, context.json and RESULTS.md of one folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.results_file = folder / "results.json"
        self.context_file = folder / "context.json"
        self.report_file = folder / "RESULTS.md"

    def results(self) -> dict[str, dict[str, Any]]:
        return _read(self.results_file)

    def context(self) -> dict[str, dict[str, Any]]:
        return _read(self.context_file)

    def merge(self, area: str, title: str, findings: Iterable[Finding]) -> None:
        """Replace all that is known of one area, keep the others, and render the report."""
        findings = list(findings)
        measured = {found.key: found for found in findings if isinstance(found, Measurement)}
        kept = {key: record for key, record in self.results().items() if record["area"] != area and key not in measured}
        new = {key: {**found.record(), "area": area} for key, found in measured.items()}
        # Areas by name, and within one the order in which it measures: the same on every machine.
        results = dict(sorted({**kept, **new}.items(), key=lambda item: item[1]["area"]))
        context = self.context()
        context[area] = {
            "title": title,
            "measured_at": datetime.now(UTC).isoformat(timespec="minutes"),
            "machine": machine.describe(),
            "left_out": {found.key: found.reason for found in findings if isinstance(found, LeftOut)},
            "tables": [asdict(found) for found in findings if isinstance(found, Table)],
        }
        _write(self.results_file, _json(results))
        _write(self.context_file, _json(dict(sorted(context.items()))))
        self.render()

    def render(self) -> None:
        """RESULTS.md, from the two files alone."""
        _write(self.report_file, report.render(self.results(), self.context()))


def _json(content: object) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _read(file: Path) -> dict[str, dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _write(file: Path, text: str) -> None:
    """All or nothing: an interrupted run leaves the old file."""
    unfinished = file.with_name(file.name + ".new")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)
