"""For small clusters: which combinations of options beat the plan in hand, and can they be placed?

At the prices each option has a regret: how much less a job gains by it than by its best. A plan is worth the bound
less all regrets and less the price of what stays unsold, so that most options are out of the question, and jobs that
keep what they hold say by name what is left of which node. The rest is a search through the options of one job after
the other. It cuts off what dynamic programming over GPUs and nodes tells to cost too much, and what does not fit. What
it finds is the best plan, if it comes to an end; where it gives up, a closer bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.board import (
    FEWEST,
    FREE,
    HELD,
    HELD_GPUS,
    HELD_NODES,
    MOST_NODES,
    NODE,
    NODES,
    PIECE,
    PINNED,
    SHARED,
    STAY,
    VALUE,
    WIDTH,
    Board,
    give,
    held_slots,
    put,
    settle,
    whole_nodes,
)
from pollux.policies.pollux.solver.options import APART, AS_IT_IS, NOTHING, TOGETHER, Prices

HOW, SIZE, SLOTS = 0, 1, 2
"""Columns of `Ways.what`."""
GPUS, IS_APART, MOST, OWNER = 0, 1, 2, 3
"""Columns of the items that are to be placed: GPUs, 1 if on several nodes, on how many at most, and the job."""
JOB, WHERE, PART = 0, 1, 2
"""Columns of `Found.rows`: a job's GPUs of a node."""
NO, YES, PERHAPS = 0, 1, 2
"""Whether items can be placed."""
MOST_WORK = 2_000_000
"""Steps of the dynamic programming. Beyond it, and for nodes of more than so many GPUs, there is no proof."""
MOST_DEPTH = 30
MOST_TRIES = 300
"""To place one combination; it may fit or not then."""
TRIES_A_VISIT = 8
"""Tries to place a combination that take as long as a look at an option."""


class Ways(NamedTuple):
    """The options that are left, job by job; those of the job in place i are at first[i] … first[i + 1] − 1."""

    job: FloatArray  # [J] int: those that hold least come first
    first: FloatArray  # [J + 1] int
    what: FloatArray  # [M, 3] int
    regret: FloatArray  # [M], ascending within a job


class Found(NamedTuple):
    """A plan: what each job has that is not pinned."""

    keeps: FloatArray  # [J] bool: just what it held
    rows: FloatArray  # [GPUs, 3] int: of the others
    num_rows: FloatArray  # [1] int: how many; −1 if there is no plan


