"""Castor as a policy: what it believes of jobs, and how their values are made of that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pollux.core import Snapshot, checks
from pollux.errors import InvalidSpec
from pollux.goodput.numerics import FloatArray
from pollux.policies.castor.kinds import Kinds
from pollux.policies.castor.values import Believed, Rules, choices_of
from pollux.policies.castor.waiting import Waiting
from pollux.policies.pollux.moment import Moment
from pollux.policies.pollux.places import Nodes
from pollux.policies.pollux.roster import Facts, Fits, Roster
from pollux.policies.pollux.sharing import Sharing
from pollux.policies.pollux.solver import Budget, Priced, Solution


@dataclass
class Castor(Sharing):
    """Short jobs first, at a price: GPUs go where they end most jobs soonest; re-allocations must pay."""

    rank_exponent: float = 0.4
    """The dial: how much jobs with little left go first. 0.15 is neutral; 0: all go by what they gain from GPUs."""
    horizon_s: float = 250.0
    """Within which a re-allocation of 30 s must pay; grows with the square root of the delay."""
    unmeasured_delay_s: float = 30.0
    """What a re-allocation is taken to cost before a job has measured it."""
    start_gpus: int = 4
    """A job that was never measured gets at most so many GPUs …"""
    growth: int = 4
    """… and then so many times those that it has been measured with."""
    hold_s: float = 90.0
    """A job of no known kind is left alone for so long after its first start: what it measures first says little."""
    rest: float = 2.0
    """And for so many delays after each re-allocation, so that it always trains longer than it stands still."""
    drain_s: float = 1800.0
    """When nobody has arrived for so long, the queue is taken to be draining."""
    patience_s: float = 7200.0
    """A job that has waited for so long goes before all others, whatever they say of their length."""
    avoid_interference: bool = True
    """At most one job on several nodes may use any node."""
    max_gpus: int | None = None
    """Of one job."""
    registry: bool = True
    """Whether what a job has measured tells about others of its kind: where they have not run, and before they have."""
    single_gpu_accumulation: bool = False
    published_grid: bool = False
    """How agents choose their batch size: what a policy believes must be what they do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank_exponent", "unmeasured_delay_s", "hold_s", "rest", "drain_s"):
            checks.finite(InvalidSpec, f"castor.{name}", getattr(self, name), 0)
        for name in ("horizon_s", "patience_s"):
            checks.finite(InvalidSpec, f"castor.{name}", getattr(self, name), 0, above=True)
        checks.whole(InvalidSpec, "castor.start_gpus", self.start_gpus, 1)
        checks.whole(InvalidSpec, "castor.growth", self.growth, 1)
        checks.whole(InvalidSpec, "castor.max_gpus", self.max_gpus, 1, optional=True)
        self._rules = Rules(
            float(self.rank_exponent),
            float(self.drain_s),
            float(self.unmeasured_delay_s),
            float(self.horizon_s),
            float(self.hold_s),
            float(self.rest),
            float(self.patience_s),
        )
        self._solvers: dict[str, Priced] = {}
        self._waiting = Waiting()
        self._waited_s: FloatArray = np.zeros(0)
        self._kinds = Kinds() if self.registry else None
        self._sizes: dict[str, tuple[Nodes, FloatArray]] = {}  # by GPU type, for these nodes
        self.shares_experience = self.registry

    def _read(self, snapshot: Snapshot) -> Moment:
        moment = super()._read(snapshot if self._kinds is None else self._kinds.filled_in(snapshot))
        if self._kinds is not None:
            self._kinds.read(moment)
        self._waited_s = self._waiting.read(moment)
        return moment

    def _fits(self, gpu_type: str) -> Fits:
        return super()._fits(gpu_type) if self._kinds is None else self._kinds.on(gpu_type)

    def _answer(self, roster: Roster, facts: Facts, rng: np.random.Generator) -> tuple[Solution, dict[str, float]]:
        may_have = facts.most(np.maximum(self.growth * facts.observed, self.start_gpus), self.max_gpus)
        columns = roster.columns(facts, may_have)
        sizes, is_foreseen = self._offered(roster.gpu_type, facts.nodes), roster.fits.is_foreseen(facts.row)
        believed = Believed(sizes, is_foreseen, self._waited_s[facts.member])
        choices, price, num_overdue = choices_of(columns, believed, self._rules, self.avoid_interference)
        solver = self._solvers.setdefault(roster.gpu_type, Priced())
        solution = solver.solve(choices, Budget(), rng)
        return solution, {"price": price, "overdue": num_overdue}

    def _offered(self, gpu_type: str, nodes: Nodes) -> FloatArray:
        """[1 + GPUs] bool: so many are offered to jobs of that type."""
        known = self._sizes.get(gpu_type)
        if known is None or known[0] is not nodes:
            sizes = np.zeros(nodes.total + 1, dtype=bool)
            sizes[packed_sizes(nodes.capacity)] = True
            known = self._sizes[gpu_type] = nodes, sizes
        return known[1]


def packed_sizes(capacity: FloatArray) -> FloatArray:
    """Numbers of GPUs that leave no fragments: powers of two within a node, then whole nodes, the largest first."""
    nodes = np.sort(capacity)[::-1]
    within = 1 << np.arange(int(nodes[0]).bit_length())
    return np.unique(np.concatenate([within, np.cumsum(nodes)]))
