"""Who holds how much: GPUs of one job on each node, and the shape that the throughput model sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pollux.core import checks
from pollux.core.cluster import Cluster
from pollux.core.frozenmap import FrozenMap
from pollux.core.ids import NodeId
from pollux.errors import InvalidSpec


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How far a job is spread: all that the model knows of a placement. num_gpus ≥ num_nodes ≥ num_racks ≥ 1."""

    num_gpus: int
    num_nodes: int = 1
    num_racks: int = 1

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "num_gpus", self.num_gpus, 1)
        checks.whole(InvalidSpec, "num_nodes", self.num_nodes, 1)
        checks.whole(InvalidSpec, "num_racks", self.num_racks, 1)
        if self.num_gpus < self.num_nodes:
            raise InvalidSpec(
                "num_gpus",
                self.num_gpus,
                f"fewer than num_nodes = {self.num_nodes}, but each node of a job holds at least one of its GPUs",
                f"Give at least {self.num_nodes} GPUs or at most {self.num_gpus} nodes",
            )
        if self.num_nodes < self.num_racks:
            raise InvalidSpec(
                "num_nodes",
                self.num_nodes,
                f"fewer than num_racks = {self.num_racks}, but each rack of a job holds at least one of its nodes",
                f"Give at least {self.num_racks} nodes or at most {self.num_nodes} racks",
            )


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPUs of one job by node, without zeros. `Allocation()` is nothing at all, and false."""

    gpus: FrozenMap[NodeId, int] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        checks.frozen(InvalidSpec, "gpus", self.gpus)
        for node_id, count in self.gpus.items():
            if type(count) is not int or count < 1:
                checks.whole(InvalidSpec, f'gpus["{node_id}"]', count, 0)
                raise InvalidSpec(f'gpus["{node_id}"]', count, "zeros are left out", "Build it with Allocation.of(…)")

    @classmethod
    def of(cls, gpus: Mapping[NodeId, int]) -> Allocation:
        """The allocation with these counts; zeros are dropped, negative counts refused."""
        return cls(FrozenMap({node_id: count for node_id, count in gpus.items() if count != 0 or count is False}))

    def __bool__(self) -> bool:
        return bool(self.gpus)

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus.values())

    @property
    def num_nodes(self) -> int:
        return len(self.gpus)

    def shape(self, cluster: Cluster | None = None) -> Shape:
        """GPUs, nodes and racks; racks by the labels in `cluster`, one rack without it. Nothing has no shape."""
        if not self.gpus:
            raise InvalidSpec("allocation", {}, "holds no GPU, so it has no shape", "Ask `if allocation` first")
        racks = 1 if cluster is None else len({cluster[node_id].rack for node_id in self.gpus})
        return Shape(self.num_gpus, self.num_nodes, racks)

    def union(self, other: Allocation) -> Allocation:
        """The larger count on each node: what a job occupies while it changes from one allocation to the other."""
        counts = dict(self.gpus)
        for node_id, count in other.gpus.items():
            counts[node_id] = max(count, counts.get(node_id, 0))
        return Allocation(FrozenMap(counts))

    def beyond(self, other: Allocation) -> Allocation:
        """What it has on each node more than the other."""
        more = {node_id: count - other.gpus.get(node_id, 0) for node_id, count in self.gpus.items()}
        return Allocation(FrozenMap({node_id: count for node_id, count in more.items() if count > 0}))

    def without(self, node_id: NodeId) -> Allocation:
        """What is left if that node goes."""
        return Allocation(self.gpus.without(node_id)) if node_id in self.gpus else self
