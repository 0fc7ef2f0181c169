"""The listed workloads, in a world that does as a live cluster does: short, worth it, and robust."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from pollux.simulator.generator import built_in_workload
from pollux.simulator.metrics import Outcome
from pollux.simulator.options import Options
from pollux.simulator.scenario import Scenario, default_cluster, simulate
from pollux.simulator.settings import applied
from pollux.simulator.truth import truths_built_in
from pollux.simulator.workload import Workload, WorkloadJob, base_name

NAMES = ("six", "twelve", "four")
DESIGN = applied(Options(), {"early_gap_s": 1.0, "scheduler.in_place": True})
LIVE = applied(DESIGN, {"agent.first_report_s": 10.0, "agent.hysteresis": 1.05, "world.warm_up_s": 10.0})
LAST_END_MIN = {"six": (50, 60), "twelve": (200, 240), "four": (20, 25)}
"""Under pollux and under fifo."""
MOST_RATIO = {"six": 0.65, "twelve": 0.7, "four": 0.75}
REALLOCATIONS = {"six": (13, 19), "twelve": (40, 48), "four": (8, 12)}
TRUTHS = truths_built_in()


def run(name: str, policy: str, options: Options = DESIGN, content: Workload | None = None) -> Outcome:
    return simulate(Scenario(name, policy, default_cluster(name), options=options, content=content), truths=TRUTHS)


known = lru_cache(maxsize=None)(run)


def shaken(name: str, seed: int) -> Workload:
    """Each job some seconds sooner or later, and a little longer or shorter."""
    rng = random.Random(seed)

    def moved(job: WorkloadJob) -> WorkloadJob:
        base = base_name(job.application)
        length = float(job.application.removeprefix(f"{base}:")) * rng.uniform(0.97, 1.03)
        at_s = max(0.0, job.submitted_at_s + rng.uniform(-20.0, 20.0))
        return replace(job, submitted_at_s=at_s, application=f"{base}:{length:.6g}")

    jobs = sorted(map(moved, built_in_workload(name).jobs), key=lambda job: job.submitted_at_s)
    return Workload(name, tuple(jobs))


def end_min(outcome: Outcome) -> float:
    return max(job.finished_at_s for job in outcome.jobs) / 60


def num_reallocations(outcome: Outcome) -> int:
    return sum(job.num_reallocations for job in outcome.jobs)


def mean_jct_s(outcome: Outcome) -> float:
    return float(outcome.figures()["avg_jct_s"])


@pytest.mark.parametrize("name", NAMES)
def test_they_are_over_soon_and_adapting_pays(name):
    adaptive, static = known(name, "pollux"), known(name, "fifo")
    assert end_min(adaptive) < LAST_END_MIN[name][0]
    assert end_min(static) < LAST_END_MIN[name][1]
    assert mean_jct_s(adaptive) < MOST_RATIO[name] * mean_jct_s(static)
    assert min(job.jct_s for job in adaptive.jobs) > 240
    assert max(job.jct_s for job in adaptive.jobs) > 3 * min(job.jct_s for job in adaptive.jobs)


@pytest.mark.parametrize("name", NAMES)
def test_how_exactly_the_cluster_behaves_matters_little(name):
    plain, live = known(name, "pollux"), known(name, "pollux", LIVE)
    assert mean_jct_s(live) == pytest.approx(mean_jct_s(plain), rel=0.05)
    assert num_reallocations(live) == pytest.approx(num_reallocations(plain), abs=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_so_does_when_jobs_come_and_how_long_they_are(name, seed):
    base, other = known(name, "pollux", LIVE), run(name, "pollux", LIVE, shaken(name, seed))
    assert mean_jct_s(other) == pytest.approx(mean_jct_s(base), rel=0.06)
    least, most = REALLOCATIONS[name]
    assert least <= num_reallocations(other) <= most


def test_the_document_tells_what_comes_of_them():
    text = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text("utf-8")
    for name in NAMES:
        runs = [known(name, policy) for policy in ("pollux", "fifo")]
        average = " | ".join(f"{mean_jct_s(outcome) / 60:.1f} min" for outcome in runs)
        ends = ", ".join(f"{end_min(outcome):.0f} min" for outcome in runs)
        moves = ", ".join(f"{num_reallocations(outcome)}" for outcome in runs)
        assert f"| `{name}` | {average} | {ends} | {moves} |" in text
