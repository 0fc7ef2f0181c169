"""Random rounds so small that every plan can be tried."""

from __future__ import annotations

import numpy as np

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.solver.choices import Choices, Rows

MOST_GPUS = 12


def small_round(seed: int, p: float, *, racks: int = 1) -> Choices:
    """FITNESS_p of 1 to 6 jobs on 1 to 4 uneven nodes, never more than 12 GPUs; the same for the same seed.

    With pins (which may meet on a node), minima, maxima, sizes that fit no batch, jobs of one node or two, held
    placements that may or may not be kept, and re-allocation factors. Three classes of spread on several racks,
    else two, or (seldom) one.
    """
    rng = np.random.default_rng(seed)
    capacity = _nodes(rng)
    num_nodes, num_gpus, num_jobs = len(capacity), int(capacity.sum()), int(rng.integers(1, 7))
    rack = np.sort(rng.integers(0, racks, num_nodes))
    spread, num_classes = _spread(num_nodes, racks, is_blind=rng.random() < 0.1)

    held = _held(rng, capacity, num_jobs)
    pinned = held.any(axis=1) & (rng.random(num_jobs) < 0.15)
    most_nodes = rng.choice([1, 2, 99], num_jobs, p=[0.2, 0.15, 0.65])
    fits = ((held > 0).sum(axis=1) <= most_nodes) & (rng.random(num_jobs) < 0.9)
    may_keep = held.any(axis=1) & (pinned | fits)

    objective = Objective(p, num_nodes / num_gpus)
    values, keep = [], np.full(num_jobs, -np.inf)
    for job in range(num_jobs):
        least, most = _limits(rng, num_gpus)
        speedup = _speedup(rng, num_classes, num_gpus)
        factor = float(rng.choice([0.0, 0.5, 0.9, 0.97, 1.0]))
        table = objective.values(factor * speedup[:, : most + 1])
        table[:, 1:least] = -np.inf
        table[:, 1:][:, rng.random(most) < 0.05] = -np.inf
        values.append(table.ravel())
        if may_keep[job]:
            nodes = np.flatnonzero(held[job])
            place = spread[len(nodes), len(set(rack[nodes]))], held[job].sum()
            keep[job] = objective.values(speedup[place])
    return Choices(
        capacity=capacity,
        rack=rack,
        spread=spread,
        num_classes=num_classes,
        first=np.concatenate([[0], np.cumsum([len(each) for each in values])]),
        value=np.concatenate(values),
        keep=keep,
        held=Rows.of_matrix(held),
        pinned=pinned,
        most_nodes=most_nodes,
        avoid_interference=bool(rng.random() < 0.75),
    )


def _nodes(rng: np.random.Generator) -> FloatArray:
    """GPUs of each node: all alike or all different."""
    num_nodes = int(rng.integers(1, 5))
    is_even = rng.random() < 0.5
    capacity = np.full(num_nodes, rng.integers(1, 5)) if is_even else rng.integers(1, 6, num_nodes)
    while capacity.sum() > MOST_GPUS:
        capacity = capacity[:-1]
    return capacity.astype(np.int64)


def _spread(num_nodes: int, racks: int, *, is_blind: bool) -> tuple[FloatArray, int]:
    """Classes: one node, several, several racks; `is_blind` to all that: one class."""
    spread = np.ones((num_nodes + 1, racks + 1), dtype=np.int64)
    spread[:2], spread[2:, 2:] = 0, 2
    return (np.zeros_like(spread), 1) if is_blind and racks == 1 else (spread, 2 if racks == 1 else 3)


def _held(rng: np.random.Generator, capacity: FloatArray, num_jobs: int) -> FloatArray:
    """GPUs [J, N] of all jobs at present: nothing, or some on up to three nodes. Jobs on several nodes may meet."""
    held, free = np.zeros((num_jobs, len(capacity)), dtype=np.int64), capacity.copy()
    if rng.random() < 0.3:
        return held
    for row in held:
        for node in rng.permutation(len(capacity))[: rng.integers(0, 4)]:
            row[node] = rng.integers(0, free[node] + 1)
        free -= row
    return held


def _limits(rng: np.random.Generator, num_gpus: int) -> tuple[int, int]:
    """Fewest and most GPUs; now and then equal, now and then more at least than at most, so that it cannot run."""
    most = min(int(rng.choice([1, 2, 3, 5, 99])), num_gpus)
    return int(rng.choice([1, 1, 1, 2, 3, most])), most


def _speedup(rng: np.random.Generator, num_classes: int, num_gpus: int) -> FloatArray:
    """[C, K + 1]: of jobs that scale well or badly, with bumps; less the farther they are spread."""
    K = np.arange(num_gpus + 1)
    alone = np.where(K > 0, K ** rng.uniform(0.0, 1.0) * rng.uniform(0.85, 1.0, num_gpus + 1), 0.0)
    apart = rng.choice([0.3, 0.7, 0.95, 1.0]) ** np.arange(num_classes)
    return np.asarray(rng.uniform(0.2, 3.0) * alone * apart[:, None])
