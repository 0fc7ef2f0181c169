"""The agent: what it costs beside plain DDP, how right its noise scale is, and whether adaptive training is as good.

All of it trains for real: processes with gloo on this machine's cores, one thread each.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.measurement import Finding, LeftOut, Measurement, Table, spread
from benchmarks.training import examples, replicas
from benchmarks.training.examples import Outcome

ROUNDS = {"1m": 110, "10m": 40}
"""Of overhead, by the model's size: each gives every loop about 8 steps of the small and 3 of the large one."""
REPLICAS = (1, 2)
OVERHEAD_BOUND = 1.03
TRIMMED = 0.1
"""Share of the rounds that is left out at either end."""
ADAPTDL = "AdaptDL, measured apart on such a machine under load: 2.57 to 3.9 at 1 M, 3.0 at 10 M parameters"

NOISE_REPLICAS = (1, 2, 4)
NOISE_STEPS = 2000
"""Two windows of the noise average: every fourth step is measured, which makes about 430 effective samples."""

SEEDS = (0, 1, 2)


class Example(NamedTuple):
    script: str
    metric: str
    unit: str


EXAMPLES = {
    "classifier": Example("classifier", "accuracy, %", "points"),
    "lm": Example("language_model", "validation loss", "%"),
    "recommender": Example("recommender", "hit rate@10, %", "points"),
}
GAP_BOUND = 0.5

KEYS = (
    *(f"overhead_cpu_ratio.{size}.x{count}" for size in ROUNDS for count in REPLICAS),
    *(f"overhead_bare_ratio.{size}" for size in ROUNDS),
    *(f"noise_error.{optimizer}" for optimizer in ("sgd", "adam")),
    *(f"accuracy_gap.{name}" for name in EXAMPLES),
    "guard_fired",
)


def measure() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        for key in KEYS:
            yield LeftOut(f"agent.{key}", "needs PyTorch: pip install pollux[torch]")
        return
    yield from _overhead()
    yield from _noise()
    yield from _accuracy()


# What the prepared loop costs


class Ratio(NamedTuple):
    """Of CPU times, in rounds of loops that took turns."""

    mean: float
    """Trimmed."""
    error: float
    """Standard error of it."""
    of_sums: float
    """Of all rounds together, nothing left out."""
    spread: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.error:.4f}"


def _overhead() -> Iterator[Finding]:
    rows: list[list[str | float]] = []
    for size, rounds in ROUNDS.items():
        for count in REPLICAS:
            run = replicas.run("benchmarks.training.overhead", count, size, rounds)
            yield from overhead(f"{size}.x{count}", run, count)
            rows.append(_overhead_row(size, count, run))
    columns = ("model", "replicas", "plain DDP, ms", "prepared ÷ plain", "not trimmed", "A/A", "÷ bare", "k", "rounds")
    yield Table(
        "CPU time of the prepared loop over that of plain DDP, batch 128 a replica",
        columns,
        rows,
        "Loops take turns in the same processes, a few steps each, in random order; ± is the standard error. A/A is one"
        " plain DDP loop over another: how exact the figures are. Bare is a loop without DDP. k: every k-th step is "
        "measured at the end of the run. The agent measures noise, beats, fits every 5 s of its own training and "
        f"guards; its batch size is held. {ADAPTDL}.",
    )


def overhead(case: str, run: Mapping[str, Any], count: int) -> Iterator[Measurement]:
    """The keys of one case, from what `benchmarks.training.overhead` printed."""
    cpu_s = run["cpu_s"]
    beside, control = _ratio(run, "prepared", "plain", "again"), _ratio(run, "again", "plain")
    alone = "; alone, the prepared loop uses no DDP at all" if count == 1 else ""
    yield Measurement(
        f"agent.overhead_cpu_ratio.{case}",
        beside.mean,
        "",
        control.mean,
        "plain DDP over plain DDP (A/A)",
        OVERHEAD_BOUND,
        spread=beside.spread,
        note=f"{run['parameters'] / 1e6:.3g} M parameters, {count} × batch 128; standard error {beside.error:.4f}, "
        f"of the control {control.error:.4f}{alone}; {ADAPTDL}",
    )
    if "bare" in cpu_s:
        bare = _ratio(run, "prepared", "bare")
        yield Measurement(
            f"agent.overhead_bare_ratio.{case.partition('.')[0]}",
            bare.mean,
            "",
            spread=bare.spread,
            note=f"one replica, over a loop without DDP, as the prepared one is; standard error {bare.error:.4f}",
        )


def _overhead_row(size: str, count: int, run: Mapping[str, Any]) -> list[str | float]:
    cpu_s, steps = run["cpu_s"], sum(run["steps"])
    beside = _ratio(run, "prepared", "plain", "again")
    return [
        f"{run['parameters'] / 1e6:.3g} M",
        count,
        f"{1e3 * (sum(cpu_s['plain']) + sum(cpu_s['again'])) / 2 / steps / count:.2f}",
        str(beside),
        f"{beside.of_sums:.4f}",
        str(_ratio(run, "again", "plain")),
        str(_ratio(run, "prepared", "bare")) if "bare" in cpu_s else "",
        run["every"],
        len(run["steps"]),
    ]


def _ratio(run: Mapping[str, Any], name: str, *bases: str) -> Ratio:
    """One loop over the mean of others, round by round.

    Rounds in which the agent measured are trimmed apart from those in which it did not, and weighed by their number:
    trimming all together would cut off what measuring costs.
    """
    base = [statistics.mean(times) for times in zip(*(run["cpu_s"][one] for one in bases), strict=True)]
    ratios = [ours / theirs for ours, theirs in zip(run["cpu_s"][name], base, strict=True)]
    mean = variance = 0.0
    for kind in (False, True):
        chosen = [ratio for ratio, measured in zip(ratios, run["is_measured"], strict=True) if measured is kind]
        if chosen:
            share = len(chosen) / len(ratios)
            middle, error = trimmed(chosen)
            mean += share * middle
            variance += (share * error) ** 2
    return Ratio(mean, math.sqrt(variance), sum(run["cpu_s"][name]) / sum(base), spread(ratios))


