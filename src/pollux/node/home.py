"""The jobs that have their home here: each a `JobRun`, the connections to its nodes, and its file run.json.

What happens is handed to the run; the run is saved; then its orders are carried out. So a daemon that is killed at any
moment goes on from the file, and asks the nodes what is really there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pollux.core import (
    Allocation,
    Event,
    FrozenMap,
    GenerationAbandoned,
    JobFailed,
    JobId,
    JobStopped,
    NodeId,
    ReplicaLost,
    ReplicasReady,
    StopReason,
    dumps,
    loads,
    register,
)
from pollux.errors import InvalidSpec, PolluxError
from pollux.node.folder import StateFolder, last_lines, write
from pollux.node.hosting import UNKNOWN_EXIT, Hosting
from pollux.node.members import SavedRun
from pollux.node.orders import Announce, ForgetJob, KillReplica, Order, SpawnOn, TellReplica
from pollux.node.remote import RemoteNode
from pollux.node.run import JobRun, RunOptions
from pollux.wire.nodes import (
    Forget,
    Kill,
    Launch,
    NodeNews,
    NodeRequest,
    ReplicaHere,
    ReplicaNews,
    ReportNews,
    ResizeRun,
    RunJob,
    RunNews,
    RunStatus,
    Spawn,
    StopRun,
    Tell,
)

log = logging.getLogger(__name__)

QUOTED_LINES = 5
"""How much of a failed replica's log goes into the reason of a failure."""
REMEMBERED_S = 24 * 3600.0
"""How long a job that has ended is found again by a daemon that starts."""

_FORMED = (ReplicasReady, ReplicaLost)


@register
@dataclass(frozen=True, slots=True)
class SavedHome:
    """What run.json holds."""

    launch: Launch
    addresses: FrozenMap[NodeId, str]
    fingerprint: str
    """Of the code that the replicas run."""
    run: SavedRun


