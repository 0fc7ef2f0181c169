import math
import pickle
from dataclasses import FrozenInstanceError, replace
from struct import unpack

import pytest
from hypothesis import given, settings

from pollux.core import Allocation, BatchLimits, FrozenMap, Job, JobSpec, Phase, Progress, ThroughputFit
from pollux.errors import InvalidSpec

from .strategies import jobs, specs

HELD = Allocation.of({"a": 2})
HOLDING = {"allocation": HELD, "held_since_s": 5.0}
SPEC = JobSpec("j")


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"id": ""}, "id", "must not be empty"),
        ({"name": None}, "name", "must be text"),
        ({"command": "python train.py"}, "command", "tuple of texts"),
        ({"command": ("", "x")}, "command[0]", "must not be empty"),
        ({"command": ("python", 3)}, "command[1]", "must be text"),
        ({"env": {"A": "1"}}, "env", "FrozenMap"),
        ({"env": FrozenMap({"A": 1})}, 'env["A"]', "must be text"),
        ({"application": ""}, "application", "must not be empty"),
        ({"min_gpus": 0}, "min_gpus", "at least 1"),
        ({"min_gpus": 4, "max_gpus": 2}, "max_gpus", "less than min_gpus = 4"),
        ({"max_gpus": 2.0}, "max_gpus", "whole number"),
        ({"rigid": True}, "requested_gpus", "rigid job needs a size"),
        ({"preemptible": 1}, "preemptible", "true or false"),
        ({"limits": (1, 2, 3, 4)}, "limits", "BatchLimits"),
        ({"single_node": "yes"}, "single_node", "true or false"),
        ({"batch": None}, "batch", "BatchWishes"),
        ({"requested_batch_size": 0}, "requested_batch_size", "at least 1"),
        ({"priority": 1.5}, "priority", "whole number"),
        ({"priority": True}, "priority", "whole number"),
        ({"deadline_s": 0}, "deadline_s", "greater than 0"),
        ({"deadline_s": float("inf")}, "deadline_s", "finite"),
        ({"retries": -1}, "retries", "at least 0"),
    ],
)
def test_a_bad_specification_is_refused_with_field_value_and_fix(changes, field, problem):
    with pytest.raises(InvalidSpec, match=problem) as caught:
        JobSpec(**{"id": "j", **changes})
    assert caught.value.field == field
    assert caught.value.fix


def test_a_rigid_job_has_one_size_and_others_a_range():
    assert JobSpec("j", requested_gpus=4, rigid=True).gpu_bounds == (4, 4)
    assert JobSpec("j", requested_gpus=4, min_gpus=2).gpu_bounds == (2, None)
    assert JobSpec("j", fixed_batch=True, limits=BatchLimits(8, 8, 1, 8)).gpu_bounds == (1, None)


def test_only_a_job_of_a_single_node_minds_how_many_it_is_on():
    assert all(JobSpec("j").can_be_on(count) for count in (0, 1, 2))
    assert [JobSpec("j", single_node=True).can_be_on(count) for count in (0, 1, 2)] == [True, True, False]


def test_a_batch_size_may_be_kept_before_anybody_knows_it():
    assert JobSpec("j", fixed_batch=True).requested_batch_size is None


def test_a_job_that_failed_may_be_given_gpus_again_once_its_next_try_is_due():
    assert Job(SPEC, 0.0).may_be_given_gpus_at(0.0)
    failed = Job(SPEC, 0.0, retry_at_s=5.0)
    assert [failed.may_be_given_gpus_at(now_s) for now_s in (4.9, 5.0)] == [False, True]
    assert not Job(SPEC, 0.0, phase=Phase.PAUSED).may_be_given_gpus_at(9.0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"phase": "running"}, "phase"),
        ({"submitted_at_s": float("nan")}, "submitted_at_s"),
        ({"generation": 2, "issued_generation": 1}, "issued_generation"),
        ({"membership": -1}, "membership"),
        ({"attained_gpu_s": -1.0}, "attained_gpu_s"),
        ({"allocation": HELD}, "allocation"),
        ({"phase": Phase.RUNNING}, "allocation"),
        ({"phase": Phase.RESIZING, **HOLDING}, "next_allocation"),
        ({"phase": Phase.RUNNING, **HOLDING, "next_allocation": HELD}, "next_allocation"),
        ({"phase": Phase.RUNNING, "allocation": HELD}, "held_since_s"),
        ({"phase": Phase.RUNNING, **HOLDING, "held_since_s": float("inf")}, "held_since_s"),
        ({"held_since_s": 1.0}, "held_since_s"),
        ({"sequence": -1}, "sequence"),
        ({"sequence": 1.0}, "sequence"),
        ({"next_allocation": HELD}, "next_allocation"),
        ({"phase": Phase.FAILED}, "finished_at_s"),
        ({"finished_at_s": 3.0}, "finished_at_s"),
        ({"retry_at_s": float("nan")}, "retry_at_s"),
    ],
)
def test_a_job_that_contradicts_itself_is_refused(changes, field):
    with pytest.raises(InvalidSpec) as caught:
        Job(**{"spec": SPEC, "submitted_at_s": 0.0, **changes})
    assert caught.value.field == field


