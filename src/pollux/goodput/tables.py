"""Best goodput over all shapes and many jobs in one call, and an envelope to search when only gradients changed.

For fixed parameters the cost of a candidate, T_iter·(a + b·M0/M) with a + b = 1, is a straight line in the noise share
b, and the best over all candidates is a lower envelope. `Envelope` keeps those lines, so that a round that brings new
gradient statistics but no new parameters only searches it.

Axes: J jobs, S shapes asked for, C classes of shapes that take the same time (equal K and level), L candidate lines in
all classes of a job laid end to end. Jobs with the same limits share one layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pollux.core import BatchLimits, GradientStats, Shape
from pollux.errors import InvalidModel
from pollux.goodput.candidates import BatchOptions, Layout, candidates
from pollux.goodput.efficiency import shares
from pollux.goodput.goodput import GoodputModel
from pollux.goodput.numerics import FloatArray
from pollux.goodput.throughput import ThroughputModel, iteration_times


@dataclass(frozen=True, slots=True, eq=False)
class ShapeSet:
    """Shapes as arrays [S]. What is derived from equal sets is shared."""

    K: FloatArray
    N: FloatArray
    R: FloatArray
    content: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", np.stack([self.K, self.N, self.R]).tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapeSet) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)  # which Python computes once and keeps

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> ShapeSet:
        rows = [(shape.num_gpus, shape.num_nodes, shape.num_racks) for shape in shapes]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    @classmethod
    def up_to(cls, max_nodes: int, max_gpus: int) -> ShapeSet:
        """Every (K, N) with N ≤ max_nodes and N ≤ K ≤ max_gpus, in one rack."""
        return cls.of([Shape(K, N) for N in range(1, max_nodes + 1) for K in range(N, max_gpus + 1)])

    def __len__(self) -> int:
        return len(self.K)

    def __iter__(self) -> Iterator[Shape]:
        for K, N, R in zip(self.K.tolist(), self.N.tolist(), self.R.tolist(), strict=True):
            yield Shape(K, N, R)


class Tables(NamedTuple):
    """For each job and shape [J, S]; zero goodput and zero m where nothing fits the limits."""

    goodput: FloatArray
    per_gpu_batch_size: FloatArray
    accumulation_steps: FloatArray


@lru_cache(maxsize=1024)
def _layout(shapes: ShapeSet, model: ThroughputModel, limits: BatchLimits, options: BatchOptions) -> Layout:
    level_of_shape = np.broadcast_to(model.level(shapes.N, shapes.R), shapes.K.shape).astype(float)
    classes, of_shape = np.unique(np.stack([shapes.K, level_of_shape], axis=1), axis=0, return_inverse=True)
    parts: list[FloatArray] = []
    rank = np.full(len(classes), -1)
    for index, (num_gpus, class_level) in enumerate(classes.tolist()):
        choice = candidates(int(num_gpus), limits, options)
        if len(choice.m):
            rank[index] = len(parts)
            spread = np.full((2, len(choice.m)), [[num_gpus], [class_level]])
            parts.append(np.vstack([spread, choice.m, choice.s, choice.initial_share]))
    K, level, m, s, initial_share = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0))
    length = np.array([part.shape[1] for part in parts], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int64)[: len(parts)]
    rank[rank < 0] = len(parts)
    return Layout(K, level, m, s, initial_share, first, length, rank[of_shape.ravel()])


class _Group(NamedTuple):
    """Jobs that share a throughput model and a layout."""

    rows: FloatArray  # [j] their places among all jobs
    model: ThroughputModel
    theta: FloatArray  # [j, P]
    limits: BatchLimits
    layout: Layout


def _groups(jobs: Sequence[GoodputModel], shapes: ShapeSet) -> list[_Group]:
    """The jobs by layout, without those that fit no shape at all."""
    members: dict[tuple[ThroughputModel, BatchLimits, BatchOptions], list[int]] = {}
    for row, job in enumerate(jobs):
        members.setdefault((job.model, job.limits, job.options), []).append(row)
    groups = []
    for (model, limits, options), rows in members.items():
        layout = _layout(shapes, model, limits, options)  # type: ignore[arg-type]  # models hash by identity
        theta = np.array([jobs[row].theta for row in rows], dtype=float)
        if len(layout.first):
            groups.append(_Group(np.array(rows), model, theta, limits, layout))
    return groups


def _noise_share(gradients: Sequence[GradientStats]) -> FloatArray:
    """[J]: b = var/(sqr + var)."""
    sqr, var = np.array([(gradient.sqr, gradient.var) for gradient in gradients], dtype=float).reshape(-1, 2).T
    return np.asarray(shares(sqr, var)[1])


def _spread(group: _Group, cost: FloatArray, line: FloatArray, out: Tables) -> None:
    """From the best cost and line of each class [j, C] to the shapes asked for."""
    layout, limits = group.layout, group.limits
    values = (limits.initial_batch_size / cost, layout.m[line], layout.s[line])
    for whole, part in zip(out, values, strict=True):
        padded = np.concatenate([part, np.zeros((len(part), 1))], axis=1)
        whole[group.rows] = padded[:, layout.of_shape]


def _empty(num_jobs: int, num_shapes: int) -> Tables:
    return Tables(*np.zeros((3, num_jobs, num_shapes)))


def tables(jobs: Sequence[GoodputModel], shapes: ShapeSet) -> Tables:
    """The best (m, s) of every job for every shape, evaluated afresh."""
    out = _empty(len(jobs), len(shapes))
    share = _noise_share([job.gradient for job in jobs])
    for group in _groups(jobs, shapes):
        cost, line = group.model.cheapest_of_classes(group.theta, share[group.rows], group.layout)
        _spread(group, cost, line, out)
    return out


class Envelope:
    """`tables` for jobs whose parameters stay: built once, then one binary search a class for new gradients.

    Only lines that are lowest for some noise share are kept, with the share from which on each is. No candidate that
    could be best for any gradient is lost; where two are equally good, the other may be named.
    """

    def __init__(self, jobs: Sequence[GoodputModel], shapes: ShapeSet) -> None:
        self._num_jobs = len(jobs)
        self._num_shapes = len(shapes)
        self._parts = [(group, _lower_envelope(group)) for group in _groups(jobs, shapes)]

    def tables(self, gradients: Sequence[GradientStats]) -> Tables:
        """As `tables` of the same jobs with these gradient statistics."""
        if len(gradients) != self._num_jobs:
            raise InvalidModel(
                "gradients", len(gradients), f"the envelope holds {self._num_jobs} jobs", "Give one a job, in order"
            )
        out = _empty(self._num_jobs, self._num_shapes)
        share = _noise_share(gradients)
        for group, hull in self._parts:
            b = share[group.rows, None]
            wanted = hull.segment + b
            found = np.searchsorted(hull.key, wanted.ravel(), side="right").reshape(wanted.shape) - 1
            _spread(group, hull.seconds[found] + b * hull.slope[found], hull.line[found], out)
        return out


NEVER = 1.5
"""A noise share that no gradient has: where lines begin that are lowest only beyond pure noise."""


class _Hull(NamedTuple):
    """Surviving lines of all (job, class) segments, in order; `key` is 2·segment + noise share where a line begins."""

    key: FloatArray  # [H] ascending
    seconds: FloatArray  # [H]
    slope: FloatArray  # [H]
    line: FloatArray  # [H] index into the layout
    segment: FloatArray  # [j, C] 2·segment


def _lower_envelope(group: _Group) -> _Hull:
    lines = iteration_times(group.model, group.theta, group.layout)
    jobs, width = lines.shape
    classes = len(group.layout.first)
    segment = np.repeat(np.arange(jobs * classes), np.tile(group.layout.length, jobs))
    seconds, slope = lines.ravel(), (lines * (group.layout.initial_share - 1.0)).ravel()
    order = np.lexsort((seconds, -slope, segment))
    segment, seconds, slope, line = segment[order], seconds[order], slope[order], order % width
    keep = np.append(True, (segment[1:] != segment[:-1]) | (slope[1:] != slope[:-1]))  # of parallels, the lowest
    while True:
        segment, seconds, slope, line = segment[keep], seconds[keep], slope[keep], line[keep]
        keep = ~_above_neighbours(segment, seconds, slope)
        if keep.all():
            break
    starts_segment = np.append(True, segment[1:] != segment[:-1])
    begin = np.zeros(len(segment))
    inner = ~starts_segment[1:]
    fall = (slope[:-1] - slope[1:])[inner]
    begin[1:][inner] = np.clip((seconds[1:] - seconds[:-1])[inner] / fall, 0.0, NEVER)
    return _Hull(2.0 * segment + begin, seconds, slope, line, 2.0 * np.arange(jobs * classes).reshape(jobs, classes))


def _above_neighbours(segment: FloatArray, seconds: FloatArray, slope: FloatArray) -> FloatArray:
    """Lines that are nowhere lowest because of the lines beside them; removing all of these at once is safe.

    A line that is strictly lowest somewhere is below both neighbours there, so it is never among them.
    """
    above = np.zeros(len(segment), dtype=bool)
    if len(segment) < 3:
        return above
    rise, fall = seconds[1:-1] - seconds[:-2], slope[:-2] - slope[1:-1]
    rise_far, fall_far = seconds[2:] - seconds[:-2], slope[:-2] - slope[2:]
    inside = (segment[:-2] == segment[1:-1]) & (segment[1:-1] == segment[2:])
    above[1:-1] = inside & (rise * fall_far > rise_far * fall)
    return above
