"""From the rows of answers to a plan: whoever keeps its GPUs keeps the very allocation that it has."""

from __future__ import annotations

import numpy as np

from pollux.core import Allocation, FrozenMap, NodeId, Plan
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.moment import Moment
from pollux.policies.pollux.moment_kernel import changed
from pollux.policies.pollux.roster import Facts
from pollux.policies.pollux.solver.choices import Rows


class Given:
    """What each job of a moment is to hold; nothing before anybody said so."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self.allocations: list[Allocation] = list(moment.holdings)
        """To be read only for jobs that run."""
        self.runs: FloatArray = np.zeros(len(moment), dtype=bool)
        self._is_moved: FloatArray = np.zeros(len(moment), dtype=bool)

    def take(self, facts: Facts, rows: Rows) -> None:
        """The answer for these jobs, in place of an earlier one."""
        held, answer = facts.held, (rows.first, rows.node, rows.gpus)
        before = held.first, held.node, held.gpus
        moved, back = changed(before, answer, facts.member, self.runs, self._is_moved)
        for position in back.tolist():
            self.allocations[position] = self._moment.holdings[position]
        if not len(moved):
            return
        ids, positions = facts.nodes.ids, facts.member[moved].tolist()
        ends = zip(rows.first[moved].tolist(), rows.first[moved + 1].tolist(), strict=True)
        for position, (begin, end) in zip(positions, ends, strict=True):
            if end - begin == 1:
                self.allocations[position] = self._of_one_node(ids[rows.node[begin]], int(rows.gpus[begin]))
            else:
                pairs = zip(rows.node[begin:end].tolist(), rows.gpus[begin:end].tolist(), strict=True)
                self.allocations[position] = Allocation(FrozenMap({ids[node]: gpus for node, gpus in pairs}))

    def plan(self) -> Plan:
        return Plan.of_holding(self._moment.snapshot.jobs.with_values(self.allocations, self.runs.tolist()))

    def _of_one_node(self, node: NodeId, num_gpus: int) -> Allocation:
        key = node, num_gpus
        cache = self._moment.places.on_one_node
        known = cache.get(key)
        if known is None:
            known = cache[key] = Allocation(FrozenMap({node: num_gpus}))
        return known
