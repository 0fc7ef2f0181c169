"""What policies that share GPUs by what jobs report have in common: from a snapshot to columns, from rows to a plan."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np

from pollux.core import Plan, Snapshot
from pollux.goodput import BatchOptions
from pollux.policies.base import Policy
from pollux.policies.pollux.emit import Given
from pollux.policies.pollux.gpu_types import by_gpu_type, second_choices
from pollux.policies.pollux.moment import Moment, Register
from pollux.policies.pollux.roster import Facts, Fits, Roster
from pollux.policies.pollux.solver import Solution

KEPT_BYTES = 30 << 20
"""glibc gives memory back to the system, to be asked for it again page by page in the next round, where more is free
than twice the largest block that was ever freed (mallopt(3), M_MMAP_THRESHOLD). A round of ten thousand jobs takes some
16 MiB, a tenth of its time for such pages."""


class _Chance:
    """A generator that is made when it is first asked: few rounds need one, and of a small one it takes a tenth."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made: np.random.Generator | None = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = np.random.Generator(np.random.PCG64(self._seed))
        return getattr(self._made, name)


class Sharing(Policy):
    """Reads the models of jobs, chooses their GPUs, lets them choose their batch size. Each GPU type is by itself."""

    reads_models: ClassVar[bool] = True
    adapts_gpus: ClassVar[bool] = True
    adapts_batch: ClassVar[bool] = True

    single_gpu_accumulation: bool
    published_grid: bool
    """How agents choose their batch size: what a policy believes must be what they do."""

    def __post_init__(self) -> None:
        self._register = Register()
        self._rosters: dict[str, Roster] = {}
        self._stats: dict[str, float] = {}
        np.empty(KEPT_BYTES, dtype=np.uint8)  # freed at once

    @abc.abstractmethod
    def _answer(self, roster: Roster, facts: Facts, rng: np.random.Generator) -> tuple[Solution, dict[str, float]]:
        """Who of these jobs gets which GPUs of the roster's type, and what there is to tell of it."""

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        rng = cast(np.random.Generator, _Chance(seed))
        moment = self._read(snapshot)
        groups = by_gpu_type(moment)
        self._stats = {}
        given = Given(moment)
        settled: set[int] = set()
        waiting = list(groups)
        while waiting:
            for gpu_type in filter(groups.__getitem__, waiting):
                roster = self._roster(gpu_type)
                facts = roster.read(moment, np.array(groups[gpu_type], dtype=np.int64))
                solution, told = self._answer(roster, facts, rng)
                given.take(facts, solution.rows)
                prefix = f"{gpu_type}." if len(groups) > 1 else ""
                self._stats |= {f"{prefix}{name}": float(fact) for name, fact in {**solution.stats, **told}.items()}
            waiting = second_choices(moment, groups, given, settled) if len(groups) > 1 else []
        return given.plan()

    def _read(self, snapshot: Snapshot) -> Moment:
        """The jobs of a round."""
        return self._register.read(snapshot)

    def _fits(self, gpu_type: str) -> Fits:
        """Where the models of jobs on that type come from."""
        return Fits()

    def stats(self) -> Mapping[str, float]:
        return self._stats

    def _roster(self, gpu_type: str) -> Roster:
        """What is remembered about the jobs of that type."""
        if gpu_type not in self._rosters:
            options = BatchOptions(
                single_gpu_accumulation=self.single_gpu_accumulation, published_grid=self.published_grid
            )
            self._rosters[gpu_type] = Roster(gpu_type, options, self._fits(gpu_type))
        return self._rosters[gpu_type]
