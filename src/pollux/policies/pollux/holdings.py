"""What jobs hold and can go on holding. Nodes that are gone, drained, smaller now or of a wrong type undo it.

All jobs at once (`moment_kernel`), where nothing is given out twice; one after the other only if it is. Axis J: jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pollux.core import Allocation, FrozenMap, Snapshot
from pollux.goodput.numerics import FloatArray
from pollux.policies.packing import Free, by_arrival, hold_for, pinned
from pollux.policies.pollux.moment_kernel import Held
from pollux.policies.pollux.places import Places
from pollux.policies.pollux.solver.choices import Rows

NOTHING = Allocation()
NO_INTS: FloatArray = np.zeros(0, dtype=np.int64)
NO_ROWS: Held = np.zeros(2, dtype=np.int64), NO_INTS, NO_INTS
"""Of one job that holds nothing."""


def in_turn(snapshot: Snapshot) -> tuple[list[Allocation], FloatArray]:
    """What each can keep, in order of arrival, and who must keep it: those who must not be pre-empted go first."""
    free, jobs = Free(snapshot.cluster), snapshot.jobs.values()
    found = pinned(snapshot, free)
    keeping = frozenset(found)
    for job in by_arrival(jobs):
        if job.assigned and job.id not in keeping and hold_for(job, job.assigned, free, job.spec.gpu_type):
            found[job.id] = job.assigned
    return [found.get(job.id, NOTHING) for job in jobs], np.array([job.id in keeping for job in jobs], dtype=bool)


def held_in(allocations: Sequence[Allocation], places: Places) -> Held:
    """Allocations as rows by position among all nodes; −1 is a node that is gone."""
    if not allocations:
        return NO_ROWS
    gpus = [each.gpus for each in allocations]
    find = places.position.get
    nodes = [find(node, -1) for node in chain.from_iterable(map(FrozenMap.keys, gpus))]
    counts = list(chain.from_iterable(map(FrozenMap.values, gpus)))
    first = offsets(np.array([len(each) for each in gpus], dtype=np.int64))
    return first, np.array(nodes, dtype=np.int64), np.array(counts, dtype=np.int64)


def lengths_of(rows: Rows) -> FloatArray:
    """[J]: nodes."""
    return np.asarray(rows.first[1:] - rows.first[:-1])  # a tenth of the time of np.diff, for few jobs


def offsets(lengths: FloatArray) -> FloatArray:
    """Where each of so many begins, and where the last ends."""
    found = np.zeros(len(lengths) + 1, dtype=np.int64)
    lengths.cumsum(out=found[1:])
    return found
