"""Random lives of a cluster, with the scheduler checked after every event.

`POLLUX_EXAMPLES=5000 pytest tests/scheduler/test_state_machine.py` searches longer.
"""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pollux.core import (
    Allocation,
    GenerationAbandoned,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobPaused,
    JobRescaled,
    JobResumed,
    JobSpec,
    JobStopped,
    JobSubmitted,
    Node,
    NodeDrained,
    Phase,
    Plan,
    PlanMade,
    ReplicasReady,
    ResizeJob,
    RoundDue,
    StartJob,
    StopJob,
    StopReason,
    codec,
)
from pollux.scheduler import MemoryLog, Record, Scheduler, SchedulerOptions
from pollux.scheduler.invariants import violations

from .world import World

NODES = ("a", "b", "c")
EXAMPLES = int(os.environ.get("POLLUX_EXAMPLES", "60"))

picks = st.integers(0, 11)
draws = st.lists(st.integers(0, 3), min_size=1, max_size=9)


def picked(items, pick):
    ordered = sorted(items)
    return ordered[pick % len(ordered)]


def feasible_plan(snapshot, numbers):
    """GPUs handed out by numbers from a list that starts over at its end, within capacity and bounds."""
    room = Counter(snapshot.cluster.capacity)
    wanted = {}
    position = 0
    for job in snapshot.jobs.values():
        gpus = {}
        for node in room:
            gpus[node] = min(numbers[position % len(numbers)], room[node])
            position += 1
        least, most = job.spec.gpu_bounds
        total = sum(gpus.values())
        if total >= least and (most is None or total <= most):
            room -= Counter(gpus)
            wanted[job.id] = Allocation.of(gpus)
    return Plan.of(wanted)


def rotated_plan(snapshot):
    """Every job is to have what the next one holds: nothing but cycles."""
    holders = [job for job in snapshot.jobs.values() if job.assigned and not job.spec.rigid]
    nodes = snapshot.cluster.capacity
    held = [job.assigned for job in holders if all(node in nodes for node in job.assigned.gpus)]
    plan = Plan.of({job.id: gpus for job, gpus in zip(holders, held[1:] + held[:1], strict=False)})
    return plan if not plan.violations(snapshot) else Plan()


