"""The daemon's sockets: who may talk, what is asked, and who is told the news.

Whatever a stranger or a broken client sends ends its own connection and no other, with a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from pollux.core import JobId
from pollux.errors import InvalidDocument, Permanent, PolluxError, StaleGeneration, Temporary
from pollux.node.folder import StateFolder
from pollux.node.home import Home
from pollux.node.hosting import Hosting
from pollux.node.logs import list_logs, read_log
from pollux.wire.frames import Peer, accept
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import (
    DescribeNode,
    Done,
    Forget,
    HostStore,
    Kill,
    ListLogs,
    ListReplicas,
    ListRuns,
    NodeAnswer,
    NodeDescription,
    NodeNews,
    NodeRequest,
    ReadLog,
    Refused,
    ReplicaList,
    ReplicaNews,
    ReportNews,
    ResizeRun,
    RunJob,
    Runs,
    Spawn,
    StopRun,
    StoreAt,
    Tell,
    Watch,
)
from pollux.wire.replicas import ReplicaStatus

log = logging.getLogger(__name__)

REMEMBERED_NOTICES = 256
"""Of each job at home here, for a service that was away when they came."""


@dataclass(frozen=True, slots=True, eq=False)
class _Watcher:
    peer: Peer
    wish: Watch

    def wants(self, news: NodeNews, *, is_of_home: bool) -> bool:
        match news:
            case ReplicaNews(job=job):
                return self.wish.replicas and self.wish.job in ("", job)
            case ReportNews(report=report):
                return (is_of_home or self.wish.replicas) and self.wish.job in ("", report.job)
        return self.wish.job in ("", getattr(news.event, "job", ""))


class Watchers:
    """Those who asked to be told. One that does not read what it is told is dropped: it must ask anew."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()
        self._reports: dict[JobId, AgentReport] = {}
        """Of each job that has its home here the last, with the notices of those before."""

    def publish(self, news: NodeNews, *, is_of_home: bool = True) -> None:
        """`is_of_home`: the job has its home here."""
        if isinstance(news, ReportNews) and is_of_home:
            self._remember(news.report)
        for watcher in list(self._watchers):
            if watcher.wants(news, is_of_home=is_of_home):
                try:
                    watcher.peer.send(news)
                except PolluxError as error:
                    log.warning("A watcher is dropped: %s", _problem(error))
                    self._watchers.discard(watcher)

    async def serve(self, peer: Peer, wish: Watch, home: Home) -> None:
        """Tell this peer what it wants to hear until it goes."""
        watcher = _Watcher(peer, wish)
        peer.send(Done())
        if not wish.replicas:  # who also listens to replicas is not after the story of a job
            for report in self._standing(wish, home):
                peer.send(ReportNews(report))
        for news in home.standing(wish.job):
            peer.send(news)
        self._watchers.add(watcher)
        try:
            await peer.receive(Done)  # it has nothing to say: this ends with the connection
            raise InvalidDocument("message", "Done", "comes from a watcher, which only listens", "Ask elsewhere")
        finally:
            self._watchers.discard(watcher)

    def _remember(self, report: AgentReport) -> None:
        if (before := self._reports.get(report.job)) is not None:
            report = replace(
                report,
                profile=report.profile or before.profile,
                model=report.model or before.model,
                notices=(*before.notices, *report.notices)[-REMEMBERED_NOTICES:],
            )
        self._reports[report.job] = report

    def _standing(self, wish: Watch, home: Home) -> list[AgentReport]:
        self._reports = {job: report for job, report in self._reports.items() if home.is_home_of(job)}
        return [report for job, report in self._reports.items() if wish.job in ("", job)]


