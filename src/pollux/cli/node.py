"""`pollux node`: the daemon of one machine, in the foreground."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import output
from pollux.core import FrozenMap, NodeId
from pollux.errors import InvalidInput


def node(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where it keeps its state and logs.", show_default="~/.pollux/node"),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="What this node is called.", show_default="host name")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 means all of them.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 means the one used before, or a free one.")
    ] = 0,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Replicas that it has room for.", show_default="its GPUs, else its cores")
    ] = None,
    gpu_type: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What its slots are called.", show_default="as the driver calls its GPUs"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable that every replica finds in its environment; may be repeated. No place for secrets: "
            "who is on this machine can read it.",
        ),
    ] = None,
    job_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variable of its own environment that jobs find, too; may be repeated."),
    ] = None,
    inherit_env: Annotated[
        bool, typer.Option("--inherit-env", help="Jobs find all of its environment, as under pollux launch.")
    ] = False,
    job_user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run jobs as this user; for root only.", show_default="as itself"),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Who knows this token may talk to it. Give all nodes the same one.",
            show_default="token in DIR, made if need be",
        ),
    ] = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="End together with the process that started it, and all replicas too.")
    ] = False,
    hang_after: Annotated[
        float, typer.Option(metavar="S", help="Kill replicas that give no sign of life for so many seconds.")
    ] = 15.0,
    heartbeat: Annotated[float, typer.Option(metavar="S", help="Seconds from one sign of life to the next.")] = 1.0,
    node_timeout: Annotated[
        float, typer.Option(metavar="S", help="Count replicas of a node that is out of reach for so long as lost.")
    ] = 30.0,
    ready_timeout: Annotated[
        float, typer.Option(metavar="S", help="Call a change off whose new replicas are not ready after so long.")
    ] = 300.0,
    stuck_timeout: Annotated[
        float, typer.Option(metavar="S", help="Kill a replica for which the others have waited so long in a repair.")
    ] = 300.0,
    keep_logs: Annotated[
        float, typer.Option(metavar="DAYS", min=0.0, help="Remove the logs of jobs that ended so long ago.")
    ] = 30.0,
) -> None:
    """Run the daemon of this machine: it starts, watches and ends the replicas of jobs.

    It stays in the foreground, as service managers like it. SIGTERM ends the daemon alone: replicas train on, and the
    next daemon on the same folder finds them. Ctrl-C ends the replicas, too; they save first.
    """
    from pollux.node.daemon import DaemonOptions, serve
    from pollux.node.folder import StateFolder
    from pollux.node.inherited import check_names
    from pollux.node.launched import pollux_home
    from pollux.node.rules import RunOptions

    if not 0 < heartbeat < hang_after:
        fix = "Give a positive --heartbeat, and several times as much to --hang-after"
        raise InvalidInput("--heartbeat", heartbeat, f"not between 0 and --hang-after = {hang_after:g} s", fix)
    here = name or socket.gethostname()
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", here):
        raise InvalidInput("--node", here, "cannot be the name of a node", "Use letters, digits, '-', '_' and '.'")
    if gpu_type is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", gpu_type):
        fix = "Use letters, digits, '-', '_' and '.'"
        raise InvalidInput("--gpu-type", gpu_type, "cannot be the name of a type of GPUs", fix)
    if inherit_env and job_user:
        fix = "Leave it out, and name what jobs are to find by --job-env"
        raise InvalidInput("--inherit-env", True, f"would show the environment of root to {job_user}", fix)
    replica_env = variables(env or ())
    state = StateFolder(folder or pollux_home() / "node", token_file)
    output.note(f"Node {here} keeps its state in {state.path}, its token in {state.token_file}.")
    run = RunOptions(ready_timeout_s=ready_timeout, node_timeout_s=node_timeout, stuck_timeout_s=stuck_timeout)
    options = DaemonOptions(
        heartbeat_s=heartbeat,
        hang_after_s=hang_after,
        is_ephemeral=ephemeral,
        keep_logs_s=keep_logs * 86400.0,
        gpu_type=gpu_type or "",
        replica_env=replica_env,
        job_env=check_names("--job-env", job_env or ()),
        inherits_env=inherit_env,
        job_user=job_user or "",
        run=run,
    )
    raise typer.Exit(serve(state.path, NodeId(here), host, port, slots, options, token_file))


def variables(assignments: Sequence[str]) -> FrozenMap[str, str]:
    """What `--env` says, each NAME=VALUE; the last one of a name counts."""
    found = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InvalidInput("--env", text, "is not NAME=VALUE", "Give for instance --env OMP_NUM_THREADS=2")
        found[name] = value
    return FrozenMap(found)
