"""What a job needs on this machine: its folders, its script, its program. Looks, but changes nothing."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pollux.wire.api import Fault
from pollux.wire.jobspec.command import Complaint, find_script, is_python
from pollux.wire.jobspec.fields import PLAIN_FIX
from pollux.wire.jobspec.reading import Reading
from pollux.wire.jobspec.request import JobRequest

MAX_SOURCE_BYTES = 8 << 20


def check_files(request: JobRequest, lines: Mapping[str, int] | None = None) -> list[Fault]:
    """What is missing here for the job to run; for the client, and for a service on the same machine."""
    reading = Reading(lines or {})
    if not os.path.isdir(request.working_dir):
        problem = "not a folder" if os.path.lexists(request.working_dir) else "no such folder"
        reading.fault("working_dir", request.working_dir, problem, "Make it, or name another")
    elif not os.access(request.working_dir, os.R_OK | os.X_OK):
        reading.fault("working_dir", request.working_dir, "cannot be read", "Change its mode, or name another")
    else:
        _check_command(request, reading)
    if request.checkpoint_dir:
        _check_writable(request.checkpoint_dir, reading)
    return list(reading.sorted_faults())


def _check_command(request: JobRequest, reading: Reading) -> None:
    program = request.command[0]
    if request.is_plain:
        _check_program(request, program, reading)
    else:
        _check_interpreter(program, reading)
    found = find_script(request.command) if is_python(program) else 0
    if isinstance(found, Complaint) or found == 0:
        return
    script = os.path.join(request.working_dir, request.command[found])
    if not os.path.isfile(script):
        fix = "Name one that is there: it is relative to working_dir"
        reading.fault("command", script, "no such script", fix)
    elif not os.access(script, os.R_OK):
        reading.fault("command", script, "cannot be read", "Change its mode")


def _check_program(request: JobRequest, program: str, reading: Reading) -> None:
    if "/" in program:
        path = os.path.join(request.working_dir, program)
        if not os.path.isfile(path):
            reading.fault("command", path, "no such program", "Name one that is there: it is relative to working_dir")
        elif not os.access(path, os.X_OK):
            reading.fault("command", path, "not executable", f"Run chmod +x {path}, or name the program that reads it")
    elif shutil.which(program, path=request.env.get("PATH")) is None:
        reading.fault("command", program, "no such program in PATH", "Give its full path, or set PATH in env")


def _check_interpreter(program: str, reading: Reading) -> None:
    """Elastic jobs run in the Python of the daemons, which is this one."""
    name = os.path.basename(program)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    is_other_version = name.count(".") == 1 and name != f"python{version}"
    folder = os.path.dirname(program)
    is_elsewhere = bool(folder) and os.path.realpath(folder) != os.path.realpath(os.path.dirname(sys.executable))
    if is_other_version or is_elsewhere:
        problem = f"an elastic job runs in the cluster's own Python, {sys.executable} ({version})"
        fix = f"Write python, or start the cluster with the other one (pollux up), or {PLAIN_FIX}"
        reading.fault("command", program, problem, fix)


def _check_writable(folder: str, reading: Reading) -> None:
    """It or, if it is to be made, the folder above it."""
    above = Path(folder)
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        reading.fault("checkpoint_dir", folder, f"{above} is not a folder", "Name another")
    elif not os.access(above, os.W_OK | os.X_OK):
        reading.fault("checkpoint_dir", folder, f"{above} cannot be written", "Name a folder that you may write to")


def uses_pollux(script: Path) -> bool:
    """Whether a script imports pollux.torch: itself, or a module beside it that it imports.

    Nothing is run. A script that cannot be read or parsed does not.
    """
    names = list(_imported(script))
    if any(_is_agent(name) for name in names):
        return True
    beside = {path for name in names for path in _beside(script.parent, name)}
    return any(_is_agent(name) for path in sorted(beside - {script}) for name in _imported(path))


def _is_agent(name: tuple[str, ...]) -> bool:
    return name[:2] in (("pollux", "torch"), ("pollux", "agent"))


def _imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Dotted names, wherever in the file; `from a import b` gives a.b. Of relative ones, what follows the dots."""
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield (*base, alias.name)


def _beside(folder: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """The files that `import a.b` runs below the folder: of the package a, and of the module."""
    for part in name:
        for path in (folder / part / "__init__.py", folder / f"{part}.py"):
            if path.is_file():
                yield path
        folder = folder / part
