"""`pollux logs` and `pollux events`: what jobs print, and what happens to them."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import output, words
from pollux.cli.finding import DirOption, JobArgument, Link, complete_jobs
from pollux.cli.job_output import JobOutput
from pollux.cli.news import News, unfiltered
from pollux.errors import InvalidInput, UnknownName
from pollux.wire.answers import to_plain
from pollux.wire.api import EventPage, EventView, LogFile

if TYPE_CHECKING:
    from pollux.wire.service_client import ServiceClient

LOOK_S = 0.4
LONG_POLL_S = 20.0
MAX_LAST = 1000
"""What the service gives at once."""
MOST_LOOKED_AT = 20_000
"""Events that are read to find enough news among them."""

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is to come.")]


def logs(
    job: JobArgument,
    follow: FollowOption = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Of all replicas; a line of any but the main one begins with its name.")
    ] = False,
    replica: Annotated[
        str | None, typer.Option(metavar="R", help="Of this one alone, such as 1-2.", show_default="the main one")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Only the last lines.", show_default="all")
    ] = None,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Show what a job prints: its main replica, or all of them.

    Goes over to another replica when the main one leaves, across resizes and restarts. With -f it ends with the job.
    --json prints one object a line (JSON Lines).
    """
    if everything and replica is not None:
        raise InvalidInput("--replica", replica, "--all is given, too", "Leave one of them out")
    with Link(path) as link:
        view = link.view(job)
        stream = JobOutput(link, view.id, as_lines if as_json else as_text, everything=everything, replica=replica)
        if tail is not None:
            stream.skip_to_tail(tail)
        stream.show()
        if replica is not None and replica not in stream.replicas:
            raise UnknownName("--replica", replica, stream.replicas)
        while follow and not view.phase.is_terminal:
            time.sleep(LOOK_S)
            view = link.view(view.id)  # before its output: nothing is printed after its end
            stream.show()
        stream.finish()


def as_text(file: LogFile, is_main: bool, text: str) -> None:
    if not is_main:
        lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n"))
        text = "".join(f"[{file.replica}] {line}\n" for line in lines)
    typer.echo(text, nl=False)


def as_lines(file: LogFile, is_main: bool, text: str) -> None:
    """JSON, an object for each piece of text."""
    document = {"replica": file.replica, "node": file.node, "is_main": is_main, "text": text}
    typer.echo(json.dumps(document, ensure_ascii=False))


def events(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Only of this job.", show_default="all", autocompletion=complete_jobs),
    ] = None,
    follow: FollowOption = False,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, max=MAX_LAST, help="The last so many; 0: all that are kept.")
    ] = 50,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also what moves nothing: rounds, reports, small steps of learning rates.")
    ] = False,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Show what happened: submissions, plans, re-allocations, changes of batch sizes, failures.

    Left out is what changes nothing that one sees: rounds that move no job, reports, and learning rates that changed by
    less than a tenth since they were told last. --all shows it, too. --json prints one object a line (JSON Lines), with
    all its details.
    """
    wants = unfiltered if show_all else News()
    with Link(path) as link:
        job_id = None if job is None else link.view(job).id

        def show(after: int, wait_s: float = 0.0) -> tuple[int, bool]:
            page = link.ask(lambda client: client.events(after, job=job_id, wait_s=wait_s))
            for event in filter(wants, page.events):
                _print(event, as_json)
            return page.next, bool(page.events)

        if limit:
            found, after = _latest(link, job_id, limit, show_all)
            for event in list(filter(wants, found))[-limit:]:
                _print(event, as_json)
        else:
            after, has_more = show(0)
            while has_more:
                after, has_more = show(after)
        while follow:
            after, _ = show(after, LONG_POLL_S)


def _latest(link: Link, job: str | None, limit: int, show_all: bool) -> tuple[list[EventView], int]:
    """Events up to now, so far back that enough of them are news, and the number to go on from."""
    last = link.ask(lambda client: client.events(last=limit if show_all else MAX_LAST, job=job))
    found = list(last.events)
    has_more = not show_all and len(found) == MAX_LAST
    while has_more and len(found) < MOST_LOOKED_AT and sum(map(News(), found)) < limit:
        first = found[0].sequence
        after = max(0, first - 1 - MAX_LAST)
        page = link.ask(partial(_events, after, job))
        older = [event for event in page.events if event.sequence < first]
        found = older + found
        has_more = bool(older) and after > 0
    return found, last.next


def _events(after: int, job: str | None, client: ServiceClient) -> EventPage:
    return client.events(after, limit=MAX_LAST, job=job)


def _print(event: EventView, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(to_plain(event), ensure_ascii=False))
    else:
        typer.echo(f"{words.clock(event.at_s)}  {event.kind:<20} {event.text}")
