"""Replicas that come and go: how long training stands still, in place and by restart, and what a long run of it breaks.

Times are wall-clock times of real training on this machine's cores, one thread a replica, however many share a core.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.measurement import Finding, LeftOut, Measurement, Table, median, spread
from benchmarks.training.elastic import PHASES, Change, ElasticJob, Step, step_ms, steps_lost
from benchmarks.training.replicas import ROOT, environment
from pollux.node.launching import LocalCluster

CYCLE = (1, 2, 4, 3, 1)
TRANSITIONS = tuple(f"{before}to{after}" for before, after in pairwise(CYCLE))
ROUNDS = {"1m": 11, "10m": 7}
"""Of the cycle, by the model's size, after one that does not count."""
RESTARTS = 5
PAUSE_BOUND_MS = 500.0
READY_BOUND_MS = 1000.0
SOAK_RESIZES = 60
SOAK_KILLS = 20
SLOTS = 4
ADAPTDL = "AdaptDL took 22.1 s from signal to first step, measured apart on such a machine under load"

KEYS = (
    *(f"pause_ms.{transition}" for transition in TRANSITIONS),
    "worker_ready_ms",
    "restart_ms.1to2",
    *(f"pause_10m_ms.{transition}" for transition in TRANSITIONS),
    "steps_lost",
    *(f"soak_{name}" for name in ("resizes", "kills", "violations")),
)

Cycles = Mapping[str, Sequence[Change]]
"""{transition: each time it was made}."""


def measure() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        for key in KEYS:
            yield LeftOut(f"agent.{key}", "needs PyTorch: pip install pollux[torch]")
        return
    yield from _changes()
    yield from _soak()


def _say(line: str) -> None:
    """Progress between figures."""
    print(f"    {line}", flush=True)


# Pauses


def _changes() -> Iterator[Finding]:
    rows: list[Sequence[str | float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="pollux-bench-") as folder,
        LocalCluster(nodes=1, slots=SLOTS, environment=environment(PYTHONPATH=str(ROOT))) as cluster,
    ):
        with ElasticJob(cluster, "1m", Path(folder) / "1m") as small:
            changes = _cycles(small, "1m")
            restarts = _restarts(small)
        yield from pauses("pause_ms", changes, small.parameters(), median([one.total_ms for one in restarts]))
        yield worker_ready(changes)
        yield restart(restarts, small.parameters())
        rows += pause_rows(small.parameters(), changes, small.steps())
        with ElasticJob(cluster, "10m", Path(folder) / "10m") as large:
            changes = _cycles(large, "10m")
        yield from pauses("pause_10m_ms", changes, large.parameters())
        rows += pause_rows(large.parameters(), changes, large.steps())
        yield lost([small.steps(), large.steps()])
    yield pause_table(rows)


def _cycles(job: ElasticJob, size: str) -> dict[str, list[Change]]:
    changes: dict[str, list[Change]] = {transition: [] for transition in TRANSITIONS}
    for number in range(1 + ROUNDS[size]):
        made = {transition: job.resize(after) for transition, after in zip(TRANSITIONS, CYCLE[1:], strict=True)}
        pauses = ", ".join(f"{transition} {one.pause_ms:.0f} ms" for transition, one in made.items())
        _say(f"{size}, cycle {number} of {ROUNDS[size]}: {pauses}")
        if number:
            for transition, one in made.items():
                changes[transition].append(one)
    return changes


def _restarts(job: ElasticJob) -> list[Change]:
    restarts = []
    for number in range(RESTARTS):
        restarts.append(job.restart(2))
        _say(f"restart {number + 1} of {RESTARTS}: {restarts[-1].total_ms:.0f} ms")
        job.resize(1)
    return restarts


