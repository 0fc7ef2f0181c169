"""Faults on a live cluster with real jobs: what they break, which should be nothing.

Campaigns of `pollux.testing.chaos` (docs/chaos.md), one after the other, each with a seed of its own.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.measurement import Finding, LeftOut, Measurement, Table
from pollux.testing.chaos import Kind, LocalBed, Result, chosen, run_campaign

SEEDS = (1, 2, 3)
FAULTS = 300
"""In all campaigns together, at least."""
MINUTES_EACH = 11.0
"""Then a campaign ends, however many faults it has had; jobs still come to their ends."""
HANG_BOUND_S = 60.0
COUNTS = {
    "jobs_lost": (Kind.LOST_JOB, "jobs", "submitted, and forgotten or never ended"),
    "wrong_outcomes": (Kind.WRONG_OUTCOME, "jobs", "that differ from what the processes really did, or came twice"),
    "samples_wrong": (Kind.WRONG_SAMPLES, "samples", "lost or trained on twice, by the weights"),
    "orphans": (Kind.ORPHAN, "", "processes, GPUs, sockets, locks and unfinished files that were left"),
    "failed_recoveries": (Kind.NO_RECOVERY, "times", "that pollux up or the cluster itself did not recover"),
    "wrong_states": (Kind.WRONG_STATE, "", "states that are not what the log leads to, orders that nobody may give"),
}
KEYS = ("faults.injected", *(f"faults.{name}" for name in COUNTS), "faults.longest_hang_s")


def measure() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        for key in KEYS:
            yield LeftOut(key, "needs PyTorch: pip install pollux[torch]")
        return
    results = []
    for number, seed in enumerate(SEEDS):
        missing = FAULTS - sum(result.num_injected for result in results)
        each = -(-missing // (len(SEEDS) - number))
        print(f"    seed {seed}: {each} faults", flush=True)
        results.append(run_campaign(LocalBed(), seed, chosen(None), minutes=MINUTES_EACH, most_faults=each, say=_say))
    yield from figures(results)


def _say(line: str) -> None:
    """Progress between figures."""
    print(f"    {line}", flush=True)


def figures(results: Sequence[Result]) -> Iterator[Finding]:
    num_jobs = sum(result.jobs.total() for result in results)
    minutes = sum(result.seconds for result in results) / 60
    yield Measurement(
        "faults.injected",
        sum(result.num_injected for result in results),
        "faults",
        bound=float(FAULTS),
        better="higher",
        note=f"in {len(results)} campaigns of {minutes:.0f} minutes in all, with {num_jobs} jobs on 2 nodes of 2 slots",
    )
    for name, (kind, unit, meaning) in COUNTS.items():
        found = [violation.sentence for result in results for violation in result.violations if violation.kind is kind]
        count = sum(result.count(kind) for result in results)
        yield Measurement(f"faults.{name}", count, unit, bound=0.0, note="; ".join([meaning, *found]))
    worst = max(results, key=lambda result: result.longest_hang_s)
    yield Measurement(
        "faults.longest_hang_s",
        worst.longest_hang_s,
        "s",
        bound=HANG_BOUND_S,
        note=f"without a sign of progress, although there should be one: {worst.longest_hang or 'nobody'}, seed "
        f"{worst.seed}; replicas are taken for hung after 5 s here",
    )
    yield table(results)


def table(results: Sequence[Result]) -> Table:
    """How often each fault fell, and why those did not that never did."""
    total: Counter[str] = sum((result.injected for result in results), Counter())
    never = {name: why for result in results for name, why in result.skipped.items() if name not in total}
    rows = [(name, float(total[name]), "") for name in sorted(total)]
    rows += [(name, 0.0, why) for name, why in sorted(never.items())]
    return Table("Faults that fell", ("fault", "times", "why not"), rows, "What each of them is: docs/chaos.md.")
