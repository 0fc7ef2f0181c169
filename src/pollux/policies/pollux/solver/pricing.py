"""The price of a GPU, and with it the bound: no plan is worth more than what jobs would gain by shopping freely.

At price λ a GPU, and μ a node that a job on several nodes uses, or that a job uses up, job j gains at most

    gain_j = max over its options of  value − λ·GPUs − μ·nodes (if several, or if it has the whole node).

Any plan's sum is then at most  U = λ·(all GPUs) + μ·(all nodes) + Σ_j gain_j,  whatever λ, μ ≥ 0. The best λ is where
the jobs together ask for just as many GPUs as there are: the slope at which the last GPU goes on their concave hulls.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.board import (
    FEWEST,
    HELD_GPUS,
    NEVER,
    OFFERED,
    PINNED,
    STAY,
    VALUE,
    WIDTH,
    Board,
    held_slots,
    whole_nodes,
)
from pollux.policies.pollux.solver.options import APART, AS_IT_IS, NOTHING, TOGETHER
from pollux.policies.pollux.solver.round import Round

BELOW = 1.0 - 1e-7
"""Of the price at which the last GPU goes: there its buyer gains nothing by it, and would as soon stay idle."""
SLOT_STEPS, FEWEST_SLOT_STEPS, SLOT_WORK = 14, 4, 14_000
"""Halvings in the search for the price of a node, and their product with the number of jobs: any price is valid, and
with very many jobs another one hardly makes the bound closer."""


class Wishes(NamedTuple):
    """What each job would have at a price."""

    price: float
    slot_price: float
    bound: float
    """Of the values of all jobs that are not pinned."""
    gain: FloatArray  # [J, 2]: of what it would have, and of the best that needs no node with more than half free
    wish: FloatArray  # [J, 2] int: how, and how many GPUs


@compiled
def wishes_at_best_price(around: Round, board: Board) -> Wishes:
    """At the prices with the lowest bound, as far as the board offers sizes."""
    best, asked = wishes_at(around, board, 0.0)
    if not board.avoids or asked <= around.slots:
        return best
    low, high = 0.0, best.price * board.depth
    for _ in range(max(FEWEST_SLOT_STEPS, min(SLOT_STEPS, SLOT_WORK // len(board.jobs)))):
        middle = (low + high) / 2
        found, asked = wishes_at(around, board, middle)
        if found.bound < best.bound:
            best = found
        if asked > around.slots:
            low = middle
        else:
            high = middle
    return best


@compiled
def wishes_at(around: Round, board: Board, slot_price: float) -> tuple[Wishes, int]:
    """And how many nodes are asked for by jobs on several."""
    gain, wish = np.zeros((len(board.jobs), 2)), np.zeros((len(board.jobs), 2), dtype=np.int64)
    price = BELOW * find_price(board, around.curves, slot_price, around.num_gpus)
    bound, asked = shop(board, around.curves, price, slot_price, gain, wish)
    bound += price * around.num_gpus + slot_price * around.slots + left_out(around, price, gain)
    return Wishes(price, slot_price, bound, gain, wish), asked


@lean
def left_out(around: Round, price: float, gain: FloatArray) -> float:
    """What jobs could gain on top of that by GPUs that there are no values for."""
    found = 0.0
    for job in range(len(around.beyond)):
        found += max(around.beyond[job] - price * around.empty.jobs[job, WIDTH] - gain[job, 0], 0.0)
    return found


@compiled
def find_price(board: Board, curves: FloatArray, slot_price: float, left: int) -> float:
    """The lowest price at which jobs ask for no more GPUs than are left.

    Each job's best values by size are made concave; then GPUs go where the slope is steepest until none is left.
    """
    jobs, sizes = board.jobs, board.sizes
    corner_gpus, corner_value = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes))
    slope, step = np.empty(len(curves) + len(jobs)), np.empty(len(curves) + len(jobs), dtype=np.int64)
    steps = 0
    for job in range(len(jobs)):
        if jobs[job, PINNED] == 1:
            continue
        at, width, corners = jobs[job, VALUE] // board.classes, jobs[job, WIDTH], 0
        for gpus in range(max(width, jobs[job, HELD_GPUS] + 1)):
            value = NEVER
            if gpus == 0:
                value = board.value[jobs[job, VALUE]]
            elif gpus < width and sizes[gpus, OFFERED] > 0:
                value = curves[at + gpus, 0] - slot_price * whole_nodes(board, gpus)
                value = max(value, curves[at + gpus, 1] - slot_price * max(sizes[gpus, FEWEST], 2))
            if gpus == jobs[job, HELD_GPUS]:
                value = max(value, board.worths[job, STAY] - slot_price * held_slots(board, job))
            if value == NEVER or (corners > 0 and value <= corner_value[corners - 1]):
                continue
            while corners > 1:
                # Drop the last corner if it lies on or below the line from the one before it to this point.
                x, y = corner_gpus[corners - 2], corner_value[corners - 2]
                if (corner_value[corners - 1] - y) * (gpus - x) > (value - y) * (corner_gpus[corners - 1] - x):
                    break
                corners -= 1
            corner_gpus[corners], corner_value[corners] = gpus, value
            corners += 1
        if corners > 0:
            left -= corner_gpus[0]
        for corner in range(1, corners):
            step[steps] = corner_gpus[corner] - corner_gpus[corner - 1]
            slope[steps] = (corner_value[corner] - corner_value[corner - 1]) / step[steps]
            steps += 1
    return marginal_slope(slope, step, steps, left)


@lean
def marginal_slope(slope: FloatArray, step: FloatArray, steps: int, left: int) -> float:
    """The steepest slope at which not all steps so steep fit into what is left; 0 if all do. Reorders both arrays.

    As quicksort goes, but only into the part where the last GPU goes.
    """
    low, high = 0, steps
    while low < high:
        a, b, c = slope[low], slope[(low + high) // 2], slope[high - 1]
        pivot = max(min(a, b), min(max(a, b), c))
        steeper, at, flatter = low, low, high
        above = equal = 0
        while at < flatter:
            if slope[at] > pivot:
                above += step[at]
                slope[at], slope[steeper] = slope[steeper], slope[at]
                step[at], step[steeper] = step[steeper], step[at]
                steeper += 1
                at += 1
            elif slope[at] < pivot:
                flatter -= 1
                slope[at], slope[flatter] = slope[flatter], slope[at]
                step[at], step[flatter] = step[flatter], step[at]
            else:
                equal += step[at]
                at += 1
        if above > left:
            high = steeper
        elif above + equal > left:
            return float(pivot)
        else:
            left -= above + equal
            low = flatter
    return 0.0


@lean
def shop(
    board: Board,
    curves: FloatArray,
    price: float,
    slot_price: float,
    gain: FloatArray,
    wish: FloatArray,
) -> tuple[float, int]:
    """Fill in what each job would have; returns Σ gain, and the nodes that jobs on several ask for.

    Gains are evaluated anew, never added up along the hull: an idle job can cost 1e30.
    """
    jobs, sizes = board.jobs, board.sizes
    total, asked = 0.0, 0
    for job in range(len(gain)):
        if jobs[job, PINNED] == 1:
            continue
        at, best, how, size = jobs[job, VALUE] // board.classes, board.value[jobs[job, VALUE]], NOTHING, 0
        easy = best
        if board.worths[job, STAY] > NEVER:
            found = board.worths[job, STAY] - price * jobs[job, HELD_GPUS] - slot_price * held_slots(board, job)
            if found >= best:
                best, how, size = found, AS_IT_IS, jobs[job, HELD_GPUS]
        for gpus in range(1, jobs[job, WIDTH]):
            if sizes[gpus, OFFERED] == 0:
                continue
            found = curves[at + gpus, 0] - price * gpus - slot_price * whole_nodes(board, gpus)
            if found > best:
                best, how, size = found, TOGETHER, gpus
            if 2 * gpus < board.depth:
                easy = max(easy, found)
            found = curves[at + gpus, 1] - price * gpus - slot_price * max(sizes[gpus, FEWEST], 2)
            easy = max(easy, found)
            if found > best:
                best, how, size = found, APART, gpus
        gain[job, 0], gain[job, 1], wish[job, 0], wish[job, 1] = best, easy, how, size
        total += best
        if how == AS_IT_IS:
            asked += held_slots(board, job)
        elif how != NOTHING:
            asked += max(sizes[size, FEWEST], 2) if how == APART else whole_nodes(board, size)
    return total, asked
