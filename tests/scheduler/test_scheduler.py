"""Event scripts in, actions out."""

from dataclasses import replace

import pytest

from pollux.core import (
    GenerationAbandoned,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobPaused,
    JobReported,
    JobRescaled,
    JobResumed,
    JobSpec,
    JobStopped,
    JobSubmitted,
    MakePlan,
    Node,
    NodeDrained,
    NodeJoined,
    NodeLost,
    Observation,
    ObservationKey,
    Phase,
    Plan,
    PlanMade,
    Profile,
    ReplicaLost,
    ReplicasReady,
    ResizeJob,
    RoundDue,
    Shape,
    StartJob,
    StopJob,
    StopReason,
    Trigger,
)
from pollux.errors import IllegalTransition
from pollux.scheduler import MemoryLog, Scheduler, SchedulerOptions, SchedulerState

from .script import Script, gpus

PREEMPTED, PAUSED, CANCELLED, SUPERSEDED = StopReason


class TestStarting:
    def test_a_job_waits_until_a_plan_names_it_and_runs_once_its_replicas_are_ready(self):
        script = Script()
        assert script.phase() is Phase.PENDING
        assert script.at(60.0).plan(x=gpus(a=2)) == [StartJob("x", 1, gpus(a=2))]
        assert script.phase() is Phase.STARTING
        assert script.at(90.0).tell(ReplicasReady("x", 1)) == []
        assert script.phase() is Phase.RUNNING
        assert (script.job().submitted_at_s, script.job().first_started_at_s) == (0.0, 60.0)

    def test_the_first_start_is_no_reallocation_and_all_others_are(self):
        script = Script().run(x=gpus(a=1))
        assert script.job().num_reallocations == 0
        script.run(x=gpus(a=2))
        assert script.job().num_reallocations == 1
        script.plan()
        script.tell(JobStopped("x", 2))
        script.plan(x=gpus(a=1))
        assert script.job().num_reallocations == 2

    def test_an_abandoned_start_waits_for_the_next_round(self):
        script = Script()
        script.plan(x=gpus(a=2))
        assert script.tell(GenerationAbandoned("x", 1)) == []
        assert script.phase() is Phase.PENDING
        assert script.plan(x=gpus(a=2)) == [StartJob("x", 2, gpus(a=2))]

    def test_a_job_submitted_twice_is_the_first_one(self):
        script = Script(min_gpus=2)
        script.tell(JobSubmitted(JobSpec("x", min_gpus=1)))
        assert script.job().spec.min_gpus == 2
        script.tell(JobCancelled("x"), JobSubmitted(JobSpec("x")))
        assert (script.phase(), script.state.jobs) == (Phase.CANCELLED, {})

    def test_jobs_are_numbered_in_order_of_arrival(self):
        script = Script("zxy")
        script.tell(JobCancelled("z"), JobSubmitted(JobSpec("w")))
        assert [script.job(name).sequence for name in "zxyw"] == [0, 1, 2, 3]

    def test_a_report_changes_what_it_tells_and_nothing_else(self):
        script = Script().run(x=gpus(a=1))
        profile = Profile().add("gpu", ObservationKey(Shape(1), 8), Observation(1.0, 1, 0.0, 0.0, 0))
        before = script.job()
        assert script.tell(JobReported("x", 1, profile=profile), JobReported("x", 1)) == []
        assert script.job() == replace(before, profile=profile)


