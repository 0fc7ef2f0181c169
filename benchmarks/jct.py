"""Completion times of policies beside those that were published for the same samples, at four loads.

One world for all: 16 × 4 GPUs, rounds of 60 s, 30 s for a re-allocation, the artifact's measured traces. What was
published is that of Pollux, of every job; ratios are of means over the samples of a load.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import inputs
from benchmarks.measurement import Finding, LeftOut, Measurement, Table
from pollux.policies import registry
from pollux.simulator.comparison import run_all
from pollux.simulator.compat import options_of
from pollux.simulator.metrics import means
from pollux.simulator.scenario import Scenario

LOADS = ("0.5", "1.0", "1.5", "2.0")

ALONE = {"policy.registry": False}
"""castor without what it knows from other jobs of a kind. With it, the registry is empty at the start of each run."""
NEUTRAL = {**ALONE, "policy.rank_exponent": 0.15}
"""Its dial where makespan counts as well."""
FAST = {"world.realloc_delay_s": 1.0}
"""What a re-allocation costs that our agent does in place."""
PINNED = {"agent.pinned": ["ncf"]}
"""As in the artifact, whose jobs of this application keep one GPU and their largest batch."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with settings, and where it is run."""

    policy: str
    settings: Mapping[str, object] = field(default_factory=dict)
    loads: tuple[str, ...] = ("1.0",)
    fairness: bool = False


