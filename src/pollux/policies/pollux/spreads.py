"""How far a job can be spread, as far as throughput models can tell: the classes of spread of a round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pollux.goodput.numerics import FloatArray
from pollux.goodput.throughput import ThroughputModel


@dataclass(frozen=True, slots=True, eq=False)
class Spreads:
    """Classes of (nodes, racks) that take the same time. Class 0 is one node, and nothing else."""

    of: FloatArray  # [nodes + 1, racks + 1] int: class of (nodes, racks)
    nodes: tuple[int, ...]
    """Fewest nodes of each class, and racks of a placement of so many nodes."""
    racks: tuple[int, ...]
    most_nodes: tuple[int, ...]
    """Of each class."""


@lru_cache(maxsize=64)
def spreads_known_to(models: frozenset[ThroughputModel], num_nodes: int, num_racks: int) -> Spreads:
    """The classes that at least one of the models tells apart, or that are one node and several. The same, not only
    equal, for equal arguments."""
    nodes, racks = np.meshgrid(np.arange(1, num_nodes + 1), np.arange(1, num_racks + 1), indexing="ij")
    possible = (racks <= nodes).ravel()
    pairs = np.stack([nodes.ravel(), racks.ravel()], axis=1)[possible]
    levels = [np.broadcast_to(model.level(pairs[:, 0], pairs[:, 1]), len(pairs)) for model in models]
    facts = np.stack([*levels, pairs[:, 0] > 1], axis=1)
    _, first, classes = np.unique(facts, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # by number of nodes, whatever the levels are called
    rank = np.argsort(order)
    of = np.zeros((num_nodes + 1, num_racks + 1), dtype=np.int64)
    of[pairs[:, 0], pairs[:, 1]] = rank[classes.ravel()]
    fewest = pairs[first[order]]
    most = [int(np.argwhere(of[1:, 1:] == index)[:, 0].max()) + 1 for index in range(len(fewest))]
    return Spreads(of, tuple(fewest[:, 0].tolist()), tuple(fewest[:, 1].tolist()), tuple(most))
