"""Shortest remaining time first, and its relatives: how well one could do with the truth about every job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import ClassVar

from pollux.core import Job, Plan, Snapshot, checks
from pollux.errors import InvalidSpec
from pollux.policies.base import Policy, truth
from pollux.policies.packing import by_arrival, plan_in_order, requested_size, settled


class Remaining(StrEnum):
    """What is compared."""

    TIME = "time"
    """Seconds until the end at the requested size: SRTF."""
    SERVICE = "service"
    """These seconds × GPUs: SRSF."""


@dataclass
class Srtf(Policy):
    """Who needs least until its end goes first, on what it requested; whoever does not fit is pre-empted.

    Equal ones go in order of submission, jobs of which nothing is known last.
    """

    needs_oracle: ClassVar[tuple[str, ...]] = ("remaining_s",)

    by: Remaining = Remaining.TIME
    """Compare the remaining `time`, or the remaining `service`: time × GPUs."""
    preempt: bool = True
    """False: running jobs stay until they end (SJF); the order is for those that wait."""
    min_remaining_s: float = 30.0
    """A running job with less than this to go is not pre-empted: making room would take about as long."""

    def __post_init__(self) -> None:
        if self.by not in list(Remaining):
            raise InvalidSpec("by", self.by, "nothing to compare", f"Give one of {', '.join(Remaining)}")
        checks.finite(InvalidSpec, "min_remaining_s", self.min_remaining_s, 0)

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        oracle = truth(snapshot, "srtf")

        def remaining_s(job: Job) -> float:
            known = oracle.get(job.id)
            return inf if known is None or known.remaining_s is None else known.remaining_s

        def key(job: Job) -> float:
            return remaining_s(job) * (requested_size(job) if self.by == Remaining.SERVICE else 1)

        order = sorted(by_arrival(snapshot.jobs.values()), key=key)
        running = settled(order, snapshot.cluster)
        stays = {job.id for job in running if not self.preempt or remaining_s(job) < self.min_remaining_s}
        order.sort(key=lambda job: job.id not in stays)
        return plan_in_order(snapshot, order)
