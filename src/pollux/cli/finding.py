"""How commands find the service: the folder of the cluster, or POLLUX_URL and POLLUX_TOKEN_FILE.

`find` is for commands that ask once, `Link` for those that follow: the service may go away and come back meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import typer

from pollux import __version__
from pollux.cli import output, standing
from pollux.cli.standing import hangs, left_in, no_service, settled
from pollux.errors import InvalidInput, Permanent, Temporary

if TYPE_CHECKING:
    from pollux.wire.api import JobView
    from pollux.wire.service_client import ServiceClient

T = TypeVar("T")

SHELL_TIMEOUT_S = 1.0
"""Somebody has pressed Tab and waits."""
SILENT_S = 3.0
"""For so long nobody is told that the service is away."""
RESTART_S = 20.0
"""A service that ended without a trace may be back after so long; else it was ended on purpose."""
LOOK_S = 0.5

DirOption = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Folder of the cluster.", show_default="~/.pollux/cluster"),
]


def find(path: Path | None = None, timeout_s: float = 30.0) -> ServiceClient:
    """The service that runs; to be closed. `Permanent` says that there is none, or why it cannot be asked.

    A folder that is given goes before POLLUX_URL, and that before the usual folder.
    """
    from pollux.service.place import ClusterFolder
    from pollux.wire.service_client import ServiceClient

    url = os.environ.get("POLLUX_URL", "")
    if url and path is None:
        file = os.environ.get("POLLUX_TOKEN_FILE", "")
        if not file:
            fix = "Set POLLUX_TOKEN_FILE to a copy of the cluster's token, or unset POLLUX_URL"
            raise InvalidInput("POLLUX_URL", url, "is set without POLLUX_TOKEN_FILE", fix)
        return ServiceClient(url, _copied_token(Path(file).expanduser()), timeout_s)
    folder = ClusterFolder(path)
    running = settled(folder, min(standing.SETTLE_S, timeout_s))
    if running is None:
        raise Permanent(no_service(folder))
    if stops := hangs(folder):
        raise Permanent(stops)
    if running.version != __version__:
        output.note(
            f"The service is Pollux {running.version}, this command {__version__}: restart it with "
            "pollux down --leave-jobs and pollux up."
        )
    return ServiceClient(running.url, folder.token(), timeout_s)


def _copied_token(file: Path) -> str:
    from pollux.service.place import read_token

    try:
        return read_token(file)
    except Permanent as failure:
        fix = "Copy the file token of the cluster's folder, ~/.pollux/cluster on its machine, and name the copy"
        raise Permanent(f"{failure} {fix} by POLLUX_TOKEN_FILE.") from None


class Link:
    """A service that may be restarted while it is followed."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._client = find(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def ask(self, question: Callable[[ServiceClient], T]) -> T:
        """Its answer, however long that takes. `Permanent`: the cluster was ended on purpose."""
        lost_s: float | None = None
        is_told = False
        while True:
            try:
                answer = question(self._client)
            except Temporary:
                lost_s = lost_s or time.monotonic()
                if not is_told and time.monotonic() - lost_s > SILENT_S:
                    is_told = True
                    output.note("The service does not answer; jobs train on without it. Waiting for it …")
                time.sleep(LOOK_S)
                self._find_again(may_be_ended=time.monotonic() - lost_s > RESTART_S)
                continue
            if is_told:
                output.note("The service is back.")
            return answer

    def view(self, job: str) -> JobView:
        """How a job stands, by its id or its name."""
        return self.ask(lambda client: client.job(job)).job

    def _find_again(self, *, may_be_ended: bool) -> None:
        from pollux.service.place import ClusterFolder

        if os.environ.get("POLLUX_URL") and self._path is None:
            return
        folder = ClusterFolder(self._path)
        if folder.running() is not None:
            self._client.close()
            self._client = find(self._path)
        elif may_be_ended and folder.service_file() is None and not folder.is_locked:
            if left_in(folder):
                raise Permanent(no_service(folder))
            raise Permanent(
                f"The cluster in {folder.path} was ended. Jobs that are not done go on with the next pollux up."
            )


# What Tab offers. Silent, whatever goes wrong: a shell shows nothing but names.


def complete_jobs(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """Jobs that have not ended, by id; by name where what was typed begins a name."""
    return _completions(
        ctx,
        lambda client: [
            pair
            for job in client.jobs().jobs
            for pair in ((str(job.id), f"{job.name} {job.phase}"), (job.name, str(job.phase)))
            if pair[0] and pair[0].startswith(incomplete) and (incomplete or pair[0] == job.id)
        ],
    )


def complete_nodes(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    return _completions(
        ctx, lambda client: [(node.id, node.state) for node in client.cluster().nodes if node.id.startswith(incomplete)]
    )


def _completions(ctx: Any, ask: Callable[[ServiceClient], list[tuple[str, str]]]) -> list[tuple[str, str]]:
    try:
        with find(ctx.params.get("path"), SHELL_TIMEOUT_S) as client:
            return ask(client)
    except Exception:
        return []


JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Its id, or its name if that is clear.", autocompletion=complete_jobs)
]
JobsArgument = Annotated[
    list[str],
    typer.Argument(metavar="JOB...", help="Ids, or names where they are clear.", autocompletion=complete_jobs),
]
NodesArgument = Annotated[
    list[str], typer.Argument(metavar="NODE...", help="See pollux nodes.", autocompletion=complete_nodes)
]
