"""One replica as its node knows it, what of that outlives the daemon, and what it finds in its environment."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pollux.core import JobId
from pollux.errors import StaleGeneration
from pollux.wire import Peer
from pollux.wire.nodes import Launch, ReplicaHere, Seat
from pollux.wire.replicas import Instruction, ReplicaStatus


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


@dataclass(slots=True)
class Hosted:
    """A replica here, from the request to start it until its job is forgotten."""

    job: JobId
    replica: str
    generation: int
    slot: int
    log: Path
    heard_at_s: float
    """When it last gave a sign of life; its silence counts from here."""
    pid: int = 0
    """0: the keeper is at it."""
    began: int = 0
    has_spoken: bool = False
    exit_code: int | None = None
    status: ReplicaStatus | None = None
    link: Peer | None = None
    told: Instruction | None = None
    """The newest one; heard again by a replica that comes back."""
    pending_signal: int = 0
    """To be sent as soon as it has a pid."""
    is_leaving: bool = False
    """It got its signal 15; a second one would end it at once."""
    is_hung: bool = False
    is_orphan: bool = False
    """Its keeper is gone: nobody will tell its exit code."""

    @property
    def tag(self) -> str:
        """Its name with the keeper."""
        return f"{self.job}/{self.replica}"

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def here(self) -> ReplicaHere:
        return ReplicaHere(self.replica, self.generation, self.pid, self.status, self.exit_code, str(self.log))

    def note(self, instruction: Instruction) -> None:
        """Keep it as the newest one; `StaleGeneration` if a later one is known."""
        if self.told is not None and instruction.place < self.told.place:
            raise StaleGeneration(self.job, instruction.generation, self.told.generation)
        self.told = instruction

    @property
    def record(self) -> Record:
        return Record(self.replica, self.generation, self.slot, self.pid, self.began, self.has_spoken, self.exit_code)


def is_running(pid: int, began: int) -> bool:
    """Whether the process of that number is still the one that began then."""
    return pid > 0 and began_at(pid) == began


def began_at(pid: int) -> int:
    """When a process began, in the kernel's ticks; 0: there is none, it has ended, or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def send_signal(pid: int, number: int, *, whole_session_only: bool = False) -> None:
    """To the process; 9 to everything in its session as well: what it started must not outlive it."""
    with suppress(ProcessLookupError, PermissionError):
        if pid > 0 and number == signal.SIGKILL:
            os.killpg(pid, number)
    with suppress(ProcessLookupError, PermissionError):
        if pid > 0 and not whole_session_only:
            os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class Told:
    """What all replicas on a node are told alike."""

    socket: str
    token_file: str
    heartbeat_s: float = 1.0

    def variables(
        self, launch: Launch, seat: Seat, generation: int, slot: int, num_here: int, store: str
    ) -> dict[str, str]:
        """What a replica finds in its environment, in addition to the launch's variables and the daemon's."""
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
            "POLLUX_TOKEN_FILE": self.token_file,
            "POLLUX_STORE": store,
            "POLLUX_HEARTBEAT_S": f"{self.heartbeat_s:g}",
            "PYTHONUNBUFFERED": "1",
        }
        if seat.is_newcomer:
            told["POLLUX_NEWCOMER"] = "1"
        if launch.checkpoint_dir:
            told["POLLUX_CHECKPOINT_DIR"] = launch.checkpoint_dir
        if "OMP_NUM_THREADS" not in {**os.environ, **launch.environment}:
            told["OMP_NUM_THREADS"] = "1"  # else each replica takes all cores of the node
        return told
