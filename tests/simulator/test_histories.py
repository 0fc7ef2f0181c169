"""What every job did in time: each change once, from its first GPU to its end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.simulator.scenes import Scripted, SteadyTruth, ends, steady_job, steady_world

from pollux.simulator.scenario import Scenario, simulate
from pollux.simulator.timeline import Histories, History


@pytest.fixture(scope="module")
def outcome():
    return simulate(Scenario("demo", "optimus", histories=True))


def held_at(history: History, time_s: float) -> int:
    index = np.searchsorted(history.time_s, time_s, side="right")
    return 0 if index == 0 else history.num_gpus[index - 1]


def test_a_history_tells_of_every_change_and_of_nothing_else():
    script = {1: {"a": {"node-0": 1}}, 3: {"a": {"node-0": 2, "node-1": 1}}, 4: {}, 5: {"a": {"node-1": 1}}}
    world = steady_world(Scripted(script), [steady_job("a")], truth=SteadyTruth(epoch_length=120.0))
    world.histories = Histories()
    end_s = ends(world)["a"]
    found = world.histories.of_job["a"]
    changes = list(zip(found.time_s, found.num_gpus, found.num_nodes, found.batch_size, strict=True))
    gone, trains = (0, 0, 0), found.goodput
    assert changes == [
        (60.0, 1, 1, 32),
        (120.0, 1, 1, 32),
        (180.0, 3, 2, 33),
        (240.0, *gone),
        (300.0, 1, 1, 32),
        (360.0, 1, 1, 32),
        (end_s, *gone),
    ]
    assert [value > 0 for value in trains] == [False, True, False, False, False, True, False], (
        "nobody trains while waiting"
    )
    assert found.efficiency[0] == 1.0


def test_what_jobs_held_is_what_the_timeline_says(outcome):
    timeline = outcome.timeline
    for time_s, held in zip(timeline.time_s, timeline.gpus_held, strict=True):
        assert sum(held_at(history, time_s) for history in outcome.histories.values()) == held


def test_what_jobs_held_adds_up_to_their_gpu_hours(outcome):
    for job in outcome.jobs:
        history = outcome.histories[job.name]
        spans = np.diff([*history.time_s, history.time_s[-1]])
        assert spans @ np.array(history.num_gpus) == pytest.approx(job.gpu_s)


def test_every_history_begins_with_the_job_and_ends_with_it(outcome):
    for job in outcome.jobs:
        history = outcome.histories[job.name]
        assert (history.time_s[0], history.time_s[-1]) == (job.started_at_s, job.finished_at_s)
        assert history.num_gpus[-1] == 0
        assert history.time_s == sorted(set(history.time_s))
        columns = list(zip(*(column for name, column in vars(history).items() if name != "time_s"), strict=True))
        assert all(before != after for before, after in itertools.pairwise(columns))


def test_they_are_kept_only_for_who_asks(outcome):
    plain = simulate(Scenario("demo", "optimus"))
    assert plain.histories is None
    assert "histories" not in plain.document()
    assert plain.jobs == outcome.jobs, "looking changes nothing"
    assert outcome.document()["histories"].keys() == {job.name for job in outcome.jobs}
