"""What a `JobRun` wants done. Its daemon carries the orders out in their sequence, after it has saved the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pollux.core import Event, NodeId
from pollux.wire.nodes import Seat
from pollux.wire.replicas import Instruction


@dataclass(frozen=True, slots=True)
class SpawnOn:
    """Start these replicas there; those that are there already are left alone."""

    node: NodeId
    generation: int
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class TellReplica:
    """Hand it the instruction, now and whenever it comes back to its daemon."""

    node: NodeId
    replica: str
    instruction: Instruction


@dataclass(frozen=True, slots=True)
class KillReplica:
    """15: save and leave; given again if it may be lost, and the replica's node knows whether it was. 9: end."""

    node: NodeId
    replica: str
    signal: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell those who watch the job."""

    event: Event


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """The job is over up to that generation: end what is left of it there, and drop its exit codes."""

    node: NodeId
    generation: int


Order: TypeAlias = SpawnOn | TellReplica | KillReplica | Announce | ForgetJob
