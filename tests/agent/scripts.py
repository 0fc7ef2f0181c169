"""Training scripts in a process that has torch loaded already: starting Python with it takes longer than they do."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed_by(commands: Sequence[Sequence[str]], variables: Mapping[str, str] | None = None) -> str:
    """What these command lines of scripts, run one after the other in this process, print to standard output."""
    for name in [name for name in os.environ if name.startswith("POLLUX_")]:
        del os.environ[name]
    os.environ.update(variables or {})
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for sys.argv in map(list, commands):
            runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


def printed_by_replica(rank: int, replicas: int, command: Sequence[str]) -> str:
    return printed_by([command])
