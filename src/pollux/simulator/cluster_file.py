"""Clusters from a file, TOML or JSON: the nodes, and which of them are lost, drained or join while time goes on.

Every problem is named with its path in the file (`nodes[2].gpus`), all of them in one error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from pollux.core import Cluster, FrozenMap, Node, NodeDrained, NodeId, NodeJoined, NodeLost, checks
from pollux.errors import InvalidDocument, InvalidSpec, UnknownName
from pollux.simulator.documents import parsed, refusal, shown

MAX_COUNT = 100_000
"""Most nodes of a cluster, and most GPUs of a node: a slip of the keyboard must not fill the memory."""

NODE_KEYS = ("name", "count", "gpus", "gpu_type", "rack", "labels", "present")
CHANGE_KEYS = ("at_s", "lose", "join", "drain")
CHANGES = ("lose", "join", "drain")


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Something that happens to a node at a given time."""

    time_s: float
    event: NodeLost | NodeJoined | NodeDrained

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "time_s", self.time_s, 0)

    @property
    def node(self) -> NodeId:
        return self.event.node.id if isinstance(self.event, NodeJoined) else self.event.node

    def applied_to(self, cluster: Cluster) -> Cluster:
        """The cluster after it."""
        match self.event:
            case NodeJoined(node):
                return cluster.with_node(node)
            case NodeLost(node_id):
                return cluster.without(node_id)
            case NodeDrained(node_id):
                return cluster.drained(node_id)


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The nodes that are there at the start, and what changes later, in the order of time."""

    cluster: Cluster
    changes: tuple[NodeChange, ...] = ()

    @property
    def largest(self) -> Cluster:
        """The cluster when it has the most schedulable GPUs: what no job may exceed."""
        largest = now = self.cluster
        for change in self.changes:
            now = change.applied_to(now)
            largest = max(largest, now, key=lambda cluster: cluster.num_gpus)
        return largest


def read_cluster(path: Path, default_gpu_type: str) -> ClusterFile:
    """A cluster from a `.toml` or `.json` file; raises InvalidDocument with every problem.

    `default_gpu_type` is that of nodes which name none.
    """
    checks.text(InvalidSpec, "default_gpu_type", default_gpu_type)
    document = _parse(path)
    reader = _Reader(default_gpu_type)
    reader.read(document)
    if reader.problems:
        raise refusal("cluster", path, reader.problems, "Mend the file (layout: docs/workloads.md)")
    present = (entry.node for entry in reader.nodes.values() if entry.is_present)
    return ClusterFile(Cluster.of(*present), tuple(reader.changes))


def _parse(path: Path) -> dict[str, object]:
    import tomllib  # slow, and most runs read no such file

    parsers: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".json": _load_json}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise InvalidDocument("cluster", str(path), "the name ends neither in .toml nor in .json", "Rename the file")
    document = parsed("cluster", path, path.suffix.upper().removeprefix("."), parse)
    if not isinstance(document, dict):
        problem = f"holds {shown(document)} where an object belongs"
        raise InvalidDocument("cluster", str(path), problem, 'Give {"nodes": [...]}')
    return document


def _load_json(text: str) -> object:
    def without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            twin = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twin!r} occurs twice in one object")
        return content

    return json.loads(text, object_pairs_hook=without_twins)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A node, and the part of the file that it comes from."""

    node: Node
    is_present: bool
    path: str


class _State(Enum):
    PRESENT = "is there"
    DRAINED = "is drained already"
    ABSENT = "is not there"


_AFTER = {  # what a change makes of a node; whatever is not here cannot happen
    ("lose", _State.PRESENT): _State.ABSENT,
    ("lose", _State.DRAINED): _State.ABSENT,
    ("drain", _State.PRESENT): _State.DRAINED,
    ("join", _State.ABSENT): _State.PRESENT,
    ("join", _State.DRAINED): _State.PRESENT,
}


