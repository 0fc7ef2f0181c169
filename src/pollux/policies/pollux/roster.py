"""Jobs of one GPU type as columns, kept from round to round: what each may have, and its goodput there.

A job's parameters change now and then, its gradient all the time: an envelope is built for the first and searched for
the second (`goodput.envelope`). Policy-neutral: what a goodput is worth is the policy's affair. Memory is linear in
jobs × GPUs that each may have. Axes: J jobs in order of priority, N nodes, C classes of spread, K GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter

import numpy as np

from pollux.core import BatchLimits, Job, JobId, JobSpec, Shape
from pollux.goodput import UNKNOWN_GRADIENT, BatchOptions, GoodputModel
from pollux.goodput.candidates import candidates
from pollux.goodput.envelope import Arena, Slot, Spans
from pollux.goodput.numerics import FloatArray
from pollux.goodput.pooled import Corrected
from pollux.goodput.throughput import ThroughputModel
from pollux.policies.pollux.holdings import offsets
from pollux.policies.pollux.moment import NO_LIMIT, Moment
from pollux.policies.pollux.moment_kernel import held_by
from pollux.policies.pollux.places import Nodes
from pollux.policies.pollux.solver.choices import Choices, Rows
from pollux.policies.pollux.spreads import Spreads, spreads_known_to


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make, in every round
class Facts:
    """Jobs that are to run on one GPU type, in order: pinned ones, then by GPU-seconds attained, fewest first. [J]."""

    moment: Moment
    nodes: Nodes
    spreads: Spreads
    member: FloatArray  # int: position in the moment
    held: Rows
    """What each holds of this type and can keep."""
    held_class: FloatArray  # int: class of spread of what it holds; 0 if that is nothing
    row: FloatArray  # int: the roster's own; all that follow in the moment's order
    held_gpus: FloatArray  # int
    least: FloatArray  # int: fewest GPUs when it runs
    owner_most: FloatArray  # int: most that its owner allows; NO_LIMIT if there is none
    batch_most: FloatArray  # int: most that its batch sizes can be shared among; NO_LIMIT if they are unknown
    observed: FloatArray  # int: most GPUs that it has been measured with, on any type
    num_reallocations: FloatArray  # int
    attained_gpu_s: FloatArray
    age_s: FloatArray
    held_for_s: FloatArray  # since when it holds just what it does; NaN if it holds nothing
    started_ago_s: FloatArray  # since when it was first given GPUs; NaN if it never was
    delay_s: FloatArray  # of one re-allocation, as measured; NaN before
    done: FloatArray  # progress in iterations of M0; NaN if nothing is known
    total: FloatArray
    initial_batch_size: FloatArray  # M0; NaN if it is unknown
    noise: FloatArray  # share of its gradient that is noise, as far as it counts for its batch size
    pinned: FloatArray  # bool: must keep just that
    single_node: FloatArray  # bool
    ran_before: FloatArray  # bool

    def __len__(self) -> int:
        return len(self.member)

    @property
    def job_ids(self) -> list[JobId]:
        ids = self.moment.ids
        return [ids[position] for position in self.member.tolist()]

    @property
    def jobs(self) -> list[Job]:
        jobs = self.moment.jobs
        return [jobs[position] for position in self.member.tolist()]

    @property
    def num_classes(self) -> int:
        return len(self.spreads.nodes)

    def most(self, wish: FloatArray, max_gpus: int | None = None) -> FloatArray:
        """[J] int: the most GPUs that each may have if the policy wishes so many: no less than it has or needs, no more
        than its owner, its batch sizes and the cluster allow; below `least` for a job that cannot run at all."""
        room = np.where(self.single_node, self.nodes.largest, self.nodes.total)
        most = np.maximum(np.maximum(wish, self.held_gpus), self.least)
        for limit in (self.owner_most, room, np.maximum(self.batch_most, self.least)):
            most = np.minimum(most, limit)
        return np.asarray(most if max_gpus is None else np.minimum(most, max_gpus), dtype=np.int64)


@dataclass(slots=True, eq=False)
class Columns(Facts):
    """The same with what GPUs bring: goodput in examples per second that count, as `tables` has it.

    `goodput` is at first[j] + c·(width[j] + 1) + K: 0 for K = 0, where no batch size fits, where a class cannot have
    so many GPUs, and everywhere for a job without a model.
    """

    may_have: FloatArray  # [J] int: most GPUs that it may have in this round
    most_nodes: FloatArray  # [J] int: that it may be on
    width: FloatArray  # [J] int: the larger of what it may have and what it holds
    first: FloatArray  # [J + 1] int
    goodput: FloatArray  # [first[J]]
    has_model: FloatArray  # [J] bool: was fitted on this GPU type, and some batch size fits
    kept_goodput: FloatArray  # [J]: of what it holds; 0 if that is nothing
    fewest: FloatArray  # [C] int: GPUs that a job in that class has at least
    highest: FloatArray  # [C] int: and at most

    def choices(
        self,
        value: FloatArray,
        keep: FloatArray,
        pinned: FloatArray,
        avoid_interference: bool,
        beyond: FloatArray | None = None,
    ) -> Choices:
        """The round in the solver's terms; `value` is laid out as `goodput` is."""
        nodes, of, classes = self.nodes, self.spreads.of, self.num_classes
        rest = self.held, pinned, self.most_nodes, avoid_interference, beyond
        return Choices(nodes.capacity, nodes.rack, of, classes, self.first, value, keep, *rest)


