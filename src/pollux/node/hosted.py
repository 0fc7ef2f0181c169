"""One replica as its node knows it, what of that outlives the daemon, and what it finds in its environment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pollux.core import FrozenMap, JobId
from pollux.errors import StaleGeneration
from pollux.node.devices import devices_of, gpu_type
from pollux.node.exit_codes import LEFT_AS_ASKED
from pollux.node.folder import last_lines
from pollux.node.processes import send_signal, start_ticks
from pollux.wire.credentials import ReplicaIdentity, credential, job_secret
from pollux.wire.frames import Peer
from pollux.wire.nodes import Launch, ReplicaHere, Seat
from pollux.wire.replicas import Instruction, ReplicaPhase, ReplicaStatus

QUOTED_LINES = 5
"""How much of a failed replica's log is its last words."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is remembered of a replica."""

    replica: str
    generation: int
    slot: int
    pid: int
    began: int
    """When the process began, in the kernel's own count: tells it from a later one with the same pid."""
    has_spoken: bool
    exit_code: int | None = None
    more_slots: tuple[int, ...] = ()
    """Of a plain command, beside `slot`."""
    is_plain: bool = False
    is_leaving: bool = False
    is_forgotten: bool = False
    has_unknown_end: bool = False
    may_have_finished: bool = False
    has_finished: bool = False
    """It has said that its training is done."""


@dataclass(slots=True)
class Hosted:
    """A replica here, from the request to start it until its job is forgotten."""

    job: JobId
    replica: str
    generation: int
    slots: tuple[int, ...]
    log: Path
    heard_at_s: float
    """When it last gave a sign of life; its silence counts from here."""
    is_plain: bool = False
    """A command that never says a word: its daemon speaks for it."""
    pid: int = 0
    """0: the keeper is at it."""
    began: int = 0
    has_spoken: bool = False
    exit_code: int | None = None
    has_unknown_end: bool = False
    """It has ended and nobody saw how, or never began."""
    may_have_finished: bool = False
    """Of an unknown end: its work may have been done."""
    has_finished: bool = False
    """It has said that its training is done; known also to the next daemon, unlike `status`."""
    status: ReplicaStatus | None = None
    link: Peer | None = None
    told: Instruction | None = None
    """The newest one; heard again by a replica that comes back."""
    pending_signal: int = 0
    """To be sent as soon as it has a pid."""
    is_leaving: bool = False
    """It got its signal 15, or gets it as soon as it has a pid: no second one is for it."""
    is_forgotten: bool = False
    """It was killed with all that is left of its job here, and is listed until it has ended."""
    is_hung: bool = False
    is_orphan: bool = False
    """Its keeper is gone: nobody will tell its exit code."""
    last_words: str = ""

    @property
    def tag(self) -> str:
        """Its name with the keeper."""
        return f"{self.job}/{self.replica}"

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None and not self.has_unknown_end

    @property
    def here(self) -> ReplicaHere:
        return ReplicaHere(
            self.replica,
            self.generation,
            self.pid,
            self.status,
            self.exit_code,
            str(self.log),
            self.last_words,
            self.has_unknown_end,
            self.may_have_finished,
        )

    @property
    def is_giving_way(self) -> bool:
        """It hands its state over, or ends as others take its place."""
        return self.status is not None and self.status.phase is ReplicaPhase.LEAVING

    def note(self, instruction: Instruction) -> None:
        """Keep it as the newest one; `StaleGeneration` if a later one is known."""
        if self.told is not None and instruction.place < self.told.place:
            raise StaleGeneration(self.job, instruction.generation, self.told.generation)
        self.told = instruction

    @property
    def record(self) -> Record:
        slot, *more = self.slots
        return Record(
            self.replica,
            self.generation,
            slot,
            self.pid,
            self.began,
            self.has_spoken,
            self.exit_code,
            tuple(more),
            self.is_plain,
            self.is_leaving and self.pid > 0,  # else it has not got its signal yet, and may never
            self.is_forgotten,
            self.has_unknown_end,
            self.may_have_finished,
            self.has_finished,
        )

    def begin(self, pid: int) -> None:
        """It is that process. A plain command is then as far as a replica that trains."""
        self.pid, self.began = pid, start_ticks(pid)
        if self.is_plain:
            phase, now_s = ReplicaPhase.TRAINING, time.time()
            self.status = ReplicaStatus(self.job, self.replica, pid, phase, self.generation, 0, 0, True, now_s)

    def note_end(self, exit_code: int) -> None:
        """It has ended. Of one that ended badly, the end of its log is kept.

        A plain command has its own way to leave when it is asked to, and that may well be 0: it was not its end.
        """
        self.exit_code = LEFT_AS_ASKED if self.is_plain and self.is_leaving and exit_code == 0 else exit_code
        if self.exit_code not in (0, LEFT_AS_ASKED):
            self.last_words = self.last_words or last_lines(self.log, QUOTED_LINES)

    def note_unknown_end(self, *, may_have_finished: bool) -> None:
        """It is not there, and nobody knows its exit code, or it has none as it never began."""
        self.has_unknown_end, self.may_have_finished = True, may_have_finished
        self.last_words = self.last_words or last_lines(self.log, QUOTED_LINES)

    def send(self, number: int) -> None:
        """To its process; to those that a plain command has started as well, for they know nothing of each other."""
        send_signal(self.pid, number, to_session=self.is_plain)


