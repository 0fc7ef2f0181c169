"""Options that bring the virtual world closer to a live cluster: early rounds, replicas that warm up, reports at times
of each job's own. All jobs do 200 iterations of M0, one a second on each of their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.scenes import (
    EQUAL_SHARE,
    Scripted,
    SteadyTruth,
    ends,
    events,
    log_text,
    steady_job,
    steady_world,
)
from tests.simulator.test_world import joined, lost, replayed, troubles

from pollux.core import Cluster, GenerationAbandoned, JobReported, ReplicasReady, RoundDue
from pollux.errors import InvalidSpec
from pollux.policies import registry
from pollux.scheduler import SchedulerOptions
from pollux.scheduler.rounds import is_somebody_waiting
from pollux.simulator.options import AgentOptions, Options, WorldOptions
from pollux.simulator.settings import applied
from pollux.simulator.world import World

IN_PLACE = SchedulerOptions(in_place=True)
EARLY = Options(early_gap_s=1.0, scheduler=IN_PLACE)


pytestmark = pytest.mark.usefixtures("invariants_are_kept")


def rounds(world: World) -> list[float]:
    return [time_s for time_s, _ in events(world, RoundDue)]


class TestEarlyRounds:
    def test_the_first_is_at_the_start(self):
        world = steady_world("fifo", [steady_job("a")], options=EARLY)
        assert ends(world) == {"a": 30 + 200}
        assert rounds(world)[:3] == [0.0, 60.0, 120.0]

    def test_a_job_that_comes_while_gpus_are_free_starts_at_once_and_moves_the_rounds_after_it(self):
        world = steady_world("fifo", [steady_job("a"), steady_job("b", at_s=75.0)], options=EARLY)
        assert ends(world) == {"a": 230.0, "b": 75 + 230}
        assert rounds(world)[:4] == [0.0, 60.0, 75.0, 135.0]

    def test_jobs_that_come_at_once_are_planned_at_once(self):
        world = steady_world("fifo", [steady_job(name, at_s=75.0) for name in "ab"], options=EARLY)
        assert ends(world) == {"a": 75 + 230, "b": 75 + 230}
        assert rounds(world)[:2] == [75.0, 135.0]  # rounds without a job are none

    def test_the_gap_is_kept(self):
        jobs = [steady_job("a", at_s=75.0), steady_job("b", at_s=75.5), steady_job("c", at_s=80.0)]
        world = steady_world("fifo", jobs, options=replace(EARLY, early_gap_s=5.0))
        assert ends(world) == {"a": 305.0, "b": 310.0, "c": 310.0}

    def test_the_gpus_of_a_finished_job_are_given_out_at_once(self):
        world = steady_world("fifo", [steady_job("a", 4), steady_job("b", 4)], options=EARLY)
        assert ends(world) == {"a": 80.0, "b": 80.0 + 80.0}

    def test_with_all_gpus_held_a_job_waits_for_the_interval(self):
        script = Scripted({1: {"a": {"node-0": 2}}, 2: {"a": {"node-0": 1}, "b": {"node-0": 1}}})
        jobs = [steady_job("a"), steady_job("b", at_s=20.0)]
        world = steady_world(script, jobs, Cluster.uniform(1, 2, "t4"), options=EARLY)
        ends(world)
        found = world.scheduler.state.ended
        assert found["b"].first_started_at_s == 60 + 30  # once a has let go

    def test_none_come_early_unless_asked_for(self):
        jobs = [steady_job("a"), steady_job("b", at_s=75.0)]
        world = steady_world("fifo", jobs, options=replace(EARLY, early_gap_s=None))
        ends(world)
        assert rounds(world)[:3] == [60.0, 120.0, 180.0]

    @pytest.mark.parametrize("gap", [0.0, -1.0, float("inf"), "soon"])
    def test_the_gap_is_checked(self, gap):
        with pytest.raises(InvalidSpec, match="early_gap_s"):
            applied(Options(), {"early_gap_s": gap})


class TestWarmUp:
    GROWS = Scripted({1: {"a": {"node-0": 1}}, 2: {"a": {"node-0": 2}}})
    SHRINKS = Scripted({1: {"a": {"node-0": 2}}, 2: {"a": {"node-0": 1}}})

    def world(self, script: Scripted, warm_up_s: float, *changes: object) -> World:
        options = Options(world=WorldOptions(warm_up_s=warm_up_s), scheduler=IN_PLACE)
        return steady_world(script, [steady_job("a")], changes=changes, options=options)  # type: ignore[arg-type]

    def test_a_job_trains_on_until_its_new_replicas_are_there(self):
        # Started at 60, trains from 90; told at 120, it goes on to 132 and pauses to 162, with 42 done.
        assert ends(self.world(self.GROWS, 12.0)) == {"a": 162 + (200 - 42) / 2}
        assert ends(self.world(self.GROWS, 0.0)) == {"a": 150 + (200 - 30) / 2}

    def test_the_switch_is_told_when_all_train(self):
        world = self.world(self.GROWS, 12.0)
        ends(world)
        assert [time_s for time_s, _ in events(world, ReplicasReady)] == [90.0, 162.0]

    def test_a_job_that_only_loses_replicas_waits_for_nobody(self):
        assert ends(self.world(self.SHRINKS, 12.0)) == ends(self.world(self.SHRINKS, 0.0))

    def test_a_start_takes_no_longer(self):
        assert ends(self.world(Scripted({1: {"a": {"node-0": 1}}}), 12.0)) == {"a": 290.0}

    def test_a_job_may_end_before_its_new_replicas_are_there(self):
        assert ends(self.world(self.GROWS, 500.0)) == {"a": 290.0}

    def test_if_their_node_is_lost_nothing_changes(self):
        script = Scripted({1: {"a": {"node-0": 1}}, 2: {"a": {"node-0": 1, "node-1": 1}}, 3: {"a": {"node-0": 1}}})
        world = self.world(script, 12.0, lost(125.0, "node-1"))
        assert ends(world) == {"a": 290.0}
        assert [time_s for time_s, _ in events(world, GenerationAbandoned)] == [132.0]

    def test_if_the_node_that_trains_is_lost_the_job_starts_anew(self):
        world = self.world(self.GROWS, 12.0, lost(125.0, "node-0"), joined(126.0, "node-0"))
        assert ends(world)["a"] > 290.0


class TestReportsOfOnesOwn:
    def reports(self, first_report_s: float | None, at_s: float = 0.0) -> list[float]:
        options = Options(agent=AgentOptions(first_report_s=first_report_s))
        world = steady_world(EQUAL_SHARE, [steady_job("a", at_s=at_s)], Cluster.uniform(1, 1, "t4"), options=options)
        ends(world)
        return [time_s for time_s, _ in events(world, JobReported)]

    def test_they_count_from_when_the_job_trains(self):
        assert self.reports(10.0, at_s=50.0)[:3] == [100.0, 130.0, 160.0]
        assert self.reports(30.0, at_s=70.0)[:3] == [180.0, 210.0, 240.0]

    def test_else_from_the_start_of_the_world(self):
        assert self.reports(None)[:3] == [90.0, 120.0, 150.0]

    def test_other_gpus_bring_a_report_of_their_own(self):
        options = Options(agent=AgentOptions(first_report_s=10.0), scheduler=IN_PLACE)
        world = steady_world(EQUAL_SHARE, [steady_job("a")], Cluster.uniform(1, 2, "t4"), options=options)
        ends(world)
        # Trains from 90, is told at 120 to grow, and trains again from 150.
        assert [time_s for time_s, _ in events(world, JobReported)][:4] == [100.0, 160.0, 190.0, 220.0]

    def test_the_artifacts_way_of_counting_has_no_such_thing(self):
        with pytest.raises(InvalidSpec, match=r"agent\.first_report_s"):
            Options(world=WorldOptions(whole_seconds=True), agent=AgentOptions(first_report_s=1.0))


@settings(max_examples=40)
@given(
    policy=st.sampled_from([*registry.BUILT_IN, EQUAL_SHARE]),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 400)), min_size=1, max_size=5),
    changes=troubles(),
    in_place=st.booleans(),
    gap=st.sampled_from([0.5, 5.0]),
    warm_up=st.sampled_from([0.0, 12.0, 70.0]),
    first_report=st.sampled_from([None, 1.0, 30.0]),
)
def test_whatever_happens_every_job_ends_and_the_log_tells_it_all(
    policy, sizes, changes, in_place, gap, warm_up, first_report
):
    options = Options(
        early_gap_s=gap,
        world=WorldOptions(warm_up_s=warm_up, max_time_s=20_000.0),
        agent=AgentOptions(first_report_s=first_report),
        scheduler=SchedulerOptions(in_place=in_place),
    )
    chosen = registry.make(policy)
    jobs = [
        steady_job(f"job-{index}", gpus, float(at_s), fixed_batch=not chosen.adapts_batch)
        for index, (gpus, at_s) in enumerate(sizes)
    ]
    world = steady_world(chosen, jobs, Cluster.uniform(3, 2, "t4"), changes, SteadyTruth(epoch_length=50.0), options)
    assert len(ends(world)) == len(jobs)
    assert replayed(world) == world.scheduler.state
    again = steady_world(policy, jobs, Cluster.uniform(3, 2, "t4"), changes, SteadyTruth(epoch_length=50.0), options)
    again.run()
    assert log_text(again.scheduler.log) == log_text(world.scheduler.log)


@settings(max_examples=40)
@given(
    policy=st.sampled_from(["fifo-backfill", "pollux", EQUAL_SHARE]),
    arrivals=st.lists(st.integers(0, 600), min_size=1, max_size=8),
    gap=st.sampled_from([0.5, 5.0, 20.0]),
)
def test_no_gpu_idles_for_longer_than_the_gap_while_a_job_that_could_use_it_waits(policy, arrivals, gap):
    """Each job can do with one GPU, and these policies give one to whoever comes while there is a free one."""
    chosen = registry.make(policy)
    jobs = [
        steady_job(f"job-{index}", 1, float(at_s), fixed_batch=not chosen.adapts_batch)
        for index, at_s in enumerate(arrivals)
    ]
    options = replace(EARLY, early_gap_s=gap)
    world = steady_world(chosen, jobs, options=options)
    handle, since_s = world.scheduler.handle, None

    def watched(event, now):
        nonlocal since_s
        assert since_s is None or now <= since_s + gap, f"idle since {since_s}"
        actions = handle(event, now)
        if not is_somebody_waiting(world.scheduler.state):
            since_s = None
        elif since_s is None:
            since_s = now
        return actions

    world.scheduler.handle = watched  # type: ignore[method-assign]
    assert len(ends(world)) == len(jobs)
