"""The hot loops of `moment`, `roster` and `emit`: what jobs hold and can keep, and who is moved.

Machine code where numba is installed (see `compiled`): with few jobs a hundred calls of NumPy take longer than all that
they work on. What jobs hold is first, node, gpus as in `Rows`. Axis J: jobs.
"""

from __future__ import annotations

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray

NOWHERE, ANYWHERE, UNHEARD_OF = -1, -1, -2
"""Instead of the position of a GPU type: holds nothing; may run on any; asks for one that the cluster does not have."""

Held = tuple[FloatArray, FloatArray, FloatArray]


@compiled
def merged(known: Held, before: FloatArray, fresh: FloatArray, given: Held) -> Held:
    """What is held by jobs that were at these positions before [J], but for fresh ones, who hold what is given.

    One job that holds nothing follows the last.
    """
    (old_first, old_node, old_gpus), (new_first, new_node, new_gpus) = known, given
    first = np.zeros(len(before) + 2, dtype=np.int64)
    for j in range(len(before)):
        first[j + 1] = old_first[before[j] + 1] - old_first[before[j]]
    for i in range(len(fresh)):
        first[fresh[i] + 1] = new_first[i + 1] - new_first[i]
    for j in range(len(before) + 1):
        first[j + 1] += first[j]
    node, gpus = np.empty(first[-1], dtype=np.int64), np.empty(first[-1], dtype=np.int64)
    i = 0
    for j in range(len(before)):
        begin, end = first[j], first[j + 1]
        if i < len(fresh) and fresh[i] == j:
            for each in range(end - begin):
                node[begin + each], gpus[begin + each] = new_node[new_first[i] + each], new_gpus[new_first[i] + each]
            i += 1
        else:
            source = old_first[before[j]]
            for each in range(end - begin):
                node[begin + each], gpus[begin + each] = old_node[source + each], old_gpus[source + each]
    return first, node, gpus


@compiled
def read_jobs(
    row: FloatArray,
    facts: FloatArray,
    numbers: FloatArray,
    position: FloatArray,
    known: Held,
    fresh: FloatArray,
    given: Held,
    is_settled: bool,
    now_s: float,
    capacity: FloatArray,
    kind: FloatArray,
    start: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray, Held, Held, bool, bool]:
    """Numbers, quantities and flags of jobs as `Moment` has them, and last who keeps what is assigned to it; what is
    assigned; what is kept, with nodes counted within their type; whether all keep it; whether they cannot do so
    together, or somebody who must not.

    row       [J]      of each job in the next two
    facts     [R, 11]  what the register remembers
    numbers   [J, 12]  `Reading.numbers`
    position  [R]      where each was in the last round; now where it is
    known              what was assigned in the last round, given: what fresh jobs have instead
    is_settled         all can keep what is assigned to them
    capacity, kind     of each node, start: first node of a kind
    """
    jobs = len(row)
    ints, reals = np.empty((12, jobs), dtype=np.int64), np.empty((9, jobs))
    flags = np.empty((5, jobs), dtype=np.bool_)
    before = np.empty(jobs, dtype=np.int64)
    for j in range(jobs):
        before[j] = position[row[j]]
    position[:] = -1
    first, node, gpus = merged(known, before, fresh, given)
    held_first = np.zeros(jobs + 1, dtype=np.int64)
    held_node, held_gpus = np.empty(len(node), dtype=np.int64), np.empty(len(node), dtype=np.int64)
    used = np.zeros(len(capacity), dtype=np.int64)
    all_stay, is_odd, end = True, False, 0
    for j in range(jobs):
        at, begin, stop = row[j], first[j], first[j + 1]
        position[at] = j
        least, most, single_node, wanted = facts[at, 3], facts[at, 4], facts[at, 5] > 0, facts[at, 7]
        occupied, stays, of_kind = 0, is_settled or not (single_node and stop - begin > 1), NOWHERE
        for i in range(begin, stop):
            occupied += gpus[i]
            here = kind[node[i]] if node[i] >= 0 else NOWHERE
            if i == begin:
                of_kind = here
            is_right = is_settled or wanted in (ANYWHERE, here)
            stays = stays and here != NOWHERE and here == of_kind and is_right
        since, started, sqr, var = numbers[j, 3], numbers[j, 5], numbers[j, 7], numbers[j, 8]
        runs = not np.isnan(since)
        must_stay = facts[at, 6] > 0 and runs
        is_odd = is_odd or (must_stay and not (stays and least <= occupied <= most))
        all_stay = all_stay and stays
        if stays:
            for i in range(begin, stop):
                used[node[i]] += gpus[i]
                held_node[end], held_gpus[end] = node[i] - start[of_kind], gpus[i]
                end += 1
        held_first[j + 1] = end
        ints[0, j], ints[1, j], ints[2, j] = at, occupied if stays else 0, least
        ints[3, j], ints[4, j], ints[5, j] = most, facts[at, 8], facts[at, 1]
        ints[6, j], ints[7, j] = int(numbers[j, 4]), facts[at, 0]
        ints[8, j], ints[9, j] = of_kind if stays else NOWHERE, wanted
        ints[10, j], ints[11, j] = int(numbers[j, 0]), facts[at, 2]
        held_s = now_s - since if runs and now_s > since else 0.0
        reals[0, j] = numbers[j, 2] + held_s * numbers[j, 6]
        reals[1, j] = max(now_s - numbers[j, 1], 0.0)
        reals[2, j], reals[3, j] = now_s - since, now_s - started
        reals[4, j], reals[5, j], reals[6, j] = numbers[j, 11], numbers[j, 9], numbers[j, 10]
        reals[7, j] = facts[at, 10] if facts[at, 10] > 0 else np.nan
        # As in `efficiency.shares`; all is noise before any gradient was measured.
        reals[8, j] = 1.0 if np.isnan(var) else 0.5 * var / (0.5 * sqr + 0.5 * var)
        flags[0, j], flags[1, j], flags[2, j] = must_stay, single_node, runs or not np.isnan(started)
        flags[3, j], flags[4, j] = facts[at, 9] > 0, stays
    for each in range(len(capacity)):
        is_odd = is_odd or used[each] > capacity[each]
    assigned, held = (first, node, gpus), (held_first, held_node[:end], held_gpus[:end])
    return ints, reals, flags, assigned, held, all_stay, is_odd and not is_settled


