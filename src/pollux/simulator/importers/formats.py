"""Formats of job lists by name. A new one is a file beside this one, and a line here."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from pollux.errors import InvalidDocument, UnknownName
from pollux.simulator.documents import read_text
from pollux.simulator.importers import helios, pai, philly, philly_csv
from pollux.simulator.importers.job_list import KIND, JobList


class Reader(Protocol):
    """Reads the text of a file wholly, or raises InvalidDocument with everything that is wrong."""

    def __call__(self, path: Path, text: str, *, skip_damaged: bool = False) -> JobList: ...


class Format(NamedTuple):
    read: Reader
    summary: str
    columns: tuple[str, ...]
    """Those that are needed; of a JSON file its keys."""
    is_json: bool = False


FORMATS: Mapping[str, Format] = {
    "helios": Format(helios.read_helios, "SenseTime's Helios: cluster_log.csv", helios.COLUMNS),
    "pai": Format(pai.read_pai, "Alibaba's PAI of 2020: pai_task_table.csv", pai.COLUMNS),
    "philly": Format(philly.read_philly, "Microsoft's Philly: cluster_job_log", philly.KEYS, is_json=True),
    "philly-csv": Format(
        philly_csv.read_philly_csv, "the paper's reduced Philly list, and any log brought to it", philly_csv.COLUMNS
    ),
}

UNNAMED = "Alibaba's published table has no header: --format pai"

_FIRST_LINE = re.compile(r"\S[^\r\n]{0,9999}")  # that is not blank; JSON may hold everything in one


def read_log(path: Path, format_name: str | None = None, *, skip_damaged: bool = False) -> JobList:
    """The jobs of a log; without the name of a format, by the one that its beginning tells.

    The file is read once, so that it may be a pipe.
    """
    if format_name is not None and format_name not in FORMATS:
        raise UnknownName("format", format_name, FORMATS)
    text = read_text(KIND, path)
    if format_name is None:
        format_name = guessed_format(path, text)
    return FORMATS[format_name].read(path, text, skip_damaged=skip_damaged)


def guessed_format(path: Path, text: str) -> str:
    """The one format whose columns the first line names; JSON is told by its first bracket."""
    found = _FIRST_LINE.search(text)
    first = found.group().strip() if found else ""
    header = {cell.strip() for cell in next(csv.reader([first], skipinitialspace=True), [])}
    fits = [
        name
        for name, known in FORMATS.items()
        if (first.startswith("[") if known.is_json else header.issuperset(known.columns))
    ]
    if len(fits) != 1:
        known = "; ".join(f"{name} ({', '.join(found.columns)})" for name, found in FORMATS.items())
        raise InvalidDocument(
            KIND,
            str(path),
            "its first line does not tell the format",
            f"Name it with --format ({UNNAMED}). Known, by columns: {known}",
        )
    return fits[0]
