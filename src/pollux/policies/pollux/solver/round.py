"""From `Choices` to an empty board, and what each size can be worth at best; and from a board back to rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.board import (
    FEWEST,
    FREE,
    GUEST,
    HEAD,
    HELD,
    HELD_GPUS,
    HELD_NODES,
    MOST_NODES,
    NEVER,
    NOBODY,
    NODE,
    NODES,
    OFFERED,
    PIECE,
    PINNED,
    RACK,
    ROW,
    SHARED,
    STAY,
    VALUE,
    WHOLE,
    WIDTH,
    WORTH,
    Board,
    change,
    enlist,
    give,
    settle,
)
from pollux.policies.pollux.solver.choices import Choices

_INT = np.dtype(np.int64)
_NOTHING_MORE: FloatArray = np.zeros(0)


class Round(NamedTuple):
    """All that is worked out once a round."""

    empty: Board
    """Nobody has anything, but for the pinned jobs."""
    curves: FloatArray  # at VALUE / C + K: of K GPUs on one node, and on several; −inf where the cluster has no room
    num_gpus: int
    slots: int
    """Nodes that jobs on several nodes can use."""
    fixed: float
    """The value of the pinned jobs."""
    beyond: FloatArray  # as in `Choices`; [0] if no job may have more than there are values for


def prepare(choices: Choices) -> Round:
    held = choices.held
    return laid_out(
        _plain(choices.capacity),
        _plain(choices.rack),
        _plain(choices.spread),
        max(choices.num_classes, 1),
        _plain(choices.first),
        _plain(choices.value, np.dtype(np.float64)),
        _plain(choices.keep, np.dtype(np.float64)),
        (_plain(held.first), _plain(held.node), _plain(held.gpus)),
        _plain(choices.pinned, np.dtype(np.bool_)),
        _plain(choices.most_nodes),
        bool(choices.avoid_interference),
        _NOTHING_MORE if choices.beyond is None else _plain(choices.beyond, np.dtype(np.float64)),
    )


def _plain(array: FloatArray, dtype: np.dtype[np.generic] = _INT) -> FloatArray:
    """As the kernels were compiled for: of this type, contiguous and writable (nobody writes)."""
    return array if array.dtype == dtype and array.flags.carray else np.require(array, dtype, ("C", "W"))


@compiled
def laid_out(
    capacity: FloatArray,
    rack: FloatArray,
    spread: FloatArray,
    classes: int,
    first: FloatArray,
    value: FloatArray,
    keep: FloatArray,
    held: tuple[FloatArray, FloatArray, FloatArray],
    pinned: FloatArray,
    most_nodes: FloatArray,
    avoids: bool,
    beyond: FloatArray,
) -> Round:
    """From the arrays of `Choices`."""
    num_jobs, num_nodes = len(pinned), len(capacity)
    held_first, held_node, held_gpus = held
    jobs = np.zeros((num_jobs, 11), dtype=np.int64)
    room, is_taken, fixed = capacity.copy(), np.zeros(num_nodes, dtype=np.bool_), 0.0
    num_rows, widest = 0, 1
    for job in range(num_jobs):
        begin, end = held_first[job], held_first[job + 1]
        jobs[job, VALUE], jobs[job, WIDTH] = first[job], (first[job + 1] - first[job]) // classes
        jobs[job, HELD_NODES], jobs[job, MOST_NODES] = end - begin, min(most_nodes[job], num_nodes)
        for row in range(begin, end):
            jobs[job, HELD_GPUS] += held_gpus[row]
            if pinned[job]:
                room[held_node[row]] -= held_gpus[row]
                is_taken[held_node[row]] |= avoids and end - begin > 1
        if pinned[job]:
            jobs[job, PINNED] = 1
            fixed += keep[job] if end > begin else value[first[job]]
        jobs[job, ROW] = num_rows
        num_rows += max(min(jobs[job, MOST_NODES], jobs[job, WIDTH] - 1), end - begin)
        widest = max(widest, jobs[job, WIDTH], jobs[job, HELD_GPUS] + 1)
    rows = np.zeros((num_rows + len(held_node), 2), dtype=np.int64)
    for row in range(len(held_node)):
        rows[num_rows + row, NODE], rows[num_rows + row, PIECE] = held_node[row], held_gpus[row]
    worths = np.empty((num_jobs, 2))
    for job in range(num_jobs):
        jobs[job, HELD] = num_rows + held_first[job]
        worths[job, WORTH], worths[job, STAY] = value[first[job]], keep[job]

    racks = 1
    if racks_matter(spread):
        for node in range(num_nodes):
            racks = max(racks, rack[node] + 1)
    nodes, total, depth, slots = np.zeros((num_nodes, 9), dtype=np.int64), 0, 1, 0
    for node in range(num_nodes):
        room[node] = max(room[node], 0)
        nodes[node, SHARED] = 1 if is_taken[node] else 0
        nodes[node, GUEST], nodes[node, RACK] = total, rack[node] if racks > 1 else 0
        total += room[node]
        depth = max(depth, room[node] + 1)
        slots += 1 if room[node] > 0 and not is_taken[node] else 0
    sizes, fewest, reach = np.zeros((widest, 4), dtype=np.int64), 0, 0
    largest = np.sort(room)[::-1]
    for size in range(widest):
        while reach < size and fewest < num_nodes:
            reach += largest[fewest]
            fewest += 1
        sizes[size, FEWEST], sizes[size, OFFERED] = fewest, 1
    # Beside a pinned job on several nodes there is no such node to be used up.
    if 1 < depth <= widest and not (is_taken & (room == depth - 1)).any():
        sizes[depth - 1, WHOLE] = 1
    levels = np.zeros((2 * depth * (racks + 1), 2), dtype=np.int64)
    levels[:, HEAD] = NOBODY
    guests = np.zeros(total, dtype=np.int64)
    sums = np.zeros(2, dtype=np.int64)
    board = Board(nodes, jobs, rows, guests, levels, worths, sums, value, spread, sizes, classes, racks, depth, avoids)
    curves = np.full((len(value) // classes, 2), NEVER)
    usable = np.zeros(num_nodes + 1, dtype=np.int64)
    usable[1:] = np.cumsum(np.sort(np.where(is_taken, 0, room))[::-1])
    survey(board, room, usable, curves)
    return Round(board, curves, total, slots, fixed, beyond)


@lean
def value_of(around: Round, board: Board) -> float:
    """The sum over all jobs."""
    found = 0.0
    for job in range(len(board.jobs)):
        if board.jobs[job, PINNED] == 0:
            found += board.worths[job, WORTH]
    return around.fixed + found


@compiled
def packed_sizes(empty: Board) -> FloatArray:
    """`sizes` with only those offered that pack well: powers of two within a node, whole nodes beyond."""
    sizes = empty.sizes.copy()
    sizes[:, OFFERED] = 0
    size = 1
    while size < min(empty.depth, len(sizes)):
        sizes[size, OFFERED] = 1
        size *= 2
    whole = 0
    for free in np.sort(empty.nodes[:, FREE])[::-1]:
        whole += free
        if whole < len(sizes):
            sizes[whole, OFFERED] = 1
    return sizes


@lean
def racks_matter(spread: FloatArray) -> bool:
    """Whether any number of nodes is another class in other racks."""
    for nodes in range(2, spread.shape[0]):
        for racks in range(2, min(nodes, spread.shape[1] - 1) + 1):
            if spread[nodes, racks] != spread[nodes, 1]:
                return True
    return False


@compiled
def survey(board: Board, room: FloatArray, usable: FloatArray, curves: FloatArray) -> None:
    """List the nodes, fill in the curves, and find out who can stay.

    room [N]: GPUs beside the pinned jobs; usable [N + 1]: of the n largest nodes that jobs on several nodes can use.
    """
    nodes, jobs, rows, classes = board.nodes, board.jobs, board.rows, board.classes
    for node in range(len(nodes) - 1, -1, -1):
        enlist(board, node, nodes[node, RACK], nodes[node, SHARED], nodes[node, FREE])
        change(board, node, room[node], nodes[node, SHARED])
    fewest, most = np.full(classes, len(nodes) + 1), np.zeros(classes, dtype=np.int64)
    for n in range(2, len(nodes) + 1):
        for racks in range(1, min(n, board.racks) + 1):
            found = board.spread[n, racks]
            fewest[found], most[found] = min(fewest[found], n), n
    for job in range(len(jobs)):
        held, at, width = jobs[job, HELD], jobs[job, VALUE] // classes, jobs[job, WIDTH]
        can_stay = jobs[job, HELD_NODES] > 0 and jobs[job, PINNED] == 0
        for row in range(held, held + jobs[job, HELD_NODES]):
            is_taken = jobs[job, HELD_NODES] > 1 and nodes[rows[row, NODE], SHARED] == 1
            can_stay &= rows[row, PIECE] <= room[rows[row, NODE]] and not is_taken
        if not can_stay:
            board.worths[job, STAY] = NEVER
        if jobs[job, PINNED] == 1:
            continue
        for gpus in range(1, min(width, board.depth)):
            curves[at + gpus, 0] = board.value[jobs[job, VALUE] + gpus]
        for of_class in range(classes):
            if fewest[of_class] > jobs[job, MOST_NODES]:
                continue
            reach = usable[min(most[of_class], jobs[job, MOST_NODES])]
            for gpus in range(fewest[of_class], min(width - 1, reach) + 1):
                worth = board.value[jobs[job, VALUE] + of_class * width + gpus]
                curves[at + gpus, 1] = max(curves[at + gpus, 1], worth)


@lean
def lay(board: Board, first: FloatArray, node: FloatArray, gpus: FloatArray) -> None:
    """Put an answer on an empty board."""
    for job in range(len(board.jobs)):
        if board.jobs[job, PINNED] == 0:
            for at in range(first[job], first[job + 1]):
                give(board, job, node[at], gpus[at], first[job + 1] - first[job] > 1)
            settle(board, job)


@compiled
def rows_of(board: Board) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The plan as the arrays of `Rows`, with the pinned jobs; each job's in order of their nodes."""
    jobs, rows = board.jobs, board.rows
    first = np.zeros(len(jobs) + 1, dtype=np.int64)
    for job in range(len(jobs)):
        first[job + 1] = first[job] + (jobs[job, HELD_NODES] if jobs[job, PINNED] == 1 else jobs[job, NODES])
    node, gpus = np.empty(first[-1], dtype=np.int64), np.empty(first[-1], dtype=np.int64)
    for job in range(len(jobs)):
        source = jobs[job, HELD] if jobs[job, PINNED] == 1 else jobs[job, ROW]
        for at in range(first[job], first[job + 1]):
            row = source + at - first[job]
            place = at
            while place > first[job] and node[place - 1] > rows[row, NODE]:
                node[place], gpus[place] = node[place - 1], gpus[place - 1]
                place -= 1
            node[place], gpus[place] = rows[row, NODE], rows[row, PIECE]
    return first, node, gpus