class TestResizing:
    def test_a_job_grows_in_place_and_holds_both_until_the_new_one_is_ready(self):
        script = Script("xy").run(x=gpus(a=2))
        assert script.plan(x=gpus(a=1, b=3)) == [ResizeJob("x", 2, gpus(a=1, b=3))]
        assert (script.phase(), script.job().occupied) == (Phase.RESIZING, gpus(a=2, b=3))
        script.tell(ReplicasReady("x", 2))
        assert (script.phase(), script.job().occupied, script.job().generation) == (Phase.RUNNING, gpus(a=1, b=3), 2)

    def test_a_restart_is_stop_then_stopped_then_start_at_the_same_instant(self):
        script = Script(in_place=False).run(x=gpus(a=2))
        assert script.plan(x=gpus(a=4)) == [StopJob("x", 1, PREEMPTED)]
        assert script.at(100.0).tell(JobStopped("x", 1)) == [StartJob("x", 2, gpus(a=4))]
        assert script.job().held_since_s == 100.0

    def test_a_rigid_job_is_never_resized_in_place(self):
        script = Script(rigid=True, requested_gpus=2).run(x=gpus(a=2))
        assert script.plan(x=gpus(b=2)) == [StopJob("x", 1, PREEMPTED)]
        assert script.tell(JobStopped("x", 1)) == [StartJob("x", 2, gpus(b=2))]

    def test_an_abandoned_resize_trains_on_and_waits_for_the_next_round(self):
        script = Script().run(x=gpus(a=2))
        script.plan(x=gpus(a=4))
        assert script.tell(GenerationAbandoned("x", 2)) == []
        assert (script.phase(), script.job().allocation, script.job().generation) == (Phase.RUNNING, gpus(a=2), 1)
        assert script.plan(x=gpus(a=4)) == [ResizeJob("x", 3, gpus(a=4))]

    def test_a_newer_plan_is_obeyed_once_the_resize_under_way_is_over(self):
        script = Script().run(x=gpus(a=2))
        script.plan(x=gpus(a=4))
        assert script.plan(x=gpus(b=1)) == []
        assert script.tell(GenerationAbandoned("x", 2)) == [ResizeJob("x", 3, gpus(b=1))]

    def test_a_job_that_waits_for_what_an_abandoned_resize_still_holds_keeps_what_it_has(self):
        script = Script("xy").run(x=gpus(a=4), y=gpus(b=1))
        assert script.plan(x=gpus(b=3), y=gpus(a=4)) == [ResizeJob("x", 2, gpus(b=3))]
        assert script.tell(GenerationAbandoned("x", 2)) == []
        assert (script.phase("y"), script.job("y").allocation) == (Phase.RUNNING, gpus(b=1))
        assert script.state.unsettled == set()

    def test_gpu_seconds_are_counted_across_a_resize(self):
        script = Script().at(10.0).run(x=gpus(a=2))
        script.at(20.0).plan(x=gpus(a=4))
        script.at(30.0).tell(ReplicasReady("x", 2))
        assert script.job().attained_gpu_s_at(40.0) == 10.0 * 2 + 20.0 * 4  # the new ones from the request on
        script.at(50.0).tell(JobFinished("x", 2))
        assert script.job().attained_gpu_s == 10.0 * 2 + 30.0 * 4


class TestMakingRoom:
    def test_a_job_that_is_not_in_the_plan_leaves_and_another_takes_its_place(self):
        script = Script("xy").run(x=gpus(a=4))
        assert script.plan(y=gpus(a=4)) == [StopJob("x", 1, PREEMPTED)]
        assert script.tell(JobStopped("x", 1)) == [StartJob("y", 1, gpus(a=4))]
        assert script.phase("x") is Phase.PENDING

    def test_a_start_that_is_no_longer_wanted_is_stopped(self):
        script = Script()
        script.plan(x=gpus(a=4))
        assert script.plan() == [StopJob("x", 1, PREEMPTED)]
        assert script.tell(ReplicasReady("x", 1)) == []
        assert script.phase() is Phase.STOPPING

    def test_a_stop_may_be_answered_by_the_number_of_an_abandoned_resize(self):
        script = Script().run(x=gpus(a=2))
        script.plan(x=gpus(a=4))
        assert script.plan() == [StopJob("x", 2, PREEMPTED)]
        script.tell(GenerationAbandoned("x", 2), JobStopped("x", 2))
        assert script.phase() is Phase.PENDING

    def test_an_abandoned_resize_is_no_end_of_the_job_that_trains_on(self):
        script = Script().run(x=gpus(a=2))
        script.plan(x=gpus(a=4))
        script.tell(GenerationAbandoned("x", 2), JobStopped("x", 2))
        assert script.phase() is Phase.RUNNING

    def test_a_stopping_job_that_loses_a_replica_still_goes_where_the_plan_sends_it(self):
        script = Script(in_place=False).run(x=gpus(a=2))
        script.plan(x=gpus(b=4))
        script.tell(ReplicaLost("x", 1, 1, gpus(a=1)))
        assert script.tell(JobStopped("x", 1)) == [StartJob("x", 2, gpus(b=4))]


