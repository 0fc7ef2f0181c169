"""The figures of the benchmark of the live service, from made-up runs: nothing is started or timed."""

from __future__ import annotations

import pytest
from benchmarks.areas import service
from benchmarks.measurement import Measurement, Table

from pollux.cli.demo.story import DemoResult, JobStory, Moment, PolicyRun
from pollux.cli.demo.workload import Target
from pollux.core import Phase
from pollux.errors import PolluxError


def job(name: str, jct_s: float, *gpus: int, value: float = 1.0) -> JobStory:
    moments = tuple(Moment(float(at), count, 16 * count, 1.0) for at, count in enumerate(gpus))
    target = Target("accuracy", at_least=0.5)
    facts = {"command": "python a.py", "requested_gpus": 1, "exit_reason": "", "gpu_s": 1.0}
    times = {"submitted_at_s": 0.0, "first_gpu_at_s": 0.0, "finished_at_s": jct_s}
    counts = {"reallocations": len(gpus) - 1, "in_place": len(gpus) - 1, "starts": 1, "resumes": 0, "failures": 0}
    return JobStory(
        name=name, target=target, phase=Phase.SUCCEEDED, moments=moments, value=value, **facts, **times, **counts
    )


def result(value: float = 1.0) -> DemoResult:
    ours = PolicyRun("pollux", 4, 60.0, (job("a", 30.0, 1, 2, 2, 1), job("b", 10.0, 1, value=value)))
    theirs = PolicyRun("fifo", 4, 90.0, (job("a", 50.0, 1), job("b", 30.0, 1)))
    return DemoResult((ours, theirs), 2, False)


def test_a_start_is_the_median_of_those_after_the_first():
    made = service.started(2.0, [0.4, 0.6, 0.5])
    assert (made.key, made.value, made.bound) == ("service.submit_to_running_s", 0.5, 1.0)
    assert "2.00 for a script that is new" in made.note


def test_a_recovery_is_the_median():
    assert service.recovered([3.0, 1.0, 2.0]).value == 2.0


def test_the_demo_is_compared_with_fifo_and_told_job_by_job():
    ratio, reallocations, table = service.demo(result())
    assert isinstance(ratio, Measurement)
    assert ratio.value == pytest.approx(0.5)
    assert "2 cores" in ratio.note
    assert isinstance(reallocations, Measurement)
    assert reallocations.value == 3
    assert isinstance(table, Table)
    assert table.rows[0] == ("a", "30.0", "50.0", 3, "1 → 2 → 1", "16 → 32 → 16")
    assert {ratio.key, reallocations.key} <= set(service.KEYS)


def test_a_demo_that_missed_a_target_gives_no_figure():
    with pytest.raises(PolluxError, match="went wrong"):
        list(service.demo(result(value=0.1)))
