"""Nodes that come and go: as a cluster file says, and by failures of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from pollux.core import Cluster, Event, Node, NodeId, NodeJoined, NodeLost
from pollux.scheduler import Scheduler
from pollux.simulator.agenda import Agenda, Rank
from pollux.simulator.cluster_file import NodeChange
from pollux.simulator.options import Options
from pollux.simulator.runs import Runs


class Nodes:
    """Those of one world."""

    def __init__(
        self, agenda: Agenda, scheduler: Scheduler, tell: Callable[[Event], None], runs: Runs, options: Options
    ) -> None:
        """`tell` hands an event to the scheduler, and does what it then asks for."""
        self._agenda, self._scheduler, self._tell, self._runs = agenda, scheduler, tell, runs
        self._options = options
        self._fails_at_s: dict[NodeId, float] = {}
        """When each node fails by itself next, or did so last; whatever else happens to it makes that void."""

    def begin(self, cluster: Cluster, changes: Iterable[NodeChange]) -> None:
        """With these nodes, and these changes ahead."""
        for node in cluster:
            self._tell(NodeJoined(node))
        for change in changes:
            self._agenda.at(change.time_s, Rank.WORLD, self._change, change.event)
        for node in cluster:
            self._plan_failure(node.id)

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self._options.seed))

    def _plan_failure(self, node: NodeId) -> None:
        mean = self._options.world.node_mtbf_s
        if mean is not None and node in self._scheduler.state.cluster:
            at = self._agenda.now - mean * float(np.log1p(-self._rng.random()))
            self._fails_at_s[node] = at
            self._agenda.at(at, Rank.WORLD, self._fail, node)

    def _fail(self, node_id: NodeId) -> None:
        cluster, now = self._scheduler.state.cluster, self._agenda.now
        if node_id in cluster and self._fails_at_s.get(node_id) == now:
            node = cluster[node_id]
            self._change(NodeLost(node_id))
            self._fails_at_s[node_id] = now
            self._agenda.at(now + self._options.world.node_repair_s, Rank.WORLD, self._repair, node, now)

    def _repair(self, node: Node, failed_at_s: float) -> None:
        if self._fails_at_s.get(node.id) == failed_at_s:
            self._change(NodeJoined(node))

    def _change(self, event: Event) -> None:
        self._tell(event)
        match event:
            case NodeJoined(node):
                self._fails_at_s.pop(node.id, None)
                self._plan_failure(node.id)
            case NodeLost(node_id):
                self._fails_at_s.pop(node_id, None)
                self._runs.lose_node(node_id)