class TestRounds:
    def test_a_round_asks_for_a_plan_and_shows_only_jobs_that_may_have_gpus(self):
        script = Script("pqrxy").run(q=gpus(a=1), r=gpus(a=1), x=gpus(a=1))
        script.tell(JobPaused("p"), JobPaused("q"), JobCancelled("r"))
        (action,) = script.at(60.0).tell(RoundDue(2))
        assert isinstance(action, MakePlan)
        assert (action.round, action.snapshot.round, action.snapshot.time_s) == (2, 2, 60.0)
        assert list(action.snapshot.jobs) == ["x", "y"]
        assert action.snapshot.cluster == script.state.cluster

    def test_rounds_have_seeds_of_their_own_that_follow_from_the_first(self):
        def seeds(seed):
            scheduler = Scheduler(options=SchedulerOptions(seed=seed))
            scheduler.handle(JobSubmitted(JobSpec("x")), 0.0)
            return [scheduler.handle(RoundDue(number), 0.0)[0].seed for number in (1, 2, 3)]

        assert seeds(7) == seeds(7)
        assert len({*seeds(7), *seeds(8)}) == 6

    def test_without_jobs_there_is_nothing_to_plan(self):
        assert Script("").tell(RoundDue(1)) == []

    def test_a_late_plan_is_dropped(self):
        script = Script()
        script.tell(RoundDue(1), RoundDue(2))
        assert script.tell(PlanMade(1, Plan.of({"x": gpus(a=1)}))) == []
        assert script.tell(PlanMade(2, Plan.of({"x": gpus(a=2)}))) == [StartJob("x", 1, gpus(a=2))]
        assert script.tell(PlanMade(2, Plan())) == []

    def test_a_round_of_the_past_is_ignored(self):
        script = Script()
        assert len(script.tell(RoundDue(5))) == 1
        assert script.tell(RoundDue(5), RoundDue(4)) == []
        assert script.state.awaited_round == 5

    def test_the_same_plan_again_does_nothing(self):
        script = Script("xy").run(x=gpus(a=1), y=gpus(b=1))
        assert script.plan(x=gpus(a=1), y=gpus(b=1)) == []


class TestPlansThatCameLate:
    @pytest.mark.parametrize(
        ("meanwhile", "actions"),
        [
            (RoundDue(1), [StartJob("x", 1, gpus(a=4, b=1)), StartJob("y", 1, gpus(b=3))]),
            (JobCancelled("x"), [StartJob("y", 1, gpus(b=3))]),
            (JobPaused("x"), [StartJob("y", 1, gpus(b=3))]),
            (JobRescaled("x", 1, 2), [StartJob("y", 1, gpus(b=3))]),
            (NodeLost("a"), [StartJob("x", 1, gpus(b=1)), StartJob("y", 1, gpus(b=3))]),
            (NodeDrained("b"), [StartJob("x", 1, gpus(a=4))]),
        ],
        ids=["nothing", "cancelled", "paused", "rescaled", "node lost", "node drained"],
    )
    def test_what_cannot_be_any_more_is_left_out(self, meanwhile, actions):
        script = Script("xy")
        script.tell(RoundDue(1), meanwhile)
        assert script.tell(PlanMade(1, Plan.of({"x": gpus(a=4, b=1), "y": gpus(b=3)}))) == actions

    def test_names_that_nobody_knows_are_left_out(self):
        assert Script().plan(x=gpus(a=1), nobody=gpus(a=1)) == [StartJob("x", 1, gpus(a=1))]

    def test_the_first_to_arrive_goes_first_if_a_plan_gives_out_too_much(self):
        assert Script("yx").plan(x=gpus(a=3), y=gpus(a=3)) == [StartJob("y", 1, gpus(a=3))]

    def test_a_running_job_keeps_what_it_has_if_its_part_of_the_plan_cannot_be(self):
        script = Script(min_gpus=2).run(x=gpus(a=2))
        script.tell(RoundDue(2), NodeLost("b"))
        assert script.tell(PlanMade(2, Plan.of({"x": gpus(b=2)}))) == []
        assert (script.phase(), script.job().allocation) == (Phase.RUNNING, gpus(a=2))

    def test_a_running_job_is_not_stopped_for_a_change_of_bounds_while_a_plan_is_made(self):
        script = Script().run(x=gpus(a=4))
        script.tell(RoundDue(2), JobRescaled("x", 1, 2))
        assert script.tell(PlanMade(2, Plan.of({"x": gpus(a=4)}))) == []
        assert script.plan(x=gpus(a=2)) == [ResizeJob("x", 2, gpus(a=2))]


