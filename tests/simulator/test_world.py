"""The rules of the virtual world, one by one. All jobs do one iteration of M0 a second on each of their GPUs."""

from __future__ import annotations

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
    plans,
    steady_job,
    steady_world,
)

from pollux.core import (
    Allocation,
    Cluster,
    FrozenMap,
    JobFinished,
    JobReported,
    JobStopped,
    Node,
    NodeDrained,
    NodeId,
    NodeJoined,
    NodeLost,
    Phase,
    ReplicaLost,
    ReplicasReady,
    RoundDue,
)
from pollux.errors import InvalidModel, InvalidSpec
from pollux.policies import registry
from pollux.scheduler import MemoryLog, Scheduler, SchedulerOptions
from pollux.simulator.cluster_file import NodeChange
from pollux.simulator.options import AgentOptions, Options, WorldOptions
from pollux.simulator.world import PATIENCE, World

pytestmark = pytest.mark.usefixtures("invariants_are_kept")


def lost(time_s: float, node: str) -> NodeChange:
    return NodeChange(time_s, NodeLost(NodeId(node)))


def joined(time_s: float, node: str, gpus: int = 2) -> NodeChange:
    return NodeChange(time_s, NodeJoined(Node(NodeId(node), gpus, "t4")))


def job(world: World, name: str = "a"):
    return world.scheduler.state.ended[name]


class TestTime:
    def test_the_first_round_is_one_interval_after_the_start_and_starting_takes_its_time(self):
        world = steady_world("fifo", [steady_job("a")])
        assert ends(world) == {"a": 60 + 30 + 200}
        assert job(world).first_started_at_s == 60

    @pytest.mark.parametrize(
        ("delay", "interval", "end"), [(0.0, 60.0, 260.0), (45.5, 60.0, 305.5), (30.0, 7.0, 237.0)]
    )
    def test_delay_and_interval_are_options(self, delay, interval, end):
        options = Options(interval_s=interval, world=WorldOptions(realloc_delay_s=delay))
        assert ends(steady_world("fifo", [steady_job("a")], options=options)) == {"a": end}

    def test_a_job_that_arrives_at_the_moment_of_a_round_is_part_of_it(self):
        world = steady_world("fifo", [steady_job("a", at_s=60.0), steady_job("b", at_s=60.5)])
        ends(world)
        assert (job(world, "a").first_started_at_s, job(world, "b").first_started_at_s) == (60.0, 120.0)

    def test_jobs_progress_at_their_own_speed(self):
        assert ends(steady_world("fifo", [steady_job("a", 1), steady_job("b", 3)])) == {
            "a": 290.0,
            "b": pytest.approx(90 + 200 / 3),
        }

    def test_gpu_time_counts_from_the_start_of_replicas_to_the_end(self):
        world = steady_world("fifo", [steady_job("a", 2)])
        ends(world)
        assert job(world).attained_gpu_s == 2 * (30 + 100)

    def test_the_gpus_of_a_finished_job_are_given_out_in_the_next_round(self):
        world = steady_world("fifo", [steady_job("a", 4), steady_job("b", 4)])
        assert ends(world) == {"a": 140.0, "b": 180 + 30 + 50}

    def test_jobs_that_end_at_the_same_moment_both_end(self):
        assert ends(steady_world("fifo", [steady_job(name) for name in "abc"])) == dict.fromkeys("abc", 290.0)


class TestSeeds:
    def test_every_round_has_its_own_and_all_come_from_the_one_of_the_run(self):
        def seeds(seed: int) -> list[int]:
            policy, seen = registry.make("fifo"), []
            plan = policy.plan
            policy.plan = lambda snapshot, seed: seen.append(seed) or plan(snapshot, seed)
            steady_world(policy, [steady_job("a")], options=Options(seed=seed)).run()
            return seen

        first = seeds(1)
        assert first == seeds(1)
        assert len({*first, *seeds(2)}) == 2 * len(first) == 8


