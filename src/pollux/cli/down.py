"""`pollux down`: ends the cluster of this machine, also one whose service was killed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import output, words
from pollux.cli.finding import DirOption, find, goes_on, has_daemons, option
from pollux.core import NodeId
from pollux.errors import Permanent, PolluxError, Temporary

if TYPE_CHECKING:
    from pollux.service.place import ClusterFolder
    from pollux.wire.service_client import ServiceClient

LOOK_S = 0.1
EXIT_TIMEOUT_S = 5.0
"""From letting go of the folder to the end of the process."""
FIRST_WORD_S, NEXT_WORD_S = 5.0, 15.0
"""When those that wait are told for whom, and how often."""
ANSWER_TIMEOUT_S = 5.0
KILLED_AFTER_S = 60.0
"""`stop_timeout_s` of the daemons."""
MOST_NAMES = 8


def down(
    leave_jobs: Annotated[
        bool, typer.Option("--leave-jobs", help="Only end the service; jobs train on, and the next one finds them.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="S", min=1.0, help="Seconds to wait for its end.")] = 300.0,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """End the cluster: all jobs save and stop, daemons end, and nothing is left running.

    Jobs that were not done go on with the next pollux up. --leave-jobs is for upgrades: jobs do not notice.
    """
    from pollux.service.place import ClusterFolder

    if os.environ.get("POLLUX_URL") and path is None:
        with find() as client:
            _end_elsewhere(client, leave_jobs, timeout)
        _answer(as_json, "ended", "The service has ended.")
        return
    folder = ClusterFolder(path)
    was_running = folder.is_locked
    was_killed = not was_running and folder.service_file() is not None
    if was_running:
        _end_service(folder, leave_jobs, timeout)
    left = [] if leave_jobs else _living(folder)
    if left:
        if not was_running:
            how = "was killed" if was_killed else "has ended before"
            output.note(f"The service {how}; what it left on {words.count(len(left), 'node')} is ended.")
        _end_daemons(folder, left)
    if not was_running:
        folder.remove_service_file()
    if leave_jobs and not was_running and has_daemons(folder):
        how = "was killed" if was_killed else "has ended already"
        _answer(as_json, "nothing", f"The service {how}; {goes_on(folder)}")
    elif not was_running and not left:
        _answer(as_json, "nothing", f"Nothing runs in {folder.path}.")
    elif leave_jobs:
        where = option(folder)
        sentence = f"The service has ended; jobs train on. pollux up{where} finds them, pollux down{where} ends them."
        _answer(as_json, "ended", sentence)
    else:
        _answer(as_json, "ended", "The cluster has ended. Jobs that are not done go on with the next pollux up.")


def _end_service(folder: ClusterFolder, leave_jobs: bool, timeout_s: float) -> None:
    from pollux.wire.service_client import ServiceClient

    until_s = time.monotonic() + timeout_s
    while (file := folder.running()) is None and folder.is_locked:  # it has just been started
        if time.monotonic() > until_s:
            lock = folder.lock_file
            raise Permanent(f"A process holds {lock}, but does not listen. Find it with fuser {lock}, and end it.")
        time.sleep(LOOK_S)
    if file is None:
        return
    is_asked = False
    while not is_asked and folder.is_locked:
        try:
            with ServiceClient(file.url, folder.token()) as client:
                holding = sum(job.phase.holds_gpus for job in client.jobs().jobs)
                client.shutdown("leave" if leave_jobs else "stop")
            is_asked = True
        except Temporary as failure:  # it takes no orders while it recovers
            if time.monotonic() > until_s:
                raise Permanent(
                    f"{failure.args[0]} Kill it with kill -9 {file.pid}, and run pollux down again: it ends the rest."
                ) from None
            time.sleep(LOOK_S)
    if is_asked and holding and not leave_jobs:
        output.note("1 job saves and stops …" if holding == 1 else f"{holding} jobs save and stop …")
    tell_s = time.monotonic() + FIRST_WORD_S
    while folder.is_locked:
        if time.monotonic() > tell_s:
            tell_s = time.monotonic() + NEXT_WORD_S
            _tell_awaited(ServiceClient(file.url, folder.token(), ANSWER_TIMEOUT_S))
        if time.monotonic() > until_s:
            raise Permanent(
                f"The service (pid {file.pid}) has not ended after {timeout_s:g} s. See {folder.log}, wait, or kill it "
                f"with kill -9 {file.pid} and run pollux down again."
            )
        time.sleep(LOOK_S)
    _wait_for_exit(file.pid)


def _tell_awaited(client: ServiceClient) -> None:
    with suppress(PolluxError), client:
        held = [str(job.id) for job in client.jobs().jobs if job.phase.holds_gpus]
        if held:
            who = f"{', '.join(held[:MOST_NAMES])}{' …' if len(held) > MOST_NAMES else ''}"
            output.note(f"Waiting for {who} to save and stop. What has not ended after {KILLED_AFTER_S:g} s is killed.")
            return
    output.note("Waiting for the service and its daemons to end …")


def _wait_for_exit(pid: int) -> None:
    """Linux; elsewhere the process may live on for a moment. One that nobody has waited for has no command line."""
    until_s = time.monotonic() + EXIT_TIMEOUT_S
    with suppress(OSError):
        while Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < until_s:
            time.sleep(LOOK_S)


def _end_elsewhere(client: ServiceClient, leave_jobs: bool, timeout_s: float) -> None:
    """A service that is known by its address alone has ended when it answers no more."""
    client.shutdown("leave" if leave_jobs else "stop")
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        try:
            client.health()
        except PolluxError:
            return
        time.sleep(LOOK_S)
    raise Permanent(f"The service has not ended after {timeout_s:g} s.")


def _living(folder: ClusterFolder) -> list[Path]:
    """The folders of nodes that have processes."""
    from pollux.node.folder import is_locked

    return [path for path in folder.node_folders() if is_locked(path / "lock") or (path / "keeper.sock").exists()]


def _end_daemons(folder: ClusterFolder, left: list[Path]) -> None:
    """Each proves that it is ours before it gets a signal; replicas save first."""
    import asyncio

    from pollux.node import launching
    from pollux.node.folder import StateFolder
    from pollux.providers.local.supervised import SupervisedDaemon, Wanted

    def daemon(path: Path) -> SupervisedDaemon:
        node, state = NodeId(path.name), StateFolder(path, folder.token_file)
        command = [*launching.COMMAND, "--dir", str(path), "--node", node, "--slots", "1"]
        command += ["--token-file", str(folder.token_file)]
        with suppress(Permanent):  # a damaged file must not keep anything from its end
            if (told := folder.config()) is not None and told.job_user:
                command += ["--job-user", told.job_user]  # replicas talk to it while they save
        return SupervisedDaemon(Wanted(node, 1, ""), state, command, os.environ)

    async def end() -> None:
        await asyncio.gather(*(daemon(path).end() for path in left))

    folder.lock()  # nobody starts a service meanwhile
    try:
        asyncio.run(end())
    finally:
        folder.unlock()


def _answer(as_json: bool, outcome: str, sentence: str) -> None:
    if as_json:
        output.print_json({"outcome": outcome})
    else:
        typer.echo(sentence)
