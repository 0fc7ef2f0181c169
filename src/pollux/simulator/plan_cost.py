"""What plans cost: the CPU time of one policy on made-up rounds, how good its plans are proven to be, what they change.

A plan is timed from the snapshot to the finished `Plan`, goodput tables included. The snapshots themselves, as the
scheduler would have them, are made outside of it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pollux.core import Plan, Snapshot
from pollux.policies import Policy
from pollux.simulator.rounds import Rounds

FEWEST_SETTLING, MOST_SETTLING, SETTLING_JOBS = 3, 50, 20_000
"""Rounds that are planned first and not counted, and their product with the number of jobs: the first is cold, some
load machine code, and those in which a kind of job is met for the first time work out its batch sizes."""


def settling_rounds(num_jobs: int) -> int:
    return max(FEWEST_SETTLING, min(MOST_SETTLING, SETTLING_JOBS // max(num_jobs, 1)))


@dataclass(frozen=True, slots=True)
class PlanCost:
    """One entry a round, in order."""

    cpu_ms: tuple[float, ...]
    fitness: tuple[float | None, ...]
    """None where the policy does not tell."""
    gap: tuple[float | None, ...]
    started: tuple[int, ...]
    """Jobs that hold GPUs after the plan and held none before."""
    moved: tuple[int, ...]
    """Jobs that hold others than before."""
    stopped: tuple[int, ...]

    def figures(self) -> dict[str, Any]:
        """Over all rounds; `gap` is None where it is not known of all."""
        gaps = [gap for gap in self.gap if gap is not None]
        return {
            "cpu_ms": {**_spread(self.cpu_ms), "rounds": self.cpu_ms},
            "gap": _spread(gaps) if len(gaps) == len(self.gap) else None,
            **{name: float(np.mean(getattr(self, name))) for name in ("started", "moved", "stopped")},
        }


def plan_cost(
    policy: Policy,
    rounds: Rounds,
    count: int,
    beside: Policy | None = None,
    on_round: Callable[[], None] = lambda: None,
) -> tuple[PlanCost, PlanCost | None]:
    """What `count` warm rounds cost under a policy, whose plans are in force; and under another one that plans the same
    snapshots. `on_round` hears of each round, those that settle included."""
    ours, theirs = _Entries(), _Entries()
    settling = settling_rounds(len(rounds.snapshot.jobs))
    for number in range(settling + count):
        snapshot, is_counted = rounds.snapshot, number >= settling
        plan = ours.timed(policy, snapshot, is_counted)
        # It need not settle, but what it remembers must be of the round before.
        if beside is not None and number >= settling - 1:
            theirs.timed(beside, snapshot, is_counted).check(snapshot)
        rounds.advance(plan)
        on_round()
    return ours.cost(), None if beside is None else theirs.cost()


def proven_gap(stats: Mapping[str, float]) -> float | None:
    """By what share the last plan is at most below the best one, as a policy's `stats` tell; None if they do not."""
    if "gap" in stats:
        return stats["gap"]
    if "fitness" in stats and stats.get("bound", 0.0) > 0.0:
        return max(1.0 - stats["fitness"] / stats["bound"], 0.0)
    return None


def changes(snapshot: Snapshot, plan: Plan) -> tuple[int, int, int]:
    """Jobs that a plan starts, moves or resizes, and stops."""
    started = moved = stopped = 0
    for job in snapshot.jobs.values():
        wanted = plan.allocations.get(job.id)
        if job.assigned and not wanted:
            stopped += 1
        elif wanted and not job.assigned:
            started += 1
        elif wanted and wanted != job.assigned:
            moved += 1
    return started, moved, stopped


class _Entries:
    def __init__(self) -> None:
        self._rows: list[tuple[float, float | None, float | None, int, int, int]] = []

    def timed(self, policy: Policy, snapshot: Snapshot, is_counted: bool) -> Plan:
        """Plan, and take down what it cost. Garbage is not collected meanwhile: most of it is of the snapshots."""
        gc.disable()
        try:
            began = time.process_time()
            plan = policy.plan(snapshot, snapshot.round)
            cpu_ms = 1000.0 * (time.process_time() - began)
        finally:
            gc.enable()
        if is_counted:
            stats = policy.stats()
            self._rows.append((cpu_ms, stats.get("fitness"), proven_gap(stats), *changes(snapshot, plan)))
        return plan

    def cost(self) -> PlanCost:
        return PlanCost(*zip(*self._rows, strict=True))


def _spread(values: Sequence[float]) -> dict[str, float]:
    median, p99 = np.percentile(values, (50, 99)).tolist()
    return {"median": median, "p99": p99, "max": max(values)}