class TestReports:
    @pytest.mark.parametrize("interval", [7.7, 0.1, 30.0])
    def test_reports_come_before_the_round_of_the_same_moment(self, interval):
        """Also after many of them: 0.1 added up a hundred times is not ten."""
        options = Options(interval_s=interval, agent=AgentOptions(report_interval_s=interval))
        world = steady_world(EQUAL_SHARE, [steady_job("a", fixed_batch=False)], options=options)
        world.run()
        at = {kind: [time_s for time_s, _ in events(world, kind)] for kind in (RoundDue, JobReported)}
        assert len(at[JobReported]) > 1
        assert set(at[JobReported]) <= set(at[RoundDue])
        order = [type(event) for time_s, event in events(world, RoundDue, JobReported) if time_s in at[JobReported]]
        assert order == [JobReported, RoundDue] * len(at[JobReported])


class TestWholeSeconds:
    @pytest.mark.parametrize(
        ("length", "end"), [(100.4, 290.0), (100.6, 292.0), (10.5, 110.0), (11.5, 114.0), (0.5, 90.0), (0.4, 90.0)]
    )
    def test_epochs_take_whole_seconds_halves_go_to_the_even_one(self, length, end):
        truth = SteadyTruth(epoch_length=length)
        found = ends(steady_world("fifo", [steady_job("a")], truth=truth, whole_seconds=True))
        assert found == {"a": end}

    def test_otherwise_they_take_as_long_as_they_take(self):
        found = ends(steady_world("fifo", [steady_job("a")], truth=SteadyTruth(epoch_length=100.4)))
        assert found == {"a": pytest.approx(290.8)}

    def test_an_epoch_that_ends_a_little_after_a_round_ends_with_it_but_after_it(self):
        options = Options(world=WorldOptions(whole_seconds=True), agent=AgentOptions(report_interval_s=60.0))
        truth = SteadyTruth(epochs=1, epoch_length=30.4)
        jobs = [steady_job("a", 1), steady_job("b", 4, at_s=61.0)]
        world = steady_world("fifo", jobs, truth=truth, options=options)
        assert ends(world) == {"a": 120.0, "b": 180 + 30 + round(30.4 / 4)}
        at_120 = [type(event) for time_s, event in events(world, RoundDue, JobFinished) if time_s == 120.0]
        assert at_120 == [RoundDue, JobFinished], "it was still there when the round looked"


class TestPreemption:
    def test_keeps_all_progress(self):
        script = {1: {"a": {"node-0": 1}}, 2: {}, 3: {"a": {"node-1": 1}}}
        world = steady_world(Scripted(script), [steady_job("a")])
        assert ends(world) == {"a": 180 + 30 + 170}
        assert job(world).num_reallocations == 1
        assert job(world).attained_gpu_s == 60 + 200

    def test_a_move_in_restart_style_gives_the_old_gpus_back_at_once(self):
        script = {1: {"a": {"node-0": 2}}, 2: {"a": {"node-1": 2}, "b": {"node-0": 2}}}
        world = steady_world(Scripted(script), [steady_job("a"), steady_job("b")])
        assert ends(world) == {"a": 120 + 30 + 70, "b": 120 + 30 + 100}

    def test_a_restart_while_replicas_are_still_starting_begins_the_wait_anew(self):
        """Rounds closer together than the delay: what the first start left behind must not touch the second."""
        script = {1: {"a": {"node-0": 1}}, 2: {"a": {"node-1": 1}}}
        options = Options(interval_s=10.0, world=WorldOptions(max_time_s=10_000.0))
        world = steady_world(Scripted(script), [steady_job("a")], options=options)
        assert ends(world) == {"a": 20 + 30 + 200}
        assert [time_s for time_s, _ in events(world, ReplicasReady)] == [50.0]
        assert [time_s for time_s, _ in events(world, JobStopped)] == [20.0]

    def test_a_job_that_is_stopped_while_it_starts_can_come_back_later(self):
        script = {1: {"a": {"node-0": 1}}, 2: {}, 3: {"a": {"node-0": 1}}}
        options = Options(interval_s=10.0, world=WorldOptions(max_time_s=10_000.0))
        assert ends(steady_world(Scripted(script), [steady_job("a")], options=options)) == {"a": 30 + 30 + 200}


