"""One run from names and paths to its outcome: what the command line, tests and benchmarks call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pollux.core import Cluster, JobId, JobSpec
from pollux.errors import InvalidSpec
from pollux.policies import Policy, registry
from pollux.scheduler import EventLog, Record
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.generator import BUILT_IN, built_in_workload
from pollux.simulator.metrics import JobOutcome, Outcome
from pollux.simulator.options import AgentOptions, Options
from pollux.simulator.truth import Truth, truths_built_in, truths_of_traces
from pollux.simulator.workload import Workload, WorkloadJob, read_workload
from pollux.simulator.world import World

GPU_TYPE = "t4"
"""The type that the built-in applications and the artifact's traces were measured on."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a run depends on. Can be sent to another process."""

    workload: str
    """A file in the artifact's layout, or the name of a built-in workload."""
    policy: str
    cluster: ClusterFile | None = None
    """None: the cluster that a built-in workload is meant for, else the paper's 16 × 4 GPUs."""
    traces: Path | None = None
    """Measured traces; None: the built-in applications are the truth."""
    options: Options = field(default_factory=Options)


class NoLog:
    """Keeps nothing: most runs only want figures."""

    def append(self, record: Record) -> None:
        pass

    def records(self) -> Iterator[Record]:
        return iter(())


def simulate(
    scenario: Scenario,
    log: EventLog | None = None,
    on_start: Callable[[int], None] = lambda num_jobs: None,
    on_end: Callable[[], None] = lambda: None,
    cpu_began_s: float | None = None,
    truths: Mapping[str, Truth] | None = None,
) -> Outcome:
    """Run it to the end. `on_start` hears how many jobs there are, `on_end` of each that has ended.

    `cpu_began_s` is the process time that `cpu_s` counts from; now, if it is not given. `truths` are those of
    an earlier run with the same traces: they remember their answers, and reading them again takes its time.
    """
    began = time.process_time() if cpu_began_s is None else cpu_began_s
    policy = registry.make(scenario.policy, scenario.options.policy)
    if truths is None:
        truths = truths_built_in() if scenario.traces is None else truths_of_traces(scenario.traces)
    cluster = scenario.cluster or default_cluster(scenario.workload)
    workload = load_workload(scenario.workload, truths, cluster.largest)
    on_start(len(workload.jobs))
    specs = [
        (job.submitted_at_s, spec_of(job, truths[job.application], policy, scenario.options.agent))
        for job in workload.jobs
    ]
    world = World(
        specs, truths, cluster.cluster, policy, scenario.options, cluster.changes, NoLog() if log is None else log
    )
    world.run(on_end)
    for truth in truths.values():
        truth.save()
    ended = sorted(world.scheduler.state.ended.values(), key=lambda job: job.sequence)
    jobs = tuple(JobOutcome.of(job) for job in ended)
    cpu_s = time.process_time() - began
    return Outcome(workload.name, scenario.policy, jobs, world.timeline, world.policy_cpu_s, cpu_s)


def default_cluster(workload: str) -> ClusterFile:
    """The cluster that a built-in workload is meant for; else that of the paper."""
    if workload in BUILT_IN:
        meant_for = BUILT_IN[workload]
        return ClusterFile(Cluster.uniform(meant_for.num_nodes, meant_for.gpus_per_node, GPU_TYPE))
    return ClusterFile(Cluster.uniform(16, 4, GPU_TYPE))


def load_workload(name: str, truths: Mapping[str, Truth], cluster: Cluster) -> Workload:
    """The built-in workload of that name, or the file at that path."""
    if name in BUILT_IN:
        return built_in_workload(name)
    if not Path(name).exists():
        known = ", ".join(BUILT_IN)
        raise InvalidSpec("workload", name, "is neither a file nor a built-in workload", f"Built-in ones: {known}")
    return read_workload(Path(name), {key: truth.limits for key, truth in truths.items()}, cluster)


def spec_of(job: WorkloadJob, truth: Truth, policy: Policy, options: AgentOptions) -> JobSpec:
    """What its owner submits under that policy: with a fixed batch size where batch sizes do not adapt."""
    is_pinned = policy.adapts_gpus and job.application in options.pinned
    keeps_largest = is_pinned and policy.adapts_batch
    return JobSpec(
        id=JobId(job.name),
        application=job.application,
        requested_gpus=job.num_gpus,
        max_gpus=1 if is_pinned else None,
        limits=truth.limits,
        requested_batch_size=truth.limits.max_batch_size if keeps_largest else job.batch_size,
        fixed_batch=keeps_largest or not policy.adapts_batch,
    )
