"""Swaps: jobs that wait for each other's GPUs make room while they train, and are stopped only where nobody can."""

import random
from collections import Counter
from itertools import accumulate, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import (
    Allocation,
    BatchLimits,
    GenerationAbandoned,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobModel,
    JobReported,
    JobRescaled,
    JobSpec,
    JobStopped,
    JobSubmitted,
    MakePlan,
    Node,
    NodeDrained,
    NodeJoined,
    NodeLost,
    Phase,
    Plan,
    PlanMade,
    ReplicaLost,
    ReplicasReady,
    ResizeJob,
    RoundDue,
    StartJob,
    StopJob,
    StopReason,
    codec,
)
from pollux.scheduler import SavedState, Scheduler, SchedulerState
from pollux.scheduler.giving_way import Standstill
from pollux.scheduler.invariants import violations

from .script import Script, gpus
from .world import World

PREEMPTED = StopReason.PREEMPTED


def script_of(*specs, **nodes):
    """A script with jobs of these specifications, and more nodes than `a` and `b`, or other ones."""
    script = Script("")
    script.tell(*(NodeJoined(Node(name, count)) for name, count in nodes.items()))
    script.tell(*(JobSubmitted(spec) for spec in specs))
    return script


def measured(delay_s):
    return JobModel(BatchLimits(1, 1, 1, 1), realloc_delay_s=delay_s)


def answered(script, actions):
    """Everything that is done until all have what they are to have, each answered as it should be before the next."""
    done, due = [], list(actions)
    while due:
        action = due.pop(0)
        done.append(action)
        answer = JobStopped if isinstance(action, StopJob) else ReplicasReady
        due += script.tell(answer(action.job, action.generation))
    assert script.state.unsettled == set()
    return done


def resizes(*steps):
    """Resizes in this order; generations follow from a start and the resizes before."""
    seen = Counter()
    made = []
    for job, allocation in steps:
        seen[job] += 1
        made.append(ResizeJob(job, 1 + seen[job], allocation))
    return made


