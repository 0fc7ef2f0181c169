"""What was published about the evaluation of the OSDI'21 paper: figures of the paper, and its artifact's results.

Constants are seconds unless their name says otherwise. "Eight samples" are the eight workloads of the artifact, of
which the data that this project is tested with holds four; their results, job by job, are read from
`published-results.json` of that data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pollux.core import FrozenMap
from pollux.errors import InvalidDocument
from pollux.simulator.documents import parsed
from pollux.simulator.workload import WorkloadJob

SAVED: Mapping[str, float] = FrozenMap({"optimus": 0.48, "tiresias": 0.32})
"""By how much Pollux shortens the average JCT of each in the simulator, as the paper says in words (section 5.3)."""

INTERVAL_JCT_S: Mapping[float, float] = FrozenMap(
    {30.0: 2729.0, 60.0: 2751.0, 120.0: 2806.0, 240.0: 2969.0, 480.0: 3354.0}
)
"""Average JCT by seconds from round to round: means over eight samples, from the artifact's result files."""

AVOIDING_JCT_S = 2751.0
"""With interference avoidance; the artifact takes it to be the same at any slowdown."""
NOT_AVOIDING_JCT_S: Mapping[float, float] = FrozenMap({0.0: 2758.0, 0.25: 3177.0, 0.5: 3903.0})
"""Without, by the share of speed that is lost: means over eight samples, from the artifact's result files."""

FAIR_BELOW_2 = 0.99
"""Share of the jobs with ρ < 2 under Pollux with p = −1 (paper, Fig. 7)."""


@dataclass(frozen=True, slots=True)
class Testbed:
    """A run on 16 × 4 real GPUs, sample 6 (paper, Table 2; p from section 5.3.1)."""

    avg_jct_h: float
    p99_jct_h: float
    makespan_h: float

    def figures(self) -> dict[str, float]:
        """By names of our own, so that nobody takes them for figures of a simulation."""
        times = {"avg_jct": self.avg_jct_h, "p99_jct": self.p99_jct_h, "makespan": self.makespan_h}
        return {f"testbed_{name}_s": 3600 * hours for name, hours in times.items()}


TESTBED: Mapping[str, Testbed] = FrozenMap(
    {
        "pollux": Testbed(0.76, 11, 16),
        "optimus": Testbed(1.5, 15, 20),
        "tiresias": Testbed(1.2, 15, 24),
        "optimus, realistic": Testbed(2.7, 22, 28),
        "tiresias, realistic": Testbed(2.8, 25, 31),
        "pollux, p = 1": Testbed(0.83, 10, 16),
        "pollux, p = −1": Testbed(0.76, 11, 16),
        "pollux, p = −10": Testbed(0.84, 12, 18),
    }
)


@dataclass(frozen=True, slots=True)
class Results:
    """Completion times that the artifact's simulator published, job by job."""

    document: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
    """Policy → load → sample → `jcts_s` → job → seconds."""

    def figures(self, policy: str, load: float, sample: str, jobs: Sequence[WorkloadJob]) -> dict[str, float] | None:
        """Of a sample with these jobs; None where nothing was published."""
        found = self.document.get(policy, {}).get(f"{load:.1f}", {}).get(sample)
        if found is None:
            return None
        jcts: Mapping[str, float] = found["jcts_s"]
        ends = [job.submitted_at_s + jcts[job.name] for job in jobs if job.name in jcts]
        times = list(jcts.values())
        return {
            "avg_jct_s": float(np.mean(times)),
            "p50_jct_s": float(np.percentile(times, 50)),
            "p99_jct_s": float(np.percentile(times, 99)),
            "makespan_s": max(ends) - min(job.submitted_at_s for job in jobs),
        }


def read_results(path: Path) -> Results:
    found = parsed("published results", path, "JSON", json.loads)
    if not isinstance(found, dict):
        raise InvalidDocument("published results", str(path), "is no JSON object", "Take the file of the data")
    return Results(found)
