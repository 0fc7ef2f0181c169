"""`pollux submit` and `pollux run`: jobs from files or options, and following one until its end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from pollux.cli import output, words
from pollux.cli.emulated import EmulateOption, check_own, check_running, emulated_request, for_cluster
from pollux.cli.finding import DirOption, Link, find
from pollux.cli.job_options import document_of, request_of, with_job_options
from pollux.cli.jobs import exit_code, tell_end
from pollux.errors import InvalidInput, InvalidJob
from pollux.wire.answers import to_plain

if TYPE_CHECKING:
    from pollux.cli.following import Follower
    from pollux.wire.api import JobView
    from pollux.wire.jobspec import JobRequest
    from pollux.wire.service_client import ServiceClient

DETACHED = 130
_AFTER_DASHES = "pollux.command"


class SubmitCommand(TyperCommand):
    """Keeps what follows `--` apart: it is a command, all before it are files and options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            position = args.index("--")
            ctx.meta[_AFTER_DASHES] = args[position + 1 :]
            args = args[:position]
        return super().parse_args(ctx, args)


@with_job_options
def submit(
    ctx: typer.Context,
    fields: dict[str, Any],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]... | -- COMMAND...",
            allow_dash=True,
            help="YAML or JSON; - is standard input. Options win over what files say.",
        ),
    ] = None,
    emulate: EmulateOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only ask whether they would be taken.")] = False,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Submit jobs, from files or by a command of your own: pollux submit -- python train.py.

    Prints their ids. If one of several would be refused, none is submitted.
    """
    command: list[str] = ctx.meta.get(_AFTER_DASHES, [])
    if files and command:
        raise InvalidInput("FILE", str(files[0]), "a command is given, too", "Give files, or a command after --")
    if emulate is not None:
        requests = [emulated_request(emulate, fields, [*map(str, files or []), *command])]
    else:
        requests = [adapted(request) for request in _requests(files or [], fields, command)]
    with _found(path, emulate) as client:
        requests = _fitted(client, requests, path, emulate)
        views = _submitted(client, requests, dry_run)
    if as_json:
        output.print_json(to_plain(views))
    elif dry_run:
        output.note("1 job would be taken." if len(views) == 1 else f"{len(views)} jobs would be taken.")
    else:
        for view in views:
            typer.echo(view.id)


@with_job_options
def run(
    fields: dict[str, Any],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="After --, such as python train.py --epochs 3.")
    ] = None,
    emulate: EmulateOption = None,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Submit a job and follow it: what it prints, and in between what becomes of it.

    Ctrl-C asks whether to cancel the job or to detach from it; a second one detaches. Ends as the job does: 0 if it
    succeeded, 1 or its own exit code if it failed, 3 if it was cancelled, 130 after detaching. --json prints the job at
    its end, and not what it prints.
    """
    from pollux.cli.following import Follower

    if emulate is not None:
        request = emulated_request(emulate, fields, command or [])
    elif command:
        request = adapted(request_of(document_of(fields, command), os.environ))
    else:
        fix = "Give one: pollux run -- python train.py; on an emulated cluster, pollux run --emulate APP"
        raise InvalidInput("COMMAND", None, "there is nothing to run", fix)
    with _found(path, emulate) as client:
        (request,) = _fitted(client, [request], path, emulate)
        job = client.submit(request.as_document())
    output.note(f"Job {words.title(job)} is submitted.")
    with Link(path) as link:
        follower = Follower(link, job, shows_output=not as_json)
        end = _followed(link, follower)
    if end is None:
        output.note(f"Detached; {job.id} goes on. See pollux logs -f {job.id}, or pollux cancel {job.id}.")
        raise typer.Exit(DETACHED)
    if as_json:
        output.print_json(to_plain(end))
    tell_end(end)
    raise typer.Exit(exit_code(end))


def adapted(request: JobRequest) -> JobRequest:
    """The job as it can run: a script that does not use pollux.torch cannot change its size."""
    from pollux.wire.jobspec import uses_pollux

    if request.is_plain or request.script is None or uses_pollux(Path(request.script)):
        return request
    plain = request.with_gpus()
    where = f"{words.count(plain.gpus or 1, 'GPU')} that nobody changes (--gpus N for more)"
    output.note(f"{Path(request.script).name} does not import pollux.torch: it runs as it is, on {where}.")
    return plain


def _requests(files: list[Path], fields: dict[str, Any], command: list[str]) -> list[JobRequest]:
    """All jobs that are meant; what is wrong with any file is told at once."""
    from pollux.cli.job_file import STDIN, load_jobs

    if command:
        return [request_of(document_of(fields, command), os.environ)]
    if not files:
        fix = "Name a file, or give a command: pollux submit -- python train.py"
        raise InvalidInput("FILE", None, "there is nothing to submit", fix)
    if files[0] != STDIN and not files[0].exists() and not files[0].suffix:
        fix = f"Name a YAML or JSON file, or put -- before a command: pollux submit -- {' '.join(map(str, files))}"
        raise InvalidInput("FILE", str(files[0]), "no such file", fix)
    found: list[JobRequest] = []
    wrong: list[InvalidJob] = []
    for file in files:
        try:
            found += load_jobs(file, os.environ, fields)
        except InvalidJob as invalid:
            wrong.append(invalid)
    for other in wrong[:-1]:
        output.error(str(other))
    if wrong:
        raise wrong[-1]
    return found


def _found(path: Path | None, emulate: str | None) -> ServiceClient:
    if emulate is not None:
        check_running(path)
    return find(path)


def _fitted(
    client: ServiceClient, requests: list[JobRequest], path: Path | None, emulate: str | None
) -> list[JobRequest]:
    """What only the cluster tells of jobs: whether its GPUs are emulated."""
    nodes = client.cluster().nodes
    if emulate is not None:
        return [for_cluster(request, nodes, path) for request in requests]
    check_own(requests, nodes, path)
    return requests


def _submitted(client: ServiceClient, requests: list[JobRequest], dry_run: bool) -> list[JobView]:
    documents = [request.as_document() for request in requests]
    if dry_run or len(documents) > 1:
        views = [client.submit(document, dry_run=True) for document in documents]
        if dry_run:
            return views
    return [client.submit(document) for document in documents]


def _followed(link: Link, follower: Follower) -> JobView | None:
    """How the job ended; None: somebody has detached."""
    is_cancelled = False
    while True:
        try:
            return follower.follow()
        except KeyboardInterrupt:
            if is_cancelled or not _wants_to_cancel():
                return None
            is_cancelled = True
            link.ask(lambda client: client.cancel(follower.job))


def _has_terminal() -> bool:
    return sys.stdin.isatty() and output.err_console.is_terminal


def _wants_to_cancel() -> bool:
    """Without a terminal, and if Ctrl-C comes again: no."""
    try:
        if not _has_terminal():
            return False
        while True:
            output.err_console.print("\nCancel the job, or detach and let it run? [c/d] ", end="")
            answer = sys.stdin.readline().strip().lower()
            if answer in ("c", "cancel", "d", "detach", ""):
                return answer.startswith("c")
    except KeyboardInterrupt:
        output.err_console.print()
        return False
