"""Where the clusters of a trial live, and what is kept of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pollux.errors import InvalidInput

KeepOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep logs, event logs and checkpoints of the clusters here.")
]


def check_keep(keep: Path | None) -> None:
    """Refuse a folder that has something in it already, and one that cannot be made."""
    if keep is None:
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InvalidInput("--keep", str(keep), "is there already", "Name a new or an empty folder")
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
        raise InvalidInput("--keep", str(keep), problem, "Name a folder that you may write to") from None


@contextmanager
def trial_folder(keep: Path | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards; `keep` gets what is left in it then."""
    # Short, since sockets are in it; and nobody else's, whatever POLLUX_HOME says.
    base = Path(tempfile.mkdtemp(prefix="pollux-trial-", dir="/tmp"))
    try:
        try:
            yield base
        finally:
            if keep is not None:
                shutil.copytree(base, keep, ignore=_no_files, dirs_exist_ok=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _no_files(folder: str, names: list[str]) -> set[str]:
    """What cannot be copied: sockets and pipes."""
    return {name for name in names if not ((path := Path(folder) / name).is_dir() or path.is_file())}
