"""What is known of a job's replicas and decided about them. All of it is saved with the run; nothing here acts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from pollux.core import Allocation, Event, FrozenMap, JobId, NodeId, register
from pollux.node.exit_codes import LEFT_AS_ASKED
from pollux.wire.nodes import ReplicaHere, Seat
from pollux.wire.replicas import ReplicaPhase, ReplicaStatus


@dataclass(slots=True, eq=False)
class Replica:
    """One process of the job. Its name is never given to another one."""

    node: NodeId
    generation: int
    """That it was started for."""
    seat: Seat
    is_known: bool = False
    """Its node has told of it."""
    status: ReplicaStatus | None = None
    is_gone: bool = False
    exit_code: int | None = None
    """None although it is gone: it was lost with its node, or has an unknown end."""
    has_unknown_end: bool = False
    """It has ended where nobody saw how, or never began."""
    has_begun: bool = True
    may_have_finished: bool = False
    """Of an unknown end: its work may have been done."""
    signal: int = 0
    """What it must end by: 9, 15, or 0 for nothing."""
    is_asked: bool = False
    """15 was ordered."""
    hands_over: bool = False
    """It leaves, and no member has the state before it has given it away."""
    answered: tuple[int, ...] = ()
    """The generation and membership in which it was waiting when it was last given a new one."""
    quote: str = ""
    """If it ended badly: what its log says last."""

    @property
    def name(self) -> str:
        return self.seat.replica

    @property
    def at(self) -> tuple[int, int]:
        """The generation and membership that it last spoke of."""
        return (0, 0) if self.status is None else (self.status.generation, self.status.membership)

    @property
    def phase(self) -> ReplicaPhase | None:
        """As it last said; None of one that has said nothing or is gone."""
        return None if self.status is None or self.is_gone else self.status.phase

    @property
    def is_ready(self) -> bool:
        return self.phase is ReplicaPhase.READY

    @property
    def is_held_up(self) -> bool:
        """It waits for a membership that it has not been given yet."""
        return self.phase is ReplicaPhase.WAITING and self.at != self.answered

    @property
    def holds_state(self) -> bool:
        """Whether its state is worth keeping, as far as is known. What a start builds or loads is."""
        return not self.seat.is_newcomer or (self.status is not None and self.status.has_state)

    @property
    def ended_well(self) -> bool:
        return self.is_gone and self.exit_code == 0

    @property
    def has_finished(self) -> bool:
        """It has ended, and the training with it. Who hands the state over ends well, too, but never says that."""
        return self.ended_well and self.status is not None and self.status.has_finished

    @property
    def has_saved(self) -> bool:
        """It has ended after it saved the state, whether it was asked to or nobody took the state over."""
        return self.is_gone and self.exit_code == LEFT_AS_ASKED

    @property
    def left_as_asked(self) -> bool:
        """It was asked to save and leave, and has done so."""
        return self.is_asked and self.has_saved

    @property
    def ended_unseen(self) -> bool:
        """It may have finished, and nobody knows."""
        return self.is_gone and self.has_unknown_end and self.may_have_finished

    @property
    def ended_badly(self) -> bool:
        return self.is_gone and not self.ended_well and not self.left_as_asked and not self.ended_unseen

    def learn(self, here: ReplicaHere) -> None:
        """Take over what its node says. Nothing comes after its end."""
        if self.is_gone:
            return
        self.status = here.status or self.status
        self.is_known = True
        if here.has_ended:
            self.is_gone, self.exit_code = True, here.exit_code
            self.has_unknown_end, self.may_have_finished = here.has_unknown_end, here.may_have_finished
            self.has_begun = here.pid > 0
            source = f"Last lines of {here.log}: " if here.log else ""
            self.quote = here.last_words and f"{source}{here.last_words}"

    def end_by(self, signal: int) -> None:
        """It must go. Nothing takes back a 9, nor a 15 but a 9."""
        if not self.is_gone and signal and self.signal != 9:
            self.signal = signal

    def obituary(self) -> str:
        if self.has_unknown_end and not self.has_begun:
            return f"replica {self.name} on node {self.node} was not started"
        if self.has_unknown_end:
            how = "ended while nobody watched" if self.may_have_finished else "was killed with those who watched it"
            return f"replica {self.name} on node {self.node} {how}; its exit code is unknown"
        if self.exit_code is None:
            return f"replica {self.name} was lost with node {self.node}"
        how = f"with exit code {self.exit_code}" if self.exit_code >= 0 else f"by signal {-self.exit_code}"
        return f"replica {self.name} on node {self.node} ended {how}"

    def reason(self) -> str:
        """Its obituary, and what it said itself."""
        return f"{self.obituary()}. {self.quote}" if self.quote else self.obituary()


@dataclass(frozen=True, slots=True)
class NextGeneration:
    """A resize in place that gets ready while the present generation trains."""

    generation: int
    allocation: Allocation
    newcomers: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A generation that starts when all replicas of the one before are gone."""

    generation: int
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str
    exit_code: int | None
    may_retry: bool = True