@compiled
def search(
    board: Board,
    curves: FloatArray,
    gain: FloatArray,
    prices: Prices,
    supply: tuple[int, int],
    gap: float,
    enough: float,
    visits: int,
) -> tuple[float, Found]:
    """How far below the bound at these prices all plans are, as far as can be told, at most `enough` ≤ gap; and the
    best plan that was found to be nearer.

    board: an empty one; gain: from `pricing.shop`; supply: GPUs, and nodes for jobs on several; gap: how far below the
    bound the plan in hand is; visits: options that may be looked at.
    """
    found = Found(np.zeros(len(board.jobs), dtype=np.bool_), np.zeros((supply[0], 3), dtype=np.int64), np.full(1, -1))
    num_gpus, slots = supply[0], supply[1] if board.avoids else 0
    work = (num_gpus + 1) * (slots + 1)  # for each option; each job has one at least
    if board.depth > MOST_DEPTH or len(board.jobs) * work > MOST_WORK:
        return 0.0, found
    ways = ways_within(board, curves, gain, prices, gap)
    if len(ways.regret) * work > MOST_WORK:
        return 0.0, found
    rest = least_losses(ways, prices, num_gpus, slots)
    jobs, last = len(ways.job), len(ways.job) - 1
    if jobs == 0 or rest[0, num_gpus, slots] >= enough:
        return enough, found
    free, shared = board.nodes[:, FREE].copy(), board.nodes[:, SHARED].copy()
    alike = np.zeros((2, board.depth), dtype=np.int64)
    for node in range(len(free)):
        alike[shared[node], free[node]] += 1
    now, applied = np.zeros(jobs, dtype=np.int64), np.zeros(jobs, dtype=np.bool_)
    left = np.zeros((jobs + 1, 2), dtype=np.int64)
    left[0, 0], left[0, 1] = num_gpus, slots
    lost, items = np.zeros(jobs + 1), np.zeros((jobs + 1, 4), dtype=np.int64)
    sizes = np.zeros(board.depth + 2, dtype=np.int64)
    turn, now[0] = 0, -1
    unknown = enough  # the least of what was not looked at closely
    while turn >= 0:
        way, job = now[turn], ways.job[turn]
        if applied[turn]:
            if ways.what[way, HOW] == AS_IT_IS:
                keep(board, job, free, shared, alike, 1)
            note(sizes, ways.what[way], -1)
            applied[turn] = False
        way += 1
        now[turn] = way
        limit = enough if visits > 0 else min(enough, unknown)
        if way == ways.first[turn + 1] or lost[turn] + ways.regret[way] >= limit:
            turn -= 1
            continue
        gpus, nodes = left[turn, 0] - ways.what[way, SIZE], left[turn, 1] - ways.what[way, SLOTS]
        if gpus < 0 or nodes < 0:
            continue
        least = lost[turn] + ways.regret[way] + rest[turn + 1, gpus, nodes]
        if least >= limit:
            continue
        if visits <= 0:
            unknown = least
            continue
        visits -= 1
        if ways.what[way, HOW] == AS_IT_IS:
            if not is_free(board, job, free, shared):
                continue
            keep(board, job, free, shared, alike, -1)
        note(sizes, ways.what[way], 1)
        applied[turn] = True
        if not may_fit(board, sizes, alike):
            continue
        if turn == last:
            count = items_of(board, ways, now, items)
            fits, tries = PERHAPS, 0
            if board.avoids:
                fits, tries = placed(items, count, free.copy(), shared.copy(), found)
            visits -= tries // TRIES_A_VISIT
            if fits == YES:
                enough = least
                found.keeps[:] = False
                for i in range(jobs):
                    found.keeps[ways.job[i]] = ways.what[now[i], HOW] == AS_IT_IS
            elif fits == PERHAPS:
                unknown = min(unknown, least)
            continue
        lost[turn + 1], left[turn + 1, 0], left[turn + 1, 1] = lost[turn] + ways.regret[way], gpus, nodes
        turn += 1
        now[turn] = ways.first[turn] - 1
    return min(enough, unknown), found


@lean
def settle_as_found(board: Board, found: Found) -> None:
    """Put a plan on an empty board."""
    for job in range(len(board.jobs)):
        if found.keeps[job]:
            put(board, job, board.rows[board.jobs[job, HELD] :], board.jobs[job, HELD_NODES])
    for row in range(found.num_rows[0]):
        job = found.rows[row, JOB]
        is_last = row + 1 == found.num_rows[0] or found.rows[row + 1, JOB] != job
        give(board, job, found.rows[row, WHERE], found.rows[row, PART], board.jobs[job, NODES] > 0 or not is_last)
        if is_last:
            settle(board, job)