_all_of = attrgetter(*(field.name for field in fields(Facts)))


@dataclass(slots=True)
class _Built:
    """What was made for a job from its fit on this GPU type."""

    model: GoodputModel
    slot: Slot | None = None
    fair: Slot | None = None

    @property
    def at(self) -> int:
        """Where the block of its slot begins; −1 without one."""
        return -1 if self.slot is None else self.slot.at

    @property
    def fair_at(self) -> int:
        return -1 if self.fair is None else self.fair.at


class Fits:
    """Where a roster has the models of jobs from: their own fits. A policy that knows better has its own."""

    def versions(self, moment: Moment, members: FloatArray) -> FloatArray:
        """[J] int ≥ 0, for these positions in the moment: another whenever a job may have another model.

        Asked in each round, before any model.
        """
        return np.asarray(moment.model_version[members])

    def model_of(self, row: int, job: Job, gpu_type: str, options: BatchOptions) -> GoodputModel | None:
        """With no gradient; None if nobody knows how long its passes take there."""
        if job.model is None or gpu_type not in job.model.throughput:
            return None
        return GoodputModel.on(job.model.throughput, gpu_type, UNKNOWN_GRADIENT, job.model.limits, options)

    def is_foreseen(self, rows: FloatArray) -> FloatArray:
        """[J] bool, for these rows of the moment: whether more is known of a job than it has measured itself."""
        return np.zeros(len(rows), dtype=bool)


