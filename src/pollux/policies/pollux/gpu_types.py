"""Which jobs share which GPUs: each GPU type is a problem of its own, and a job runs on one type at a time."""

from __future__ import annotations

import numpy as np

from pollux.policies.packing import Free
from pollux.policies.pollux.emit import Given
from pollux.policies.pollux.moment import Moment
from pollux.policies.pollux.moment_kernel import ANYWHERE, NOWHERE


def by_gpu_type(moment: Moment) -> dict[str, list[int]]:
    """The jobs that are to run on each type: that which they ask for, else have, else where fewest share the GPUs.

    Jobs are positions in the moment; those who know where they belong come first, and each kind in order of arrival.
    """
    may_choose = moment.wanted_type == ANYWHERE
    if len(moment.nodes) == 1:
        ((gpu_type, nodes),) = moment.nodes.items()
        has_room = np.where(moment.single_node, nodes.largest, nodes.total) >= moment.least
        belongs = (moment.wanted_type == 0) | (may_choose & (has_room | (moment.held_type == 0)))
        return {gpu_type: belongs.nonzero()[0].tolist()}
    kind = np.where(may_choose, moment.held_type, moment.wanted_type)
    is_undecided = may_choose & (moment.held_type == NOWHERE)
    free = Free(moment.snapshot.cluster)
    order = np.argsort(moment.sequence, kind="stable")
    groups = {each: order[(kind == index)[order]].tolist() for index, each in enumerate(moment.nodes)}
    for job in order[is_undecided[order]].tolist():
        wide = [each for each in groups if _has_room(moment, job, free, each)]
        if wide:
            groups[max(wide, key=lambda each: free.by_type[each] / (1 + len(groups[each])))].append(job)
    return groups


def _has_room(moment: Moment, job: int, free: Free, gpu_type: str) -> bool:
    """Whether it could run on what is free of that type."""
    on = free.most_on_one_node(gpu_type) if moment.single_node[job] else free.by_type[gpu_type]
    return bool(on >= moment.least[job])


def second_choices(moment: Moment, groups: dict[str, list[int]], given: Given, settled: set[int]) -> list[str]:
    """Send jobs that went away empty to a type that has GPUs left; the types that now have more jobs.

    Nobody is sent twice: `settled` holds those who were.
    """
    free = Free(moment.snapshot.cluster)
    for job in np.flatnonzero(given.runs).tolist():
        free.hold(given.allocations[job])
    left = dict(free.by_type)
    changed: list[str] = []
    for kind, jobs in groups.items():
        for job in [job for job in jobs if not given.runs[job] and job not in settled]:
            least = int(moment.least[job])
            wide = [
                other
                for other, count in left.items()
                if other != kind and count >= least and _has_room(moment, job, free, other)
            ]
            if moment.wanted_type[job] == ANYWHERE and wide:
                other = max(wide, key=left.__getitem__)
                left[other] -= least
                settled.add(job)
                jobs.remove(job)
                groups[other].append(job)
                changed.append(other)
    return sorted(set(changed))
