"""Node daemons and a provider without processes: what the service says to them is real, what they run is not."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pollux.core import (
    Allocation,
    Event,
    JobFailed,
    JobFinished,
    JobId,
    JobStopped,
    Node,
    NodeId,
    ReplicasReady,
)
from pollux.errors import Permanent, PolluxError
from pollux.providers.base import ProvidedNode, Provider
from pollux.wire.frames import Peer, accept
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import (
    DescribeNode,
    Done,
    Forget,
    Launch,
    ListLogs,
    ListRuns,
    LogHere,
    LogPart,
    LogsHere,
    NodeDescription,
    NodeRequest,
    ReadLog,
    Refused,
    ReportNews,
    ResizeRun,
    RunJob,
    RunNews,
    RunPhase,
    Runs,
    RunStatus,
    StopRun,
    Watch,
)

TOKEN = "a-token-of-the-tests"


@dataclass
class FakeRun:
    launch: Launch
    generation: int
    issued: int
    allocation: Allocation
    phase: RunPhase = RunPhase.TRAINING
    standing: Event | None = None

    @property
    def end(self) -> JobFinished | JobFailed | JobStopped | None:
        return self.standing if isinstance(self.standing, JobFinished | JobFailed | JobStopped) else None


class FakeDaemon:
    """Does at once what it is told. `is_slow`: answers requests, but nothing gets ready until `settle`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.folder = Path(tempfile.mkdtemp(prefix="fd-", dir="/tmp"))
        self.address = f"unix:{self.folder / 's'}"
        self.runs: dict[JobId, FakeRun] = {}
        self.asked: list[NodeRequest] = []
        self.forgotten: list[JobId] = []
        self.refusal: Refused | None = None
        self.is_slow = False
        self._watchers: list[Peer] = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        path = self.folder / "s"
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def stop(self) -> None:
        """As after a kill: connections break, runs stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._watchers.clear()
        while self._writers:
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0.001)

    def announce(self, event: Event) -> None:
        run = self.runs.get(event.job)  # type: ignore[union-attr]
        if run is not None:
            run.standing = event
        self._publish(RunNews(0.0, event))

    def report(self, report: AgentReport) -> None:
        self._publish(ReportNews(report))

    def _publish(self, news: RunNews | ReportNews) -> None:
        for peer in list(self._watchers):
            try:
                peer.send(news)
            except PolluxError:  # that service is gone
                self._watchers.remove(peer)

    def finish(self, job: JobId) -> None:
        self._end(job, JobFinished(job, self.runs[job].generation))

    def fail(self, job: JobId, reason: str = "it broke") -> None:
        self._end(job, JobFailed(job, self.runs[job].generation, reason, 1))

    def settle(self) -> None:
        """What was asked for is ready."""
        for job, run in self.runs.items():
            if run.phase is not RunPhase.ENDED and run.generation < run.issued:
                run.generation = run.issued
                self.announce(ReplicasReady(job, run.generation))

    def _end(self, job: JobId, event: Event) -> None:
        self.runs[job].phase = RunPhase.ENDED
        self.announce(event)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if self._server is None:  # it came just as we left
            writer.transport.abort()
        try:
            peer = await accept(reader, writer, TOKEN)
            while True:
                request: NodeRequest = await peer.receive(NodeRequest)
                if isinstance(request, Watch):
                    peer.send(Done())
                    for run in self.runs.values():
                        if run.standing is not None:
                            peer.send(RunNews(0.0, run.standing))
                    self._watchers.append(peer)
                else:
                    peer.send(self._answer(request))
        except (PolluxError, OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, request: NodeRequest) -> object:
        if isinstance(request, RunJob | ResizeRun | StopRun):
            self.asked.append(request)
        if self.refusal is not None and isinstance(request, RunJob | ResizeRun | StopRun | ReadLog):
            return self.refusal
        match request:
            case DescribeNode():
                return NodeDescription(self.node.id, 1, "0", self.node.num_gpus)
            case ListRuns():
                return Runs(
                    tuple(
                        RunStatus(job, run.phase, run.generation, 0, run.issued, run.allocation, 0, end=run.end)
                        for job, run in self.runs.items()
                    )
                )
            case RunJob(job, generation, launch, allocation):
                run = self.runs.get(job)
                if run is None or run.issued < generation:
                    self.runs[job] = FakeRun(launch, 0, generation, allocation)
                elif run.phase is RunPhase.ENDED and run.standing is not None:
                    self.announce(run.standing)  # it was done, and this is what became of it
                self._soon()
            case ResizeRun(job, generation, allocation):
                run = self.runs[job]
                run.issued, run.allocation = generation, allocation
                self._soon()
            case StopRun(job, generation):
                if job in self.runs:
                    self.runs[job].phase = RunPhase.ENDED
                self.announce(JobStopped(job, generation))
            case Forget(job, generation):
                self.forgotten.append(job)
                if job in self.runs and self.runs[job].issued <= generation:
                    del self.runs[job]
            case ListLogs(job):
                return LogsHere((LogHere("r0", 5, True, 1.0),) if job in self.runs else ())
            case ReadLog(offset=offset):
                return LogPart("hello"[offset:], 5)
        return Done()

    def _soon(self) -> None:
        if not self.is_slow:
            asyncio.get_running_loop().call_soon(self.settle)


class FakeProvider(Provider):
    """Daemons that live in the test."""

    def __init__(self, *daemons: FakeDaemon) -> None:
        self.daemons = {daemon.node.id: daemon for daemon in daemons}
        self.was_ended: bool | None = None
        self._ports = itertools.count(1000)
        self.on_change: Callable[[], None] = lambda: None

    async def start(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change

    def nodes(self) -> tuple[ProvidedNode, ...]:
        return tuple(ProvidedNode(daemon.node, daemon.address) for daemon in self.daemons.values())

    def reached_at(self, node: NodeId) -> str:
        return f"127.0.0.1:{1000 + list(self.daemons).index(node)}"

    async def request(self, count: int) -> tuple[NodeId, ...]:
        raise Permanent("There are no more.")

    async def release(self, node: NodeId) -> None:
        del self.daemons[node]
        self.on_change()

    async def close(self, *, end: bool) -> None:
        self.was_ended = end