def pauses(name: str, changes: Cycles, parameters: int, restart_ms: float | None = None) -> Iterator[Measurement]:
    """A key for each transition; beside 1to2 the restart that it spares."""
    for transition, made in changes.items():
        samples = [one.pause_ms for one in made]
        beside = restart_ms if transition == "1to2" else None
        yield Measurement(
            f"agent.{name}.{transition}",
            median(samples),
            "ms",
            beside,
            "" if beside is None else "by checkpoint and restart",
            PAUSE_BOUND_MS if name == "pause_ms" else None,
            spread=spread(samples),
            note=f"{parameters / 1e6:.3g} M parameters with Adam; from "
            f"{'the last newcomer ready' if made[0].ready_s else 'the request'} to the first step that all have "
            f"finished; {len(samples)} times, at most {max(samples):.0f}",
        )


def worker_ready(changes: Cycles) -> Measurement:
    samples = [ready_ms for made in changes.values() for one in made for ready_ms in one.ready_ms]
    return Measurement(
        "agent.worker_ready_ms",
        median(samples),
        "ms",
        bound=READY_BOUND_MS,
        spread=spread(samples),
        note=f"from the request to a newcomer's readiness, while the others train; {len(samples)} newcomers in "
        f"changes 1to2 and 2to4, at most {max(samples):.0f}",
    )


def restart(restarts: Sequence[Change], parameters: int) -> Measurement:
    samples = [one.total_ms for one in restarts]
    return Measurement(
        "agent.restart_ms.1to2",
        median(samples),
        "ms",
        spread=spread(samples),
        note=f"{parameters / 1e6:.3g} M parameters, the script was edited; from the request (save, end, start from the "
        f"checkpoint) to the first step that all have finished; {len(samples)} times; {ADAPTDL}",
    )


def lost(jobs: Sequence[Sequence[Step]]) -> Measurement:
    steps = sum(len({step.samples for step in job}) for job in jobs)
    return Measurement(
        "agent.steps_lost",
        sum(steps_lost(job) for job in jobs),
        "steps",
        bound=0.0,
        note=f"taken anew by a later generation, or left out, of {steps} in all these changes and restarts",
    )


def pause_rows(parameters: int, changes: Cycles, steps: Sequence[Step]) -> Iterator[Sequence[str | float]]:
    """What the pauses consist of, a row for each transition."""
    for transition, made in changes.items():
        ready = [max(one.ready_ms) for one in made if one.ready_ms]
        usual_ms = step_ms(steps, {one.generation for one in made})
        phases = [one.phases_ms() for one in made]
        yield (
            *(f"{parameters / 1e6:.3g} M", transition, f"{median(ready):.0f}" if ready else ""),
            f"{median([one.pause_ms for one in made]):.0f}",
            *(f"{statistics.mean(one[phase] for one in phases):.0f}" for phase in PHASES),
            "" if usual_ms is None else f"{usual_ms:.0f}",
        )


def pause_table(rows: Sequence[Sequence[str | float]]) -> Table:
    return Table(
        "What a change of replicas consists of, in ms",
        ("model", "change", "newcomers ready", "pause", *PHASES, "a step thereafter"),
        rows,
        "Newcomers ready and pause are medians; the phases are means, and add up to the mean pause. Told: the daemon "
        "has told all. Switch: they have agreed on a step and finished it. Gather: all find each other. State: "
        "newcomers take weights, optimizer and position. Group: the process group. Wrap: loading, and DDP anew. Switch "
        f"and first step are training, too. Batch 128 over all replicas; up to {max(CYCLE)} share the cores.",
    )


# Soak


def _soak() -> Iterator[Finding]:
    from benchmarks.elastic_soak import soak

    result = soak(resizes=SOAK_RESIZES, kills=SOAK_KILLS, say=_say)
    yield from soaked(result.resizes, result.kills, result.violations)


def soaked(resizes: int, kills: int, violations: Sequence[str]) -> Iterator[Measurement]:
    """The keys of a run in which so much was done, and what was found broken in it and after it."""
    yield Measurement("agent.soak_resizes", resizes, "times", better="higher", note="at random, in one run")
    yield Measurement(
        "agent.soak_kills", kills, "times", better="higher", note="of replicas by kill -9, in the same run"
    )
    yield Measurement(
        "agent.soak_violations",
        len(violations),
        "",
        bound=0.0,
        note="; ".join(violations) or "every sample once in each pass, no process, port, descriptor or file left",
    )
