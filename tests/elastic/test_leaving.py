"""Jobs that are stopped, or lose all but one, at the worst moments: what they have done is on the disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.elastic.conftest import Trials
from tests.elastic.trial import PATIENCE_S, Trial, on, until

from pollux.agent.checkpoint import Checkpoints
from pollux.agent.journal import read_journal
from pollux.core import JobFinished, JobStopped, StopReason
from pollux.wire.entries import CheckpointSaved, TrainingStopped

SCRIPT = Path(__file__).with_name("fault_points.py")
SAMPLES = 640


def begin(trial: Trials, faults: str, *arguments: object) -> Trial:
    return trial(*arguments, script=SCRIPT, environment={"FAULTS": faults}, saves=True).start(2, waits=False)


def await_pause(made: Trial, point: str) -> None:
    until((made.out / f"paused-{point}").exists, f"it comes to {point}: {made.logs()}")


def daemons_say(made: Trial, text: str) -> bool:
    return any(text in path.read_text() for path in made.cluster.folder.glob("n*/node.log"))


def go_on_to_the_end(made: Trial, replicas: int, passes: int) -> None:
    """From the checkpoint; each sample is used once in each pass, and counted once in the averages."""
    made.tell("hurry").start(replicas, waits=False)
    event = made.cluster.wait_end(made.job, made.generation, PATIENCE_S)
    assert isinstance(event, JobFinished), f"{event}\n{made.logs()}"
    results = made.results()
    assert len(results) == replicas
    for result in results.values():
        assert result["samples"] == passes * SAMPLES
        assert {round(count, 6) for count in result["uses"]} == {passes}


def test_a_job_that_is_stopped_while_it_writes_its_last_checkpoint_has_it(trial: Trials) -> None:
    made = begin(trial, "write:1-1:1:pause", "--passes", 2)
    await_pause(made, "write")
    pids = made.pids().values()
    generation = made.cluster.stop(made.job, StopReason.PREEMPTED)
    until(lambda: daemons_say(made, f"{made.job}/1-1 gets signal 15"), "it is asked to leave")
    until(lambda: daemons_say(made, f"{made.job}/1-2 gets signal 15"), "both are")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # once more: it must not end by it
    made.take_back("paused-write")
    assert isinstance(made.cluster.wait_end(made.job, generation, PATIENCE_S), JobStopped)
    for name in ("1-1", "1-2"):
        assert daemons_say(made, f"{made.job}/{name} ended with 143"), made.logs()
    loaded = Checkpoints(made.checkpoints).load_latest()
    assert loaded is not None
    assert loaded.facts["finished"]

    go_on_to_the_end(made, 1, passes=2)


def test_the_last_one_that_has_the_state_saves_it_although_it_was_not_the_first(trial: Trials) -> None:
    """All move to another node; the first one dies on the way, and so does the one that was to take over."""
    made = begin(trial, "switch:1-2:1:pause switch:1-1:1", "--passes", 3, "--step-s", 0.1)
    made.expect_ready(made.wait())
    made.wait_step(5).resize(on(n1=1), waits=False)
    await_pause(made, "switch")
    until(lambda: daemons_say(made, f"{made.job}/1-1 ended with -9"), "the first one is gone")
    os.kill(made.pids()["2-3"], signal.SIGKILL)
    until(lambda: daemons_say(made, f"{made.job}/1-2 gets signal 15"), f"the second one is asked: {made.logs()}")
    made.take_back("paused-switch")
    event = made.cluster.wait_end(made.job, timeout_s=PATIENCE_S)
    assert isinstance(event, JobStopped), f"{event}\n{made.logs()}"
    assert daemons_say(made, f"{made.job}/1-2 ended with 143")
    *_, saved, stopped = read_journal(made.checkpoints / "journal.jsonl")
    assert isinstance(saved, CheckpointSaved)
    assert isinstance(stopped, TrainingStopped)

    go_on_to_the_end(made, 2, passes=3)


def test_when_the_one_that_writes_the_last_checkpoint_is_killed_the_next_one_writes_it(trial: Trials) -> None:
    made = begin(trial, "write:1-1:1", "--passes", 2)
    assert list(made.finish()) == ["1-2"]
    loaded = Checkpoints(made.checkpoints).load_latest()
    assert loaded is not None
    assert loaded.facts["finished"]
