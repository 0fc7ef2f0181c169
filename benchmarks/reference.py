"""Scheduling states that the published genetic search was run on (reference/genetic-*.json), as problems of ours.

`choices` puts a problem to the default solver.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pollux.core import JobId, NodeId
from pollux.goodput import ThetaSys
from pollux.goodput.candidates import ROUNDING_SLACK
from pollux.goodput.levels import t_iter
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.genetic import Genetic, Problem
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.solver import Budget, Choices, Priced, Rows, Solution

NAMES = ("20x16", "160x16", "160x64")
GPUS_PER_NODE = 4
REALLOC_DELAY_S = 30.0
MAX_NODES = 16
WARM_AFTER_S = 60.0
"""What jobs age between the cold search and the warm one; nothing else changes."""


@dataclass(frozen=True)
class Case:
    """One recorded search: what was asked, and what the published code answered."""

    name: str
    problem: Problem
    allocation: FloatArray  # [J, N]
    fitness: float
    jobs_with_gpus: int
    cpu_s: float


def cases(data: Path, name: str) -> Iterator[Case]:
    """The recorded searches of a file: cold ones begin with an empty cluster, warm ones with the cold answer."""
    document = json.loads((data / f"pollux-osdi21/reference/genetic-{name}.json").read_text(encoding="utf-8"))
    jobs = sorted(document["spec"], key=lambda job: (job["attained_service"], job["submission_time"]))
    num_nodes = document["results"][0]["nodes"]
    empty = _problem(jobs, num_nodes)
    cold = empty.present
    for result in document["results"]:
        allocation = _matrix(jobs, result["allocation"], num_nodes)
        is_cold = result["phase"] == "cold"
        warm = replace(empty, present=cold, factor=_factor(jobs, WARM_AFTER_S))
        cold = allocation if is_cold else cold
        yield Case(
            name=f"{name} {result['phase']} {result['rep']}",
            problem=empty if is_cold else warm,
            allocation=allocation,
            fitness=result["fitness"],
            jobs_with_gpus=result["jobs_with_gpus"],
            cpu_s=result["cpu"],
        )


@dataclass(frozen=True)
class Outcome:
    """What a solver answered to a case, once for each seed."""

    case: Case
    fitness: FloatArray
    jobs_with_gpus: FloatArray


def by_genetic(problem: Problem, rng: np.random.Generator) -> Solution:
    return Genetic().solve(problem, Budget(), rng)


def by_published(problem: Problem, rng: np.random.Generator) -> Solution:
    return Genetic.published().solve(problem, Budget(), rng)


def by_priced(problem: Problem, rng: np.random.Generator) -> Solution:
    return Priced().solve(choices(problem), Budget(), rng)


def outcome(case: Case, ask: Callable[[Problem, np.random.Generator], Solution], seeds: Iterable[int]) -> Outcome:
    """Each seed is asked for itself: nobody knows anything but the present allocation."""
    answers = [ask(case.problem, np.random.default_rng(seed)) for seed in seeds]
    plans = [answer.rows.matrix(case.problem.num_nodes) for answer in answers]
    fitness = np.array([case.problem.fitness(plan) for plan in plans])
    return Outcome(case, fitness, np.array([np.count_nonzero(plan.any(axis=1)) for plan in plans]))


def choices(problem: Problem) -> Choices:
    """The same round for the default solver."""
    most_gpus, most_nodes = problem.speedup.shape[2] - 1, problem.most_nodes
    K = np.arange(most_gpus + 1)
    is_bound = (K > 0) & ((problem.least[:, None] > K) | (problem.most[:, None] < K)) | problem.pinned[:, None]
    value = problem.objective.values(problem.speedup * problem.factor[:, None, None])
    value[np.broadcast_to(is_bound[:, None], value.shape)] = -np.inf
    held = problem.present.sum(axis=1)
    may_stay = (held >= problem.least) & (held <= problem.most) & ((problem.present > 0).sum(axis=1) <= most_nodes)
    keep = problem.objective.values(problem.speedups(problem.present))
    return Choices(
        capacity=problem.capacity.astype(np.int64),
        rack=problem.rack.astype(np.int64),
        spread=problem.spread.astype(np.int64),
        num_classes=problem.speedup.shape[1],
        first=np.arange(problem.num_jobs + 1, dtype=np.int64) * (value.shape[1] * value.shape[2]),
        value=value.ravel(),
        keep=np.where((held > 0) & (may_stay | problem.pinned), keep, -np.inf),
        held=Rows.of_matrix(problem.present),
        pinned=problem.pinned,
        most_nodes=most_nodes,
        avoid_interference=problem.avoid_interference,
    )


def _matrix(jobs: Sequence[Mapping[str, Any]], placed: Mapping[str, Sequence[int]], num_nodes: int) -> FloatArray:
    return np.array([np.bincount(np.array(placed[job["name"]], dtype=int), minlength=num_nodes) for job in jobs])


def _factor(jobs: Sequence[Mapping[str, Any]], later_s: float = 0.0) -> FloatArray:
    age, restarts = np.array([(job["age"] + later_s, job["num_restarts"]) for job in jobs], dtype=float).T
    return np.asarray(np.maximum(age - REALLOC_DELAY_S * restarts, 0.0) / (age + REALLOC_DELAY_S))


def _problem(jobs: Sequence[Mapping[str, Any]], num_nodes: int) -> Problem:
    num_gpus = num_nodes * GPUS_PER_NODE
    spread = np.ones((num_nodes + 1, 2), dtype=int)
    spread[:2] = 0
    return Problem(
        job_ids=tuple(JobId(job["name"]) for job in jobs),
        node_ids=tuple(NodeId(f"node-{n:02}") for n in range(num_nodes)),
        capacity=np.full(num_nodes, GPUS_PER_NODE),
        rack=np.zeros(num_nodes, dtype=int),
        spread=spread,
        present=np.zeros((len(jobs), num_nodes), dtype=int),
        pinned=np.zeros(len(jobs), dtype=bool),
        least=np.ones(len(jobs), dtype=int),
        most=np.array([job["max_replicas"] for job in jobs]),
        speedup=_speedup(jobs, num_gpus),
        factor=_factor(jobs),
        objective=Objective(p=-1.0, scale=num_nodes / num_gpus),
        max_nodes=MAX_NODES,
    )


def _speedup(jobs: Sequence[Mapping[str, Any]], num_gpus: int) -> FloatArray:
    """[J, 2, K + 1]: on one node and on several, over the fair share on *one* node however many GPUs it has.

    Jobs that never ran were not yet measured: they count as scaling perfectly.
    """
    K, fair_K = np.arange(1, max(job["max_replicas"] for job in jobs) + 1), math.ceil(num_gpus / len(jobs))
    speedup = np.zeros((len(jobs), 2, len(K) + 1))
    for row, job in enumerate(jobs):
        fair = _best_goodput(job, 1, np.array([fair_K]))
        speedup[row, :, 1:] = [_best_goodput(job, 1, K) / fair, _best_goodput(job, 2, K) / fair]
    speedup[[not job["started"] for job in jobs], :, 1:] = K / fair_K
    return speedup


def _best_goodput(job: Mapping[str, Any], N: int, K: FloatArray) -> FloatArray:
    """[K], as published. Unlike with `PUBLISHED_BATCH`, batch sizes that rounding lifts above the largest count too."""
    sqr, var = job["grad_params"]
    M0, top = job["init_batch_size"], job["max_local_bsz"]
    share = np.geomspace(np.maximum(M0, job["min_local_bsz"] * K), job["max_batch_size"], 50) / K
    s = np.ceil(share / top - ROUNDING_SLACK) - 1.0
    s = np.where((K == 1) & (share > M0 + ROUNDING_SLACK), np.maximum(s, 1.0), s)
    m = np.ceil(share / (s + 1.0) - ROUNDING_SLACK)
    M = K * m * (s + 1.0)
    goodput = M / t_iter(_theta(job), K, N, m, s) * (var + sqr) / (var + sqr * M / M0)
    return np.asarray(np.where((m >= job["min_local_bsz"]) & (m <= top), goodput, 0.0).max(axis=0))


def _theta(job: Mapping[str, Any]) -> ThetaSys:
    # The file's order is compute, between nodes, within a node.
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = job["perf_params"]
    return ThetaSys(alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n, gamma)
