"""What the processes of a job wrote of themselves, read back: the truth that outcomes are compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FINISH = "finish"
"""A file of this name in the folder of a job tells it to come to its end."""


@dataclass(frozen=True)
class Run:
    """One process, from its first line to its last."""

    pid: int
    began: int
    started_s: float
    last_s: float
    """When it last wrote anything."""
    replica: str = ""
    code: int | None = None
    """How it meant to end, a signal as its negative; None: it never came to that."""
    has_ended: bool = False
    """Of an elastic job: it wrote its last line."""
    first_step_s: float | None = None
    steps: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """What it found at the end of its training."""
    children: tuple[tuple[int, int], ...] = ()
    """pid and beginning of what it left behind."""
    obeyed: tuple[str, ...] = ()
    """Orders that it should not have been able to give."""

    @property
    def has_finished(self) -> bool:
        return self.code is not None


def runs_in(folder: Path) -> list[Run]:
    """In the order of their starts. A line that is being written is left out."""
    found = []
    for path in folder.glob("*.jsonl"):
        whole, _, _ = path.read_text("utf-8", "replace").rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        if lines:
            found.append(_run(lines))
    return sorted(found, key=lambda run: run.started_s)


def _run(lines: list[dict[str, Any]]) -> Run:
    first = lines[0]
    steps = [line for line in lines if line["what"] == "step"]
    finished = next((line for line in lines if line["what"] == "finished"), None)
    return Run(
        first["pid"],
        first["began"],
        first["at"],
        max(line["at"] for line in lines),
        first.get("replica", ""),
        None if finished is None else int(finished["code"]),
        any(line["what"] == "ended" for line in lines),
        steps[0]["at"] if steps else None,
        len(steps),
        {} if finished is None else finished,
        tuple((line["pid"], line["began"]) for line in lines if line["what"] == "child"),
        tuple(line["order"] for line in lines if line["what"] == "obeyed"),
    )


def size_of(folder: Path) -> int:
    """Grows whenever any process of the job has written something."""
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))
