"""`pollux up`: starts the service, which starts the cluster, and waits until both are ready."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import emulated, output, words
from pollux.cli.cluster_options import check_jobs, merged, options_of, summary, with_emulation, with_jobs
from pollux.cli.compressed import haste_of, slots_of
from pollux.cli.emulated import DEFAULT_TYPE
from pollux.cli.finding import DirOption
from pollux.cli.standing import hangs, left_in, option, settled
from pollux.errors import InvalidInput, MissingDependency, Permanent, Temporary

if TYPE_CHECKING:
    from pollux.service.place import ClusterConfig, ClusterFolder
    from pollux.wire.api import ClusterView

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "pollux.cli.main", "up", "--foreground")
START_TIMEOUT_S = 240.0
"""Daemons load torch first, which takes long on a busy machine."""
LOOK_S = 0.1
LAST_LINES = 15
FIRST_WORD_S = 5.0
"""After so long, people without a terminal are told what is awaited, too."""
MOST_SOCKET_BYTES = 107
CROWD, EMULATED_CROWD = 2, 16
"""So many slots on a core are no fault yet; emulated ones mostly wait."""
EMULATED_PANEL = "Emulated GPUs"
LOOPBACK = ("127.", "::1", "localhost")


def up(
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Daemons on this machine that act as nodes.", show_default="as before, or 1"),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Room of each node; 0: its share of the GPUs, or of the cores, and 4 with --emulate.",
            show_default="as before, or 0",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Who decides; `pollux policies` lists them.", show_default="as before, or pollux"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="policy.KEY=VALUE", help="An option of the policy.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds from round to round; emulated seconds with --emulate.",
            show_default="as before, or 60",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the REST API.", show_default="as before, or 127.0.0.1")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Its port; 0: any that is free.", show_default="as before, or 7333"),
    ] = None,
    emulate: Annotated[
        bool | None,
        typer.Option(
            "--emulate/--no-emulate",
            help="Slots act as GPUs that are not there, and the jobs of pollux run --emulate keep their pace.",
            show_default="as before, or --no-emulate",
            rich_help_panel=EMULATED_PANEL,
        ),
    ] = None,
    compress: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="How much faster than real all goes.",
            show_default="as before, or 20",
            rich_help_panel=EMULATED_PANEL,
        ),
    ] = None,
    gpu_type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="What they act as: a type that the built-in applications know.",
            show_default=f"as before, or {DEFAULT_TYPE}",
            rich_help_panel=EMULATED_PANEL,
        ),
    ] = None,
    realloc_delay: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="How long a re-allocation stops a job, in emulated seconds.",
            show_default="as before, or 30",
            rich_help_panel=EMULATED_PANEL,
        ),
    ] = None,
    job_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A variable of this shell that jobs find in their environment, too; may be repeated, '' for none.",
            show_default="as before, or none",
        ),
    ] = None,
    job_user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run jobs as this user, who can read no file of the cluster; for root only, '' for none.",
            show_default="as before, or as you",
        ),
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Do not go to the background, as service managers like it.")
    ] = False,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Start a cluster on this machine: the service, and a daemon for each node.

    It goes on in the background; pollux down ends it. Jobs that were not done when the last one ended go on. Options
    are remembered: without them it does as before.
    """
    from pollux.service.place import ClusterConfig, ClusterFolder

    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingDependency(package, "The live service", "service")
    folder = ClusterFolder(path)
    _make(folder)
    if folder.is_locked:
        settled(folder)
        raise Permanent(hangs(folder) or folder.in_use())
    before = folder.config() or ClusterConfig()
    config = merged(before, nodes, slots, policy, settings, interval, host, port)
    config = with_emulation(config, emulate, compress, gpu_type, realloc_delay)
    config = with_jobs(config, job_env, job_user)
    options = options_of(folder, config)
    _check_left(folder, before, config)
    _check_devices(config)
    check_jobs(folder, config)
    check_port(config.host, config.port)
    if not config.host.startswith(LOOPBACK):
        output.note(
            f"The REST API listens on {config.host}: the token, which allows everything, then travels unencrypted. "
            "Do this in a network that you trust, or use an SSH tunnel."
        )
    if find_spec("torch") is None:
        output.note("torch is not installed: only plain commands (gpus: n) can run. See pollux doctor.")
    if (old := folder.service_file()) is not None:
        output.note(f"The last service here (pid {old.pid}) was killed. Its jobs are found again.")
    if config != folder.config():  # one that is told nothing new also starts on a full disk
        try:
            folder.write_config(config)
        except OSError as error:
            raise folder.unwritable(error) from None
    if foreground:
        from pollux.service.serving import main

        folder.remove_service_file()  # not earlier: a folder without it and without a lock is one that was ended
        raise typer.Exit(main(options))
    view, pid, url = _start(folder)
    for warning in view.warnings:
        output.note(warning)
    if as_json:
        answer = {"url": url, "pid": pid, "dir": folder.path, "token_file": folder.token_file}
        answer |= {"gpus": view.gpus, "nodes": {node.id: node.gpus for node in view.nodes}}
        output.print_json({**answer, "gpu_types": sorted({node.gpu_type for node in view.nodes})})
    else:
        _tell(folder, view, url)


