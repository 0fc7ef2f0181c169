"""What a job would best have of the GPUs that are free, at a price for each, and giving it that."""

from __future__ import annotations

from typing import NamedTuple

from pollux.goodput.compiled import lean
from pollux.policies.pollux.solver.board import (
    COUNT,
    FEWEST,
    FREE,
    HEAD,
    HELD,
    HELD_GPUS,
    HELD_NODES,
    MOST_NODES,
    NEVER,
    NOBODY,
    NODE,
    OFFERED,
    PIECE,
    RACK,
    SHARED,
    STAY,
    VALUE,
    WIDTH,
    Board,
    give,
    held_slots,
    level_of,
    put,
    settle,
    whole_nodes,
)

NOTHING, AS_IT_IS, TOGETHER, APART = 0, 1, 2, 3
"""How a job may be served: not at all, with what it held, on one node, on several (APART + 1 + rack: of that rack)."""


class Prices(NamedTuple):
    """What a job pays for."""

    gpu: float
    slot: float
    """Of each node that no job on several nodes can use beside it."""
    apart: float
    """Of each node beyond the fewest possible, as a share of the job's value: decides where values hardly differ."""


@lean
def choose(board: Board, job: int, prices: Prices, nothing: float) -> tuple[int, int]:
    """(how, GPUs) of the best that fits for a job that has nothing, which would be worth so much.

    Among equals it stays, then has fewer GPUs on fewer nodes.
    """
    jobs, levels, depth, sizes = board.jobs, board.levels, board.depth, board.sizes
    first, width, most_nodes = jobs[job, VALUE], jobs[job, WIDTH], jobs[job, MOST_NODES]
    best, how, size = nothing, NOTHING, 0
    if board.worths[job, STAY] > NEVER and held_is_free(board, job):
        slots = held_slots(board, job)
        gain = board.worths[job, STAY] - prices.gpu * jobs[job, HELD_GPUS] - prices.slot * slots
        if gain >= best:
            best, how, size = gain, AS_IT_IS, jobs[job, HELD_GPUS]
    all_whole, all_shared = level_of(depth, board.racks, 0, 0), level_of(depth, board.racks, 1, 0)
    largest = depth - 1
    while largest > 0 and levels[all_whole + largest, COUNT] + levels[all_shared + largest, COUNT] == 0:
        largest -= 1
    for gpus in range(1, min(width - 1, largest) + 1):
        gain = board.value[first + gpus] - prices.gpu * gpus - prices.slot * whole_nodes(board, gpus)
        if gain > best and sizes[gpus, OFFERED] > 0:
            best, how, size = gain, TOGETHER, gpus
    if most_nodes < 2:
        return how, size
    for pool in range(1 if board.racks == 1 else board.racks + 1):
        # The pool of all racks comes first; its nodes are taken to be in as many racks as can be.
        level = all_whole if pool == 0 else level_of(depth, pool - 1, 0, 0)
        gpus = nodes = 0
        for fragment in range(largest, 0, -1):
            for _ in range(min(levels[level + fragment, COUNT], most_nodes - nodes)):
                nodes += 1
                if nodes > 1:
                    at = first + board.spread[nodes, min(nodes, board.racks) if pool == 0 else 1] * width
                    for more in range(gpus + 1, min(gpus + fragment, width - 1) + 1):
                        value = board.value[at + more]
                        if value == NEVER or sizes[more, OFFERED] == 0:
                            continue
                        gain = value - prices.gpu * more - prices.slot * nodes
                        gain -= prices.apart * abs(value) * (nodes - sizes[more, FEWEST])
                        if gain > best:
                            best, how, size = gain, APART + pool, more
                gpus += fragment
                if gpus >= width - 1:
                    break
            if gpus >= width - 1 or nodes == most_nodes:
                break
    return how, size


@lean
def held_is_free(board: Board, job: int) -> bool:
    start, length = board.jobs[job, HELD], board.jobs[job, HELD_NODES]
    for row in range(start, start + length):
        node = board.rows[row, NODE]
        if board.rows[row, PIECE] > board.nodes[node, FREE] or (length > 1 and board.nodes[node, SHARED] == 1):
            return False
    return True


@lean
def serve(board: Board, job: int, how: int, size: int) -> None:
    """Give a job that has nothing what `choose` chose."""
    if how == NOTHING:
        return
    if how == AS_IT_IS:
        put(board, job, board.rows[board.jobs[job, HELD] :], board.jobs[job, HELD_NODES])
        return
    left, rack = size, max(how - APART - 1, -1)
    while left > 0:
        node = best_fit(board, job, left, rack, how == TOGETHER)
        gpus = min(left, board.nodes[node, FREE])
        give(board, job, node, gpus, how != TOGETHER)
        left -= gpus
    settle(board, job)


@lean
def best_fit(board: Board, job: int, size: int, rack: int, may_share: bool) -> int:
    """The node with the fewest free GPUs that are enough, else the one with the most. rack −1: of any.

    Among equals one that is shared (may_share: only then), as others can make less of it; then one that the job holds:
    fewer replicas start anew.
    """
    pool = board.racks if rack < 0 else rack
    whole, shared = level_of(board.depth, pool, 0, 0), level_of(board.depth, pool, 1, 0)
    for turn in range(board.depth - 1):
        # From what is just enough up to the most; then from one less down to one.
        free = size + turn if size + turn < board.depth else board.depth - 1 - turn
        is_shared = may_share and board.levels[shared + free, COUNT] > 0
        if is_shared or board.levels[whole + free, COUNT] > 0:
            return pick(board, job, rack, free, int(is_shared))
    return NOBODY


@lean
def pick(board: Board, job: int, rack: int, free: int, shared: int) -> int:
    """A node with so many free GPUs."""
    start = board.jobs[job, HELD]
    for row in range(start, start + board.jobs[job, HELD_NODES]):
        node = board.rows[row, NODE]
        is_here = rack < 0 or board.nodes[node, RACK] == rack
        if is_here and board.nodes[node, FREE] == free and board.nodes[node, SHARED] == shared:
            return int(node)
    for any_rack in range(board.racks):
        node = board.levels[level_of(board.depth, any_rack, shared, free), HEAD]
        if node != NOBODY and (rack < 0 or rack == any_rack):
            return int(node)
    return NOBODY
