"""What GPUs are worth to each job: best goodput by spread and number of GPUs, over that of the fair share.

Tables are kept from round to round: a job whose fit and gradient statistics did not change has the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from pollux.core import BatchLimits, GradientStats, Job, JobId, JobSpec, Shape, ThroughputFit
from pollux.goodput import UNKNOWN_GRADIENT, BatchOptions, GoodputModel, ShapeSet, tables
from pollux.goodput.numerics import FloatArray
from pollux.goodput.throughput import ThroughputModel


@dataclass(frozen=True, slots=True, eq=False)
class Spreads:
    """How far a job can be spread, as far as the throughput models at hand can tell."""

    of: FloatArray  # [nodes + 1, racks + 1] int: class of (nodes, racks)
    nodes: tuple[int, ...]
    """Fewest nodes of each class, and racks of a placement of so many nodes."""
    racks: tuple[int, ...]
    most_nodes: tuple[int, ...]
    """Of each class."""


@lru_cache(maxsize=64)
def spreads_known_to(models: frozenset[ThroughputModel], num_nodes: int, num_racks: int) -> Spreads:
    """The classes that at least one of the models tells apart; without models a single one. The same, not only equal,
    for equal arguments."""
    nodes, racks = np.meshgrid(np.arange(1, num_nodes + 1), np.arange(1, num_racks + 1), indexing="ij")
    possible = (racks <= nodes).ravel()
    pairs = np.stack([nodes.ravel(), racks.ravel()], axis=1)[possible]
    levels = [np.broadcast_to(model.level(pairs[:, 0], pairs[:, 1]), len(pairs)) for model in models]
    facts = np.stack([*levels, np.zeros(len(pairs))], axis=1)
    _, first, classes = np.unique(facts, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # by number of nodes, whatever the levels are called
    rank = np.argsort(order)
    of = np.zeros((num_nodes + 1, num_racks + 1), dtype=np.int64)
    of[pairs[:, 0], pairs[:, 1]] = rank[classes.ravel()]
    fewest = pairs[first[order]]
    most = [int(np.argwhere(of[1:, 1:] == index)[:, 0].max()) + 1 for index in range(len(fewest))]
    return Spreads(of, tuple(fewest[:, 0].tolist()), tuple(fewest[:, 1].tolist()), tuple(most))


@dataclass(slots=True)
class _Known:
    """What was found out about a job."""

    spec: JobSpec
    fit: ThroughputFit
    gradient: GradientStats
    limits: BatchLimits
    model: GoodputModel
    made_for: tuple[Spreads, int] | None = None
    """Spreads and GPUs of the largest node that the table is about."""
    table: FloatArray | None = None
    """Goodput [C, up to the largest K asked for so far]."""
    fair_shape: Shape | None = None
    fair_goodput: float = 0.0


class Speedups:
    """Tables of all jobs of one GPU type, round after round."""

    def __init__(self, gpu_type: str, options: BatchOptions) -> None:
        self._gpu_type = gpu_type
        self._options = options
        self._known: dict[JobId, _Known] = {}

    def prepare(self, jobs: Sequence[Job]) -> list[GoodputModel | None]:
        """The model of each job, None before it was fitted. Whoever is not among the jobs is forgotten."""
        self._known = {job.id: known for job in jobs if (known := self._renewed(job)) is not None}
        return [known.model if (known := self._known.get(job.id)) else None for job in jobs]

    def _renewed(self, job: Job) -> _Known | None:
        if job.model is None or (fit := job.model.throughput.get(self._gpu_type)) is None:
            return None
        gradient, limits = job.model.gradient or UNKNOWN_GRADIENT, job.model.limits
        known = self._known.get(job.id)
        if known is not None and known.fit == fit and known.limits == limits and known.spec == job.spec:
            if known.gradient != gradient:
                known.gradient = gradient
                if not job.spec.fixed_batch:
                    known.model = known.model.with_gradient(gradient)
                    known.table = known.fair_shape = None
            return known
        model = GoodputModel.on(job.model.throughput, self._gpu_type, gradient, limits, self._options)
        return _Known(job.spec, fit, gradient, limits, _with_fixed_batch(model, job.spec))

    def table(
        self, jobs: Sequence[Job], most: FloatArray, spreads: Spreads, largest_node: int, fair: Shape
    ) -> FloatArray:
        """Speedups [J, C, K + 1] over the goodput of the fair share, for K up to `most` of each job.

        A job without a model, or that fits no batch size anywhere, is believed to scale perfectly.
        """
        self._fill([job.id for job in jobs], most, spreads, largest_node)
        width = int(most.max(initial=0)) + 1
        found = np.zeros((len(jobs), len(spreads.nodes), width))
        for row, job in enumerate(jobs):
            known = self._known.get(job.id)
            fair_goodput = 0.0 if known is None else self._fair_goodput(known, fair)
            if known is not None and known.table is not None and known.table.any() and fair_goodput > 0.0:
                columns = min(width, known.table.shape[1])
                found[row, :, :columns] = known.table[:, :columns] / fair_goodput
            else:
                found[row] = np.arange(width) / fair.num_gpus
        return found

    def _fill(self, ids: Sequence[JobId], most: FloatArray, spreads: Spreads, largest_node: int) -> None:
        """Make the tables that are missing or too short, in one call for all of about the same length."""
        stale: dict[int, list[_Known]] = {}
        for job_id, limit in zip(ids, most.tolist(), strict=True):
            known = self._known.get(job_id)
            if known is None or limit < 1:
                continue
            if known.table is None or known.made_for != (spreads, largest_node) or known.table.shape[1] <= limit:
                # Powers of two: few lengths, so that what is derived from the shapes is shared.
                stale.setdefault(1 << (limit - 1).bit_length(), []).append(known)
        for length, group in stale.items():
            shapes, place = _shapes(spreads, length, largest_node)
            goodput = tables([known.model for known in group], shapes).goodput
            for known, row in zip(group, goodput, strict=True):
                known.made_for = spreads, largest_node
                known.table = np.zeros((len(spreads.nodes), length + 1))
                known.table[place] = row

    def _fair_goodput(self, known: _Known, fair: Shape) -> float:
        """Goodput on the fair share; on less of it where no batch size fits so many GPUs; 0 if none fits one."""
        if known.fair_shape != fair:
            shape = fair
            goodput = known.model.best(shape).goodput
            while not goodput and shape.num_gpus > 1:
                num_gpus = shape.num_gpus // 2
                num_nodes = min(shape.num_nodes, num_gpus)
                shape = Shape(num_gpus, num_nodes, min(shape.num_racks, num_nodes))
                goodput = known.model.best(shape).goodput
            known.fair_shape, known.fair_goodput = fair, goodput
        return known.fair_goodput


def _with_fixed_batch(model: GoodputModel, spec: JobSpec) -> GoodputModel:
    """For a job that keeps its batch size, whatever that is, only throughput counts (paper, section 4.2)."""
    if not spec.fixed_batch:
        return model
    limits = model.limits
    batch_size = spec.requested_batch_size or limits.initial_batch_size
    # Rounding up to equal shares may exceed it, so the largest batch must not stand in the way.
    limits = replace(limits, initial_batch_size=batch_size, max_batch_size=2 * batch_size)
    options = replace(model.options, fixed_batch=True)
    return GoodputModel(model.model, model.theta, UNKNOWN_GRADIENT, limits, options)


@lru_cache(maxsize=256)
def _shapes(spreads: Spreads, length: int, largest_node: int) -> tuple[ShapeSet, tuple[FloatArray, FloatArray]]:
    """One shape for each class and number of GPUs that can be placed so, and where it stands in a table."""
    places = [
        (index, num_gpus)
        for index, (fewest, most) in enumerate(zip(spreads.nodes, spreads.most_nodes, strict=True))
        for num_gpus in range(fewest, min(length, most * largest_node) + 1)
    ]
    shapes = [Shape(num_gpus, spreads.nodes[index], spreads.racks[index]) for index, num_gpus in places]
    rows, columns = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return ShapeSet.of(shapes), (rows, columns)
