"""Whom this replica trains with, and how that changes while it trains.

A node daemon names the members; the replicas find each other in the job's store. A planned change happens at a step
that all agree on (`StepAgreement`). When a member is lost, the group's connections are cut, so that nobody waits for
it, and each survivor joins the next membership as soon as it notices. Either way one procedure follows: gather, let
those who lack the state take it from one who is furthest, make the new group.

Alone and under torchrun there is no daemon: the members stay, and a lost one is an error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pollux.agent.agreement import StepAgreement
from pollux.agent.environment import Environment
from pollux.agent.link import Link
from pollux.agent.rendezvous import Card, Made, Rendezvous, is_connection_loss, leave_group
from pollux.agent.replicas import Replicas, device_of
from pollux.agent.transfer import Giver, take
from pollux.core import JobId
from pollux.errors import LoopMisuse, Temporary
from pollux.wire.messages import AgentReport
from pollux.wire.replicas import Instruction, Join, Leave, ReplicaPhase

log = logging.getLogger(__name__)

MOST_FAILED_TAKES = 3
"""So often a newcomer tries to take the state over; then it ends, and the others train on without it."""

HANDOVER_S = 300.0
"""How long a replica that leaves waits for those who are to take its state."""


class Left(Exception):  # noqa: N818 - nothing is wrong
    """This replica is no member any more. If it was to hand over its state and could not, that is still here."""

    def __init__(self, has_state_to_save: bool) -> None:
        super().__init__(has_state_to_save)
        self.has_state_to_save = has_state_to_save


class Holder(Protocol):
    """Who has the training state."""

    @property
    def step(self) -> int: ...
    @property
    def is_inside(self) -> bool:
        """Whether the script is in its loop over the loader."""
        ...

    def small(self) -> dict[str, Any]:
        """What members may disagree on after a loss."""
        ...

    def full(self) -> dict[str, Any]:
        """All that a newcomer needs."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """What another membership means for this replica."""

    is_repair: bool
    state: dict[str, Any] | None = None
    """To go on from; None: from its own."""
    is_full: bool = False
    is_shared: bool = True
    """All members have the same state now; else they have all just begun, each with weights of its own."""


class Membership:
    """This replica's place in the job, by the word of its node's daemon."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.has_state = False
        """Its state is that of the job: it has trained, or started together with the others, or was given it."""
        self._link: Link | None = None
        self._rendezvous: Rendezvous | None = None
        self._replaced: list[Rendezvous] = []
        """At stores that were lost since."""
        self._made: Made | None = None
        self._agreement: StepAgreement | None = None
        self._is_fresh = True
        """No step was finished as this membership yet."""
        self._sums = 0
        self._last_sum: list[float] = []
        self._missed_sum: list[float] | None = None
        self.on_lost: Callable[[], None] = lambda: self._regroup_with_nothing()
        """Regroups; called where the replicas come together outside of steps."""
        self.on_lost_in_body: Callable[[], bool] = lambda: False
        """True: the body of the loop runs, in which nobody can regroup, and the loss is noted for its end."""
        self.is_asked_to_leave: Callable[[], bool] = lambda: False
        """Whether this process got a signal to save and end."""
        self.has_finished = False
        """The script's loop is over, and saved."""
        self.has_left = False
        """Nobody waits for this replica any more: it leaves as told, or all leave together."""
        self._failed_takes = 0
        self._thanks: Join | None = None
        """By what a leaver hears that its state is not needed any more."""
        if not environment.is_managed:
            self.replicas = Replicas.join(environment)
            self.replicas.generation = environment.generation
            return
        if dist.is_initialized():
            raise LoopMisuse(
                "the script made a process group before Job(…), and under Pollux its members change",
                "Leave init_process_group to the job",
            )
        self.replicas = Replicas(environment.rank, environment.size, environment.num_nodes, device_of(environment))
        self.replicas.generation = environment.generation
        self.replicas.is_member = not environment.is_newcomer
        self._link = Link(
            environment.socket or "",
            environment.credential,
            JobId(environment.job),
            environment.replica,
            environment.heartbeat_s,
        )
        self._link.on_repair = self._cut
        self._link.on_instruction = self._tell_that_it_knows
        self._tell(ReplicaPhase.STARTING, 0)
        if not environment.is_newcomer:
            self._gather_at_the_start()

    def _gather_at_the_start(self) -> None:
        environment = self._environment
        assert environment.store is not None
        first = Join(
            JobId(environment.job),
            environment.generation,
            0,
            environment.rank,
            environment.size,
            environment.num_nodes,
            environment.store,
        )
        if self._try_join(first, NOTHING) is None:
            self._regroup_with_nothing()

    def _regroup_with_nothing(self) -> None:
        self.regroup(NOTHING, is_planned=False)

    # Told and asked

    @property
    def is_managed(self) -> bool:
        return self._link is not None

    @property
    def post(self) -> Callable[[AgentReport], None] | None:
        """How reports reach the daemon, if there is one."""
        return self._link.post if self._link is not None else None

    @property
    def place(self) -> tuple[int, int]:
        return self.replicas.generation, self.replicas.membership

    @property
    def is_pending(self) -> bool:
        """The daemon has named other members."""
        return self._link is not None and self._link.newest is not None and self._is_newer(self._link.newest)

    def _is_newer(self, instruction: Instruction) -> bool:
        return instruction.place > self.place

    def _tell(self, phase: ReplicaPhase, step: int) -> None:
        if self._link is not None:
            has_state = self.has_state or self.replicas.is_member
            self._link.tell(phase, *self.place, step, has_state, self.has_finished)

    def is_switch_due(self, step: int) -> bool:
        """After a step, while other members are pending: whether all switch here."""
        instruction = self._link.newest if self._link is not None else None
        if instruction is None or not self._is_newer(instruction):
            return False
        if self.replicas.size == 1 or (isinstance(instruction, Join) and instruction.is_repair):
            return True
        try:
            if self._agreement is None or self._agreement.instruction != instruction:
                store = self._rendezvous_at(instruction.store).store
                self._agreement = StepAgreement(store, instruction, self.replicas.rank, self.replicas.size)
            return self._agreement.is_due(step)
        except (RuntimeError, Temporary) as error:
            if isinstance(error, RuntimeError) and not is_connection_loss(error):
                raise
            log.warning("the store at %s does not answer: %s", instruction.store, error)
            return False

    def _tell_that_it_knows(self, instruction: Instruction) -> None:
        """In the link's thread: from now on this member looks after every step. Saves the others a step of waiting."""
        rendezvous, replicas = self._rendezvous, self.replicas
        if replicas.size == 1 or not replicas.is_member or rendezvous is None:
            return
        if rendezvous.address == instruction.store:
            StepAgreement(rendezvous.store, instruction, replicas.rank, replicas.size).tell()

    def trained(self, step: int) -> None:
        """A step is finished."""
        if self._is_fresh:
            self._is_fresh = False
            self._tell(ReplicaPhase.TRAINING, step)
            self._thank()  # not before: had nobody got this far, the leaver would be called back

    def _thank(self) -> None:
        """Let the leaver go that this replica has the state from."""
        if self._thanks is not None:
            with suppress(Temporary):  # the store is gone; the leaver ends by its own patience
                self._rendezvous_at(self._thanks.store).tell_taken(self._thanks)
            self._thanks = None

    def beat(self, step: int) -> None:
        """Now and then, while it trains."""
        self._tell(ReplicaPhase.TRAINING, step)

    # Losses

    def is_loss(self, error: BaseException) -> bool:
        """Whether it means that other members are out of reach, and that there is a way out."""
        return self.is_managed and is_connection_loss(error)

    def _cut(self, join: Join) -> None:
        """In the link's thread: a member is lost, so that nothing more will come of the group."""
        if self._rendezvous is not None:
            self._rendezvous.cut(join.place)
        if self._made is not None:
            self._made.sockets.cut()  # made in a store that was replaced since

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum over all members, outside of steps; goes on with the survivors where members are lost.

        A member that got the result just before another one was lost carries it to those who did not.
        """
        if not self.is_managed:
            return self.replicas.sum(vector)
        while True:
            try:
                total = self.replicas.sum(vector.clone())
                break
            except RuntimeError as error:
                if not self.is_loss(error):
                    raise
            if self.on_lost_in_body():
                log.warning("replicas were lost while a sum was taken: it is that of this replica alone")
                total = vector
                break
            self.on_lost()
            if self._missed_sum is not None:
                total = torch.tensor(self._missed_sum, dtype=vector.dtype, device=vector.device)
                self._missed_sum = None
                break
        self._sums += 1
        self._last_sum = total.tolist()
        return total

    @property
    def is_repair_pending(self) -> bool:
        """Of the group that there is nothing can be agreed on any more."""
        newest = self._link.newest if self._link is not None else None
        return isinstance(newest, Join) and newest.is_repair and self._is_newer(newest)

    @property
    def is_heir(self) -> bool:
        """This member takes over what the others have counted: it will be the first."""
        newest = self._link.newest if self._link is not None else None
        return isinstance(newest, Join) and newest.rank == 0

    @property
    def is_leaving(self) -> bool:
        """This replica is to leave. It may have to hand over the state, or hear so later, when others are lost."""
        return self._link is not None and isinstance(self._link.newest, Leave)

    # Changes

    def regroup(self, holder: Holder, *, is_planned: bool) -> Change:
        """Leave the group and join the members that the daemon names next. Raises `Left` if this is none of them."""
        assert self._link is not None
        self._leave_group(is_broken=not is_planned)
        while True:
            instruction = self._link.newest
            if instruction is None or not self._is_newer(instruction):
                self._tell(ReplicaPhase.WAITING, holder.step)
                instruction = self._link.wait(self.place, None)
                assert instruction is not None
            if isinstance(instruction, Leave):
                self._go(instruction, holder)
                continue  # called back
            change = self._try_join(instruction, holder)
            if change is not None:
                return change
            if self._link.newest == instruction:
                # Somebody was lost on the way: nobody tries the same again.
                self.replicas.generation, self.replicas.membership = instruction.generation, instruction.membership

    def wait_until_called(self) -> None:
        """A newcomer has come to its first loop; `regroup` is next."""
        assert self._link is not None
        if self._environment.store is not None:
            # Connecting takes milliseconds, or seconds where names resolve slowly: not while others wait.
            self._rendezvous_at(self._environment.store)
        self._tell(ReplicaPhase.READY, 0)
        # Its own generation is the one that it waits for.
        self.replicas.generation, self.replicas.membership = self._environment.generation - 1, 0
        self._link.wait(self.place, None)

    def _go(self, instruction: Leave, holder: Holder) -> None:
        """Hand over if that is asked for, and raise `Left`; returns if other members are named meanwhile."""
        self._tell(ReplicaPhase.LEAVING, holder.step)
        is_left_with_state = instruction.hands_over and not self._hand_over(instruction, holder)
        if is_left_with_state and self._has_newer_than(instruction)():
            return
        self.replicas.is_member = False
        self.has_left = True
        raise Left(is_left_with_state)

    def _hand_over(self, instruction: Leave, holder: Holder) -> bool:
        """Whether those who come train with the state of this replica.

        Who comes may change, when some of them are lost. The others may be taking the state just then, or know of no
        other place where it is: it stays where it is offered.
        """
        try:
            with self._giver(holder) as giver:
                newest: Instruction | None = instruction
                while isinstance(newest, Leave) and newest.hands_over:
                    if self._is_taken(newest, self._card(0, holder, giver)):
                        return True
                    if self.is_asked_to_leave() or not self._has_newer_than(newest)():
                        break
                    newest = self._link.newest if self._link is not None else None
        except Temporary as error:
            log.warning("the state was not handed over: %s", error)
        return False

    def _is_taken(self, instruction: Leave, card: Card) -> bool:
        """Offer it, and wait: False if that is in vain, or if another instruction came."""
        rendezvous, has_newer = self._rendezvous_at(instruction.store), self._has_newer_than(instruction)
        rendezvous.offer(instruction, card)
        return rendezvous.await_taken(instruction, HANDOVER_S, lambda: has_newer() or self.is_asked_to_leave())

    def _giver(self, holder: Holder) -> Giver:
        return Giver(self._host(), holder.small, holder.full, self._secret)

    @property
    def _secret(self) -> str:
        return self._environment.job_secret

    def _try_join(self, join: Join, holder: Holder) -> Change | None:
        """None: it came to nothing, since members were lost or others named."""
        self._tell(ReplicaPhase.JOINING, holder.step)
        is_superseded = self._has_newer_than(join)
        try:
            rendezvous = self._rendezvous_at(join.store)
            with self._giver(holder) as giver:
                cards = rendezvous.gather(join, self._card(join.rank, holder, giver), is_superseded)
                if cards is None:
                    return None
                offered = rendezvous.await_offer(join, is_superseded) if join.takes_from_leaver else None
                if join.takes_from_leaver and offered is None:
                    return None
                state, is_full = self._take(join, cards, offered, holder)
                is_shared = offered is not None or any(card.has_state for card in cards)
                # All who take have taken before they come here.
                timeout_s = self._environment.group_timeout_s
                made = rendezvous.make_group(join, self.replicas.device, is_superseded, timeout_s)
        except (RuntimeError, Temporary) as error:
            if isinstance(error, RuntimeError) and not is_connection_loss(error):
                raise
            log.warning("generation %d.%d did not come together: %s", join.generation, join.membership, error)
            self._leave_group(is_broken=True)
            return None
        while self._replaced:  # their last group is left by all
            self._replaced.pop().close()
        self._made = made
        self.replicas.become(join.rank, join.size, join.num_nodes, made.group)
        self.replicas.generation, self.replicas.membership = join.generation, join.membership
        self.replicas.is_member = self._is_fresh = True
        self._agreement = None
        self._thanks = join if join.takes_from_leaver and join.rank == 0 else None
        self._tell(ReplicaPhase.JOINING, holder.step)  # it has the state now, if there is any
        return Change(join.is_repair, state, is_full, is_shared)

    def _take(
        self, join: Join, cards: Sequence[Card], offered: Card | None, holder: Holder
    ) -> tuple[dict[str, Any] | None, bool]:
        """The state that this replica needs, if any, from those who are furthest; and whether it is all of it."""
        own = cards[join.rank]
        furthest = offered or max(
            (card for card in cards if card.has_state), key=lambda card: (_how_far(card), -card.rank), default=own
        )
        self._missed_sum = list(furthest.last_sum) if own.has_state and furthest.sums > own.sums else None
        if not own.has_state:
            self._sums, self._last_sum = furthest.sums, list(furthest.last_sum)
            if join.is_repair and furthest.has_state and not furthest.is_inside:
                sys.exit(
                    "pollux: replicas were lost while the others were between two loops over the loader, where nobody"
                    " can join them. This one ends; they train on, and the next resize brings others."
                )
        if not furthest.has_state:
            return None, False  # nobody has any: they have all just started
        if furthest is own:
            # Loaded like the others load it, so that nothing derived from it differs.
            return (holder.small(), False) if join.is_repair else (None, False)
        sources = [card for card in cards if card.has_state and _how_far(card) == _how_far(furthest)] or [furthest]
        if not own.has_state or own.step < furthest.step:
            source = sources[join.rank % len(sources)]
            return self._take_from(source, join, full=True), True
        if join.is_repair:  # a beat may have reached some and not others
            return self._take_from(furthest, join, full=False), False
        return None, False

    def _take_from(self, source: Card, join: Join, *, full: bool) -> dict[str, Any]:
        try:
            state: dict[str, Any] = take(
                source.address, self._secret + source.key, full=full, is_superseded=self._has_newer_than(join)
            )
        except Temporary as error:
            self._failed_takes += 1
            if self._failed_takes < MOST_FAILED_TAKES or self.has_state:
                raise
            raise LoopMisuse(
                f"the state of the others could not be taken over: {error}",
                "See the log of the replica that gives it. Plain values belong into job.state, all else is registered",
            ) from error
        self._failed_takes = 0
        return state

    def _card(self, rank: int, holder: Holder, giver: Giver) -> Card:
        return Card(
            rank,
            holder.step,
            self.has_state,
            giver.address,
            giver.key,
            sums=self._sums,
            last_sum=tuple(self._last_sum),
            is_inside=holder.is_inside,
        )

    def _has_newer_than(self, instruction: Instruction) -> Callable[[], bool]:
        link = self._link
        assert link is not None
        return lambda: link.newest is not None and link.newest.place > instruction.place

    def _rendezvous_at(self, address: str) -> Rendezvous:
        if self._rendezvous is None or self._rendezvous.address != address:
            if self._rendezvous is not None:
                self._replaced.append(self._rendezvous)
            self._rendezvous = Rendezvous(address)
        return self._rendezvous

    def _host(self) -> str:
        """An address of this machine that the other members can reach."""
        store = (self._link.newest.store if self._link and self._link.newest else None) or self._environment.store
        return Rendezvous.host_towards(store or "127.0.0.1:1")

    def _leave_group(self, *, is_broken: bool) -> None:
        made, self._made = self._made, None
        self.replicas.group = None
        if made is None:
            return
        if is_broken:
            made.sockets.cut()  # nothing of it is waited for
        leave_group(made)

    def close(self, step: int = 0) -> None:
        """Give back the group and the connection."""
        if self._link is None:
            self.replicas.leave()
            return
        self._tell(ReplicaPhase.LEAVING, step)
        if self.has_finished:
            self._thank()  # there was no step left to train
        self._leave_group(is_broken=False)
        # After an error the others know nothing yet, and its connections must outlive it.
        if self._rendezvous is not None and (self.has_finished or self.has_left):
            for rendezvous in (*self._replaced, self._rendezvous):
                rendezvous.close()
        self._link.close()


def _how_far(card: Card) -> tuple[int, int, bool]:
    """In the order of a script: one that has left its loop over the loader is further than one that has not."""
    return card.step, card.sums, not card.is_inside


class _Nothing:
    """What a replica has that has just been started: nothing to hand over."""

    step = 0
    is_inside = False

    def small(self) -> dict[str, Any]:
        return {}

    full = small


NOTHING: Holder = _Nothing()
