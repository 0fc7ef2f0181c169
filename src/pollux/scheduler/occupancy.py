"""Who occupies what: GPUs in use on each node, kept as jobs change, so that no GPU is given out twice."""

from __future__ import annotations

from pollux.core import Allocation, Cluster, NodeId


class Occupancy:
    """GPUs in use by node, also on nodes that have vanished until their jobs have let go of them."""

    def __init__(self) -> None:
        self.used: dict[NodeId, int] = {}
        self._capacity: dict[NodeId, int] = {}

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Occupancy) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes

    def follow(self, cluster: Cluster) -> None:
        """From now on give out what this cluster has."""
        self._capacity = dict(cluster.capacity)

    def add(self, allocation: Allocation) -> None:
        for node, count in allocation.gpus.items():
            self.used[node] = self.used.get(node, 0) + count

    def remove(self, allocation: Allocation) -> None:
        for node, count in allocation.gpus.items():
            left = self.used[node] - count
            if left:
                self.used[node] = left
            else:
                del self.used[node]

    def has_room(self, wanted: Allocation, held: Allocation) -> bool:
        """Whether a job that holds `held` can have `wanted` as well: all it needs beyond that is free now."""
        for node, count in wanted.gpus.items():
            more = count - held.gpus.get(node, 0)
            if more > 0 and more > self._capacity.get(node, 0) - self.used.get(node, 0):
                return False
        return True
