"""Putting jobs on nodes one by one: what is free, which jobs could make room, and what a placement is worth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping

import numpy as np

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.problem import Problem


class Placing:
    """An answer in the making."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.allocation = np.zeros((problem.num_jobs, problem.num_nodes), dtype=np.int64)
        self.free = problem.capacity.copy()
        self._most_nodes = problem.most_nodes.tolist()
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
            return self._fill(job, roomy[np.lexsort((roomy, ~here[roomy], self.free[roomy]))], self.free, size)
        usable = self.free > 0
        if self._problem.avoid_interference:
            usable &= self._distributed == 0
        nodes = np.flatnonzero(usable)
        nodes = nodes[np.lexsort((nodes, ~here[nodes], -self.free[nodes]))]
        rack = self._problem.rack[nodes]
        choices = [nodes, *(nodes[rack == each] for each in np.unique(rack))] if self._has_racks else [nodes]
        rows = [row for choice in choices if (row := self._fill(job, choice, self.free, size)) is not None]
        return max(rows, key=lambda row: self.value(job, row), default=None)

    def _fill(self, job: int, nodes: FloatArray, room: FloatArray, size: int) -> FloatArray | None:
        """So many GPUs from these nodes, one after the other; None if they do not have them, or are too many."""
        row = np.zeros(len(room), dtype=np.int64)
        for count, node in enumerate(nodes.tolist(), 1):
            row[node] = min(size, int(room[node]))
            size -= int(row[node])
            if not size:
                return row if count <= self._most_nodes[job] else None
        return None

    def fewest_nodes(self, size: int) -> int:
        """Nodes that so many GPUs take at least."""
        ends = np.cumsum(np.sort(self._problem.capacity)[::-1])
        return int(np.searchsorted(ends, size)) + 1

    def make_room(self, job: int, size: int) -> tuple[FloatArray, list[int]] | None:
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
        row = self._fill(job, nodes, room, size)
        if row is None:
            return None
        return row, [other for node in np.flatnonzero(row).tolist() for other in leaving[node]]

    def make_way(self, size: int, spared: Collection[int]) -> tuple[FloatArray, list[int]] | None:
        """One node on which the fewest jobs have to go so that so many GPUs fit, and those jobs.

        Anybody gives way, also those on several nodes, but for those that are spared or pinned. None if no node is
        large enough.
        """
        found: list[tuple[int, int, list[int]]] = []
        for node in np.flatnonzero(self._problem.capacity >= size).tolist():
            holders = [other for other in np.flatnonzero(self.allocation[:, node]).tolist() if other not in spared]
            gpus = {other: int(self.allocation[other, node]) for other in holders if not self._problem.pinned[other]}
            leaving = self._fewest(gpus, size - int(self.free[node]))
            if self.free[node] + sum(gpus[other] for other in leaving) >= size:
                found.append((len(leaving), node, leaving))
        if not found:
            return None
        _, node, leaving = min(found)
        row = np.zeros(len(self.free), dtype=np.int64)
        row[node] = size
        return row, leaving

    def _leaving(self, node: int, needed: int, below: int) -> list[int]:
        """Those jobs of the node that are to leave it; all that may, if they are not enough."""
        pinned = self._problem.pinned
        may_leave = {job: gpus for job, gpus in self._alone_on[node].items() if gpus < below and not pinned[job]}
        return self._fewest(may_leave, needed - int(self.free[node]))

    @staticmethod
    def _fewest(gpus_of: Mapping[int, int], lacking: int) -> list[int]:
        """The fewest jobs whose GPUs make up what is lacking; all if they are not enough.

        The last is the smallest that is enough, so that it finds another place; among equals those with least priority.
        """
        left = sorted((gpus, -job) for job, gpus in gpus_of.items())
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
