"""The live service: how soon a job runs, how soon a killed service is back, and the demo under Pollux and FIFO.

Real processes on this machine's cores, started and asked as users do it. Times are wall-clock times.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.measurement import Finding, LeftOut, Measurement, Table, median, spread
from pollux.cli.demo.cluster import DemoCluster
from pollux.cli.demo.running import examples_folder, run_demo
from pollux.cli.demo.story import DemoResult
from pollux.core import Phase
from pollux.errors import PolluxError, Temporary

STARTS = 9
RECOVERIES = 5
START_BOUND_S = 1.0
WAIT_S = 120.0
KEYS = (
    "service.submit_to_running_s",
    "service.recovery_s",
    "demo.jct_ratio_vs_fifo",
    "demo.reallocations",
)


def measure() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        for key in KEYS:
            yield LeftOut(key, "needs PyTorch: pip install pollux[torch]")
        return
    with (
        tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as folder,
        DemoCluster(Path(folder), "pollux", nodes=2, slots=2, interval_s=60.0) as cluster,
    ):
        yield started(*_starts(cluster))
        yield recovered(_recoveries(cluster))
    yield from demo(run_demo(tell=_say))


def _say(line: str) -> None:
    """Progress between figures."""
    print(f"    {line}", flush=True)


# Submission


def _starts(cluster: DemoCluster) -> tuple[float, list[float]]:
    """Seconds from a submission until the job trains: of a script that nobody has seen yet, and of the same again."""
    seconds = []
    for number in range(1 + STARTS):
        job = _submit(cluster)
        seconds.append(_started_after_s(cluster, job))
        _say(f"start {number} of {STARTS}: {seconds[-1]:.2f} s")
        cluster.ask(lambda client, job=job: client.cancel(job))
        _await(cluster, job, Phase.CANCELLED)
    return seconds[0], seconds[1:]


def _submit(cluster: DemoCluster) -> str:
    document = {
        "name": "start",
        "command": ["python", "classifier_adaptive.py", "--epochs", "1000", "--samples", "2000"],
        "working_dir": str(examples_folder()),
    }
    return cluster.ask(lambda client: client.submit(document)).id


def _started_after_s(cluster: DemoCluster, job: str) -> float:
    """By the service's clock, from the event of one to that of the other."""
    _await(cluster, job, Phase.RUNNING)
    page = cluster.ask(lambda client: client.events(0, job=job, limit=1000))
    at_s = {event.kind: event.at_s for event in reversed(page.events)}
    return at_s["ReplicasReady"] - at_s["JobSubmitted"]


def _await(cluster: DemoCluster, job: str, phase: Phase) -> None:
    until_s = time.monotonic() + WAIT_S
    while cluster.ask(lambda client: client.job(job)).job.phase is not phase:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{job} is not {phase} after {WAIT_S:g} s")
        time.sleep(0.02)


def started(first_s: float, seconds: list[float]) -> Measurement:
    return Measurement(
        "service.submit_to_running_s",
        median(seconds),
        "s",
        bound=START_BOUND_S,
        spread=spread(seconds),
        note="from the submission of examples/classifier_adaptive.py --samples 2000 until its first step is done, on "
        f"an idle cluster; {len(seconds)} times, at most {max(seconds):.2f}; {first_s:.2f} for a script that is new",
    )


# Crashes


def _recoveries(cluster: DemoCluster) -> list[float]:
    jobs = [_submit(cluster), _submit(cluster)]
    for job in jobs:
        _await(cluster, job, Phase.RUNNING)
    seconds = []
    for number in range(RECOVERIES):
        cluster.kill_service()
        began_s = time.monotonic()
        cluster.start_again()
        while not _is_ready(cluster):
            time.sleep(0.02)
        seconds.append(time.monotonic() - began_s)
        _say(f"recovery {number + 1} of {RECOVERIES}: {seconds[-1]:.2f} s")
        for job in jobs:
            if (phase := cluster.ask(lambda client, job=job: client.job(job)).job.phase) is not Phase.RUNNING:
                raise RuntimeError(f"{job} is {phase} after the service was killed")
    return seconds


def _is_ready(cluster: DemoCluster) -> bool:
    try:
        return cluster.ask(lambda client: client.health()).status == "ok"
    except Temporary:
        return False


def recovered(seconds: list[float]) -> Measurement:
    return Measurement(
        "service.recovery_s",
        median(seconds),
        "s",
        spread=spread(seconds),
        note="after kill -9, with two jobs that train on meanwhile: from `pollux up` until the new service has "
        f"replayed its log, asked all daemons and takes requests; {len(seconds)} times, at most {max(seconds):.2f}",
    )


# Demo


def demo(result: DemoResult) -> Iterator[Finding]:
    if result.faults:
        raise PolluxError(f"the demo went wrong: {'; '.join(result.faults)}")
    ratio = result.jct_ratio_vs_fifo
    assert ratio is not None, "both policies were run"
    pollux, fifo = result.runs
    yield Measurement(
        "demo.jct_ratio_vs_fifo",
        ratio,
        "×",
        note=f"average JCT {pollux.avg_jct_s:.1f} s under pollux, {fifo.avg_jct_s:.1f} s under static FIFO; six jobs "
        f"on 4 CPU slots, which share {result.cores} cores: not what 4 devices would give",
    )
    yield Measurement(
        "demo.reallocations", result.reallocations, "", better="higher", note="in place, of six jobs under pollux"
    )
    yield Table(
        "The demo, job by job",
        ("job", "JCT under pollux, s", "JCT under FIFO, s", "re-allocations", "GPUs", "batch size"),
        [
            (
                ours.name,
                f"{ours.jct_s or 0:.1f}",
                f"{theirs.jct_s or 0:.1f}",
                ours.reallocations,
                _moves(moment.gpus for moment in ours.moments),
                _moves(moment.batch_size for moment in ours.moments),
            )
            for ours, theirs in zip(pollux.jobs, fifo.jobs, strict=True)
        ],
    )


def _moves(values: Iterable[int]) -> str:
    return " → ".join(str(value) for value, _ in groupby(values))
