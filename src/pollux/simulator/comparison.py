"""Many runs side by side, each in its own process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

from pollux.simulator.metrics import Outcome
from pollux.simulator.scenario import Prepared, Scenario, load_truths, prepare, simulate
from pollux.simulator.truth import Truth

POLL_S = 0.2
_reports: Any = None
"""In a worker: the queue for the progress of its runs."""


def run_all(scenarios: Sequence[Scenario], processes: int, on_progress: Callable[[float], None]) -> list[Outcome]:
    """The outcomes, in the order of the scenarios. `on_progress` hears how much of one run each step was.

    All are checked before the first runs. The first run that fails ends the others, and its error is raised here.
    """
    for scenario in scenarios:
        prepare_once(scenario)
    if processes == 1 or len(scenarios) == 1:
        return [_run(scenario, on_progress) for scenario in scenarios]
    # Not forked: the caller may have threads, such as one that draws a bar.
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    pool = ProcessPoolExecutor(min(processes, len(scenarios)), context, _begin_worker, (queue,))
    try:
        futures = [pool.submit(_run_in_worker, scenario) for scenario in scenarios]
        _follow(futures, queue, on_progress)
        return [future.result() for future in futures]
    except BaseException:
        for worker in list((pool._processes or {}).values()):  # whoever is in the middle of a run would finish it
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        queue.close()


def prepare_once(scenario: Scenario) -> Prepared:
    """Load and check a scenario; traces that this process has read before are not read again."""
    return prepare(scenario, _truths(scenario.traces))


def _follow(futures: list[Future[Outcome]], queue: Any, on_progress: Callable[[float], None]) -> None:
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
        while not queue.empty():
            on_progress(queue.get())
        for future in done:
            future.result()


@lru_cache(maxsize=4)
def _truths(traces: Path | None) -> Mapping[str, Truth]:
    """Read once in each process."""
    return load_truths(traces)


def _begin_worker(queue: Any) -> None:
    global _reports
    _reports = queue


def _run_in_worker(scenario: Scenario) -> Outcome:
    return _run(scenario, _reports.put)


def _run(scenario: Scenario, on_progress: Callable[[float], None]) -> Outcome:
    """Report now and then, not after each job: a queue between processes takes its time."""
    pending, share, told_at = 0.0, 0.0, time.monotonic()

    def begin(num_jobs: int) -> None:
        nonlocal share
        share = 1.0 / num_jobs

    def advance() -> None:
        nonlocal pending, told_at
        pending += share
        if time.monotonic() - told_at > POLL_S:
            on_progress(pending)
            pending, told_at = 0.0, time.monotonic()

    outcome = simulate(scenario, on_start=begin, on_end=advance, truths=_truths(scenario.traces))
    on_progress(pending)
    return outcome
