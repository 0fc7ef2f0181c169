"""`pollux launch` and `pollux resize`: training on this machine alone, without a service."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import output
from pollux.core import Allocation, GenerationAbandoned, JobId, NodeId, ReplicasReady
from pollux.errors import InvalidInput, MissingDependency, Permanent, UnknownName

if TYPE_CHECKING:
    from pollux.node.launched import Launched
    from pollux.wire.nodes import RunStatus

DEFAULT_RETRIES = 3
RESIZE_TIMEOUT_S = 600.0
"""More than a daemon gives newcomers to get ready."""
LONGEST_NAME = 40

BaseOption = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Folder of all launches.", show_default="~/.pollux/launch"),
]


def launch(
    script: Annotated[Path, typer.Argument(help="Python script that trains with pollux.torch.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="All that follows belongs to the script.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas to begin with.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Daemons on this machine that act as nodes.")] = 1,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Most replicas on a node.", show_default="its share of the GPUs, else 8 or the cores"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="The name of the job. One that was used before goes on from its checkpoint.",
            show_default="that of the script, with a number if it was used before",
        ),
    ] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it saves.", show_default="in the folder of the launch")
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How often it is started again from its checkpoint after it failed.",
            show_default=f"{DEFAULT_RETRIES}, and 0 before its first step",
        ),
    ] = None,
    base: BaseOption = None,
) -> None:
    """Train on this machine, with replicas that come and go: see pollux resize.

    Shows what the replicas print; a line of any but the main one begins with its name. Ctrl-C lets the job save and
    end, a second one kills it. Ends with the exit code of the job.
    """
    from pollux.cli.tending import Tending, has_checkpoint
    from pollux.node.launched import launch_base, spread
    from pollux.node.launching import LocalCluster, slots_per_node, visible_devices
    from pollux.wire.nodes import Launch

    if not script.is_file():
        raise InvalidInput("SCRIPT", str(script), "no such file", "Name a Python script")
    if find_spec("torch") is None:
        raise MissingDependency("torch", f"Training with this Python ({sys.executable})", "torch")
    devices = visible_devices(os.environ)
    room = slots or slots_per_node(nodes, devices)
    if slots is None and not devices:
        room = max(room, -(-replicas // nodes))
    allocation = spread(replicas, [NodeId(f"n{position}") for position in range(nodes)], room, evenly=True)
    where = launch_base(base)
    job = name or _fresh_name(where, script.stem)
    saves_in = (checkpoint_dir or where / job / "checkpoints").absolute()
    program = Launch(
        JobId(job), str(script.absolute()), tuple(arguments or ()), str(Path.cwd()), checkpoint_dir=str(saves_in)
    )
    if len(job) > LONGEST_NAME:
        raise InvalidInput("--name", job, f"longer than {LONGEST_NAME} characters", "Use a shorter one")

    def start() -> LocalCluster:
        with _naming("--checkpoint-dir" if checkpoint_dir else "--dir", saves_in):
            saves_in.mkdir(parents=True, exist_ok=True)
        some_node = "n0" if nodes == 1 else "n*"
        output.note(f"{job}: starting {_count(replicas)}; logs in {where / job / some_node / 'jobs' / job / 'logs'}")
        cluster = LocalCluster(where / job, nodes, room)
        if has_checkpoint(saves_in):
            output.note(f"{job} goes on from its checkpoint in {saves_in}.")
        return cluster

    raise typer.Exit(Tending(program, allocation, retries, DEFAULT_RETRIES).run(start))


def resize(
    job: Annotated[str, typer.Argument(help="The name of a launch that runs.")],
    replicas: Annotated[int, typer.Argument(min=1, help="How many it shall have.")],
    nodes: Annotated[
        str | None,
        typer.Option(metavar="K|A,B,…", help="On how many of its nodes, or on which.", show_default="all, evenly"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until they train.")] = True,
    base: BaseOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Change the number of replicas of a job that runs under pollux launch, or move it.

    It trains on meanwhile. If its code has changed since it was started, it saves, ends and starts with the new code.
    """
    from pollux.node.launched import Launched, launch_base, spread
    from pollux.wire.nodes import RunPhase

    where = launch_base(base)
    with Launched(where / job) as launched:
        status = _status(launched, job, where)
        wanted = spread(replicas, _chosen(nodes, launched.nodes), launched.slots, evenly=True)
        answer = {"job": job, "generation": status.generation, "from": status.allocation, "to": wanted}
        if status.phase is RunPhase.TRAINING and (
            wanted == status.allocation or (nodes is None and replicas == status.allocation.num_gpus)
        ):
            _answer(as_json, {**answer, "to": status.allocation}, "unchanged", f"{job} has {_count(replicas)} already.")
            return
        change = f"{job}: {status.allocation.num_gpus} → {_count(replicas)}"
        if status.allocation.num_gpus == replicas:
            change = f"{job}: {_count(replicas)}, on {', '.join(wanted.gpus)}"
        _ = launched.news  # what happens right after the request must not be missed
        began_s = time.monotonic()
        answer["generation"] = generation = launched.resize(job, wanted)
        now = launched.status(job)
        if now is not None and now.phase is RunPhase.RESTARTING is not status.phase:
            output.note(f"{job}: its code has changed: it saves and starts anew.")
        if not wait:
            _answer(as_json, answer, "asked", f"{change}, asked for as generation {generation}.")
            return
        with output.progress(change):
            event = launched.wait(job, generation, RESIZE_TIMEOUT_S)
        answer["seconds"] = seconds = time.monotonic() - began_s
    match event:
        case ReplicasReady():
            _answer(as_json, answer, "ready", f"{change} in {seconds:.2f} s.")
        case _:
            reason = event.reason if isinstance(event, GenerationAbandoned) else "the job has ended"
            if as_json:
                _answer(as_json, {**answer, "reason": reason}, "abandoned", "")
                raise typer.Exit(1)
            raise Permanent(f"{change}: given up, since {reason.rstrip('.')}.")