@compiled
def ways_within(board: Board, curves: FloatArray, gain: FloatArray, prices: Prices, gap: float) -> Ways:
    """The options that a plan better than that in hand can have."""
    jobs, sizes = board.jobs, board.sizes
    key, who, count, most = np.empty(len(jobs)), np.empty(len(jobs), dtype=np.int64), 0, 0
    for job in range(len(jobs)):
        if jobs[job, PINNED] == 0:
            key[count], who[count] = jobs[job, HELD_GPUS], job
            count += 1
            most += 2 * jobs[job, WIDTH] + 1
    order = who[:count][np.argsort(key[:count])]
    first, what, regret = np.zeros(count + 1, dtype=np.int64), np.empty((most, 3), dtype=np.int64), np.empty(most)
    end = 0
    for i in range(count):
        job = order[i]
        at, width = jobs[job, VALUE] // board.classes, jobs[job, WIDTH]
        for choice in range(2 * width + 1):
            size, how = choice // 2, NOTHING
            if choice == 2 * width:
                how, size, value = AS_IT_IS, jobs[job, HELD_GPUS], board.worths[job, STAY]
                nodes = held_slots(board, job)
            elif choice < 2:
                value, nodes = board.value[jobs[job, VALUE]], 0
            elif choice % 2 == 0:
                how, value, nodes = TOGETHER, curves[at + size, 0], whole_nodes(board, size)
            else:
                how, value, nodes = APART, curves[at + size, 1], max(sizes[size, FEWEST], 2)
            lack = max(gain[job, 0] - (value - prices.gpu * size - prices.slot * nodes), 0.0)
            if choice == 1 or not lack <= gap:
                continue
            place = end
            while place > first[i] and regret[place - 1] > lack:
                regret[place] = regret[place - 1]
                what[place, 0], what[place, 1], what[place, 2] = (
                    what[place - 1, 0],
                    what[place - 1, 1],
                    what[place - 1, 2],
                )
                place -= 1
            regret[place], what[place, HOW], what[place, SIZE] = lack, how, size
            what[place, SLOTS] = nodes if board.avoids else 0
            end += 1
        first[i + 1] = end
    return Ways(order, first, what[:end], regret[:end])


@compiled
def least_losses(ways: Ways, prices: Prices, num_gpus: int, slots: int) -> FloatArray:
    """[J + 1, GPUs + 1, slots + 1]: least regret from the job in place i on, with so much left, and the price of what
    then stays unsold."""
    jobs = len(ways.job)
    found = np.full((jobs + 1, num_gpus + 1, slots + 1), np.inf)
    for gpus in range(num_gpus + 1):
        for nodes in range(slots + 1):
            found[jobs, gpus, nodes] = prices.gpu * gpus + prices.slot * nodes
    for i in range(jobs - 1, -1, -1):
        for way in range(ways.first[i], ways.first[i + 1]):
            size, taken, lack = ways.what[way, SIZE], ways.what[way, SLOTS], ways.regret[way]
            for gpus in range(size, num_gpus + 1):
                for nodes in range(taken, slots + 1):
                    loss = lack + found[i + 1, gpus - size, nodes - taken]
                    found[i, gpus, nodes] = min(found[i, gpus, nodes], loss)
    return found


@lean
def is_free(board: Board, job: int, free: FloatArray, shared: FloatArray) -> bool:
    """Whether what it held is."""
    start, length = board.jobs[job, HELD], board.jobs[job, HELD_NODES]
    for row in range(start, start + length):
        node = board.rows[row, NODE]
        if board.rows[row, PIECE] > free[node] or (length > 1 and shared[node] == 1):
            return False
    return True


@lean
def keep(board: Board, job: int, free: FloatArray, shared: FloatArray, alike: FloatArray, sign: int) -> None:
    """Take what it held (−1), or give it back (1). alike [2, depth]: nodes by whether they are shared and free GPUs."""
    start, length = board.jobs[job, HELD], board.jobs[job, HELD_NODES]
    for row in range(start, start + length):
        node = board.rows[row, NODE]
        alike[shared[node], free[node]] -= 1
        free[node] += sign * board.rows[row, PIECE]
        if length > 1 and board.avoids:
            shared[node] = 1 if sign < 0 else 0
        alike[shared[node], free[node]] += 1


@lean
def note(sizes: FloatArray, what: FloatArray, sign: int) -> None:
    """One more, or one less, in what `may_fit` looks at: jobs on one node by size; then those on several, and their
    GPUs."""
    if what[HOW] == TOGETHER:
        sizes[what[SIZE]] += sign
    elif what[HOW] == APART:
        sizes[-2] += sign
        sizes[-1] += sign * what[SIZE]