class Cluster(RuleBasedStateMachine):
    in_place = True

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(options=SchedulerOptions(in_place=self.in_place))
        self.world = World()
        self.now = 0.0
        self.rounds = 0
        self.submitted = set()
        self.delivered = []
        self.answered_plans = []
        self.resizes = set()
        self.over = {}  # job → generations that must not be obeyed any more

    @property
    def state(self):
        return self.scheduler.state

    # Every event goes through here.

    def tell(self, event):
        generation = getattr(event, "generation", None)
        is_stale = generation is not None and generation in self.over.get(event.job, ())
        if isinstance(event, JobFinished) and is_stale:
            job = self.state.jobs.get(event.job)
            is_stale = job is None or job.phase.holds_gpus or job.generation != generation
        before = (dict(self.state.jobs), dict(self.state.ended), dict(self.state.target), self.state.num_in_flight)
        actions = self.scheduler.handle(event, self.now)
        after = (self.state.jobs, self.state.ended, self.state.target, self.state.num_in_flight)
        if is_stale:
            assert after == before
            assert all(isinstance(action, StopJob) and action.reason is StopReason.SUPERSEDED for action in actions)
        self.note(event, actions, is_stale)
        assert violations(self.state) == []
        assert self.submitted == self.state.jobs.keys() | self.state.ended.keys()
        assert not (self.state.unsettled and self.stalls()), f"{self.state.unsettled} wait for nothing"
        for action in actions:
            if isinstance(action, ResizeJob):
                assert self.in_place
                assert not self.state.jobs[action.job].spec.rigid
            self.world.do(action)

    def stalls(self):
        return not self.state.num_in_flight

    def note(self, event, actions, is_stale):
        for action in actions:
            if isinstance(action, ResizeJob):
                self.resizes.add((action.job, action.generation))
            if isinstance(action, StartJob):
                self.over.setdefault(action.job, set()).update(range(1, action.generation))
        if isinstance(event, ReplicasReady) and not is_stale:
            self.over.setdefault(event.job, set()).update(range(1, event.generation))
        if isinstance(event, GenerationAbandoned) and (event.job, event.generation) in self.resizes:
            self.over.setdefault(event.job, set()).add(event.generation)
        for job in (*self.state.jobs.values(), *self.state.ended.values()):
            if not job.phase.holds_gpus:
                self.over.setdefault(job.id, set()).update(range(1, job.issued_generation + 1))

    # People.

    @initialize(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def boot(self, sizes):
        for name, size in zip(NODES, sizes, strict=False):
            self.world.join(Node(name, size))
        self.hear_of_nodes()

    @precondition(lambda self: len(self.submitted) < 7)
    @rule(
        least=st.integers(1, 2),
        span=st.none() | st.integers(0, 4),
        rigid=st.booleans(),
        preemptible=st.booleans(),
        retries=st.integers(0, 2),
    )
    def submit(self, least, span, rigid, preemptible, retries):
        name = f"j{len(self.submitted)}"
        most = None if span is None else least + span
        self.submitted.add(name)
        self.tell(
            JobSubmitted(JobSpec(name, min_gpus=least, max_gpus=most, requested_gpus=least, rigid=rigid,
                                 preemptible=preemptible, retries=retries))
        )  # fmt: skip

    @precondition(lambda self: self.submitted)
    @rule(pick=picks, kind=st.sampled_from([JobCancelled, JobPaused, JobResumed, JobResumed]))
    def ask(self, pick, kind):
        self.tell(kind(picked(self.submitted, pick)))

    @precondition(lambda self: self.submitted)
    @rule(pick=picks, least=st.integers(1, 3), span=st.none() | st.integers(0, 3))
    def rescale(self, pick, least, span):
        self.tell(JobRescaled(picked(self.submitted, pick), least, None if span is None else least + span))

    @precondition(lambda self: self.submitted)
    @rule(pick=picks)
    def submit_again(self, pick):
        self.tell(JobSubmitted(JobSpec(picked(self.submitted, pick), min_gpus=4)))

    # Rounds.

    @rule(numbers=draws, rotate=st.booleans())
    def plan_at_once(self, numbers, rotate):
        self.begin_round()
        self.make_plans(numbers, rotate)

    @rule()
    def begin_round(self):
        self.rounds += 1
        self.tell(RoundDue(self.rounds))

    @precondition(lambda self: self.world.plans_due)
    @rule(numbers=draws, rotate=st.booleans(), strangers=st.booleans())
    def make_plans(self, numbers, rotate, strangers=False):
        for request in self.world.plans_due:
            plan = rotated_plan(request.snapshot) if rotate else feasible_plan(request.snapshot, numbers)
            assert not plan.violations(request.snapshot)
            if strangers:
                plan = Plan.of({**plan.allocations, "nobody": Allocation.of({"a": 1, "nowhere": 2})})
            self.answered_plans.append(PlanMade(request.round, plan))
        if self.world.plans_due:
            self.world.plans_due.clear()
            self.tell(self.answered_plans[-1])

    @precondition(lambda self: self.answered_plans)
    @rule(pick=picks)
    def old_plan_comes_again(self, pick):
        self.tell(self.answered_plans[pick % len(self.answered_plans)])

    # Nodes.

    @rule(name=st.sampled_from(NODES), size=st.integers(1, 4))
    def node_joins(self, name, size):
        if name in self.world.nodes:
            size = max(size, self.world.nodes[name].num_gpus)
        elif name in self.state.cluster or self.state.occupancy.used.get(name):
            size = 4
        self.world.join(Node(name, size))

    @precondition(lambda self: self.world.nodes)
    @rule(pick=picks)
    def node_dies(self, pick):
        self.world.die(picked(self.world.nodes, pick))

    @rule(name=st.sampled_from(NODES))
    def drain(self, name):
        self.tell(NodeDrained(name))

    @precondition(lambda self: self.world.node_mail)
    @rule()
    def hear_of_nodes(self):
        while self.world.node_mail:
            self.tell(self.world.node_mail.popleft())

    # Replicas.

    @precondition(lambda self: self.world.jobs)
    @rule(pick=picks, times=st.integers(1, 3))
    def answer(self, pick, times):
        job = picked(self.world.jobs, pick)
        for _ in range(times):
            if not self.world.answer(job):
                break
            self.deliver(-1, False)

    @precondition(lambda self: self.world.jobs)
    @rule()
    def all_answer_and_nobody_hears(self):
        for job in self.world.jobs:
            self.world.answer(job)

    @precondition(lambda self: self.world.jobs)
    @rule(pick=picks, what=st.integers(0, 7))
    def happens(self, pick, what):
        world, job = self.world, picked(self.world.jobs, pick)
        match what:
            case 0:
                world.get_ready(job)
            case 1:
                world.abandon(job)
            case 2:
                world.end(job, JobFinished)
            case 3:
                world.end(job, JobFailed)
            case 4:
                world.end(job, JobStopped, newest=False)
            case 5:
                world.end(job, JobStopped, newest=True)
            case 6:
                world.lose_replica(job, pick)
            case 7:
                world.report(job)

    @precondition(lambda self: self.world.mail)
    @rule(pick=picks, twice=st.booleans())
    def deliver(self, pick, twice):
        event = self.world.mail.pop(pick % len(self.world.mail))
        self.delivered.append(event)
        for _ in range(1 + twice):
            self.tell(event)

    @precondition(lambda self: self.delivered)
    @rule(pick=picks)
    def echo(self, pick):
        """A message of long ago, such as one from a node that was thought to be lost."""
        self.tell(self.delivered[-1 - pick % len(self.delivered)])

    # Time, crashes, rest.

    @rule(seconds=st.sampled_from([1.0, 30.0, -10.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def crash(self):
        """The service comes back from its log alone, and tells the world again what it had told it."""
        written = [codec.dumps(record) for record in self.scheduler.log.records()]
        back = Scheduler(MemoryLog(codec.loads(line, Record) for line in written), self.state.options)
        assert back.state == self.state
        self.scheduler = back
        for action in back.outstanding():
            self.world.do(action)

    @rule(times=st.just(400))
    def settle(self, times):
        """Once everybody has answered, every job has what the plan gives it: nothing waits for ever."""
        for _ in range(times):
            self.hear_of_nodes()
            while self.world.mail:
                self.deliver(0, False)
            if not any(self.world.answer(job) for job in self.world.jobs):
                break
        else:
            raise AssertionError("it never comes to rest")
        state = self.state
        assert (state.num_in_flight, state.unsettled, self.world.node_mail, self.world.mail) == (
            0,
            set(),
            type(self.world.node_mail)(),
            [],
        )
        for job in state.jobs.values():
            assert job.phase in (Phase.PENDING, Phase.RUNNING, Phase.PAUSED)
            assert job.allocation == state.target.get(job.id, Allocation())
            held = self.world.jobs[job.id].occupied() if job.id in self.world.jobs else Counter()
            assert dict(held) == dict(job.allocation.gpus), job.id
        assert all(not self.world.jobs[job].held for job in state.ended if job in self.world.jobs)

    def teardown(self):
        self.settle(400)
        self.crash()


class RestartingCluster(Cluster):
    in_place = False


LIMITS = settings(max_examples=EXAMPLES, stateful_step_count=50)
TestInPlace = Cluster.TestCase
TestInPlace.settings = LIMITS
TestRestarts = RestartingCluster.TestCase
TestRestarts.settings = LIMITS
