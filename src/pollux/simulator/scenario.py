"""One run from names and paths to its outcome: what the command line, tests and benchmarks call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from pollux import __version__, applications
from pollux.core import (
    BatchLimits,
    Cluster,
    Event,
    FrozenMap,
    JobId,
    JobSpec,
    KindProfile,
    KindsImported,
    NodeJoined,
    encode,
)
from pollux.errors import InvalidInput, InvalidSpec, PolluxError, UnknownName
from pollux.policies import Policy, registry
from pollux.scheduler import EventLog, Record, SavedState
from pollux.simulator.cluster_file import ClusterFile, NodeChange
from pollux.simulator.fairness import Fairness, measure
from pollux.simulator.generator import BUILT_IN, built_in_workload
from pollux.simulator.metrics import JobOutcome, Outcome
from pollux.simulator.options import AgentOptions, Options, WorldOptions
from pollux.simulator.timeline import Histories
from pollux.simulator.truth import Truth, truths_built_in, truths_of_traces
from pollux.simulator.workload import Workload, WorkloadJob, base_name, checked, read_workload
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
    fairness: bool = False
    """Also run each job alone on its fair share of the cluster; takes several times as long."""
    histories: bool = False
    """Also keep what every job did over time; needs memory for each change."""
    content: Workload | None = None
    """The jobs, where they are in no file; `workload` then says what they were made from."""
    kinds: FrozenMap[str, KindProfile] = field(default_factory=FrozenMap)
    """What the profile registry holds at the start. Isolated runs for fairness start with nothing."""


class NoLog:
    """Keeps nothing: most runs only want figures."""

    def append(self, record: Record) -> None:
        pass

    def records(self, after: int = 0) -> Iterator[Record]:
        return iter(())

    def save(self, saved: SavedState) -> None:
        pass

    def latest(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario with everything loaded and checked."""

    scenario: Scenario
    policy: Policy
    cluster: ClusterFile
    truths: Mapping[str, Truth]
    workload: Workload


def prepare(scenario: Scenario, truths: Mapping[str, Truth] | None = None) -> Prepared:
    """Load and check all that a run needs; whatever is wrong is said here, before anything runs.

    `truths` are those of an earlier run with the same traces: they remember their answers, and reading takes its time.
    """
    policy = registry.make(scenario.policy, scenario.options.policy)
    truths = load_truths(scenario.traces) if truths is None else truths
    cluster = scenario.cluster or default_cluster(scenario.workload)
    if scenario.content is None:
        workload = load_workload(scenario.workload, truths, cluster.largest)
    else:
        workload = checked(scenario.content, _Limits(truths), cluster.largest)
    _check_gpu_types(cluster, {job.application: truths[job.application] for job in workload.jobs})
    for name in scenario.options.agent.pinned:
        if name not in truths and name not in applications.names():
            raise UnknownName("agent.pinned", name, truths)
    latest, limit = workload.jobs[-1], scenario.options.world.max_time_s
    if latest.submitted_at_s > limit:
        problem = f"job {latest.name!r} is submitted later, at {latest.submitted_at_s:g} s"
        raise InvalidSpec("world.max_time_s", limit, problem, "Raise it, or mend the times of the workload")
    if scenario.fairness and not cluster.cluster.num_gpus:
        problem = "the cluster has no GPU at the start, so there is nothing to share"
        raise InvalidSpec("fairness", True, problem, "Begin with at least one node, or leave fairness out")
    return Prepared(scenario, policy, cluster, truths, workload)


