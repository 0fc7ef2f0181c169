"""Emulated clusters: what the simulator says of the live system, the demo beside FIFO, and 32 slots on one machine.

Service, daemons, replicas, process groups and resizes are real, and keep the pace of T4 GPUs from the profiles of the
built-in applications; times are emulated seconds but where something else is said.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from itertools import groupby

from benchmarks.measurement import Finding, LeftOut, Measurement, Table
from benchmarks.scale import JOBS, NODES, SLOTS, ScaleResult, Seen, run_scale
from pollux.cli.demo.emulated import EmulatedDemo, run_emulated_demo
from pollux.cli.fidelity.course import Course
from pollux.cli.fidelity.result import (
    MAX_JCT_ERROR,
    MAX_REALLOC_ERROR,
    MAX_SLIP,
    MIN_RANK_CORRELATION,
    FidelityResult,
)
from pollux.cli.fidelity.running import run_fidelity
from pollux.errors import PolluxError

WORKLOAD = "twelve"
COMPRESS = 20.0
LIVE_BOUND_S = 900.0
CPU_BOUND = 0.7
RATIO_BOUND = 0.8
PREDICTION_BOUND = 0.1
KEYS = (
    *(f"fidelity.{name}" for name in ("avg_jct_error", "rank_correlation", "realloc_error", "pacing_slip")),
    *(f"fidelity.{name}" for name in ("cpu_share", "live_s")),
    *(f"demo.{name}" for name in ("jct_ratio_vs_fifo", "predicted_jct_ratio", "prediction_error", "reallocations")),
    "demo.pacing_slip",
    *(f"scale.{name}" for name in ("live_slots", "live_jobs", "live_replicas", "reallocations", "pacing_slip")),
    *(f"scale.{name}" for name in ("cpu_share", "live_s")),
)


def measure() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        for key in KEYS:
            yield LeftOut(key, "needs PyTorch: pip install pollux[torch]")
        return
    yield from faithful(run_fidelity(WORKLOAD, compress=COMPRESS, tell=_say, show=Seen(_say).look))
    yield from demo(run_emulated_demo(tell=_say, show=Seen(_say).look))
    yield from scaled(run_scale(tell=_say))


def _say(line: str) -> None:
    """Progress between figures."""
    print(f"    {line}", flush=True)


def _sound(what: str, faults: Iterable[str]) -> None:
    """What went wrong gives no figures."""
    if found := list(faults):
        raise PolluxError(f"{what} went wrong: {'; '.join(found)}")


# Live and simulated


def faithful(result: FidelityResult) -> Iterator[Finding]:
    _sound("the comparison", result.faults)
    setting = result.setting
    yield Measurement(
        "fidelity.avg_jct_error",
        result.avg_jct_error,
        "",
        bound=MAX_JCT_ERROR,
        note=f"average JCT {result.avg_jct_live_s:.0f} s live, {result.avg_jct_simulated_s:.0f} s simulated: workload "
        f"{setting.workload}, {result.num_jobs} jobs under {setting.policy}, {_cluster(result)}",
    )
    yield Measurement(
        "fidelity.rank_correlation",
        result.rank_correlation,
        "",
        bound=MIN_RANK_CORRELATION,
        better="higher",
        note="Spearman's, of the JCTs of these jobs, live and simulated",
    )
    yield Measurement(
        "fidelity.realloc_error",
        result.realloc_error,
        "",
        bound=MAX_REALLOC_ERROR,
        note=f"{result.reallocations_live} re-allocations live, {result.reallocations_simulated} simulated",
    )
    yield Measurement(
        "fidelity.pacing_slip",
        result.pacing_slip,
        "",
        bound=MAX_SLIP,
        note=f"of the job whose steps were latest; {result.mean_pacing_slip:.2%} on average",
    )
    if result.cpu_share is not None:
        yield _cpu_share("fidelity.cpu_share", result.cpu_share)
    yield Measurement(
        "fidelity.live_s", result.seconds, "s", bound=LIVE_BOUND_S, note="real seconds of the live run, start aside"
    )
    yield Table(
        "Live and simulated, job by job",
        ("job", "application", "JCT live, s", "simulated, s", "difference", "GPUs live", "simulated"),
        [
            (
                job.name,
                job.application,
                f"{job.live.jct_s:.0f}",
                f"{job.simulated.jct_s:.0f}",
                f"{job.jct_difference:+.1%}",
                _gpus(job.live),
                _gpus(job.simulated),
            )
            for job in result.jobs
        ],
    )
    yield Table(
        "Where live and simulated lose time",
        ("what", "live, mean s", "simulated, mean s", "adds to the average JCT, s"),
        [
            (delay.name, *(_seconds(s) for s in (delay.live.mean_s, delay.simulated.mean_s, delay.explains_s)))
            for delay in result.delays
        ],
        "Emulated seconds. The last column adds up to the difference of the average JCTs; what has none acts through "
        "decisions. See docs/fidelity.md.",
    )


def _cluster(result: FidelityResult) -> str:
    setting = result.setting
    return f"{setting.nodes} × {setting.slots} emulated T4s, {setting.compress:g} × faster than real"


def _cpu_share(key: str, share: float) -> Measurement:
    return Measurement(key, share, "", bound=CPU_BOUND, note="of all cores, with whatever else ran on this machine")


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


def _gpus(course: Course) -> str:
    """Until it ends."""
    held = [gpus for gpus, _ in groupby(gpus for _, gpus in course.gpus)]
    return " → ".join(map(str, held[:-1] if held[-1:] == [0] else held))


# Demo


def demo(result: EmulatedDemo) -> Iterator[Finding]:
    _sound("the demo", result.faults)
    ours, theirs = result.runs[0], result.reference
    ratio, predicted = result.jct_ratio, result.predicted_ratio
    assert theirs is not None, "both policies were run"
    assert ratio is not None
    assert predicted is not None
    yield Measurement(
        "demo.jct_ratio_vs_fifo",
        ratio,
        "×",
        bound=RATIO_BOUND,
        note=f"average JCT {ours.avg_jct_live_s:.0f} s under {ours.setting.policy}, {theirs.avg_jct_live_s:.0f} s "
        f"under static FIFO, both live: {ours.num_jobs} jobs, {_cluster(ours)}; {ours.seconds:.0f} and "
        f"{theirs.seconds:.0f} real seconds",
    )
    yield Measurement(
        "demo.predicted_jct_ratio",
        predicted,
        "×",
        note=f"the same in the simulator: {ours.avg_jct_simulated_s:.0f} s and {theirs.avg_jct_simulated_s:.0f} s",
    )
    yield Measurement(
        "demo.prediction_error",
        abs(predicted / ratio - 1.0),
        "",
        bound=PREDICTION_BOUND,
        note="of the ratio: how far the simulated one is from the live one",
    )
    yield Measurement(
        "demo.reallocations", result.reallocations, "", better="higher", note=f"live, under {ours.setting.policy}"
    )
    yield Measurement(
        "demo.pacing_slip",
        max(run.pacing_slip for run in result.runs),
        "",
        bound=MAX_SLIP,
        note="of the job whose steps were latest, under either policy",
    )
    yield Table(
        "The demo, job by job",
        (
            "job",
            "application",
            "JCT under pollux, s",
            "simulated, s",
            "JCT under FIFO, s",
            "simulated, s",
            "GPUs",
            "FIFO",
        ),
        [
            (
                one.name,
                one.application,
                *(f"{course.jct_s:.0f}" for course in (one.live, one.simulated, other.live, other.simulated)),
                _gpus(one.live),
                _gpus(other.live),
            )
            for one, other in zip(ours.jobs, theirs.jobs, strict=True)
        ],
    )


# Scale


def scaled(result: ScaleResult) -> Iterator[Finding]:
    faults = "".join(f"; {fault}" for fault in result.faults)
    yield Measurement(
        "scale.live_slots",
        result.most_slots,
        "slots",
        bound=NODES * SLOTS,
        better="higher",
        note=f"in use at once, of {result.slots} emulated T4s on {result.nodes} nodes of one machine, each with its "
        f"own daemon; {result.compress:g} × faster than real",
    )
    yield Measurement(
        "scale.live_jobs",
        result.succeeded,
        "jobs",
        bound=JOBS,
        better="higher",
        note=f"of {result.jobs} submitted at once through REST succeeded with nothing lost; up to {result.most_jobs} "
        f"held slots{faults}",
    )
    yield Measurement(
        "scale.live_replicas",
        result.most_training,
        "slots",
        better="higher",
        note="held at once by jobs that trained, a replica in each; as the service told it",
    )
    yield Measurement(
        "scale.reallocations", result.reallocations, "", better="higher", note=f"in {result.rounds} rounds"
    )
    yield Measurement(
        "scale.pacing_slip", result.pacing_slip, "", bound=MAX_SLIP, note="of the job whose steps were latest"
    )
    if result.cpu_share is not None:
        yield Measurement(
            "scale.cpu_share",
            result.cpu_share,
            "",
            note="of all cores; no bound: passes keep below a third of the machine, and a burst of starts is on top",
        )
    yield Measurement(
        "scale.live_s", result.seconds, "s", note="real seconds from the first submission to the last end"
    )