def test_age_counts_from_submission():
    job = Job(SPEC, 10.0)
    assert job.age_s(25.0) == 15.0
    assert job.age_s(5.0) == 0.0
    assert job.id == "j"


def job_in(phase, generation=0, issued_generation=0, **changes):
    holding = HOLDING if phase.holds_gpus else {}
    fields = {"generation": generation, "issued_generation": issued_generation, **holding, **changes}
    return Job(SPEC, 0.0, phase=phase, **fields)


def test_a_resizing_job_occupies_old_and_new_gpus():
    target = Allocation.of({"a": 1, "b": 3})
    job = job_in(Phase.RESIZING, 4, 5, next_allocation=target)
    assert job.occupied == Allocation.of({"a": 2, "b": 3})
    assert job_in(Phase.RUNNING, 4, 4).occupied == HELD
    assert not job_in(Phase.PENDING).occupied


def test_a_job_is_assigned_what_it_will_hold_once_its_resize_is_done():
    target = Allocation.of({"a": 1, "b": 3})
    assert job_in(Phase.RESIZING, 4, 5, next_allocation=target).assigned == target
    assert job_in(Phase.STOPPING, 4, 5, next_allocation=target).assigned == target
    assert job_in(Phase.RUNNING, 4, 4).assigned == HELD
    assert not job_in(Phase.PENDING).assigned


def test_gpu_seconds_grow_with_every_gpu_held():
    job = job_in(Phase.RUNNING, 1, 1, attained_gpu_s=100.0)
    assert job.attained_gpu_s_at(15.0) == 100.0 + 10.0 * 2
    assert job.attained_gpu_s_at(5.0) == 100.0


def test_gpu_seconds_never_fall_when_the_clock_does():
    assert job_in(Phase.RUNNING, 1, 1, attained_gpu_s=100.0).attained_gpu_s_at(0.0) == 100.0


def test_gpu_seconds_stand_still_while_nothing_is_held():
    assert job_in(Phase.PENDING, 1, 1, attained_gpu_s=100.0).attained_gpu_s_at(1e6) == 100.0


def test_old_and_new_gpus_of_a_resize_under_way_are_counted():
    job = job_in(Phase.RESIZING, 1, 2, next_allocation=Allocation.of({"a": 2, "b": 8}))
    assert job.attained_gpu_s_at(15.0) == 10.0 * (2 + 8)


def test_only_generations_that_live_are_heeded():
    running = job_in(Phase.RUNNING, 4, 6)
    assert [g for g in range(9) if running.expects(g)] == [4]
    resizing = replace(running, phase=Phase.RESIZING, next_allocation=HELD)
    assert [g for g in range(9) if resizing.expects(g)] == [4, 6]
    waiting = job_in(Phase.PENDING, 4, 6)
    assert not any(waiting.expects(g) for g in range(9))


def test_only_the_newest_generation_can_become_ready():
    starting = job_in(Phase.STARTING, 4, 4)
    assert [g for g in range(9) if starting.awaits(g)] == [4]
    running = replace(starting, phase=Phase.RUNNING)
    assert not any(running.awaits(g) for g in range(9))
    resizing = replace(running, phase=Phase.RESIZING, issued_generation=6, next_allocation=HELD)
    assert [g for g in range(9) if resizing.awaits(g)] == [6]


