"""The solver and castor: plans in milliseconds with a proven gap, and completion times beside the published ones.

Plans are timed on made-up rounds (`pollux bench plan`) and judged on rounds recorded from simulations.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import inputs, jct, reference, snapshots
from benchmarks.measurement import Finding, LeftOut, Measurement, Table, median, spread
from benchmarks.processes import Cost, cost
from benchmarks.snapshots import Planned
from pollux.policies import registry
from pollux.policies.pollux.policy import Pollux
from pollux.simulator.plan_cost import PlanCost, plan_cost
from pollux.simulator.rounds import Rounds
from pollux.simulator.scenario import Scenario


class Size(NamedTuple):
    """A cluster to plan for, and how long a plan may take."""

    gpus: int
    jobs: int
    mix: str
    rounds: int
    bound_ms: float

    @property
    def name(self) -> str:
        return f"{self.gpus}x{self.jobs}"

    @property
    def other_mix(self) -> str:
        return "elastic" if self.mix == "standard" else "standard"


SIZES = (
    Size(64, 20, "standard", 200, 5.0),
    Size(64, 160, "standard", 200, 5.0),
    Size(1024, 400, "elastic", 100, 30.0),
    Size(1024, 1000, "standard", 100, 30.0),
    Size(16384, 10000, "standard", 40, 60.0),
)
GPUS_PER_NODE = 4
OTHER_SHARE = 4
"""Of the rounds, one in so many for the figures that have no bound."""
GENETIC = {"solver": "genetic", "population": 100, "generations": 100}
GENETIC_ROUNDS = 10
MOST_GPUS_GENETIC = 256
RECORDED = 32
"""Rounds of each of four samples at four loads: 512."""
SOLVER: Mapping[str, object] = {"churn_factor": 1.0}
"""Options of `pollux` when it is judged by fitness, which knows no charge but the paper's."""
REFERENCE_LEAST = {"20x16 cold": 0.1484, "20x16 warm": 0.1530, "160x16": 0.00166, "160x64": 0.186}
REPETITIONS = 5
SCALE = ("pollux", "castor")

PLAN_KEYS = tuple(f"solver.plan_p99_ms.{size.name}" for size in SIZES)
STATE_KEYS = ("solver.gap_median", "solver.gap_p99", "solver.vs_genetic_min", "solver.reference_min_ratio")
RUN_KEYS = ("solver.simulate_cpu_s", "castor.simulate_cpu_s")
SCALE_KEYS = tuple(f"{key}.scale_10k_jobs_{unit}" for key in ("solver", "castor") for unit in ("cpu_s", "mib"))
KEYS = (*PLAN_KEYS, *STATE_KEYS, *RUN_KEYS, *jct.KEYS, *SCALE_KEYS)


def measure() -> Iterator[Finding]:
    yield from _plans(SIZES)
    traces = inputs.traces()
    if traces is None:
        for key in (*STATE_KEYS, *RUN_KEYS, *jct.KEYS):
            yield LeftOut(key, "needs the measured data of POLLUX_DATA")
    else:
        yield from _reference(traces.parent.parent)
        yield from _runs(traces)
        yield from _recorded(traces)
        yield from jct.measure(traces)
    yield from _scale(10_000, 31.25, 256)


