"""What a replica and the daemon of its node say to each other, over the daemon's local socket.

A replica tells how it stands: when that changes, every second, and anew after the daemon was restarted. The daemon
answers with instructions. Both sides go by the newest message alone, so that a lost connection loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from pollux.core import JobId, OfGeneration, checks, register
from pollux.errors import InvalidSpec


class ReplicaPhase(StrEnum):
    """How far a replica is."""

    STARTING = "starting"
    """Its script runs, and has not come to its first loop; also while it gathers with the others at the start."""
    READY = "ready"
    """A newcomer that waits to be told to join."""
    JOINING = "joining"
    """It gathers with the other members, and takes over the state if it has none."""
    TRAINING = "training"
    """It has finished a step as a member of that generation and membership."""
    WAITING = "waiting"
    """Others of its membership are out of reach: it keeps its state and waits to be told to join the next one."""
    LEAVING = "leaving"
    """It saves, hands over, or ends."""


@register
@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """How one replica stands. Also its first message on a connection, and its sign of life."""

    job: JobId
    replica: str
    """The name that the daemon gave it; unique in its job."""
    pid: int
    phase: ReplicaPhase
    generation: int
    membership: int
    step: int
    """Optimizer steps that its state holds."""
    has_state: bool
    """Whether its state is worth keeping: all but newcomers that have not been given any."""
    since_s: float
    """When it came to this phase: seconds since 1970 by the clock of its machine."""
    has_finished: bool = False
    """Its loop is over and saved: if it ends well now, the training is done, and nobody was given its state."""

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "job", self.job)
        checks.text(InvalidSpec, "replica", self.replica)
        checks.whole(InvalidSpec, "pid", self.pid, 1)
        checks.instance(InvalidSpec, "phase", self.phase, ReplicaPhase)
        checks.whole(InvalidSpec, "generation", self.generation, 1)
        checks.whole(InvalidSpec, "membership", self.membership, 0)
        checks.whole(InvalidSpec, "step", self.step, 0)
        checks.flag(InvalidSpec, "has_state", self.has_state)
        checks.flag(InvalidSpec, "has_finished", self.has_finished)
        checks.finite(InvalidSpec, "since_s", self.since_s, None)


@register
@dataclass(frozen=True, slots=True)
class Join(OfGeneration):
    """Become a member: at the next step that all agree on, or at once if the members before are out of reach."""

    membership: int
    rank: int
    size: int
    num_nodes: int
    store: str
    """host:port of the rendezvous store."""
    is_repair: bool = False
    """A member of the group before is lost: nothing can be agreed on in it any more."""
    takes_from_leaver: bool = False
    """None of the members has the state: a replica that leaves hands it over."""

    def __post_init__(self) -> None:
        OfGeneration.__post_init__(self)
        checks.whole(InvalidSpec, "membership", self.membership, 0)
        checks.whole(InvalidSpec, "size", self.size, 1)
        checks.whole(InvalidSpec, "rank", self.rank, 0)
        checks.whole(InvalidSpec, "num_nodes", self.num_nodes, 1)
        checks.text(InvalidSpec, "store", self.store)
        if self.rank >= self.size:
            raise InvalidSpec("rank", self.rank, f"not below size = {self.size}", "Count ranks from 0")

    @property
    def place(self) -> tuple[int, int]:
        """Instructions are newer by generation, then by membership."""
        return self.generation, self.membership


@register
@dataclass(frozen=True, slots=True)
class Leave(OfGeneration):
    """Not a member of that generation: end well at the step where the others join it."""

    membership: int = 0
    store: str = ""
    hands_over: bool = False
    """Before that, give the state to the members, none of which has it."""

    def __post_init__(self) -> None:
        OfGeneration.__post_init__(self)
        checks.whole(InvalidSpec, "membership", self.membership, 0)
        checks.text(InvalidSpec, "store", self.store, may_be_empty=True)

    @property
    def place(self) -> tuple[int, int]:
        """Instructions are newer by generation, then by membership."""
        return self.generation, self.membership


Instruction: TypeAlias = Join | Leave
