"""A snapshot as columns: what is known of each job and what each holds, whatever the GPU type.

Ten thousand jobs are read in every round, and most of the time goes to fetching their parts from memory: one loop
looks at each part of each job once. Axis J: jobs in the order of the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pollux.core import (
    Allocation,
    Basis,
    FrozenMap,
    Job,
    JobId,
    Snapshot,
    ThroughputFit,
)
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.holdings import NO_INTS, NO_ROWS, NOTHING, held_in, in_turn
from pollux.policies.pollux.moment_kernel import ANYWHERE, UNHEARD_OF, Held, read_jobs
from pollux.policies.pollux.places import Nodes, Places, places_of
from pollux.policies.pollux.solver.choices import Rows

NO_LIMIT = 1 << 30
"""GPUs that nobody has."""


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make, in every round
class Moment:
    """All jobs of a snapshot. Arrays are [J]."""

    snapshot: Snapshot
    places: Places
    holdings: Sequence[Allocation]
    """What each holds and can keep; nothing if nodes are gone, drained, smaller now or of a wrong type."""
    held: Rows
    """The same by position of the node among those of its type."""
    ints: FloatArray  # [12, J]: all numbers, in the order of the fields that follow, and which are these
    reals: FloatArray  # [9, J]: all quantities
    flags: FloatArray  # [5, J]: all that are true or false
    row: FloatArray  # int: the same for a job from round to round
    held_gpus: FloatArray  # int
    least: FloatArray  # int: fewest GPUs that its owner allows
    owner_most: FloatArray  # int: most GPUs that its owner allows; NO_LIMIT if there is none
    batch_most: FloatArray  # int: most that its batch sizes can be shared among; NO_LIMIT if they are unknown
    observed: FloatArray  # int: most GPUs that it has been measured with, on any type
    num_reallocations: FloatArray  # int
    version: FloatArray  # int: another whenever its specification, limits or fits are others
    held_type: FloatArray  # int: position of its GPU type; NOWHERE if it holds nothing
    wanted_type: FloatArray  # int: position of the GPU type that it asks for; ANYWHERE, UNHEARD_OF
    sequence: FloatArray  # int
    model_version: (
        FloatArray  # int: another whenever its specification, limits or the parameters of its fits are others
    )
    attained_gpu_s: FloatArray
    age_s: FloatArray
    held_for_s: FloatArray  # since when it holds just what it does; NaN if it holds nothing
    started_ago_s: FloatArray  # since when it was first given GPUs; NaN if it never was
    delay_s: FloatArray  # of one re-allocation, as measured; NaN if nothing is known, like all that follows
    done: FloatArray  # progress in iterations of M0
    total: FloatArray
    initial_batch_size: FloatArray  # M0
    noise: FloatArray  # share b of its gradient that is noise; 1 before any was measured
    pinned: FloatArray  # bool: must keep just that
    single_node: FloatArray  # bool
    ran_before: FloatArray  # bool: it was given GPUs at least once
    has_fixed_batch: FloatArray  # bool
    keeps: FloatArray  # bool: all that is assigned to it

    def __len__(self) -> int:
        return len(self.row)

    @property
    def nodes(self) -> Mapping[str, Nodes]:
        """By GPU type, in alphabetical order."""
        return self.places.by_type

    @property
    def ids(self) -> list[JobId]:
        return list(self.snapshot.jobs)

    @property
    def jobs(self) -> list[Job]:
        return list(self.snapshot.jobs.values())


@dataclass(slots=True, eq=False)
class _Known:
    """What a job had when it was last looked at, and where the facts from it are."""

    id: JobId | None
    row: int
    basis: Basis | None = None
    assigned: Allocation | None = None
    is_like: bool = False
    """When it changed last, only its fits did."""
    is_refitted: bool = True
    """When it changed last, parameters of its fits did, or all."""

    def renew(self, basis: Basis, changed: list[_Known]) -> None:
        """Look at what has changed, or was told again."""
        before, self.basis = self.basis, basis
        is_like = before is not None and before[:2] == basis[:2]
        is_refitted = before is None or not is_like or not _has_same_parameters(before.fits, basis.fits)
        if is_refitted or before is None or before.fits != basis.fits:
            self.is_like, self.is_refitted = is_like, is_refitted
            changed.append(self)


_NOBODY = _Known(None, -1)
"""After the last."""
_NUMBERS = 12
"""Of `Reading.numbers`."""
_FACTS = 11
"""What is remembered of a job: version, observed, model_version, least, owner_most, single_node, keeps, wanted_type,
batch_most, fixed batch, M0 (0: unknown)."""


class Register:
    """Reads snapshots, round after round. It gives the same moment, whatever it remembers."""

    def __init__(self) -> None:
        self._places: Places | None = None
        self._versions = 0
        self._known: list[_Known] = []
        """The jobs of the last round, in order of their ids, as in every snapshot."""
        self._free_rows: list[int] = list(range(64))
        self._facts: FloatArray = np.zeros((64, _FACTS), dtype=np.int64)  # by row
        self._position: FloatArray = np.full(64, -1)  # by row: where it was in the last round
        self._rows = NO_ROWS  # of the last round, and last of nobody

    def read(self, snapshot: Snapshot) -> Moment:
        places, now_s = places_of(snapshot.cluster), snapshot.time_s
        if self._places is not places:
            self._move_to(places)
        row, numbers, assigned, fresh = self._read(snapshot)
        given = fresh, [assigned[each] for each in fresh]
        ints, reals, flags, self._rows, held, all_stay, is_odd = self._laid_out(row, numbers, *given, now_s)
        if is_odd:
            # Who goes first matters now, or somebody keeps only a part.
            assigned, pinned = in_turn(snapshot)
            given = list(range(len(row))), assigned
            ints, _, flags, _, held, all_stay, _ = self._laid_out(row, numbers, *given, now_s, is_settled=True)
            flags[0] = pinned
        if not all_stay:
            assigned = [each if may else NOTHING for each, may in zip(assigned, flags[-1].tolist(), strict=True)]
        return Moment(snapshot, places, assigned, Rows(*held), ints, reals, flags, *ints, *reals, *flags)

    def _laid_out(
        self,
        row: FloatArray,
        numbers: FloatArray,
        fresh: list[int],
        allocations: list[Allocation],
        now_s: float,
        is_settled: bool = False,
    ) -> tuple[FloatArray, FloatArray, FloatArray, Held, Held, bool, bool]:
        """See `read_jobs`."""
        assert self._places is not None
        return read_jobs(
            row,
            self._facts,
            numbers,
            self._position,
            self._rows,
            np.array(fresh, dtype=np.int64) if fresh else NO_INTS,
            held_in(allocations, self._places),
            is_settled,
            now_s,
            self._places.capacity,
            self._places.kind,
            self._places.start,
        )

    def _move_to(self, places: Places) -> None:
        """Forget what depends on nodes."""
        if self._places is None or self._places.by_type.keys() != places.by_type.keys():
            self._free_rows += [known.row for known in self._known]
            self._known = []
        for known in self._known:
            known.assigned = None
        self._places = places

    def _read(self, snapshot: Snapshot) -> tuple[FloatArray, FloatArray, list[Allocation], list[int]]:
        """Row [J] and numbers [J, 12] of each job, what is assigned to each, and who has another allocation than
        in the last round."""
        rows: list[int] = []
        assigned: list[Allocation] = []
        fresh: list[int] = []
        packed: list[bytes] = []
        changed: list[_Known] = []
        order: list[_Known] = []
        before = iter(self._known)
        known = next(before, _NOBODY)
        for job_id, job in snapshot.jobs.items():
            basis, held, numbers = job.reading
            while known.id != job_id and known.id is not None and known.id < job_id:
                self._free_rows.append(known.row)  # it is gone
                known = next(before, _NOBODY)
            if known.id == job_id:
                this, known = known, next(before, _NOBODY)
            else:
                this = self._admitted(job_id)
            if this.assigned is not held:
                this.assigned = held
                fresh.append(len(rows))
            if this.basis is not basis:
                this.renew(basis, changed)
            rows.append(this.row)
            assigned.append(held)
            packed.append(numbers)
            order.append(this)
        self._free_rows += [gone.row for gone in (known, *before) if gone.id is not None]
        self._known = order
        if changed:
            self._take_down(changed)
        numbers_of = np.frombuffer(b"".join(packed)).reshape(-1, _NUMBERS)
        return np.array(rows, dtype=np.int64), numbers_of, assigned, fresh

    def _admitted(self, job_id: JobId) -> _Known:
        """A job that was not there in the last round; nothing is known of it yet."""
        if not self._free_rows:
            length = len(self._facts)
            self._free_rows += range(length, 2 * length)
            self._facts = np.concatenate([self._facts, np.zeros_like(self._facts)])
            self._position = np.concatenate([self._position, np.full_like(self._position, -1)])
        return _Known(job_id, self._free_rows.pop())

    def _take_down(self, changed: Sequence[_Known]) -> None:
        """The facts of those who have changed."""
        assert self._places is not None
        types = tuple(self._places.by_type)
        rows = [known.row for known in changed]
        versions = np.arange(self._versions + 1, self._versions + 1 + len(changed))
        self._versions += len(changed)
        self._facts[rows, 0] = versions
        self._facts[rows, 1] = [_observed(known) for known in changed]
        is_refitted = np.array([known.is_refitted for known in changed])
        self._facts[np.array(rows)[is_refitted], 2] = versions[is_refitted]
        others = [known for known in changed if not known.is_like]
        if others:
            self._facts[[known.row for known in others], 3:] = [_facts(known, types) for known in others]


def _has_same_parameters(before: FrozenMap[str, ThroughputFit], after: FrozenMap[str, ThroughputFit]) -> bool:
    """Whether both foretell the same, however far they can be trusted."""
    if before.keys() != after.keys():
        return False
    return all(before[key].model == fit.model and before[key].params == fit.params for key, fit in after.items())


def _observed(known: _Known) -> int:
    assert known.basis is not None
    return max([fit.max_gpus_observed for fit in known.basis.fits.values()], default=0)


def _facts(known: _Known, types: tuple[str, ...]) -> tuple[int, ...]:
    assert known.basis is not None
    spec, limits, _ = known.basis
    least, most = spec.gpu_bounds
    wanted = ANYWHERE if spec.gpu_type is None else UNHEARD_OF
    if spec.gpu_type in types:
        wanted = types.index(spec.gpu_type)
    batch_most, initial = NO_LIMIT, 0
    if limits is not None:
        initial = limits.initial_batch_size
        largest = spec.requested_batch_size if spec.fixed_batch else limits.max_batch_size
        batch_most = (largest or initial) // limits.min_per_gpu_batch_size
    return (
        least,
        NO_LIMIT if most is None else most,
        spec.single_node,
        not spec.preemptible,
        wanted,
        batch_most,
        spec.fixed_batch,
        initial,
    )
