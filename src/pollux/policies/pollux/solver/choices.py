"""What each job of a round may have, and what that is worth: all that the solver knows of it.

A plan's worth is the sum of one value a job. Whatever can be written so (FITNESS_p of any p, castor's prices) has the
same solver. All GPUs are of one type. Axes: J jobs, N nodes, C classes of spread, K GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pollux.goodput.numerics import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """GPUs of each job by node, one job after the other: those of job j are at first[j] … first[j + 1] − 1."""

    first: FloatArray  # [J + 1] int64
    node: FloatArray  # [P] int64, ascending within a job
    gpus: FloatArray  # [P] int64, ≥ 1

    @classmethod
    def of_matrix(cls, allocation: FloatArray) -> Rows:
        """From GPUs [J, N]."""
        job, node = np.nonzero(allocation)
        first = np.concatenate([[0], np.cumsum(np.bincount(job, minlength=len(allocation)))])
        return cls(first.astype(np.int64), node.astype(np.int64), allocation[job, node].astype(np.int64))

    def matrix(self, num_nodes: int) -> FloatArray:
        """GPUs [J, N]: for small rounds only."""
        found = np.zeros((len(self), num_nodes), dtype=np.int64)
        found[np.repeat(np.arange(len(self)), np.diff(self.first)), self.node] = self.gpus
        return found

    def __len__(self) -> int:
        return len(self.first) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """One round. Arrays are C-contiguous, of int64, float64 or bool, and must not be changed."""

    capacity: FloatArray  # [N] int: GPUs
    rack: FloatArray  # [N] int: 0, 1 …
    spread: FloatArray  # [N + 1, racks + 1] int: class of (nodes, racks) of a placement; on one node: 0
    num_classes: int
    first: FloatArray  # [J + 1] int: where the values of each job begin; there are C·(most + 1) of them
    value: (
        FloatArray  # at first[j] + c·(most + 1) + K: of K GPUs in class c; −inf where it may not have them. K = 0: none
    )
    keep: FloatArray  # [J]: of keeping just what it holds; −inf if it holds nothing or may not
    held: Rows
    pinned: FloatArray  # [J] bool: keeps just that
    most_nodes: FloatArray  # [J] int: that it may be on
    avoid_interference: bool = True
    """At most one job on several nodes may use any node. Pinned jobs that meet already may go on so."""
    beyond: FloatArray | None = None
    """[J]: what it could be worth at most to have more GPUs than there are values for; −inf if it may not have more.
    None: no job may. Nobody is given them, but the bound holds for answers that do so."""

    @property
    def num_jobs(self) -> int:
        return len(self.first) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.capacity)
