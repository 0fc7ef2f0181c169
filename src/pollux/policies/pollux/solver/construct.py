"""First plans: jobs take what they wish at the price, those that are hardest to place first."""

from __future__ import annotations

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.board import HELD, HELD_NODES, NEVER, PINNED, STAY, VALUE, Board, put
from pollux.policies.pollux.solver.options import APART, AS_IT_IS, Prices, choose, held_is_free, serve


@compiled
def construct(board: Board, gain: FloatArray, wish: FloatArray, prices: Prices, all_stay: bool) -> None:
    """Fill an empty board. Who wishes to stay does (with all_stay: who can); the others come one by one.

    First those that need more than half a node, the largest first; then those on several nodes, which take what is
    left of nodes; then the small ones. Each has the best that fits for the price by then.
    """
    jobs, widest = len(wish), len(board.sizes)
    key, who, waiting = np.empty(jobs), np.empty(jobs, dtype=np.int64), 0
    for job in range(jobs):
        if board.jobs[job, PINNED] == 1:
            continue
        how, size = wish[job, 0], wish[job, 1]
        stays = board.worths[job, STAY] > NEVER and (all_stay or how == AS_IT_IS)
        if stays and held_is_free(board, job):
            put(board, job, board.rows[board.jobs[job, HELD] :], board.jobs[job, HELD_NODES])
            continue
        key[waiting] = 3.0 - size / widest
        if how == APART:
            key[waiting] -= 1.0
        elif 2 * size >= board.depth:
            loss = gain[job, 0] - gain[job, 1]
            key[waiting] = prices.gpu / (loss + prices.gpu) if loss > 0.0 else 1.0
        who[waiting] = job
        waiting += 1
    for at in np.argsort(key[:waiting]):
        job = who[at]
        how, size = choose(board, job, prices, board.value[board.jobs[job, VALUE]])
        serve(board, job, how, size)