class TestInPlace:
    def test_two_jobs_exchange_full_nodes_without_a_stop(self):
        script = Script("xy").run(x=gpus(a=4), y=gpus(b=4))
        done = answered(script, script.plan(x=gpus(b=4), y=gpus(a=4)))
        assert done == resizes(("y", gpus(b=1)), ("x", gpus(b=3)), ("y", gpus(a=4)), ("x", gpus(b=4)))

    def test_a_job_gives_up_only_what_others_lack(self):
        script = Script("xyz").run(x=gpus(a=4), y=gpus(b=2), z=gpus(b=2))
        script.tell(JobReported("x", 1, model=measured(1.0)), JobReported("y", 1, model=measured(9.0)))
        done = answered(script, script.plan(x=gpus(b=2), y=gpus(a=1), z=gpus(b=2)))
        assert done == resizes(("x", gpus(a=3)), ("y", gpus(a=1)), ("x", gpus(b=2)))

    def test_what_it_holds_of_its_target_stays(self):
        script = Script("xy").run(x=gpus(a=4), y=gpus(b=4))
        done = answered(script, script.plan(x=gpus(a=2, b=2), y=gpus(a=2, b=2)))
        assert done == resizes(("y", gpus(b=2)), ("x", gpus(a=2, b=2)), ("y", gpus(a=2, b=2)))

    def test_three_jobs_in_a_ring(self):
        script = script_of(*map(JobSpec, "xyz"), c=4).run(x=gpus(a=4), y=gpus(b=4), z=gpus(c=4))
        done = answered(script, script.plan(x=gpus(b=4), y=gpus(c=4), z=gpus(a=4)))
        assert done == resizes(
            ("z", gpus(c=1)),
            ("y", gpus(c=3)),
            ("x", gpus(b=4)),
            ("z", gpus(a=4)),
            ("y", gpus(c=4)),
        )

    def test_a_job_at_its_bound_takes_what_is_free_of_its_target_instead(self):
        x, y = JobSpec("x", min_gpus=3), JobSpec("y", min_gpus=3)
        script = script_of(x, y).run(x=gpus(a=4), y=gpus(b=4))
        done = answered(script, script.plan(x=gpus(b=4), y=gpus(a=4)))
        assert [action.allocation.num_gpus for action in done] == [3] * (len(done) - 2) + [4, 4]
        assert {type(action) for action in done} == {ResizeJob}
        assert done[:3] == resizes(("y", gpus(b=3)), ("x", gpus(a=2, b=1)), ("y", gpus(a=2, b=1)))

    def test_a_job_of_a_single_node_is_never_on_two(self):
        specs = [JobSpec(name, min_gpus=2, single_node=True) for name in "xy"]
        script = script_of(*specs).run(x=gpus(a=4), y=gpus(b=4))
        done = answered(script, script.plan(x=gpus(b=4), y=gpus(a=4)))
        assert done == resizes(("y", gpus(b=2)), ("x", gpus(b=2)), ("y", gpus(a=4)), ("x", gpus(b=4)))

    def test_no_replica_joins_where_giving_up_is_enough(self):
        script = Script("xy").run(x=gpus(a=4), y=gpus(b=1))
        script.tell(JobReported("x", 1, model=measured(1.0)), JobReported("y", 1, model=measured(9.0)))
        done = answered(script, script.plan(x=gpus(b=4), y=gpus(a=1)))
        assert done == resizes(("x", gpus(a=3)), ("y", gpus(a=1)), ("x", gpus(b=4)))

    def test_a_job_that_may_have_less_than_it_holds_does_not_keep_more(self):
        script = Script("xy").run(x=gpus(a=4), y=gpus(b=4))
        script.tell(JobRescaled("x", 1, 2), JobReported("x", 1, model=measured(1.0)))
        script.tell(JobReported("y", 1, model=measured(9.0)))
        assert script.plan(x=gpus(b=2), y=gpus(a=1, b=2)) == [ResizeJob("x", 2, gpus(a=2))]

    def of_two_types(self, size, **spec):
        script = Script("")
        script.tell(*(NodeJoined(Node(*node)) for node in (("a", size, "slow"), ("b", size, "fast"), ("c", 4, "odd"))))
        script.tell(*(JobSubmitted(JobSpec(name, **spec)) for name in "xy"))
        script.run(x=gpus(a=size), y=gpus(b=size))
        return answered(script, script.plan(x=gpus(b=size), y=gpus(a=size)))

    def test_a_job_is_never_on_two_types_of_gpus(self):
        done = self.of_two_types(4, min_gpus=3)
        assert done[:3] == [*resizes(("y", gpus(b=3)), ("x", gpus(a=3))), StopJob("y", 2, PREEMPTED)]
        assert all(len(action.allocation.gpus) == 1 for action in done if not isinstance(action, StopJob))

    def test_a_job_is_never_on_a_type_of_gpus_that_no_plan_gave_it(self):
        for is_single in (False, True):
            assert self.of_two_types(2, min_gpus=2, single_node=is_single)[0] == StopJob("y", 1, PREEMPTED)

    def test_gpus_that_nobody_is_to_hold_help_jobs_that_cannot_do_with_fewer(self):
        script = script_of(JobSpec("x"), JobSpec("y"), a=1, b=1, c=1).run(x=gpus(a=1), y=gpus(b=1))
        done = answered(script, script.plan(x=gpus(b=1), y=gpus(a=1)))
        assert done == resizes(("y", gpus(c=1)), ("x", gpus(b=1)), ("y", gpus(a=1)))

    def test_gpus_that_somebody_is_to_hold_are_not_spare(self):
        script = Script("xy").run(x=gpus(a=4))
        script.state.retarget("x", gpus(b=3))
        script.state.retarget("y", gpus(a=1))
        standstill = Standstill.of(script.state, list(script.state.jobs.values()))
        assert (standstill.free, standstill.spare, standstill.lacking) == ({"b": 4}, {"b": 1}, {"a": 1})

    def test_a_drained_node_is_no_way_round(self):
        script = script_of(JobSpec("x"), JobSpec("y"), a=1, b=1, c=1).run(x=gpus(a=1), y=gpus(b=1))
        script.tell(NodeDrained("c"))
        assert script.plan(x=gpus(b=1), y=gpus(a=1)) == [StopJob("y", 1, PREEMPTED)]

    def test_gpus_on_a_node_that_is_gone_are_not_kept(self):
        script = script_of(*map(JobSpec, "xyz"), c=2).run(x=gpus(a=2, c=2), y=gpus(b=4), z=gpus(a=2))
        script.tell(NodeLost("c"), JobReported("y", 1, model=measured(9.0)), JobReported("x", 1, model=measured(1.0)))
        assert script.plan(x=gpus(b=2), y=gpus(a=2), z=gpus(a=2)) == [ResizeJob("x", 2, gpus(a=1))]


