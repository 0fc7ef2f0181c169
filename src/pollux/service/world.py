"""The real world of the scheduler: jobs on node daemons. Actions go to the home of a job, what happens comes back.

The *home* is the daemon that runs a job (docs/elastic.md). Which one that is, is chosen at each start and written down
before the daemon hears of it, so that a service that was killed asks the same one again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pollux.core import (
    Action,
    Allocation,
    Event,
    FrozenMap,
    GenerationAbandoned,
    Job,
    JobFailed,
    JobId,
    JobRecovered,
    JobSpec,
    JobStopped,
    MakePlan,
    Node,
    NodeId,
    NodeJoined,
    NodeLost,
    Phase,
    ResizeJob,
    StartJob,
    StopJob,
    StopReason,
)
from pollux.errors import BackendError, PolluxError, StaleGeneration, Temporary, UnknownName
from pollux.providers.base import Provider
from pollux.scheduler import Scheduler
from pollux.service.daemon_link import Callbacks, DaemonLink
from pollux.service.experience import Experience
from pollux.service.recovery import from_run
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import (
    Forget,
    Launch,
    NodeAnswer,
    NodeDescription,
    NodeNews,
    NodeRequest,
    ReportNews,
    ResizeRun,
    RunJob,
    RunNews,
    RunPhase,
    RunRequest,
    RunStatus,
    StopRun,
)

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Facts(Protocol):
    """Small things that a service must know after it was killed."""

    def get(self, key: str) -> str | None: ...
    def put(self, key: str, value: str) -> None: ...


class World:
    """`hear` gets every event, with the node that told it; what that asks for comes back through `do`."""

    def __init__(
        self,
        provider: Provider,
        token: str,
        scheduler: Scheduler,
        facts: Facts,
        launch: Callable[[JobSpec], Launch],
        experience: Experience,
        hear: Callable[[Event, NodeId | None], None],
        on_report: Callable[[AgentReport], None],
        on_run: Callable[[JobId], None],
        grace_s: float,
    ) -> None:
        """`on_run` is told the id of every job that a daemon knows."""
        self._provider = provider
        self._token = token
        self._scheduler = scheduler
        self._facts = facts
        self._launch = launch
        self._experience = experience
        self._hear = hear
        self._on_report = on_report
        self._on_run = on_run
        self._grace_s = grace_s
        self._links: dict[NodeId, DaemonLink] = {}
        self._graces: dict[NodeId, asyncio.TimerHandle] = {}
        self._arrived = asyncio.Event()
        self._is_ending = False
        self._is_closed = False
        self._orphans: dict[NodeId, dict[JobId, int]] = {}
        """What is left on nodes of jobs whose home was lost, up to which generation."""

    async def start(self, timeout_s: float) -> None:
        """Bring the nodes, and return when all of them were heard, or late."""
        await self._provider.start(self.follow_provider)
        self.follow_provider()
        for node in list(self._scheduler.state.cluster):
            if node.id not in self._links:
                self._stop_waiting_for(node.id)
        until_s = time.monotonic() + timeout_s
        while not all(link.is_there for link in self._links.values()):
            self._arrived.clear()
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    await self._arrived.wait()
            except TimeoutError:
                missing = sorted(node for node, link in self._links.items() if not link.is_there)
                log.error("Nodes %s do not answer; jobs are run without them.", ", ".join(missing))
                break
        self._stop_homeless()

    async def close(self, *, end_nodes: bool) -> None:
        self._is_closed = True
        for grace in self._graces.values():
            grace.cancel()
        for link in self._links.values():
            link.close()
        await asyncio.gather(*(link.closed() for link in self._links.values()))
        await self._provider.close(end=end_nodes)

    # Nodes

    def follow_provider(self) -> None:
        """Link with nodes that have come, forget those that the provider has given up."""
        try:
            self._follow_provider()
        except BackendError as error:  # of the log
            log.error("What has become of the nodes cannot be taken in: %s", error)
            self._retry(self.follow_provider)

    def _follow_provider(self) -> None:
        provided = {one.node.id: one for one in self._provider.nodes()}
        callbacks = Callbacks(self._there, self._away, self._news, self._refused)
        for node, one in provided.items():
            if node in self._links:
                self._links[node].address = one.address
                if self._links[node].is_there and self._provider.reached_at(node):
                    self._join(one.node)
            else:
                self._links[node] = DaemonLink(node, one.address, self._token, callbacks)
                self._expect(node)
        for node in [node for node in self._links if node not in provided]:
            self._links.pop(node).close()
            self._stop_waiting_for(node)

    def is_there(self, node: NodeId) -> bool:
        return node in self._links and self._links[node].is_there

    def address(self, node: NodeId) -> str:
        return self._links[node].address if node in self._links else ""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All that the provider has, be they out of reach for the moment."""
        return tuple(one.node for one in self._provider.nodes())

    async def ask(self, node: NodeId, request: NodeRequest) -> NodeAnswer:
        """`UnknownName` if there is no such node, `Temporary` if it does not answer."""
        if node not in self._links:
            raise UnknownName("node", node, self._links)
        try:
            return await self._links[node].ask(request)
        except OSError as error:
            raise Temporary(f"Node {node} does not answer ({error}).", 1.0) from error

    # What is to be done

    def do(self, action: Action, origin: NodeId | None = None) -> None:
        """Have it done, now or when the log can be written. `origin`: who told what the action answers to."""
        try:
            self._do(action, origin)
        except BackendError as error:  # where a job is to run is written down first
            log.error("%s waits: %s", type(action).__name__, error)
            self._retry(self._do_again, action)

    def _do_again(self, action: Action) -> None:
        if action in self._scheduler.outstanding():
            self.do(action)

    def _do(self, action: Action, origin: NodeId | None) -> None:
        match action:
            case StartJob(job, generation) if self._is_ending:
                self._later(JobStopped(job, generation, cause="the cluster is being ended"))
            case ResizeJob(job, generation) if self._is_ending:
                self._later(GenerationAbandoned(job, generation, "The cluster is being ended."))
            case StartJob(job, generation, allocation):
                self._start(job, generation, allocation)
            case ResizeJob(job, generation, allocation):
                told = self._told(self._job(job))
                self._ask_home(job, ResizeRun(job, generation, allocation, self._addresses(allocation), told))
            case StopJob(job, generation, reason=StopReason.SUPERSEDED) if origin in self._links:
                self._links[origin].send(StopRun(job, generation, StopReason.SUPERSEDED))
            case StopJob(job, generation, reason):
                self._ask_home(job, StopRun(job, generation, reason))
            case MakePlan():
                raise AssertionError("plans are made by the planner")

    def stop_all(self) -> None:
        """Have every job save and stop, without the scheduler's having decided it, and start nothing any more."""
        self._is_ending = True
        for job in self._scheduler.state.jobs.values():
            if job.phase.holds_gpus:
                self._ask_home(job.id, StopRun(job.id, job.issued_generation, StopReason.PREEMPTED))

    def _start(self, job: JobId, generation: int, allocation: Allocation) -> None:
        wanted = self._job(job)
        remembered = self._home_and_generation(job)
        if remembered is not None and remembered[1] == generation:
            home = remembered[0]
        else:
            nodes = list(allocation.gpus)
            home = next((node for node in nodes if self.is_there(node)), nodes[0])
            self._facts.put(f"home/{job}", f"{generation} {home}")
        try:
            launch = replace(self._launch(wanted.spec), submission=repr(wanted.submitted_at_s))
        except PolluxError as error:
            self._later(JobFailed(job, generation, str(error)))
            return
        if launch.is_plain:
            allocation = Allocation.of({node: 1 for node in allocation.gpus})  # one process, whatever it holds
        told = "" if launch.is_plain else self._told(wanted)
        self._ask_home(job, RunJob(job, generation, launch, allocation, self._addresses(allocation, home), told))

    def _told(self, job: Job) -> str:
        """What it is told of its kind."""
        return self._experience.of(job, self._scheduler.state.pool.kinds)

    def _ask_home(self, job: JobId, request: RunRequest) -> None:
        found = self._home_and_generation(job)
        if found is None:
            self._later(JobStopped(job, request.generation, cause="nobody knows where it runs"))
        elif found[0] in self._links:
            self._links[found[0]].send(request)

    def _addresses(self, allocation: Allocation, home: NodeId | None = None) -> FrozenMap[NodeId, str]:
        others = [node for node in allocation.gpus if node != home and node in self._links]
        return FrozenMap({node: self._provider.reached_at(node) for node in others})

    def _home_and_generation(self, job: JobId) -> tuple[NodeId, int] | None:
        fact = self._facts.get(f"home/{job}")
        if fact is None:
            return None
        generation, _, node = fact.partition(" ")
        return NodeId(node), int(generation)

    def _is_home(self, node: NodeId, job: JobId) -> bool:
        found = self._home_and_generation(job)
        return found is not None and found[0] == node

    # What happens

    def _there(self, node: NodeId, description: NodeDescription, runs: tuple[RunStatus, ...]) -> None:
        if grace := self._graces.pop(node, None):
            grace.cancel()
        provided = next((one.node for one in self._provider.nodes() if one.node.id == node), None)
        if provided is not None and self._provider.reached_at(node):
            self._join(provided)  # else when the provider knows where others reach it
        self._clear_orphans(node)
        self._compare(node, runs)
        for action in self._scheduler.outstanding():
            if not isinstance(action, MakePlan) and self._is_home(node, action.job):
                self.do(action, node)
        self._arrived.set()

    def _join(self, provided: Node) -> None:
        cluster = self._scheduler.state.cluster
        if provided.id in cluster and cluster[provided.id].schedulable is False:
            provided = replace(provided, schedulable=False)  # a drained node stays drained
        if provided.id not in cluster or cluster[provided.id] != provided:
            self._hear(NodeJoined(provided), provided.id)

    def _compare(self, node: NodeId, runs: tuple[RunStatus, ...]) -> None:
        """What runs there against what should."""
        state = self._scheduler.state
        for run in runs:
            self._on_run(run.job)
            job = state.jobs.get(run.job)
            if job is not None:
                self._catch_up(job, run, node)
            elif run.phase is not RunPhase.ENDED:
                log.warning("Job %s runs on %s, but should not: it is stopped.", run.job, node)
                reason = StopReason.SUPERSEDED if run.job in state.ended else StopReason.PREEMPTED
                self._links[node].send(StopRun(run.job, run.issued_generation, reason))
        known = {run.job for run in runs}
        for job in list(state.jobs.values()):
            is_missing = job.phase in (Phase.RUNNING, Phase.RESIZING) and job.id not in known
            if is_missing and self._is_home(node, job.id):
                self._hear(JobStopped(job.id, job.generation, cause=f"node {node} does not know it any more"), node)

    def _catch_up(self, job: Job, run: RunStatus, node: NodeId) -> None:
        """The log may have lost how far the job was, and where: its home knows."""
        home = self._home_and_generation(job.id)
        if home is not None and home[0] != node and home[1] > run.issued_generation:
            return  # it has another home since
        if found := from_run(job, run, node):
            log.warning("Job %s: node %s knows of a later generation, %d.", job.id, node, run.issued_generation)
            self._facts.put(f"home/{job.id}", f"{run.issued_generation} {node}")
            self._hear(found, node)
        elif home is None and job.phase.holds_gpus and run.issued_generation == job.issued_generation:
            self._facts.put(f"home/{job.id}", f"{run.issued_generation} {node}")

    def _away(self, node: NodeId) -> None:
        self._expect(node)

    def _expect(self, node: NodeId) -> None:
        """Give the node some time to come back."""
        loop = asyncio.get_running_loop()
        self._graces[node] = loop.call_later(self._grace_s, self._stop_waiting_for, node)

    def _stop_waiting_for(self, node: NodeId) -> None:
        try:
            self._lose(node)
        except PolluxError as error:  # of the log
            log.error("The loss of node %s cannot be taken in: %s", node, error)
            self._expect(node)

    def _lose(self, node: NodeId) -> None:
        if grace := self._graces.pop(node, None):
            grace.cancel()
        if node in self._scheduler.state.cluster:
            log.error("Node %s is lost.", node)
            self._hear(NodeLost(node), None)
        # Also if a service before us was killed right after it had heard of the loss.
        for job in list(self._scheduler.state.jobs.values()):
            if job.phase.holds_gpus and self._is_home(node, job.id):
                self._end_orphans(job, node)

    def _end_orphans(self, job: Job, home: NodeId) -> None:
        """Replicas whose home is lost have nobody who decides for them: the job goes on from its checkpoint."""
        for node in job.occupied.gpus:
            self._orphans.setdefault(node, {})[job.id] = job.issued_generation
            self._clear_orphans(node)
        self._hear(JobStopped(job.id, job.generation, cause=f"its home, node {home}, is lost"), None)

    def _clear_orphans(self, node: NodeId) -> None:
        """Have a node end what is left of jobs whose home was lost, once it is in reach."""
        if self.is_there(node):
            for job, generation in self._orphans.pop(node, {}).items():
                self._links[node].send(Forget(job, generation))

    def _stop_homeless(self) -> None:
        """Jobs that hold GPUs although nobody is left who could know of them."""
        try:
            self._end_homeless()
        except BackendError as error:  # of the log
            log.error("Jobs that nobody runs cannot be stopped: %s", error)
            self._retry(self._stop_homeless)

    def _end_homeless(self) -> None:
        for job in list(self._scheduler.state.jobs.values()):
            found = self._home_and_generation(job.id)
            if job.phase.holds_gpus and found is None:
                self._hear(JobStopped(job.id, job.generation, cause="nobody knows where it runs"), None)
            elif job.phase.holds_gpus and found is not None and found[0] not in self._links:
                self._end_orphans(job, found[0])

    def _news(self, node: NodeId, news: NodeNews) -> None:
        match news:
            case RunNews(event=event):
                self._hear(event, node)
            case ReportNews(report=report):
                self._on_report(report)

    def _refused(self, node: NodeId, request: NodeRequest, error: PolluxError) -> None:
        log.warning("Node %s refuses %s: %s", node, type(request).__name__, error)
        match request:
            case RunJob() if isinstance(error, StaleGeneration):
                job = self._scheduler.state.jobs.get(request.job)
                if job is not None and error.current > job.issued_generation:  # the log has lost those in between
                    self._hear(JobRecovered(job.spec, job.submitted_at_s, error.current, cause=str(error)), node)
                else:
                    self._hear(JobStopped(request.job, request.generation, cause=str(error)), node)
            case RunJob():
                self._hear(JobFailed(request.job, request.generation, str(error)), node)
            case ResizeRun():
                self._hear(GenerationAbandoned(request.job, request.generation, str(error)), node)
            case StopRun() if isinstance(error, StaleGeneration):
                self._links[node].send(replace(request, generation=error.current))

    def _retry(self, what: Callable[..., None], *args: object) -> None:
        """Of what the log could not take in."""

        def again() -> None:
            if not self._is_closed:
                what(*args)

        asyncio.get_running_loop().call_later(RETRY_S, again)

    def _later(self, event: Event, pause_s: float = 0.0) -> None:
        def tell() -> None:
            try:
                self._hear(event, None)
            except PolluxError as error:  # of the log
                log.error("%s cannot be taken in: %s", type(event).__name__, error)
                self._later(event, RETRY_S)

        asyncio.get_running_loop().call_later(pause_s, tell)

    def _job(self, job: JobId) -> Job:
        found = self._scheduler.state.job(job)
        assert found is not None, f"an action for {job}, which was never submitted"
        return found