@dataclass(slots=True)
class _Reader:
    """A document to nodes and changes; what cannot be used goes to `problems`, one line each."""

    default_gpu_type: str
    problems: list[str] = field(default_factory=list)
    nodes: dict[str, _Entry] = field(default_factory=dict)
    changes: list[NodeChange] = field(default_factory=list)
    knows_all_names: bool = True
    """False once a name could not be read: then a change may speak of a node that we do not know."""

    def read(self, document: Mapping[str, object]) -> None:
        self.refuse_unknown("", document, ("nodes", "changes"))
        if document.get("nodes", []) == []:
            self.problems.append("nodes: the file has none; add [[nodes]] with name and gpus")
            self.knows_all_names = False
        for path, table in self.tables(document, "nodes"):
            self.read_nodes(path, table)
        found = [self.read_change(path, table) for path, table in self.tables(document, "changes")]
        self.follow(sorted((change for change in found if change is not None), key=lambda change: change[0]))
        joined = {str(change.node) for change in self.changes}
        if not self.problems and not any(entry.is_present or name in joined for name, entry in self.nodes.items()):
            self.problems.append("nodes: none is ever present; leave out `present = false` or let one join")

    def wrong(self, path: str, value: object, what: str, fix: str) -> None:
        self.problems.append(f"{path} = {shown(value)}: {what}; {fix}")

    def refuse_unknown(self, path: str, table: Mapping[str, object], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                fix = UnknownName("", key, known).fix
                self.problems.append(f"{path}{'.' if path else ''}{key}: unknown key; {fix}")

    def tables(self, document: Mapping[str, object], key: str) -> Iterator[tuple[str, dict[str, object]]]:
        """Path and content of each table of an array."""
        array = document.get(key, [])
        if not isinstance(array, list):
            self.wrong(key, array, "must be an array of tables", f"write [[{key}]] (JSON: a list of objects)")
            self.knows_all_names &= key != "nodes"
            return
        for index, table in enumerate(array):
            if isinstance(table, dict):
                yield f"{key}[{index}]", table
            else:
                self.wrong(f"{key}[{index}]", table, "must be a table", f"write [[{key}]] (JSON: an object)")
                self.knows_all_names &= key != "nodes"

    def text(self, path: str, table: Mapping[str, object], key: str, default: str) -> str | None:
        """Visible text of one line; None: it is wrong, and noted."""
        value = table.get(key, default)
        if isinstance(value, str) and value.strip() == value and value and value.isprintable():
            return value
        self.wrong(f"{path}.{key}", value, "must be text", "give one line of text, without spaces around it")
        return None

    def whole(self, path: str, table: Mapping[str, object], key: str, default: int | None, high: int) -> int | None:
        value = table.get(key, default)
        if type(value) is int and 1 <= value <= high:
            return value
        if key not in table:
            self.problems.append(f"{path}.{key}: is missing; give a whole number of 1 or more")
        else:
            self.wrong(f"{path}.{key}", value, "must be a whole number", f"give 1 to {high}")
        return None

    def read_nodes(self, path: str, table: dict[str, object]) -> None:
        self.refuse_unknown(path, table, NODE_KEYS)
        name = None
        if "name" in table:
            name = self.text(path, table, "name", "")
        else:
            self.problems.append(f"{path}.name: is missing; give the nodes a name")
        count = self.whole(path, table, "count", 1, MAX_COUNT)
        gpus = self.whole(path, table, "gpus", None, MAX_COUNT)
        gpu_type = self.text(path, table, "gpu_type", self.default_gpu_type)
        labels = self.labels(path, table)
        is_present = table.get("present", True)
        if not isinstance(is_present, bool):
            self.wrong(f"{path}.present", is_present, "must be true or false", "write true or false without quotes")
            is_present = True
        if name is None or count is None:
            self.knows_all_names = False
            return
        if len(self.nodes) + count > MAX_COUNT:
            self.wrong(f"{path}.count", count, f"makes more than {MAX_COUNT} nodes", "give fewer")
            self.knows_all_names = False
            return
        width = len(str(count - 1))
        names = [name] if count == 1 else [f"{name}-{index:0{width}}" for index in range(count)]
        for each in names:
            if each in self.nodes:
                other = self.nodes[each].path
                self.wrong(f"{path}.name", name, f"{other} has a node {each!r} too", "give each node a name of its own")
                return
        for each in names:
            # Of a node with another problem the name is enough: no cluster is made of it.
            node = Node(NodeId(each), gpus or 1, gpu_type or self.default_gpu_type, labels)
            self.nodes[each] = _Entry(node, is_present, path)

    def labels(self, path: str, table: dict[str, object]) -> FrozenMap[str, str]:
        labels: dict[str, str] = {}
        given = table.get("labels", {})
        if not isinstance(given, dict):
            self.wrong(f"{path}.labels", given, "must be a table", 'write labels = { zone = "b" }')
            given = {}
        for key, value in given.items():
            if isinstance(value, str):
                labels[key] = value
            else:
                self.wrong(f"{path}.labels.{key}", value, "must be text", "put it in quotes")
        if "rack" in table and (rack := self.text(path, table, "rack", "")) is not None:
            if "rack" in given:
                self.wrong(f"{path}.labels.rack", given["rack"], f"{path}.rack says it already", "keep one of them")
            labels["rack"] = rack
        return FrozenMap(labels)

    def read_change(self, path: str, table: dict[str, object]) -> tuple[float, str, str, str] | None:
        """Time, path, what happens, and to which node."""
        self.refuse_unknown(path, table, CHANGE_KEYS)
        at_s = self.seconds(path, table)
        kinds = [kind for kind in CHANGES if kind in table]
        if len(kinds) != 1:
            fix = f"give one of {', '.join(CHANGES)}"
            self.problems.append(f"{path}: says {' and '.join(kinds) or 'not what happens'}; {fix}")
            return None
        name = self.text(path, table, kinds[0], "")
        if name is None:
            return None
        if name not in self.nodes:
            if self.knows_all_names:
                self.wrong(f"{path}.{kinds[0]}", name, "no such node", self.closest(name))
            return None
        return None if at_s is None else (at_s, path, kinds[0], name)

    def seconds(self, path: str, table: dict[str, object]) -> float | None:
        value = table.get("at_s")
        if "at_s" not in table:
            self.problems.append(f"{path}.at_s: is missing; give seconds after the start")
        elif not isinstance(value, int | float) or isinstance(value, bool):
            self.wrong(f"{path}.at_s", value, "must be a number", "give seconds after the start")
        elif not 0 <= value <= sys.float_info.max:
            self.wrong(f"{path}.at_s", value, "must be finite and not negative", "give seconds after the start")
        else:
            return float(value)
        return None

    def closest(self, name: str) -> str:
        """Help for a name that no node has; of many nodes only some are listed."""
        group = [known for known in self.nodes if known.rpartition("-")[0] == name]
        return UnknownName("", name, (group or list(self.nodes))[:20]).fix

    def follow(self, timeline: list[tuple[float, str, str, str]]) -> None:
        """The changes as events; those that a node's state at that time forbids are noted and passed over."""
        states = {name: _State.PRESENT if entry.is_present else _State.ABSENT for name, entry in self.nodes.items()}
        for at_s, path, kind, name in timeline:
            after = _AFTER.get((kind, states[name]))
            if after is None:
                fix = "take the change out, or change what happens before it"
                self.wrong(f"{path}.{kind}", name, f"the node {states[name].value} at {at_s:g} s", fix)
                continue
            states[name] = after
            self.changes.append(NodeChange(at_s, self.event(kind, name)))

    def event(self, kind: str, name: str) -> NodeLost | NodeJoined | NodeDrained:
        if kind == "join":
            return NodeJoined(self.nodes[name].node)
        return NodeLost(NodeId(name)) if kind == "lose" else NodeDrained(NodeId(name))
