"""Rounds as numbers for tests: made by hand, or drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from pollux.core import JobId, NodeId
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.genetic import Genetic, Problem
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.solver import Budget

POWERS = (-10.0, -1.0, 0.0, 1.0)


def scaling(num_gpus: int, exponent: float = 0.8, apart: float = 0.7) -> FloatArray:
    """Speedups [2, K + 1]: K^exponent on one node, `apart` of that on several."""
    alone = np.arange(num_gpus + 1) ** exponent * (np.arange(num_gpus + 1) > 0)
    return np.stack([alone, apart * alone])


def problem(
    nodes: Sequence[int],
    held: Sequence[Mapping[int, int]],
    *,
    p: float = -1.0,
    speedup: FloatArray | None = None,
    **fields: Any,
) -> Problem:
    """One job for each of `held` (node → GPUs), on nodes of so many GPUs. Jobs scale alike unless told otherwise."""
    num_gpus, num_jobs = sum(nodes), len(held)
    table = scaling(num_gpus) if speedup is None else speedup
    present = np.zeros((num_jobs, len(nodes)), dtype=np.int64)
    for row, gpus in enumerate(held):
        for node, count in gpus.items():
            present[row, node] = count
    spread = np.ones((len(nodes) + 1, 2), dtype=np.int64)
    spread[:2] = 0
    return Problem(
        **{
            "job_ids": tuple(JobId(f"job-{i}") for i in range(num_jobs)),
            "node_ids": tuple(NodeId(f"node-{i}") for i in range(len(nodes))),
            "capacity": np.array(nodes, dtype=np.int64),
            "rack": np.zeros(len(nodes), dtype=np.int64),
            "spread": spread,
            "present": present,
            "pinned": np.zeros(num_jobs, dtype=bool),
            "least": np.ones(num_jobs, dtype=np.int64),
            "most": np.full(num_jobs, num_gpus),
            "speedup": np.broadcast_to(table, (num_jobs, *table.shape[-2:])),
            "factor": np.full(num_jobs, 0.9),
            "objective": Objective(p, 1.0),
        }
        | {name: np.array(each) if isinstance(each, list) else each for name, each in fields.items()}
    )


class Answer(NamedTuple):
    """What a solver answered, in the terms of its problem."""

    allocation: FloatArray  # [J, N]
    fitness: float
    stats: Mapping[str, float]


def answer(of: Problem, solver: Genetic, seed: int = 0, **budget: Any) -> Answer:
    """Checked against what the problem says of it."""
    found = solver.solve(of, Budget(**budget), np.random.default_rng(seed))
    allocation = found.rows.matrix(of.num_nodes)
    assert of.violations(allocation) == []
    assert found.value == of.values(allocation).sum()
    return Answer(allocation, of.fitness(allocation), found.stats)


@st.composite
def problems(draw: st.DrawFn, max_jobs: int = 7, max_racks: int = 2) -> Problem:
    """Uneven nodes, fragments, distributed jobs that meet, pins, tight and impossible bounds, jobs that scale badly."""
    rng = np.random.default_rng(draw(st.integers(0, 2**24 - 1)))
    nodes = draw(st.lists(st.sampled_from([4, 4, 1, 2, 3, 8]), min_size=1, max_size=5))
    num_jobs, num_gpus = draw(st.integers(0, max_jobs)), sum(nodes)
    present = _present(rng, np.array(nodes), num_jobs)
    held = present.sum(axis=1)
    split = (present > 0).sum(axis=1) > 1  # who is on several nodes need not be on one
    least = rng.choice([1, 1, 1, 2, 3, 6], num_jobs)
    pinned = (held >= least) & (rng.random(num_jobs) < 0.3)
    order = np.argsort(~pinned, kind="stable")  # those that must stay come first
    rack = rng.integers(0, max_racks, len(nodes))
    spread = np.ones((len(nodes) + 1, max_racks + 1), dtype=np.int64)
    spread[:2], spread[2:, 2:] = 0, 2
    exponent = rng.choice([0.0, 0.5, 0.9, 1.0], num_jobs)[:, None, None]
    alone = np.arange(num_gpus + 1) ** exponent * (np.arange(num_gpus + 1) > 0)
    return problem(
        nodes,
        [{}] * num_jobs,
        present=present[order],
        pinned=pinned[order],
        least=least[order],
        most=np.minimum(rng.choice([1, 2, 3, 5, 8, 99], num_jobs), num_gpus),
        rack=rack,
        spread=spread,
        speedup=alone * rng.choice([0.3, 0.8, 1.0], num_jobs)[:, None, None] ** np.arange(3)[:, None],
        factor=rng.choice([0.0, 0.5, 0.9, 1.0], num_jobs),
        objective=Objective(draw(st.sampled_from(POWERS)), 0.25),
        avoid_interference=draw(st.booleans()),
        max_nodes=draw(st.sampled_from([len(nodes), 1, 2])),
        single_node=(rng.random(num_jobs) < draw(st.sampled_from([0.0, 0.4])))[order] & ~split[order],
    )


def _present(rng: np.random.Generator, nodes: FloatArray, num_jobs: int) -> FloatArray:
    """What jobs hold: nothing, or GPUs of up to three nodes."""
    present, free = np.zeros((num_jobs, len(nodes)), dtype=np.int64), nodes.copy()
    for row in present:
        for node in rng.permutation(len(nodes))[: rng.integers(0, 4)]:
            row[node] = rng.integers(0, free[node] + 1)
        free -= row
    return present