class TestResizeInPlace:
    def test_trains_nowhere_meanwhile_and_holds_old_and_new_gpus_until_it_is_ready(self):
        cluster = Cluster.of(Node(NodeId("small"), 1, "t4"), Node(NodeId("wide"), 2, "t4"))
        script = {1: {"a": {"small": 1}}, 2: {"a": {"wide": 2}, "b": {"small": 1}}}
        world = steady_world(Scripted(script), [steady_job("a"), steady_job("b")], cluster, in_place=True)
        assert ends(world) == {"a": 150 + 170 / 2, "b": 150 + 30 + 200}
        assert job(world, "b").first_started_at_s == 150.0, "the GPU that it waits for is free once a has switched"
        at_130 = replayed(world, until_s=130.0).jobs["a"]
        assert at_130.phase is Phase.RESIZING
        assert at_130.occupied == Allocation(FrozenMap({"small": 1, "wide": 2}))

    def test_a_resize_during_a_start_waits_for_it(self):
        script = {1: {"a": {"node-0": 1}}, 2: {"a": {"node-0": 2}}}
        options = Options(interval_s=10.0, scheduler=SchedulerOptions(in_place=True))
        world = steady_world(Scripted(script), [steady_job("a")], options=options)
        assert ends(world) == {"a": 40 + 30 + 100}
        assert job(world).num_reallocations == 1


SPREAD = {"node-0": 1, "node-1": 1}
WIDE = {1: {"a": {"node-0": 2, "node-1": 2}}}


class TestInterference:
    def test_jobs_on_several_nodes_slow_each_other_where_they_meet(self):
        script = {1: {"a": SPREAD, "b": SPREAD}}
        world = steady_world(Scripted(script), [steady_job("a", 2), steady_job("b", 2)], interference=0.5)
        assert ends(world) == {"a": 290.0, "b": 290.0}

    def test_it_ends_when_one_of_them_leaves(self):
        script = {1: {"a": SPREAD, "b": SPREAD}, 3: {"b": SPREAD}, 4: {"a": SPREAD}}
        world = steady_world(Scripted(script), [steady_job("a", 2), steady_job("b", 2)], interference=0.5)
        assert ends(world) == {"b": 180 + 110 / 2, "a": 240 + 30 + 110 / 2}

    def test_it_ends_when_one_of_them_finishes_and_begins_when_one_comes(self):
        script = {1: {"a": SPREAD}, 2: {"a": SPREAD, "b": SPREAD}}
        world = steady_world(Scripted(script), [steady_job("a", 2), steady_job("b", 2)], interference=0.5)
        # a: 30 s at 2, then 1 a second from 120 on, when b's replicas come; b: from 150 at 1, from 260 at 2 a second.
        assert ends(world) == {"a": 120 + 140, "b": 260 + (200 - 110) / 2}

    def test_one_node_in_common_is_enough(self):
        script = {1: {"a": {"node-0": 1, "node-1": 1}, "b": {"node-1": 1, "node-2": 1}}}
        cluster, jobs = Cluster.uniform(3, 2, "t4"), [steady_job("a", 2), steady_job("b", 2)]
        assert ends(steady_world(Scripted(script), jobs, cluster, interference=0.5)) == {"a": 290.0, "b": 290.0}

    def test_jobs_on_one_node_neither_suffer_nor_hinder(self):
        script = {1: {"a": SPREAD, "b": {"node-0": 1}, "c": {"node-1": 1}}}
        world = steady_world(Scripted(script), [steady_job("a", 2), steady_job("b"), steady_job("c")], interference=0.5)
        assert ends(world) == {"a": 190.0, "b": 290.0, "c": 290.0}

    def test_jobs_that_do_not_meet_do_not_hinder_each_other(self):
        script = {1: {"a": {"node-0": 1, "node-1": 1}, "b": {"node-2": 1, "node-3": 1}}}
        cluster = Cluster.uniform(4, 1, "t4")
        world = steady_world(Scripted(script), [steady_job("a", 2), steady_job("b", 2)], cluster, interference=0.5)
        assert ends(world) == {"a": 190.0, "b": 190.0}

    def test_three_at_one_node_are_slowed_once(self):
        script = {1: {name: SPREAD for name in "abc"}}
        cluster, jobs = Cluster.uniform(2, 3, "t4"), [steady_job(name, 2) for name in "abc"]
        assert ends(steady_world(Scripted(script), jobs, cluster, interference=0.25)) == dict.fromkeys(
            "abc", pytest.approx(90 + 200 / 1.5)
        )