def simulate(
    scenario: Scenario,
    log: EventLog | None = None,
    on_start: Callable[[int], None] = lambda num_jobs: None,
    on_end: Callable[[], None] = lambda: None,
    cpu_began_s: float | None = None,
    truths: Mapping[str, Truth] | None = None,
) -> Outcome:
    """Run it to the end. `on_start` hears how many jobs there are, `on_end` of each that has ended.

    With fairness each job is heard of twice: once it has ended, and once it has been run alone.

    `cpu_began_s` is the process time that `cpu_s` counts from; now, if it is not given. `truths`: see `prepare`.
    """
    began = time.process_time() if cpu_began_s is None else cpu_began_s
    ready = prepare(scenario, truths)
    on_start(len(ready.workload.jobs) * (2 if scenario.fairness else 1))
    jobs, cluster, inputs = ready.workload.jobs, ready.cluster, _inputs(ready)
    world = world_of(jobs, ready.truths, cluster.cluster, ready.policy, scenario.options, cluster.changes, log)
    if scenario.kinds:
        world.scheduler.handle(KindsImported(scenario.kinds), world.now)
    world.histories = Histories() if scenario.histories else None
    world.run(on_end)
    _save(ready)
    ended = sorted(world.scheduler.state.ended.values(), key=lambda job: job.sequence)
    outcome = Outcome(
        ready.workload.name,
        scenario.policy,
        inputs,
        tuple(JobOutcome.of(job) for job in ended),
        world.timeline,
        world.policy_cpu_s,
        time.process_time() - began,
        histories=None if world.histories is None else {str(job): it for job, it in world.histories.of_job.items()},
        kinds=world.scheduler.state.pool.kinds,
    )
    return replace(outcome, fairness=_fairness(ready, outcome.jobs, on_end)) if scenario.fairness else outcome


def world_of(
    jobs: Sequence[WorkloadJob],
    truths: Mapping[str, Truth],
    cluster: Cluster,
    policy: Policy,
    options: Options,
    changes: Iterable[NodeChange] = (),
    log: EventLog | None = None,
) -> World:
    """The world that jobs of a workload are submitted to, each as its owner would under that policy."""
    specs = [(job.submitted_at_s, spec_of(job, truths[job.application], policy, options.agent)) for job in jobs]
    return World(specs, truths, cluster, policy, options, changes, NoLog() if log is None else log)


def _fairness(ready: Prepared, outcomes: Sequence[JobOutcome], on_job: Callable[[], None]) -> Fairness:
    """Of a run that has ended. A fair share loses no node: what the shared cluster lost counts against the policy."""
    scenario = ready.scenario
    options = replace(scenario.options, world=_world_alone(scenario.options.world, ready.cluster.cluster.num_gpus))

    def jct_alone(job: WorkloadJob, cluster: Cluster) -> float:
        policy = registry.make(scenario.policy, options.policy)
        world = world_of([job], ready.truths, cluster, policy, options)
        try:
            world.run()
        except PolluxError as error:
            raise _failed_alone(job.name, cluster.num_gpus, error) from error
        (ended,) = world.scheduler.state.ended.values()
        return JobOutcome.of(ended).jct_s

    by_name = {job.name: job for job in ready.workload.jobs}
    jobs, ends = [by_name[job.name] for job in outcomes], [job.finished_at_s for job in outcomes]
    found = measure(jobs, ends, ready.cluster.cluster, options.interval_s, jct_alone, on_job)
    _save(ready)
    return found


def _world_alone(world: WorldOptions, num_gpus: int) -> WorldOptions:
    """That of isolated runs: no node fails, and what limits the shared run does not count.

    A limit there is, against policies that move their job for ever; on one GPU of many a job may take as many times
    as long.
    """
    return replace(world, node_mtbf_s=None, max_time_s=num_gpus * max(world.max_time_s, WorldOptions().max_time_s))


def _failed_alone(job: str, num_gpus: int, error: PolluxError) -> PolluxError:
    """Whose run it was: the error itself speaks as if it were that of the shared one, which has ended well."""
    what = f"the shared run ended, but job {job!r} failed alone on its fair share ({num_gpus} GPUs): {error}"
    if isinstance(error, InvalidInput):
        return InvalidSpec("fairness", True, what.rstrip("."), "Mend that, or go without fairness")
    return PolluxError(what)


def _save(ready: Prepared) -> None:
    for application in sorted({job.application for job in ready.workload.jobs}):
        ready.truths[application].save()


def load_truths(traces: Path | None) -> Mapping[str, Truth]:
    """Of measured traces, or of the built-in applications in any length."""
    return truths_built_in() if traces is None else truths_of_traces(traces)