class Roster:
    """All jobs of one GPU type, round after round. It gives the same columns, whatever it remembers."""

    def __init__(self, gpu_type: str, options: BatchOptions, fits: Fits | None = None) -> None:
        self.gpu_type = gpu_type
        self._options = options
        self.fits = fits or Fits()
        self._arena = Arena()
        self._built: dict[int, _Built] = {}  # by row, like all arrays here
        self._models: list[ThroughputModel] = []
        self._in_use: frozenset[ThroughputModel] = frozenset()  # in the last round
        self._num_rows = 0  # of the last round
        self._geometry: object = None
        self._fewest: FloatArray = np.zeros(0, dtype=np.int64)  # [C]: see `Columns`
        self._highest: FloatArray = np.zeros(0, dtype=np.int64)
        self._fair_shapes: dict[Shape, int] = {}
        self._version: FloatArray = np.full(0, -1)  # that it was built for
        self._model: FloatArray = np.full(0, -1)  # index of its throughput model; −1: none
        self._initial: FloatArray = np.full(0, -1)  # M0 that its batch sizes are compared with
        self._length: FloatArray = np.full(0, -1)  # GPUs that its block is for
        self._at: FloatArray = np.full(0, -1)  # where its block begins; −1: nowhere
        self._fair_for: FloatArray = np.full(0, -1)  # number of the shape that its fair block is for
        self._fair_gpus: FloatArray = np.full(0, -1)  # GPUs of it that some batch size fits
        self._fair_at: FloatArray = np.full(0, -1)

    def read(self, moment: Moment, members: FloatArray) -> Facts:
        """The facts about these jobs (positions in the moment). Whoever is not among them is forgotten."""
        members = members[_in_order(moment.sequence[members], moment.attained_gpu_s[members], moment.pinned[members])]
        rows = moment.row[members]
        if self._renew(moment, members, rows):
            in_use = np.flatnonzero(np.bincount(self._model[rows] + 1)).tolist()
            self._in_use = frozenset(self._models[index - 1] for index in in_use if index > 0)
        nodes = moment.nodes[self.gpu_type]
        spreads = spreads_known_to(self._in_use, len(nodes.ids), nodes.num_racks)
        ints, reals, flags = (table.take(members, axis=1) for table in (moment.ints, moment.reals, moment.flags))
        is_here = ints[8] == tuple(moment.nodes).index(self.gpu_type)
        ints[1] *= is_here
        reals[8][flags[3]] = 1.0
        before = moment.held.first, moment.held.node, moment.held.gpus
        first, node, gpus, held_class = held_by(before, members, is_here, nodes.rack, spreads.of)
        held = Rows(first, node, gpus)
        return Facts(moment, nodes, spreads, members, held, held_class, *ints[:7], *reals, *flags[:3])

    def columns(self, facts: Facts, may_have: FloatArray, max_nodes: int | None = None) -> Columns:
        """With goodput for all sizes up to that [J], and up to what each holds."""
        width = np.maximum(may_have, facts.held_gpus)
        first = offsets(facts.num_classes * (width + 1))
        self._build(facts, width)
        goodput = np.zeros(int(first[-1]))
        initial = self._initial[facts.row]
        self._arena.search(self._at[facts.row], facts.noise, initial, width, facts.num_classes, first, goodput)
        most_nodes = np.where(facts.single_node, 1, len(facts.nodes.ids) if max_nodes is None else max_nodes)
        kept = goodput[first[:-1] + facts.held_class * (width + 1) + facts.held_gpus]
        has_model = np.add.reduceat(goodput, first[:-1]) > 0.0 if len(facts) else np.zeros(0, dtype=bool)
        brought = may_have, most_nodes, width, first, goodput, has_model, kept, self._fewest, self._highest
        return Columns(*(*_all_of(facts), *brought))

    def goodput_on(self, columns: Columns, shape: Shape) -> FloatArray:
        """[J]: best goodput on that shape, the same for all; on ever smaller halves of it where no batch size fits so
        many GPUs. 0 for jobs without a model."""
        found, classes = np.zeros(len(columns)), columns.spreads.of
        if shape.num_nodes < classes.shape[0] and shape.num_racks < classes.shape[1]:
            cls = int(classes[shape.num_nodes, shape.num_racks])
            if columns.fewest[cls] <= shape.num_gpus <= columns.highest[cls]:
                wide = (columns.width >= shape.num_gpus).nonzero()[0]
                found[wide] = columns.goodput[columns.first[wide] + cls * (columns.width[wide] + 1) + shape.num_gpus]
        others = ((found == 0.0) & (self._model[columns.row] >= 0)).nonzero()[0]
        if len(others):
            found[others] = self._apart(columns, others, shape)
        return found

    def _apart(self, columns: Columns, others: FloatArray, shape: Shape) -> FloatArray:
        """`goodput_on` for jobs that have it in no table: from envelopes of a single cell."""
        rows = columns.row[others]
        known = self._fair_shapes.setdefault(shape, len(self._fair_shapes))
        self._build_fair(rows[self._fair_for[rows] != known].tolist(), shape, known)
        num_gpus, found = self._fair_gpus[rows], np.zeros(len(others))
        # Of the only cell: its place among all is the job's own.
        first = np.arange(len(others)) - num_gpus
        self._arena.search(self._fair_at[rows], columns.noise[others], self._initial[rows], num_gpus, 1, first, found)
        return found

    def _renew(self, moment: Moment, members: FloatArray, rows: FloatArray) -> bool:
        """Begin anew with those whose fits, limits or specification have changed; forget those who are gone. Returns
        whether there are any."""
        missing = int(rows.max(initial=-1)) + 1 - len(self._version)
        if missing > 0:
            for name in _BY_ROW:
                setattr(self, name, np.concatenate([getattr(self, name), np.full(2 * missing, -1)]))
        version = self.fits.versions(moment, members)
        stale = self._version[rows] != version
        # Nobody is gone where as many as in the last round are all known.
        is_same = len(rows) == self._num_rows and not stale.any()
        if not is_same:
            self._num_rows = len(rows)
            self._forget_all_but(rows)
        if moved := self._arena.tidy():
            for row in np.flatnonzero((self._at >= moved.start) & (self._at < moved.stop)).tolist():
                self._at[row] = self._built[row].at
            for row in np.flatnonzero((self._fair_at >= moved.start) & (self._fair_at < moved.stop)).tolist():
                self._fair_at[row] = self._built[row].fair_at
        if is_same:
            return False
        jobs = moment.jobs if stale.any() else []
        for row, member in zip(rows[stale].tolist(), members[stale].tolist(), strict=True):
            self._admit(row, jobs[member])
        self._version[rows] = version
        return True

    def _forget_all_but(self, rows: FloatArray) -> None:
        present = np.zeros(len(self._version), dtype=bool)
        present[rows] = True
        gone = np.flatnonzero((self._version >= 0) & ~present)
        for row in gone.tolist():
            self._drop(row)
        self._version[gone] = -1

    def _admit(self, row: int, job: Job) -> None:
        """Begin anew with a job, unless its model is the one of before: only what it has been measured with is new."""
        built, found = self._built.get(row), self.fits.model_of(row, job, self.gpu_type, self._options)
        model = None if found is None else _with_fixed_batch(found, job.spec)
        if built is not None and built.model == model:
            return
        self._drop(row)
        if model is None:
            return
        # Of a corrected model, which is another with every measurement, only the classes of spread count here.
        known = model.model.base if isinstance(model.model, Corrected) else model.model
        if known not in self._models:
            self._models.append(known)
        self._built[row] = _Built(model)
        self._model[row] = self._models.index(known)
        self._initial[row] = model.limits.initial_batch_size

    def _drop(self, row: int) -> None:
        built = self._built.pop(row, None)
        if built is None:
            return
        if built.slot is not None:
            self._arena.release(built.slot)
        if built.fair is not None:
            self._arena.release(built.fair)
        self._model[row] = self._length[row] = self._at[row] = self._fair_for[row] = self._fair_at[row] = -1

    def _build(self, facts: Facts, width: FloatArray) -> None:
        """Envelopes for those who have none, or too short a one, or one for other classes of spread."""
        spreads, rows = facts.spreads, facts.row
        highest = _highest(spreads.most_nodes, len(facts.nodes.ids), facts.nodes.largest)
        geometry = spreads.nodes, spreads.racks, highest
        if geometry != self._geometry:
            self._geometry = geometry
            self._length[:] = 0
            self._fewest, self._highest = np.array(spreads.nodes, dtype=np.int64), np.array(highest, dtype=np.int64)
        short = (self._length[rows] < width) & (self._model[rows] >= 0)
        if not short.any():
            return
        wanted = []
        for row, length in zip(rows[short].tolist(), width[short].tolist(), strict=True):
            levels = _levels(self._models[self._model[row]], spreads.nodes, spreads.racks)
            wanted.append((row, self._built[row].slot, _spans(spreads.nodes, highest, levels, length)))
        for row, slot in self._slots(wanted):
            built = self._built[row]
            before, built.slot = built.slot, slot
            if before is not None:
                self._arena.release(before)
            self._at[row] = slot.at
        self._length[rows[short]] = width[short]

    def _build_fair(self, rows: list[int], shape: Shape, number: int) -> None:
        wanted = []
        for row in rows:
            built = self._built[row]
            model, num_gpus = built.model, _fitting(built.model.limits, built.model.options, shape)
            if built.fair is not None:
                self._arena.release(built.fair)
                built.fair = None
            if num_gpus:
                wanted.append((row, None, _fair_spans(model.model, shape, num_gpus)))  # type: ignore[arg-type]
            self._fair_for[row], self._fair_gpus[row], self._fair_at[row] = number, num_gpus, -1
        for row, slot in self._slots(wanted):
            self._built[row].fair = slot
            self._fair_at[row] = slot.at

    def _slots(self, wanted: Sequence[tuple[int, Slot | None, Spans]]) -> Iterator[tuple[int, Slot]]:
        """Envelopes for the models of some rows, made from narrower ones where there are any; like ones at once."""
        alike: dict[_Alike, list[tuple[int, Slot | None]]] = {}
        for row, before, spans in wanted:
            model = self._built[row].model
            narrow = None if before is None else before.spans
            alike.setdefault((model.model, model.limits, model.options, narrow, spans), []).append((row, before))
        for (throughput, limits, options, _, spans), found in alike.items():
            narrower = [before for _, before in found if before is not None]
            if narrower:
                slots = self._arena.widen_all(narrower, spans)
            else:
                thetas = [self._built[row].model.theta for row, _ in found]
                slots = self._arena.add_all(throughput, thetas, limits, options, spans)
            yield from zip([row for row, _ in found], slots, strict=True)


