"""What a policy is: a snapshot in, a plan out, and a few declared facts about it. Mechanism lives in `scheduler/`."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

from pollux.core import FrozenMap, JobId, Oracle, Plan, Snapshot
from pollux.errors import InvalidSpec


class Policy(abc.ABC):
    """Decides who holds which GPUs.

    Called by one thread at a time. Must not change the snapshot, read a clock or draw from a global random source;
    must return a plan that the cluster can hold (`Plan.check`). A job that is missing from the plan holds nothing. It
    may remember what it saw in earlier rounds, but must not rely on it: after a crash it begins anew.
    """

    needs_oracle: ClassVar[tuple[str, ...]] = ()
    """The fields of `Oracle`, the truth about jobs, that it reads in `Snapshot.oracle`. It is told no others, and can
    run only where somebody knows these."""
    reads_models: ClassVar[bool] = False
    """It reads what agents report (`Job.model`); where it does not, nobody needs to fit."""
    adapts_gpus: ClassVar[bool] = False
    """It chooses how many GPUs a job gets; otherwise a job gets what its owner requested."""
    adapts_batch: ClassVar[bool] = False
    """Under it jobs tune their batch size; otherwise each keeps the one that its owner requested."""
    shares_experience: bool = False
    """Agents are told, whenever their job is put on GPUs, what the profile registry has of its kind."""

    @abc.abstractmethod
    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        """Who is to hold what from now on. The seed is where its randomness comes from, and nothing else."""

    def stats(self) -> Mapping[str, float]:
        """What the last plan's search has to tell (fitness, bound, generations …); nothing by default."""
        return {}


def truth(snapshot: Snapshot, policy: str) -> FrozenMap[JobId, Oracle]:
    """The oracle of the snapshot, or a refusal in the name of the policy that needs it."""
    if snapshot.oracle is None:
        raise InvalidSpec(
            "oracle",
            None,
            f"{policy} needs the true remaining work of every job",
            "Use a policy without an oracle (fifo, tiresias …), or run it where the truth is known",
        )
    return snapshot.oracle
