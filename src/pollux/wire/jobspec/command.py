"""What the command of a job means: the script of an elastic job, and how a node is told to run it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pollux.core import FrozenMap, JobSpec
from pollux.errors import InvalidSpec
from pollux.wire.jobspec.fields import PLAIN_FIX
from pollux.wire.jobspec.reading import shortened
from pollux.wire.nodes import Launch

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


def launch_of(spec: JobSpec, *, fixed_batch: bool = False) -> Launch:
    """What the nodes are to run. `fixed_batch`: the policy does not adapt batch sizes.

    What the specification says of batch sizes becomes variables of the agent. The job's own variables win over them.
    """
    if not spec.command:
        raise InvalidSpec("command", [], "there is nothing to run", "Give a command")
    if spec.rigid:
        return Launch(
            spec.id,
            spec.command[0],
            spec.command[1:],
            spec.working_dir or ".",
            spec.env,
            spec.checkpoint_dir,
            is_plain=True,
            gpus=spec.requested_gpus or 1,
        )
    found = find_script(spec.command)
    if isinstance(found, Complaint):
        raise InvalidSpec("command", list(spec.command), found.problem, found.fix)
    script = os.path.normpath(os.path.join(spec.working_dir, spec.command[found]))
    return Launch(
        spec.id,
        script,
        spec.command[found + 1 :],
        spec.working_dir or ".",
        FrozenMap({**_agent_variables(spec, fixed_batch), **spec.env}),
        spec.checkpoint_dir,
    )


def _agent_variables(spec: JobSpec, fixed_batch: bool) -> dict[str, str]:
    given = {
        "POLLUX_INITIAL_BATCH_SIZE": spec.batch.initial_batch_size,
        "POLLUX_MAX_BATCH_SIZE": spec.batch.max_batch_size,
        "POLLUX_MIN_PER_GPU_BATCH_SIZE": spec.batch.min_per_gpu_batch_size,
        "POLLUX_MAX_PER_GPU_BATCH_SIZE": spec.batch.max_per_gpu_batch_size,
        "POLLUX_BATCH_SIZE": spec.requested_batch_size,
        "POLLUX_FIXED_BATCH": 1 if spec.fixed_batch or fixed_batch else None,
    }
    return {name: str(value) for name, value in given.items() if value is not None}
