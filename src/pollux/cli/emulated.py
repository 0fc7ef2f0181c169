"""Emulated clusters as people see them: what marks one, how tables say so, and the jobs that are made for it.

A node is emulated if its GPU type begins with `emulated-`; its label `compress` tells how much faster than real all
goes there. Nothing else in Pollux asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from pollux.cli import output
from pollux.cli.examples import examples_folder
from pollux.errors import InvalidInput, Permanent
from pollux.wire.jobspec.fields import BY_NAME

if TYPE_CHECKING:
    from pollux.wire.jobspec import JobRequest
    from pollux.wire.service_client import ServiceClient

PREFIX = "emulated-"
COMPRESS = "compress"
"""The label."""
SCRIPT = "emulated.py"
"""Of the examples."""

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
) -> dict[str, Any]:
    """The document of a job that acts as a built-in application: `cifar10`, or `cifar10:0.2`, a fifth as long.

    `UnknownName` lists the applications that there are. It is not tried again after a failure: one that cannot keep its
    pace would slow down all others once more.
    """
    from pollux.applications import load

    load(application)
    document: dict[str, Any] = {
        "name": name or application.partition(":")[0],
        "command": ["python", SCRIPT, application],
        "working_dir": str(examples_folder()),
        "application": application,
        "retries": 0,
    }
    wishes = {"requested_gpus": requested_gpus, "batch_size": batch_size, "fixed_batch": fixed_batch or None}
    return document | {key: value for key, value in wishes.items() if value is not None}


def emulated_request(application: str, fields: Mapping[str, Any], command: Sequence[str]) -> JobRequest:
    """The same as `pollux run --emulate` and `submit --emulate` submit it, with the other options of the job."""
    from pollux.cli.job_options import request_of

    if command:
        fix = "Leave out --emulate, or the command"
        raise InvalidInput("--emulate", application, f"{command[0]} is given, too", fix)
    document = emulated_document(application)
    if clash := sorted((document.keys() - {"name", "retries"} | {"gpus"}) & fields.keys()):
        flag, instead = BY_NAME[clash[0]].flag, ", or give --requested-gpus" if "gpus" in clash else ""
        raise InvalidInput(flag, fields[clash[0]], "does not go with --emulate", f"Leave it out{instead}")
    return request_of({**document, **fields}, os.environ)


def check_emulated(client: ServiceClient, path: Path | None) -> None:
    """`Permanent` if the cluster could not pace such a job."""
    from pollux.cli.finding import option
    from pollux.service.place import ClusterFolder

    if not emulated_nodes(client.cluster().nodes):
        where = option(ClusterFolder(path))
        raise Permanent(
            "The GPUs of this cluster are not emulated, and a job of --emulate runs on no others. Make them so with "
            f"pollux down{where} and then pollux up{where} --emulate."
        )


def emulated_nodes(nodes: Sequence[NodeLike]) -> list[NodeLike]:
    return [node for node in nodes if node.gpu_type.startswith(PREFIX)]


def kind(nodes: Sequence[NodeLike]) -> str:
    """What GPUs are called where they are counted: `GPU`, or `emulated T4 GPU`."""
    types = sorted({node.gpu_type.removeprefix(PREFIX).upper() for node in emulated_nodes(nodes)})
    return f"emulated {'/'.join(types)} GPU" if types else "GPU"


def compression(nodes: Sequence[NodeLike]) -> float:
    """How many emulated seconds a real one is there; 1 on a cluster that is not emulated."""
    return next((float(node.labels.get(COMPRESS, 1.0)) for node in emulated_nodes(nodes)), 1.0)


def pace(compress: float) -> str:
    """What compression means: `20 × faster than real: one second here is 20 s there`."""
    if compress == 1.0:
        return "as fast as real"
    speed = f"{compress:g} × faster" if compress > 1.0 else f"{1.0 / compress:g} × slower"
    return f"{speed} than real: one second here is {compress:g} s there"


def remark(nodes: Sequence[NodeLike]) -> str:
    """For tables: `emulated T4 GPUs, 20 × faster …`; empty on a cluster that is not emulated."""
    return f"{kind(nodes)}s, {pace(compression(nodes))}" if emulated_nodes(nodes) else ""


def tell(nodes: Sequence[NodeLike]) -> None:
    """The line below a table whose cluster is emulated; none below others."""
    if text := remark(nodes):
        output.note(f"{text[0].upper()}{text[1:]}.")
