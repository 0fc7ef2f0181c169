"""Live and simulated, compared. Pure: what is measured is handed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pollux.cli.fidelity.course import Course
from pollux.cli.fidelity.delays import Delay
from pollux.cli.trial.running import Outage
from pollux.core import FrozenMap

MAX_JCT_ERROR = 0.1
MIN_RANK_CORRELATION = 0.9
MAX_REALLOC_ERROR = 0.2
MAX_SLIP = 0.05
TOO_BUSY = 0.9
"""The share of all cores above which a live run tells more of the machine than of Pollux."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What was run."""

    workload: str
    policy: str
    compress: float
    """F: so many emulated seconds are one real second."""
    nodes: int
    slots: int
    """Of each node."""
    interval_s: float
    realloc_delay_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    """One job, both ways."""

    name: str
    application: str
    requested_gpus: int
    live: Course
    simulated: Course

    @property
    def jct_difference(self) -> float:
        """Live over simulated, less one: 0.05 is five percent longer."""
        return self.live.jct_s / self.simulated.jct_s - 1.0 if self.simulated.jct_s else 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """What must hold if the simulator is to be believed, or the live side."""

    name: str
    value: float
    limit: str
    is_met: bool


@dataclass(frozen=True, slots=True)
class FidelityResult:
    """What `pollux fidelity` found."""

    setting: Setting
    jobs: tuple[Pair, ...]
    """In the order of the workload."""
    delays: tuple[Delay, ...]
    live_rounds: tuple[float, ...]
    """When each began."""
    simulated_rounds: tuple[float, ...]
    seconds: float
    """How long the live run took, really."""
    cpu_share: float | None = None
    """How busy all cores of this machine were meanwhile, with whatever else ran on them; None: nobody can tell."""
    outage: Outage | None = None
    """The service was killed meanwhile; its times are real seconds."""
    faults: tuple[str, ...] = ()
    """What must not happen on the live side, a sentence each: jobs that lost replicas, started from scratch or do not
    tell how late they were, and what the end of the cluster left undone."""
    told: FrozenMap[str, object] = field(default_factory=FrozenMap)
    """What the simulator was told of the live system, by the names that `--set` has for it."""

    @property
    def num_jobs(self) -> int:
        return len(self.jobs)

    @property
    def avg_jct_live_s(self) -> float:
        return sum(job.live.jct_s for job in self.jobs) / len(self.jobs)

    @property
    def avg_jct_simulated_s(self) -> float:
        return sum(job.simulated.jct_s for job in self.jobs) / len(self.jobs)

    @property
    def avg_jct_error(self) -> float:
        """Of the averages: how far off the simulator is, as a share of what it says."""
        return abs(self.avg_jct_live_s - self.avg_jct_simulated_s) / self.avg_jct_simulated_s

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of the JCTs: 1 if jobs are as long in the same order."""
        return spearman([job.live.jct_s for job in self.jobs], [job.simulated.jct_s for job in self.jobs])

    @property
    def reallocations_live(self) -> int:
        return sum(job.live.reallocations for job in self.jobs)

    @property
    def reallocations_simulated(self) -> int:
        return sum(job.simulated.reallocations for job in self.jobs)

    @property
    def realloc_error(self) -> float:
        """Of their number, as a share of what the simulator says; of one, if it says none."""
        apart = abs(self.reallocations_live - self.reallocations_simulated)
        return apart / max(self.reallocations_simulated, 1)

    @property
    def pacing_slip(self) -> float:
        """Of the job whose steps were latest."""
        return max((job.live.pacing_slip for job in self.jobs), default=0.0)

    @property
    def mean_pacing_slip(self) -> float:
        return sum(job.live.pacing_slip for job in self.jobs) / len(self.jobs)

    @property
    def bounds(self) -> tuple[Bound, ...]:
        error, rank, moves, slip = self.avg_jct_error, self.rank_correlation, self.realloc_error, self.pacing_slip
        return (
            Bound("average JCT, live against simulated", error, f"≤ {MAX_JCT_ERROR:.0%}", error <= MAX_JCT_ERROR),
            Bound("rank correlation of JCTs", rank, f"≥ {MIN_RANK_CORRELATION:g}", rank >= MIN_RANK_CORRELATION),
            Bound("number of re-allocations", moves, f"≤ {MAX_REALLOC_ERROR:.0%}", moves <= MAX_REALLOC_ERROR),
            # A job of some length fails by itself; a short one is not worth its while.
            Bound("pacing slip of the latest job", slip, f"≤ {MAX_SLIP:.0%}", slip <= MAX_SLIP),
        )

    @property
    def is_faithful(self) -> bool:
        """Figures of a run with faults are no proof, whatever they are."""
        return not self.faults and all(bound.is_met for bound in self.bounds)

    def document(self) -> dict[str, Any]:
        """All of it as plain data."""
        figures = {
            name: getattr(self, name)
            for name in (
                "num_jobs",
                "avg_jct_live_s",
                "avg_jct_simulated_s",
                "avg_jct_error",
                "rank_correlation",
                "reallocations_live",
                "reallocations_simulated",
                "realloc_error",
                "pacing_slip",
                "mean_pacing_slip",
                "is_faithful",
            )
        }
        jobs = [
            {
                **asdict(job),
                "live": _plain(job.live),
                "simulated": _plain(job.simulated),
                "jct_difference": job.jct_difference,
            }
            for job in self.jobs
        ]
        bounds = [asdict(bound) for bound in self.bounds]
        return {
            **asdict(self),
            "is_emulated": True,
            **figures,
            "bounds": bounds,
            "jobs": jobs,
            "told": dict(self.told),
        }


def _plain(course: Course) -> dict[str, Any]:
    parts = ("waiting_s", "starting_s", "pausing_s", "training_s")
    derived = {name: getattr(course, name) for name in ("jct_s", "first_step_after_s", "gpus", *parts)}
    return {**asdict(course), **derived}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks. 1 where there is nothing to put into an order."""
    ours, theirs = ranks(first), ranks(second)
    middle = (len(ours) + 1) / 2
    spread = [sum((rank - middle) ** 2 for rank in side) for side in (ours, theirs)]
    if not all(spread):
        return 1.0 if not any(spread) else 0.0
    together = sum((a - middle) * (b - middle) for a, b in zip(ours, theirs, strict=True))
    return together / math.sqrt(spread[0] * spread[1])


def ranks(values: Sequence[float]) -> list[float]:
    """From 1 on, the smallest first."""
    return [
        sum(other < value for other in values) + (1 + sum(other == value for other in values)) / 2 for value in values
    ]