class TestNodes:
    def test_in_place_the_survivors_of_a_lost_node_form_anew_and_train_on(self):
        truth = SteadyTruth(epoch_length=200.0)
        world = steady_world(
            Scripted(WIDE), [steady_job("a", 4)], changes=[lost(130.0, "node-1")], truth=truth, in_place=True
        )
        assert ends(world) == {"a": 130 + 30 + 240 / 2}
        survivors = Allocation(FrozenMap({"node-0": 2}))
        assert events(world, ReplicaLost) == [(130.0, ReplicaLost("a", 1, 1, survivors))]

    def test_survivors_that_form_anew_while_they_start_are_ready_later(self):
        changes = [lost(80.0, "node-1")]
        world = steady_world(Scripted(WIDE), [steady_job("a", 4)], changes=changes, in_place=True)
        assert ends(world) == {"a": 80 + 30 + 100}
        assert [time_s for time_s, _ in events(world, ReplicasReady)] == [110.0]

    @pytest.mark.parametrize(("at_s", "end"), [(130.0, 210 + 400 / 2), (150.0, 210 + 200 / 2)])
    def test_in_restart_style_it_falls_back_to_the_start_of_its_epoch_and_waits_for_a_round(self, at_s, end):
        truth = SteadyTruth(epoch_length=200.0)
        changes = [lost(at_s, "node-1")]
        world = steady_world(Scripted(WIDE), [steady_job("a", 4)], changes=changes, truth=truth)
        assert ends(world) == {"a": end}
        assert events(world, ReplicaLost) == []
        assert [time_s for time_s, _ in events(world, JobStopped)] == [at_s]

    def test_a_job_that_cannot_do_with_the_survivors_falls_back_in_place_as_well(self):
        script = {1: {"a": {"node-0": 2, "node-1": 2}}, 3: {"a": {"node-0": 2, "node-2": 2}}}
        world = steady_world(
            Scripted(script),
            [steady_job("a", 4, rigid=True)],
            changes=[lost(100.0, "node-1"), joined(150.0, "node-2")],
            in_place=True,
        )
        assert ends(world) == {"a": 180 + 30 + 50}

    @pytest.mark.parametrize("in_place", [False, True])
    def test_a_job_whose_nodes_are_all_gone_begins_its_epoch_anew_when_there_is_room(self, in_place):
        cluster, changes = Cluster.uniform(1, 2, "t4"), [lost(100.0, "node-0"), joined(1000.0, "node-9")]
        world = steady_world("fifo", [steady_job("a", 2)], cluster, changes, in_place=in_place)
        assert ends(world) == {"a": 1020 + 30 + 100}

    def test_other_jobs_do_not_notice(self):
        script = {1: {"a": {"node-0": 1}, "b": {"node-1": 1}}}
        jobs = [steady_job("a"), steady_job("b")]
        world = steady_world(Scripted(script), jobs, changes=[lost(100.0, "node-1"), joined(110.0, "node-1")])
        assert ends(world) == {"a": 290.0, "b": 120 + 30 + 200}

    def test_a_node_that_joins_is_there_for_the_next_round(self):
        world = steady_world("fifo", [steady_job("a", 6)], changes=[joined(100.0, "node-2")])
        assert ends(world) == {"a": pytest.approx(150 + 200 / 6)}

    def test_a_drained_node_is_left_in_the_next_round(self):
        changes = [NodeChange(100.0, NodeDrained(NodeId("node-0")))]
        world = steady_world("fifo", [steady_job("a", 1)], changes=changes)
        assert ends(world) == {"a": 120 + 30 + 170}
        assert plans(world)[-1][1]["a"] == Allocation(FrozenMap({"node-1": 1}))

    def test_a_node_lost_while_a_job_moves_there_ends_the_move(self):
        script = {1: {"a": {"node-0": 1}}, 2: {"a": {"node-1": 1}}}
        changes = [lost(130.0, "node-1"), joined(1000.0, "node-1")]
        world = steady_world(Scripted(script), [steady_job("a")], changes=changes, in_place=True)
        ends(world)
        assert job(world).phase is Phase.SUCCEEDED

    @pytest.mark.parametrize("policy", ["srtf", "optimus"])
    def test_oracles_wait_for_a_cluster_without_nodes(self, policy):
        cluster, changes = Cluster.uniform(1, 2, "t4"), [lost(100.0, "node-0"), joined(500.0, "node-0")]
        world = steady_world(policy, [steady_job("a", 2)], cluster, changes, NoMoreThanTwo())
        assert ends(world) == {"a": 540 + 30 + 100}