@dataclass(slots=True)
class _Homed:
    """A job at home here."""

    run: JobRun
    launch: Launch
    addresses: FrozenMap[NodeId, str]
    fingerprint: str
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a request of the service waits for the disk or the keeper."""
    remotes: dict[NodeId, RemoteNode] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    saved: SavedHome | None = None
    heard: dict[str, object] = field(default_factory=dict)
    """How each replica stood when it last said something new."""
    failures: list[tuple[NodeId, ReplicaHere]] = field(default_factory=list)
    """Replicas that ended badly since the members last formed, the first one first."""


class Home:
    """`publish` gets what the watchers of a job are to hear. Requests raise `PolluxError` if they are refused."""

    def __init__(
        self,
        folder: StateFolder,
        node: NodeId,
        hosting: Hosting,
        publish: Callable[[RunNews | ReportNews], None],
        fingerprint: Callable[[Launch], str],
        options: RunOptions | None = None,
    ) -> None:
        self._folder = folder
        self._node = node
        self._hosting = hosting
        self._publish = publish
        self._fingerprint = fingerprint
        self._options = options or RunOptions()
        self._jobs: dict[JobId, _Homed] = {}

    # Requests

    async def start(self, request: RunJob) -> None:
        job = request.job
        if request.launch.job != job:
            raise InvalidSpec("launch.job", request.launch.job, f"is not the job {job!r}", "Name one job")
        if not request.allocation:
            raise InvalidSpec("allocation", {}, "holds nothing to run the job on", "Give it at least one GPU")
        self._check_addresses(request.allocation, request.addresses)
        fingerprint = await asyncio.to_thread(self._fingerprint, request.launch)
        homed = self._jobs.get(job)
        if homed is None:
            homed = _Homed(JobRun(job, self._options), request.launch, request.addresses, fingerprint)
            self._jobs[job] = homed  # at once, so that a second request finds it
        async with homed.changing:
            try:
                homed.run.store = await self._hosting.host_store(job)
                orders = homed.run.start(request.generation, request.allocation, time.monotonic())
            except BaseException:
                if homed.saved is None:
                    self._jobs.pop(job, None)
                if homed.saved is None or homed.run.is_over:
                    self._hosting.forget(job)  # the store may have been started for nothing
                raise
            if orders:
                homed.launch, homed.fingerprint = request.launch, fingerprint
                homed.failures.clear()
                homed.heard.clear()
            self._learn_addresses(homed, request.addresses)
            log.info("Job %s: generation %d starts, %s.", job, request.generation, _told(request.allocation))
            self._carry_out(homed, orders)

    async def resize(self, request: ResizeRun) -> None:
        homed = self._jobs.get(request.job)
        if homed is None:
            self._announce(GenerationAbandoned(request.job, request.generation, "The job does not run here."))
            return
        if not request.allocation:
            raise InvalidSpec("allocation", {}, "holds nothing to run the job on", "Stop the job instead")
        self._check_addresses(request.allocation, {**homed.addresses, **request.addresses})
        async with homed.changing:
            fingerprint = await asyncio.to_thread(self._fingerprint, homed.launch)
            in_place = fingerprint == homed.fingerprint
            orders = homed.run.resize(request.generation, request.allocation, in_place, time.monotonic())
            self._learn_addresses(homed, request.addresses)
            if orders and not in_place:
                homed.fingerprint = fingerprint
            how = "in place" if in_place else "by checkpoint and restart: its code has changed"
            log.info(
                "Job %s: to generation %d, %s, %s.", request.job, request.generation, _told(request.allocation), how
            )
            self._carry_out(homed, orders)

    async def stop(self, request: StopRun) -> None:
        homed = self._jobs.get(request.job)
        if homed is None:
            self._announce(JobStopped(request.job, request.generation))
            return
        async with homed.changing:
            orders = homed.run.stop(request.generation, request.reason, time.monotonic())
            log.info("Job %s: is to stop, %s.", request.job, request.reason)
            self._carry_out(homed, orders)

    def runs(self) -> tuple[RunStatus, ...]:
        return tuple(homed.run.description() for homed in self._jobs.values())

    def standing(self, job: str) -> Iterator[RunNews]:
        """What somebody who begins to watch this job, or all of them, has to hear first."""
        for name, homed in self._jobs.items():
            if job in ("", name):
                for event in homed.run.standing():
                    yield RunNews(time.time(), event)

    def is_home_of(self, job: JobId) -> bool:
        return job in self._jobs

    # What happens

    def hear(self, news: NodeNews) -> None:
        """News of a node of any job here: of this one, or of another."""
        match news:
            case ReplicaNews(job=job, node=node, replica=here) if homed := self._jobs.get(job):
                if here.exit_code:
                    homed.failures.append((node, here))
                orders = homed.run.status(node, here, time.monotonic())
                standing = _standing(here)
                if orders or homed.heard.get(here.replica) != standing:
                    homed.heard[here.replica] = standing
                    self._carry_out(homed, orders)
                else:  # a sign of life, nothing worth saving
                    self._set_timer(homed)
            case ReportNews(report=report) if report.job in self._jobs:
                self._publish(news)

    async def store_lost(self, job: JobId) -> None:
        """The rendezvous store of a job has ended: it gets another one, which its members hear of."""
        homed = self._jobs.get(job)
        if homed is None or homed.run.is_over:
            return
        log.warning("Job %s: its store is lost, and gets a successor.", job)
        async with homed.changing:
            try:
                homed.run.store = await self._hosting.host_store(job)
            except PolluxError as error:  # the next start, resize or loss finds none either, and says so
                log.error("Job %s has no store: %s", job, error)
            self._carry_out(homed, homed.run.tick(time.monotonic()))

    async def recover(self) -> None:
        """Go on with the jobs of the daemon before."""
        for job in self._folder.jobs():
            path = self._folder.run_file(job)
            try:
                saved = loads(path.read_bytes(), SavedHome)
                run = JobRun.restored(saved.run, self._options)
            except FileNotFoundError:
                continue
            except PolluxError as error:
                log.error("Job %s is not run any more: %s cannot be read. %s", job, path, error)
                path.replace(path.with_suffix(".unreadable"))
                continue
            if run.is_over and time.time() - path.stat().st_mtime > REMEMBERED_S:
                path.unlink()
                continue
            homed = _Homed(run, saved.launch, saved.addresses, saved.fingerprint, saved=saved)
            self._jobs[job] = homed
            if not run.is_over:
                run.store = await self._hosting.host_store(job)
            log.info("Job %s is found again: %s.", job, run.description().phase)
            for node in run.nodes - {self._node}:
                self._remote(homed, node, is_there=False)
            if self._node in run.nodes:
                self._node_back(homed, self._node, self._hosting.replicas(job))

    async def stop_all(self, timeout_s: float) -> None:
        """Let every job here save and stop, and wait for that, but no longer."""
        until_s = time.monotonic() + timeout_s
        for homed in self._jobs.values():
            if not homed.run.is_over:
                newest = homed.run.description().issued_generation
                self._carry_out(homed, homed.run.stop(newest, StopReason.PREEMPTED, time.monotonic()))
        while not all(homed.run.is_over for homed in self._jobs.values()) and time.monotonic() < until_s:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        for homed in self._jobs.values():
            if homed.timer is not None:
                homed.timer.cancel()
            for remote in homed.remotes.values():
                remote.close()

    # Inside

    def _carry_out(self, homed: _Homed, orders: Sequence[Order]) -> None:
        self._save(homed)
        for order in orders:
            match order:
                case Announce(event):
                    self._announce(self._explained(homed, event))
                    if isinstance(event, _FORMED):
                        homed.failures.clear()
                case SpawnOn(node, generation, seats):
                    job = homed.launch.job
                    self._send(homed, node, Spawn(job, generation, homed.launch, seats, homed.run.store))
                case TellReplica(node, replica, instruction):
                    self._send(homed, node, Tell(homed.launch.job, replica, instruction))
                case KillReplica(node, replica, number):
                    self._send(homed, node, Kill(homed.launch.job, replica, number))
                case ForgetJob(node):
                    self._send(homed, node, Forget(homed.launch.job))
        self._set_timer(homed)
        if homed.run.is_over:
            for node in homed.remotes.keys() - homed.run.nodes:
                homed.remotes[node].finish()

    def _save(self, homed: _Homed) -> None:
        saved = SavedHome(homed.launch, homed.addresses, homed.fingerprint, homed.run.saved())
        if saved == homed.saved:
            return
        homed.saved = saved
        path = self._folder.run_file(homed.launch.job)
        try:
            write(path, dumps(saved), is_durable=True)
        except OSError as error:  # training is worth more than the way back to it
            log.error("Job %s cannot be saved, and is lost if this daemon ends: %s", homed.launch.job, error)

    def _set_timer(self, homed: _Homed) -> None:
        if homed.timer is not None:
            homed.timer.cancel()
            homed.timer = None
        if (deadline_s := homed.run.next_deadline_s) is not None:
            pause_s = max(0.0, deadline_s - time.monotonic())
            homed.timer = asyncio.get_running_loop().call_later(pause_s, self._tick, homed)

    def _tick(self, homed: _Homed) -> None:
        homed.timer = None
        self._carry_out(homed, homed.run.tick(time.monotonic()))

    def _send(self, homed: _Homed, node: NodeId, request: Spawn | Tell | Kill | Forget) -> None:
        if node != self._node:
            self._remote(homed, node).send(request)
            return
        try:
            match request:
                case Spawn():
                    self._hosting.spawn(request)
                case Tell(job, replica, instruction):
                    self._hosting.tell(job, replica, instruction)
                case Kill(job, replica, number):
                    self._hosting.kill(job, replica, number)
                case Forget(job):
                    self._hosting.forget(job)
        except (PolluxError, OSError) as error:
            asyncio.get_running_loop().call_soon(self._refused, homed, node, request, error)

    def _remote(self, homed: _Homed, node: NodeId, *, is_there: bool = True) -> RemoteNode:
        remote = homed.remotes.get(node)
        if remote is None or remote.is_closed:
            remote = homed.remotes[node] = RemoteNode(
                homed.launch.job,
                node,
                homed.addresses[node],
                self._folder.token,
                on_gone=lambda node: self._carry_out(homed, homed.run.node_gone(node, time.monotonic())),
                on_back=lambda node, replicas: self._node_back(homed, node, replicas),
                on_news=self.hear,
                on_refused=lambda node, request, error: self._refused(homed, node, request, error),
                is_there=is_there,
            )
        return remote

    def _node_back(self, homed: _Homed, node: NodeId, replicas: Sequence[ReplicaHere]) -> None:
        self._carry_out(homed, homed.run.node_back(node, replicas, time.monotonic()))

    def _refused(self, homed: _Homed, node: NodeId, request: NodeRequest, error: Exception) -> None:
        """A replica that could not even be asked for has ended; nothing else waits for an answer."""
        log.warning("Node %s refuses %s of job %s: %s", node, type(request).__name__, homed.launch.job, error)
        if isinstance(request, Spawn):
            for seat in request.seats:
                here = ReplicaHere(seat.replica, request.generation, 0, None, UNKNOWN_EXIT)
                self._carry_out(homed, homed.run.status(node, here, time.monotonic()))

    def _announce(self, event: Event) -> None:
        log.info("%s", event)
        self._publish(RunNews(time.time(), event))

    def _explained(self, homed: _Homed, event: Event) -> Event:
        """A failure with the last words of the replica that failed first, if they are at hand."""
        if not isinstance(event, JobFailed):
            return event
        for node, here in homed.failures:
            if here.exit_code == event.exit_code and node == self._node:
                if words := last_lines(Path(here.log), QUOTED_LINES):
                    return replace(event, reason=f"{event.reason} Last lines of {here.log}: {words}")
                break
        return event

    def _check_addresses(self, allocation: Allocation, addresses: Mapping[NodeId, str]) -> None:
        for node in allocation.gpus:
            if node != self._node and node not in addresses:
                raise InvalidSpec(
                    "addresses", dict(addresses), f"node {node!r} is missing", "Give host:port of its daemon"
                )

    def _learn_addresses(self, homed: _Homed, addresses: Mapping[NodeId, str]) -> None:
        homed.addresses = FrozenMap({**homed.addresses, **addresses})
        for node, remote in homed.remotes.items():
            remote.address = homed.addresses[node]


def _standing(here: ReplicaHere) -> object:
    """What of a replica's words changes the run; its step and its age do not."""
    status = here.status
    if status is None:
        return here.pid, here.exit_code
    return here.pid, here.exit_code, status.phase, status.generation, status.membership, status.has_state


def _told(allocation: Allocation) -> str:
    return ", ".join(f"{count} on {node}" for node, count in allocation.gpus.items())
