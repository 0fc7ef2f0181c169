"""What must not be left undone: jobs that wait though they are worth more than what others have, and free GPUs."""

from __future__ import annotations

import numpy as np

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.board import (
    FREE_GPUS,
    GPUS,
    HELD_GPUS,
    NEVER,
    NODE,
    NODES,
    PIECE,
    PINNED,
    ROW,
    STAY,
    VALUE,
    WIDTH,
    WORTH,
    Board,
    lift,
    put,
)
from pollux.policies.pollux.solver.options import Prices, choose, serve

SLACK = 1e-12
"""Relative difference below which two values are taken to be equal."""


@compiled
def rescue(board: Board) -> int:
    """Idle jobs take one GPU each from those that lose least by it, while that pays; returns how many.

    One idle job costs more than a thousand others can make up for where p < 0, so this comes before all finer work.
    """
    jobs, rescued = board.jobs, 0
    gain, loss = np.empty(len(jobs)), np.empty(len(jobs))
    who, whose = np.empty(len(jobs), dtype=np.int64), np.empty(len(jobs), dtype=np.int64)
    stash = np.empty((len(board.nodes), 2), dtype=np.int64)
    while True:
        idle = donors = 0
        for job in range(len(jobs)):
            if jobs[job, PINNED] == 1:
                continue
            if jobs[job, GPUS] > 0:
                loss[donors], whose[donors] = loss_of_one(board, job), job
                donors += 1
            elif jobs[job, WIDTH] > 1:
                at = jobs[job, VALUE]
                gain[idle], who[idle] = board.value[at] - board.value[at + 1], job
                idle += 1
        if idle == 0 or donors == 0 or -gain[:idle].min() <= loss[:donors].min():
            return rescued
        takers, givers = np.argsort(gain[:idle]), np.argsort(loss[:donors])
        before = rescued
        for turn in range(min(idle, donors)):
            least = loss[givers[turn]]
            if -gain[takers[turn]] <= least + SLACK * abs(least):
                break
            put(board, who[takers[turn]], stash, take_one(board, whose[givers[turn]], stash))
            rescued += 1
        if rescued == before:
            return rescued


@lean
def smallest_row(board: Board, job: int) -> int:
    """The first of its rows with the fewest GPUs."""
    start = board.jobs[job, ROW]
    found = start
    for row in range(start + 1, start + board.jobs[job, NODES]):
        if board.rows[row, PIECE] < board.rows[found, PIECE]:
            found = row
    return int(found)


@lean
def loss_of_one(board: Board, job: int) -> float:
    """What it loses with one GPU of its smallest row; ∞ if it may not have what is left."""
    first, left, width = board.jobs[job, VALUE], board.jobs[job, GPUS] - 1, board.jobs[job, WIDTH]
    nodes = board.jobs[job, NODES] - (1 if board.rows[smallest_row(board, job), PIECE] == 1 else 0)
    if left >= width:
        return np.inf
    # In how many racks is left out: to take it for the most is on the safe side.
    of_class = board.spread[nodes, min(nodes, board.racks)] if left > 0 else 0
    return float(board.worths[job, WORTH] - board.value[first + of_class * width + left])


@lean
def take_one(board: Board, job: int, stash: FloatArray) -> int:
    """Take away one GPU of its smallest row, and put it into `stash`; returns the length of that, which is one."""
    at = smallest_row(board, job) - board.jobs[job, ROW]
    length = lift(board, job, stash)
    node = stash[at, NODE]
    stash[at, PIECE] -= 1
    if stash[at, PIECE] == 0:
        length -= 1
        stash[at, NODE], stash[at, PIECE] = stash[length, NODE], stash[length, PIECE]
    put(board, job, stash, length)
    stash[0, NODE], stash[0, PIECE] = node, 1
    return int(stash[0, PIECE])


@compiled
def fill(board: Board, price: float, everybody: bool) -> float:
    """Jobs change to what they gain more by at this price, if that is free; returns what their values gain.

    everybody: none waits beside GPUs that it could run on, even where the objective sees nothing in it.
    """
    prices, gained = Prices(price, 0.0, 0.0), 0.0
    stash = np.empty((len(board.nodes), 2), dtype=np.int64)
    for job in range(len(board.jobs)):
        free, gpus = board.total[FREE_GPUS], board.jobs[job, GPUS]
        if free == 0:
            break
        must_run = everybody and gpus == 0
        if board.jobs[job, PINNED] == 1 or not (must_run or could_gain(board, job, price, gpus + free)):
            continue
        before = board.worths[job, WORTH]
        length = lift(board, job, stash)
        how, size = choose(board, job, prices, NEVER if must_run else before - price * gpus)
        serve(board, job, how, size)
        if gpus > 0 and board.jobs[job, GPUS] == 0:
            put(board, job, stash, length)
        gained += board.worths[job, WORTH] - before
    return gained


@lean
def could_gain(board: Board, job: int, price: float, most: int) -> bool:
    """Whether up to so many GPUs could be worth more to it than what it has, wherever they are."""
    first, width = board.jobs[job, VALUE], board.jobs[job, WIDTH]
    gain = board.worths[job, WORTH] - price * board.jobs[job, GPUS]
    if board.worths[job, STAY] - price * board.jobs[job, HELD_GPUS] > gain:
        return True
    for of_class in range(board.classes):
        for gpus in range(1, min(width - 1, most) + 1):
            if board.value[first + of_class * width + gpus] - price * gpus > gain:
                return True
    return False
