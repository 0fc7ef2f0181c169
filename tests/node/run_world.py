"""A world for `JobRun`: nodes, links that lose what is under way, and replicas that behave as the protocol says.

Everything that may happen next is a method; whoever calls them decides on the order. What the run must not do raises.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pollux.core import (
    Allocation,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobStopped,
    ReplicaLost,
    ReplicasReady,
    StopReason,
    dumps,
    loads,
)
from pollux.node.orders import Announce, ForgetJob, KillReplica, Order, SpawnOn, TellReplica
from pollux.node.run import JobRun, RunOptions, SavedRun
from pollux.wire.nodes import ReplicaHere, RunPhase, Seat
from pollux.wire.replicas import Instruction, Join, Leave, ReplicaPhase, ReplicaStatus

JOB = "job"
ENDS = JobStopped | JobFinished | JobFailed
OPTIONS = RunOptions()


class BrokenRuleError(AssertionError):
    """The run did what it must never do."""


@dataclass(eq=False)
class Group:
    """Replicas that gathered as one membership."""

    key: tuple[int, int]
    members: list[Process]
    step: int
    is_broken: bool = False
    has_stepped: bool = False

    @property
    def is_whole(self) -> bool:
        return not self.is_broken and all(m.exit_code is None and m.group is self for m in self.members)

    @property
    def can_step(self) -> bool:
        return self.is_whole and all(m.has_state and m.last_code is None for m in self.members)


@dataclass(eq=False)
class Process:
    """A replica as it really is."""

    name: str
    node: SimNode
    generation: int
    seat: Seat
    phase: ReplicaPhase = ReplicaPhase.STARTING
    at: tuple[int, int] = (0, 0)
    """What it says that it belongs to."""
    heeded: tuple[int, int] = (0, 0)
    """The membership that it last set out for."""
    step: int = 0
    has_state: bool = False
    has_finished: bool = False
    newest: Join | Leave | None = None
    group: Group | None = None
    gathers: tuple[int, int] | None = None
    store: str = ""
    """Where it gathers."""
    offers: bool = False
    is_asked: bool = False
    last_code: int | None = None
    """It is about to end with this."""
    exit_code: int | None = None

    @property
    def lives(self) -> bool:
        return self.exit_code is None

    @property
    def key(self) -> tuple[int, int]:
        """Of the newest instruction."""
        return (0, 0) if self.newest is None else (self.newest.generation, self.newest.membership)

    def here(self) -> ReplicaHere:
        status = ReplicaStatus(
            JOB, self.name, 7, self.phase, *self.at, self.step, self.has_state, 0.0, self.has_finished
        )
        return ReplicaHere(self.name, self.generation, 7, status, self.exit_code)


@dataclass(eq=False)
class SimNode:
    name: str
    is_up: bool = True
    is_linked: bool = True
    processes: dict[str, Process] = field(default_factory=dict)
    orders: deque[Order] = field(default_factory=deque)
    news: deque[ReplicaHere] = field(default_factory=deque)


class World:
    def __init__(self, num_steps: int, nodes: Iterable[str] = ("a", "b", "c")) -> None:
        self.num_steps = num_steps
        self.nodes = {name: SimNode(name) for name in nodes}
        self.now_s = 0.0
        self.run = JobRun(JOB, OPTIONS)
        self.run.store = "home:1"
        self.disk = self.run.saved()
        self.issued = 0
        self.last_request: tuple[object, ...] = ()
        self.pending: set[int] = set()
        """Generations that nobody has answered for."""
        self.unanswered_stop = 0
        self.checkpoint = 0
        self.has_finished = False
        self.events: list[object] = []
        self.told_of_end: set[str] = set()
        self.may_end: set[int] = set()
        """Generations whose replicas a request allows to be ended."""
        self.stepped_at = (0, 0)
        self.seen: Counter[str] = Counter()
        self.saved: set[str] = set()
        """Who has saved before it left."""
        self.must_save = False
        """Nothing is in the way of those that were asked to save."""

    # Requests

    def start(self, allocation: Allocation) -> None:
        self.issued += 1
        self.may_end.update(range(self.issued))
        self.pending.add(self.issued)
        self.last_request = ("start", self.issued, allocation)
        self.carry_out(self.run.start(self.issued, allocation, self.now_s))

    def resize(self, allocation: Allocation, in_place: bool) -> None:
        self.issued += 1
        if not in_place or self.run.phase is RunPhase.RESTARTING:
            self.may_end.update(range(self.issued))
        self.pending.add(self.issued)
        self.last_request = ("resize", self.issued, allocation)
        self.carry_out(self.run.resize(self.issued, allocation, in_place, self.now_s))

    def ask_again(self) -> None:
        match self.last_request:
            case ("start", int(generation), Allocation() as allocation):
                orders = self.run.start(generation, allocation, self.now_s)
            case ("resize", int(generation), Allocation() as allocation):
                orders = self.run.resize(generation, allocation, True, self.now_s)
            case _:
                return
        told_again = [order for order in orders if self.run.is_over and isinstance(order, Announce)]
        if orders != told_again:
            raise BrokenRuleError(f"a repeated request was carried out again: {orders}")

    def stop(self, reason: StopReason) -> None:
        self.may_end.update(range(self.issued + 1))
        self.unanswered_stop = self.issued
        self.carry_out(self.run.stop(self.issued, reason, self.now_s))

    # Time, links, machines and the home

    def advance(self, seconds: float) -> None:
        """News arrives sooner than the run's patience ends."""
        for node in self.nodes.values():
            while node.is_linked and node.news:
                self.deliver_news(node)
        self.now_s += seconds
        self.carry_out(self.run.tick(self.now_s))

    def deliver_news(self, node: SimNode) -> None:
        here = node.news.popleft()
        self.note(here)
        self.carry_out(self.run.status(node.name, here, self.now_s))

    def deliver_order(self, node: SimNode) -> None:
        order = node.orders.popleft()
        match order:
            case SpawnOn(seats=seats, generation=generation):
                for seat in seats:
                    if seat.replica not in node.processes:
                        self.spawn(node, generation, seat)
            case TellReplica(replica=name, instruction=instruction) if name in node.processes:
                self.tell(node.processes[name], instruction)
            case KillReplica(replica=name, signal=signal) if name in node.processes:
                self.kill(node.processes[name], signal)
            case ForgetJob(generation=generation):
                if any(process.generation > generation for process in node.processes.values()):
                    raise BrokenRuleError(f"{order} does not name the newest generation of the run")
                for process in list(node.processes.values()):
                    if process.lives:
                        self.end(process, -9)
                node.processes.clear()
                node.news.clear()

    def unlink(self, node: SimNode) -> None:
        """The home's connection breaks; what is under way is lost."""
        if node.is_linked:
            self.lose_connection(node)
            self.carry_out(self.run.node_gone(node.name, self.now_s))

    def lose_connection(self, node: SimNode) -> None:
        node.is_linked = False
        node.orders.clear()
        node.news.clear()

    def link(self, node: SimNode) -> None:
        if node.is_linked:
            return
        node.is_up = node.is_linked = True
        node.orders.clear()
        node.news.clear()
        replicas = [process.here() for process in node.processes.values()]
        for here in replicas:
            self.note(here)
        self.carry_out(self.run.node_back(node.name, replicas, self.now_s))

    def crash_node(self, node: SimNode) -> None:
        """The machine goes, with all that it knew."""
        for process in node.processes.values():
            if process.lives:
                self.end(process, -9)
        node.processes.clear()
        node.is_up = False
        self.unlink(node)

    def restart_home(self, new_store: bool) -> None:
        for node in self.nodes.values():
            self.lose_connection(node)
        self.now_s = 0.0
        text = dumps(self.disk)
        self.run = JobRun.restored(loads(text, SavedRun), OPTIONS)
        if dumps(self.run.saved()) != text:
            raise BrokenRuleError("what was saved is not what was restored")
        if new_store:
            self.run.store += "1"
        self.carry_out(self.run.tick(self.now_s))
        for node in self.nodes.values():
            if node.name not in self.run.nodes:
                self.link(node)

    # What replicas do

    def spawn(self, node: SimNode, generation: int, seat: Seat) -> None:
        process = Process(seat.replica, node, generation, seat, at=(generation, 0), has_state=not seat.is_newcomer)
        process.store = self.run.store
        if not seat.is_newcomer:
            process.heeded, process.step = process.at, self.checkpoint
        node.processes[process.name] = process
        self.say(process)

    def say(self, process: Process) -> None:
        if process.node.is_linked and process.name in process.node.processes:
            process.node.news.append(process.here())

    def tell(self, process: Process, instruction: Instruction) -> None:
        if (instruction.generation, instruction.membership) > max(process.key, process.heeded):
            process.newest = instruction

    def kill(self, process: Process, signal: int) -> None:
        if not process.lives:
            return
        if signal == 9:
            self.end(process, -9)
        elif process.is_asked:
            pass  # its node sees to it that it is asked once
        elif process.phase is ReplicaPhase.STARTING:
            self.end(process, -15)
        else:
            process.is_asked = True

    def end(self, process: Process, code: int) -> None:
        process.exit_code = code
        if process.group is not None:
            process.group.is_broken = True
        self.say(process)

    def move(self, process: Process, luck: int) -> bool:
        """Its next step, if it can take one by itself."""
        if not process.lives:
            return False
        if process.last_code is not None:
            self.end(process, process.last_code)
            return True
        if process.is_asked and process.offers:
            self.save_and_leave(process)  # whoever hands over is alone; the others save together, after a step
            return True
        is_free = process.group is None or process.group.is_broken
        instruction = process.newest
        if instruction is not None and process.key > process.heeded:
            if isinstance(instruction, Leave) and is_free and not process.offers:
                self.step_aside(process, instruction)
                return True
            if isinstance(instruction, Join) and (is_free or instruction.is_repair):
                self.come(process, instruction)
                return True
        if process.offers:
            return self.go_on_offering(process)
        if process.phase is ReplicaPhase.STARTING:
            if process.seat.is_newcomer:
                process.phase = ReplicaPhase.READY
                self.say(process)
                return True
            if process.gathers is None:
                process.gathers = process.at
                return True
            return False
        if process.group is not None and process.group.is_broken:
            self.fall_out(process, luck)
            return True
        if process.group is not None and not process.has_state:
            return self.take_state(process)
        return False

    def leave(self, process: Process, code: int) -> None:
        """It ends, a little later."""
        if process.group is not None:
            process.group.is_broken = True
            process.group = None
        process.gathers = None
        process.offers = False
        process.phase = ReplicaPhase.LEAVING
        process.last_code = code
        self.say(process)

    def save_and_leave(self, process: Process) -> None:
        self.checkpoint = max(self.checkpoint, process.step)
        self.saved.add(process.name)
        self.leave(process, 143)

    def step_aside(self, process: Process, instruction: Leave) -> None:
        if instruction.hands_over:
            process.group = None
            process.offers = True
            process.phase = ReplicaPhase.LEAVING
            self.say(process)
        else:
            self.leave(process, 0)

    def go_on_offering(self, process: Process) -> bool:
        assert isinstance(process.newest, Leave)
        if not process.newest.hands_over or any(
            group.key == process.key and all(member.has_state for member in group.members) for group in self.groups()
        ):
            self.leave(process, 0)
            return True
        return False

    def come(self, process: Process, join: Join) -> None:
        if process.group is not None:
            process.group.is_broken = True
            process.group = None
        process.at = process.heeded = process.gathers = process.key
        process.phase, process.store = ReplicaPhase.JOINING, join.store
        self.say(process)

    def fall_out(self, process: Process, luck: int) -> None:
        """Its group is broken: it may have finished the step that others have not."""
        group = process.group
        assert group is not None
        process.group = None
        if process.has_state and luck % 2 and process.step == group.step and group.has_stepped:
            process.step += 1
            if process.step >= self.num_steps:
                self.has_finished = True
                self.leave(process, 0)
                return
            if any(member.is_asked for member in group.members):
                self.save_and_leave(process)
                return
        process.phase = ReplicaPhase.WAITING
        self.say(process)

    def take_state(self, process: Process) -> bool:
        group = process.group
        assert group is not None
        givers = [m for m in group.members if m.has_state and m.lives] or [
            p for p in self.processes() if p.offers and p.key == group.key
        ]
        if not givers:
            return False
        process.has_state, process.step = True, max(giver.step for giver in givers)
        group.step = max(group.step, process.step)
        self.say(process)
        return True

    def groups(self) -> list[Group]:
        found = {id(p.group): p.group for p in self.processes() if p.group is not None}
        return list(found.values())

    def processes(self) -> list[Process]:
        return [p for node in self.nodes.values() for p in node.processes.values() if p.lives]

    def gather(self) -> bool:
        """Those of one membership that all wait for each other find together."""
        waiting: dict[tuple[tuple[int, int], str], list[Process]] = {}
        for process in self.processes():
            if process.gathers is not None:
                waiting.setdefault((process.gathers, process.store), []).append(process)
        for (key, _), members in sorted(waiting.items()):
            join = next((m.newest for m in members if m.key == key), None)
            size = join.size if isinstance(join, Join) else members[0].seat.size
            if len(members) < size:
                continue
            ranks = sorted(m.newest.rank if isinstance(m.newest, Join) else m.seat.rank for m in members)
            if ranks != list(range(size)):
                raise BrokenRuleError(f"ranks of {key}: {ranks}")
            self.meet(key, members, isinstance(join, Join) and join.takes_from_leaver)
            return True
        return False

    def meet(self, key: tuple[int, int], members: list[Process], takes_over: bool) -> None:
        holders = [member for member in members if member.has_state]
        if not holders and not takes_over:
            raise BrokenRuleError(f"{key} has no state")
        group = Group(key, members, max((member.step for member in holders), default=0))
        known = {r.name for r in self.disk.living() if r.signal != 9}
        others = [p for p in self.processes() if p.has_state and p not in members and p.name in known]
        others = [p for p in others if p.name not in self.saved]
        ahead = [p.name for p in others if p.step > group.step and not isinstance(p.newest, Leave)]
        if holders and ahead and not self.has_finished:
            raise BrokenRuleError(f"{key} goes back to step {group.step}, behind {ahead}")
        for member in members:
            member.gathers, member.group, member.at = None, group, key
            if member.has_state:
                member.step = group.step
        if holders and group.step >= self.num_steps:
            self.finish(members)

    def finish(self, members: list[Process]) -> None:
        self.has_finished = True
        for member in members:
            member.group = None
            member.phase, member.last_code = ReplicaPhase.LEAVING, 0
            member.has_state = member.has_finished = True
            self.say(member)

    def step(self, group: Group) -> None:
        """All of them finish one; leave if one was asked to, and switch if all know of the same next generation."""
        strays = [m.name for m in group.members if self.is_stray(m)]
        if not strays:
            if group.key < self.stepped_at:
                raise BrokenRuleError(f"{group.key} trains after {self.stepped_at}")
            self.stepped_at = group.key
        group.step += 1
        for member in group.members:
            member.step = group.step
            if not group.has_stepped:
                member.phase = ReplicaPhase.TRAINING
                self.say(member)
        group.has_stepped = True
        if group.step >= self.num_steps:
            self.finish(group.members)
            return
        if any(member.is_asked for member in group.members):
            for member in group.members:
                self.save_and_leave(member)
            return
        keys = {member.key for member in group.members}
        if len(keys) == 1 and keys.pop() > group.key:
            for member in group.members:
                member.group = None

    def is_stray(self, process: Process) -> bool:
        """The run has given it up: nobody can reach it, or could for long."""
        known = self.disk.find(process.name)
        return known is None or known.is_gone

    # What the run wants

    def note(self, here: ReplicaHere) -> None:
        if here.exit_code is not None:
            self.told_of_end.add(here.replica)

    def carry_out(self, orders: list[Order]) -> None:
        self.disk = self.run.saved()
        for order in orders:
            match order:
                case Announce(event=event):
                    self.hear(event)
                    continue
                case KillReplica(replica=name) | TellReplica(replica=name) if name in self.told_of_end:
                    raise BrokenRuleError(f"an order to one that ended: {order}")
                case SpawnOn(seats=seats) if any(seat.replica in self.told_of_end for seat in seats):
                    raise BrokenRuleError(f"a name is used twice: {order}")
                case KillReplica():
                    self.check_kill(order)
                case _:
                    pass
            node = self.nodes[order.node]
            if not node.is_linked:
                raise BrokenRuleError(f"an order to a node that is gone: {order}")
            node.orders.append(order)

    def check_kill(self, order: KillReplica) -> None:
        process = self.nodes[order.node].processes.get(order.replica)
        if process is None or not process.lives or not process.has_state:
            return
        if self.is_stray(process) or self.has_finished or isinstance(process.newest, Leave):
            return
        run = self.disk
        is_busy = process.last_code is None and process.phase is not ReplicaPhase.STARTING
        if self.must_save and is_busy and order.signal == 9:
            raise BrokenRuleError(f"{order} comes before it has saved step {process.step}: {self.describe()}")
        known = run.find(process.name)
        if known in run.leavers and known.is_asked:
            return  # nobody is left to leave to; it was given the time to save
        if run.stopped_as or run.target is not None or process.generation in self.may_end:
            return
        raise BrokenRuleError(f"{order} loses the state at step {process.step}")

    def hear(self, event: object) -> None:
        self.events.append(event)
        self.seen[type(event).__name__] += 1
        run = self.disk
        mine = [process for process in self.processes() if not self.is_stray(process)]
        match event:
            case ReplicasReady(generation=generation):
                ready = [e.generation for e in self.events if isinstance(e, ReplicasReady)]
                if ready != sorted(set(ready)):
                    raise BrokenRuleError(f"announced out of order: {ready}")
                if run.generation == generation and any(run.find(p.name) in run.leavers for p in mine):
                    raise BrokenRuleError("ready although one of the generation before is there")
                self.pending = {other for other in self.pending if other > generation}
            case GenerationAbandoned(generation=generation):
                if generation not in self.pending:
                    raise BrokenRuleError(f"{event} answers nothing")
                if any(process.generation == generation for process in mine):
                    raise BrokenRuleError(f"{event} although its newcomers are there")
                self.pending.discard(generation)
            case ReplicaLost(generation=generation) if generation < run.generation:
                pass  # the switch followed at once
            case ReplicaLost(membership=membership, survivors=survivors, generation=generation):
                names = {member.name for member in run.members}
                there = {p.name for p in self.processes() if p.name in names}
                if not names - there <= self.ended_unheard():
                    raise BrokenRuleError(f"{event} counts the dead")
                if Allocation.of(Counter(member.node for member in run.members)) != survivors:
                    raise BrokenRuleError(f"{event} is not what lives")
                if (generation, membership) != run.at:
                    raise BrokenRuleError(f"{event} at {run.at}")
            case JobStopped() | JobFinished() | JobFailed():
                if mine:
                    raise BrokenRuleError(f"{event} although replicas live: {[p.name for p in mine]}")
                if isinstance(event, JobFinished) and not self.has_finished:
                    raise BrokenRuleError(f"{event} although nobody has finished")
                # Who is killed between saving and its end cannot tell that it has saved.
                savers = {r.name for r in run.leavers if r.exit_code == 143} & self.saved
                if isinstance(event, JobFailed) and savers & self.told_of_end:
                    raise BrokenRuleError(f"{event} although a leaver has saved")
                if isinstance(event, JobFailed) and self.unanswered_stop:
                    raise BrokenRuleError(f"{event} although it was told to stop")
                self.unanswered_stop = 0
                self.pending = {run.newest} - {0, event.generation} if run.target else set()

    def ended_unheard(self) -> set[str]:
        """Those of whose end no word has reached the home."""
        every = {name for node in self.nodes.values() for name in node.processes}
        living = {process.name for process in self.processes()}
        gone = {m.name for m in self.disk.members} - every
        return ((every - living) - self.told_of_end) | gone

    # The end of all delays

    def act(self) -> bool:
        """Let everything happen that can happen now, but time."""
        has_acted = False
        for node in self.nodes.values():
            if node.is_up and not node.is_linked:
                self.link(node)
                has_acted = True
            while node.orders:
                self.deliver_order(node)
                has_acted = True
            while node.news:
                self.deliver_news(node)
                has_acted = True
        for process in self.processes():
            has_acted |= self.move(process, 0)
        while self.gather():
            has_acted = True
        for group in self.groups():
            if group.can_step and (self.num_steps < 1000 or not group.has_stepped or self.is_to_end(group)):
                self.step(group)
                has_acted = True
        return has_acted

    def is_to_end(self, group: Group) -> bool:
        keys = {member.key for member in group.members}
        return any(member.is_asked for member in group.members) or (len(keys) == 1 and keys.pop() > group.key)

    def settle_saved(self) -> None:
        """Until it is over; whoever can save does."""
        self.must_save = not self.has_finished
        names = {member.name for member in self.disk.members}
        able = [
            process.name
            for process in self.processes()
            if process.has_state
            and process.phase is not ReplicaPhase.STARTING
            and process.last_code is None
            and not self.is_stray(process)
            and (process.name in names or process.offers)
        ]
        self.settle()
        if self.must_save and able and not (self.saved or self.has_finished):
            raise BrokenRuleError(f"{able} have not saved")

    def settle(self) -> None:
        """Until it trains in peace or is over."""
        for _ in range(200):
            for _ in range(2000):
                if not self.act():
                    break
            else:
                raise BrokenRuleError("never comes to rest")
            if self.run.next_deadline_s is None:
                break
            self.advance(max(self.run.next_deadline_s - self.now_s, 0.0) + 0.001)
        else:
            raise BrokenRuleError(f"waits for ever: {self.describe()}")
        if self.pending or self.unanswered_stop:
            raise BrokenRuleError(
                f"no answer: generations {self.pending}, stop {self.unanswered_stop}: {self.describe()}"
            )
        if self.run.is_over:
            if self.processes():
                raise BrokenRuleError(f"lives on after the end: {self.describe()}")
            return
        run = self.disk
        if self.run.phase is not RunPhase.TRAINING or not run.trains:
            raise BrokenRuleError(f"does not train: {self.describe()}")
        if {p.name for p in self.processes()} != {member.name for member in run.members}:
            raise BrokenRuleError(f"not all members and nobody else: {self.describe()}")
        if len(self.groups()) != 1 or not self.groups()[0].is_whole or self.groups()[0].key != run.at:
            raise BrokenRuleError(f"not one group: {self.describe()}")

    def describe(self) -> str:
        run = self.disk
        known = [(m.name, m.node, str(m.phase), m.at, m.signal, m.is_gone) for m in run.replicas()]
        real = [(p.name, p.node.name, str(p.phase), p.at, p.key, p.gathers, p.has_state) for p in self.processes()]
        return f"{self.run.phase} {run.at} ready={run.ready} known={known} real={real} at {self.now_s}"