@lean
def may_fit(board: Board, sizes: FloatArray, alike: FloatArray) -> bool:
    """False if it is plain that they do not: too few nodes for so many as large as these, or for those on several."""
    large = 0
    for size in range(board.depth - 1, 0, -1):
        if sizes[size] == 0:
            continue
        large += sizes[size]
        room = 0
        for free in range(size, board.depth):
            room += (alike[0, free] + alike[1, free]) * (free // size)
        if room < large:
            return False
    if sizes[-2] == 0 or not board.avoids:
        return True
    slots, gpus = 0, 0
    for free in range(1, board.depth):
        slots += alike[0, free]
        gpus += alike[0, free] * free
    return bool(slots >= 2 * sizes[-2] and gpus >= sizes[-1])


@lean
def items_of(board: Board, ways: Ways, now: FloatArray, items: FloatArray) -> int:
    """What all jobs have that is not bound to nodes: those on one node first, the largest first; how many these are."""
    count = 0
    for i in range(len(now)):
        how, size = ways.what[now[i], HOW], ways.what[now[i], SIZE]
        if how != TOGETHER and how != APART:
            continue
        is_apart, at = 1 if how == APART else 0, count
        while at > 0 and (items[at - 1, IS_APART], -items[at - 1, GPUS]) > (is_apart, -size):
            for column in range(items.shape[1]):
                items[at, column] = items[at - 1, column]
            at -= 1
        job = ways.job[i]
        items[at, GPUS], items[at, IS_APART], items[at, MOST], items[at, OWNER] = (
            size,
            is_apart,
            board.jobs[job, MOST_NODES],
            job,
        )
        count += 1
    return count


@compiled
def placed(items: FloatArray, count: int, free: FloatArray, shared: FloatArray, found: Found) -> tuple[int, int]:
    """Whether all fit, tried one after the other, and after how many tries that is known; where they do, in `found`.

    Changes both arrays. Of nodes that are alike only the first is tried. What an item on several nodes leaves of them
    is of no use: those on one node have theirs already.
    """
    # A step for each item, and for each further node of those on several: the item, what it still needs, from which
    # node on it may take that, its pieces so far, the node that is being tried, and which kinds of node were.
    steps, depth = np.zeros((count + len(free) + 1, 6), dtype=np.int64), 0
    steps[0, 0], steps[0, 1], steps[0, 4] = 0, items[0, GPUS], -1
    for turn in range(MOST_TRIES):
        if depth < 0:
            return NO, turn
        if count == 0:
            found.num_rows[0] = 0
            return YES, turn
        at, left, start, pieces, node, tried = steps[depth]
        size, is_apart = items[at, GPUS], items[at, IS_APART] == 1
        if node >= 0:
            free[node] += 0 if is_apart else size
            shared[node] = 0 if is_apart else shared[node]
        node = max(node + 1, start)
        while node < len(free):
            may = free[node] > 0 and shared[node] == 0 if is_apart else free[node] >= size
            if may and tried & (1 << (2 * free[node] + shared[node])) == 0:
                break
            node += 1
        if node == len(free) or (is_apart and pieces == items[at, MOST]):
            depth -= 1
            continue
        steps[depth, 4], steps[depth, 5] = node, tried | (1 << (2 * free[node] + shared[node]))
        depth += 1
        rest = 0
        if is_apart:
            rest = left - piece_of(left, pieces, free[node])
            shared[node] = 1
        else:
            free[node] -= size
        if rest > 0:
            steps[depth, 0], steps[depth, 1], steps[depth, 2], steps[depth, 3] = at, rest, node + 1, pieces + 1
        elif at + 1 == count:
            found.num_rows[0] = depth
            for i in range(depth):
                at, left, pieces, node = steps[i, 0], steps[i, 1], steps[i, 3], steps[i, 4]
                gpus = piece_of(left, pieces, free[node]) if items[at, IS_APART] == 1 else items[at, GPUS]
                found.rows[i, JOB], found.rows[i, WHERE], found.rows[i, PART] = items[at, OWNER], node, gpus
            return YES, turn
        else:
            steps[depth, 0], steps[depth, 1], steps[depth, 2], steps[depth, 3] = at + 1, items[at + 1, GPUS], 0, 0
        steps[depth, 4], steps[depth, 5] = -1, 0
    return (PERHAPS if depth >= 0 else NO), MOST_TRIES


@lean
def piece_of(left: int, pieces: int, free: int) -> int:
    """What an item on several nodes takes of one of them: one GPU at least is on another."""
    return int(min(free, left - (1 if pieces == 0 else 0)))
