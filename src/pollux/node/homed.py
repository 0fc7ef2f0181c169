"""One job that has its home here: its `JobRun`, the connections to its nodes, and its file run.json.

What happens is handed to the run; the run is saved; then its orders are carried out. So a daemon that is killed at any
moment goes on from the file, and asks the nodes what is really there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pollux.core import (
    Event,
    FrozenMap,
    JobId,
    NodeId,
    dumps,
    loads,
    register,
)
from pollux.errors import PolluxError
from pollux.node.folder import StateFolder, write
from pollux.node.hosting import Hosting
from pollux.node.members import SavedRun
from pollux.node.orders import Announce, ForgetJob, KillReplica, Order, SpawnOn, TellReplica
from pollux.node.remote import RemoteNode
from pollux.node.run import JobRun, RunOptions
from pollux.wire.nodes import Forget, Kill, Launch, NodeNews, NodeRequest, ReplicaHere, Spawn, Tell
from pollux.wire.replicas import Join

log = logging.getLogger(__name__)


@register
@dataclass(frozen=True, slots=True)
class SavedHome:
    """What run.json holds."""

    launch: Launch
    addresses: FrozenMap[NodeId, str]
    fingerprint: str
    """Of the code that the replicas run."""
    run: SavedRun
    experience: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the jobs of a home have in common."""

    folder: StateFolder
    node: NodeId
    """Where this is."""
    hosting: Hosting
    announce: Callable[[Event], None]
    hear: Callable[[NodeNews], None]
    """What the daemons of other nodes tell goes here."""
    options: RunOptions