@register
@dataclass(slots=True)
class SavedRun:
    """A job's run. Holds no time: what waits for a deadline waits anew after a recovery."""

    job: JobId
    store: str = ""
    issued: int = 0
    """The highest generation that was asked for."""
    requested: Allocation = field(default_factory=Allocation)
    """What was asked for with it."""
    num_started: int = 0
    """Replicas so far."""
    used: tuple[NodeId, ...] = ()
    """Nodes that have to forget the job when it is over."""

    generation: int = 0
    membership: int = 0
    allocation: Allocation = field(default_factory=Allocation)
    """What this generation was asked to be."""
    members: tuple[Replica, ...] = ()
    """In order of their ranks; those that ended stay until the next membership."""
    leavers: tuple[Replica, ...] = ()
    """Of the generation before, told to leave as this one takes over."""
    takes_over: bool = False
    """When this membership was formed, none of its members had the state: a leaver hands it over."""
    formed_with: str = ""
    """The store that this membership gathers in."""

    next: NextGeneration | None = None
    doomed: tuple[Replica, ...] = ()
    """Newcomers of abandoned generations."""
    abandoned: FrozenMap[int, str] = field(default_factory=FrozenMap)
    """Generations that are announced as abandoned when their newcomers are gone, and why."""

    is_closing: bool = False
    """All replicas are to go, or have gone by themselves."""
    target: Target | None = None
    stopped_as: int = 0
    """The generation that a stop named; 0: nobody asked for one."""
    is_finished: bool = False
    failure: Failure | None = None
    """The first bad end of a replica since all members trained."""

    ready: int = 0
    """The generation that was last announced as ready."""
    announced: Allocation = field(default_factory=Allocation)
    """What trains, as announced."""
    standing: tuple[Event, ...] = ()
    """Announcements that still hold."""
    is_over: bool = True

    @property
    def at(self) -> tuple[int, int]:
        return self.generation, self.membership

    @property
    def newest(self) -> int:
        """The highest generation that has replicas or is to have some."""
        waiting = (later.generation for later in (self.next, self.target) if later is not None)
        return 0 if self.is_over else max((self.generation, *waiting))

    @property
    def newcomers(self) -> tuple[Replica, ...]:
        return () if self.next is None else self.next.newcomers

    def copied(self) -> SavedRun:
        """With replicas of its own: all else in it is never changed, only replaced."""
        upcoming = self.next and replace(self.next, newcomers=_copied(self.next.newcomers))
        members, leavers, doomed = _copied(self.members), _copied(self.leavers), _copied(self.doomed)
        return replace(self, members=members, leavers=leavers, doomed=doomed, next=upcoming)

    def replicas(self) -> Iterator[Replica]:
        yield from self.members
        yield from self.leavers
        yield from self.newcomers
        yield from self.doomed

    def living(self) -> list[Replica]:
        return [replica for replica in self.replicas() if not replica.is_gone]

    def find(self, name: str) -> Replica | None:
        return next((replica for replica in self.replicas() if replica.name == name), None)

    @property
    def trains(self) -> bool:
        """All members have finished a step of this membership, and none says that it is over."""
        return bool(self.members) and all(self.is_training(member) for member in self.members)

    def is_training(self, member: Replica) -> bool:
        return member.phase is ReplicaPhase.TRAINING and member.at == self.at


def _copied(replicas: Iterable[Replica]) -> tuple[Replica, ...]:
    return tuple(copy.copy(replica) for replica in replicas)


def places(replicas: Iterable[Replica]) -> Allocation:
    """How many of them are on each node."""
    return Allocation.of(Counter(replica.node for replica in replicas))


def split(members: Iterable[Replica], allocation: Allocation) -> tuple[list[Replica], list[Replica]]:
    """Those who stay and those who leave: each node keeps the lowest ranks that the allocation has room for there."""
    stayers: list[Replica] = []
    leavers: list[Replica] = []
    room = dict(allocation.gpus)
    for member in members:
        stays = room.get(member.node, 0) > 0
        room[member.node] = room.get(member.node, 0) - 1
        (stayers if stays else leavers).append(member)
    return stayers, leavers