_Alike = tuple[ThroughputModel, BatchLimits, BatchOptions, Spans | None, Spans]
_BY_ROW = ("_version", "_model", "_initial", "_length", "_at", "_fair_for", "_fair_gpus", "_fair_at")


@lru_cache(maxsize=256)
def _levels(model: ThroughputModel, nodes: tuple[int, ...], racks: tuple[int, ...]) -> tuple[float, ...]:
    """What the model calls each class."""
    levels = np.broadcast_to(model.level(np.array(nodes), np.array(racks)), len(nodes))
    return tuple(float(level) for level in levels)


@lru_cache(maxsize=4096)
def _spans(fewest: tuple[int, ...], highest: tuple[int, ...], levels: tuple[float, ...], length: int) -> Spans:
    """Cells for all that can be placed with up to so many GPUs."""
    return Spans(
        tuple((low, min(high, length), level) for low, high, level in zip(fewest, highest, levels, strict=True))
    )


@lru_cache(maxsize=64)
def _highest(most_nodes: tuple[int, ...], num_nodes: int, largest: int) -> tuple[int, ...]:
    """GPUs that a job of each class has at most. Those that may be on all nodes are not counted: nodes come and go."""
    return tuple(NO_LIMIT if most == num_nodes and most > 1 else most * largest for most in most_nodes)


def _in_order(sequence: FloatArray, attained_gpu_s: FloatArray, pinned: FloatArray) -> FloatArray:
    """Pinned ones first, then by what they attained, then by arrival. Most often they come by arrival and none is
    pinned, which spares two sorts of three."""
    if pinned.any() or (sequence[1:] < sequence[:-1]).any():
        return np.lexsort((sequence, attained_gpu_s, ~pinned))
    return np.argsort(attained_gpu_s, kind="stable")


@lru_cache(maxsize=4096)
def _fitting(limits: BatchLimits, options: BatchOptions, shape: Shape) -> int:
    """GPUs of the shape, or of its half, of half of that …, that some batch size fits; 0 if none does."""
    num_gpus = shape.num_gpus
    while num_gpus and not len(candidates(num_gpus, limits, options).m):
        num_gpus //= 2
    return num_gpus


@lru_cache(maxsize=256)
def _fair_spans(model: ThroughputModel, shape: Shape, num_gpus: int) -> Spans:
    """The cell of so many GPUs of a shape."""
    num_nodes = min(shape.num_nodes, num_gpus)
    return Spans(((num_gpus, num_gpus, float(model.level(num_nodes, min(shape.num_racks, num_nodes)))),))


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