def _plans(sizes: Sequence[Size]) -> Iterator[Finding]:
    """CPU times: one after the other, nothing beside them.

    Other tenants of the machine only ever add to a CPU time, here up to half of it for minutes: the same rounds are
    planned several times, and each counts as fast as it ever was.
    """
    rows: list[list[str | float]] = []
    for size in sizes:
        found = _cost("pollux", {}, size, size.mix, size.rounds, REPETITIONS)
        rows.append(_cost_row("pollux", size, size.mix, found))
        baseline = None
        if size.gpus <= MOST_GPUS_GENETIC:
            genetic = _cost("pollux", GENETIC, size, size.mix, min(GENETIC_ROUNDS, size.rounds), REPETITIONS)
            rows.append(_cost_row("pollux, `genetic`", size, size.mix, genetic))
            baseline = _p99(genetic.cpu_ms)
        note = f"{size.mix} mix, {size.rounds} warm rounds, the fastest of {REPETITIONS} runs of each, tables included"
        note += f"; median {median(found.cpu_ms):.3g} ms"
        yield Measurement(
            f"solver.plan_p99_ms.{size.name}",
            _p99(found.cpu_ms),
            "ms",
            baseline,
            "" if baseline is None else "genetic, p99 of its own rounds",
            size.bound_ms,
            spread=spread(found.cpu_ms),
            note=note,
        )
        others = [("pollux", size.other_mix), *(("castor", mix) for mix in (size.mix, size.other_mix))]
        for policy, mix in others:
            if policy in registry.names():
                found = _cost(policy, {}, size, mix, max(size.rounds // OTHER_SHARE, 1))
                rows.append(_cost_row(policy, size, mix, found))
    columns = ("policy", "GPUs", "jobs", "mix", "median, ms", "p99, ms", "max, ms", "gap", "started", "moved")
    note = f"Nodes of {GPUS_PER_NODE} GPUs. The gap is the median of the proven ones; jobs are those of a mean round."
    yield Table("CPU time of a plan", columns, rows, note)


def _cost(
    policy: str, options: Mapping[str, object], size: Size, mix: str, count: int, repetitions: int = 1
) -> PlanCost:
    found = []
    for _ in range(repetitions):
        rounds = Rounds(size.gpus, size.jobs, GPUS_PER_NODE, mix)
        found.append(plan_cost(registry.make(policy, options), rounds, count)[0])
    return replace(found[0], cpu_ms=tuple(map(min, zip(*(each.cpu_ms for each in found), strict=True))))


def _cost_row(policy: str, size: Size, mix: str, found: PlanCost) -> list[str | float]:
    figures = found.figures()
    times, gap = figures["cpu_ms"], figures["gap"]
    return [
        policy,
        f"{size.gpus:,}",
        f"{size.jobs:,}",
        mix,
        *(times[name] for name in ("median", "p99", "max")),
        "–" if gap is None else f"{gap['median']:.3%}",
        *(f"{figures[name]:.1f}" for name in ("started", "moved")),
    ]


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def _reference(data: Path) -> Iterator[Finding]:
    """The states of which the published search's own answers are known."""
    rows: list[list[str | float]] = []
    ratios = []
    for case in chain.from_iterable(reference.cases(data, name) for name in reference.NAMES):
        found = float(reference.outcome(case, reference.by_priced, [0]).fitness[0])
        least = next(value for name, value in REFERENCE_LEAST.items() if case.name.startswith(name))
        ratios.append(found / least)
        rows.append([case.name, f"{case.fitness:.6g}", f"{found:.6g}", f"{least:g}", f"{found / case.fitness:.4f}"])
    note = f"fitness over what it must be at least, the lowest of {len(ratios)} states"
    yield Measurement("solver.reference_min_ratio", min(ratios), "", bound=1.0, better="higher", note=note)
    columns = ("state", "recorded", "solver", "at least", "solver / recorded")
    yield Table("Fitness on the states that the artifact's search was recorded on", columns, rows)


def _runs(traces: Path) -> Iterator[Finding]:
    """In turn, so that all have their share of the machine's good minutes."""
    files, known = inputs.workloads(traces), [policy for policy in SCALE if policy in registry.names()]
    costs: dict[tuple[str, Path], list[float]] = {}
    for _ in range(REPETITIONS):
        for policy in known:
            for file in files:
                used = cost(("simulate", file, "--policy", policy, "--traces", traces))
                costs.setdefault((policy, file), []).append(used.cpu_s)
    for key, policy in zip(RUN_KEYS, SCALE, strict=True):
        if policy not in known:
            yield LeftOut(key, f"the policy {policy} is not there")
            continue
        lowest = [min(costs[policy, file]) for file in files]
        dearest = [max(run) for run in zip(*(costs[policy, file] for file in files), strict=True)]
        note = f"160 jobs, whole command, the fastest of {REPETITIONS} runs of the dearest of {len(files)} workloads"
        note += f"; their mean {np.mean(lowest):.3g} s"
        yield Measurement(key, max(lowest), "s", bound=3.0, spread=spread(dearest), note=note)


def _recorded(traces: Path) -> Iterator[Finding]:
    """Gaps and fitness are no CPU times: all cores at once."""
    cases = [(load, file) for load in jct.LOADS for file in jct.samples(traces, load)]
    scenarios = [Scenario(str(file), "pollux", traces=traces) for _, file in cases]
    plan_again = partial(snapshots.compared, count=RECORDED, solvers=(SOLVER, GENETIC))
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(plan_again, scenarios))
    by_load: dict[str, list[tuple[Planned, ...]]] = {}
    for (load, _), pairs in zip(cases, found, strict=True):
        by_load.setdefault(load, []).extend(pairs)
    yield from judged(by_load)


def judged(by_load: Mapping[str, Sequence[tuple[Planned, ...]]]) -> Iterator[Finding]:
    """Of rounds at each load, planned by the solver and by `genetic`: proven gaps, and fitness beside the other's."""
    rounds = [pair for pairs in by_load.values() for pair in pairs]
    gaps = [ours.gap for ours, _ in rounds if ours.gap is not None]
    what = f"{len(rounds)} rounds recorded from simulations at {len(by_load)} loads"
    for key, p, bound in (("solver.gap_median", 50, 0.001), ("solver.gap_p99", 99, 0.01)):
        if len(gaps) < len(rounds):
            yield LeftOut(key, f"the solver {Pollux().solver} proves no gap")
        else:
            note = f"{what}; the largest {max(gaps):.4%}, none in {sum(gap < 1e-9 for gap in gaps)}"
            yield Measurement(key, float(np.percentile(gaps, p)), "", bound=bound, note=note)
    ratios = [ours.fitness / theirs.fitness for ours, theirs in rounds]
    below = sum(ratio < 1.0 - 1e-9 for ratio in ratios)
    note = f"{what}; lowest {min(ratios):.7f}, median {median(ratios):.4f}, below 1 in {below}"
    yield Measurement("solver.vs_genetic_min", min(ratios), "", bound=1.0, better="higher", note=note)
    columns = (
        "load",
        "rounds",
        "jobs",
        "gap, median",
        "gap, max",
        "over genetic, lowest",
        "median",
        "changed",
        "by it",
    )
    rows = [[load, *_judged_row(pairs)] for load, pairs in by_load.items()]
    note = "Fitness over that of `genetic` (population 100, 100 generations) from the same state; jobs changed a round."
    yield Table("The solver on recorded rounds", columns, rows, note)


def _judged_row(pairs: Sequence[tuple[Planned, ...]]) -> list[str | float]:
    ours, theirs = zip(*pairs, strict=True)
    gaps = [one.gap for one in ours if one.gap is not None]
    ratios = [one.fitness / other.fitness for one, other in pairs]
    return [
        len(pairs),
        f"{min(one.num_jobs for one in ours)} … {max(one.num_jobs for one in ours)}",
        f"{median(gaps):.4%}" if gaps else "–",
        f"{max(gaps):.4%}" if gaps else "–",
        f"{min(ratios):.4f}",
        f"{median(ratios):.4f}",
        *(f"{np.mean([one.changed for one in side]):.2f}" for side in (ours, theirs)),
    ]


def _scale(num_jobs: int, hours: float, num_nodes: int) -> Iterator[Finding]:
    """As many jobs an hour for each GPU as in the paper's workloads; both policies at once, a core each."""
    policies = [policy for policy in SCALE if policy in registry.names()]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(policies)) as pool:
        file = Path(folder) / "scale.csv"
        cost(("workload", "generate", file, "--jobs", str(num_jobs), "--hours", str(hours)))
        cluster = ("--nodes", str(num_nodes), "--gpus-per-node", "4")
        commands = [("simulate", file, "--policy", policy, *cluster) for policy in policies]
        found = dict(zip(policies, pool.map(cost, commands), strict=True))
    for policy, prefix in zip(SCALE, ("solver", "castor"), strict=True):
        yield from scaled(prefix, policy, found.get(policy), f"{num_jobs:,} generated jobs on {num_nodes} × 4 GPUs")


def scaled(prefix: str, policy: str, used: Cost | None, what: str) -> Iterator[Finding]:
    for unit, name in (("cpu_s", "s"), ("mib", "MiB")):
        key = f"{prefix}.scale_10k_jobs_{unit}"
        if used is None:
            yield LeftOut(key, f"the policy {policy} is not there")
        else:
            value = used.cpu_s if unit == "cpu_s" else used.peak_mib
            yield Measurement(key, value, name, note=f"{what} under {policy}, built-in applications")
