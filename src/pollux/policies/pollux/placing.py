"""Putting jobs on nodes one by one: what is free, which jobs could make room, and what a placement is worth."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.problem import Problem


class Placing:
    """An answer in the making."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.allocation = np.zeros((problem.num_jobs, problem.num_nodes), dtype=np.int64)
        self.free = problem.capacity.copy()
        self._distributed = np.zeros(problem.num_nodes, dtype=np.int64)
        """Jobs on several nodes, by node."""
        self._has_racks = len(np.unique(problem.rack)) > 1
        self._alone_on: dict[int, dict[int, int]] = {node: {} for node in range(problem.num_nodes)}
        """Node → jobs that are on this node only → their GPUs."""

    def put(self, job: int, row: FloatArray) -> None:
        """Give a job that has none these GPUs, which must be free."""
        self._change(job, row, 1)
        self.allocation[job] = row

    def remove(self, job: int) -> None:
        self._change(job, self.allocation[job], -1)
        self.allocation[job] = 0

    def _change(self, job: int, row: FloatArray, sign: int) -> None:
        nodes = np.flatnonzero(row)
        self.free[nodes] -= sign * row[nodes]
        if len(nodes) > 1:
            self._distributed[nodes] += sign
        elif len(nodes) and sign > 0:
            self._alone_on[int(nodes[0])][job] = int(row[nodes[0]])
        elif len(nodes):
            del self._alone_on[int(nodes[0])][job]

    def fits(self, row: FloatArray) -> bool:
        """Whether these GPUs are free, and no two jobs on several nodes would meet."""
        nodes = np.flatnonzero(row)
        if (row[nodes] > self.free[nodes]).any():
            return False
        return len(nodes) < 2 or not self._problem.avoid_interference or not self._distributed[nodes].any()

    def find(self, job: int, size: int) -> FloatArray | None:
        """Free GPUs for a job: on one node if one has so many, the fullest such; else on as few as possible.

        Among equals where it is already: there a resize in place starts fewer replicas. On several nodes within one
        rack, if that is worth more to the job.
        """
        here = self._problem.present[job] > 0
        roomy = np.flatnonzero(self.free >= size)
        if len(roomy):
            return self._fill(roomy[np.lexsort((roomy, ~here[roomy], self.free[roomy]))], self.free, size)
        usable = self.free > 0
        if self._problem.avoid_interference:
            usable &= self._distributed == 0
        nodes = np.flatnonzero(usable)
        nodes = nodes[np.lexsort((nodes, ~here[nodes], -self.free[nodes]))]
        rack = self._problem.rack[nodes]
        choices = [nodes, *(nodes[rack == each] for each in np.unique(rack))] if self._has_racks else [nodes]
        rows = [row for choice in choices if (row := self._fill(choice, self.free, size)) is not None]
        return max(rows, key=lambda row: self.value(job, row), default=None)

    def _fill(self, nodes: FloatArray, room: FloatArray, size: int) -> FloatArray | None:
        """So many GPUs from these nodes, one after the other; None if they do not have them."""
        row = np.zeros(len(room), dtype=np.int64)
        for count, node in enumerate(nodes.tolist(), 1):
            row[node] = min(size, int(room[node]))
            size -= int(row[node])
            if not size:
                return row if count <= self._problem.max_nodes else None
        return None

    def fewest_nodes(self, size: int) -> int:
        """Nodes that so many GPUs take at least."""
        ends = np.cumsum(np.sort(self._problem.capacity)[::-1])
        return int(np.searchsorted(ends, size)) + 1

    def make_room(self, size: int) -> tuple[FloatArray, list[int]] | None:
        """The nodes on which the fewest jobs have to go so that so many GPUs fit, and those jobs.

        Only smaller jobs on one node give way: they are easier to place than what comes for them. None if that is not
        enough.
        """
        count = self.fewest_nodes(size)
        room, cost = self.free.copy(), np.zeros(len(self.free))
        leaving: dict[int, list[int]] = {}
        for node in range(len(room)):
            if count > 1 and self._problem.avoid_interference and self._distributed[node]:
                room[node] = 0
                continue
            needed = min(size, int(self._problem.capacity[node]))
            leaving[node] = self._leaving(node, needed, size)
            room[node] += sum(self._alone_on[node][job] for job in leaving[node])
            cost[node] = len(leaving[node])
        nodes = np.lexsort((np.arange(len(room)), cost, -np.minimum(room, size)))[:count]
        row = self._fill(nodes, room, size)
        if row is None:
            return None
        return row, [job for node in np.flatnonzero(row).tolist() for job in leaving[node]]

    def _leaving(self, node: int, needed: int, below: int) -> list[int]:
        """The fewest jobs whose GPUs make up what the node lacks; those that it has, if they are not enough.

        The last is the smallest that is enough, so that it finds another place; among equals those with least priority.
        """
        lacking = needed - int(self.free[node])
        pinned = self._problem.pinned
        left = sorted((gpus, -job) for job, gpus in self._alone_on[node].items() if gpus < below and not pinned[job])
        found: list[int] = []
        while left and lacking > 0:
            gpus, job = left.pop(bisect_left(left, (min(lacking, left[-1][0]),)))
            found.append(-job)
            lacking -= gpus
        return found

    def value(self, job: int, row: FloatArray, *, moved: bool = False) -> float:
        """What these GPUs are worth to the objective if the job has them, or as many of other nodes."""
        problem = self._problem
        nodes = np.flatnonzero(row)
        racks = len(set(problem.rack[nodes].tolist()))
        speedup = problem.speedup[job, problem.spread[len(nodes), racks], int(row.sum())]
        stays = not moved and (row == problem.present[job]).all()
        return float(problem.objective.values(speedup * (1.0 if stays else problem.factor[job])))
