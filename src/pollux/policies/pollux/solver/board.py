"""A round and a plan in the making, as a few tables that the kernels share: nodes, jobs, rows, and lists of nodes.

Nodes are listed by (rack, whether a job on several nodes uses them, free GPUs), so that the best fit for a job is
found, and a job taken in or out, in a time that does not depend on the size of the cluster. Few tables, not many
arrays: every array that a compiled function is handed costs time, most of all when it is compiled.

Pinned jobs only keep what they hold. Their GPUs are not on the board, and the kernels leave them alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray

FREE, SHARED, RACK, GUEST, GUESTS, AFTER, BEFORE, OPEN, OPEN_AT = range(9)
"""Columns of `nodes`. SHARED: 1 if no other job on several nodes may use it; GUEST: where its jobs begin in `guests`;
GUESTS: how many they are; AFTER, BEFORE: its neighbours in its list; OPEN: by position, the nodes with free GPUs in any
order; OPEN_AT: the node's position there."""

VALUE, WIDTH, HELD, HELD_NODES, HELD_GPUS, MOST_NODES, PINNED, ROW, NODES, GPUS, KEPT = range(11)
"""Columns of `jobs`. VALUE: where its values begin; WIDTH: the most GPUs, and one; HELD: where the rows begin that it
held; ROW: where those begin that it has, NODES of them with GPUS altogether; KEPT: 1 if they are what it held."""

NODE, PIECE = 0, 1
"""Columns of `rows`: GPUs of a node."""
HEAD, COUNT = 0, 1
"""Columns of `levels`: the first node of a list, and how many there are."""
WORTH, STAY = 0, 1
"""Columns of `worths`: of what the job has now, and of what it held; −inf if it cannot keep that."""
FEWEST, OFFERED, WHOLE, BULKY = 0, 1, 2, 3
"""Columns of `sizes`: nodes that so many GPUs take at least; 0 if nobody is offered so many; 1 if they are all that any
node has, so that on one node they leave nothing of it to a job on several; what such a piece of a job on several nodes
counts beyond the node itself: nothing, but see `closer`."""
OPEN_NODES, FREE_GPUS = 0, 1
"""In `total`."""

NEVER = -np.inf
"""The value of what a job may not have."""
NOBODY = -1
"""The end of a list of nodes."""


class Board(NamedTuple):
    """Tables, by node, job or otherwise; columns above. The first seven change."""

    nodes: FloatArray  # [N, 9] int
    jobs: FloatArray  # [J, 11] int
    rows: FloatArray  # [P, 2] int
    guests: FloatArray  # int: the jobs of each node, in any order
    levels: FloatArray  # [(racks + 1) · 2 · depth, 2] int: see `level_of`; the last rack stands for all
    worths: FloatArray  # [J, 2]
    total: FloatArray  # [2] int
    value: FloatArray  # at VALUE + class · WIDTH + K: of K GPUs
    spread: FloatArray  # [N + 1, racks + 1] int: class by nodes and racks
    sizes: FloatArray  # [K + 1, 4] int
    classes: int
    racks: int
    depth: int
    """The most GPUs of a node, and one."""
    avoids: bool
    """Of the jobs on several nodes, only one may use a node."""


@compiled
def copy_of(board: Board) -> Board:
    """Another plan for the same round."""
    return Board(
        board.nodes.copy(),
        board.jobs.copy(),
        board.rows.copy(),
        board.guests.copy(),
        board.levels.copy(),
        board.worths.copy(),
        board.total.copy(),
        board.value,
        board.spread,
        board.sizes,
        board.classes,
        board.racks,
        board.depth,
        board.avoids,
    )


@compiled
def offering(board: Board, sizes: FloatArray) -> Board:
    """The same plan, and other sizes on offer."""
    return Board(
        board.nodes,
        board.jobs,
        board.rows,
        board.guests,
        board.levels,
        board.worths,
        board.total,
        board.value,
        board.spread,
        sizes,
        board.classes,
        board.racks,
        board.depth,
        board.avoids,
    )


@lean
def level_of(depth: int, rack: int, shared: int, free: int) -> int:
    """The list of the nodes of a rack with so many free GPUs."""
    return (2 * rack + shared) * depth + free


@lean
def whole_nodes(board: Board, gpus: int) -> int:
    """Nodes that a job with so many GPUs on one node leaves nothing of: one or none."""
    return int(board.sizes[gpus, WHOLE])


@lean
def held_slots(board: Board, job: int) -> int:
    """Nodes that no job on several nodes can use beside this one, if it stays."""
    start, length = board.jobs[job, HELD], board.jobs[job, HELD_NODES]
    if length <= 1:
        return whole_nodes(board, board.jobs[job, HELD_GPUS])
    found = int(length)
    for row in range(start, start + length):
        found += int(board.sizes[board.rows[row, PIECE], BULKY])
    return found


@lean
def enlist(board: Board, node: int, rack: int, shared: int, free: int) -> None:
    """Put a node at the head of a list."""
    level = level_of(board.depth, rack, shared, free)
    follower = board.levels[level, HEAD]
    board.nodes[node, BEFORE], board.nodes[node, AFTER], board.levels[level, HEAD] = NOBODY, follower, node
    if follower != NOBODY:
        board.nodes[follower, BEFORE] = node
    board.levels[level, COUNT] += 1
    board.levels[level_of(board.depth, board.racks, shared, free), COUNT] += 1


