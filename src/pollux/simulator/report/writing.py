"""Reports as files: `report.html`, its figures as PNG, and `report.json` with everything that went into it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pollux.errors import InvalidInput
from pollux.simulator.metrics import Outcome, means
from pollux.simulator.report import standard
from pollux.simulator.report.page import Section, pictures_of, render
from pollux.simulator.report.svg import png


def write_report(outcomes: Sequence[Outcome], folder: Path, *, title: str, sections: Sequence[Section] = ()) -> Path:
    """The report of some runs; sections of the caller's own stand below the summary. Returns the path of the page.

    Equal outcomes give equal bytes.
    """
    if not outcomes:
        raise InvalidInput("outcomes", [], "there is nothing to report", "Give at least one outcome")
    found = [
        standard.summary_section(outcomes),
        *sections,
        standard.times_section(outcomes),
        standard.gpus_section(outcomes),
        standard.cluster_section(outcomes),
        standard.coadaptation_section(outcomes),
        standard.jobs_section(outcomes),
        standard.inputs_section(outcomes),
    ]
    document = {"title": title, "means": means(outcomes), "runs": [outcome.document() for outcome in outcomes]}
    return write_page(folder, title, [section for section in found if section is not None], document)


def write_page(folder: Path, title: str, sections: Sequence[Section], document: object = None) -> Path:
    """A page of any sections, its figures as PNG beside it, and the document, if there is one, as `report.json`.

    A page of ours that was there before goes, with those of its pictures that this one has not.
    """
    contents = {f"{picture.name}.png": png(picture.figure) for section in sections for picture in section.figures}
    if document is not None:
        contents["report.json"] = _json(document)
    contents["report.html"] = render(title, sections).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = _pictures_before(folder / "report.html")
        _place(contents, folder)
        for name in before - contents.keys():
            (folder / name).unlink(missing_ok=True)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise InvalidInput(
            "report", str(folder), f"cannot be written: {reason}", "Name a folder you may write"
        ) from None
    return folder / "report.html"


def _pictures_before(page: Path) -> set[str]:
    """The files that a page names as its own; none where there is no page, or nobody can read it."""
    try:
        return {f"{name}.png" for name in pictures_of(page.read_text(encoding="utf-8"))}
    except (OSError, UnicodeDecodeError):
        return set()


def _place(contents: dict[str, bytes], folder: Path) -> None:
    """All files are on the disk before the first takes its name; the page is the last to."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as aside:
        for name, content in contents.items():
            (Path(aside) / name).write_bytes(content)
        for name in contents:
            os.replace(Path(aside) / name, folder / name)


def _json(document: Any) -> bytes:
    return (json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()
