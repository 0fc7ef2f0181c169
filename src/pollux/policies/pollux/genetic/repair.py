"""How the genetic solver makes an individual [J, N] (GPUs of each job on each node) keep the rules of its problem.

Repairs only take away, and favour earlier rows; at last, and not in the published search, free GPUs go to idle jobs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.genetic.chance import below
from pollux.policies.pollux.genetic.problem import Problem


class Rules(NamedTuple):
    """What repairs need to know of a problem."""

    room: FloatArray  # [N] int16: GPUs that pinned jobs leave
    taken: FloatArray  # [N] int64: distributed jobs that are pinned there
    present: FloatArray  # [J, N] int16
    pinned: FloatArray  # [J] bool
    least: FloatArray  # [J] int64
    most: FloatArray  # [J] int64
    most_nodes: FloatArray  # [J] int64
    avoid_interference: bool
    published_interference: bool
    seat_idle: bool

    @classmethod
    def of(cls, problem: Problem, *, published_interference: bool = False, seat_idle: bool = False) -> Rules:
        kept = problem.present[problem.pinned]
        is_distributed = (kept > 0).sum(axis=1) > 1
        # Copies: arrays that cannot be written or lie otherwise in memory would each be compiled for anew.
        return cls(
            room=np.maximum(problem.capacity - kept.sum(axis=0), 0).astype(np.int16),
            taken=(kept[is_distributed] > 0).sum(axis=0, dtype=np.int64),
            present=np.array(problem.present, dtype=np.int16, order="C"),
            pinned=np.array(problem.pinned, dtype=np.bool_, order="C"),
            least=np.array(problem.least, dtype=np.int64, order="C"),
            most=np.minimum(problem.most, problem.speedup.shape[2] - 1).astype(np.int64),
            most_nodes=problem.most_nodes,
            avoid_interference=bool(problem.avoid_interference),
            published_interference=published_interference,
            seat_idle=seat_idle,
        )


@compiled
def keep_pinned(individual: FloatArray, rules: Rules) -> None:
    """Jobs that must stay have what they have now."""
    J, N = individual.shape
    for j in range(J):
        if rules.pinned[j]:
            for n in range(N):
                individual[j, n] = rules.present[j, n]


@compiled
def measure(individual: FloatArray, num_gpus: FloatArray, num_nodes: FloatArray) -> None:
    """GPUs and nodes of each job, written into the last two arguments [J]; repairs keep them up to date."""
    J, N = individual.shape
    for j in range(J):
        gpus, nodes = 0, 0
        for n in range(N):
            gpus += individual[j, n]
            nodes += individual[j, n] > 0
        num_gpus[j], num_nodes[j] = gpus, nodes


@compiled
def separate(individual: FloatArray, rules: Rules, num_gpus: FloatArray, num_nodes: FloatArray) -> None:
    """At most one distributed job on a node: later rows leave it.

    As published, once two are there every later row leaves, also of jobs on one node.
    """
    J, N = individual.shape
    meeting = rules.taken.copy()
    for j in range(J):
        is_distributed = num_nodes[j] > 1
        if rules.pinned[j] or num_nodes[j] == 0 or not (is_distributed or rules.published_interference):
            continue
        for n in range(N):
            if individual[j, n] > 0:
                meeting[n] += is_distributed
                if meeting[n] > 1:
                    num_gpus[j] -= individual[j, n]
                    num_nodes[j] -= 1
                    individual[j, n] = 0


@compiled
def cut_rows(
    individual: FloatArray, rules: Rules, num_gpus: FloatArray, num_nodes: FloatArray, state: FloatArray
) -> None:
    """No job above its most GPUs or on too many nodes: the nodes that keep theirs are drawn."""
    J, N = individual.shape
    nodes = np.empty(N, dtype=np.int64)
    for j in range(J):
        if rules.pinned[j] or (num_gpus[j] <= rules.most[j] and num_nodes[j] <= rules.most_nodes[j]):
            continue
        held = 0
        for n in range(N):
            if individual[j, n] > 0:
                nodes[held] = n
                held += 1
        left = rules.most[j]
        for i in range(held):
            drawn = i + below(state, held - i)
            n = nodes[drawn]
            nodes[drawn] = nodes[i]
            individual[j, n] = min(individual[j, n], left) if i < rules.most_nodes[j] else 0
            left -= individual[j, n]
        num_gpus[j] = rules.most[j] - left


@compiled
def seat_rows(individual: FloatArray, rules: Rules, num_gpus: FloatArray, room: FloatArray) -> None:
    """No node above its capacity: earlier rows first. A job that is left with fewer than its least gets none.

    `room` [N] comes as what is free without these jobs, and leaves as what is free with them.
    """
    J, N = individual.shape
    for j in range(J):
        if rules.pinned[j] or num_gpus[j] == 0:
            continue
        gpus = 0
        for n in range(N):
            take = min(individual[j, n], room[n])
            individual[j, n] = take
            gpus += take
        if gpus < rules.least[j]:
            gpus = 0
            for n in range(N):
                individual[j, n] = 0
        num_gpus[j] = gpus
        for n in range(N):
            room[n] -= individual[j, n]


@compiled
def seat_idle(individual: FloatArray, rules: Rules, num_gpus: FloatArray, room: FloatArray, state: FloatArray) -> None:
    """Jobs without GPUs, in turn from a random one, get their least on a random node, or on several. Not published."""
    J, N = individual.shape
    free = 0
    for n in range(N):
        free += room[n]
    first = below(state, J)
    is_busy = np.zeros(0, dtype=np.bool_)
    for i in range(J):
        if free <= 0:
            return
        j = (first + i) % J
        least = rules.least[j]
        if rules.pinned[j] or num_gpus[j] > 0 or rules.most[j] < least or free < least:
            continue
        start = below(state, N)
        for k in range(N):
            n = (start + k) % N
            if room[n] >= least:
                individual[j, n] = least
                room[n] -= least
                free -= least
                break
        else:
            if len(is_busy) == 0:
                is_busy = nodes_of_distributed(individual, rules.avoid_interference)
            got = seat_apart(individual[j], least, start, rules.most_nodes[j], is_busy, room)
            free -= got
            if got > 0 and rules.avoid_interference:
                for n in range(N):
                    is_busy[n] |= individual[j, n] > 0


@compiled
def nodes_of_distributed(individual: FloatArray, avoid_interference: bool) -> FloatArray:
    """[N] bool: where another distributed job would interfere, if that is to be avoided."""
    J, N = individual.shape
    is_busy = np.zeros(N, dtype=np.bool_)
    for j in range(J):
        num_nodes = 0
        for n in range(N):
            num_nodes += individual[j, n] > 0
        if avoid_interference and num_nodes > 1:
            for n in range(N):
                if individual[j, n] > 0:
                    is_busy[n] = True
    return is_busy


@compiled
def seat_apart(row: FloatArray, least: int, start: int, max_nodes: int, is_busy: FloatArray, room: FloatArray) -> int:
    """Free GPUs of several nodes, beginning at `start`, for a job without any: its least or none. How many it got."""
    N = len(row)
    missing, num_nodes = least, 0
    for k in range(N):
        n = (start + k) % N
        if missing > 0 and num_nodes < max_nodes and room[n] > 0 and not is_busy[n]:
            row[n] = min(missing, room[n])
            missing -= row[n]
            num_nodes += 1
    for n in range(N):
        if missing > 0:
            row[n] = 0
        room[n] -= row[n]
    return 0 if missing > 0 else least


@compiled
def repair(store: FloatArray, places: FloatArray, rules: Rules, state: FloatArray) -> None:
    """The individuals at these places of the store [S, J, N], in place, until they break no rule of the problem.

    The order is the published one.
    """
    J, N = store.shape[1], store.shape[2]
    num_gpus, num_nodes = np.empty(J, dtype=np.int64), np.empty(J, dtype=np.int64)
    room = np.empty(N, dtype=np.int16)
    for place in places:
        individual = store[place]
        for n in range(N):
            room[n] = rules.room[n]
        keep_pinned(individual, rules)
        measure(individual, num_gpus, num_nodes)
        if rules.avoid_interference:
            separate(individual, rules, num_gpus, num_nodes)
        cut_rows(individual, rules, num_gpus, num_nodes, state)
        seat_rows(individual, rules, num_gpus, room)
        if rules.seat_idle:
            seat_idle(individual, rules, num_gpus, room, state)
