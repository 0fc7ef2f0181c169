"""The demo on emulated GPUs: jobs of the built-in applications, live under one policy after the other, and what the
simulator predicted of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.cli.demo.story import REFERENCE
from pollux.cli.fidelity.result import FidelityResult
from pollux.cli.fidelity.running import run_fidelity
from pollux.cli.trial.running import Show, Tell

WORKLOAD, QUICK_WORKLOAD = "six", "four"
COMPRESS = 30.0
NODES, SLOTS = 2, 4
KILL_SERVICE_AT_S = {WORKLOAD: 1030.0, QUICK_WORKLOAD: 350.0}
"""Emulated: under Pollux all jobs have come by then, and the simulator lets none end before. Of `six`, the last job has
just come and has no GPUs yet: it gets them from the service that comes back."""


@dataclass(frozen=True, slots=True)
class EmulatedDemo:
    """What the demo found, run by run."""

    runs: tuple[FidelityResult, ...]

    @property
    def faults(self) -> list[str]:
        """Empty: nobody lost replicas or started from scratch, and nothing was left running. A job that fails ends
        the demo at once."""
        return [f"{run.setting.policy}: {fault}" for run in self.runs for fault in run.faults]

    def run(self, policy: str) -> FidelityResult | None:
        return next((run for run in self.runs if run.setting.policy == policy), None)

    @property
    def reference(self) -> FidelityResult | None:
        """The run that the first one is held against; None if it is the only one."""
        found = self.run(REFERENCE)
        return None if found is self.runs[0] else found

    @property
    def jct_ratio(self) -> float | None:
        """Average live JCT of the first policy over that of fifo: below 1 is better."""
        reference = self.reference
        return None if reference is None else self.runs[0].avg_jct_live_s / reference.avg_jct_live_s

    @property
    def predicted_ratio(self) -> float | None:
        """The same as the simulator had it."""
        reference = self.reference
        return None if reference is None else self.runs[0].avg_jct_simulated_s / reference.avg_jct_simulated_s

    @property
    def reallocations(self) -> int:
        """Of the first run, live."""
        return self.runs[0].reallocations_live

    def document(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "is_emulated": True,
            "jct_ratio_vs_fifo": self.jct_ratio,
            "predicted_ratio_vs_fifo": self.predicted_ratio,
            "reallocations": self.reallocations,
            "faults": self.faults,
            "runs": [run.document() for run in self.runs],
        }


def run_emulated_demo(
    policies: Sequence[str] = ("pollux", REFERENCE),
    *,
    is_quick: bool = False,
    kills_service: bool = False,
    compress: float = COMPRESS,
    keep: Path | None = None,
    tell: Tell = lambda text: None,
    show: Show = lambda look: None,
) -> EmulatedDemo:
    """The same jobs under one policy after the other, each on a fresh emulated cluster. Ends all it has started.

    `kills_service`: in the first run. `Permanent`: a job failed.
    """
    workload = QUICK_WORKLOAD if is_quick else WORKLOAD
    runs: list[FidelityResult] = []
    for policy in policies:
        found = run_fidelity(
            workload,
            compress=compress,
            policy=policy,
            nodes=NODES,
            slots=SLOTS,
            kill_service_at_s=KILL_SERVICE_AT_S[workload] if kills_service and not runs else None,
            keep=keep,
            tell=tell,
            show=show,
        )
        runs.append(found)
    return EmulatedDemo(tuple(runs))
