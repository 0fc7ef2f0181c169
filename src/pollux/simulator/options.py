"""What can be set about a run: the world, the simulated agent, the scheduler. Each option can be set alone by its
dotted name (`world.whole_seconds=true`); a preset sets several (`compat.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from zlib import crc32

from pollux.core import FrozenMap, checks
from pollux.errors import InvalidSpec
from pollux.scheduler import SchedulerOptions


class RankOrder(StrEnum):
    """In which order the nodes of a job form its ring: measured times of (3, 4, 1) and (4, 3, 1) differ a little."""

    LARGEST_FIRST = "largest-first"
    BY_NODE = "by-node"


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """How the world behaves; none of it is visible to a policy."""

    realloc_delay_s: float = 30.0
    """A job does not train for so long after each start and each change of its GPUs (paper, section 5.3)."""
    warm_up_s: float = 0.0
    """In place, a job that gets new replicas trains on as it is for so long before: until these are there to join."""
    interference: float = 0.0
    """Share of its speed that a job on several nodes loses while it shares one of them with another such job."""
    rank_order: RankOrder = RankOrder.LARGEST_FIRST
    whole_seconds: bool = False
    """Epochs take whole seconds, and progress is added up report by report, as in the artifact."""
    oracle_doubles_one_gpu: bool = False
    """The oracle prices one GPU with at least two passes an iteration, as the artifact's does."""
    node_mtbf_s: float | None = None
    """Mean time between failures of each node; None: none fails by itself."""
    node_repair_s: float = 3600.0
    """How long a node that failed by itself stays away."""
    max_time_s: float = 100 * 86400.0
    """A run that has not ended by then is given up: its jobs hinder each other for ever."""

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "world.realloc_delay_s", self.realloc_delay_s, 0)
        checks.finite(InvalidSpec, "world.warm_up_s", self.warm_up_s, 0)
        checks.finite(InvalidSpec, "world.interference", self.interference, 0)
        if self.interference >= 1:
            raise InvalidSpec(
                "world.interference", self.interference, "must be below 1", "Give the share lost, as 0.25"
            )
        checks.finite(InvalidSpec, "world.node_mtbf_s", self.node_mtbf_s, 0, above=True, optional=True)
        checks.finite(InvalidSpec, "world.node_repair_s", self.node_repair_s, 0)
        checks.finite(InvalidSpec, "world.max_time_s", self.max_time_s, 0, above=True)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How the agent inside each job behaves."""

    report_interval_s: float = 30.0
    """It measures, tunes its batch size and reports this often (paper, section 4.3)."""
    first_report_s: float | None = None
    """Each job does so at times of its own, as deployed ones do: first so long after it begins to train on some GPUs,
    then every interval. None: all at the same moments, the multiples of the interval."""
    hysteresis: float = 1.0
    """A batch size is left only for one whose goodput is predicted to be so many times better (deployed: 1.05)."""
    single_gpu_accumulation: bool = False
    """One GPU takes two passes for a batch above M0, as the artifact's noise estimator needs."""
    published_grid: bool = False
    """Choose among the artifact's 50 batch sizes instead of our grid."""
    published_fit: bool = False
    """Fit with the artifact's loss instead of ours."""
    kind_prior: bool = True
    """When it is put on GPUs, it is told what jobs of its kind that have ended measured, and tunes by that and by what
    it measures itself; only under a policy that shares it."""
    declares_length: bool = True
    """Training loops say how much work there is in all."""
    length_error: float = 1.0
    """And are wrong about what is left by a factor of up to this, either way (log-uniform, by the job's name)."""
    pinned: tuple[str, ...] = ()
    """Applications that keep one GPU, and where batch sizes adapt their largest one (artifact: ncf)."""

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "agent.report_interval_s", self.report_interval_s, 0, above=True)
        checks.finite(InvalidSpec, "agent.first_report_s", self.first_report_s, 0, above=True, optional=True)
        checks.finite(InvalidSpec, "agent.hysteresis", self.hysteresis, 1)
        checks.finite(InvalidSpec, "agent.length_error", self.length_error, 1)

    def length_factor(self, job: str) -> float | None:
        """By which the training loop of that job is wrong about what is left; None if it says nothing."""
        if not self.declares_length:
            return None
        return float(self.length_error ** (2.0 * crc32(job.encode()) / 0xFFFFFFFF - 1.0))


RESTARTS = SchedulerOptions(in_place=False)
"""The delay of 30 s is that of the paper's restarts from a checkpoint, which give the old GPUs back at once."""


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about a run but the workload, the cluster and the policy's name."""

    interval_s: float = 60.0
    """From round to round; the first is one interval after the start."""
    early_gap_s: float | None = None
    """Rounds also come as soon as GPUs lie idle while a job waits, but no sooner than this after the one before; the
    first is then at the start, and intervals count from the last round: the rule of the deployed scheduler. None: no
    round comes early."""
    seed: int = 0
    world: WorldOptions = field(default_factory=WorldOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    scheduler: SchedulerOptions = RESTARTS
    policy: FrozenMap[str, object] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "interval_s", self.interval_s, 0, above=True)
        checks.finite(InvalidSpec, "early_gap_s", self.early_gap_s, 0, above=True, optional=True)
        checks.whole(InvalidSpec, "seed", self.seed, 0)
        if self.world.whole_seconds and self.agent.first_report_s is not None:
            problem = "with world.whole_seconds progress is added up when all report together"
            raise InvalidSpec("agent.first_report_s", self.agent.first_report_s, problem, "Leave one of them out")
