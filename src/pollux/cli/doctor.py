"""`pollux doctor`: what is installed, what is missing, and the command that gets it.

Looks and never changes anything. A broken package is a finding, not a crash: those that load native code of their own
(torch) are tried in another process.
"""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import util
from pathlib import Path

import typer
from rich.text import Text

from pollux import __version__
from pollux.cli import output
from pollux.cli.words import count
from pollux.errors import Permanent, Temporary

MIN_PYTHON = (3, 11)
PROBE_TIMEOUT_S = 120.0
SERVICE_TIMEOUT_S = 5.0
DEFAULT_DATA = Path("../shared/data")  # seen from the root of a checkout, as in the Makefile


class Status(StrEnum):
    """What a check found."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer. `required`: Pollux does not work without; `fix`: the command or step that mends it."""

    name: str
    purpose: str
    required: bool
    status: Status
    version: str | None = None
    detail: str | None = None
    fix: str | None = None


def doctor(as_json: output.JsonOption = False) -> None:
    """Show what is installed, what is missing, and how to get it."""
    checks = examine()
    works = all(check.status is Status.OK for check in checks if check.required)
    if as_json:
        output.print_json({"pollux": __version__, "ok": works, "checks": [asdict(check) for check in checks]})
    else:
        _show(checks, works)
    if not works:
        raise typer.Exit(1)


def examine() -> list[Check]:
    """Every check, the required ones first."""
    return [
        _python(),
        *(_imported(name, purpose) for name, purpose in BASE),
        _package("numba", "fits and searches as machine code (without it: the same, much slower)"),
        _package("matplotlib", "plots", "plot"),
        _torch(),
        *(_package(name, "the live service", "service") for name in ("starlette", "uvicorn")),
        _package("yaml", "files of jobs", "service", "pyyaml"),
        _package("ray", "clusters provided by Ray", "ray"),
        _data(),
        _git(),
        _service(),
        Check("cores", "machine", False, Status.OK, detail=f"{_cores()} usable"),
        Check("memory", "machine", False, Status.OK, detail=_memory()),
    ]


BASE = (
    ("numpy", "the model"),
    ("scipy", "the model"),
    ("typer", "the command line"),
    ("rich", "the command line"),
)


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info >= MIN_PYTHON:
        return Check("python", "everything", True, Status.OK, version, sys.executable)
    wanted = ".".join(map(str, MIN_PYTHON))
    return Check(
        "python", "everything", True, Status.BROKEN, version, "too old", f"install Python {wanted} or newer, make setup"
    )


def _imported(name: str, purpose: str) -> Check:
    """A required package: it must load, not just lie there."""
    if not _is_installed(name):
        return Check(name, purpose, True, Status.MISSING, fix=_pip(name))
    try:
        importlib.import_module(name)
    except Exception as failure:  # whatever a half-installed package raises
        return Check(name, purpose, True, Status.BROKEN, _version(name), _one_line(failure), _pip(name, again=True))
    return Check(name, purpose, True, Status.OK, _version(name))


def _package(name: str, purpose: str, extra: str | None = None, project: str | None = None) -> Check:
    """A package that Pollux works without, by its metadata alone: loading it takes seconds.

    `project`: what pip calls it, if that is something else.
    """
    project = project or name
    if _is_installed(name):
        return Check(name, purpose, False, Status.OK, _version(project))
    return Check(name, purpose, False, Status.MISSING, fix=_pip(_extra(extra, project) if extra else project))


def _torch() -> Check:
    purpose = "training with pollux.torch"
    found = _package("torch", purpose, "torch")
    if found.status is not Status.OK:
        return found
    ask = "import torch; print(torch.cuda.device_count())"
    try:
        answer = _run([sys.executable, "-c", ask])
        devices = int(answer.split()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as failure:
        detail = f"does not load: {_one_line(failure)}"
        return Check("torch", purpose, False, Status.BROKEN, found.version, detail, _pip("torch", again=True))
    return Check("torch", purpose, False, Status.OK, found.version, f"{devices} CUDA devices")


def _service() -> Check:
    """Whether a cluster runs that this user would find; that none does is no fault."""
    from pollux.cli.finding import find

    purpose = "jobs of a live cluster"
    try:
        with find(timeout_s=SERVICE_TIMEOUT_S) as client:
            health = client.health()
            cluster = client.cluster()
    except Exception as failure:  # whatever keeps it from answering is what is asked for
        # Temporary: of the two sentences only the one that says what is wrong.
        detail = str(failure.args[0] if isinstance(failure, Temporary) else failure)
        is_absent = isinstance(failure, Permanent) and detail.startswith("No cluster runs")
        status = Status.MISSING if is_absent else Status.BROKEN
        return Check("cluster", purpose, False, status, detail=detail, fix="pollux up" if is_absent else None)
    detail = f"{health.status} at {client.url}, {count(cluster.gpus, 'GPU')} on {count(len(cluster.nodes), 'node')}"
    return Check("cluster", purpose, False, Status.OK, health.version, detail)


def _data() -> Check:
    purpose = "refitting the built-in applications"
    folder = Path(os.environ.get("POLLUX_DATA") or DEFAULT_DATA).absolute()
    if folder.is_dir():
        return Check("measured data", purpose, False, Status.OK, detail=os.path.normpath(folder))
    fix = "export POLLUX_DATA=DIR, the folder that holds the measured traces"
    return Check("measured data", purpose, False, Status.MISSING, detail=f"no {os.path.normpath(folder)}", fix=fix)


def _git() -> Check:
    purpose = "working on Pollux"
    if shutil.which("git") is None:
        return Check("git", purpose, False, Status.MISSING, fix="install git with the system's package manager")
    try:
        version = _run(["git", "--version"]).removeprefix("git version").strip()
    except (OSError, subprocess.SubprocessError) as failure:
        return Check("git", purpose, False, Status.BROKEN, detail=_one_line(failure))
    return Check("git", purpose, False, Status.OK, version)


def _run(command: list[str]) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise subprocess.SubprocessError(last[0])
    return done.stdout


def _is_installed(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str | None:
    from importlib import metadata  # 20 ms, which `pollux --help` should not pay

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extra(extra: str, name: str) -> str:
    """What to ask pip for. Not installed itself, `pollux[…]` would be looked up in the public index: ask for `name`."""
    return f"pollux[{extra}]" if _version("pollux") else name


def _pip(requirement: str, *, again: bool = False) -> str:
    force = ["--force-reinstall"] if again else []
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *force, requirement])


def _one_line(failure: BaseException) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())


def _cores() -> int:
    affinity: Callable[[int], Iterable[int]] | None = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(set(affinity(0))) if affinity else os.cpu_count() or 1


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


_STYLES = {Status.OK: "green", Status.MISSING: "yellow", Status.BROKEN: "red"}


def _show(checks: list[Check], works: bool) -> None:
    rows = [
        (
            check.name,
            Text(check.status, style=_STYLES[check.status]),
            " · ".join(filter(None, (check.version, check.detail))) or "–",
            "everything" if check.required else check.purpose,
        )
        for check in checks
    ]
    output.table(["what", "status", "found", "needed for"], rows, title=f"pollux {__version__}")
    fixes: dict[str, list[str]] = {}
    for check in checks:
        if check.fix:
            fixes.setdefault(check.fix, []).append(check.name)
    for fix, names in fixes.items():
        output.console.print(f"{', '.join(names)}: {fix}", soft_wrap=True)
    verdict = "Pollux works here." if works else "Pollux does not work here yet: follow the lines above."
    output.console.print(Text(verdict, style="green" if works else "bold red"))