class HomedJob:
    """A job at home here. Whoever changes it from a request holds `changing`; news may come at any time."""

    def __init__(
        self, around: Surroundings, run: JobRun, launch: Launch, addresses: FrozenMap[NodeId, str], fingerprint: str
    ) -> None:
        self.run = run
        self.launch = launch
        self.fingerprint = fingerprint
        self.experience = ""
        """What the first replica is told of other jobs of its kind: see `RunJob`."""
        self.changing = asyncio.Lock()
        self.saved: SavedHome | None = None
        self._is_unsaved = False
        """It could not be written; tried again with each word of a replica."""
        self._around = around
        self._addresses = addresses
        self._remotes: dict[NodeId, RemoteNode] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._heard: dict[str, object] = {}
        """How each replica stood when it last said something new."""

    @classmethod
    def restored(cls, around: Surroundings, job: JobId) -> HomedJob:
        """As its file says; `PolluxError` if that cannot be read."""
        saved = loads(around.folder.run_file(job).read_bytes(), SavedHome)
        run = JobRun.restored(saved.run, around.options)
        homed = cls(around, run, saved.launch, saved.addresses, saved.fingerprint)
        homed.saved, homed.experience = saved, saved.experience
        return homed

    @property
    def job(self) -> JobId:
        return self.launch.job

    def is_another(self, launch: Launch) -> bool:
        """Whether that launch is of another job with the same id."""
        return "" not in (self.launch.submission, launch.submission) and self.launch.submission != launch.submission

    @property
    def addresses(self) -> FrozenMap[NodeId, str]:
        """Of the daemons of its other nodes."""
        return self._addresses

    def learn_addresses(self, addresses: Mapping[NodeId, str]) -> None:
        self._addresses = FrozenMap({**self._addresses, **addresses})
        for node, remote in self._remotes.items():
            remote.address = self._addresses[node]

    def begin(self, launch: Launch, fingerprint: str) -> None:
        """Another run of the job starts, with this code."""
        self.launch, self.fingerprint = launch, fingerprint
        self._heard.clear()

    def find_nodes(self) -> None:
        """After a recovery: ask the nodes of the run what is there."""
        around = self._around
        for node in self.run.nodes - {around.node}:
            self._remote(node, is_there=False)
        if around.node in self.run.nodes:
            self._node_back(around.node, around.hosting.replicas(self.job))

    def lose_home(self) -> None:
        """After a restart of this machine, before `find_nodes`: what the run had here is gone."""
        self.carry_out(self.run.node_lost(self._around.node, time.monotonic()))

    def hear(self, node: NodeId, here: ReplicaHere) -> None:
        """A replica said something, or ended."""
        orders = self.run.status(node, here, time.monotonic())
        standing = _standing(here)
        if orders or self._heard.get(here.replica) != standing:
            self._heard[here.replica] = standing
            self.carry_out(orders)
        else:  # a sign of life, nothing worth saving, unless it could not be saved before
            if self._is_unsaved:
                self._save()
            self._set_timer()

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Save the run, then do what it wants done."""
        if self.run.is_over:
            self.experience = ""  # nobody is left to tell
        self._save()
        job = self.job
        for order in orders:
            match order:
                case Announce(event):
                    self._around.announce(event)
                case SpawnOn(node, generation, seats):
                    told = self._told(any(seat.rank == 0 for seat in seats))
                    self._send(node, Spawn(job, generation, self.launch, seats, self.run.store, told))
                case TellReplica(node, replica, instruction):
                    told = self._told(isinstance(instruction, Join) and instruction.rank == 0)
                    self._send(node, Tell(job, replica, instruction, told))
                case KillReplica(node, replica, number):
                    self._send(node, Kill(job, replica, number))
                case ForgetJob(node, generation):
                    self._send(node, Forget(job, generation))
        self._set_timer()
        if self.run.is_over:
            for node in self._remotes.keys() - self.run.nodes:
                self._remotes[node].finish()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for remote in self._remotes.values():
            remote.close()

    def _told(self, is_to_first: bool) -> str | None:
        """Only the first replica has a tuner, whichever node it is on."""
        return self.experience if is_to_first else None

    def _save(self) -> None:
        saved = SavedHome(self.launch, self._addresses, self.fingerprint, self.run.saved(), self.experience)
        if saved == self.saved and not self._is_unsaved:
            return
        self.saved = saved
        try:
            write(self._around.folder.run_file(self.job), dumps(saved), is_durable=True)
            self._is_unsaved = False
        except OSError as error:  # training is worth more than the way back to it
            self._is_unsaved = True
            log.error("Job %s cannot be saved, and is lost if this daemon ends: %s", self.job, error)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline_s := self.run.next_deadline_s) is not None:
            pause_s = max(0.0, deadline_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(pause_s, self.tick)

    def tick(self) -> None:
        """Time has passed, or something outside of the run has changed."""
        self.carry_out(self.run.tick(time.monotonic()))

    def _send(self, node: NodeId, request: Spawn | Tell | Kill | Forget) -> None:
        if node != self._around.node:
            self._remote(node).send(request)
            return
        hosting = self._around.hosting
        try:
            match request:
                case Spawn():
                    hosting.spawn(request)
                case Tell():
                    hosting.tell(request)
                case Kill(job, replica, number):
                    hosting.kill(job, replica, number)
                case Forget(job, generation):
                    hosting.forget(job, generation)
        except (PolluxError, OSError) as error:
            asyncio.get_running_loop().call_soon(self._refused, node, request, error)

    def _remote(self, node: NodeId, *, is_there: bool = True) -> RemoteNode:
        remote = self._remotes.get(node)
        if remote is None or remote.is_closed:
            remote = self._remotes[node] = RemoteNode(
                self.job,
                node,
                self._addresses[node],
                self._around.folder.token,
                on_gone=lambda node: self.carry_out(self.run.node_gone(node, time.monotonic())),
                on_back=self._node_back,
                on_news=self._around.hear,
                on_refused=self._refused,
                is_there=is_there,
            )
        return remote

    def _node_back(self, node: NodeId, replicas: Sequence[ReplicaHere]) -> None:
        self.carry_out(self.run.node_back(node, replicas, time.monotonic()))

    def _refused(self, node: NodeId, request: NodeRequest, error: Exception) -> None:
        """A replica that could not even be asked for has ended; nothing else waits for an answer."""
        log.warning("Node %s refuses %s of job %s: %s", node, type(request).__name__, self.job, error)
        if isinstance(request, Spawn):
            for seat in request.seats:
                why = f"Its node refuses it: {error}"
                self.hear(
                    node,
                    ReplicaHere(seat.replica, request.generation, 0, None, None, "", why, has_unknown_end=True),
                )


def _standing(here: ReplicaHere) -> object:
    """What of a replica's words changes the run; its step and its age do not."""
    status = here.status
    if status is None:
        return here.pid, here.exit_code, here.has_unknown_end
    said = status.phase, status.generation, status.membership, status.has_state
    return here.pid, here.exit_code, here.has_unknown_end, *said
