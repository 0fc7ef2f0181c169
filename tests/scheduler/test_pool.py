"""The profile registry inside the scheduler: who goes in, once, and what a restart makes of it."""

from __future__ import annotations

import pytest
from tests.core.kinds import LIMITS, model, profile, registry

from pollux.core import (
    Allocation,
    Cluster,
    FrozenMap,
    GradientStats,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobModel,
    JobReported,
    JobSpec,
    JobStopped,
    JobSubmitted,
    KindProfile,
    KindsImported,
    NodeJoined,
    Observation,
    ObservationKey,
    Plan,
    PlanMade,
    Profile,
    ProfileRegistry,
    ReplicasReady,
    RoundDue,
    Shape,
    dumps,
    loads,
)
from pollux.scheduler import MemoryLog, Scheduler
from pollux.scheduler.saving import SavedState


def started(*jobs: JobSpec, log: MemoryLog | None = None) -> Scheduler:
    """Each of the jobs on one GPU of a cluster of eight, at time 10."""
    scheduler = Scheduler(log)
    for node in Cluster.uniform(2, 4):
        scheduler.handle(NodeJoined(node), 0.0)
    for spec in jobs:
        scheduler.handle(JobSubmitted(spec), 0.0)
    scheduler.handle(RoundDue(1), 10.0)
    held = {spec.id: Allocation.of({"node-0": 1}) for spec in jobs}
    scheduler.handle(PlanMade(1, Plan.of(held)), 10.0)
    for spec in jobs:
        scheduler.handle(ReplicasReady(spec.id, 1), 10.0)
    return scheduler


def told(job: str, done: float, noise: float = 3.0, fingerprint: str | None = None) -> JobReported:
    return JobReported(job, 1, profile(1, 2), model(done, fingerprint=fingerprint, noise=noise))


def kinds(scheduler: Scheduler) -> FrozenMap[str, KindProfile]:
    return scheduler.state.pool.kinds


NET = JobSpec("a", application="net", retries=0)


def test_a_job_that_ends_is_pooled_once():
    scheduler = started(NET)
    scheduler.handle(told("a", 50.0), 20.0)
    assert not kinds(scheduler)
    for _ in range(2):
        scheduler.handle(JobFinished("a", 1), 30.0)
    scheduler.handle(told("a", 60.0), 31.0)
    (known,) = kinds(scheduler).values()
    assert (known.num_jobs, known.profile, known.work.mean, known.latest_s) == (1, profile(1, 2), 3200.0, 30.0)


def test_failed_and_cancelled_jobs_leave_what_they_measured_but_no_length():
    scheduler = started(NET, JobSpec("b", application="net"), JobSpec("c", application="net"))
    for job in ("a", "b"):
        scheduler.handle(told(job, 50.0), 20.0)
    scheduler.handle(JobFailed("a", 1, "out of luck"), 30.0)
    scheduler.handle(JobCancelled("b"), 30.0)
    scheduler.handle(JobStopped("b", 1), 31.0)
    scheduler.handle(JobFinished("c", 1), 32.0)  # which has measured nothing
    (known,) = kinds(scheduler).values()
    assert (known.num_jobs, known.work.count, known.latest_s) == (2, 0, 31.0)
    assert known.profile.of_type("t4")[ObservationKey(Shape(1), 16)].sync_count == 2


def test_a_try_that_fails_is_no_end():
    scheduler = started(JobSpec("a", application="net", retries=1))
    scheduler.handle(told("a", 50.0), 20.0)
    scheduler.handle(JobFailed("a", 1, "out of luck"), 30.0)
    assert not kinds(scheduler)


def test_jobs_are_told_apart_by_fingerprints_where_nobody_says_what_they_are():
    scheduler = started(JobSpec("a"), JobSpec("b"), JobSpec("c"), JobSpec("d"))
    for job, mark in (("a", "mlp-0"), ("b", "mlp-0"), ("c", "mlp-1"), ("d", None)):
        scheduler.handle(told(job, 50.0, fingerprint=mark), 20.0)
        scheduler.handle(JobFinished(job, 1), 30.0)
    assert {kind: known.num_jobs for kind, known in kinds(scheduler).items()} == {"mlp-0": 2, "mlp-1": 1}