@lean
def change(board: Board, node: int, gpus: int, shared: int) -> None:
    """The node has so many more free GPUs; is it shared? Goes from list to list accordingly."""
    nodes, levels, total = board.nodes, board.levels, board.total
    old_free, old_shared, rack = nodes[node, FREE], nodes[node, SHARED], nodes[node, RACK]
    free = old_free + gpus
    level, leader, follower = level_of(board.depth, rack, old_shared, old_free), nodes[node, BEFORE], nodes[node, AFTER]
    if leader == NOBODY:
        levels[level, HEAD] = follower
    else:
        nodes[leader, AFTER] = follower
    if follower != NOBODY:
        nodes[follower, BEFORE] = leader
    levels[level, COUNT] -= 1
    levels[level_of(board.depth, board.racks, old_shared, old_free), COUNT] -= 1
    enlist(board, node, rack, shared, free)
    if old_free == 0 and free > 0:
        nodes[total[OPEN_NODES], OPEN], nodes[node, OPEN_AT] = node, total[OPEN_NODES]
        total[OPEN_NODES] += 1
    elif old_free > 0 and free == 0:
        total[OPEN_NODES] -= 1
        last, at = nodes[total[OPEN_NODES], OPEN], nodes[node, OPEN_AT]
        nodes[at, OPEN], nodes[last, OPEN_AT] = last, at
    total[FREE_GPUS] += gpus
    nodes[node, FREE], nodes[node, SHARED] = free, shared


@lean
def give(board: Board, job: int, node: int, gpus: int, is_apart: bool) -> None:
    """GPUs of a node that it does not use yet. is_apart: in the end it is on several nodes."""
    nodes, jobs = board.nodes, board.jobs
    change(board, node, -gpus, 1 if is_apart and board.avoids else nodes[node, SHARED])
    board.guests[nodes[node, GUEST] + nodes[node, GUESTS]] = job
    nodes[node, GUESTS] += 1
    row = jobs[job, ROW] + jobs[job, NODES]
    board.rows[row, NODE], board.rows[row, PIECE] = node, gpus
    jobs[job, NODES] += 1
    jobs[job, GPUS] += gpus


@lean
def clear(board: Board, job: int) -> None:
    """Take away all that it has."""
    nodes, jobs, guests = board.nodes, board.jobs, board.guests
    for row in range(jobs[job, ROW], jobs[job, ROW] + jobs[job, NODES]):
        node = board.rows[row, NODE]
        change(board, node, board.rows[row, PIECE], 0 if jobs[job, NODES] > 1 else nodes[node, SHARED])
        at = nodes[node, GUEST]
        while guests[at] != job:
            at += 1
        nodes[node, GUESTS] -= 1
        guests[at] = guests[nodes[node, GUEST] + nodes[node, GUESTS]]
    jobs[job, NODES] = jobs[job, GPUS] = jobs[job, KEPT] = 0
    board.worths[job, WORTH] = board.value[jobs[job, VALUE]]


@lean
def settle(board: Board, job: int) -> None:
    """After the last `give`: what its rows are worth. What is worth −inf is taken away again."""
    jobs, rows = board.jobs, board.rows
    start, length, gpus = jobs[job, ROW], jobs[job, NODES], jobs[job, GPUS]
    if gpus == 0:
        return
    racks, worth = 1, NEVER
    if board.racks > 1:
        for row in range(start + 1, start + length):
            is_new = True
            for other in range(start, row):
                is_new &= board.nodes[rows[row, NODE], RACK] != board.nodes[rows[other, NODE], RACK]
            racks += 1 if is_new else 0
    if gpus < jobs[job, WIDTH]:
        worth = board.value[jobs[job, VALUE] + board.spread[length, racks] * jobs[job, WIDTH] + gpus]
    if gpus == jobs[job, HELD_GPUS] and length == jobs[job, HELD_NODES]:
        same = 0
        for held in range(jobs[job, HELD], jobs[job, HELD] + length):
            for row in range(start, start + length):
                same += rows[row, NODE] == rows[held, NODE] and rows[row, PIECE] == rows[held, PIECE]
        if same == length:
            jobs[job, KEPT] = 1
            worth = max(worth, board.worths[job, STAY])
    board.worths[job, WORTH] = worth
    if worth == NEVER:
        clear(board, job)


@lean
def lift(board: Board, job: int, stash: FloatArray) -> int:
    """Take away all that a job has, and remember it in the first rows of `stash`; returns how many these are."""
    start, length = board.jobs[job, ROW], board.jobs[job, NODES]
    for row in range(length):
        stash[row, NODE], stash[row, PIECE] = board.rows[start + row, NODE], board.rows[start + row, PIECE]
    clear(board, job)
    return int(length)


@lean
def put(board: Board, job: int, stash: FloatArray, length: int) -> None:
    """Give a job that has nothing what the first rows of `stash` say."""
    for row in range(length):
        give(board, job, stash[row, NODE], stash[row, PIECE], length > 1)
    settle(board, job)
