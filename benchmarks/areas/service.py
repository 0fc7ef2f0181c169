"""The live service: how soon a job runs, and how soon a killed service is back.

Real processes on this machine's cores, started and asked as users do it. Times are wall-clock times.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import Finding, LeftOut, Measurement, median, spread
from pollux.cli.examples import examples_folder
from pollux.cli.trial.cluster import TrialCluster
from pollux.core import Phase
from pollux.errors import Temporary

STARTS = 9
RECOVERIES = 5
START_BOUND_S = 1.0
WAIT_S = 120.0
KEYS = ("service.submit_to_running_s", "service.recovery_s")


def measure() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        for key in KEYS:
            yield LeftOut(key, "needs PyTorch: pip install pollux[torch]")
        return
    with (
        tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as folder,
        TrialCluster(Path(folder), "pollux", nodes=2, slots=2, interval_s=60.0) as cluster,
    ):
        yield started(*_starts(cluster))
        yield recovered(_recoveries(cluster))


def _say(line: str) -> None:
    """Progress between figures."""
    print(f"    {line}", flush=True)


# Submission


def _starts(cluster: TrialCluster) -> tuple[float, list[float]]:
    """Seconds from a submission until the job trains: of a script that nobody has seen yet, and of the same again."""
    seconds = []
    for number in range(1 + STARTS):
        job = _submit(cluster)
        seconds.append(_started_after_s(cluster, job))
        _say(f"start {number} of {STARTS}: {seconds[-1]:.2f} s")
        cluster.ask(lambda client, job=job: client.cancel(job))
        _await(cluster, job, Phase.CANCELLED)
    return seconds[0], seconds[1:]


def _submit(cluster: TrialCluster) -> str:
    document = {
        "name": "start",
        "command": ["python", "classifier_adaptive.py", "--epochs", "1000", "--samples", "2000"],
        "working_dir": str(examples_folder()),
    }
    return cluster.ask(lambda client: client.submit(document)).id


def _started_after_s(cluster: TrialCluster, job: str) -> float:
    """By the service's clock, from the event of one to that of the other."""
    _await(cluster, job, Phase.RUNNING)
    page = cluster.ask(lambda client: client.events(0, job=job, limit=1000))
    at_s = {event.kind: event.at_s for event in reversed(page.events)}
    return at_s["ReplicasReady"] - at_s["JobSubmitted"]


def _await(cluster: TrialCluster, job: str, phase: Phase) -> None:
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


def _recoveries(cluster: TrialCluster) -> list[float]:
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


def _is_ready(cluster: TrialCluster) -> bool:
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
