"""Improvement: empty a few nodes around a job that has less than it should, and fill them again in another way.

Better answers are kept, worse ones undone. A step costs a few microseconds, whatever the size of the cluster. All
chance comes from one number, so that equal rounds have equal answers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.board import (
    FEWEST,
    FREE_GPUS,
    GPUS,
    GUEST,
    GUESTS,
    HELD,
    HELD_NODES,
    KEPT,
    NEVER,
    NODE,
    NODES,
    OPEN,
    OPEN_NODES,
    PINNED,
    ROW,
    STAY,
    VALUE,
    WORTH,
    Board,
    clear,
    lift,
    put,
)
from pollux.policies.pollux.solver.fill import SLACK
from pollux.policies.pollux.solver.options import Prices, choose, serve

MOST_OUT = 40
"""Jobs that one step may take out: enough for three nodes of eight GPUs."""
REFRESH = 32
"""Steps, or as many as there are jobs, after which jobs are ordered by regret anew."""
WIDE = 16
"""One in so many steps takes out many more jobs."""
MULTIPLIERS = (1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.7, 0.7, 0.3, 0.3, 0.0, 0.0, 1.3, 1.3, 0.03, 0.001)
"""Of the price, in one step. Where idle jobs set the price, it is a thousand times what those that run compare."""
JOB, WAS_ROWS, WAS_KEPT = 0, 1, 2
TURN, WAS_WORTH = 0, 1
"""Columns of the tables of a `Hand`."""


class Hand(NamedTuple):
    """The jobs that a step takes out, and what they had: rows WAS_ROWS … of `stash`."""

    jobs: FloatArray  # [MOST_OUT + 1, 3] int
    ranks: FloatArray  # [MOST_OUT, 2]
    stash: FloatArray  # [., 2] int


@lean
def draw(random: FloatArray) -> int:
    """Some 32 bits, never all 0; `random` [1] holds the state of the generator (xorshift)."""
    x = random[0]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    random[0] = x
    return int(x)


@compiled
def improve(
    board: Board, prices: Prices, gain: FloatArray, random: FloatArray, steps: int, wanted: float
) -> tuple[float, int]:
    """So many steps, or until so much is gained; returns what is, and the steps.

    gain [J, 2] and prices: from `pricing.shop`; random: see `draw`.
    """
    hand = Hand(
        np.zeros((MOST_OUT + 1, 3), dtype=np.int64),
        np.empty((MOST_OUT, 2)),
        np.empty((MOST_OUT * min(len(board.nodes), len(board.sizes)), 2), dtype=np.int64),
    )
    order = by_regret(board, prices, gain)
    gained = 0.0
    for step in range(steps):
        if gained >= wanted or len(order) == 0:
            return gained, step
        if step > 0 and step % max(REFRESH, len(order)) == 0:
            order = by_regret(board, prices, gain)
        # Most often one of the first.
        seed = order[draw(random) % (1 + draw(random) % len(order))]
        count = take_out(board, hand, seed, random)
        # No order can gain more than what these jobs lack, and what is free.
        scale, hope = 0.0, prices.gpu * board.total[FREE_GPUS] if prices.slot == 0.0 else np.inf
        for i in range(count):
            job = hand.jobs[i, JOB]
            worth = charged(board, prices, job)
            hope += gain[job, 0] + prices.gpu * board.jobs[job, GPUS] - worth
            scale += abs(worth)
        if hope <= SLACK * scale:
            continue
        put_in_order(board, hand, count, gain, random)
        for i in range(count):
            job, start = hand.jobs[i, JOB], hand.jobs[i, WAS_ROWS]
            hand.ranks[i, WAS_WORTH], hand.jobs[i, WAS_KEPT] = charged(board, prices, job), board.jobs[job, KEPT]
            hand.jobs[i + 1, WAS_ROWS] = start + lift(board, job, hand.stash[start:])
        served = deal(board, hand, count, prices, gain, random, hope + SLACK * scale)
        # Job by job, and only those that changed: beside an idle one that costs 1e30, sums would tell nothing.
        change, scale, kept = 0.0, 0.0, 0
        for i in range(served):
            job = hand.jobs[i, JOB]
            before, after = hand.ranks[i, WAS_WORTH], charged(board, prices, job)
            change += after - before
            scale += abs(before) if after != before else 0.0
            kept += board.jobs[job, KEPT] - hand.jobs[i, WAS_KEPT]
        is_equal = abs(change) <= SLACK * scale
        if served == count and ((change > 0.0 and not is_equal) or (is_equal and kept >= 0 and draw(random) % 2 == 0)):
            gained += change
        else:
            for i in range(served):
                clear(board, hand.jobs[i, JOB])
            for i in range(count):
                start = hand.jobs[i, WAS_ROWS]
                put(board, hand.jobs[i, JOB], hand.stash[start:], hand.jobs[i + 1, WAS_ROWS] - start)
    return gained, steps


@lean
def charged(board: Board, prices: Prices, job: int) -> float:
    """What its rows are worth, less the charge for being apart. To stay where it is costs nothing."""
    worth, extra = board.worths[job, WORTH], board.jobs[job, NODES] - board.sizes[board.jobs[job, GPUS], FEWEST]
    return float(worth - (prices.apart * abs(worth) * extra if board.jobs[job, KEPT] == 0 else 0.0))


@lean
def regret(board: Board, prices: Prices, gain: FloatArray, job: int) -> float:
    """By how much it has less than it would gain at the price."""
    return float(gain[job, 0] - board.worths[job, WORTH] + prices.gpu * board.jobs[job, GPUS])


@compiled
def by_regret(board: Board, prices: Prices, gain: FloatArray) -> FloatArray:
    """Jobs that are not pinned, those first that regret most."""
    lack, who, count = np.empty(len(gain)), np.empty(len(gain), dtype=np.int64), 0
    for job in range(len(gain)):
        if board.jobs[job, PINNED] == 0:
            lack[count], who[count] = -regret(board, prices, gain, job), job
            count += 1
    return who[:count][np.argsort(lack[:count])]


@lean
def take_out(board: Board, hand: Hand, seed: int, random: FloatArray) -> int:
    """Note this job and all jobs of up to three nodes, besides those that it would go home to; returns how many.

    Now and then also all that are beside those of them that are on several nodes: such a job may have settled in what
    many others left over, and is in the way of them all.
    """
    hand.jobs[0, JOB], count = seed, 1
    goes_home = board.jobs[seed, KEPT] == 0 and board.worths[seed, STAY] > NEVER and draw(random) % 2 == 0
    home = board.jobs[seed, HELD_NODES] if goes_home else 0
    for turn in range(home + draw(random) % 3 + (0 if goes_home else 1)):
        if turn < home:
            count = take_guests(board, hand, board.rows[board.jobs[seed, HELD] + turn, NODE], count)
        else:
            count = take_guests(board, hand, some_node(board, seed, random), count)
    if draw(random) % WIDE == 0:
        for i in range(count):
            start, length = board.jobs[hand.jobs[i, JOB], ROW], board.jobs[hand.jobs[i, JOB], NODES]
            for row in range(start, start + (length if length > 1 else 0)):
                count = take_guests(board, hand, board.rows[row, NODE], count)
    return count


@lean
def take_guests(board: Board, hand: Hand, node: int, count: int) -> int:
    """Note the jobs of a node after so many others; returns how many these are now."""
    start = board.nodes[node, GUEST]
    for at in range(start, start + board.nodes[node, GUESTS]):
        job, is_new = board.guests[at], count < MOST_OUT
        for i in range(count):
            is_new &= hand.jobs[i, JOB] != job
        if is_new:
            hand.jobs[count, JOB] = job
            count += 1
    return count


@lean
def some_node(board: Board, seed: int, random: FloatArray) -> int:
    """A node with free GPUs, one of the job's own or one that it held, or any."""
    jobs, dice = board.jobs, draw(random) % 10
    if dice < 4 and board.total[OPEN_NODES] > 0:
        return int(board.nodes[draw(random) % board.total[OPEN_NODES], OPEN])
    if dice < 7 and jobs[seed, NODES] > 0:
        return int(board.rows[jobs[seed, ROW] + draw(random) % jobs[seed, NODES], NODE])
    if dice < 7 and jobs[seed, HELD_NODES] > 0:
        return int(board.rows[jobs[seed, HELD] + draw(random) % jobs[seed, HELD_NODES], NODE])
    return draw(random) % len(board.nodes)