class NoMoreThanTwo(SteadyTruth):
    """Nobody measured more than two GPUs on a node."""

    def passes(self, gpu_type, placement, per_gpu_batch_size):
        if max(placement) > 2:
            raise InvalidModel("placement", placement, "not measured", "Use fewer")
        return super().passes(gpu_type, placement, per_gpu_batch_size)


class TestRandomFailures:
    JOBS = tuple(steady_job(f"job-{index}", 1 + index % 3, 50.0 * index) for index in range(8))

    def logged(self, seed: int) -> World:
        options = Options(seed=seed, world=WorldOptions(node_mtbf_s=600.0, node_repair_s=120.0))
        made = steady_world(
            "fifo-backfill", self.JOBS, options=options, truth=SteadyTruth(epochs=20, epoch_length=30.0)
        )
        made.run()
        return made

    def test_the_same_seed_fails_the_same_nodes_at_the_same_times(self):
        first, second, other = (log_text(self.logged(seed).scheduler.log) for seed in (1, 1, 2))
        assert first == second != other
        assert '"NodeLost"' in first

    def test_a_failed_node_comes_back_after_its_repair(self):
        changes = events(self.logged(1), NodeLost, NodeJoined)[2:]
        for time_s, event in changes:
            if isinstance(event, NodeLost):
                back = [at for at, other in changes if isinstance(other, NodeJoined) and other.node.id == event.node]
                last = max(at for at, _ in changes)
                assert time_s + 120.0 in back or time_s + 120.0 > last

    def test_a_repair_does_not_undo_what_happened_to_the_node_since(self):
        """All nodes but one are lost for good by plan; those that had failed before must not come back."""
        cluster = Cluster.uniform(20, 1, "t4")
        gone = [lost(300.0, node.id) for node in cluster if node.id != "node-00"]
        options = Options(world=WorldOptions(node_mtbf_s=400.0, node_repair_s=200.0, max_time_s=3000.0))
        world = steady_world("fifo", [steady_job("a")], cluster, gone, SteadyTruth(epoch_length=1e9), options)
        with pytest.raises(InvalidSpec, match=r"world\.max_time_s.*had not ended"):
            world.run()
        assert {event.node.id for at_s, event in events(world, NodeJoined) if at_s > 300.0} <= {"node-00"}
        assert any(at_s < 300.0 for at_s, _ in events(world, NodeLost))

    def test_nodes_fail_about_as_often_as_asked_also_those_that_come_and_go(self):
        """One of two nodes is taken out and put back every 50 s; what is planned for it must not pile up."""
        comings = [lost(50.0 + 100 * index, "node-1") for index in range(1000)]
        goings = [joined(100.0 + 100 * index, "node-1") for index in range(1000)]
        options = Options(world=WorldOptions(node_mtbf_s=1000.0, node_repair_s=10.0, max_time_s=100_000.0))
        endless, jobs = SteadyTruth(epochs=1, epoch_length=1e9), [steady_job("a")]
        world = steady_world("fifo", jobs, Cluster.uniform(2, 1, "t4"), [*comings, *goings], endless, options)
        with pytest.raises(InvalidSpec, match=r"world\.max_time_s.*had not ended"):
            world.run()
        by_itself = [at_s for at_s, event in events(world, NodeLost) if event.node == "node-1" and at_s % 100 != 50.0]
        # Present half of the time: 50 failures are expected, with a spread of 7.
        assert 25 < len(by_itself) < 80