def pending(script):
    return script


def starting(script):
    script.plan(x=gpus(a=2))
    return script


def running(script):
    return script.run(x=gpus(a=2))


def resizing(script):
    running(script).plan(x=gpus(b=2))
    return script


def stopping(script):
    resizing(script).plan()
    return script


def pausing(script):
    running(script).tell(JobPaused("x"))
    return script


def cancelling(script):
    running(script).tell(JobCancelled("x"))
    return script


def paused(script):
    script.tell(JobPaused("x"))
    return script


class TestRequests:
    @pytest.mark.parametrize(
        ("prepare", "request_", "actions", "phase", "end"),
        [
            (pending, JobPaused, [], Phase.PAUSED, Phase.PAUSED),
            (starting, JobPaused, [StopJob("x", 1, PAUSED)], Phase.PAUSING, Phase.PAUSED),
            (running, JobPaused, [StopJob("x", 1, PAUSED)], Phase.PAUSING, Phase.PAUSED),
            (resizing, JobPaused, [StopJob("x", 2, PAUSED)], Phase.PAUSING, Phase.PAUSED),
            (stopping, JobPaused, [], Phase.PAUSING, Phase.PAUSED),
            (pausing, JobPaused, [], Phase.PAUSING, Phase.PAUSED),
            (cancelling, JobPaused, [], Phase.CANCELLING, Phase.CANCELLED),
            (paused, JobPaused, [], Phase.PAUSED, Phase.PAUSED),
            (pending, JobCancelled, [], Phase.CANCELLED, Phase.CANCELLED),
            (starting, JobCancelled, [StopJob("x", 1, CANCELLED)], Phase.CANCELLING, Phase.CANCELLED),
            (running, JobCancelled, [StopJob("x", 1, CANCELLED)], Phase.CANCELLING, Phase.CANCELLED),
            (resizing, JobCancelled, [StopJob("x", 2, CANCELLED)], Phase.CANCELLING, Phase.CANCELLED),
            (stopping, JobCancelled, [StopJob("x", 2, CANCELLED)], Phase.CANCELLING, Phase.CANCELLED),
            (pausing, JobCancelled, [StopJob("x", 1, CANCELLED)], Phase.CANCELLING, Phase.CANCELLED),
            (cancelling, JobCancelled, [], Phase.CANCELLING, Phase.CANCELLED),
            (paused, JobCancelled, [], Phase.CANCELLED, Phase.CANCELLED),
            (pending, JobResumed, [], Phase.PENDING, Phase.PENDING),
            (running, JobResumed, [], Phase.RUNNING, Phase.PENDING),
            (resizing, JobResumed, [], Phase.RESIZING, Phase.PENDING),
            (pausing, JobResumed, [], Phase.STOPPING, Phase.PENDING),
            (cancelling, JobResumed, [], Phase.CANCELLING, Phase.CANCELLED),
            (paused, JobResumed, [], Phase.PENDING, Phase.PENDING),
        ],
    )
    def test_people_may_ask_at_any_time(self, prepare, request_, actions, phase, end):
        script = prepare(Script())
        assert script.tell(request_("x")) == actions
        assert script.phase() is phase
        if phase.holds_gpus:
            assert script.tell(JobStopped("x", script.job().issued_generation)) == []
        assert script.phase() is end
        assert script.state.occupancy.used == {}

    @pytest.mark.parametrize("request_", [JobPaused, JobCancelled, JobResumed, lambda job: JobRescaled(job, 1, 2)])
    def test_asking_about_nobody_or_about_an_ended_job_changes_nothing(self, request_):
        script = running(Script())
        script.tell(JobFinished("x", 1))
        assert script.tell(request_("x"), request_("nobody")) == []
        assert script.phase() is Phase.SUCCEEDED

    def test_a_job_paused_while_it_is_resized_holds_all_of_it_until_it_has_left(self):
        script = Script("xy").run(x=gpus(a=4))
        script.plan(x=gpus(b=4))
        script.tell(JobPaused("x"))
        assert script.plan(y=gpus(b=4)) == []
        assert script.tell(ReplicasReady("x", 2)) == []
        assert script.job().occupied == gpus(b=4)
        assert script.tell(JobStopped("x", 2)) == [StartJob("y", 1, gpus(b=4))]

    def test_a_rescale_changes_bounds_only(self):
        script = running(Script())
        assert script.tell(JobRescaled("x", 3, 8)) == []
        assert (script.job().spec.gpu_bounds, script.phase()) == ((3, 8), Phase.RUNNING)


