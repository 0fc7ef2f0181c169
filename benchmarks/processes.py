"""What a command costs, in a process of its own: imports and reading included."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """Of one process, from its start to its end."""

    cpu_s: float
    peak_mib: float


def cost(arguments: Sequence[str | Path], cache: Path | None = None) -> Cost:
    """Run `pollux …`, by default without what earlier runs have left in the cache."""
    command = [sys.executable, "-m", "pollux.cli.main", *map(str, arguments)]
    environment = {**os.environ, "POLLUX_CACHE": "" if cache is None else str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    with process.stderr as stream:
        said = stream.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {said}")
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