class TestWhoGivesWay:
    def swapping(self, delays_s, **specs):
        script = script_of(*(JobSpec(name, **specs.get(name, {})) for name in "xyz"), c=4)
        script.run(x=gpus(a=4), y=gpus(b=4), z=gpus(c=4))
        for name, delay_s in delays_s.items():
            script.tell(JobReported(name, 1, model=measured(delay_s)))
        (action,) = script.plan(x=gpus(b=4), y=gpus(c=4), z=gpus(a=4))
        return type(action), action.job

    def test_the_one_whose_re_allocation_is_cheapest(self):
        assert self.swapping({"x": 2.0, "y": 1.0, "z": 3.0}) == (ResizeJob, "y")
        assert self.swapping({"x": 1.0, "y": 2.0, "z": 3.0}) == (ResizeJob, "x")

    def test_the_latest_to_arrive_among_equals(self):
        assert self.swapping({}) == (ResizeJob, "z")
        assert self.swapping({"x": 1.0, "y": 1.0, "z": 2.0}) == (ResizeJob, "y")

    def test_one_that_has_measured_nothing_counts_as_the_slowest_of_the_others(self):
        assert self.swapping({"x": 1.0, "y": 2.0}) == (ResizeJob, "x")
        assert self.swapping({"y": 2.0}) == (ResizeJob, "z")

    def test_seconds_count_for_each_gpu(self):
        script = Script("xy").run(x=gpus(a=4), y=gpus(b=2))
        script.tell(JobReported("x", 1, model=measured(1.0)), JobReported("y", 1, model=measured(1.5)))
        assert script.plan(x=gpus(b=4), y=gpus(a=2)) == [ResizeJob("y", 2, gpus(b=1))]

    def test_gpus_alone_count_where_nobody_has_measured_anything(self):
        script = Script("xy").run(x=gpus(a=2), y=gpus(b=4))
        assert script.plan(x=gpus(b=2), y=gpus(a=4)) == [ResizeJob("x", 2, gpus(a=1))]

    def test_a_job_that_can_stay_goes_before_a_cheaper_one_that_must_stop(self):
        fixed = {"min_gpus": 4}
        assert self.swapping({"x": 9.0, "y": 1.0, "z": 1.0}, y=fixed, z=fixed) == (ResizeJob, "x")

    def test_who_is_stopped_is_one_that_may_be_and_then_the_cheapest(self):
        fixed, kept = {"min_gpus": 4}, {"min_gpus": 4, "preemptible": False}
        cheap_z = {"x": 2.0, "y": 3.0, "z": 1.0}
        assert self.swapping(cheap_z, x=fixed, y=fixed, z=fixed) == (StopJob, "z")
        assert self.swapping(cheap_z, x=fixed, y=fixed, z=kept) == (StopJob, "x")
        assert self.swapping({}, x=fixed, y=fixed, z=fixed) == (StopJob, "z")
        assert self.swapping({}, x=fixed, y=fixed, z=kept) == (StopJob, "y")
        assert self.swapping(cheap_z, x=kept, y=kept, z=kept) == (StopJob, "z")

    def test_a_job_that_may_not_be_pre_empted_shrinks_as_any_other(self):
        assert self.swapping({"z": 1.0, "x": 2.0}, z={"preemptible": False}) == (ResizeJob, "z")

    def test_only_a_job_in_the_way(self):
        script = script_of(JobSpec("w"), JobSpec("x"), JobSpec("y"), JobSpec("z"), c=1)
        script.run(w=gpus(c=1), x=gpus(a=4), y=gpus(b=3), z=gpus(b=1))
        script.tell(JobReported("w", 1, model=measured(0.1)))
        done = script.plan(w=gpus(a=1, c=1), x=gpus(a=1, b=3), y=gpus(a=2), z=gpus(b=1))
        assert done == [ResizeJob("y", 2, gpus(b=1))], "w holds nothing that others are short of"

    def test_rigid_jobs_swap_by_stops_as_they_cannot_do_otherwise(self):
        specs = [JobSpec(name, rigid=True, requested_gpus=4) for name in "xy"]
        script = script_of(*specs).run(x=gpus(a=4), y=gpus(b=4))
        done = answered(script, script.plan(x=gpus(b=4), y=gpus(a=4)))
        assert done == [
            StopJob("x", 1, PREEMPTED),
            StopJob("y", 1, PREEMPTED),
            StartJob("x", 2, gpus(b=4)),
            StartJob("y", 2, gpus(a=4)),
        ]

    def test_a_rigid_job_that_leaves_makes_room_for_the_other(self):
        script = script_of(JobSpec("x", rigid=True, requested_gpus=4), JobSpec("y")).run(x=gpus(a=4), y=gpus(b=4))
        done = answered(script, script.plan(x=gpus(b=4), y=gpus(a=4)))
        assert done == [StopJob("x", 1, PREEMPTED), ResizeJob("y", 2, gpus(a=4)), StartJob("x", 2, gpus(b=4))]


