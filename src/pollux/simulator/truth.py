"""What training really is like in a virtual world: how long passes take, how noisy gradients are, when epochs end.

Never visible to policies, except to those that declare themselves oracles. Two sources: measured traces, read exactly
as the published simulator reads them, and the built-in applications, whose truth is their fitted model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from pollux import applications
from pollux.applications import Application, PassTime
from pollux.applications.fitting import KNOWN
from pollux.applications.measured import Measured, StepTime
from pollux.core import BatchLimits, GradientStats, Shape
from pollux.errors import InvalidDocument, InvalidModel, UnknownName
from pollux.goodput import gain
from pollux.goodput.numerics import FloatArray
from pollux.simulator.qhull import load_qhull
from pollux.simulator.remembered import Remembered
from pollux.simulator.traces import application_names, read_application, step_time_files
from pollux.simulator.workload import base_name

Placement: TypeAlias = tuple[int, ...]
"""GPUs of a job on each of its nodes, in rank order."""
MOST_NODES = 16
"""The artifact measured no more, and takes wider placements to be as slow as this."""
Key = TypeVar("Key", bound=Hashable)


class Truth(Protocol):
    """One application as it really is. Answers are remembered: a simulation asks for the same few millions of times.

    Epochs are statistical and count from 0; progress is in M0-iterations. An epoch outside the run raises InvalidModel.
    """

    name: str
    limits: BatchLimits
    epochs: int
    """Of a whole training run."""
    gpu_types: tuple[str, ...]

    def passes(self, gpu_type: str, placement: Placement, per_gpu_batch_size: int) -> PassTime:
        """How long passes take; InvalidModel where the truth is not known."""
        ...

    def gradient(self, epoch: int, batch_size: int) -> GradientStats:
        """Gradient statistics during an epoch, at the total batch size in use; flat outside M0 … M_max."""
        ...

    def epoch_end(self, epoch: int) -> float:
        """Progress at which an epoch ends."""
        ...

    def iterations(self, epoch: int, batch_size: int) -> float:
        """Iterations from the start of training to the end of an epoch, at one batch size throughout."""
        ...

    def save(self) -> None:
        """Keep for later runs what took long to find out."""
        ...


def truths_of_traces(folder: Path, names: Iterable[str] | None = None) -> dict[str, Truth]:
    """The applications of these names, or all, in a folder of measured traces."""
    wanted = application_names(folder) if names is None else names
    return {
        name: MeasuredTruth(read_application(folder, name), remembered=Remembered(step_time_files(folder, name)))
        for name in wanted
    }


def truths_built_in(names: Iterable[str] | None = None) -> Mapping[str, Truth]:
    """The built-in applications of these names, or all, then in any length."""
    if names is None:
        return BuiltInTruths()
    return {name: FittedTruth(applications.load(name)) for name in names}


class BuiltInTruths(Mapping[str, "Truth"]):
    """The built-in applications, each made when it is first asked for, of the length that its name says.

    Lists their names alone. `cifar10:x`, which says no length, is an InvalidSpec, not a KeyError.
    """

    def __init__(self) -> None:
        self._made: dict[str, Truth] = {}

    def __getitem__(self, name: str) -> Truth:
        if name not in self._made:
            if base_name(name) not in applications.names():
                raise KeyError(name)
            self._made[name] = FittedTruth(applications.load(name))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(applications.names())

    def __len__(self) -> int:
        return len(applications.names())


class MeasuredTruth:
    """Measured traces. A placement that was not measured, up to rotation, is interpolated over nodes, GPUs and m.

    Nothing is extrapolated: per-GPU batch sizes and placements beyond the measured ones raise InvalidModel.
    """

    def __init__(
        self, measured: Measured, gpu_types: tuple[str, ...] = ("t4",), remembered: Remembered | None = None
    ) -> None:
        """`remembered` are interpolated times of earlier runs."""
        _check_epochs(measured)
        self.name = measured.name
        self.gpu_types = gpu_types
        self.limits = _limits(measured)
        self._sizes = sorted(measured.epochs)
        self._rows = [measured.epochs[size] for size in self._sizes]
        self.epochs = len(self._rows[0])
        self._epoch_ends = [min(rows[epoch].progress for rows in self._rows) for epoch in range(self.epochs)]
        self._steps = measured.steps
        self._curves = _curves(measured.steps)
        self._surface: _Surface | None = None
        self._remembered = remembered or Remembered()
        self._passes: dict[tuple[str, Placement, int], PassTime] = {}
        self._gradients: dict[tuple[int, int], GradientStats] = {}

    def passes(self, gpu_type: str, placement: Placement, per_gpu_batch_size: int) -> PassTime:
        key = gpu_type, placement, per_gpu_batch_size
        if (found := self._passes.get(key)) is None:
            if gpu_type not in self.gpu_types:
                raise UnknownName("gpu_type", gpu_type, self.gpu_types)
            found = self._passes[key] = self._interpolated(placement, per_gpu_batch_size)
        return found

    def gradient(self, epoch: int, batch_size: int) -> GradientStats:
        key = epoch, batch_size
        if (found := self._gradients.get(key)) is None:
            _check_epoch(self, epoch)
            below, above, weight = _around(self._sizes, batch_size)
            left, right = self._rows[below][epoch], self._rows[above][epoch]
            found = self._gradients[key] = GradientStats(
                sqr=left.grad_sqr + weight * (right.grad_sqr - left.grad_sqr),
                var=left.grad_var + weight * (right.grad_var - left.grad_var),
            )
        return found

    def epoch_end(self, epoch: int) -> float:
        _check_epoch(self, epoch)
        return self._epoch_ends[epoch]

    def iterations(self, epoch: int, batch_size: int) -> float:
        _check_epoch(self, epoch)
        below, above, weight = _around(self._sizes, batch_size)
        left, right = self._rows[below][epoch].iteration, self._rows[above][epoch].iteration
        return left + weight * (right - left)

    def _interpolated(self, placement: Placement, per_gpu_batch_size: int) -> PassTime:
        if (curve := self._curves.get(_canonical(placement))) is not None:
            found = curve.at(per_gpu_batch_size)
        else:
            key = min(len(placement), MOST_NODES), sum(placement), per_gpu_batch_size
            found = self._remembered.recall(key, self._on_surface)
        if found is None:
            raise InvalidModel(
                "placement",
                placement,
                f"{self.name} was not measured there with {per_gpu_batch_size} examples a GPU",
                f"Stay within {self._extent()}",
            )
        step_time_s, sync_time_s = found
        return PassTime(step_time_s - sync_time_s, step_time_s)

    def _on_surface(self, key: tuple[int, int, int]) -> tuple[float, float] | None:
        if self._surface is None:
            self._surface = _Surface(self._steps)
        return self._surface.at(*key)

    def save(self) -> None:
        self._remembered.save()

    def _extent(self) -> str:
        nodes, gpus = (max(measure(step.placement) for step in self._steps) for measure in (len, sum))
        sizes = [step.per_gpu_batch_size for step in self._steps]
        return f"{nodes} nodes, {gpus} GPUs and {min(sizes)} … {max(sizes)} examples (fewer on many GPUs)"


class FittedTruth:
    """A built-in application, taken at its word: the fitted throughput model and noise curve, without any error."""

    def __init__(self, application: Application) -> None:
        self.name = application.name
        self.limits = application.limits
        self.epochs = application.epochs
        self.gpu_types = tuple(application.throughput)
        self._application = application
        self._passes: dict[tuple[str, Placement, int], PassTime] = {}
        self._gradients: dict[tuple[int, int], GradientStats] = {}
        self._iterations: dict[int, list[float]] = {}

    def passes(self, gpu_type: str, placement: Placement, per_gpu_batch_size: int) -> PassTime:
        key = gpu_type, placement, per_gpu_batch_size
        if (found := self._passes.get(key)) is None:
            shape = Shape(sum(placement), len(placement))
            found = self._passes[key] = self._application.pass_time(gpu_type, shape, per_gpu_batch_size)
        return found

    def gradient(self, epoch: int, batch_size: int) -> GradientStats:
        key = epoch, batch_size
        if (found := self._gradients.get(key)) is None:
            _check_epoch(self, epoch)
            found = self._gradients[key] = self._application.gradient_in_epoch(epoch, batch_size)
        return found

    def epoch_end(self, epoch: int) -> float:
        _check_epoch(self, epoch)
        return self._application.total_progress * (epoch + 1) / self.epochs

    def iterations(self, epoch: int, batch_size: int) -> float:
        _check_epoch(self, epoch)
        if (ends := self._iterations.get(batch_size)) is None:
            ends = self._iterations[batch_size] = self._iteration_ends(batch_size)
        return ends[epoch]

    def save(self) -> None:
        pass  # a formula is quicker than a file

    def _iteration_ends(self, batch_size: int) -> list[float]:
        """By epoch; each takes its progress divided by what an iteration is worth in it."""
        scale = batch_size / self.limits.initial_batch_size
        ends, end = [], 0.0
        for epoch in range(self.epochs):
            noise = self.gradient(epoch, batch_size)
            end += self._application.total_progress / self.epochs / float(gain(noise.sqr, noise.var, scale))
            ends.append(end)
        return ends


class _Curve:
    """(step time, sync time) on one placement, linear in m between measured sizes."""

    def __init__(self, times: dict[int, tuple[float, float]]) -> None:
        self._sizes = sorted(times)
        self._times = [times[size] for size in self._sizes]

    def at(self, per_gpu_batch_size: int) -> tuple[float, float] | None:
        """None outside the measured sizes."""
        if not self._sizes[0] <= per_gpu_batch_size <= self._sizes[-1]:
            return None
        below, above, weight = _around(self._sizes, per_gpu_batch_size)
        (step, sync), (next_step, next_sync) = self._times[below], self._times[above]
        return step + weight * (next_step - step), sync + weight * (next_sync - sync)


class _Surface:
    """(step time, sync time) over nodes, GPUs and m: linear in each tetrahedron of a Delaunay triangulation.

    The points lie on a grid, where a triangulation is a matter of choice: coordinates are unscaled and in the
    artifact's order, so that it is the artifact's. Neighbours may even disagree on the face that they share (by up to
    16 %, at one query in eight), so SciPy's own search decides who answers. The numbers are those of its
    LinearNDInterpolator, computed here because importing that takes longer than all the rest.
    """

    def __init__(self, steps: Sequence[StepTime]) -> None:
        qhull = load_qhull()  # slow; few nodes need none of it
        averaged = _mean_times((_coordinates(step), step) for step in steps if step.is_placement_known)
        points = dict(sorted(averaged.items()))
        points |= {_coordinates(step): _times(step) for step in steps if not step.is_placement_known}
        self._values = np.array(list(points.values()))
        try:
            self._mesh = qhull.Delaunay(np.array(list(points), dtype=float))
        except qhull.QhullError:  # too few points, or all in one plane
            self._mesh = None
            return
        self._transforms = _barycentric(self._mesh.points[self._mesh.simplices])
        # Where SciPy keeps its own, made with LAPACK at the first search: the same numbers, but its threads burn up to
        # seconds of CPU time on a busy machine. Under another name it would be ignored, and be slow again.
        self._mesh._transform = self._transforms

    def at(self, num_nodes: int, num_gpus: int, per_gpu_batch_size: int) -> tuple[float, float] | None:
        """None outside the hull of what was measured."""
        if self._mesh is None:
            return None
        point = np.array((num_nodes, num_gpus, per_gpu_batch_size), dtype=float)
        inside = int(self._mesh.find_simplex(point))
        if inside < 0:
            return None
        transform = self._transforms[inside]
        weights = transform[:3] @ (point - transform[3])
        corners = self._values[self._mesh.simplices[inside]]
        step, sync = weights @ corners[:3] + (1.0 - weights.sum()) * corners[3]
        return float(step), float(sync)


def _barycentric(corners: FloatArray) -> FloatArray:
    """What gives the weights of the first three corners of each tetrahedron, in SciPy's layout.

    corners  [S, 4, 3]
    returns  [S, 4, 3]  W, then the last corner c: weights = W·(x − c); nan for flat ones
    """
    last = corners[:, 3]
    first, second, third = np.moveaxis(corners[:, :3] - last[:, None], 1, 0)  # edges [S, 3]
    normals = np.stack([np.cross(second, third), np.cross(third, first), np.cross(first, second)], axis=1)
    volume = (first * normals[:, 0]).sum(axis=1)  # exactly 0 if flat, as all coordinates are whole
    volume[volume == 0.0] = np.nan
    return np.concatenate([normals / volume[:, None, None], last[:, None]], axis=1)


def _curves(steps: Sequence[StepTime]) -> dict[Placement, _Curve]:
    times = _mean_times(
        ((_canonical(step.placement), step.per_gpu_batch_size), step) for step in steps if step.is_placement_known
    )
    by_placement: dict[Placement, dict[int, tuple[float, float]]] = defaultdict(dict)
    for (placement, size), pair in times.items():
        by_placement[placement][size] = pair
    return {placement: _Curve(by_size) for placement, by_size in by_placement.items()}


def _mean_times(steps: Iterable[tuple[Key, StepTime]]) -> dict[Key, tuple[float, float]]:
    """Mean (step time, sync time) of the rows with the same key."""
    groups: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for key, step in steps:
        groups[key].append(_times(step))
    return {
        key: pairs[0] if len(pairs) == 1 else (_mean(step for step, _ in pairs), _mean(sync for _, sync in pairs))
        for key, pairs in groups.items()
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _times(step: StepTime) -> tuple[float, float]:
    return step.step_time_s, step.sync_time_s


def _coordinates(step: StepTime) -> tuple[int, int, int]:
    return len(step.placement), sum(step.placement), step.per_gpu_batch_size


@lru_cache(maxsize=4096)
def _canonical(placement: Placement) -> Placement:
    """The smallest rotation: around a ring it does not matter where one begins."""
    return min((placement[first:] + placement[:first] for first in range(len(placement))), default=())


def _around(knots: Sequence[int], at: int) -> tuple[int, int, float]:
    """Indices of the rising knots around a number, and the weight of the upper one; the nearest knot outside."""
    above = bisect_left(knots, at)
    if above == len(knots):
        return above - 1, above - 1, 0.0
    if above == 0 or knots[above] == at:
        return above, above, 0.0
    return above - 1, above, (at - knots[above - 1]) / (knots[above] - knots[above - 1])


def _limits(measured: Measured) -> BatchLimits:
    sizes = [step.per_gpu_batch_size for step in measured.steps]
    known = KNOWN.get(measured.name)
    return BatchLimits(
        initial_batch_size=min(measured.epochs),
        max_batch_size=max(measured.epochs),
        min_per_gpu_batch_size=min(sizes),
        max_per_gpu_batch_size=(known and known.max_per_gpu_batch_size) or max(sizes),
    )


def _check_epochs(measured: Measured) -> None:
    lengths = {size: len(rows) for size, rows in measured.epochs.items()}
    if len(set(lengths.values())) != 1:
        fix = "Trace the same epochs at each batch size"
        raise InvalidDocument("traces", measured.name, f"epochs by batch size differ: {lengths}", fix)
    for size, rows in measured.epochs.items():
        if not all(row.progress < later.progress for row, later in pairwise(rows)):
            problem = f"validation-{size}.csv: progress does not rise from epoch to epoch"
            raise InvalidDocument("traces", measured.name, problem, "Mend that column")


def _check_epoch(truth: Truth, epoch: int) -> None:
    if not 0 <= epoch < truth.epochs:
        raise InvalidModel("epoch", epoch, f"{truth.name} has {truth.epochs}", f"Give 0 … {truth.epochs - 1}")