@compiled
def held_by(
    held: Held, members: FloatArray, is_here: FloatArray, rack: FloatArray, spread: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """What some jobs hold, in that order, nothing for those who are not here, and its class of spread; 0 for nothing.

    spread  [nodes + 1, racks + 1]  class of so many nodes in so many racks
    rack    [N]                     of each node
    """
    source, node, gpus = held
    racks = spread.shape[1] - 1
    first, of_class = np.zeros(len(members) + 1, dtype=np.int64), np.zeros(len(members), dtype=np.int64)
    for i in range(len(members)):
        j = members[i]
        first[i + 1] = first[i] + (source[j + 1] - source[j] if is_here[i] else 0)
    found_node, found_gpus = np.empty(first[-1], dtype=np.int64), np.empty(first[-1], dtype=np.int64)
    seen = np.full(racks, -1)
    for i in range(len(members)):
        begin, length, num_racks = source[members[i]], first[i + 1] - first[i], 0
        for each in range(length):
            found_node[first[i] + each], found_gpus[first[i] + each] = node[begin + each], gpus[begin + each]
            if seen[rack[node[begin + each]]] != i:
                seen[rack[node[begin + each]]] = i
                num_racks += 1
        of_class[i] = spread[length, num_racks]
    return first, found_node, found_gpus, of_class


@compiled
def changed(
    held: Held, rows: Held, members: FloatArray, runs: FloatArray, is_moved: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Which of the rows [J] are of somebody who runs and is moved; and the members who were moved, and are no longer.

    members [J]: positions in the last two, where it is written who has anything in these rows, and whose differ from
    what is held.
    """
    (held_first, held_node, held_gpus), (first, node, gpus) = held, rows
    moved, back = np.empty(len(members), dtype=np.int64), np.empty(len(members), dtype=np.int64)
    num_moved = num_back = 0
    for j in range(len(members)):
        length, begin, old = first[j + 1] - first[j], first[j], held_first[j]
        runs[members[j]] = length > 0
        differs = held_first[j + 1] - old != length
        for i in range(0 if differs else length):
            differs = differs or node[begin + i] != held_node[old + i] or gpus[begin + i] != held_gpus[old + i]
        if differs and length > 0:
            moved[num_moved] = j
            num_moved += 1
        if is_moved[members[j]] and not differs:
            back[num_back] = members[j]
            num_back += 1
        is_moved[members[j]] = differs
    return moved[:num_moved], back[:num_back]
