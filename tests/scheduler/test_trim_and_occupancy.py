from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import Allocation, Cluster, Job, JobSpec, Node, Phase, Plan
from pollux.scheduler.occupancy import Occupancy
from pollux.scheduler.trim import trimmed

NODES = "abcd"
NOW_S = 10.0
allocations = st.dictionaries(st.sampled_from(NODES), st.integers(1, 4), min_size=1).map(Allocation.of)
clusters = st.lists(st.builds(Node, st.sampled_from(NODES), st.integers(1, 6), schedulable=st.booleans()),
                    unique_by=lambda node: node.id).map(lambda nodes: Cluster.of(*nodes))  # fmt: skip


def total(parts):
    used = Counter()
    for part in parts:
        used.update(part.gpus)
    return used


@st.composite
def situations(draw):
    """A plan, and jobs and nodes that need not have anything to do with it; what jobs hold fits on their nodes."""
    cluster = draw(clusters)
    room = Counter(cluster.capacity)
    jobs = {}
    for number in range(draw(st.integers(0, 5))):
        least = draw(st.integers(1, 4))
        spec = JobSpec(
            f"j{number}",
            min_gpus=least,
            max_gpus=draw(st.none() | st.integers(least, 6)),
            requested_gpus=least,
            rigid=draw(st.booleans()),
            single_node=draw(st.sampled_from([False, False, True])),
        )
        held = draw(allocations)
        holds = draw(st.booleans()) and all(count <= room.get(node, 4) for node, count in held.gpus.items())
        if holds:
            room.subtract({node: count for node, count in held.gpus.items() if node in room})
            phase = draw(st.sampled_from([Phase.RUNNING, Phase.STARTING, Phase.STOPPING, Phase.PAUSING]))
            jobs[spec.id] = Job(spec, 0.0, number, phase, 1, 1, allocation=held, held_since_s=0.0)
        else:
            retry_at_s = draw(st.sampled_from([None, None, NOW_S, NOW_S + 0.1]))
            phase = draw(st.sampled_from([Phase.PENDING, Phase.PAUSED]))
            jobs[spec.id] = Job(spec, 0.0, number, phase, retry_at_s=retry_at_s)
    names = st.sampled_from([*jobs, "nobody"])
    return Plan.of(draw(st.dictionaries(names, allocations))), jobs, cluster


@settings(max_examples=100)
@given(situations())
def test_what_is_left_of_any_plan_can_be_held(situation):
    plan, jobs, cluster = situation
    target = trimmed(plan, jobs, cluster, NOW_S)
    for node, count in total(target.values()).items():
        if node in cluster.capacity:
            assert count <= cluster.capacity[node]
    for job_id, wanted in target.items():
        job = jobs[job_id]
        least, most = job.spec.gpu_bounds
        assert job.phase.may_be_given_gpus
        assert job.retry_at_s in (None, NOW_S)
        assert wanted == job.assigned or len(wanted.gpus) == 1 or not job.spec.single_node
        assert job_id in plan.allocations
        assert all(count <= plan[job_id].gpus.get(node, 0) for node, count in wanted.gpus.items()) or (
            wanted == job.assigned
        )
        assert wanted == job.assigned or (least <= wanted.num_gpus and (most is None or wanted.num_gpus <= most))
        assert wanted == job.assigned or all(node in cluster.capacity for node in wanted.gpus)


@settings(max_examples=100)
@given(situations())
def test_a_plan_that_can_be_carried_out_is_left_as_it_is(situation):
    plan, jobs, cluster = situation
    waiting = {name: job for name, job in jobs.items() if not job.phase.holds_gpus}
    once = trimmed(plan, waiting, cluster, NOW_S)
    assert trimmed(Plan.of(once), waiting, cluster, NOW_S) == once


@settings(max_examples=100)
@given(clusters, st.lists(st.tuples(allocations, st.booleans()), max_size=12))
def test_giving_out_only_where_there_is_room_never_gives_a_gpu_twice(cluster, requests):
    occupancy = Occupancy()
    occupancy.follow(cluster)
    given_out = []
    for wanted, takes_back in requests:
        if occupancy.has_room(wanted, Allocation()):
            occupancy.add(wanted)
            given_out.append(wanted)
        if takes_back and given_out:
            occupancy.remove(given_out.pop(0))
        assert occupancy.used == total(given_out)
        assert all(count <= cluster.capacity[node] for node, count in occupancy.used.items())


@settings(max_examples=100)
@given(clusters, allocations, allocations)
def test_a_job_has_room_for_what_it_holds_and_for_less(cluster, held, other):
    occupancy = Occupancy()
    occupancy.follow(cluster)
    occupancy.add(held)
    assert occupancy.has_room(held, held)
    less = Allocation.of({node: min(count, other.gpus.get(node, 0)) for node, count in held.gpus.items()})
    assert occupancy.has_room(less, held)
    occupancy.remove(held)
    assert occupancy.used == {}
    assert occupancy == _following(cluster)


def _following(cluster):
    occupancy = Occupancy()
    occupancy.follow(cluster)
    return occupancy


def test_a_plan_that_splits_a_job_of_a_single_node_leaves_it_where_it_is_or_waiting():
    spec, cluster = JobSpec("x", single_node=True), Cluster.uniform(2, 4)
    held = Allocation.of({"node-0": 2})
    split = Plan.of({"x": Allocation.of({"node-0": 2, "node-1": 1})})
    runs = Job(spec, 0.0, 0, Phase.RUNNING, 1, 1, allocation=held, held_since_s=0.0)
    assert trimmed(split, {"x": runs}, cluster, NOW_S) == {"x": held}
    assert trimmed(split, {"x": Job(spec, 0.0)}, cluster, NOW_S) == {}
    gone = cluster.without("node-1")
    assert trimmed(split, {"x": Job(spec, 0.0)}, gone, NOW_S) == {"x": held}, "what is left of it is on one node"


def test_a_job_that_was_told_to_stop_does_not_keep_what_it_is_about_to_leave():
    spec, cluster = JobSpec("x", min_gpus=2), Cluster.uniform(2, 4)
    held, too_few = Allocation.of({"node-0": 2}), Plan.of({"x": Allocation.of({"node-1": 1})})
    runs = Job(spec, 0.0, 0, Phase.RUNNING, 1, 1, allocation=held, held_since_s=0.0)
    assert trimmed(too_few, {"x": runs}, cluster, NOW_S) == {"x": held}
    assert trimmed(too_few, {"x": runs.with_changes(phase=Phase.STOPPING)}, cluster, NOW_S) == {}