class TestEnds:
    def test_a_failure_is_tried_again_until_the_retries_are_used_up(self):
        script = Script(retries=1).run(x=gpus(a=1))
        assert script.tell(JobFailed("x", 1, "out of memory", 137)) == []
        assert (script.phase(), script.job().num_failures) == (Phase.PENDING, 1)
        script.run(x=gpus(a=1)).at(9.0).tell(JobFailed("x", 2, "again", 1))
        job = script.job()
        assert (job.phase, job.finished_at_s, job.exit_reason, job.exit_code) == (Phase.FAILED, 9.0, "again", 1)

    @pytest.mark.parametrize("prepare", [starting, running, resizing, stopping, pausing, cancelling])
    def test_a_job_may_end_well_in_any_phase(self, prepare):
        script = prepare(Script())
        script.tell(JobFinished("x", script.job().generation))
        assert (script.phase(), script.state.jobs, script.state.target) == (Phase.SUCCEEDED, {}, {})
        assert script.state.num_in_flight == 0

    def test_a_finish_counts_from_a_job_whose_node_was_thought_lost_but_not_once_it_runs_elsewhere(self):
        script = running(Script())
        script.tell(NodeLost("a"))
        again = Scheduler(MemoryLog(script.scheduler.log.records()))
        again.handle(JobFinished("x", 1), 0.0)
        assert again.state.job("x").phase is Phase.SUCCEEDED
        script.run(x=gpus(b=1)).tell(JobFinished("x", 1))
        assert script.phase() is Phase.RUNNING


RETRYING = SchedulerOptions(retry_pause_s=10.0, max_retry_pause_s=25.0)
FAILING = replace(RETRYING, abandoned_starts_fail=True)


