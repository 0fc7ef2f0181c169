"""The Pollux policy: completion times beside the baselines' and the published ones, and what rounds and runs cost.

Workloads and traces are those of the paper's artifact: 16 × 4 GPUs, rounds of 60 s, 30 s for a re-allocation.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import inputs, reference
from benchmarks.measurement import Finding, LeftOut, Measurement, Table, cpu_times, median, spread
from benchmarks.processes import cost
from pollux.policies.pollux.genetic import Genetic
from pollux.policies.pollux.solver import Budget
from pollux.simulator.comparison import run_all
from pollux.simulator.compat import options_of
from pollux.simulator.scenario import Scenario

REPETITIONS = 3
SEEDS = range(5)
KEYS = ("run_cpu_s", "genetic_ms.20x16", "genetic_ms.160x16", "jct_vs_tiresias", "jct_vs_optimus", "jct_vs_published")
GENETIC_BOUND_MS = {"20x16": 200.0, "160x16": 1000.0, "160x64": None}
JCT_BOUNDS = {
    "workloads": {"tiresias": 0.70, "optimus": 0.55},
    inputs.REALISTIC: {"tiresias": 0.38, "optimus": 0.38},
}
STUDIES = ("load", "interval", "interference", "p")


def measure() -> Iterator[Finding]:
    traces = inputs.traces()
    if traces is None:
        for key in KEYS:
            yield LeftOut(f"pollux.{key}", "needs the measured data of POLLUX_DATA")
        return
    yield _run_cost(traces)
    yield from _genetic(traces.parent.parent)
    yield from _beside_baselines(traces)
    yield from _beside_published(traces)
    yield from _studies(traces.parent.parent)


def _run_cost(traces: Path) -> Measurement:
    files = inputs.workloads(traces)
    commands = [("simulate", file, "--policy", "pollux", "--traces", traces) for file in files]
    costs = [[cost(command).cpu_s for command in commands] for _ in range(REPETITIONS)]
    means = [sum(row) / len(row) for row in costs]
    note = f"160 jobs, whole command, mean of the {len(files)} tuned workloads; published: about 2,300 s recorded"
    return Measurement("pollux.run_cpu_s", median(means), "s", bound=10.0, spread=spread(means), note=note)


def _genetic(data: Path) -> Iterator[Finding]:
    rows: list[list[str | float]] = []
    fitness, jobs = [], []
    for name, bound in GENETIC_BOUND_MS.items():
        cases = list(reference.cases(data, name))
        milliseconds = [1000 * seconds for case in cases for seconds in _search_times(case)]
        recorded = 1000 * median([case.cpu_s for case in cases])
        note = f"one search, population 100, 100 generations, cold and warm states; the artifact's: {recorded:,.0f} ms"
        key = f"pollux.genetic_ms.{name}"
        yield Measurement(key, median(milliseconds), "ms", bound=bound, spread=spread(milliseconds), note=note)
        for case in cases:
            found = reference.outcome(case, reference.by_genetic, SEEDS)
            default = reference.outcome(case, reference.by_priced, [0])
            fitness.append(float(np.median(found.fitness)) / case.fitness)
            jobs.append(float(np.median(found.jobs_with_gpus)) / case.jobs_with_gpus)
            rows.append(
                [
                    case.name,
                    f"{case.fitness:.5g}",
                    f"{np.median(found.fitness):.5g} ({found.fitness.min():.5g} … {found.fitness.max():.5g})",
                    f"{default.fitness[0]:.5g}",
                    f"{case.jobs_with_gpus} / {np.median(found.jobs_with_gpus):.0f} / {default.jobs_with_gpus[0]}",
                ]
            )
    for key, ratios, what in (("fitness", fitness, "fitness"), ("jobs", jobs, "jobs with GPUs")):
        note = f"{what}, median of {len(SEEDS)} seeds over the recorded; the lowest of {len(ratios)} states"
        yield Measurement(f"pollux.genetic_{key}_vs_recorded", min(ratios), "", bound=1.0, better="higher", note=note)
    columns = ("state", "recorded fitness", "`genetic`, median of 5 seeds", "`priced`", "jobs with GPUs of the three")
    yield Table("Plans for the states that the artifact's search was recorded on", columns, rows)


def _search_times(case: reference.Case) -> list[float]:
    def search(seed: int) -> None:
        Genetic().solve(case.problem, Budget(), np.random.default_rng(seed))

    Genetic(generations=2).solve(case.problem, Budget(), np.random.default_rng(0))  # loads machine code
    return cpu_times(search, SEEDS)


def _average_jcts(scenarios: Sequence[Scenario]) -> list[float]:
    outcomes = run_all(scenarios, os.cpu_count() or 1, lambda share: None)
    return [outcome.figures()["avg_jct_s"] for outcome in outcomes]


def _beside_baselines(traces: Path) -> Iterator[Finding]:
    for folder, bounds in JCT_BOUNDS.items():
        files = inputs.workloads(traces, folder)
        averages = {
            policy: float(np.mean(_average_jcts([Scenario(str(file), policy, traces=traces) for file in files])))
            for policy in ("pollux", *bounds)
        }
        for policy, bound in bounds.items():
            suffix = "_realistic" if folder == inputs.REALISTIC else ""
            yield Measurement(
                f"pollux.jct_vs_{policy}{suffix}",
                averages["pollux"] / averages[policy],
                "",
                bound=bound,
                note=f"mean average JCT over {folder}: {averages['pollux']:.0f} s against {averages[policy]:.0f} s",
            )


def _beside_published(traces: Path) -> Iterator[Finding]:
    """The genetic solver with the artifact's rules, against the artifact's own results for the same samples."""
    results = json.loads((traces.parent / "published-results.json").read_text(encoding="utf-8"))["pollux"]["1.0"]
    options = options_of(["pollux"], {}, "artifact")["pollux"]
    files = inputs.workloads(traces)
    ours = _average_jcts([Scenario(str(file), "pollux", traces=traces, options=options) for file in files])
    published = [results[file.stem]["avg_jct_s"] for file in files]
    ratio = float(np.mean(ours) / np.mean(published))
    note = (
        f"--compat artifact: mean average JCT {np.mean(ours):.0f} s, published {np.mean(published):.0f} s; 0.95 … 1.05"
    )
    yield Measurement("pollux.jct_vs_published", ratio, "", bound=1.05, note=note)
    yield Measurement("pollux.jct_off_published", abs(ratio - 1), "", bound=0.05, note="how far that is off")
    rows = [
        [file.stem, round(a), round(b), f"{a / b - 1:+.1%}"] for file, a, b in zip(files, ours, published, strict=True)
    ]
    columns = ("workload", "`--compat artifact`, s", "published, s", "difference")
    yield Table("Average JCT of the genetic solver with the artifact's rules", columns, rows, "The search is random.")


def _studies(data: Path) -> Iterator[Finding]:
    """What `pollux reproduce` finds, beside what was published."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "paper.json"
        only = ",".join(STUDIES)
        cost(("reproduce", "--data", data, "--only", only, "--report", Path(folder) / "page", "--json", file))
        parts = json.loads(file.read_text(encoding="utf-8"))["parts"]
    yield from _powers(parts["p"]["cases"])
    for name, part in parts.items():
        yield _study(f"`pollux reproduce --only {name}`", name, part["cases"])


