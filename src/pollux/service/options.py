"""How a service runs. Every field has a default that works on one machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pollux.core import FrozenMap, checks
from pollux.errors import InvalidSpec
from pollux.policies import registry


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What `pollux up` is told, and what only tests and operators of large clusters change."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 7333
    """0: any that is free."""
    nodes: int = 1
    """Daemons on this machine that act as nodes."""
    slots: int | None = None
    """Of each node; None: its share of the GPUs, or of the cores."""
    policy: str = "pollux"
    policy_options: FrozenMap[str, object] = field(default_factory=FrozenMap)
    interval_s: float = 60.0
    """From one round to the next (paper, section 5.1). Idle GPUs that somebody waits for do not wait for it."""
    usual_delay_s: float = 2.0
    """What a re-allocation is taken to cost before a job has measured it: in place it stops training for a second."""
    seed: int = 0
    gather_s: float = 0.02
    """Jobs that are submitted within so many seconds are placed together."""
    early_gap_s: float = 1.0
    """The shortest time between two rounds that did not wait for the interval, unless only new jobs came."""
    node_grace_s: float = 60.0
    """A node that is out of reach for so long is lost: its jobs go on elsewhere."""
    recovery_s: float = 60.0
    """How long a service that was started waits for its nodes before it plans without those that are missing."""
    retry_pause_s: float = 5.0
    """After a job's first failure; doubled with each further one, up to five minutes."""
    stop_timeout_s: float = 120.0
    """How long jobs may save when everything is ended."""
    plan_timeout_s: float = 60.0
    save_every: int = 500
    """Events from one snapshot of the state to the next."""
    keep_days: float = 30.0
    """How long events that no snapshot needs are kept."""
    node_options: tuple[str, ...] = ()
    """More of `pollux node`, for all daemons."""
    gpu_type: str | None = None
    """What all slots are called instead of what they are; they are CPU slots then, and no GPU is used."""
    node_labels: FrozenMap[str, str] = field(default_factory=FrozenMap)
    """Of every node."""
    replica_env: FrozenMap[str, str] = field(default_factory=FrozenMap)
    """Variables that every replica finds in its environment."""
    job_env: tuple[str, ...] = ()
    """Names of variables of the service's environment that jobs find, too."""
    job_user: str = ""
    """Whom jobs run as; empty: as the service does."""

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "nodes", self.nodes, 1)
        checks.whole(InvalidSpec, "slots", self.slots, 1, optional=True)
        for name in ("interval_s", "node_grace_s", "recovery_s", "stop_timeout_s", "plan_timeout_s", "keep_days"):
            checks.finite(InvalidSpec, name, getattr(self, name), 0, above=True)
        for name in ("usual_delay_s", "gather_s", "early_gap_s", "retry_pause_s"):
            checks.finite(InvalidSpec, name, getattr(self, name), 0)
        if self.gpu_type is not None:
            checks.text(InvalidSpec, "gpu_type", self.gpu_type)
        for name in ("node_labels", "replica_env"):
            checks.frozen(InvalidSpec, name, getattr(self, name))
        policy = registry.make(self.policy, self.policy_options)  # says what is wrong with name or options
        if "unmeasured_delay_s" in registry.describe(self.policy)["options"]:
            known = {"unmeasured_delay_s": self.usual_delay_s, **self.policy_options}
            object.__setattr__(self, "policy_options", FrozenMap(known))
        if policy.needs_oracle:
            raise InvalidSpec(
                "policy",
                self.policy,
                "needs to know the true future of every job, which nobody does here",
                "Use pollux, fifo, fifo-backfill or tiresias; in pollux simulate it runs",
            )