class TestOnTheWay:
    def halfway(self):
        script = Script("xy").run(x=gpus(a=4), y=gpus(b=4))
        assert script.plan(x=gpus(b=4), y=gpus(a=4)) == [ResizeJob("y", 2, gpus(b=1))]
        return script

    def test_the_target_stays_while_a_job_gives_way(self):
        script = self.halfway()
        assert script.state.target == {"x": gpus(b=4), "y": gpus(a=4)}
        assert script.state.giving_way == {"y"}
        assert script.state.unsettled == {"x", "y"}

    def test_a_step_that_comes_to_nothing_is_not_tried_again_before_the_next_round(self):
        script = self.halfway()
        assert script.tell(GenerationAbandoned("y", 2)) == []
        assert script.state.target == {"x": gpus(a=4), "y": gpus(b=4)}, "nobody is stopped for it"
        assert script.state.unsettled == set()
        assert script.plan(x=gpus(b=4), y=gpus(a=4)) == [ResizeJob("y", 3, gpus(b=1))]

    def test_a_newer_plan_is_obeyed_once_the_step_has_come_to_nothing(self):
        script = self.halfway()
        assert script.plan(x=gpus(a=4), y=gpus(b=3)) == []
        assert script.tell(GenerationAbandoned("y", 2)) == [ResizeJob("y", 3, gpus(b=3))]

    def test_a_newer_plan_that_wants_just_that_needs_no_other_step(self):
        script = self.halfway()
        assert script.plan(x=gpus(a=4), y=gpus(b=1)) == []
        assert script.tell(ReplicasReady("y", 2)) == []
        assert script.state.unsettled == set()

    def test_a_job_that_loses_replicas_on_the_way_goes_no_further(self):
        script = self.halfway()
        script.tell(ReplicaLost("y", 1, 1, gpus(b=2)))
        assert script.tell(ReplicasReady("y", 2)) == []
        assert script.state.target == {"x": gpus(a=4), "y": gpus(b=1)}

    def test_a_job_that_is_cancelled_on_the_way_leaves(self):
        script = self.halfway()
        assert script.tell(JobCancelled("y")) == [StopJob("y", 2, StopReason.CANCELLED)]
        assert script.tell(JobStopped("y", 2)) == [ResizeJob("x", 2, gpus(b=4))]

    def test_a_crash_does_not_make_it_forget_what_the_step_was_for(self):
        script = self.halfway()
        text = codec.dumps(script.state.saved())
        back = SchedulerState.restored(codec.loads(text, SavedState))
        assert back == script.state
        assert back.apply(GenerationAbandoned("y", 2), 0.0) == []
        assert back.unsettled == set()
        script.tell(ReplicasReady("y", 2))
        assert script.state.giving_way == {"x"}

    def test_what_others_wait_for_in_vain_is_given_in_by_the_latest_while_a_swap_goes_on(self):
        script = script_of(*map(JobSpec, "vwxyz"), c=2).run(v=gpus(b=2), w=gpus(b=2), x=gpus(a=2), z=gpus(a=2))
        moves = {"w": gpus(a=2), "x": gpus(b=2), "y": gpus(a=2), "z": gpus(c=2)}
        assert script.plan(v=gpus(b=2), **moves) == [ResizeJob("z", 2, gpus(c=2))]
        assert script.tell(GenerationAbandoned("z", 2)) == [ResizeJob("x", 2, gpus(a=1))]
        assert script.state.target == {"v": gpus(b=2), "w": gpus(a=2), "x": gpus(b=2), "z": gpus(a=2)}


