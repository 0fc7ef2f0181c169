"""What policies are tested with: short builders for a scene made by hand, and a strategy that draws consistent ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from pollux.core import (
    Allocation,
    BatchLimits,
    Cluster,
    FrozenMap,
    GradientStats,
    Job,
    JobId,
    JobModel,
    JobSpec,
    Node,
    NodeId,
    Oracle,
    Phase,
    Shape,
    Snapshot,
    ThroughputFit,
)

T = TypeVar("T")

IN_SNAPSHOTS = (Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESIZING, Phase.STOPPING)
"""The phases of jobs that a policy may be asked about."""
GPU_TYPES = ("a100", "t4")
LIMITS = BatchLimits(128, 4096, 16, 512)


def job(
    name: str,
    sequence: int = 0,
    gpus: int | None = None,
    held: Mapping[str, int] | None = None,
    attained_gpu_s: float = 0.0,
    **spec: Any,
) -> Job:
    """A job that requested `gpus`; it runs on `held` (node → GPUs) since second 0, or waits. `spec`: see `JobSpec`."""
    allocation = Allocation(FrozenMap({NodeId(node): count for node, count in (held or {}).items()}))
    return Job(
        JobSpec(JobId(name), requested_gpus=gpus, **spec),
        submitted_at_s=float(sequence),
        sequence=sequence,
        phase=Phase.RUNNING if allocation else Phase.PENDING,
        generation=1 if allocation else 0,
        issued_generation=1 if allocation else 0,
        allocation=allocation,
        attained_gpu_s=attained_gpu_s,
        held_since_s=0.0 if allocation else None,
    )


def snapshot(cluster: Cluster, *jobs: Job, time_s: float = 0.0, oracle: Mapping[str, Oracle] | None = None) -> Snapshot:
    """These jobs on that cluster, at that time."""
    truth = None if oracle is None else FrozenMap({JobId(name): known for name, known in oracle.items()})
    return Snapshot(time_s, 0, cluster, FrozenMap({job.id: job for job in jobs}), truth)


def model(noise: float = 10.0) -> JobModel:
    """What an agent might report: the paper's throughput model, the same for every GPU type."""
    names = ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node", "gamma")
    fit = ThroughputFit("paper", FrozenMap(zip(names, (0.02, 0.001, 0.01, 0.001, 0.05, 0.002, 1.5), strict=True)))
    return JobModel(LIMITS, GradientStats(1.0, noise), FrozenMap(dict.fromkeys(("gpu", *GPU_TYPES), fit)))


MODEL = model()
_CODES = st.integers(0, 2**24 - 1)  # hypothesis draws evenly from ranges up to this size


class _Pick:
    """One of a few options. Many picks share one draw, which is what takes the time; examples shrink to the first."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._code, self._room = 0, 1

    def __call__(self, *options: T) -> T:
        if self._room < len(options):
            self._code, self._room = self._draw(_CODES), 2**24
        self._code, index = divmod(self._code, len(options))
        self._room //= len(options)
        return options[index]

    def number(self, most: int) -> int:
        """From 1 to `most`."""
        chosen: int = self(*range(1, most + 1))
        return chosen


def _oracle(remaining: float | None, useful: int, known: int) -> Oracle:
    """The truth about a job that gains from so many GPUs, told for so many."""
    times = {
        Shape(gpus, nodes): 1.0 / min(gpus, useful) + 0.25 * (nodes - 1)
        for gpus in range(1, known + 1)
        for nodes in range(1, min(gpus, 5) + 1)
    }
    return Oracle(remaining, remaining, FrozenMap(times))


ORACLES = tuple(
    _oracle(remaining, useful, known)
    for remaining, useful, known in itertools.product((100.0, 10.0, 0.0, None), (1, 2, 8), (3, 9, 0))
)


@st.composite
def snapshots(draw: st.DrawFn, max_jobs: int = 7) -> Snapshot:
    """A consistent moment: no GPU is held twice, jobs are in any phase that a policy may meet, the oracle is filled.

    Nodes are uneven, of one or two types, some drained; some that jobs hold have vanished. Some jobs have models.
    """
    pick = _Pick(draw)
    types = pick(GPU_TYPES[:1], GPU_TYPES)
    nodes = [
        Node(NodeId(f"node-{i}"), pick(4, 4, 1, 2, 8), pick(*types), schedulable=pick(*[True] * 5, False))
        for i in range(pick(0, 1, 2, 3, 4, 5))
    ]
    unused = {node.id: node.num_gpus for node in nodes} | {NodeId("vanished"): pick(0, 0, 4)}
    jobs: dict[JobId, Job] = {}
    known: dict[JobId, Oracle] = {}
    arrivals = list(range(pick(*range(max_jobs + 1))))
    while arrivals:
        spec = _spec(pick, f"job-{len(jobs)}")
        jobs[spec.id] = _job(pick, spec, arrivals.pop(pick(*range(len(arrivals)))), unused)
        if pick(True, True, True, False):
            known[spec.id] = pick(*ORACLES)
    return Snapshot(pick(0.0, 600.0, 40_000.0), 1, Cluster.of(*nodes), FrozenMap(jobs), FrozenMap(known))


def _spec(pick: _Pick, name: str) -> JobSpec:
    """Rigid or elastic, on one node or any, with or without bounds, a GPU type, limits and a priority."""
    min_gpus = pick(1, 1, 2, 3)
    requested_gpus = pick(None, 1, 2, 4, 7)
    return JobSpec(
        JobId(name),
        min_gpus=min_gpus,
        max_gpus=pick(None, min_gpus, min_gpus + 3),
        gpu_type=pick(None, None, None, *GPU_TYPES, "unheard-of"),
        requested_gpus=requested_gpus,
        rigid=requested_gpus is not None and pick(False, True),
        single_node=pick(False, False, True),
        preemptible=pick(True, False),
        limits=pick(None, LIMITS),
        priority=pick(0, -1, 1),
    )


def _job(pick: _Pick, spec: JobSpec, sequence: int, unused: dict[NodeId, int]) -> Job:
    """One job; what it occupies is taken out of `unused`."""
    waiting = Job(
        spec,
        float(sequence),
        sequence,
        model=pick(None, MODEL),
        attained_gpu_s=pick(0.0, 1000.0, 57_600.0),
    )
    phase = pick(*IN_SNAPSHOTS)
    max_nodes = 1 if spec.single_node else 2
    held = _allocation(pick, unused, max_nodes) if phase.holds_gpus else None
    if not held:
        return waiting
    target = _allocation(pick, unused, max_nodes) if phase is Phase.RESIZING else None
    return replace(
        waiting,
        phase=phase if target or phase is not Phase.RESIZING else Phase.RUNNING,
        generation=1,
        issued_generation=2 if target else 1,
        allocation=held,
        next_allocation=target,
        held_since_s=pick(0.0, 300.0),
    )


def _allocation(pick: _Pick, unused: dict[NodeId, int], max_nodes: int) -> Allocation | None:
    """GPUs of one or two nodes out of `unused`, no more than allowed; None if there is nothing left."""
    gpus: dict[NodeId, int] = {}
    for _ in range(min(pick(1, 1, 2), max_nodes)):
        candidates = [node for node, count in unused.items() if count > 0 and node not in gpus]
        if candidates:
            node = pick(*candidates)
            gpus[node] = pick.number(min(unused[node], 4))
            unused[node] -= gpus[node]
    return Allocation.of(gpus) or None