class TestRetries:
    def fails_at(self, script, now):
        script.at(now).run(x=gpus(a=1))
        script.tell(JobFailed("x", script.job().generation, "out of memory", 1))
        return script.job().retry_at_s

    def test_the_pause_doubles_with_every_failure_up_to_the_longest(self):
        script = Script(options=RETRYING, retries=9)
        assert [self.fails_at(script, now) for now in (0.0, 100.0, 200.0, 300.0)] == [10.0, 120.0, 225.0, 325.0]
        assert RETRYING.retry_pause_after_s(10**9) == 25.0

    def test_a_job_that_waits_for_its_next_try_is_in_no_snapshot_and_given_nothing(self):
        script = Script("xy", options=RETRYING)
        script.run(x=gpus(a=1))
        script.tell(RoundDue(2), JobFailed("x", 1, "out of memory"))
        assert script.tell(PlanMade(2, Plan.of({"x": gpus(a=1)}))) == [], "a plan made before it failed"
        assert script.at(9.9).plan(x=gpus(a=1)) == []
        assert list(script.state.snapshot().jobs) == ["y"]
        (asked,) = script.at(10.0).tell(RoundDue(4))
        assert list(asked.snapshot.jobs) == ["x", "y"]
        assert script.tell(PlanMade(4, Plan.of({"x": gpus(a=1)}))) == [StartJob("x", 2, gpus(a=1))]
        assert script.job().retry_at_s is None

    def test_nobody_waits_for_a_next_try_once_it_has_ended(self):
        script = Script(options=RETRYING, retries=1)
        self.fails_at(script, 0.0)
        assert self.fails_at(script, 50.0) is None
        assert script.phase() is Phase.FAILED
        script = Script(options=RETRYING)
        self.fails_at(script, 0.0)
        script.tell(JobCancelled("x"))
        assert (script.phase(), script.job().retry_at_s) == (Phase.CANCELLED, None)

    def test_without_a_pause_the_next_try_is_due_at_once(self):
        script = Script()
        assert self.fails_at(script, 0.0) is None
        assert "x" in script.state.snapshot().jobs

    def test_a_start_that_is_given_up_again_and_again_ends_as_a_failure_if_that_is_wanted(self):
        script = Script(options=FAILING, retries=1)
        script.plan(x=gpus(a=2))
        assert script.tell(GenerationAbandoned("x", 1, "no word from replica 0")) == []
        job = script.job()
        assert (job.phase, job.num_failures, job.exit_reason, job.retry_at_s) == (
            Phase.PENDING, 1, "no word from replica 0", 10.0,
        )  # fmt: skip
        script.at(10.0).plan(x=gpus(a=2))
        script.tell(GenerationAbandoned("x", 2, "still none"))
        assert (script.phase(), script.job().exit_reason, script.job().exit_code) == (Phase.FAILED, "still none", None)
        assert script.state.occupancy.used == {}

    def test_a_resize_that_is_given_up_is_no_failure(self):
        script = resizing(Script(options=FAILING))
        script.tell(GenerationAbandoned("x", script.job().issued_generation))
        assert (script.phase(), script.job().num_failures) == (Phase.RUNNING, 0)

    def test_starts_that_are_given_up_are_no_failures_otherwise(self):
        script = Script(options=RETRYING, retries=0)
        script.plan(x=gpus(a=2))
        script.tell(GenerationAbandoned("x", 1))
        assert (script.phase(), script.job().num_failures, script.job().retry_at_s) == (Phase.PENDING, 0, None)