def test_noise_is_kept_by_stage_as_first_reported_from_it():
    scheduler = started(NET)
    for done, noise in ((0.0, 1.0), (1.0, 2.0), (52.0, 8.0), (54.0, 9.0), (0.0, 7.0)):
        scheduler.handle(told("a", done, noise), 20.0)
    scheduler.handle(JobFinished("a", 1), 30.0)
    known = kinds(scheduler)["net"]
    assert list(known.gradients) == [0, 10]
    assert known.gradient_at(0.0, 32) == GradientStats(1.0, 1.0)
    assert known.gradient_at(0.5, 32) == GradientStats(1.0, 8.0)


def test_policies_see_the_registry_and_nothing_else_changes():
    scheduler = started(NET, JobSpec("b"))
    scheduler.handle(told("a", 50.0), 20.0)
    scheduler.handle(JobFinished("a", 1), 30.0)
    (request,) = scheduler.handle(RoundDue(2), 60.0)
    assert request.snapshot.kinds is kinds(scheduler)
    before = kinds(scheduler)["net"]
    scheduler.handle(KindsImported(registry("other").kinds), 61.0)
    assert kinds(scheduler)["net"] is before


def test_imported_kinds_are_added_or_take_the_place_of_all():
    scheduler = started(NET)
    scheduler.handle(told("a", 50.0), 20.0)
    scheduler.handle(JobFinished("a", 1), 30.0)
    assert scheduler.handle(KindsImported(registry("net", "other").kinds), 40.0) == []
    assert {kind: (known.num_jobs, known.latest_s) for kind, known in kinds(scheduler).items()} == {
        "net": (4, 40.0),
        "other": (3, 40.0),
    }
    scheduler.handle(KindsImported(registry("other").kinds, replaces=True), 50.0)
    assert list(kinds(scheduler)) == ["other"]
    scheduler.handle(KindsImported(FrozenMap(), replaces=True), 50.0)
    assert not kinds(scheduler)


def lived(log: MemoryLog | None = None) -> Scheduler:
    scheduler = started(NET, JobSpec("b"), JobSpec("c"), log=log)
    scheduler.handle(told("a", 3.0), 20.0)
    scheduler.handle(told("b", 50.0, fingerprint="mlp-0"), 20.0)
    scheduler.handle(KindsImported(registry().kinds), 25.0)
    scheduler.handle(JobFinished("a", 1), 30.0)
    return scheduler


def test_a_replay_gives_the_same_registry():
    log = MemoryLog()
    scheduler = lived(log)
    assert Scheduler(log).state == scheduler.state
    assert kinds(scheduler)["net"].num_jobs == 4


def test_a_saved_state_goes_on_as_the_other_would_have():
    log = MemoryLog()
    scheduler = lived(log)
    saved = loads(dumps(scheduler.state.saved()), SavedState)
    assert saved == scheduler.state.saved()
    log.save(saved)
    other = Scheduler(log)
    assert other.state == scheduler.state
    for each in (scheduler, other):
        each.state.apply(told("b", 90.0, 9.0, fingerprint="mlp-0"), 40.0)
        each.state.apply(JobFinished("b", 1), 50.0)
    assert other.state == scheduler.state
    assert list(kinds(other)["mlp-0"].gradients) == [10, 18]


def test_a_state_that_was_saved_before_there_was_a_registry_is_read():
    text = dumps(started(NET).state.saved())
    assert '"kinds"' not in text
    assert '"stages"' not in text
    assert not loads(text, SavedState).kinds


@pytest.mark.parametrize("how", ["of a job", "imported"])
def test_sums_that_no_number_holds_change_nothing(how):
    huge = Observation(0.0, 0, 1.5e308, 0.0, 1)
    vast = Profile(FrozenMap({"t4": FrozenMap({ObservationKey(Shape(1), 16): huge})}))
    scheduler = started(NET)
    scheduler.handle(KindsImported(FrozenMap({"net": KindProfile(vast, 1)})), 15.0)
    if how == "imported":
        scheduler.handle(KindsImported(FrozenMap({"net": KindProfile(vast, 1)})), 20.0)
    else:
        scheduler.handle(JobReported("a", 1, vast, JobModel(LIMITS)), 20.0)
        scheduler.handle(JobFinished("a", 1), 30.0)
    assert kinds(scheduler)["net"].num_jobs == 1


def test_an_event_with_a_registry_reads_back_equal():
    event = KindsImported(registry("a", "b").kinds, True, cause="api")
    assert loads(dumps(event)) == event
    assert isinstance(loads(dumps(registry())), ProfileRegistry)
