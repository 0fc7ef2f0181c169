"""Emulated clusters as people see them: what marks one, how tables say so, and the jobs that are made for it.

A node is emulated if its GPU type begins with `emulated-`; its label `compress` tells how much faster than real all
goes there. Nothing else in Pollux asks.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from pollux.cli import output
from pollux.cli.examples import examples_folder
from pollux.errors import InvalidInput, Permanent
from pollux.wire.jobspec.fields import BY_NAME

if TYPE_CHECKING:
    from pollux.applications import Application
    from pollux.wire.jobspec import JobRequest

PREFIX = "emulated-"
DEFAULT_TYPE = "t4"
COMPRESS = "compress"
"""The label."""
SCRIPT = "emulated.py"
"""Of the examples."""
MOST_RUNS = 1000
"""The longest job that is taken from the command line, in training runs of its application: more is a slip."""

EmulateOption = Annotated[
    str | None,
    typer.Option(
        "--emulate",
        metavar="APP",
        help="Instead of a command: a job that acts as a built-in application, on a cluster of pollux up --emulate. "
        "cifar10, or cifar10:0.1 for a tenth of its training.",
        show_default=False,
    ),
]


class NodeLike(Protocol):
    """Of `wire.api.NodeView`, and of `core.Node`."""

    @property
    def gpu_type(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...


def emulated_document(
    application: str,
    *,
    name: str | None = None,
    requested_gpus: int | None = None,
    batch_size: int | None = None,
    fixed_batch: bool = False,
    gpu_type: str = PREFIX + DEFAULT_TYPE,
) -> dict[str, Any]:
    """The document of a job that acts as a built-in application: `cifar10`, or `cifar10:0.2`, a fifth as long.

    `UnknownName` lists the applications that there are. It runs on GPUs of this type only: on others it would have
    another pace. It is not tried again after a failure: one that cannot keep its pace would slow down all others once
    more.
    """
    from pollux.applications import load

    load(application)
    document: dict[str, Any] = {
        "name": name or application.partition(":")[0],
        "command": ["python", SCRIPT, application],
        "working_dir": str(examples_folder()),
        "application": application,
        "gpu_type": gpu_type,
        "retries": 0,
    }
    wishes = {"requested_gpus": requested_gpus, "batch_size": batch_size, "fixed_batch": fixed_batch or None}
    return document | {key: value for key, value in wishes.items() if value is not None}


def emulated_request(application: str, fields: Mapping[str, Any], command: Sequence[str]) -> JobRequest:
    """The same as `pollux run --emulate` and `submit --emulate` submit it, with the other options of the job."""
    from pollux.cli.job_options import request_of

    if application.startswith("-"):
        problem = "APP is missing: what follows --emulate is taken for it"
        raise InvalidInput("--emulate", application, problem, "Give one, such as --emulate cifar10:0.1")
    if command:
        fix = "Leave out --emulate, or the command"
        raise InvalidInput("--emulate", application, f"{command[0]} is given, too", fix)
    limits = _load(application).limits
    document = emulated_document(application)
    if clash := sorted((document.keys() - {"name", "retries"} | {"gpus"}) & fields.keys()):
        flag, instead = BY_NAME[clash[0]].flag, ", or give --requested-gpus" if "gpus" in clash else ""
        raise InvalidInput(flag, fields[clash[0]], "does not go with --emulate", f"Leave it out{instead}")
    request = request_of({**document, **fields}, os.environ)
    least = request.initial_batch_size or limits.initial_batch_size
    most = request.max_batch_size or limits.max_batch_size
    if request.batch_size is not None and not least <= request.batch_size <= most:
        problem = f"{application.partition(':')[0]} trains with {least} to {most}"
        raise InvalidInput("--batch-size", request.batch_size, problem, "Give one of these, or leave it out")
    return request


def _load(application: str) -> Application:
    """What --emulate names; what is wrong with it is said of that option."""
    from pollux.applications import load

    try:
        found = load(application)
    except InvalidInput as wrong:
        raise InvalidInput("--emulate", wrong.value, wrong.problem, wrong.fix) from None
    name, _, length = application.partition(":")
    if float(length or 1.0) > MOST_RUNS:
        problem = f"is longer than {MOST_RUNS} training runs of {name}"
        raise InvalidInput("--emulate", application, problem, f"Give {name}:{MOST_RUNS} or less")
    return found


def check_running(path: Path | None) -> None:
    """`Permanent` if no cluster runs there, with the advice that a job of --emulate needs."""
    from pollux.cli.standing import left_in, option
    from pollux.service.place import ClusterFolder

    if os.environ.get("POLLUX_URL") and path is None:
        return
    folder = ClusterFolder(path)
    if not (folder.is_locked or folder.service_file() or left_in(folder)):
        raise Permanent(f"No cluster runs in {folder.path}. Start one with pollux up{option(folder)} --emulate.")


def for_cluster(request: JobRequest, nodes: Sequence[NodeLike], path: Path | None) -> JobRequest:
    """A job of --emulate, for the GPUs that are emulated here; `Permanent` if none are."""
    found = emulated_nodes(nodes)
    if not found:
        raise Permanent(
            "The GPUs of this cluster are not emulated, and a job of --emulate runs on no others. Make them so with "
            f"{_restart(path, '--emulate')}."
        )
    return replace(request, gpu_type=found[0].gpu_type)


def check_own(requests: Sequence[JobRequest], nodes: Sequence[NodeLike], path: Path | None) -> None:
    """On an emulated cluster: refuse (`InvalidInput`) scripts whose pace nobody knows, and note what has none."""
    from pollux.wire.jobspec import uses_pollux

    unpaced: list[str] = []
    for request in requests if emulated_nodes(nodes) else ():
        script = None if request.script is None else Path(request.script)
        if script is None or not uses_pollux(script):
            unpaced.append((script or Path(request.command[0])).name)
        elif not _emulates(script, request.gpu_type):
            raise InvalidInput(
                "command",
                shlex.join(request.command),
                "the GPUs of this cluster are emulated, and nobody knows the pace of this script on them",
                f"Use --emulate APP here, or have real slots for it: {_restart(path, '--no-emulate')}",
            )
    if len(unpaced) == 1:
        output.note(f"{unpaced[0]} is not paced: it runs as it is on this machine's CPU.")
    elif unpaced:
        output.note(f"{len(unpaced)} plain commands are not paced: they run as they are on this machine's CPU.")


def _emulates(script: Path, gpu_type: str | None) -> bool:
    """Whether it may be one with `Job(emulate=…)`: it has the word, or its owner asks for emulated GPUs."""
    has_word = re.search(r"\bemulate\b", script.read_text("utf-8", "replace"))
    return has_word is not None or (gpu_type or "").startswith(PREFIX)


def _restart(path: Path | None, flag: str) -> str:
    from pollux.cli.standing import option
    from pollux.service.place import ClusterFolder

    where = option(ClusterFolder(path))
    return f"pollux down{where} and then pollux up{where} {flag}"


def emulated_nodes(nodes: Sequence[NodeLike]) -> list[NodeLike]:
    return [node for node in nodes if node.gpu_type.startswith(PREFIX)]


def kind(nodes: Sequence[NodeLike]) -> str:
    """What GPUs are called where they are counted: `GPU`, or `emulated T4 GPU`."""
    types = sorted({node.gpu_type.removeprefix(PREFIX).upper() for node in emulated_nodes(nodes)})
    return f"emulated {'/'.join(types)} GPU" if types else "GPU"


def compression(nodes: Sequence[NodeLike]) -> float:
    """How many emulated seconds a real one is there; 1 on a cluster that is not emulated."""
    return next((float(node.labels.get(COMPRESS, 1.0)) for node in emulated_nodes(nodes)), 1.0)


def speed(compress: float) -> str:
    """`20 × faster than real`."""
    if compress == 1.0:
        return "as fast as real"
    return f"{compress:g} × faster than real" if compress > 1.0 else f"{1.0 / compress:g} × slower than real"


def pace(compress: float) -> str:
    """What compression means: `20 × faster than real: one second here is 20 s there`."""
    return speed(compress) if compress == 1.0 else f"{speed(compress)}: one second here is {compress:g} s there"


def remark(nodes: Sequence[NodeLike]) -> str:
    """For tables: `emulated T4 GPUs, 20 × faster than real`; empty on a cluster that is not emulated."""
    return f"{kind(nodes)}s, {speed(compression(nodes))}" if emulated_nodes(nodes) else ""


def seconds(nodes: Sequence[NodeLike]) -> str:
    """Which seconds tables are in; empty where all are the same."""
    compress = compression(nodes)
    if compress == 1.0:
        return ""
    return f"Times and rates are in real seconds here; one of them is {compress:g} emulated ones."


def tell(nodes: Sequence[NodeLike]) -> None:
    """The line below a table whose cluster is emulated; none below others."""
    if text := remark(nodes):
        output.note(f"{text[0].upper()}{text[1:]}. {seconds(nodes)}".rstrip())