def _powers(cases: Sequence[Mapping[str, Any]]) -> Iterator[Measurement]:
    """p = −1 has the shortest jobs of those published, and −10 costs re-allocations."""
    throughput, usual, slowest = (case["means"] for case in cases)
    jct = min(throughput["avg_jct_s"], slowest["avg_jct_s"]) / usual["avg_jct_s"]
    note = "mean average JCT of the better of p = 1 and p = −10 over that of p = −1"
    yield Measurement("pollux.jct_other_p", jct, "", bound=1.0, better="higher", note=note)
    churn = slowest["reallocations_per_job"] / usual["reallocations_per_job"]
    note = "re-allocations a job, p = −10 over p = −1"
    yield Measurement("pollux.reallocations_p_10", churn, "", bound=1.0, better="higher", note=note)


def _study(title: str, axis: str, cases: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[str | float]] = []
    for case in cases:
        means, published = case["means"], case["published"].get("avg_jct_s")
        rows.append(
            [
                case["label"],
                "" if case["value"] is None else f"{case['value']:g}",
                round(means["avg_jct_s"]),
                "–" if published is None else round(published),
                _signed(case["change"]),
                _signed(case["published_change"]),
                round(means["p99_jct_s"]),
                round(means["makespan_s"]),
                f"{means['reallocations_per_job']:.2f}",
            ]
        )
    columns = (
        "policy",
        axis,
        "avg JCT, s",
        "published, s",
        "change",
        "published",
        "p99, s",
        "makespan, s",
        "re-allocs",
    )
    return Table(title, columns, rows)


def _signed(share: float | None) -> str:
    return "–" if share is None else f"{share:+.1%}"