@lean
def put_in_order(board: Board, hand: Hand, count: int, gain: FloatArray, random: FloatArray) -> None:
    """In which order they come back: by chance, the largest first, by what they lack, or by what a node is worth."""
    way = draw(random) % 5
    for i in range(count):
        job = hand.jobs[i, JOB]
        if way == 0:
            rank = float(draw(random))
        elif way == 1:
            rank = -float(board.jobs[job, GPUS]) - 1e-10 * draw(random)
        elif way == 2:
            rank = board.worths[job, WORTH] - gain[job, 0]
        elif way == 3:
            rank = float(draw(random)) if i > 0 else -1.0
        else:
            rank = gain[job, 1] - gain[job, 0]
        at = i
        while at > 0 and hand.ranks[at - 1, TURN] > rank:
            hand.ranks[at, TURN], hand.jobs[at, JOB] = hand.ranks[at - 1, TURN], hand.jobs[at - 1, JOB]
            at -= 1
        hand.ranks[at, TURN], hand.jobs[at, JOB] = rank, job


@lean
def deal(
    board: Board, hand: Hand, count: int, prices: Prices, gain: FloatArray, random: FloatArray, hope: float
) -> int:
    """Each takes its best; returns how many did before nothing was left to hope for.

    At less than the price they also take what they would not pay for, and nothing stays free.
    """
    share = MULTIPLIERS[draw(random) % len(MULTIPLIERS)]
    last_pays = draw(random) % 2 == 0
    for i in range(count):
        job = hand.jobs[i, JOB]
        if i == count - 1 and not last_pays:
            share = 0.0
        at_price = Prices(prices.gpu * share, prices.slot * share, prices.apart)
        how, size = choose(board, job, at_price, board.value[board.jobs[job, VALUE]])
        serve(board, job, how, size)
        hope -= regret(board, prices, gain, job)
        if hope < 0.0:
            return i + 1
    return count
