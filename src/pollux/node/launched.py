"""A launch as anybody sees it who may read its folder: daemons on one machine that act as nodes.

token       of all its daemons
lock        held by the launcher
n0, n1 …    the state folder of each daemon; n0 is the home of all jobs
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pollux.core import (
    Allocation,
    Event,
    FrozenMap,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobId,
    JobStopped,
    NodeId,
    ReplicasReady,
    StopReason,
)
from pollux.errors import InvalidSpec, Permanent, StaleGeneration, Temporary
from pollux.node.folder import StateFolder, is_locked
from pollux.node.news import Listener, News
from pollux.wire.frames import ask
from pollux.wire.nodes import (
    DescribeNode,
    Launch,
    ListReplicas,
    ListRuns,
    NodeAnswer,
    NodeDescription,
    NodeRequest,
    ReplicaHere,
    ReplicaList,
    ResizeRun,
    RunJob,
    RunPhase,
    Runs,
    RunStatus,
    StopRun,
)

T = TypeVar("T")

ENDS = (JobFinished, JobFailed, JobStopped)
HOME = NodeId("n0")
STOP_TRIES = 5


def pollux_home() -> Path:
    """Where Pollux keeps what belongs to this user."""
    return Path(os.environ.get("POLLUX_HOME") or "~/.pollux").expanduser().absolute()


def launch_base(given: Path | None = None) -> Path:
    """The folder that holds the folders of launches."""
    return (given or pollux_home() / "launch").absolute()


def launches_in(base: Path) -> Iterator[str]:
    """The names of the launches that run there."""
    for folder in sorted(base.glob("*/")):
        if Launched(folder).is_running:
            yield folder.name


def spread(count: int, nodes: Sequence[NodeId], slots: int, *, evenly: bool = False) -> Allocation:
    """So many replicas on nodes with so many slots each: node after node, or evenly on all of them."""
    if count < 1:
        raise InvalidSpec("replicas", count, "a job needs at least one", "Stop the job to take all of them away")
    if count > len(nodes) * slots:
        where = f"{slots} slots" if len(nodes) == 1 else f"{len(nodes)} nodes with {slots} slots each"
        raise InvalidSpec("replicas", count, f"more than there is room for on {where}", "Ask for fewer replicas")
    gpus: dict[NodeId, int] = {}
    left = count
    for position, node in enumerate(nodes):
        share = -(-left // (len(nodes) - position)) if evenly else min(left, slots)
        gpus[node] = share
        left -= share
    return Allocation.of(gpus)


class Launched:
    """Asks the daemons of a launch. `Temporary`: they do not answer; other errors as of `wire.ask`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @cached_property
    def token(self) -> str:
        try:
            return (self.folder / "token").read_text("ascii").strip()
        except OSError as error:
            raise Permanent(f"{self.folder} is not the folder of a launch: it holds no token ({error}).") from None

    @cached_property
    def news(self) -> News:
        """What all its daemons tell, from the first use of this on."""
        return News({node: self.address(node) for node in self.nodes}, self.token)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Those that have a daemon, or had one that was killed."""
        found = (path for path in self.folder.glob("n*/node.json") if path.parent.name[1:].isdecimal())
        return tuple(NodeId(path.parent.name) for path in sorted(found, key=lambda path: int(path.parent.name[1:])))

    @property
    def is_running(self) -> bool:
        try:
            self.ask(DescribeNode(), timeout_s=5.0)
        except (Temporary, Permanent, InvalidSpec):
            return False
        return True

    @property
    def is_held(self) -> bool:
        """A launcher has the folder, be it that its daemons do not answer yet."""
        return is_locked(self.folder / "lock")

    @property
    def slots(self) -> int:
        """Of each node."""
        return self.ask_for(NodeDescription, DescribeNode()).slots

    def address(self, node: NodeId) -> str:
        """The local socket of its daemon, which is the same after a restart."""
        return f"unix:{self.folder / node / 'node.sock'}"

    def ask(self, request: NodeRequest, node: NodeId = HOME, timeout_s: float = 30.0) -> NodeAnswer:
        return ask(self.address(node), self.token, request, timeout_s)

    def ask_for(self, kind: type[T], request: NodeRequest, node: NodeId = HOME) -> T:
        answer = self.ask(request, node)
        if not isinstance(answer, kind):
            raise Permanent(f"The daemon of node {node} answers {type(request).__name__} with {answer}. Update it.")
        return answer

    def status(self, job: str) -> RunStatus | None:
        """None: this launch has not heard of such a job."""
        return next((run for run in self.runs() if run.job == job), None)

    def runs(self) -> tuple[RunStatus, ...]:
        """All jobs, those that ended not long ago among them."""
        return self.ask_for(Runs, ListRuns()).runs

    def replicas(self, job: str) -> dict[str, tuple[NodeId, ReplicaHere]]:
        """Every replica that lives or has ended not long ago, with its node."""
        found: dict[str, tuple[NodeId, ReplicaHere]] = {}
        for node in self.nodes:
            listed = self.ask_for(ReplicaList, ListReplicas(JobId(job)), node)
            found |= {here.replica: (node, here) for here in listed.replicas}
        return found

    def run(self, launch: Launch, where: int | Allocation = 1) -> int:
        """Start the job with so many replicas, or there, as its next generation, which is returned."""
        generation = self._next_generation(launch.job)
        self.ask(RunJob(launch.job, generation, launch, self._placed(where), self._addresses()))
        return generation

    def resize(self, job: str, where: int | Allocation) -> int:
        """Ask for the next generation of a job that runs; its number."""
        status = self.status(job)
        if status is None or status.phase is RunPhase.ENDED:
            raise Permanent(f"Job {job} does not run{'' if status is None else ' any more'}.")
        generation = status.issued_generation + 1
        self.ask(ResizeRun(JobId(job), generation, self._placed(where), self._addresses()))
        return generation

    def stop(self, job: str, reason: StopReason = StopReason.PAUSED) -> int:
        """Ask all replicas to end; the generation that `wait_end` may be asked about."""
        for tries_left in reversed(range(STOP_TRIES)):
            status = self.status(job)
            generation = 1 if status is None else max(1, status.issued_generation)
            try:
                self.ask(StopRun(JobId(job), generation, reason))
                break
            except StaleGeneration:  # somebody resized it meanwhile
                if not tries_left:
                    raise
        return generation

    def watch(self) -> Listener:
        """An iterator over the news: all events since `news` was first used, then whatever comes."""
        return self.news.listen()

    def wait(self, job: str, generation: int, timeout_s: float = 120.0) -> Event:
        """What became of that generation: ready, abandoned, or the job ended before."""

        def is_answer(event: Event) -> bool:
            match event:
                case ReplicasReady() | GenerationAbandoned():
                    return (event.job, event.generation) == (job, generation)
                case JobFinished() | JobFailed() | JobStopped():
                    return event.job == job and event.generation >= generation
            return False

        return self.news.wait_for(is_answer, timeout_s)

    def wait_end(self, job: str, generation: int = 1, timeout_s: float = 120.0) -> Event:
        """How the job ended, in that generation or a later one."""
        return self.news.wait_for(
            lambda event: isinstance(event, ENDS) and event.job == job and event.generation >= generation, timeout_s
        )

    def close(self) -> None:
        """Stop listening."""
        if "news" in self.__dict__:
            self.news.close()
            del self.news

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _placed(self, where: int | Allocation) -> Allocation:
        return where if isinstance(where, Allocation) else spread(where, self.nodes, self.slots)

    def _next_generation(self, job: JobId) -> int:
        status = self.status(job)
        return 1 if status is None else status.issued_generation + 1

    def _addresses(self) -> FrozenMap[NodeId, str]:
        """Of all nodes but the home."""
        found: dict[NodeId, str] = {}
        for node in self.nodes:
            file = StateFolder(self.folder / node, self.folder / "token").node_file()
            if node != HOME and file is not None:
                found[node] = f"{file.host}:{file.port}"
        return FrozenMap(found)
