"""Finding areas and running them, one after the other, with a line on the terminal for each figure."""

from __future__ import annotations

import ast
import importlib
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.measurement import Finding, LeftOut, Measurement
from benchmarks.results import Store

AREAS = Path(__file__).resolve().parent / "areas"


class UnknownArea(Exception):  # noqa: N818 - reads as what it says
    """An area that has no module; the message lists those that have one."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"no benchmark area {name!r}. Areas: {', '.join(known) or 'none'}.")


def areas(folder: Path = AREAS) -> dict[str, str]:
    """{area: title}, found without importing any: an area may need packages that are not installed."""
    files = sorted(file for file in folder.glob("*.py") if not file.name.startswith("_"))
    return {file.stem: _title(file) for file in files}


def _title(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def chosen(wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The areas to run, in alphabetical order; all of them if none is named."""
    for name in wanted or ():
        if name not in known:
            raise UnknownArea(name, known)
    return sorted(set(wanted or known))


def run(names: Sequence[str], store: Store | None = None) -> bool:
    """Measure the areas and store each as soon as it is complete; whether all of them were.

    An area that fails says why and keeps its earlier figures; the others go on.
    """
    store = store or Store()
    titles, complete = areas(), True
    for name in names:
        print(f"{name}: {titles[name]}", flush=True)
        try:
            store.merge(name, titles[name], list(_progress(name)))
        except Exception:
            complete = False
            traceback.print_exc()
            print(f"{name}: failed, see above; its earlier figures stay", file=sys.stderr, flush=True)
    _summary(store, names)
    return complete


def _progress(area: str) -> Iterator[Finding]:
    """What the area yields, each announced as it comes."""
    start = time.perf_counter()
    for found in importlib.import_module(f"benchmarks.areas.{area}").measure():
        seconds = time.perf_counter() - start
        match found:
            case Measurement():
                beside = "" if found.baseline is None else f", baseline {report.number(found.baseline)}"
                text = f"{found.key} = {report.number(found.value)} {found.unit}{beside}"
            case LeftOut():
                text = f"{found.key} left out: {found.reason}"
            case _:
                text = f"table: {found.title}"
        print(f"  [{seconds:5.1f} s] {text}", flush=True)
        yield found


def _summary(store: Store, names: Sequence[str]) -> None:
    records = {key: record for key, record in store.results().items() if record["area"] in names}
    print()
    print(report.plain(records))
    missed = [key for key, record in records.items() if not report.meets_bound(record)]
    print()
    print(f"bounds missed: {', '.join(missed)}" if missed else "all bounds met of what was measured")
    left_out = [key for name in names for key in store.context().get(name, {}).get("left_out", {})]
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    print(f"written: {store.results_file}, {store.report_file.name}")
