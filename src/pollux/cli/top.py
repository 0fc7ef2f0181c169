"""`pollux top`: the cluster and its jobs as a table that keeps itself up to date."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pollux.cli import emulated, output, words
from pollux.cli.columns import Column, fitted, width
from pollux.cli.finding import DirOption, Link
from pollux.core import JobId, Phase
from pollux.errors import Refusal
from pollux.wire.answers import to_plain
from pollux.wire.api import ClusterView, JobView

if TYPE_CHECKING:
    from pollux.wire.service_client import ServiceClient

SHOWN_AFTER_END_S = 300.0
BAR_WIDTH = 12
BETWEEN = 2
"""Of the padding of each column."""
BETWEEN_BOXED, BOX = 3, 1
"""The same with lines between them, and the last line."""


def top(
    interval: Annotated[float, typer.Option(metavar="S", min=0.2, help="Seconds from one look to the next.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and end.")] = False,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Watch the cluster: GPUs, batch size, efficiency, goodput, progress and ETA of every job.

    q or Ctrl-C ends it. Without a terminal it prints the table once, and so does --json.
    """
    with Link(path) as link:
        jobs = RecentJobs()
        view = link.ask(jobs.look)
        if not as_json and not once and output.console.is_terminal and sys.stdin.isatty():
            view = _watch(lambda: link.ask(jobs.look), view, interval)
    if as_json:
        output.print_json({"cluster": to_plain(view.cluster), "jobs": to_plain(view.jobs)})
    else:
        show_once(view)


class Look(NamedTuple):
    """The cluster at one moment."""

    cluster: ClusterView
    jobs: tuple[JobView, ...]
    """Those that have not ended, and those that did a while ago."""


class RecentJobs:
    """Asks for living jobs only, whose number is small, and remembers those that end meanwhile."""

    def __init__(self) -> None:
        self._living: set[JobId] | None = None
        self._ended: dict[JobId, JobView] = {}

    def look(self, client: ServiceClient) -> Look:
        cluster = client.cluster()
        jobs = client.jobs(all=self._living is None).jobs
        living = [job for job in jobs if not job.phase.is_terminal]
        found = [job for job in jobs if job.phase.is_terminal]
        for job_id in (self._living or set()) - {job.id for job in living}:
            with suppress(Refusal):
                found.append(client.job(job_id).job)
        self._ended.update({job.id: job for job in found})
        self._living = {job.id for job in living}
        since_s = cluster.time_s - SHOWN_AFTER_END_S
        self._ended = {key: job for key, job in self._ended.items() if (job.finished_at_s or 0.0) > since_s}
        ended = [job for key, job in self._ended.items() if key not in self._living]
        return Look(cluster, (*living, *sorted(ended, key=lambda job: job.finished_at_s or 0.0)))


def show_once(view: Look) -> None:
    """On standard output; where that is no terminal, as wide as need be."""
    output.console.print(header(view), soft_wrap=True)
    if view.jobs:
        columns, rows = fitted(_columns(view), view.jobs, width() - BOX, BETWEEN_BOXED)
        output.table([column.title for column in columns], rows)


def screen(view: Look, width: int) -> RenderableType:
    columns, rows = fitted(_columns(view), view.jobs, width, BETWEEN)
    table = Table(box=None, expand=True, header_style="bold", padding=(0, 1))
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True, overflow="ellipsis")
    for job, row in zip(view.jobs, rows, strict=True):
        table.add_row(*row, style="dim" if job.phase.is_terminal else "")
    what = "--emulate APP" if emulated.emulated_nodes(view.cluster.nodes) else "-- python train.py"
    nothing = Text(f"No jobs. Submit one: pollux submit {what}", style="dim")
    return Group(header(view), Text(), table if view.jobs else nothing, Text(), Text("q ends", style="dim"))


def header(view: Look) -> Text:
    cluster = view.cluster
    counts = [f"{number} {phase}" for phase in Phase if (number := cluster.num_jobs.get(phase, 0))]
    away = [node.id for node in cluster.nodes if node.state == "away"]
    parts = [
        f"{cluster.gpus - cluster.free_gpus} of {words.count(cluster.gpus, emulated.kind(cluster.nodes))} used on "
        f"{words.count(len(cluster.nodes), 'node')}",
        f"{cluster.policy}, round {cluster.round}, every {cluster.interval_s:g} s",
        ", ".join(counts) or "no jobs",
        f"up {words.duration(cluster.time_s - cluster.started_at_s)}",
    ]
    if emulated.emulated_nodes(cluster.nodes):
        parts.insert(1, emulated.speed(emulated.compression(cluster.nodes)))
    line = Text(" · ".join(parts))
    if cluster.is_recovering:
        line += Text(" · recovering", style="yellow")
    if away:
        line += Text(f" · out of reach: {', '.join(away)}", style="red")
    if seconds := emulated.seconds(cluster.nodes):
        line += Text(f"\n{seconds}", style="dim")
    return line


def _bar(job: JobView) -> Text:
    if job.progress is None:
        return Text()
    done = round(BAR_WIDTH * job.progress)
    return Text("━" * done, style="green") + Text("─" * (BAR_WIDTH - done), style="dim")


BAR = Column("", _bar, 11, "left")
NAME = Column("name", lambda job: Text(words.name(job)), 8, "left")
COLUMNS = (
    Column("job", lambda job: Text(job.id), justify="left"),
    NAME,
    Column("phase", words.phase, justify="left"),
    Column("GPUs", lambda job: Text(words.gpus(job))),
    Column("on", lambda job: Text(words.placed(job.allocation) or "–"), 13, "left"),
    Column("batch", lambda job: Text("–" if job.batch_size is None else str(job.batch_size)), 2),
    Column("LR×", lambda job: Text(words.figure(job.learning_rate_factor)), 10),
    Column("efficiency", lambda job: Text(words.share(job.efficiency)), 6),
    Column("goodput/s", lambda job: Text(words.figure(job.goodput)), 4),
    Column("progress", lambda job: Text(words.share(job.progress)), 1),
    BAR,
    Column("ETA", lambda job: Text("–" if job.phase.is_terminal else words.duration(job.eta_s)), 3),
    Column("loss", lambda job: Text(words.figure(job.loss, 4)), 9),
    Column("moved", lambda job: Text(str(job.reallocations)), 12),
)


def _columns(view: Look) -> list[Column]:
    """Names only if ids do not tell them; bars only for eyes."""
    unwanted = {NAME} if not any(map(words.name, view.jobs)) else set()
    if not output.console.is_terminal:
        unwanted.add(BAR)
    return [column for column in COLUMNS if column not in unwanted]


def _watch(look: Callable[[], Look], view: Look, interval_s: float) -> Look:
    """Until q or Ctrl-C; the last look."""
    from rich.live import Live

    with (
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=output.console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(screen(view, output.console.width), refresh=True)
            if pressed(interval_s) in ("q", "Q", "\x03"):
                break
            view = look()
    return view


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys without the need of Enter, and not echoed: a function that waits so many seconds for one."""
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(timeout_s: float) -> str:
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left_s)[0]:
                return os.read(keyboard, 1).decode("ascii", "replace")
        return ""

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