@dataclass(frozen=True, slots=True)
class Told:
    """What all replicas on a node are told alike."""

    socket: str
    token: str = field(repr=False)
    """Of the cluster: what replicas are given is made from it."""
    heartbeat_s: float = 1.0
    devices: tuple[str, ...] = ()
    """GPUs of this node, by slot."""
    gpu_type: str = ""
    """What its slots are called instead of what they are; empty: what the driver says."""
    extra: FrozenMap[str, str] = field(default_factory=FrozenMap)
    """Variables that the daemon was told to hand on. A launch may have its own, but not of those of Pollux."""
    inherited: FrozenMap[str, str] = field(default_factory=FrozenMap, repr=False)
    """What all jobs find of the daemon's environment."""

    def variables(
        self, launch: Launch, seat: Seat, generation: int, slot: int, num_here: int, store: str
    ) -> dict[str, str]:
        """What a replica finds in its environment, in addition to the launch's variables and those it inherits."""
        told = {
            "RANK": str(seat.rank),
            "WORLD_SIZE": str(seat.size),
            "LOCAL_RANK": str(slot),
            "LOCAL_WORLD_SIZE": str(num_here),
            "GROUP_WORLD_SIZE": str(seat.num_nodes),
            "POLLUX_JOB": launch.job,
            "POLLUX_GENERATION": str(generation),
            "POLLUX_REPLICA": seat.replica,
            "POLLUX_SOCKET": self.socket,
            "POLLUX_CREDENTIAL": credential(self.token, ReplicaIdentity(launch.job, seat.replica)),
            "POLLUX_JOB_SECRET": job_secret(self.token, launch.job),
            "POLLUX_STORE": store,
            "POLLUX_HEARTBEAT_S": f"{self.heartbeat_s:g}",
            "PYTHONUNBUFFERED": "1",
        }
        if self.gpu_type or self.devices:
            told["POLLUX_GPU_TYPE"] = self.gpu_type or gpu_type(self.devices)
        if seat.is_newcomer:
            told["POLLUX_NEWCOMER"] = "1"
        if launch.checkpoint_dir:
            told["POLLUX_CHECKPOINT_DIR"] = launch.checkpoint_dir
        if "OMP_NUM_THREADS" not in {**self.inherited, **launch.environment, **self.extra}:
            told["OMP_NUM_THREADS"] = "1"  # else each replica takes all cores of the node
        return {**self._extra_beside(launch), **told}

    def plain_variables(self, launch: Launch, slots: Sequence[int]) -> dict[str, str]:
        """The same for a plain command: nothing that would let it talk to the daemon."""
        told = {"POLLUX_JOB": launch.job, "PYTHONUNBUFFERED": "1"}
        if self.gpu_type:
            told["POLLUX_GPU_TYPE"] = self.gpu_type
        if launch.checkpoint_dir:
            told["POLLUX_CHECKPOINT_DIR"] = launch.checkpoint_dir
        if self.devices:
            told["CUDA_VISIBLE_DEVICES"] = devices_of(slots, self.devices)
        elif "OMP_NUM_THREADS" not in {**self.inherited, **launch.environment, **self.extra}:
            told["OMP_NUM_THREADS"] = str(len(slots))
        return {**self._extra_beside(launch), **told}

    def _extra_beside(self, launch: Launch) -> dict[str, str]:
        """Those that this launch does not set itself, and all that are Pollux's: they say what the cluster is."""
        own = {name for name in launch.environment if not name.startswith("POLLUX_")}
        return {name: value for name, value in self.extra.items() if name not in own}