class Server:
    """Listens on the local socket and on TCP, and answers. One task per connection."""

    def __init__(
        self, folder: StateFolder, description: NodeDescription, hosting: Hosting, home: Home, watchers: Watchers
    ) -> None:
        self._folder = folder
        self._description = description
        self._hosting = hosting
        self._home = home
        self._watchers = watchers
        self._listening: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, wanted_port: int = 0) -> int:
        """Returns the port. 0: `wanted_port` if it is free, for others may still look for us there, or any."""
        self._folder.socket.unlink(missing_ok=True)  # left by a daemon that was killed: the folder is ours
        local = await asyncio.start_unix_server(self._connected, self._folder.socket)
        self._folder.guard_socket()
        self._listening.append(local)
        try:
            remote = await asyncio.start_server(self._connected, host, port or wanted_port)
        except OSError:
            if port or not wanted_port:
                raise
            remote = await asyncio.start_server(self._connected, host, 0)
        self._listening.append(remote)
        bound: int = remote.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        for server in self._listening:
            server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = None
        try:
            peer = await accept(reader, writer, self._folder.token)
            await self._converse(peer)
        except Temporary as error:
            if peer is None:
                log.warning("A connection came to nothing: %s", _problem(error))
        except PolluxError as error:
            log.warning("Refused, from %s: %s", peer.address if peer else "a stranger", error)
            if peer is not None:
                with suppress(PolluxError):
                    peer.send(Refused(str(error)))
        except Exception:
            log.exception("A bug: the connection to %s is closed.", peer.address if peer else "a stranger")
        finally:
            writer.close()

    async def _converse(self, peer: Peer) -> None:
        message: NodeRequest | ReplicaStatus = await peer.receive(NodeRequest | ReplicaStatus)
        _check_right(peer, message)
        while True:
            match message:
                case ReplicaStatus():
                    await self._hosting.links.serve(peer, message)
                    return
                case Watch():
                    await self._watchers.serve(peer, message, self._home)
                    return
            peer.send(await self._answer(peer, message))
            await peer.flush()
            message = await peer.receive(NodeRequest)

    async def _answer(self, peer: Peer, request: NodeRequest) -> NodeAnswer:
        try:
            return await self._granted(request)
        except StaleGeneration as error:
            log.warning("A stale %s of %s is refused: %s", type(request).__name__, peer.address, error)
            return Refused(str(error), is_stale=True, generation=error.current)
        except (PolluxError, OSError) as error:
            log.warning("A %s of %s is refused: %s", type(request).__name__, peer.address, error)
            return Refused(str(error))

    async def _granted(self, request: NodeRequest) -> NodeAnswer:
        match request:
            case DescribeNode():
                return self._description
            case ListRuns():
                return Runs(self._home.runs())
            case ListReplicas(job):
                return ReplicaList(self._hosting.replicas(job))
            case ListLogs(job):
                return await asyncio.to_thread(list_logs, self._folder, job, self._hosting.running(job))
            case ReadLog(job, replica):
                is_running = replica in self._hosting.running(job)
                node = self._description.node
                return await asyncio.to_thread(read_log, self._folder, node, request, is_running=is_running)
            case HostStore(job):
                return StoreAt(await self._hosting.host_store(job))
            case RunJob():
                await self._home.start(request)
            case ResizeRun():
                await self._home.resize(request)
            case StopRun():
                await self._home.stop(request)
            case Spawn():
                self._hosting.spawn(request)
            case Tell():
                self._hosting.tell(request)
            case Kill(job, replica, number):
                self._hosting.kill(job, replica, number)
            case Forget(job, generation):
                self._hosting.forget(job, generation)
        return Done()


def _check_right(peer: Peer, message: NodeRequest | ReplicaStatus) -> None:
    """Who knows the token may ask for everything, a replica may say how it stands: itself, from its own process.

    `Permanent`: not that. Its process is what a signal may go to, so that no pid is taken on trust.
    """
    who = peer.identity
    if who is None:
        return
    if not isinstance(message, ReplicaStatus):
        what = f"{type(message).__name__} is for those who know the token of the cluster"
        raise Permanent(f"{who} may only report on itself with its credential: {what}.")
    if (message.job, message.replica, message.pid) != (who.job, who.replica, peer.pid):
        said = f"{message.job}/{message.replica} with pid {message.pid}"
        came = "another machine's port" if peer.pid is None else f"process {peer.pid}"
        raise Permanent(f"{who} speaks for {said} from {came}: a credential is good for its own replica, on its node.")


def _problem(error: PolluxError) -> object:
    """What happened, without the promise of another try: that is up to the other side."""
    return error.args[0] if isinstance(error, Temporary) else error
