"""Starting a module of this folder as replicas on this machine, as torchrun would, and taking replica 0's answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 1800.0
"""Long past what any of them takes on a busy machine."""


def run(module: str, replicas: int, *arguments: object) -> Any:
    """`python -m module …` so many times at once; the JSON that replica 0 prints as its last line."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(rank) for rank in range(replicas)]
        port = _free_port()
        processes = []
        try:
            for rank, file in enumerate(said):
                with file.open("w") as stream:
                    variables = environment(**_torchrun(rank, replicas, port))
                    processes.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=stream, stderr=stream))
            codes = _codes(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(f"{' '.join(command)}: replica {rank} ended with {code}: {said[rank].read_text()}")
        return last_line(said[0].read_text())


def _codes(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """How they ended; None for those that still waited for one that failed."""
    end = time.monotonic() + PATIENCE_S
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return codes
        if time.monotonic() > end:
            raise RuntimeError(f"replicas did not end within {PATIENCE_S:.0f} s")
        time.sleep(0.1)


def environment(**changes: str) -> dict[str, str]:
    """For a training process: one thread, nothing of a launcher or a Pollux around this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLLUX_") and name not in OURS}
    path = os.pathsep.join(part for part in sys.path if part)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def last_line(text: str) -> Any:
    """What a script prints last is its result, as JSON."""
    return json.loads(text.strip().splitlines()[-1])


def _torchrun(rank: int, replicas: int, port: int) -> dict[str, str]:
    values = (rank, rank, replicas, replicas, 1, "127.0.0.1", port)
    return dict(zip(OURS, map(str, values), strict=True))


OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