# Any cluster, any jobs, any targets.


def dealt(nodes, sizes, is_scattered, rng):
    """Jobs of these sizes one beside the other, on nodes or on GPUs in a random order."""
    seats = [[node.id] * node.num_gpus for node in nodes]
    rng.shuffle(seats)
    order = [node for seat in seats for node in seat]
    if is_scattered:
        rng.shuffle(order)
    return [Counter(order[start:end]) for start, end in pairwise([0, *accumulate(sizes)])]


@st.composite
def swaps(draw):
    """Nodes, jobs, what they hold and what they are to hold: GPUs dealt anew, few or none of them free."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    nodes = [Node(name, rng.randint(1, 4)) for name in "abcd"[: draw(st.integers(2, 4))]]
    num_gpus = sum(node.num_gpus for node in nodes)
    num_free = min(draw(st.sampled_from([0, 0, 1, 2])), num_gpus - 1)
    count = min(draw(st.integers(2, 5)), num_gpus - num_free)
    before, after = (Counter(rng.choices(range(count), k=num_gpus - num_free - count)) for _ in range(2))
    if draw(st.booleans()):
        after = before
    waits = draw(st.sampled_from([None, None, "first", "last"]))
    parts = []
    for more, name in ((before, "first"), (after, "last")):
        sizes = [more[number] + 1 for number in range(count)]
        if waits == name:
            sizes[0] = 0
        parts.append(dealt(nodes, sizes, draw(st.booleans()), rng))
    specs = []
    for number, (held, wanted) in enumerate(zip(*parts, strict=True)):
        given = [part.total() for part in (held, wanted) if part]
        is_single = all(len(part) < 2 for part in (held, wanted)) and draw(st.booleans())
        is_rigid = len(set(given)) == 1 and draw(st.sampled_from([False, False, False, True]))
        specs.append(
            JobSpec(
                f"j{number}",
                min_gpus=draw(st.integers(1, min(given, default=1))),
                max_gpus=max(given, default=None) if draw(st.booleans()) else None,
                requested_gpus=given[0] if is_rigid else None,
                rigid=is_rigid,
                single_node=is_single,
                preemptible=draw(st.booleans()),
            )
        )
    plans = [Plan.of({spec.id: Allocation.of(gpus) for spec, gpus in zip(specs, part, strict=True)}) for part in parts]
    return nodes, specs, *plans


def excess(held, target, capacity):
    """GPUs held or to be held beyond those that there are: what the docstring of `giving_way` says must shrink."""
    both = Counter()
    for job in {*held, *target}:
        both.update((held.get(job, Allocation()).union(target.get(job, Allocation()))).gpus)
    return sum(max(0, count - capacity[node]) for node, count in both.items())


class Swapping:
    """A scheduler and a world on their way from one plan to another, every step of it checked."""

    def __init__(self, nodes, specs, held, wanted):
        self.scheduler, self.world, self.num_actions, self.round = Scheduler(), World(), 0, 0
        for node in nodes:
            self.world.join(node)
            self.tell(self.world.node_mail.popleft())
        for spec in specs:
            self.tell(JobSubmitted(spec))
        self.obey(held)
        while self.answers(random.Random(0), {}):
            pass
        assert self.holdings() == dict(held.allocations)
        self.num_actions = 0
        self.most_actions = excess(self.holdings(), wanted.allocations, self.state.cluster.capacity) + 2 * len(specs)
        self.obey(wanted)

    @property
    def state(self):
        return self.scheduler.state

    def holdings(self):
        return {job.id: job.allocation for job in self.state.jobs.values() if job.allocation}

    def obey(self, plan):
        self.round += 1
        self.tell(RoundDue(self.round))
        self.tell(PlanMade(self.round, plan))

    def tell(self, event):
        actions = [action for action in self.scheduler.handle(event, 0.0) if not isinstance(action, MakePlan)]
        assert violations(self.state) == []
        assert self.state.num_in_flight or not self.state.unsettled, "somebody waits for nothing"
        for action in actions:
            if isinstance(action, StopJob) and action.reason is StopReason.SUPERSEDED:
                continue  # to nobody in particular: a late report of a job that has ended
            self.num_actions += 1
            job = self.state.jobs[action.job]
            if isinstance(action, ResizeJob):
                least, most = job.spec.gpu_bounds
                assert least <= action.allocation.num_gpus <= (most or action.allocation.num_gpus)
                assert job.spec.can_be_on(action.allocation.num_nodes)
                assert action.allocation != job.allocation
            elif isinstance(action, StopJob) and job.id in self.state.target and not job.spec.rigid:
                assert len(actions) == 1
                self.check_stop(job)
            self.world.do(action)

    def check_stop(self, stopped):
        """Nobody could have made room while it trains: all that a job may hold has been tried."""
        assert stopped.spec.min_gpus > 1 or stopped.allocation.num_gpus == 1
        held, target, capacity = self.holdings(), self.state.target, self.state.cluster.capacity
        before = excess(held, target, capacity)
        used, needed = Counter(), Counter()
        for job_id in {*held, *target}:
            here, there = held.get(job_id, Allocation()), target.get(job_id, Allocation())
            used.update(here.gpus)
            needed.update(here.union(there).gpus)
        for job in [stopped, *(self.state.jobs[job_id] for job_id in self.state.unsettled)]:
            if job.phase is Phase.PENDING:
                continue
            least, most = job.spec.gpu_bounds
            here, there = held[job.id].gpus, target[job.id].gpus
            room = {}
            for node, count in capacity.items():
                of_target = min(there.get(node, 0), here.get(node, 0) + count - used[node])
                spare = max(0, count - needed[node])
                room[node] = max(here.get(node, 0), of_target) + spare
            for counts in product(*(range(count + 1) for count in room.values())):
                after = Allocation.of(dict(zip(room, counts, strict=True)))
                is_possible = least <= after.num_gpus <= (most or 99) and job.spec.can_be_on(after.num_nodes)
                if is_possible and after:
                    assert excess({**held, job.id: after}, target, capacity) >= before, f"{job.id} could hold {after}"

    def answers(self, rng, troubles):
        """One job does what it was told, or something else happens to it. False if nobody has anything to answer."""
        jobs = sorted(self.world.jobs)
        rng.shuffle(jobs)
        for what in rng.sample(sorted(troubles), len(troubles)):
            if troubles[what] and jobs:
                troubles[what] -= 1
                self.trouble(what, jobs[0])
        any(self.world.answer(job) for job in jobs)
        is_busy = bool(self.world.mail)
        while self.world.mail:
            self.tell(self.world.mail.pop(rng.randrange(len(self.world.mail))))
        return is_busy

    def trouble(self, what, job):
        match what:
            case "abandon":
                self.world.abandon(job)
            case "lose":
                self.world.lose_replica(job, 0)
            case "finish":
                self.world.end(job, JobFinished)
            case "fail":
                self.world.end(job, JobFailed)

    def settle(self, rng, troubles):
        for _ in range(self.most_actions + sum(troubles.values()) + 1):
            if not self.answers(rng, troubles):
                break
        else:
            raise AssertionError("it never comes to rest")
        assert self.num_actions <= self.most_actions
        assert (self.state.unsettled, self.state.num_in_flight) == (set(), 0)


@settings(max_examples=300)
@given(swaps(), st.integers(0, 2**32))
def test_any_plan_is_carried_out_in_so_many_steps_and_nobody_is_stopped_who_could_be_spared(swap, seed):
    swapping = Swapping(*swap)
    swapping.settle(random.Random(seed), {})
    assert swapping.holdings() == dict(swap[-1].allocations)


@settings(max_examples=300)
@given(
    swaps(),
    st.integers(0, 2**32),
    st.fixed_dictionaries({what: st.integers(0, 3) for what in ("abandon", "lose", "finish", "fail")}),
)
def test_it_comes_to_rest_whatever_happens_on_the_way(swap, seed, troubles):
    Swapping(*swap).settle(random.Random(seed), troubles)
