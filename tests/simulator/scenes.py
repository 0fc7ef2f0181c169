"""What tests of the virtual world are made of: a truth with round numbers, policies that do as told, small worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pollux.applications import PassTime
from pollux.core import (
    Allocation,
    BatchLimits,
    Cluster,
    FrozenMap,
    GradientStats,
    Job,
    JobId,
    JobReported,
    JobSpec,
    NodeId,
    Plan,
    PlanMade,
    Snapshot,
    dumps,
)
from pollux.policies import Policy, registry
from pollux.policies.packing import Free
from pollux.policies.pollux.policy import Pollux
from pollux.scheduler import EventLog, MemoryLog, SchedulerOptions
from pollux.simulator.cluster_file import NodeChange
from pollux.simulator.options import Options, WorldOptions
from pollux.simulator.scenario import spec_of
from pollux.simulator.truth import Placement, Truth
from pollux.simulator.workload import WorkloadJob
from pollux.simulator.world import World

EQUAL_SHARE = f"{__name__}:EqualShare"
GENETIC = f"{__name__}:SmallGenetic"
LIMITS = BatchLimits(32, 1024, 1, 1024)


@dataclass
class SteadyTruth:
    """One iteration of M0 a second on each GPU, at any batch size, wherever the GPUs are."""

    name: str = "steady"
    epochs: int = 2
    epoch_length: float = 100.0
    limits: BatchLimits = LIMITS
    gpu_types: tuple[str, ...] = ("t4",)

    def passes(self, gpu_type: str, placement: Placement, per_gpu_batch_size: int) -> PassTime:
        return PassTime(0.5 / sum(placement), 1.0 / sum(placement))

    def gradient(self, epoch: int, batch_size: int) -> GradientStats:
        return GradientStats(sqr=1.0, var=0.0)

    def epoch_end(self, epoch: int) -> float:
        return self.epoch_length * (epoch + 1)

    def iterations(self, epoch: int, batch_size: int) -> float:
        return self.epoch_end(epoch)


class Scripted(Policy):
    """From round to round what the script says: round → job → node → GPUs; a round that is not named keeps the last."""

    def __init__(self, script: Mapping[int, Mapping[str, Mapping[str, int]]]) -> None:
        self.script = script

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        latest = max((number for number in self.script if number <= snapshot.round), default=None)
        wanted = {} if latest is None else self.script[latest]
        return Plan.of(
            {
                JobId(job): Allocation.of(
                    {NodeId(node): count for node, count in gpus.items() if node in snapshot.cluster.capacity}
                )
                for job, gpus in wanted.items()
                if job in snapshot.jobs
            }
        )


@dataclass
class EqualShare(Policy):
    """An adaptive policy in miniature: everybody gets as many GPUs, up to twice what its agent has seen.

    Whose goodput is unknown gets one GPU. Jobs that keep their number of GPUs stay where they are.
    """

    reads_models: ClassVar[bool] = True
    adapts_gpus: ClassVar[bool] = True
    adapts_batch: ClassVar[bool] = True

    most: int = 64
    _num_rounds: int = field(init=False, repr=False, default=0)

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        self._num_rounds += 1
        jobs = sorted(snapshot.jobs.values(), key=lambda job: job.sequence)
        free = Free(snapshot.cluster)
        share = max(1, min(self.most, free.total // len(jobs)))
        sizes = {job.id: min(share, _twice_what_it_knows(job), job.spec.max_gpus or share) for job in jobs}
        allocations: dict[JobId, Allocation] = {}
        for job in jobs:
            if job.assigned.num_gpus == sizes[job.id] and free.hold(job.assigned):
                allocations[job.id] = job.assigned
        for job in jobs:
            if job.id not in allocations and (found := free.take(sizes[job.id])) is not None:
                allocations[job.id] = found
        return Plan(FrozenMap(allocations))

    def stats(self) -> Mapping[str, float]:
        return {"rounds": float(self._num_rounds)}


def _twice_what_it_knows(job: Job) -> int:
    fits = () if job.model is None else job.model.throughput.values()
    return max([1, *(2 * fit.max_gpus_observed for fit in fits)])


def steady_job(name: str, gpus: int = 1, at_s: float = 0.0, **spec: object) -> tuple[float, JobSpec]:
    """When it is submitted, and a job of the steady truth that asks for so many GPUs."""
    asked = {"requested_batch_size": 32, "fixed_batch": True, **spec}
    return at_s, JobSpec(JobId(name), application="steady", requested_gpus=gpus, limits=LIMITS, **asked)  # type: ignore[arg-type]


def steady_world(
    policy: Policy | str,
    jobs: Iterable[tuple[float, JobSpec]],
    cluster: Cluster | None = None,
    changes: Iterable[NodeChange] = (),
    truth: Truth | None = None,
    options: Options | None = None,
    in_place: bool = False,
    **world: object,
) -> World:
    """A world whose jobs do one iteration a second on each GPU; two nodes of two GPUs unless told otherwise."""
    if options is None:
        options = Options(world=WorldOptions(**world), scheduler=SchedulerOptions(in_place=in_place))  # type: ignore[arg-type]
    policy = registry.make(policy) if isinstance(policy, str) else policy
    cluster = Cluster.uniform(2, 2, "t4") if cluster is None else cluster
    return World(jobs, {"steady": truth or SteadyTruth()}, cluster, policy, options, changes, MemoryLog())


def ends(world: World) -> dict[str, float]:
    """Run it; when each job ended."""
    world.run()
    return {job.id: job.finished_at_s for job in world.scheduler.state.ended.values() if job.finished_at_s is not None}


def run_jobs(
    policy: Policy | str,
    jobs: Sequence[WorkloadJob],
    truths: Mapping[str, Truth],
    cluster: Cluster,
    options: Options | None = None,
    changes: Iterable[NodeChange] = (),
    prepare: Callable[[World], None] = lambda world: None,
) -> World:
    """The world after jobs of a workload have run in it to their end, with its log."""
    options = options or Options()
    policy = registry.make(policy, options.policy) if isinstance(policy, str) else policy
    specs = [(job.submitted_at_s, spec_of(job, truths[job.application], policy, options.agent)) for job in jobs]
    world = World(specs, truths, cluster, policy, options, changes, MemoryLog())
    prepare(world)
    world.run()
    return world


def log_text(log: EventLog) -> str:
    """One line an event, as `pollux simulate --events` writes it."""
    return "".join(f"{dumps(record)}\n" for record in log.records())


def events(world: World, *kinds: type) -> list[tuple[float, object]]:
    """Time and content of the events of these kinds, in their order."""
    return [
        (record.time_s, record.event) for record in world.scheduler.log.records() if isinstance(record.event, kinds)
    ]


def plans(world: World) -> list[tuple[float, Plan]]:
    """Time and plan of every round that planned."""
    return [(time_s, event.plan) for time_s, event in events(world, PlanMade)]  # type: ignore[attr-defined]


def reports(world: World) -> list[JobReported]:
    return [event for _, event in events(world, JobReported)]  # type: ignore[misc]


@dataclass
class SmallGenetic(Pollux):
    """Pollux with the genetic solver, small enough for tests."""

    solver: str = "genetic"
    population: int = 12
    generations: int = 8