DIAL = (0.0, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Settings of castor's dial beside the default."""


def _dialled(exponent: float) -> Variant:
    return Variant("castor", {"policy.rank_exponent": exponent})


VARIANTS: Mapping[str, Variant] = {
    "pollux": Variant("pollux", loads=LOADS),
    "pollux, ncf pinned": Variant("pollux", PINNED),
    "castor": Variant("castor", ALONE, ("0.5", "1.5", "2.0")),
    "castor, fairness": Variant("castor", ALONE, fairness=True),
    "castor, neutral": Variant("castor", NEUTRAL),
    "castor, registry": Variant("castor", {}, LOADS),
    "castor, ncf pinned": Variant("castor", {**ALONE, **PINNED}),
    "castor, 1 s": Variant("castor", {**ALONE, **FAST}),
    "castor, 1 s, registry": Variant("castor", FAST),
    "castor, lengths wrong": Variant("castor", {**ALONE, "agent.length_error": 3.0}),
    "castor, lengths unknown": Variant("castor", {**ALONE, "agent.declares_length": False}, ("0.5", "1.0")),
    "castor, registry, lengths unknown": Variant("castor", {"agent.declares_length": False}, ("0.5", "1.0")),
    "castor, rounds of 15 s": Variant("castor", {**ALONE, "interval_s": 15.0}),
    "castor, early rounds": Variant("castor", {**ALONE, "early_gap_s": 5.0}),
    **{f"castor, registry, dial at {each:g}": _dialled(each) for each in DIAL},
}


class Key(NamedTuple):
    """Where a key's figure comes from, and what it must not pass."""

    variant: str
    load: str
    figure: str
    bound: float | None = None


KEYS: Mapping[str, Key] = {
    "pollux.jct_ratio.1.0": Key("pollux", "1.0", "avg_jct_s", 1.01),
    "pollux.jct_ratio.1.5": Key("pollux", "1.5", "avg_jct_s", 1.0),
    "pollux.jct_ratio.2.0": Key("pollux", "2.0", "avg_jct_s", 1.0),
    "castor.jct_ratio.0.5": Key("castor", "0.5", "avg_jct_s", 0.92),
    "castor.jct_ratio.1.0": Key("castor, fairness", "1.0", "avg_jct_s", 0.86),
    "castor.jct_ratio.1.5": Key("castor", "1.5", "avg_jct_s"),
    "castor.jct_ratio.2.0": Key("castor", "2.0", "avg_jct_s", 0.77),
    "castor.jct_ratio_registry.1.0": Key("castor, registry", "1.0", "avg_jct_s", 0.82),
    "castor.makespan_ratio.1.0": Key("castor, fairness", "1.0", "makespan_s", 1.07),
    "castor.p99_ratio.1.0": Key("castor, fairness", "1.0", "p99_jct_s", 1.0),
    "castor.worst_rho.1.0": Key("castor, fairness", "1.0", "worst_rho", 2.0),
    "castor.reallocations.1.0": Key("castor, fairness", "1.0", "reallocations_per_job", 2.7),
    "castor.jct_ratio_neutral.1.0": Key("castor, neutral", "1.0", "avg_jct_s", 0.92),
    "castor.makespan_ratio_neutral.1.0": Key("castor, neutral", "1.0", "makespan_s", 1.03),
    "castor.jct_ratio_lengths_wrong": Key("castor, lengths wrong", "1.0", "avg_jct_s"),
    "castor.jct_ratio_lengths_unknown.0.5": Key("castor, lengths unknown", "0.5", "avg_jct_s", 1.0),
    "castor.jct_ratio_lengths_unknown.1.0": Key("castor, lengths unknown", "1.0", "avg_jct_s", 1.0),
    "castor.jct_ratio_delay1s": Key("castor, 1 s", "1.0", "avg_jct_s", 0.80),
    "castor.jct_ratio_delay1s_registry": Key("castor, 1 s, registry", "1.0", "avg_jct_s", 0.77),
}
PUBLISHED = ("avg_jct_s", "p99_jct_s", "makespan_s")
"""Figures whose keys are ratios; the others have nothing published to be compared with."""

Figures = Mapping[str, float | None]


def measure(traces: Path) -> Iterator[Finding]:
    """All keys; those of policies that do not exist are left out."""
    known = registry.names()
    variants = {name: variant for name, variant in VARIANTS.items() if variant.policy in known}
    yield from findings(simulated(traces, variants), {load: published(traces, load) for load in LOADS})


def samples(traces: Path, load: str) -> list[Path]:
    return inputs.workloads(traces, "workloads" if load == "1.0" else f"workloads-{load}")


def published(traces: Path, load: str) -> dict[str, float]:
    """Means over the samples of a load, from what was published of every job."""
    results = json.loads((traces.parent / "published-results.json").read_text(encoding="utf-8"))["pollux"][load]
    rows = []
    for file in samples(traces, load):
        jcts_s = results[file.stem]["jcts_s"]
        with file.open(newline="") as lines:
            submitted_at_s = {row["name"]: float(row["time"]) for row in csv.DictReader(lines)}
        ends = [submitted_at_s[name] + jct_s for name, jct_s in jcts_s.items()]
        times = list(jcts_s.values())
        rows.append((np.mean(times), np.percentile(times, 99), max(ends) - min(submitted_at_s.values())))
    return dict(zip(PUBLISHED, np.mean(rows, axis=0).tolist(), strict=True))


def simulated(traces: Path, variants: Mapping[str, Variant]) -> dict[tuple[str, str], Figures]:
    """(variant, load) → means over its samples; the worst ρ is the worst of all."""
    cases = [(name, load) for name, variant in variants.items() for load in variant.loads]
    groups = [[_scenario(variants[name], file, traces) for file in samples(traces, load)] for name, load in cases]
    outcomes = iter(run_all([scenario for group in groups for scenario in group], os.cpu_count() or 1, lambda _: None))
    return {
        case: next(iter(means([next(outcomes) for _ in group]).values()))
        for case, group in zip(cases, groups, strict=True)
    }


def _scenario(variant: Variant, file: Path, traces: Path) -> Scenario:
    options = options_of([variant.policy], variant.settings)[variant.policy]
    return Scenario(str(file), variant.policy, traces=traces, options=options, fairness=variant.fairness)


def findings(found: Mapping[tuple[str, str], Figures], theirs: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    """Keys, and a table of all that was run."""
    for key, wanted in KEYS.items():
        figures = found.get((wanted.variant, wanted.load))
        if figures is None:
            yield LeftOut(key, "the policy castor is not there")
        else:
            yield _measurement(key, wanted, figures, theirs[wanted.load])
    rows = [_row(name, load, figures, theirs[load]) for (name, load), figures in found.items()]
    columns = ("policy", "load", "avg JCT, s", "published", "ratio", "p99", "makespan", "worst ρ", "re-allocations")
    note = "p99 and makespan are ratios as well: to what was published for the same samples, by the same means."
    yield Table("Completion times beside the published Pollux's", columns, rows, note)


def _measurement(key: str, wanted: Key, figures: Figures, theirs: Mapping[str, float]) -> Measurement:
    value = figures[wanted.figure]
    assert value is not None
    if wanted.figure not in PUBLISHED:
        return Measurement(key, value, "", bound=wanted.bound, note=f"{wanted.variant}, load {wanted.load}")
    reference = theirs[wanted.figure]
    note = f"{wanted.variant}, load {wanted.load}: {value:,.0f} s, published {reference:,.0f} s"
    return Measurement(key, value / reference, "", bound=wanted.bound, note=note)


def _row(name: str, load: str, figures: Figures, theirs: Mapping[str, float]) -> Sequence[str | float]:
    ratios = {figure: (figures[figure] or 0.0) / theirs[figure] for figure in PUBLISHED}
    rho = figures["worst_rho"]
    return [
        name,
        load,
        round(figures["avg_jct_s"] or 0.0),
        round(theirs["avg_jct_s"]),
        *(f"{ratios[figure]:.3f}" for figure in PUBLISHED),
        "–" if rho is None else f"{rho:.2f}",
        f"{figures['reallocations_per_job']:.2f}",
    ]