def _make(folder: ClusterFolder) -> None:
    longest = MOST_SOCKET_BYTES - len("/nodes/n999/keeper.sock")
    if len(os.fsencode(folder.path)) > longest:
        problem = f"is longer than {longest} bytes, and the sockets in it must have short paths"
        raise InvalidInput("--dir", str(folder.path), problem, "Give a shorter --dir, or POLLUX_HOME")
    folder.make()


def _check_left(folder: ClusterFolder, before: ClusterConfig, config: ClusterConfig) -> None:
    """Replicas that train on keep the pace that they were started with: no cluster goes at two."""

    def pace(told: ClusterConfig) -> tuple[object, ...]:
        if told.acts_as is None:
            return ()
        # How many slots share the machine decides how many emulated steps one real step stands for.
        return told.acts_as, told.compress, told.realloc_delay_s, told.nodes * slots_of(told)

    if before.job_user != config.job_user and left_in(folder):
        where, users = option(folder), [told.job_user or "the user who started it" for told in (before, config)]
        raise Permanent(
            f"Daemons and jobs go on in {folder.path}, where jobs run as {users[0]}, and {users[1]} is asked for. Save "
            f"and end them first with pollux down{where}; or run pollux up{where} without another --job-user."
        )
    if pace(before) != pace(config) and left_in(folder):
        where = option(folder)
        is_now = f"{summary(before)}, and what is asked for is {summary(config)}"
        raise Permanent(
            f"Daemons and jobs go on in {folder.path}. The cluster there is {is_now}. Save and end them first with "
            f"pollux down{where}; or run pollux up{where} without other options for emulation, which finds them."
        )


def _check_devices(config: ClusterConfig) -> None:
    from pollux.providers.local.devices import describe_devices, slots_of_each

    cores = slots_of_each(1, None, ())  # what a single node would offer
    if config.acts_as is not None:
        slots = config.nodes * slots_of(config)
        if slots > EMULATED_CROWD * cores:
            output.note(f"{slots} emulated GPUs share {words.count(cores, 'core')}: jobs may not keep their pace.")
        if haste := haste_of(config.compress, config.realloc_delay_s):
            output.note(haste)
        return
    report = describe_devices()
    if report.problem:
        output.note(report.problem)
    slots = config.nodes * slots_of_each(config.nodes, config.slots, report.devices)
    if not report.devices and slots > CROWD * cores:
        output.note(f"{slots} CPU slots share {words.count(cores, 'core')}: jobs will slow each other down.")


