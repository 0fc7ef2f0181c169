"""How children come about in the genetic solver, one individual [J, N] at a time: GPUs of each job on each node.

Rare events are drawn by how many are skipped before the next, not one by one. Children may break rules: see `repair`.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.genetic.chance import below, chance, misses

CROSSOVER = 0.9
RESET = SHRINK = DROP = 0.1
"""How often two parents mix; how often a row is reset, is picked for shrinking, and loses an entry then (artifact)."""


@compiled
def cross(first: FloatArray, second: FloatArray, cut: int, child: FloatArray, sibling: FloatArray) -> None:
    """The parents with their rows before the cut swapped."""
    J, N = first.shape
    for j in range(J):
        own, other = (second, first) if j < cut else (first, second)
        for n in range(N):  # faster than slices here
            child[j, n] = own[j, n]
            sibling[j, n] = other[j, n]


@compiled
def reset_rows(individual: FloatArray, present: FloatArray, state: FloatArray) -> None:
    """Some jobs back to what they hold now."""
    J, N = individual.shape
    log_miss = math.log(1.0 - RESET)
    j = misses(state, log_miss)
    while j < J:
        for n in range(N):
            individual[j, n] = present[j, n]
        j += 1 + misses(state, log_miss)


@compiled
def shrink_rows(individual: FloatArray, state: FloatArray) -> None:
    """Some jobs off some of their nodes."""
    J, N = individual.shape
    log_miss = math.log(1.0 - SHRINK)
    j = misses(state, log_miss)
    while j < J:
        for n in range(N):
            if individual[j, n] > 0 and chance(state) < DROP:
                individual[j, n] = 0
        j += 1 + misses(state, log_miss)


@compiled
def grow(individual: FloatArray, capacity: FloatArray, state: FloatArray) -> None:
    """On every node with a free GPU, one job and one of those already there (on average) get more of it, or all."""
    J, N = individual.shape
    p1 = 1.0 / J
    log_miss = math.log(1.0 - p1) if J > 1 else -math.inf
    used, holders = np.zeros(N, dtype=np.int32), np.zeros(N, dtype=np.int32)
    for j in range(J):
        for n in range(N):
            used[n] += individual[j, n]
            holders[n] += individual[j, n] > 0
    for n in range(N):
        if used[n] >= capacity[n]:
            continue
        p2 = 1.0 / max(holders[n], 1)
        j = 0
        while holders[n] > 0:
            if individual[j, n] > 0:
                holders[n] -= 1
                if chance(state) < p1 + p2 - p1 * p2:
                    individual[j, n] += below(state, capacity[n] - individual[j, n] + 1)
            j += 1
        j = misses(state, log_miss)
        while j < J:
            if individual[j, n] == 0:
                individual[j, n] = below(state, capacity[n] + 1)
            j += 1 + misses(state, log_miss)


@compiled
def breed(
    store: FloatArray,
    parents: FloatArray,
    children: FloatArray,
    present: FloatArray,
    capacity: FloatArray,
    state: FloatArray,
) -> None:
    """Two children for each pair of parents.

    store     [S, J, N]  all individuals; children are written there too
    parents   [M, 2]     places in the store
    children  [M, 2]     places to write to, none of them a parent's
    present   [J, N]     what jobs hold now
    capacity  [N]        GPUs of the nodes
    """
    J = store.shape[1]
    for pair in range(len(parents)):
        mixes = chance(state) < CROSSOVER
        cut = below(state, J)
        first, second = store[parents[pair, 0]], store[parents[pair, 1]]
        cross(first, second, cut if mixes else 0, store[children[pair, 0]], store[children[pair, 1]])
        for c in range(2):
            child = store[children[pair, c]]
            reset_rows(child, present, state)
            shrink_rows(child, state)
            grow(child, capacity, state)
