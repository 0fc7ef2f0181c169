"""What there is to give out: nodes with GPUs. Usage is not kept here; it follows from the jobs' allocations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pollux.core import checks
from pollux.core.frozenmap import FrozenMap
from pollux.core.ids import DEFAULT_GPU_TYPE, NodeId
from pollux.errors import InvalidSpec, UnknownName


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. Its GPUs are all of one type; a machine without GPUs is no node of ours."""

    id: NodeId
    num_gpus: int
    gpu_type: str = DEFAULT_GPU_TYPE
    labels: FrozenMap[str, str] = field(default_factory=FrozenMap)
    schedulable: bool = True
    """False while the node is drained: what runs there may finish or be moved, nothing new is put there."""

    def __post_init__(self) -> None:
        checks.text(InvalidSpec, "id", self.id)
        checks.whole(InvalidSpec, "num_gpus", self.num_gpus, 1)
        checks.text(InvalidSpec, "gpu_type", self.gpu_type)
        checks.frozen(InvalidSpec, "labels", self.labels)
        for name, value in self.labels.items():
            checks.text(InvalidSpec, f'labels["{name}"]', value, may_be_empty=True)
        checks.flag(InvalidSpec, "schedulable", self.schedulable)

    @property
    def rack(self) -> str:
        """The label `rack`; empty if there is none. All nodes without it count as one rack."""
        return self.labels.get("rack", "")


@dataclass(frozen=True, slots=True)
class Cluster:
    """All nodes, by id. Iterates over the nodes in order of their ids."""

    nodes: FrozenMap[NodeId, Node] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        checks.frozen(InvalidSpec, "nodes", self.nodes)
        for key, node in self.nodes.items():
            checks.instance(InvalidSpec, f'nodes["{key}"]', node, Node)
            if key != node.id:
                raise InvalidSpec(f'nodes["{key}"].id', node.id, "differs from its key", "Build it with Cluster.of(…)")

    @classmethod
    def of(cls, *nodes: Node) -> Cluster:
        """A cluster of these nodes; two of one name are refused."""
        by_id: dict[NodeId, Node] = {}
        for node in nodes:
            if node.id in by_id:
                raise InvalidSpec("nodes", node.id, "occurs twice", "Give each node a name of its own")
            by_id[node.id] = node
        return cls(FrozenMap(by_id))

    @classmethod
    def uniform(cls, num_nodes: int, gpus_per_node: int, gpu_type: str = DEFAULT_GPU_TYPE) -> Cluster:
        """Equal nodes `node-0`, `node-1` …, padded with zeros (`node-00`) so that names sort as the numbers do."""
        checks.whole(InvalidSpec, "num_nodes", num_nodes, 0)
        checks.whole(InvalidSpec, "gpus_per_node", gpus_per_node, 1)
        width = len(str(num_nodes - 1))
        return cls.of(*(Node(NodeId(f"node-{i:0{width}}"), gpus_per_node, gpu_type) for i in range(num_nodes)))

    def __getitem__(self, node_id: NodeId) -> Node:
        try:
            return self.nodes[node_id]
        except KeyError:
            raise UnknownName("node", node_id, self.nodes) from None

    def __contains__(self, node_id: object) -> bool:
        return node_id in self.nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    @property
    def capacity(self) -> FrozenMap[NodeId, int]:
        """GPUs of each schedulable node."""
        return FrozenMap({node.id: node.num_gpus for node in self if node.schedulable})

    @property
    def num_gpus(self) -> int:
        """GPUs of all schedulable nodes together."""
        return sum(node.num_gpus for node in self if node.schedulable)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types that schedulable nodes have, in alphabetical order."""
        return tuple(sorted({node.gpu_type for node in self if node.schedulable}))

    def with_node(self, node: Node) -> Cluster:
        """The same cluster with this node, in place of the one of its name if there is one."""
        return Cluster(self.nodes.with_item(node.id, node))

    def drained(self, node_id: NodeId) -> Cluster:
        """The same cluster, where that node takes nothing new."""
        return self.with_node(replace(self[node_id], schedulable=False))

    def without(self, node_id: NodeId) -> Cluster:
        """The same cluster less that node, which must be there."""
        return Cluster(self.nodes.without(self[node_id].id))
