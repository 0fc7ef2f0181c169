"""Planned changes of the replicas of a job that trains, with real processes.

Where a test resizes, it does so at whichever step the job has come to: what is asserted holds for all of them.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.elastic.conftest import Trials
from tests.elastic.trial import PATIENCE_S, TRAIN, Trial, on, until

from pollux.core import (
    Allocation,
    GenerationAbandoned,
    JobFinished,
    JobStopped,
    Observation,
    ObservationKey,
    Profile,
    ReplicaLost,
    ReplicasReady,
    Shape,
    dumps,
)
from pollux.errors import Permanent, StaleGeneration
from pollux.node.launching import LocalCluster
from pollux.wire.nodes import ResizeRun, RunPhase
from pollux.wire.replicas import ReplicaPhase

SAMPLES, BATCH = 640, 32
A_PASS = SAMPLES // BATCH


def by_step(trial: Trial) -> dict[int, list[dict[str, Any]]]:
    """What the members wrote after each step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for lines in trial.records().values():
        for line in lines:
            found.setdefault(line["step"], []).append(line)
    return dict(sorted(found.items()))


def assert_equal_on_all_members(trial: Trial, *, but: str = "") -> None:
    """After every step, from the first to the last, each member was there once and all had the same state."""
    steps = by_step(trial)
    assert list(steps) == list(range(1, len(steps) + 1))
    for step, lines in steps.items():
        places = sorted(line["place"] for line in lines)
        size, _, num_nodes = places[0]
        assert places == [[size, rank, num_nodes] for rank in range(size)], f"step {step}"
        for name in lines[0].keys() - {"place", but}:
            assert len({str(line[name]) for line in lines}) == 1, f"{name} at step {step}: {lines}"


def shapes(trial: Trial) -> list[tuple[int, int]]:
    """(Replicas, nodes), in the order of steps, each once in a row."""
    seen = [(lines[0]["place"][0], lines[0]["place"][2]) for lines in by_step(trial).values()]
    return [shape for shape, _ in itertools.groupby(seen)]


def assert_used_once_a_pass(result: dict[str, Any], passes: int, samples: int = SAMPLES) -> None:
    """In the lineage of the weights, and in averages over training and evaluation."""
    assert_tiles(result, passes, samples)
    assert result["samples"] == samples * passes
    assert set(result["evaluated"]) == {samples}


def assert_tiles(result: dict[str, Any], passes: int, samples: int = SAMPLES) -> None:
    """The steps take each pass from its start to its end, nothing is left out or taken twice."""
    at = (0, 0)
    for number, start, stop in result["steps"]:
        assert (number, start) == at
        at = (number, stop) if stop < samples else (number + 1, 0)
    assert at == (passes, 0)


def assert_applied(result: dict[str, Any], times: int) -> None:
    assert result["uses"] == pytest.approx([times] * SAMPLES, rel=1e-6)