def trimmed(samples: Sequence[float], share: float = TRIMMED) -> tuple[float, float]:
    """The mean without the lowest and highest `share` of the samples, and its standard error.

    The error is that of the winsorised samples, as usual for a trimmed mean; 0 for a single sample.
    """
    ordered = sorted(samples)
    cut = int(share * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    if len(ordered) < 2:
        return kept[0], 0.0
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorised) / ((1.0 - 2.0 * cut / len(ordered)) * math.sqrt(len(ordered)))
    return statistics.mean(kept), error


# How right the noise scale is


def _noise() -> Iterator[Finding]:
    cases = []
    for count in NOISE_REPLICAS:
        found = replicas.run("benchmarks.training.noise", count, NOISE_STEPS)
        cases += [{**case, "replicas": count} for case in found]
    yield from noise(cases)


def noise(cases: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """The keys and the table, from what `benchmarks.training.noise` printed."""
    for optimizer in ("sgd", "adam"):
        mine = [case for case in cases if case["optimizer"] == optimizer]
        worst = max(mine, key=lambda case: abs(_error(case)))
        yield Measurement(
            f"agent.noise_error.{optimizer}",
            abs(_error(worst)),
            "relative",
            bound=0.10,
            note=f"|φ measured by a whole job ÷ analytic φ − 1| on linear regression, the worst of {len(mine)} ways; "
            f"{worst['replicas']} × {worst['way']}, standard error {worst['standard_error']:.3f}",
        )
    yield Table(
        "Gradient noise scale of linear regression, measured by whole jobs of equal total batch size",
        ("optimizer", "replicas", "measured by", "passes", "φ measured", "φ analytic", "error", "standard error"),
        [
            (
                case["optimizer"],
                case["replicas"],
                case["way"],
                case["passes"],
                case["measured"],
                case["truth"],
                f"{_error(case):+.1%}",
                f"{case['standard_error']:.1%}",
            )
            for case in cases
        ],
        f"{NOISE_STEPS} steps at fixed weights, every fourth measured. Ways that compare the same gradients, such as "
        "one split batch and two replicas, find the same.",
    )


def _error(case: Mapping[str, Any]) -> float:
    return float(case["measured"] / case["truth"] - 1.0)


# Whether adaptive training is as good


def _accuracy() -> Iterator[Finding]:
    rows: list[Sequence[str | float]] = []
    fired = 0
    for name, example in EXAMPLES.items():
        runs = examples.pairs(example.script, SEEDS)
        yield accuracy_gap(name, runs)
        rows += _accuracy_rows(name, runs)
        fired += sum(adaptive.guard_fired for _, adaptive in runs)
    total = len(EXAMPLES) * len(SEEDS)
    yield Measurement("agent.guard_fired", fired, "times", bound=0.0, note=f"in {total} healthy runs of the examples")
    yield Table(
        "The examples, plain and adaptive",
        (
            *("example", "seed", "metric", "plain", "adaptive", "CPU s, plain", "adaptive", "speed-up"),
            *("steps, plain", "adaptive", "batch: last", "mean", "changes", "guard"),
        ),
        rows,
        "A script and its twin run side by side, one thread each. Batch sizes are chosen from measured times, so that "
        "adaptive runs of one seed differ a little. Speed-up is in CPU time of training and evaluation.",
    )


def accuracy_gap(name: str, runs: Sequence[tuple[Outcome, Outcome]]) -> Measurement:
    """How much worse the adaptive runs are on average; below 0: better."""
    gaps = [_gap(name, plain.metric, adaptive.metric) for plain, adaptive in runs]
    plain, adaptive = (statistics.mean(run.metric for run in column) for column in zip(*runs, strict=True))
    speed_up = statistics.mean(plain.cpu_s for plain, _ in runs) / statistics.mean(other.cpu_s for _, other in runs)
    example = EXAMPLES[name]
    return Measurement(
        f"agent.accuracy_gap.{name}",
        statistics.mean(gaps),
        example.unit,
        bound=GAP_BOUND,
        note=f"how much worse than plain, mean of {len(runs)} seeds ({', '.join(f'{gap:+.2f}' for gap in gaps)}); "
        f"{example.metric}: plain {plain:.4g}, adaptive {adaptive:.4g}, in {1 / speed_up:.2f} × the CPU time",
    )


def _gap(name: str, plain: float, adaptive: float) -> float:
    """In points where more is better; a loss in per cent of itself."""
    return 100.0 * (adaptive / plain - 1.0) if name == "lm" else plain - adaptive


def _accuracy_rows(name: str, runs: Sequence[tuple[Outcome, Outcome]]) -> Iterator[Sequence[str | float]]:
    for seed, (plain, adaptive) in zip(SEEDS, runs, strict=False):
        yield (
            *(name, seed, EXAMPLES[name].metric, plain.metric, adaptive.metric),
            *(f"{plain.cpu_s:.1f}", f"{adaptive.cpu_s:.1f}", f"{plain.cpu_s / adaptive.cpu_s:.2f}"),
            *(plain.steps, adaptive.steps, adaptive.final_batch_size, f"{adaptive.mean_batch_size:.1f}"),
            *(adaptive.batch_changes, "fired" if adaptive.guard_fired else "silent"),
        )
