"""What a policy sees and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from pollux.core import checks
from pollux.core.allocation import Allocation, Shape
from pollux.core.cluster import Cluster
from pollux.core.frozenmap import FrozenMap
from pollux.core.hints import BRIEF
from pollux.core.ids import JobId, NodeId
from pollux.core.job import Job
from pollux.core.kinds import KindProfile
from pollux.errors import InfeasiblePlan, InvalidSpec


@dataclass(frozen=True, slots=True)
class Oracle:
    """The truth about one job, for policies that declare that they need it; never filled for others."""

    remaining_iterations: float | None = None
    """Until the job ends, in its own iterations at its present batch size."""
    remaining_s: float | None = None
    """Until the job ends, if it keeps running at the size that it requested."""
    iteration_time_s: FrozenMap[Shape, float] = field(default_factory=FrozenMap)
    """Of one iteration at its present batch size, accumulation passes included, for each shape that it could have."""

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "remaining_iterations", self.remaining_iterations, 0, optional=True)
        checks.finite(InvalidSpec, "remaining_s", self.remaining_s, 0, optional=True)
        checks.frozen(InvalidSpec, "iteration_time_s", self.iteration_time_s)
        # Made for every job in every round: naming the culprit may take its time, finding none may not.
        seconds_by_shape = self.iteration_time_s.values()
        if seconds_by_shape and not (min(seconds_by_shape) >= 0 and isfinite(sum(seconds_by_shape))):
            for shape, seconds in self.iteration_time_s.items():
                checks.finite(InvalidSpec, f"iteration_time_s[{shape}]", seconds, 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a policy may see. `jobs` holds those that may be given GPUs: not ended, paused or on their way there.

    Nor those that failed and whose next try is not due yet.
    """

    time_s: float
    round: int
    cluster: Cluster
    jobs: FrozenMap[JobId, Job] = field(default_factory=FrozenMap)
    oracle: FrozenMap[JobId, Oracle] | None = None
    """Present only if the policy asked for the truth by its constructor."""
    kinds: FrozenMap[str, KindProfile] = field(default_factory=FrozenMap, metadata=BRIEF)
    """The profile registry: what jobs that have ended leave to others of their kind, see `kind_of`."""

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "time_s", self.time_s, None)
        checks.whole(InvalidSpec, "round", self.round, 0)
        checks.instance(InvalidSpec, "cluster", self.cluster, Cluster)
        checks.frozen(InvalidSpec, "jobs", self.jobs)
        checks.frozen(InvalidSpec, "kinds", self.kinds)
        for key, job in self.jobs.items():
            if key != job.spec.id:
                raise InvalidSpec(f'jobs["{key}"].spec.id', job.spec.id, "differs from its key", "Key jobs by their id")


@dataclass(frozen=True, slots=True)
class Plan:
    """Who is to hold what. A job that is not in the plan holds nothing."""

    allocations: FrozenMap[JobId, Allocation] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        checks.frozen(InvalidSpec, "allocations", self.allocations)
        for job, allocation in self.allocations.items():
            if type(allocation) is Allocation and allocation.gpus:
                continue
            checks.instance(InvalidSpec, f'allocations["{job}"]', allocation, Allocation)
            if not allocation:
                raise InvalidSpec(
                    f'allocations["{job}"]', {}, "jobs that hold nothing are left out", "Build it with Plan.of(…)"
                )

    @classmethod
    def of(cls, allocations: Mapping[JobId, Allocation]) -> Plan:
        """The plan with these allocations; empty ones are dropped."""
        return cls(FrozenMap({job: allocation for job, allocation in allocations.items() if allocation}))

    @classmethod
    def of_holding(cls, allocations: FrozenMap[JobId, Allocation]) -> Plan:
        """The plan with these, none of them empty: the caller's word is taken for it.

        For policies that give out thousands of allocations in a round: to fetch them all from memory takes its time.
        """
        made = object.__new__(cls)
        object.__setattr__(made, "allocations", allocations)
        return made

    def __getitem__(self, job: JobId) -> Allocation:
        """What that job is to hold; nothing if the plan does not name it."""
        return self.allocations.get(job) or Allocation()

    def violations(self, snapshot: Snapshot) -> tuple[str, ...]:
        """Why this plan cannot be held in the snapshot's cluster by its jobs, one sentence each; empty if it can."""
        found = [f"job {job!r} is not in the snapshot" for job in self.allocations if job not in snapshot.jobs]
        used: dict[NodeId, int] = {}
        for job_id, allocation in self.allocations.items():
            job = snapshot.jobs.get(job_id)
            if job is not None and not job.spec.can_be_on(len(allocation.gpus)):
                found.append(f"job {job_id!r} must be on one node, it was given {', '.join(allocation.gpus)}")
            for node_id, count in allocation.gpus.items():
                used[node_id] = used.get(node_id, 0) + count
        for node_id, count in sorted(used.items()):
            if node_id not in snapshot.cluster:
                found.append(f"node {node_id!r} is not in the cluster")
                continue
            node = snapshot.cluster[node_id]
            if not node.schedulable:
                found.append(f"node {node_id!r} is not schedulable")
            if count > node.num_gpus:
                found.append(f"node {node_id!r} has {node.num_gpus} GPUs, {count} were given out")
        return tuple(found)

    def check(self, snapshot: Snapshot) -> None:
        """Raise `InfeasiblePlan` with every violation, if there is one."""
        found = self.violations(snapshot)
        if found:
            raise InfeasiblePlan(
                f"the plan of round {snapshot.round} cannot be held: {'; '.join(found)}. "
                "The policy must count what it gives out against Cluster.capacity."
            )
