"""The nodes of a cluster as arrays, by GPU type."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pollux.core import Allocation, Cluster, NodeId
from pollux.goodput.numerics import FloatArray


class Nodes(NamedTuple):
    """The schedulable nodes of one GPU type, in order of their ids."""

    ids: tuple[NodeId, ...]
    capacity: FloatArray  # [N] int
    rack: FloatArray  # [N] int: 0, 1 …
    num_racks: int
    total: int
    """GPUs of all, and of the largest."""
    largest: int


class Places(NamedTuple):
    """The schedulable nodes of a cluster: all of the first type, then all of the second …"""

    by_type: dict[str, Nodes]
    """In alphabetical order."""
    position: dict[NodeId, int]
    capacity: FloatArray  # [all nodes] int
    kind: FloatArray  # [all nodes] int: position of its type
    start: FloatArray  # [types + 1] int: position of the first node of a type
    on_one_node: dict[tuple[NodeId, int], Allocation]
    """Allocations that were made before: most of all that are ever made, and checking them again takes its time."""


@lru_cache(maxsize=16)
def places_of(cluster: Cluster) -> Places:
    """The same, not only equal, for equal clusters."""
    by_type = {kind: _nodes(cluster, kind) for kind in cluster.gpu_types}
    ids = [node for nodes in by_type.values() for node in nodes.ids]
    counts = [len(nodes.ids) for nodes in by_type.values()]
    return Places(
        by_type,
        {node: position for position, node in enumerate(ids)},
        np.concatenate([np.zeros(0, dtype=np.int64), *(nodes.capacity for nodes in by_type.values())]),
        np.repeat(np.arange(len(counts)), counts),
        np.cumsum([0, *counts]),
        {},
    )


def _nodes(cluster: Cluster, gpu_type: str) -> Nodes:
    nodes = [node for node in cluster if node.schedulable and node.gpu_type == gpu_type]
    racks = {name: index for index, name in enumerate(sorted({node.rack for node in nodes}))}
    capacity = np.array([node.num_gpus for node in nodes], dtype=np.int64)
    return Nodes(
        tuple(node.id for node in nodes),
        capacity,
        np.array([racks[node.rack] for node in nodes], dtype=np.int64),
        len(racks),
        int(capacity.sum()),
        int(capacity.max(initial=0)),
    )