def agreed(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result of one of the last members; all have the same, but for what each of them has seen of it."""
    own = {"replica", "main", "evaluated", "accuracy", "buffers"}
    first, *others = results.values()
    for other in others:
        assert {k: v for k, v in other.items() if k not in own} == {k: v for k, v in first.items() if k not in own}
    assert sum(result["main"] for result in results.values()) == 1
    return first


def test_a_job_that_is_resized_trains_as_one_that_is_not(trial: Trials) -> None:
    options = ("--passes", 11, "--scaler")
    changing = trial(*options, "--step-s", 0.04).start(1)
    for number in (2, 4, 3, 1):
        changing.resize(number).wait_step(changing.steps + 4)
    changed = agreed(changing.finish())
    plain = trial(*options)
    unchanged = agreed(plain.start(1, waits=False).finish())

    assert shapes(changing) == [(1, 1), (2, 1), (4, 1), (3, 1), (1, 1)]
    assert_equal_on_all_members(changing)
    assert_used_once_a_pass(changed, 11)
    assert_applied(changed, 11)
    # Other sums, in another order: no two are equal to the last bit.
    assert changed["weights"] == pytest.approx(unchanged["weights"], rel=1e-4, abs=1e-6)
    assert changed["loss"] == pytest.approx(unchanged["loss"], rel=1e-5)
    assert changed["steps"] == unchanged["steps"]
    for (step, [line, *_]), [expected] in zip(by_step(changing).items(), by_step(plain).values(), strict=True):
        for name in ("drawn", "rate", "scale", "registered", "lineage", "batch", "factors", "progress"):
            assert line[name] == expected[name], f"{name} at step {step}"


def test_a_job_moves_to_other_nodes_with_all_its_state(trial: Trials) -> None:
    moving = trial("--passes", 6, "--norm", "--adam", "--step-s", 0.2).start(on(n0=2))
    for where in (on(n1=2), on(n0=1, n1=1), on(n0=2, n1=2), on(n0=3)):
        moving.resize(where).wait_step(moving.steps + 3)
    results = moving.finish()
    assert shapes(moving) == [(2, 1), (2, 1), (2, 2), (4, 2), (3, 1)][1:]
    assert_equal_on_all_members(moving)
    assert_used_once_a_pass(agreed(results), 6)
    # None of those who began is there any more, and yet nothing was forgotten.
    for result in results.values():
        assert not result["replica"].startswith("1-")
        assert result["buffers"]["body.1.num_batches_tracked"] == [6 * A_PASS]


@pytest.mark.parametrize(
    "options",
    [
        ("--workers", 2, "--persistent"),
        ("--workers", 2, "--data", "shards"),
        ("--data", "stream"),
        ("--most-per-gpu", 4),
    ],
    ids=["workers", "shards", "stream", "accumulation"],
)
def test_every_way_of_loading_follows_the_replicas(trial: Trials, options: tuple[object, ...]) -> None:
    changing = trial(*options, "--passes", 4, "--step-s", 0.2).start(1)
    for number in (3, 2):
        changing.resize(number).wait_step(changing.steps + 3)
    result = agreed(changing.finish())
    assert shapes(changing) == [(1, 1), (3, 1), (2, 1)]
    assert_equal_on_all_members(changing)
    assert_used_once_a_pass(result, 4)
    assert_applied(result, 4)


def test_newcomers_come_to_the_loop_that_the_others_are_in(trial: Trials) -> None:
    changing = trial("--first-loop", 2, "--passes", 20, "--break-after", 7, "--step-s", 0.04).start(2)
    changing.resize(3)  # in the first loop, or soon after
    changing.wait_step(15).resize(4).wait_step(changing.steps + 8)
    result = agreed(changing.finish())
    assert_equal_on_all_members(changing)
    assert shapes(changing) == [(2, 1), (3, 1), (4, 1)]
    # The first loop is left after steps 7 and 14, the second one at the end of a pass, step 20, and at 21, 28 …
    assert len(result["steps"]) == 21 + 18 * 7
    assert set(result["evaluated"]) == {SAMPLES}


def hold_in_evaluation(held: Trial, where: int) -> None:
    """Have the newcomers join where all members evaluate."""
    held.tell("hold").start(2, waits=False)
    until(lambda: len(list(held.out.glob("*.held"))) == 2, f"both evaluate: {held.logs()}")
    held.resize(where, waits=False)
    replicas = held.cluster.replicas

    def is_joining() -> bool:
        phases = [here.status.phase for _, here in replicas(held.job).values() if here.status is not None]
        return phases.count(ReplicaPhase.JOINING) == where - 2

    until(is_joining, f"the newcomers join: {held.logs()}")
    held.take_back("hold")


def test_newcomers_may_join_after_an_evaluation(trial: Trials) -> None:
    held = trial("--passes", 3)
    hold_in_evaluation(held, 3)
    result = agreed(held.finish())
    assert_equal_on_all_members(held)
    assert [len(lines) for lines in by_step(held).values()] == [2] * A_PASS + [3] * 2 * A_PASS
    assert_used_once_a_pass(result, 3)


def test_newcomers_hear_that_the_job_was_stopped(trial: Trials) -> None:
    held = trial("--passes", 3, "--stop-at", A_PASS)
    hold_in_evaluation(held, 4)
    agreed(held.finish())
    assert_equal_on_all_members(held)
    assert len(by_step(held)) == A_PASS


def test_a_job_that_is_stopped_as_all_its_replicas_move_ends_at_once(trial: Trials) -> None:
    """Long before a leaver is given up (a minute) or newcomers are (five)."""
    moving = trial("--passes", 40, "--step-s", 0.05, "--stop-when-resized").start(on(n0=2)).wait_step(2)
    moving.tell("resize").resize(on(n1=2), waits=False)
    assert isinstance(moving.cluster.wait_end(moving.job, timeout_s=PATIENCE_S / 3), JobFinished)


def test_a_replica_that_leaves_is_still_heard(trial: Trials) -> None:
    """The first one stops the job when it hears that it is to leave."""
    stopping = trial("--passes", 50, "--step-s", 0.02, "--stop-when-resized").start(on(n0=1, n1=1))
    stopping.wait_step(30)  # by now the replicas talk after every so many steps only
    stopping.tell("resize").resize(on(n1=1), waits=False)
    agreed(stopping.finish(hurries=False))
    assert len(by_step(stopping)) < 50 * A_PASS
    assert_equal_on_all_members(stopping)


def test_newcomers_that_fail_do_not_disturb_the_others(trial: Trials) -> None:
    robust = trial("--passes", 8, "--step-s", 0.05).start(2)

    robust.tell("fail").resize(3, waits=False)
    event = robust.wait()
    assert isinstance(event, GenerationAbandoned), event
    [failed] = (name for name in robust.cluster.replicas(robust.job) if name.startswith("2-"))
    assert failed in event.reason
    assert "told to fail" in robust.log(failed)

    robust.take_back("fail").tell("diverge").resize(3, waits=False)
    robust.cluster.news.wait_for(lambda event: isinstance(event, ReplicaLost) and event.job == robust.job, PATIENCE_S)
    assert "Run the same loops in the same order" in robust.logs()

    robust.take_back("diverge").resize(4).wait_step(robust.steps + 3)
    result = agreed(robust.finish())
    assert_equal_on_all_members(robust)
    assert shapes(robust)[0] == (2, 1)
    assert shapes(robust)[-1] == (4, 1)
    assert_tiles(result, 8)
    assert_applied(result, 8)


def test_a_state_that_newcomers_took_and_did_not_train_with_is_saved_by_those_who_had_it(trial: Trials) -> None:
    moving = trial("--passes", 40, "--step-s", 0.05, saves=True).start(on(n0=1)).wait_step(3)
    moving.tell("fail in a step").resize(on(n1=1), waits=False)
    event = moving.cluster.wait_end(moving.job, timeout_s=PATIENCE_S)
    assert isinstance(event, JobStopped), event  # to be started again from there: not a failure of the job
    assert "told to fail in a step" in moving.logs()
    assert list(moving.checkpoints.glob("checkpoint-*")), moving.logs()


def test_a_script_that_was_edited_goes_on_from_its_checkpoint(trial: Trials, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    shutil.copy(TRAIN, script)
    edited = trial("--passes", 5, "--step-s", 0.05, script=script, saves=True).start(2)
    edited.wait_step(5)
    script.write_text(script.read_text().replace('"replica": NAME', '"is_edited": True, "replica": NAME'))
    edited.resize(3, waits=False)
    status = edited.status()
    assert status is not None
    assert status.phase is RunPhase.RESTARTING
    edited.expect_ready(edited.wait())
    result = agreed(edited.finish())
    assert result["is_edited"]
    assert shapes(edited) == [(2, 1), (3, 1)]
    assert_equal_on_all_members(edited, but="drawn")  # a checkpoint has the random states of one replica
    assert_used_once_a_pass(result, 5)
    assert_applied(result, 5)
    journal = [json.loads(line) for line in (edited.checkpoints / "journal.jsonl").read_text().splitlines()]
    assert sum("checkpoint" in str(entry) and "Resumed" in str(entry) for entry in journal) == 1


def test_members_agree_while_the_batch_size_adapts(trial: Trials) -> None:
    samples = 6400
    adapting = trial("--adapt", "--samples", samples, "--passes", 6, "--step-s", 0.03).start(2)
    until(lambda: adapting.records()["1-1"][-1]["batch"] > BATCH, "the batch size grows")
    for number in (3, 1):
        adapting.resize(number).wait_step(adapting.steps + 20)
    result = agreed(adapting.finish())
    assert_equal_on_all_members(adapting)
    assert_used_once_a_pass(result, 6, samples)


def test_the_last_of_many_resizes_counts(trial: Trials, cluster: LocalCluster) -> None:
    hasty = trial("--passes", 8, "--step-s", 0.2).start(1).tell("wait")
    for number in (2, 4, 3):
        hasty.resize(number, waits=False)
    hasty.take_back("wait")
    first, second, third = (hasty.wait(generation) for generation in (2, 3, 4))
    assert isinstance(first, GenerationAbandoned)
    assert isinstance(second, GenerationAbandoned)
    assert "takes its place" in first.reason
    assert isinstance(third, ReplicasReady)

    before = hasty.pids()
    hasty.resize(3)  # nobody comes or goes
    assert hasty.pids() == before
    with pytest.raises(StaleGeneration):
        cluster.ask(ResizeRun(hasty.job, hasty.generation - 1, on(n0=1)))
    hasty.resize(2)
    result = agreed(hasty.finish())
    assert shapes(hasty) == [(1, 1), (3, 1), (2, 1)]
    assert_equal_on_all_members(hasty)
    assert_used_once_a_pass(result, 8)
    with pytest.raises(Permanent, match="does not run any more"):
        hasty.resize(2)
    # Whoever does not look first is told so by an event.
    cluster.ask(ResizeRun(hasty.job, hasty.generation + 1, on(n0=1)))
    event = hasty.wait(hasty.generation + 1)
    assert not isinstance(event, ReplicasReady)


def test_what_others_of_its_kind_have_measured_goes_to_wherever_the_first_replica_is(
    trial: Trials, cluster: LocalCluster
) -> None:
    told = trial("--adapt", "--passes", 200, "--step-s", 0.02).start(on(n0=1))

    def resized(where: Allocation, experience: str) -> Path:
        generation = told.generation = told.generation + 1
        cluster.ask(ResizeRun(told.job, generation, where, experience=experience))
        told.expect_ready(told.wait())
        told.wait_step(told.steps + 100)  # two seconds: it is tuned every second, and at once after a change
        return cluster.folder / next(iter(where.gpus)) / "jobs" / told.job / "experience.json"

    known = dumps(Profile().add("cpu", ObservationKey(Shape(1), BATCH), Observation(0.0, 0, 0.2, 0.0, 10)))
    assert resized(on(n1=2), known).read_text() == known
    assert all("kind" not in told.log(replica) for replica in told.pids())
    assert resized(on(n1=1), "nonsense").read_text() == "nonsense"
    (first,) = told.pids()
    assert told.log(first).count("What others of this kind have measured cannot be read") == 1
    told.finish()