def default_cluster(workload: str) -> ClusterFile:
    """The cluster that a built-in workload is meant for; else that of the paper."""
    if workload in BUILT_IN:
        meant_for = BUILT_IN[workload]
        return ClusterFile(Cluster.uniform(meant_for.num_nodes, meant_for.gpus_per_node, GPU_TYPE))
    return ClusterFile(Cluster.uniform(16, 4, GPU_TYPE))


def load_workload(name: str, truths: Mapping[str, Truth], cluster: Cluster) -> Workload:
    """The built-in workload of that name, or the file at that path."""
    if name in BUILT_IN:
        return checked(built_in_workload(name), _Limits(truths), cluster)
    if not Path(name).exists():
        known = ", ".join(BUILT_IN)
        raise InvalidSpec("workload", name, "is neither a file nor a built-in workload", f"Built-in ones: {known}")
    return read_workload(Path(name), _Limits(truths), cluster)


class _Limits(Mapping[str, BatchLimits]):
    """Those of truths; these may be of names that they do not list."""

    def __init__(self, truths: Mapping[str, Truth]) -> None:
        self._truths = truths

    def __getitem__(self, name: str) -> BatchLimits:
        return self._truths[name].limits

    def __iter__(self) -> Iterator[str]:
        return iter(self._truths)

    def __len__(self) -> int:
        return len(self._truths)


def spec_of(job: WorkloadJob, truth: Truth, policy: Policy, options: AgentOptions) -> JobSpec:
    """What its owner submits under that policy: with a fixed batch size where batch sizes do not adapt."""
    is_pinned = policy.adapts_gpus and not {job.application, base_name(job.application)}.isdisjoint(options.pinned)
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


def _check_gpu_types(cluster: ClusterFile, truths: Mapping[str, Truth]) -> None:
    """Every application of the workload must be known on every node: a policy may put it anywhere."""
    joining = (change.event.node for change in cluster.changes if isinstance(change.event, NodeJoined))
    for node in (*cluster.cluster, *joining):
        for name, truth in truths.items():
            if node.gpu_type not in truth.gpu_types:
                raise InvalidSpec(
                    f"node {node.id}: gpu_type",
                    node.gpu_type,
                    f"nobody knows how fast {name} is on it",
                    f"Known types: {', '.join(truth.gpu_types)}",
                )


def _policy_options(ready: Prepared) -> dict[str, Any]:
    """All that the policy has, with the values of this run, whether they were set or not."""
    names = registry.describe(ready.scenario.policy)["options"]
    return {name: _plain(getattr(ready.policy, name, None)) for name in names}


def _plain(value: object) -> Any:
    """As JSON holds it. What somebody's own policy has for options may be anything."""
    match value:
        case Enum():
            return _plain(value.value)
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): _plain(part) for key, part in value.items()}
        case list() | tuple():
            return [_plain(part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    return type(value).__name__  # not its text, which may name a place in memory, another in each run


def _inputs(ready: Prepared) -> dict[str, Any]:
    """What a result came from, as JSON holds it."""
    scenario, options = ready.scenario, ready.scenario.options
    return {
        "version": __version__,
        "workload": scenario.workload,
        "policy": scenario.policy,
        "policy_options": _policy_options(ready),
        "adapts_gpus": ready.policy.adapts_gpus,
        "adapts_batch": ready.policy.adapts_batch,
        "traces": None if scenario.traces is None else str(scenario.traces),
        "interval_s": options.interval_s,
        "early_gap_s": options.early_gap_s,
        "seed": options.seed,
        "registry": {kind: known.num_jobs for kind, known in scenario.kinds.items()},
        "world": encode(options.world),
        "agent": encode(options.agent),
        "scheduler": {"in_place": options.scheduler.in_place},
        "nodes": [encode(node) for node in ready.cluster.cluster],
        "changes": [
            {"time_s": change.time_s, "event": encode(change.event, Event)} for change in ready.cluster.changes
        ],
    }