class TestGivingUp:
    def test_a_policy_that_gives_nothing_is_named_as_the_problem(self):
        world = steady_world(Scripted({}), [steady_job(f"job-{index}") for index in range(7)])
        with pytest.raises(InvalidSpec, match=r"job-0, job-1, job-2, job-3, job-4 ….*gives these jobs nothing.*4 GPUs"):
            world.run()
        assert world.now == pytest.approx(60.0 * (PATIENCE + 1))

    def test_a_job_that_never_fits_is_named(self):
        with pytest.raises(InvalidSpec, match="workload = 'large'"):
            steady_world("fifo-backfill", [steady_job("a"), steady_job("large", 5)]).run()

    def test_a_job_that_waits_for_something_ahead_is_not_given_up(self):
        late = 60.0 * (PATIENCE + 100)
        world = steady_world("fifo", [steady_job("a", 6)], changes=[joined(late, "node-2")])
        assert ends(world)["a"] > late

    def test_a_run_that_does_not_end_is_given_up(self):
        script = {number: {"a": {f"node-{number % 2}": 1}} for number in range(1, 100)}
        world = steady_world(Scripted(script), [steady_job("a")], realloc_delay_s=60.0, max_time_s=3000.0)
        with pytest.raises(InvalidSpec, match=r"world\.max_time_s = 3000.*1 jobs had not ended by then \(a\)"):
            world.run()


def replayed(world: World, until_s: float = float("inf")):
    """The state that the log alone gives."""
    records = [record for record in world.scheduler.log.records() if record.time_s <= until_s]
    return Scheduler(MemoryLog(records), world.scheduler.state.options).state


NODES = ("node-0", "node-1", "node-2")


@st.composite
def troubles(draw: st.DrawFn) -> list[NodeChange]:
    """Nodes that are lost, drained and come back; at the end all are there."""
    changes = []
    for node in NODES:
        times = sorted(draw(st.lists(st.integers(1, 900), max_size=4, unique=True)))
        for time_s in times:
            kind = draw(st.sampled_from(("lose", "drain", "join")))
            event = NodeLost(NodeId(node)) if kind == "lose" else NodeDrained(NodeId(node))
            changes.append(joined(time_s, node) if kind == "join" else NodeChange(float(time_s), event))
        changes.append(joined(1000.0, node))
    return changes


@settings(max_examples=60)
@given(
    policy=st.sampled_from([*registry.BUILT_IN, EQUAL_SHARE]),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 400)), min_size=1, max_size=5),
    changes=troubles(),
    in_place=st.booleans(),
    whole=st.booleans(),
    interval=st.sampled_from([7.0, 30.0, 60.0]),
    delay=st.sampled_from([0.0, 30.0, 45.0]),
    mtbf=st.sampled_from([None, None, 900.0]),
    seed=st.integers(0, 5),
)
def test_whatever_happens_every_job_ends_and_the_log_tells_it_all(
    policy, sizes, changes, in_place, whole, interval, delay, mtbf, seed
):
    options = Options(
        interval_s=interval,
        seed=seed,
        world=WorldOptions(
            realloc_delay_s=delay,
            whole_seconds=whole,
            interference=0.3,
            node_mtbf_s=mtbf,
            node_repair_s=60.0,
            max_time_s=20_000.0,
        ),
        scheduler=SchedulerOptions(in_place=in_place),
    )
    chosen = registry.make(policy)
    jobs = [
        steady_job(f"job-{index}", gpus, float(at_s), fixed_batch=not chosen.adapts_batch)
        for index, (gpus, at_s) in enumerate(sizes)
    ]
    world = steady_world(chosen, jobs, Cluster.uniform(3, 2, "t4"), changes, SteadyTruth(epoch_length=50.0), options)
    assert len(ends(world)) == len(jobs)
    state = world.scheduler.state
    assert not state.jobs
    assert not state.occupancy.used
    for ended in state.ended.values():
        # No job is faster than alone on six GPUs from the first round after its submission on.
        assert ended.finished_at_s >= ended.submitted_at_s + delay + 100 / 6 - 2
    assert replayed(world) == state