def test_a_finish_counts_even_if_the_job_was_given_up():
    waiting = job_in(Phase.PENDING, 4, 4)
    assert [g for g in range(9) if waiting.may_have_finished(g)] == [4]
    assert not Job(SPEC, 0.0).may_have_finished(0)
    ended = job_in(Phase.CANCELLED, 4, 4, finished_at_s=1.0)
    assert not ended.may_have_finished(4)


@settings(max_examples=30)
@given(jobs())
def test_jobs_hold_gpus_exactly_in_the_phases_that_say_so(job):
    assert bool(job.occupied) == job.phase.holds_gpus
    assert bool(job.assigned) == job.phase.holds_gpus
    assert (job.held_since_s is not None) == job.phase.holds_gpus


@settings(max_examples=30)
@given(specs())
def test_specifications_are_frozen_and_hashable(spec):
    assert hash(spec) == hash(replace(spec))
    with pytest.raises(FrozenInstanceError):
        spec.team = "other"


@settings(max_examples=10)
@given(jobs())
def test_a_changed_job_is_a_replaced_one(job):
    changes = {"num_failures": 3, "exit_reason": "out of memory"}
    assert job.with_changes(**changes) == replace(job, **changes)
    assert hash(job.with_changes(**changes)) == hash(replace(job, **changes))
    with pytest.raises(InvalidSpec, match="membership"):
        job.with_changes(membership=-1)


@settings(max_examples=10)
@given(jobs(), jobs())
def test_what_is_believed_of_a_job_changes_nothing_else(job, other):
    believed = job.believed(other.model, other.profile)
    assert believed == replace(job, model=other.model, profile=other.profile)
    assert hash(believed) == hash(replace(job, model=other.model, profile=other.profile))


@settings(max_examples=10)
@given(jobs())
def test_what_a_report_says_again_is_the_same_object_as_before(job):
    if job.model is None:
        return
    limits, fits = job.model.limits, job.model.throughput
    again = replace(job.model, limits=replace(limits), throughput=FrozenMap(dict(fits)), progress=Progress(1e6))
    believed = job.believed(again, job.profile)
    assert believed.model == again
    assert believed.model.limits is limits
    assert believed.model.throughput is fits
    other = FrozenMap({"another type": ThroughputFit("paper", FrozenMap({"gamma": 1.0}))})
    believed = job.believed(replace(again, throughput=other), job.profile)
    assert believed.model.limits is limits
    assert believed.model.throughput is other
    assert job.believed(job.model, job.profile).model is job.model
    assert job.believed(None, job.profile).model is None


@settings(max_examples=30)
@given(jobs(), jobs())
def test_readings_say_what_the_fields_say_however_the_job_was_made(job, other):
    model, profile = other.model, other.profile
    made = (
        job,
        job.believed(model, profile),
        job.believed(model, profile).believed(model, profile),
        job.with_changes(model=model),
        pickle.loads(pickle.dumps(job)),
    )
    for each in made:
        basis, assigned, numbers = each.reading
        model = each.model
        gradient, progress = (None, None) if model is None else (model.gradient, model.progress)
        assert basis == (each.spec, *((None, FrozenMap()) if model is None else (model.limits, model.throughput)))
        assert assigned is each.assigned
        said = [
            each.sequence,
            each.submitted_at_s,
            each.attained_gpu_s,
            each.held_since_s,
            each.num_reallocations,
            each.first_started_at_s,
            each.occupied.num_gpus,
            *((None, None) if gradient is None else (gradient.sqr, gradient.var)),
            *((None, None) if progress is None else (progress.done, progress.total)),
            None if model is None else model.realloc_delay_s,
        ]
        assert [None if math.isnan(number) else number for number in unpack("12d", numbers)] == said


@settings(max_examples=10)
@given(jobs())
def test_the_basis_of_a_job_is_the_same_object_until_a_part_of_it_is_another(job):
    if job.model is None:
        return
    again = job.believed(replace(job.model, progress=Progress(1e6)), job.profile)
    assert again.reading.basis is job.reading.basis
    other = replace(job.model, throughput=FrozenMap({"another": ThroughputFit("paper", FrozenMap({"gamma": 1.0}))}))
    assert job.believed(other, job.profile).reading.basis.fits is other.throughput
