"""Replicas die at any point of their work, and the others train on: every sample is used once in each pass."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from benchmarks.elastic_soak import soak
from tests.elastic.conftest import Trials
from tests.elastic.trial import PATIENCE_S, Trial, on, until

from pollux.core import GenerationAbandoned, JobFailed, JobFinished, ReplicasReady

SCRIPT = Path(__file__).with_name("fault_points.py")
SAMPLES = 640
PASSES = 3
LONG = ("--passes", 1, "--batch", 4, "--step-s", 0.02)
"""For changes: between two passes newcomers that lose a member end, as nobody can join there."""


def begin(trial: Trials, replicas: int, faults: str, *arguments: object, saves: bool = False) -> Trial:
    made = trial("--passes", PASSES, *arguments, script=SCRIPT, environment={"FAULTS": faults}, saves=saves)
    return made.start(replicas, waits=False)


def check_end(made: Trial, survivors: int, passes: int = PASSES) -> None:
    """The job ends well with so many replicas, which have all done the same, and each sample once in each pass."""
    event = made.cluster.wait_end(made.job, made.generation, PATIENCE_S)
    results = made.results()
    assert isinstance(event, JobFinished), f"{event}\n{made.logs()}"
    assert len(results) == survivors, made.logs()
    for result in results.values():
        assert {round(count, 6) for count in result["uses"]} == {passes}
        at = (0, 0)
        for index, start, stop in result["steps"]:
            assert (index, start) == at
            at = (index, stop) if stop < SAMPLES else (index + 1, 0)
        assert at == (passes, 0)
    assert len({tuple(result["weights"]) for result in results.values()}) == 1


@pytest.mark.parametrize(
    "faults",
    [
        "careful:1-4:1 reduce:1-1:14 behind:1-2:30:1-3",
        "forward:1-1:5 stepped:1-4:20 beat:1-2:12",
        "reduced:1-2:7 evaluate:1-1:2 compute:1-4:3",
        "computed:1-1:1 between:1-3:2 finish:1-2:1",
    ],
)
def test_one_after_the_other_is_killed_and_the_last_one_finishes(trial, faults):
    check_end(begin(trial, 4, faults, "--norm"), 1)


def test_the_one_that_saves_is_killed_while_it_does(trial):
    made = begin(trial, 3, "write:1-1:1 written:1-2:1", "--checkpoint-every-s", 0.01, "--step-s", 0.005, saves=True)
    check_end(made, 1)


@pytest.mark.parametrize(
    ("faults", "survivors"),
    [
        ("gathered:2-3:1", 3),  # a newcomer
        ("taken:2-4:1 settled:1-2:1", 2),  # two at once
        ("give:1-1:1", 3),  # one that gives the state, and is the first
        ("grouped:1-1:2 join:1-2:3", 2),  # and another one in the repair
    ],
)
def test_members_are_killed_while_the_job_grows(trial, faults, survivors):
    made = begin(trial, 2, faults, *LONG)
    made.wait(1)
    made.resize(4, waits=False)
    assert isinstance(made.wait(), ReplicasReady)
    made.tell("hurry")
    check_end(made, survivors, passes=1)


def test_a_newcomer_is_killed_before_it_is_ready(trial):
    made = begin(trial, 2, "ready:2-3:1", *LONG)
    made.wait(1)
    made.resize(3, waits=False)
    assert isinstance(made.wait(), GenerationAbandoned)
    made.resize(3)
    made.tell("hurry")
    check_end(made, 3, passes=1)


@pytest.mark.parametrize(("faults", "survivors"), [("go:1-3:1", 2), ("switch:1-1:1", 1)])
def test_one_is_killed_while_the_job_shrinks(trial, faults, survivors):
    made = begin(trial, 3, faults, *LONG)
    made.wait(1)
    made.resize(2, waits=False)
    assert isinstance(made.wait(), ReplicasReady)
    made.tell("hurry")
    check_end(made, survivors, passes=1)


@pytest.mark.parametrize("faults", ["join:2-4:1", "gathered:2-3:1"])
def test_one_that_takes_over_on_another_node_is_killed(trial, faults):
    made = begin(trial, 2, faults, *LONG)
    made.wait(1)
    made.resize(on(n1=2), waits=False)
    assert isinstance(made.wait(), ReplicasReady)
    made.tell("hurry")
    check_end(made, 1, passes=1)


def test_all_are_killed_and_the_next_generation_goes_on_from_the_checkpoint(trial, cluster):
    made = begin(trial, 2, "", "--step-s", 0.01, "--checkpoint-every-s", 0.1, saves=True)
    made.wait(1)
    until(lambda: any(made.checkpoints.glob("*")), "a checkpoint")
    made.wait_step(30)
    for pid in made.pids().values():
        os.kill(pid, signal.SIGKILL)
    assert isinstance(cluster.wait_end(made.job, 1, PATIENCE_S), JobFailed)
    made.start(3, waits=False)
    assert made.generation == 2
    made.tell("hurry")
    check_end(made, 3)


def test_a_survivor_of_many_changes_has_no_more_files_open_than_before(trial):
    made = trial("--passes", 1000, "--step-s", 0.005).start(1)
    (pid,) = made.pids().values()
    counts: list[int] = []
    for _ in range(10):
        made.resize(2).resize(1)
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
    assert max(counts[2:]) <= max(counts[:2])


def test_a_short_soak_breaks_nothing():
    result = soak(resizes=5, kills=2, seed=1)
    assert result.violations == []
    assert (result.resizes, result.kills, result.kills_of_all) == (5, 2, 1)