class TestNodes:
    def test_a_job_whose_nodes_are_all_gone_waits_at_once_and_this_is_no_failure(self):
        script = running(Script())
        assert script.tell(NodeLost("a")) == []
        assert (script.phase(), script.job().num_failures, script.state.occupancy.used) == (Phase.PENDING, 0, {})

    def test_a_job_with_a_node_left_waits_for_word_from_the_survivors(self):
        script = Script("xy").run(x=gpus(a=2, b=2))
        script.tell(NodeLost("b"))
        assert (script.phase(), script.job().allocation) == (Phase.RUNNING, gpus(a=2, b=2))
        assert script.tell(ReplicaLost("x", 1, 1, gpus(a=2))) == []
        assert (script.phase(), script.job().allocation, script.job().membership) == (Phase.RUNNING, gpus(a=2), 1)
        script.tell(ReplicaLost("x", 1, 1, gpus(a=1)))
        assert script.job().allocation == gpus(a=2), "a membership is heard once"

    def test_replicas_that_come_back_with_a_lost_node_must_go(self):
        script = running(Script())
        script.tell(NodeLost("a"), NodeJoined(Node("a", 4)))
        gone = [StopJob("x", 1, SUPERSEDED)]
        assert script.tell(JobReported("x", 1)) == gone
        assert script.tell(ReplicaLost("x", 1, 1, gpus(a=1))) == gone
        script.run(x=gpus(b=1))
        assert script.tell(ReplicasReady("x", 1)) == gone
        assert script.tell(JobStopped("x", 1)) == []
        assert script.phase() is Phase.RUNNING

    def test_generations_never_given_out_and_unknown_jobs_are_not_answered(self):
        assert Script().tell(JobReported("x", 1), JobReported("nobody", 1)) == []

    def test_a_drained_node_keeps_its_jobs_and_takes_no_others(self):
        script = Script("xyz").run(x=gpus(a=2), z=gpus(b=4))
        assert script.plan(x=gpus(a=2), y=gpus(b=4)) == [StopJob("z", 1, PREEMPTED)]
        assert script.tell(NodeDrained("b"), JobStopped("z", 1)) == []
        script.tell(NodeDrained("a"))
        assert (script.phase("x"), script.phase("y")) == (Phase.RUNNING, Phase.PENDING)
        assert script.plan(x=gpus(a=1)) == []
        script.tell(NodeJoined(Node("a", 4)))
        assert script.plan(x=gpus(a=3)) == [ResizeJob("x", 2, gpus(a=3))]

    def test_a_stopping_job_whose_next_node_is_lost_waits_for_the_next_round(self):
        script = Script(in_place=False).run(x=gpus(a=2))
        script.plan(x=gpus(b=2))
        script.tell(NodeLost("b"))
        assert script.tell(JobStopped("x", 1)) == []
        assert script.phase() is Phase.PENDING

    @pytest.mark.parametrize(
        ("lost", "late"),
        [("b", ReplicasReady("x", 2)), ("a", GenerationAbandoned("x", 2))],
        ids=["switched to nodes that are gone", "fell back to nodes that are gone"],
    )
    def test_nobody_is_waited_for_on_nodes_that_are_gone(self, lost, late):
        script = resizing(Script())
        script.tell(NodeLost(lost))
        assert script.phase() is Phase.RESIZING
        script.tell(late)
        assert (script.phase(), script.state.occupancy.used) == (Phase.PENDING, {})

    def test_survivors_whose_nodes_are_gone_as_well_are_not_waited_for(self):
        script = Script().run(x=gpus(a=2, b=2))
        script.tell(NodeLost("a"), ReplicaLost("x", 1, 1, gpus(a=2)))
        assert script.phase() is Phase.PENDING

    def test_a_loss_that_overtakes_the_switch_is_not_forgotten(self):
        script = Script().run(x=gpus(a=2))
        script.plan(x=gpus(a=2, b=2))
        script.tell(ReplicaLost("x", 2, 1, gpus(a=2, b=1)), ReplicasReady("x", 2))
        assert (script.phase(), script.job().allocation) == (Phase.RUNNING, gpus(a=2, b=1))

    def test_news_of_nodes_that_nobody_knows_change_nothing(self):
        script = running(Script())
        before = script.state.cluster
        assert script.tell(NodeLost("z"), NodeDrained("z")) == []
        assert script.state.cluster == before


class TestTimeAndLog:
    def test_time_that_runs_backwards_stands_still(self):
        script = Script().at(100.0).run(x=gpus(a=2))
        script.at(50.0).tell(JobFinished("x", 1))
        assert (script.job().finished_at_s, script.job().attained_gpu_s) == (100.0, 0.0)
        assert [record.time_s for record in script.scheduler.log.records()][-1] == 100.0

    @pytest.mark.parametrize(
        ("prepare", "owed"),
        [
            (pending, []),
            (starting, [StartJob("x", 1, gpus(a=2))]),
            (running, []),
            (resizing, [ResizeJob("x", 2, gpus(b=2))]),
            (stopping, [StopJob("x", 2, PREEMPTED)]),
            (pausing, [StopJob("x", 1, PAUSED)]),
            (cancelling, [StopJob("x", 1, CANCELLED)]),
            (paused, []),
        ],
    )
    def test_after_a_crash_the_world_is_told_again_what_it_has_not_answered(self, prepare, owed):
        script = prepare(Script())
        back = Scheduler(MemoryLog(script.scheduler.log.records()))
        assert back.state == script.state
        assert back.outstanding() == owed

    def test_it_goes_on_from_what_was_saved(self):
        script = resizing(Script("xy"))
        script.scheduler.save()
        script.tell(JobCancelled("y"))
        back = Scheduler(MemoryLog(script.scheduler.log.records(), script.scheduler.log.latest()))
        assert back.state == script.state
        assert back.outstanding() == script.scheduler.outstanding()

    def test_what_was_saved_tells_the_same_story_of_an_illegal_step(self):
        state = SchedulerState.restored(running(Script()).state.saved())
        with pytest.raises(IllegalTransition, match="0 s: submitted → pending"):
            state.move(state.jobs["x"], Trigger.START)

    def test_states_with_other_histories_differ(self):
        assert Script().state != running(Script()).state
        assert Script().state != "a state"
