"""What commands that run trials refuse before anything is started."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pollux.cli import output, report
from pollux.cli.trial.folder import check_keep
from pollux.errors import MissingDependency


def check_before(what: str, keep: Path | None, folder: Path, json_file: Path | None) -> None:
    """Folders and files that cannot be written to, and packages that are missing. `what`: who needs these."""
    check_keep(keep)
    report.check(folder)
    output.check_writable(json_file, "--json")
    for package, extra in (("torch", "torch"), ("starlette", "service")):
        if find_spec(package) is None:
            raise MissingDependency(package, what, extra)
