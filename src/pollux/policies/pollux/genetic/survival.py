"""Who survives and who mates in the genetic solver (NSGA-II): two objectives, both to be maximised.

Fronts: the first holds whom nobody beats in both objectives, the second whom only the first beats, and so on. Within a
front, whoever has distant neighbours is preferred. Everything is on arrays [n] of individuals.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray


def ranked(fitness: FloatArray, utility: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Front of each individual, 0 the best, and its crowding: how far its neighbours are, more is better."""
    order = np.lexsort((-utility, -fitness))
    front, crowding = np.empty(len(order), dtype=np.int64), np.empty(len(order))
    front[order] = fronts(fitness[order], utility[order])
    crowding[order] = crowdings(fitness[order], utility[order], front[order])
    return front, crowding


@compiled
def fronts(fitness: FloatArray, utility: FloatArray) -> FloatArray:
    """Of individuals sorted by fitness, then utility, both falling.

    All that could beat an individual come before it, and the last of a front has its highest utility: so it is beaten
    by a front if it is by that one.
    """
    n = len(fitness)
    front, last = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    num_fronts = 0
    for i in range(n):
        k = 0
        while k < num_fronts:
            rival = last[k]
            is_equal = fitness[rival] == fitness[i] and utility[rival] == utility[i]
            if utility[rival] < utility[i] or is_equal:
                break
            k += 1
        front[i], last[k] = k, i
        num_fronts = max(num_fronts, k + 1)
    return front


@compiled
def crowdings(fitness: FloatArray, utility: FloatArray, front: FloatArray) -> FloatArray:
    """Distance of both neighbours in the same front, as a share of its width, mean of the objectives.

    Sorted as for `fronts`. Without bound at either end and in fronts of one or two; 0 for all but the first of equals.
    """
    n = len(fitness)
    crowding = np.zeros(n)
    place = np.empty(n, dtype=np.int64)
    for k in range(n):
        size, distinct = 0, 0
        for i in range(n):
            if front[i] == k:
                size += 1
                before = place[max(distinct - 1, 0)]
                if distinct == 0 or fitness[before] != fitness[i] or utility[before] != utility[i]:
                    place[distinct] = i
                    distinct += 1
        if size == 0:
            break
        if size <= 2:
            for i in range(n):
                if front[i] == k:
                    crowding[i] = math.inf
            continue
        first, last = place[0], place[distinct - 1]
        crowding[first], crowding[last] = math.inf, math.inf
        for d in range(1, distinct - 1):
            worse, better = place[d + 1], place[d - 1]
            by_fitness = (fitness[better] - fitness[worse]) / (fitness[first] - fitness[last])
            by_utility = (utility[worse] - utility[better]) / (utility[last] - utility[first])
            crowding[place[d]] = (by_fitness + by_utility) / 2.0
    return crowding


def survivors(front: FloatArray, crowding: FloatArray, size: int, rng: np.random.Generator) -> FloatArray:
    """The best so many: by front, then by crowding, then by lot."""
    return np.lexsort((rng.random(len(front)), -crowding, front))[:size]


def contestants(size: int, num_contests: int, rng: np.random.Generator) -> FloatArray:
    """[num_contests, 2]: whom a contest is between. Everybody has the same number of contests, give or take one."""
    rounds = -(-2 * num_contests // size)
    return rng.permuted(np.tile(np.arange(size), (rounds, 1)), axis=1).ravel()[: 2 * num_contests].reshape(-1, 2)


@compiled
def winners(
    pairs: FloatArray, fitness: FloatArray, utility: FloatArray, crowding: FloatArray, lots: FloatArray
) -> FloatArray:
    """[M] of pairs [M, 2]: who beats the other, else who is less crowded, else as the lot [M] in 0 … 1 falls."""
    chosen = np.empty(len(pairs), dtype=np.int64)
    for i in range(len(pairs)):
        a, b = pairs[i, 0], pairs[i, 1]
        a_beats = fitness[a] >= fitness[b] and utility[a] >= utility[b]
        b_beats = fitness[b] >= fitness[a] and utility[b] >= utility[a]
        if a_beats != b_beats:
            chosen[i] = a if a_beats else b
        elif crowding[a] != crowding[b]:
            chosen[i] = a if crowding[a] > crowding[b] else b
        else:
            chosen[i] = a if lots[i] < 0.5 else b
    return chosen
