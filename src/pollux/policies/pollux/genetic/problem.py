"""A round as matrices: who may have how many GPUs where, and what that is worth. All of one GPU type.

Axes: J jobs in order of priority, N nodes, C classes of spread (how far a job is spread, as far as any job's
throughput model can tell: on one node or on several, for the paper's), K GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pollux.core import FrozenMap, JobId, NodeId
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.roster import Columns
from pollux.policies.pollux.solver.choices import Rows
from pollux.policies.pollux.solver.seam import Solution
from pollux.policies.pollux.values import Question


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One scheduling round. An answer is an integer array [J, N], GPUs of each job on each node."""

    job_ids: tuple[JobId, ...]
    """First come those that must keep what they have, then the others by GPU-seconds attained, fewest first."""
    node_ids: tuple[NodeId, ...]
    capacity: FloatArray  # [N] int: GPUs
    rack: FloatArray  # [N] int: 0, 1 …
    spread: FloatArray  # [N + 1, racks + 1] int: class of (nodes, racks) of a placement
    present: FloatArray  # [J, N] int: what each holds; a row of zeros if it holds nothing or cannot stay
    pinned: FloatArray  # [J] bool: keeps exactly that
    least: FloatArray  # [J] int: fewest GPUs when it runs, ≥ 1
    most: FloatArray  # [J] int: most GPUs; below `least` for a job that cannot run at all
    speedup: FloatArray  # [J, C, K + 1]: over the fair share; 0 for K = 0 and where no batch size fits
    factor: FloatArray  # [J]: what re-allocation leaves of the speedup of a job that does not keep its row
    objective: Objective
    avoid_interference: bool = True
    """At most one job on several nodes may use any node."""
    max_nodes: int = 1 << 30
    """Of one job."""
    single_node: FloatArray | None = None  # [J] bool: must be on one node; None: nobody must

    @classmethod
    def of(cls, question: Question, max_nodes: int | None) -> Problem:
        """A round whose matrices are worth their memory."""
        columns = question.columns
        nodes = columns.nodes
        return cls(
            tuple(columns.job_ids),
            nodes.ids,
            nodes.capacity,
            nodes.rack,
            columns.spreads.of,
            columns.held.matrix(len(nodes.ids)),
            columns.pinned,
            columns.least,
            columns.may_have,
            _speedups(columns, question.fair_goodput, question.fair_share.num_gpus),
            question.factor,
            question.objective,
            question.avoid_interference,
            max_nodes or len(nodes.ids),
            columns.single_node,
        )

    @property
    def num_jobs(self) -> int:
        return len(self.job_ids)

    @property
    def num_nodes(self) -> int:
        return len(self.node_ids)

    @property
    def most_nodes(self) -> FloatArray:
        """[J] int: the most nodes that each may be on."""
        found = np.full(self.num_jobs, self.max_nodes, dtype=np.int64)
        if self.single_node is not None:
            found[self.single_node] = 1
        return found

    def speedups(self, allocation: FloatArray) -> FloatArray:
        """[J]: what the model promises of each row, before the cost of re-allocation."""
        num_gpus = allocation.sum(axis=1)
        held = allocation > 0
        num_nodes = held.sum(axis=1)
        racks = np.zeros((len(allocation), int(self.rack.max(initial=0)) + 1), dtype=bool)
        for node in range(self.num_nodes):
            racks[:, self.rack[node]] |= held[:, node]
        spread = self.spread[num_nodes, racks.sum(axis=1)]
        return np.asarray(self.speedup[np.arange(len(allocation)), spread, num_gpus])

    def values(self, allocation: FloatArray) -> FloatArray:
        """[J]: what each row is worth to the objective."""
        kept = (allocation == self.present).all(axis=1)
        return self.objective.values(self.speedups(allocation) * np.where(kept, 1.0, self.factor))

    def fitness(self, allocation: FloatArray) -> float:
        return self.objective.fitness(self.values(allocation))

    def solution(self, allocation: FloatArray, stats: Mapping[str, float] | None = None) -> Solution:
        """An answer in the terms of the seam."""
        value = float(self.values(allocation).sum())
        return Solution(Rows.of_matrix(allocation), value, None, FrozenMap(stats or {}))

    def violations(self, allocation: FloatArray) -> list[str]:
        """Which of its rules an answer breaks; empty if none. Solvers keep them all, and their tests ask here."""
        num_gpus = allocation.sum(axis=1)
        runs = num_gpus > 0
        spread_out = (allocation > 0).sum(axis=1) > 1
        meeting = ((allocation > 0) & spread_out[:, None]).sum(axis=0)
        found = {
            "negative": bool((allocation < 0).any()),
            "more than a node has": bool((allocation.sum(axis=0) > self.capacity).any()),
            "fewer than least": bool((runs & (num_gpus < self.least)).any()),
            "more than most": bool((runs & (num_gpus > self.most) & ~self.pinned).any()),
            "too many nodes": bool(((allocation > 0).sum(axis=1) > self.most_nodes)[~self.pinned].any()),
            "pinned moved": bool((allocation != self.present)[self.pinned].any()),
            "interference": self.avoid_interference and bool((meeting > self._meeting_at_best()).any()),
        }
        return [name for name, is_so in found.items() if is_so]

    def _meeting_at_best(self) -> FloatArray:
        """[N]: distributed jobs that a node may have: one, or as many as are pinned there already."""
        pinned = self.present[self.pinned]
        spread_out = (pinned > 0).sum(axis=1) > 1
        return np.asarray(np.maximum(((pinned > 0) & spread_out[:, None]).sum(axis=0), 1))


def _speedups(columns: Columns, fair: FloatArray, fair_gpus: int) -> FloatArray:
    """[J, C, K + 1]; a job without a model is believed to scale perfectly."""
    size = int(columns.width.max(initial=0)) + 1
    K = np.arange(size)
    found = np.zeros((len(columns), columns.num_classes, size))
    is_known = columns.has_model & (fair > 0.0)
    is_inside = (columns.width[:, None] >= K) & is_known[:, None]
    for index in range(columns.num_classes):
        place = (columns.first[:-1] + index * (columns.width + 1))[:, None] + K
        found[:, index][is_inside] = columns.goodput[place[is_inside]]
    found[is_known] /= fair[is_known, None, None]
    found[~is_known] = K / fair_gpus
    return found
