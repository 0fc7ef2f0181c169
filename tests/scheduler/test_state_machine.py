"""Random lives of a cluster, with the scheduler checked after every event.

`POLLUX_EXAMPLES=5000 pytest tests/scheduler/test_state_machine.py` searches longer.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace

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
from pollux.scheduler import MemoryLog, Record, SavedState, Scheduler, SchedulerOptions, SchedulerState
from pollux.scheduler.invariants import violations
from pollux.scheduler.reports import LEAVING

from .world import World

NODES = ("a", "b", "c")
EXAMPLES = int(os.environ.get("POLLUX_EXAMPLES", "200"))

picks = st.integers(0, 11)
seeds = st.integers(0, 2**32)


@st.composite
def _specs(draw):
    least = draw(st.integers(1, 2))
    span = draw(st.none() | st.integers(0, 4))
    return JobSpec(
        "to be named",
        min_gpus=least,
        max_gpus=None if span is None else least + span,
        requested_gpus=least,
        rigid=draw(st.sampled_from([False, False, True])),
        single_node=draw(st.sampled_from([False, False, True])),
        preemptible=draw(st.booleans()),
        retries=draw(st.integers(0, 2)),
    )


specs = _specs()
REQUESTS = (
    JobCancelled,
    JobPaused,
    JobResumed,
    JobResumed,
    lambda job: JobRescaled(job, 1, 2),
    lambda job: JobRescaled(job, 2, None),
    lambda job: JobSubmitted(JobSpec(job, min_gpus=4)),
)


def picked(items, pick):
    ordered = sorted(items)
    return ordered[pick % len(ordered)]


def random_plan(snapshot, seed):
    """GPUs handed out at random, within capacity and bounds."""
    rng = random.Random(seed)
    free = [node for node, count in snapshot.cluster.capacity.items() for _ in range(count)]
    rng.shuffle(free)
    wanted = {}
    for job_id in rng.sample(sorted(snapshot.jobs), len(snapshot.jobs)):
        least, most = snapshot.jobs[job_id].spec.gpu_bounds
        size = rng.randint(least, min(most or 4, max(least, 4)))
        if snapshot.jobs[job_id].spec.single_node:
            node = next((node for node, count in Counter(free).items() if count >= size), None)
            if node is not None:
                wanted[job_id] = Allocation.of({node: size})
                for _ in range(size):
                    free.remove(node)
        elif size <= len(free):
            wanted[job_id] = Allocation.of(Counter(free.pop() for _ in range(size)))
    return Plan.of(wanted)


def rotated_plan(snapshot, seed):
    """Every job is to have what the next one holds: nothing but cycles."""
    nodes = snapshot.cluster.capacity
    holders = [j for j in snapshot.jobs.values() if j.assigned and all(node in nodes for node in j.assigned.gpus)]
    held = [job.assigned for job in holders]
    plan = Plan.of({job.id: gpus for job, gpus in zip(holders, held[1:] + held[:1], strict=True)})
    is_good = len(holders) > 1 and not plan.violations(snapshot)
    return plan if is_good else random_plan(snapshot, seed)


class Cluster(RuleBasedStateMachine):
    options = SchedulerOptions()

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(options=self.options)
        self.twin = None  # restored from what was saved last, and told all since then
        self.world = World()
        self.now = 0.0
        self.step_s = 1.0
        self.rounds = 0
        self.submitted = set()
        self.delivered = []
        self.plans = []
        self.resizes = set()
        self.over = {}  # job → generations that must not be obeyed any more

    @property
    def state(self):
        return self.scheduler.state

    # Every event goes through here.

    def tell(self, event):
        is_stale = self.is_stale(event)
        self.now += self.step_s
        before = (dict(self.state.jobs), dict(self.state.ended), dict(self.state.target), self.state.num_in_flight)
        actions = self.scheduler.handle(event, self.now)
        if self.twin is not None:
            assert self.twin.apply(event, self.now) == actions
            assert self.twin == self.state
        after = (self.state.jobs, self.state.ended, self.state.target, self.state.num_in_flight)
        if is_stale:
            assert after == before
            assert all(isinstance(action, StopJob) and action.reason is StopReason.SUPERSEDED for action in actions)
        self.note(event, actions, is_stale)
        assert violations(self.state) == []
        assert self.submitted == self.state.jobs.keys() | self.state.ended.keys()
        assert not (self.state.unsettled and not self.state.num_in_flight), f"{self.state.unsettled} wait for nothing"
        for action in actions:
            if isinstance(action, ResizeJob):
                assert self.options.in_place
                assert not self.state.jobs[action.job].spec.rigid
            self.world.do(action)

    def is_stale(self, event):
        """Of a generation that was superseded, with the two exceptions of docs/job-lifecycle.md."""
        generation = getattr(event, "generation", None)
        if generation is None or generation not in self.over.get(event.job, ()):
            return False
        job = self.state.jobs.get(event.job)
        if job is not None and isinstance(event, JobFinished):
            return job.phase.holds_gpus or job.generation != generation
        if job is not None and isinstance(event, JobStopped):
            return not job.phase.holds_gpus or job.issued_generation != generation or job.phase not in LEAVING
        return True

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

    @initialize(
        sizes=st.lists(st.integers(2, 4), min_size=2, max_size=3), specs=st.lists(specs, min_size=2, max_size=4)
    )
    def boot(self, sizes, specs):
        for name, size in zip(NODES, sizes, strict=False):
            self.world.join(Node(name, size))
        self.hear_of_nodes()
        for spec in specs:
            self.submit(spec)

    @precondition(lambda self: len(self.submitted) < 7)
    @rule(spec=specs)
    def submit(self, spec):
        name = f"j{len(self.submitted)}"
        self.submitted.add(name)
        self.tell(JobSubmitted(replace(spec, id=name)))

    @rule(pick=picks, ask=st.sampled_from(REQUESTS))
    def ask(self, pick, ask):
        self.tell(ask(picked(self.submitted, pick)))

    # Rounds.

    @rule(seed=seeds, rotate=st.booleans())
    def plan_at_once(self, seed, rotate):
        self.begin_round()
        self.make_plans(seed, rotate, False)

    def begin_round(self):
        self.rounds += 1
        self.tell(RoundDue(self.rounds))

    def make_plans(self, seed, rotate, strangers):
        for request in self.world.plans_due:
            plan = (rotated_plan if rotate else random_plan)(request.snapshot, seed)
            assert not plan.violations(request.snapshot)
            if strangers:
                plan = Plan.of({**plan.allocations, "nobody": Allocation.of({"a": 1, "nowhere": 2})})
            self.plans.append(PlanMade(request.round, plan))
        if self.world.plans_due:
            self.world.plans_due.clear()
            self.tell(self.plans[-1])

    @rule(pick=picks, seed=seeds, rotate=st.booleans(), strangers=st.booleans())
    def plan_in_time_or_not(self, pick, seed, rotate, strangers):
        if pick < 5:
            self.begin_round()
        elif pick < 10:
            self.make_plans(seed, rotate, strangers)
        elif self.plans:
            self.tell(self.plans[pick % len(self.plans)])

    # Nodes.

    @rule(what=st.sampled_from(["join", "die", "drain", "hear"]), name=st.sampled_from(NODES), is_heard=st.booleans())
    def node(self, what, name, is_heard):
        if what == "join":
            self.world.join(Node(name, 4))  # never with fewer GPUs than are in use
        elif what == "die" and name in self.world.nodes:
            self.world.die(name)
        elif what == "drain":
            self.tell(NodeDrained(name))
        if what == "hear" or is_heard:
            self.hear_of_nodes()

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
    @rule(is_heard=st.booleans())
    def all_answer(self, is_heard):
        for job in list(self.world.jobs):
            if self.world.answer(job) and is_heard:
                self.deliver(-1, False)

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

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, -1.0]))
    def time_goes(self, seconds):
        self.step_s = seconds

    @rule()
    def save(self):
        """At any moment; the state that comes of it lives on beside the first one."""
        self.scheduler.save()
        text = codec.dumps(self.state.saved())
        self.twin = SchedulerState.restored(codec.loads(text, SavedState), self.options)
        assert self.twin == self.state
        assert self.twin.saved() == self.state.saved()

    @rule()
    def crash(self):
        """The service comes back from its log alone, and tells the world again what it had told it."""
        written = [codec.dumps(record) for record in self.scheduler.log.records()]
        records = [codec.loads(line, Record) for line in written]
        back = Scheduler(MemoryLog(records, self.scheduler.log.latest()), self.options)
        assert back.state == Scheduler(MemoryLog(records), self.options).state == self.state
        self.scheduler = back
        for action in back.outstanding():
            self.world.do(action)

    @rule()
    def settle(self):
        """Once everybody has answered, every job has what the plan gives it: nothing waits for ever."""
        for _ in range(400):
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
            assert dict(held) == dict(job.allocation.gpus), f"{job.id} really has {held}"
        assert all(not self.world.jobs[job].held for job in state.ended if job in self.world.jobs)

    def teardown(self):
        self.settle()
        self.crash()


class RestartingCluster(Cluster):
    options = SchedulerOptions(in_place=False, retry_pause_s=5.0, max_retry_pause_s=20.0, abandoned_starts_fail=True)


LIMITS = settings(max_examples=EXAMPLES, stateful_step_count=50)
TestInPlace = Cluster.TestCase
TestInPlace.settings = LIMITS
TestRestarts = RestartingCluster.TestCase
TestRestarts.settings = LIMITS