def check_port(host: str, port: int) -> None:
    """That the service will be able to listen there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Permanent(
                f"Port {port} of {host} is taken by another program. Choose another with pollux up --port N; "
                "0 means any that is free."
            ) from None
        if error.errno == errno.EACCES:
            raise Permanent(
                f"You may not listen on port {port}. Choose one above 1023 with pollux up --port N."
            ) from None
        reason = error.strerror or str(error)
        raise InvalidInput(
            "--host", host, f"cannot be listened on ({reason})", "Give an address of this machine"
        ) from None


def _start(folder: ClusterFolder) -> tuple[ClusterView, int, str]:
    """The cluster, as soon as it is ready, and the pid and the address of its service."""
    with folder.out.open("wb") as out:
        os.chmod(folder.out, 0o600)
        process = subprocess.Popen(
            [*COMMAND, "--dir", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    until_s = time.monotonic() + START_TIMEOUT_S
    try:
        with _progress(f"Starting the service (pid {process.pid}) …") as tell:
            while True:
                if (code := process.poll()) is not None:
                    raise Permanent(_died(folder, code))
                if (found := _ready(folder, process.pid, tell)) is not None:
                    return found
                if time.monotonic() > until_s:
                    raise Permanent(
                        f"The cluster is not ready after {START_TIMEOUT_S:.0f} s, and goes on starting. See "
                        f"{folder.log} and {folder.nodes}/*/node.log; pollux down ends it."
                    )
                time.sleep(LOOK_S)
    except KeyboardInterrupt:
        output.note("The cluster goes on starting in the background; pollux down ends it.")
        raise
    finally:
        process.returncode = process.poll() or 0  # it lives on, and nobody here waits for its end


def _ready(folder: ClusterFolder, pid: int, tell: Callable[[str], None]) -> tuple[ClusterView, int, str] | None:
    from pollux.wire.service_client import ServiceClient

    file = folder.running()
    if file is None or file.pid != pid:
        tell(f"Waiting for the service (pid {pid}) to listen …")
        return None
    try:
        with ServiceClient(file.url, folder.token(), 5.0) as client:
            view = client.cluster()
    except Temporary:
        tell(f"Waiting for the service (pid {pid}) to answer …")
        return None
    waiting = [node.id for node in view.nodes if node.state == "away"]
    if view.is_recovering or waiting or not view.nodes:
        nodes = f"{'node' if len(waiting) == 1 else 'nodes'} {', '.join(waiting)}"
        tell(f"Waiting for {nodes} …" if waiting else "Looking for what runs already …")
        return None
    return view, pid, file.url


@contextmanager
def _progress(text: str) -> Iterator[Callable[[str], None]]:
    """Say what is awaited: on a line that moves, where there is a terminal; else after a while, and once each."""
    if output.err_console.is_terminal:
        with output.err_console.status(text) as status:
            yield status.update
        return
    output.note(text)
    since_s, told = time.monotonic(), {text}

    def tell(awaited: str) -> None:
        if time.monotonic() - since_s > FIRST_WORD_S and awaited not in told:
            told.add(awaited)
            output.note(awaited)

    yield tell


def _died(folder: ClusterFolder, code: int) -> str:
    from pollux.node.folder import is_full

    lines = folder.out.read_text("utf-8", "replace").splitlines()[-LAST_LINES:]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    said = "\n".join(("It said nothing.",) if not lines else ("Its last lines:", *lines))
    if is_full(folder.path):
        said = f"The disk of {folder.path} is full: make room. {said}"
    return f"The service {how} as it was started. See also {folder.log}. {said}"


def _tell(folder: ClusterFolder, view: ClusterView, url: str) -> None:
    where = option(folder)
    compress = emulated.compression(view.nodes)
    is_emulated = bool(emulated.emulated_nodes(view.nodes))
    what = "CPU slot" if {node.gpu_type for node in view.nodes} == {"cpu"} else emulated.kind(view.nodes)
    going_on = sum(view.num_jobs.get(phase, 0) for phase in ("pending", "starting", "running", "resizing"))
    typer.echo(
        f"Ready: {words.count(view.gpus, what)} on {words.count(len(view.nodes), 'node')} "
        f"({', '.join(f'{node.id}: {node.gpus}' for node in view.nodes)}), policy {view.policy}, "
        f"a round every {view.interval_s * compress:g} s{f' ({view.interval_s:g} s here)' if is_emulated else ''}."
    )
    if is_emulated:
        typer.echo(f"They are {emulated.pace(compress)}.")
    if going_on:
        typer.echo(f"{words.count(going_on, 'job')} from before {'goes' if going_on == 1 else 'go'} on.")
    typer.echo(f"REST API: {url} (token in {folder.token_file})")
    typer.echo("Next:")
    commands = {
        f"pollux run{where} {'--emulate cifar10:0.1' if is_emulated else '-- python train.py'}": (
            "submit a job and follow it"
        ),
        f"pollux top{where}": "watch the cluster",
        f"pollux down{where}": "save all jobs and end everything",
    }
    longest = max(map(len, commands))
    for command, why in commands.items():
        typer.echo(f"  {command:<{longest}}  {why}")
