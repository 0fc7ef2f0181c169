"""From what a run has decided to orders, each given once, and again where it may have been lost.

Remembers which orders were given and which nodes are out of reach; none of it is saved, since after a recovery every
order is in doubt. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from pollux.core import NodeId
from pollux.node.members import Replica, SavedRun, places
from pollux.node.orders import ForgetJob, KillReplica, Order, SpawnOn, TellReplica
from pollux.wire.nodes import Seat
from pollux.wire.replicas import Instruction, Join, Leave, ReplicaPhase


class Dispatch:
    def __init__(self) -> None:
        self.away: set[NodeId] = set()
        """Nodes that no order reaches now."""
        self._spawned: set[str] = set()
        self._told: dict[str, Instruction] = {}
        self._killed: dict[str, int] = {}
        """By which signal."""

    def repeat(self, replica: Replica) -> None:
        """What it was told, or that it must end, may not have arrived."""
        self._told.pop(replica.name, None)
        self._killed.pop(replica.name, None)

    def respawn(self, replica: Replica) -> None:
        """It is not there, so that the order to start it was lost."""
        self._spawned.discard(replica.name)

    def was_never_started(self, replica: Replica) -> bool:
        return not (replica.is_known or replica.name in self._spawned or replica.node in self.away)

    def orders(self, run: SavedRun) -> Iterator[Order]:
        """What is to be done now. Whoever asks has to see to it."""
        if run.is_over:
            yield from self._forgets(run)
            return
        yield from self._spawns(run)
        for replica in run.replicas():
            if replica.is_gone or replica.node in self.away:
                continue
            # Those that save before they go may have to gather for it, and to know that before they are asked.
            if replica.signal != 9 and replica.is_known:
                yield from self._tell(replica, instruction_for(run, replica))
            yield from self._kill(replica)

    def _forgets(self, run: SavedRun) -> Iterator[Order]:
        for node in run.used:
            if node not in self.away:
                yield ForgetJob(node, run.issued)
        run.used = tuple(node for node in run.used if node in self.away)

    def _spawns(self, run: SavedRun) -> Iterator[Order]:
        seats: dict[tuple[NodeId, int], list[Seat]] = {}
        for replica in run.living():
            if not replica.signal and self.was_never_started(replica):
                seats.setdefault((replica.node, replica.generation), []).append(replica.seat)
                self._spawned.add(replica.name)
        for (node, generation), here in seats.items():
            yield SpawnOn(node, generation, tuple(here))

    def _kill(self, replica: Replica) -> Iterator[Order]:
        if replica.signal and self._killed.get(replica.name) != replica.signal:
            self._killed[replica.name] = replica.signal
            replica.is_asked |= replica.signal == 15
            yield KillReplica(replica.node, replica.name, replica.signal)

    def _tell(self, replica: Replica, instruction: Instruction | None) -> Iterator[Order]:
        if instruction is not None and self._told.get(replica.name) != instruction:
            self._told[replica.name] = instruction
            yield TellReplica(replica.node, replica.name, instruction)


def instruction_for(run: SavedRun, replica: Replica) -> Instruction | None:
    """What it has to know now; None if it does already, or need not know anything."""
    if replica in run.leavers:
        return Leave(run.job, run.generation, run.membership, run.store, replica.hands_over)
    if replica not in run.members:
        return None
    # The seats of a start say all that its first membership needs.
    was_seated = run.membership == 0 and not replica.seat.is_newcomer and replica.generation == run.generation
    has_heard = replica.at >= run.at and replica.phase not in (ReplicaPhase.STARTING, ReplicaPhase.READY)
    if was_seated or has_heard:
        return None
    return Join(
        run.job,
        run.generation,
        run.membership,
        rank=run.members.index(replica),
        size=len(run.members),
        num_nodes=places(run.members).num_nodes,
        store=run.store,
        is_repair=run.membership > 0,
        takes_from_leaver=run.takes_over,
    )
