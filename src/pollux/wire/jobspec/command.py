"""What the command of a job means: the script of an elastic job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pollux.wire.jobspec.fields import PLAIN_FIX
from pollux.wire.jobspec.reading import shortened

PYTHON = re.compile(r"python(3(\.\d+)?)?")
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun"})


@dataclass(frozen=True)
class Complaint:
    """Why a command cannot be that of an elastic job."""

    position: int
    problem: str
    fix: str


def is_python(program: str) -> bool:
    """By its name; what it really is, only running it would tell."""
    return PYTHON.fullmatch(os.path.basename(program)) is not None


def find_script(command: Sequence[str]) -> int | Complaint:
    """The position of the script in `python [-u] script.py …`: the only form that replicas can be started from."""
    program = command[0]
    if not is_python(program):
        return Complaint(0, *_wrong_program(program))
    if "/" in program and not os.path.isabs(program):
        problem = "an elastic job runs in the cluster's own Python, which no relative path can name"
        return Complaint(0, problem, f"Write python, or {PLAIN_FIX}")
    for position, argument in enumerate(command[1:], 1):
        if argument == "-u":
            continue
        if argument.startswith("-"):
            return Complaint(position, *_wrong_option(argument))
        if not argument.endswith(".py"):
            problem = f"an elastic job runs a script that ends in .py, and {shortened(argument)} does not"
            return Complaint(position, problem, f"Name the script there, or {PLAIN_FIX}")
        return position
    return Complaint(0, "names no script", f"Write python SCRIPT.py …, or {PLAIN_FIX}")


def _wrong_program(program: str) -> tuple[str, str]:
    name = os.path.basename(program)
    if name in LAUNCHERS:
        problem = "Pollux itself starts the replicas of an elastic job"
        return problem, f"Write python SCRIPT.py …, or {PLAIN_FIX}"
    if name.endswith(".py"):
        return "a script is not a program", f"Write python {shortened(program)} …, or {PLAIN_FIX}"
    return "only Python scripts can be elastic", f"Write python SCRIPT.py …, or {PLAIN_FIX}"


def _wrong_option(option: str) -> tuple[str, str]:
    name = shortened(option)
    problem = f"replicas are not started with Python's option {name}"
    if option == "-m":
        return problem, f"Name the file of the module: python path/to/module.py …, or {PLAIN_FIX}"
    if option == "-c":
        return problem, f"Put the code into a script, or {PLAIN_FIX}"
    if option.startswith(("-W", "-X", "-O", "-E", "-I", "-B")):
        return problem, f"Use Python's environment variable for it in env, or {PLAIN_FIX}"
    return problem, f"Leave it out, or {PLAIN_FIX}"


def default_name(command: Sequence[str]) -> str:
    """What a job is called that was given no name: like its script, or else its program."""
    script = next((word for word in command[:10] if word.endswith(".py")), command[0])
    stem = os.path.basename(script).removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).lstrip("-._")[:60] or "job"