def _fresh_name(base: Path, stem: str) -> str:
    """One whose folder nobody has; makes that folder, so that nobody else takes it."""
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", stem).strip("-.")[: LONGEST_NAME - 6] or "job"
    with _naming("--dir", base):
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in count(1):
            name = stem if number == 1 else f"{stem}-{number}"
            try:
                (base / name).mkdir(mode=0o700)
            except FileExistsError:
                continue
            return name
    raise AssertionError("unreachable: numbers do not end")


@contextmanager
def _naming(option: str, folder: Path) -> Iterator[None]:
    """Make folders inside; the option is named if that fails."""
    try:
        yield
    except OSError as error:
        default = ", or set POLLUX_HOME" if option == "--dir" else ""
        problem = f"cannot be used as a folder ({error.strerror})"
        raise InvalidInput(option, str(folder), problem, f"Give one that you may write to{default}") from None


def _status(launched: Launched, job: str, base: Path) -> RunStatus:
    """Of a job that can be resized."""
    from pollux.node.launched import launches_in
    from pollux.wire.nodes import RunPhase

    if not launched.folder.is_dir() or not launched.is_running:
        if launched.is_held:
            raise Permanent(f"{job} is still starting: try again in a few seconds.")
        running = list(launches_in(base))
        if job in running or not launched.folder.is_dir():
            raise UnknownName("JOB", job, running)
        others = f" These do: {', '.join(running)}." if running else ""
        raise Permanent(f"{job} does not run. Start it again with pollux launch --name {job} ….{others}")
    status = launched.status(job)
    if status is None:
        raise Permanent(f"{job} is still starting: try again in a few seconds.")
    if status.phase in (RunPhase.STOPPING, RunPhase.ENDED):
        raise Permanent(f"{job} is {status.phase}: nothing is left to resize.")
    return status


def _chosen(text: str | None, nodes: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """The nodes that `--nodes` means."""
    if text is None:
        return nodes
    if text.isdecimal():
        if not 1 <= int(text) <= len(nodes):
            raise InvalidInput("--nodes", text, f"not from 1 to {len(nodes)}", "The launch decides how many there are")
        return nodes[: int(text)]
    names = tuple(NodeId(name.strip()) for name in dict.fromkeys(text.split(",")))
    for name in names:
        if name not in nodes:
            raise UnknownName("--nodes", name, nodes)
    return names


def _answer(as_json: bool, answer: dict[str, object], outcome: str, sentence: str) -> None:
    if not as_json:
        typer.echo(sentence)
        return
    plain = {key: dict(value.gpus) if isinstance(value, Allocation) else value for key, value in answer.items()}
    output.print_json({**plain, "outcome": outcome})


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"
