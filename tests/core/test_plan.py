import pytest
from hypothesis import given, settings

from pollux.core import (
    Allocation,
    Cluster,
    FrozenMap,
    Job,
    JobRescaled,
    JobSpec,
    JobSubmitted,
    MakePlan,
    Node,
    NodeJoined,
    NodeLost,
    Oracle,
    Plan,
    PlanMade,
    ReplicaLost,
    ReplicasReady,
    ResizeJob,
    RoundDue,
    Shape,
    Snapshot,
    StartJob,
    StopJob,
)
from pollux.errors import InfeasiblePlan, InvalidSpec

from .strategies import plans, snapshots

CLUSTER = Cluster.of(Node("a", 4), Node("b", 4), Node("c", 4, schedulable=False))
SNAPSHOT = Snapshot(0.0, 7, CLUSTER, FrozenMap({name: Job(JobSpec(name), 0.0) for name in ("x", "y")}))


def plan(**allocations):
    return Plan.of({job: Allocation.of(gpus) for job, gpus in allocations.items()})


def test_a_plan_that_fits_passes():
    plan(x={"a": 4}, y={"b": 4}).check(SNAPSHOT)
    plan(x={"a": 2, "b": 1}, y={"a": 2}).check(SNAPSHOT)
    Plan().check(SNAPSHOT)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(z={"a": 1}), "job 'z' is not in the snapshot"),
        (plan(x={"q": 1}), "node 'q' is not in the cluster"),
        (plan(x={"c": 1}), "node 'c' is not schedulable"),
        (plan(x={"a": 5}), "node 'a' has 4 GPUs, 5 were given out"),
        (plan(x={"a": 3}, y={"a": 2}), "node 'a' has 4 GPUs, 5 were given out"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(bad, message):
    with pytest.raises(InfeasiblePlan, match=message):
        bad.check(SNAPSHOT)


def test_all_violations_are_listed_at_once():
    with pytest.raises(InfeasiblePlan) as caught:
        plan(x={"a": 9, "q": 1}, z={"c": 5}).check(SNAPSHOT)
    for part in ("round 7", "'z'", "'q'", "not schedulable", "9 were given out", "5 were given out", "capacity"):
        assert part in str(caught.value)


@settings(max_examples=30)
@given(plans, snapshots())
def test_check_raises_exactly_when_there_are_violations(plan, snapshot):
    if plan.violations(snapshot):
        with pytest.raises(InfeasiblePlan):
            plan.check(snapshot)
    else:
        plan.check(snapshot)
        assert plan.allocations.keys() <= snapshot.jobs.keys()
        assert sum(a.num_gpus for a in plan.allocations.values()) <= snapshot.cluster.num_gpus


def test_a_plan_that_splits_a_job_of_one_node_is_refused():
    jobs = FrozenMap({name: Job(JobSpec(name, single_node=name == "x"), 0.0) for name in ("x", "y")})
    moment = Snapshot(0.0, 7, CLUSTER, jobs)
    plan(x={"a": 4}, y={"b": 1}).check(moment)
    assert plan(x={"a": 1, "b": 1}, y={"a": 1, "b": 1}).violations(moment) == (
        "job 'x' must be on one node, it was given a, b",
    )


def test_jobs_that_hold_nothing_are_left_out():
    assert Plan.of({"x": Allocation(), "y": Allocation.of({"a": 1})}) == plan(y={"a": 1})
    assert plan(y={"a": 1})["x"] == Allocation()
    assert plan(y={"a": 1})["y"] == Allocation.of({"a": 1})
    with pytest.raises(InvalidSpec, match=r"Plan\.of"):
        Plan(FrozenMap({"x": Allocation()}))


def test_a_plan_of_allocations_that_hold_something_is_like_any_other():
    allocations = FrozenMap({"a": Allocation.of({"n0": 1}), "b": Allocation.of({"n0": 2})})
    assert Plan.of_holding(allocations) == Plan(allocations)


def test_a_snapshot_keys_jobs_by_their_id():
    with pytest.raises(InvalidSpec, match="differs from its key"):
        Snapshot(0.0, 0, CLUSTER, FrozenMap({"x": Job(JobSpec("y"), 0.0)}))
    with pytest.raises(InvalidSpec, match="finite"):
        Snapshot(float("nan"), 0, CLUSTER)
    with pytest.raises(InvalidSpec, match="must be a Cluster"):
        Snapshot(0.0, 0, None)


def test_an_impossible_truth_is_refused():
    with pytest.raises(InvalidSpec, match="remaining_s"):
        Oracle(remaining_s=-1.0)
    with pytest.raises(InvalidSpec, match="iteration_time_s"):
        Oracle(iteration_time_s=FrozenMap({Shape(1): float("nan")}))


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: ReplicasReady("", 1), "job"),
        (lambda: JobSubmitted("x"), "spec"),
        (lambda: NodeJoined("a"), "node"),
        (lambda: NodeLost(""), "node"),
        (lambda: RoundDue(-1), "round"),
        (lambda: PlanMade(1, Plan(), cpu_ms=float("nan")), "cpu_ms"),
        (lambda: PlanMade(1, Plan(), stats=FrozenMap({"fitness": float("inf")})), 'stats["fitness"]'),
        (lambda: MakePlan(1, SNAPSHOT, -1), "seed"),
        (lambda: StopJob("x", 1, "preempted"), "reason"),
        (lambda: ReplicasReady("x", 0), "generation"),
        (lambda: ReplicaLost("x", 1, 0, Allocation.of({"a": 1})), "membership"),
        (lambda: ReplicaLost("x", 1, 1, Allocation()), "survivors"),
        (lambda: JobRescaled("x", 0, None), "min_gpus"),
        (lambda: JobRescaled("x", 3, 2), "max_gpus"),
        (lambda: StartJob("x", 1, Allocation()), "allocation"),
        (lambda: ResizeJob("x", 1, Allocation()), "allocation"),
        (lambda: StartJob("x", 0, Allocation.of({"a": 1})), "generation"),
    ],
)
def test_impossible_events_and_actions_are_refused(build, field):
    with pytest.raises(InvalidSpec) as caught:
        build()
    assert caught.value.field == field


def test_a_cause_is_given_by_name_and_does_not_disturb_matching():
    match ReplicasReady("x", 3, cause="round 7"):
        case ReplicasReady(job, generation):
            assert (job, generation) == ("x", 3)
    assert JobSubmitted(JobSpec("x")).job == "x"
