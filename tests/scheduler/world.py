"""A small world for the scheduler: it does what it is told, keeps its own books, and answers when a test lets it.

Nothing here asks the scheduler what it believes. GPUs are in use from the action that gave them out until the world
itself has reported the end (or their node has died), and two jobs on one GPU are refused on the spot.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from pollux.core import (
    Action,
    Allocation,
    Event,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobReported,
    JobStopped,
    MakePlan,
    Node,
    NodeJoined,
    NodeLost,
    ReplicaLost,
    ReplicasReady,
    ResizeJob,
    StartJob,
    StopJob,
)


@dataclass
class Replicas:
    """All that runs of one job."""

    held: dict[int, Counter[str]] = field(default_factory=dict)
    """GPUs of each living generation by node: the one that trains and the one that gets ready."""
    trains: int | None = None
    newest: int = 0
    """The highest generation ever told of."""
    membership: int = 0
    stop: int | None = None
    """Told to end everything up to this generation."""
    is_maimed: bool = False
    """Replicas of the generation that trains are gone, which nobody has reported yet."""
    unfit: set[int] = field(default_factory=set)
    """Generations that cannot get ready any more, for they have lost replicas."""

    def occupied(self) -> Counter[str]:
        """A GPU that stays with the job through a resize counts once."""
        most: Counter[str] = Counter()
        for gpus in self.held.values():
            most |= gpus
        return most


class World:
    """Nodes, replicas, and the messages that are on their way."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[str, Replicas] = {}
        self.mail: list[Event] = []
        """Sent by replicas and not delivered yet; may arrive in any order, any number of times."""
        self.node_mail: deque[Event] = deque()
        """From the provider of nodes, in order."""
        self.plans_due: list[MakePlan] = []

    def do(self, action: Action) -> None:
        """Idempotent, and deaf to what is older than what it has seen."""
        match action:
            case MakePlan():
                self.plans_due.append(action)
            case StartJob(job, generation, allocation):
                self._start(job, generation, allocation)
            case ResizeJob(job, generation, allocation):
                self._resize(job, generation, allocation)
            case StopJob(job, generation):
                self._stop(job, generation)

    def _start(self, job: str, generation: int, allocation: Allocation) -> None:
        replicas = self.jobs.setdefault(job, Replicas())
        if generation <= replicas.newest:
            return
        assert not replicas.held, f"{job} is to start as {generation} while {replicas.held} is alive"
        self.jobs[job] = Replicas(newest=generation)
        self._occupy(job, generation, allocation)

    def _resize(self, job: str, generation: int, allocation: Allocation) -> None:
        replicas = self.jobs[job]
        if generation <= replicas.newest:
            return
        replicas.newest = generation
        if replicas.trains is None or not replicas.held.get(replicas.trains):
            self.mail.append(GenerationAbandoned(job, generation, "the job is gone"))
        else:
            self._occupy(job, generation, allocation)

    def _stop(self, job: str, generation: int) -> None:
        replicas = self.jobs[job]
        if any(living <= generation for living in replicas.held):
            if all(living <= generation for living in replicas.held):
                replicas.stop = max(generation, replicas.stop or 0)
        else:
            self.mail.append(JobStopped(job, generation))

    def _occupy(self, job: str, generation: int, allocation: Allocation) -> None:
        alive = Counter({node: count for node, count in allocation.gpus.items() if node in self.nodes})
        replicas = self.jobs[job]
        if not alive:
            self.mail.append(GenerationAbandoned(job, generation, "its nodes are gone"))
            return
        replicas.held[generation] = alive
        if alive.total() < allocation.num_gpus:
            replicas.unfit.add(generation)
        self.check()

    def check(self) -> None:
        """No GPU belongs to two jobs."""
        used: Counter[str] = Counter()
        for replicas in self.jobs.values():
            used += replicas.occupied()
        for node, count in used.items():
            assert count <= self.nodes[node].num_gpus, f"{count} GPUs are in use on {node}: {self.jobs}"

    # What jobs do by themselves. Each returns whether it could happen.

    def get_ready(self, job: str) -> bool:
        replicas = self.jobs[job]
        generation = max(replicas.held, default=None)
        if generation is None or generation in replicas.unfit or generation == replicas.trains:
            return False
        if replicas.trains is not None and replicas.is_maimed:
            return False  # it cannot switch together with replicas that are gone
        replicas.held = {generation: replicas.held[generation]}
        replicas.trains, replicas.membership, replicas.is_maimed = generation, 0, False
        self.mail.append(ReplicasReady(job, generation))
        return True

    def abandon(self, job: str) -> bool:
        replicas = self.jobs[job]
        generation = max(replicas.held, default=None)
        if generation is None or generation == replicas.trains:
            return False
        del replicas.held[generation]
        self.mail.append(GenerationAbandoned(job, generation, "too slow"))
        if not replicas.held and replicas.stop is not None:
            self.mail.append(JobStopped(job, replicas.stop))  # an order to stop is always answered
            replicas.stop = None
        return True

    def end(self, job: str, how: type[JobFinished] | type[JobFailed] | type[JobStopped], newest: bool = False) -> bool:
        """All replicas are gone, newcomers included, before anything is reported.

        Stopped replicas may answer with their own generation or with that of the order.
        """
        replicas = self.jobs[job]
        if not replicas.held or (how is JobFinished and (replicas.trains is None or replicas.is_maimed)):
            return False
        generation = max(replicas.held) if replicas.trains is None else replicas.trains
        if how is JobStopped and newest and replicas.stop is not None:
            generation = replicas.stop
        replicas.held, replicas.trains, replicas.stop, replicas.is_maimed = {}, None, None, False
        self.mail.append(how(job, generation, "died") if how is JobFailed else how(job, generation))
        return True

    def report(self, job: str) -> bool:
        trains = self.jobs[job].trains
        if trains is not None:
            self.mail.append(JobReported(job, trains))
        return trains is not None

    def lose_replica(self, job: str, pick: int) -> bool:
        replicas = self.jobs[job]
        if replicas.trains is None or replicas.held[replicas.trains].total() < 2:
            return False
        gpus = replicas.held[replicas.trains]
        gpus[sorted(gpus)[pick % len(gpus)]] -= 1
        replicas.held[replicas.trains] = +gpus
        return self._tell_loss(job)

    def _tell_loss(self, job: str) -> bool:
        replicas = self.jobs[job]
        assert replicas.trains is not None
        replicas.is_maimed = False
        replicas.membership += 1
        survivors = Allocation.of(dict(replicas.held[replicas.trains]))
        self.mail.append(ReplicaLost(job, replicas.trains, replicas.membership, survivors))
        return True

    def answer(self, job: str) -> bool:
        """What it owes, in the friendliest way."""
        replicas = self.jobs[job]
        if not replicas.held:
            return False
        if replicas.stop is not None or not replicas.held.get(
            max(replicas.held) if replicas.trains is None else replicas.trains
        ):
            return self.end(job, JobStopped, newest=True)
        if replicas.is_maimed:
            return self._tell_loss(job)
        if max(replicas.held) in replicas.unfit - {replicas.trains}:
            return self.abandon(job)
        return self.get_ready(job)

    # What nodes do.

    def join(self, node: Node) -> None:
        """A node that is there already may change, but loses no GPU that is in use."""
        self.nodes[node.id] = node
        self.node_mail.append(NodeJoined(node))

    def die(self, node: str) -> None:
        del self.nodes[node]
        self.node_mail.append(NodeLost(node))
        for job, replicas in self.jobs.items():
            for generation, gpus in replicas.held.items():
                if gpus.pop(node, 0):
                    if generation == replicas.trains:
                        replicas.is_maimed = True
                    else:
                        replicas.unfit.add(generation)
            if replicas.held and not replicas.occupied():
                self.end(job, JobStopped)
