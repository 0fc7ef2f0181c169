"""`--compat artifact` is the published simulator: the completion time of every job, to the second.

Tiresias and Optimus are deterministic, so all 6,400 published times must come out again: those of 3,200 jobs under
each of the two. For the realistic configurations only averages are known, from running the published code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pollux.simulator.compat import preset
from pollux.simulator.metrics import Outcome
from pollux.simulator.options import Options
from pollux.simulator.scenario import Scenario, simulate
from pollux.simulator.settings import applied
from pollux.simulator.truth import Truth, truths_of_traces

pytestmark = pytest.mark.data

POLICIES = ("tiresias", "optimus")
FOLDERS = {"0.5": "workloads-0.5", "1.0": "workloads", "1.5": "workloads-1.5", "2.0": "workloads-2.0"}
WORKLOADS = ("workload-1", "workload-3", "workload-5", "workload-7")
REALISTIC_AVG_JCT_S = {
    "tiresias": dict(zip(WORKLOADS, (6565.32, 7297.23, 7028.38, 9036.17), strict=True)),
    "optimus": dict(zip(WORKLOADS, (5635.32, 8100.34, 6423.32, 8687.48), strict=True)),
}


@pytest.fixture(scope="module")
def artifact(pollux_data: Path) -> Path:
    return pollux_data / "pollux-osdi21"


@pytest.fixture(scope="module")
def published(artifact: Path) -> dict:
    return json.loads((artifact / "published-results.json").read_text())


@pytest.fixture(scope="module")
def truths(artifact: Path) -> dict[str, Truth]:
    """Read once: they remember their answers, and nothing else changes in them."""
    return truths_of_traces(artifact / "traces")


def run(artifact: Path, truths: dict[str, Truth], policy: str, folder: str, workload: str) -> Outcome:
    path = artifact / folder / f"{workload}.csv"
    options = applied(Options(), preset("artifact"))
    return simulate(Scenario(str(path), policy, traces=artifact / "traces", options=options), truths=truths)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("load", FOLDERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_takes_as_long_as_published(artifact, published, truths, policy, load, workload):
    expected = published[policy][load][workload]["jcts_s"]
    found = {job.name: job.jct_s for job in run(artifact, truths, policy, FOLDERS[load], workload).jobs}
    differing = {
        name: f"{found.get(name)} s, published {expected.get(name)} s"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    }
    assert not differing, f"{len(differing)} of {len(expected)} jobs differ"


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_realistic_configurations_average_as_the_published_code_does(artifact, truths, policy, workload):
    outcome = run(artifact, truths, policy, "workloads-realistic", workload)
    assert outcome.figures()["avg_jct_s"] == pytest.approx(REALISTIC_AVG_JCT_S[policy][workload], abs=0.01)
