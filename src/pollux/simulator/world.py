"""The virtual world: an event heap, jobs that train at their true speed, and the scheduler that is also deployed.

Time jumps from event to event. A running job has at most one event ahead of it, the end of its epoch at its present
speed; every change of speed makes a new one and lets the old one lapse. Ties: what happened in the world, then
reports, then the round, then what the round left to do, then the sample for the timeline.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import cached_property
from itertools import count

import numpy as np

from pollux.core import (
    Action,
    Allocation,
    Cluster,
    Event,
    FrozenMap,
    GenerationAbandoned,
    JobFinished,
    JobId,
    JobReported,
    JobSpec,
    JobStopped,
    JobSubmitted,
    MakePlan,
    Node,
    NodeId,
    NodeJoined,
    NodeLost,
    Plan,
    PlanMade,
    ReplicaLost,
    ReplicasReady,
    ResizeJob,
    RoundDue,
    Snapshot,
    StartJob,
    StopJob,
)
from pollux.errors import InvalidSpec, PolicyFailed, PolluxError
from pollux.policies.base import Policy
from pollux.scheduler import EventLog, Scheduler
from pollux.scheduler.rounds import RoundTimes
from pollux.simulator.cluster_file import NodeChange
from pollux.simulator.options import Options
from pollux.simulator.oracle import OracleSource
from pollux.simulator.run import Run, Training
from pollux.simulator.timeline import Histories, Timeline
from pollux.simulator.truth import Truth

PATIENCE = 1000
"""Rounds in which nothing runs and nothing is ahead before the rest of the jobs counts as stuck."""


class Rank(IntEnum):
    """The order of events of the same moment."""

    WORLD = 0
    REPORT = 1
    ROUND = 2
    AFTER_ROUND = 3
    SAMPLE = 4


class World:
    """One workload under one policy, from the first submission to the last end."""

    def __init__(
        self,
        specs: Iterable[tuple[float, JobSpec]],
        truths: Mapping[str, Truth],
        cluster: Cluster,
        policy: Policy,
        options: Options,
        changes: Iterable[NodeChange] = (),
        log: EventLog | None = None,
    ) -> None:
        self.options = options
        self.policy = policy
        self.scheduler = Scheduler(log, replace(options.scheduler, seed=options.seed))
        self.now = 0.0
        self.timeline = Timeline()
        self.histories: Histories | None = None
        """Who wants them gives one before the run, to be filled: they take memory."""
        self.policy_cpu_s: list[float] = []
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = count()
        self._trainings: dict[JobId, Training] = {}
        self._runs: dict[JobId, Run] = {}
        self._oracle = OracleSource(policy.needs_oracle, options)
        self._plan = Plan()
        self._planned_for = Cluster()
        """The last plan that was checked, and its cluster: most rounds change nothing."""
        self._num_ahead = 0
        """Events on the heap other than rounds and reports, which come by themselves."""
        self._idle_rounds = 0
        gap_s = options.early_gap_s
        self._times = None if gap_s is None else RoundTimes(options.interval_s, gap_s, 0.0, self.now)
        """None: no round comes early."""
        self._agents_watch = policy.reads_models or policy.adapts_batch
        self._next_report_s = options.agent.report_interval_s
        self._fails_at_s: dict[NodeId, float] = {}
        """When each node fails by itself next, or did so last; whatever else happens to it makes that void."""
        for node in cluster:
            self._handle(NodeJoined(node))
        for change in changes:
            self._at(change.time_s, Rank.WORLD, self._change_node, change.event)
        for node in cluster:
            self._plan_failure(node.id)
        for submitted_at_s, spec in specs:
            self._trainings[spec.id] = Training(spec, truths[spec.application or ""], options.agent)
            self._at(submitted_at_s, Rank.WORLD, self._handle, JobSubmitted(spec))
        self._num_left = len(self._trainings)
        if self._times is None:
            self._at(options.interval_s, Rank.ROUND, self._regular_round, 1)
        else:
            self._at(self._times.next_s, Rank.ROUND, self._round_if_due)
        if options.world.whole_seconds or (self._agents_watch and options.agent.first_report_s is None):
            self._at(self._next_report_s, Rank.REPORT, self._report, 1)

    def run(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Until every job has ended; `on_end` is called for each."""
        while self._num_left:
            self.now, rank, _, happen, arguments = heapq.heappop(self._heap)
            if rank in (Rank.WORLD, Rank.AFTER_ROUND):
                self._num_ahead -= 1
            left = self._num_left
            happen(*arguments)
            if self._num_left < left:
                on_end()

    def _at(self, time_s: float, rank: Rank, happen: Callable[..., None], *arguments: object) -> None:
        if rank in (Rank.WORLD, Rank.AFTER_ROUND):
            self._num_ahead += 1
        heapq.heappush(self._heap, (time_s, rank, next(self._sequence), happen, arguments))

    def _handle(self, event: Event) -> None:
        for action in self.scheduler.handle(event, self.now):
            self._do(action)
        if self._times is not None:
            before_s = self._times.next_s
            self._times.note(event, self.scheduler.state, self.now)
            if self._times.next_s < before_s:
                self._at(self._times.next_s, Rank.ROUND, self._round_if_due)

    def _do(self, action: Action) -> None:
        match action:
            case MakePlan():
                self._make_plan(action)
            case ResizeJob(job=job) if self.options.world.warm_up_s and self._gets_replicas(job, action.allocation):
                ready_at_s = self.now + self.options.world.warm_up_s
                self._at(ready_at_s, Rank.WORLD, self._join, job, action.generation, action.allocation)
            case StartJob(job=job) | ResizeJob(job=job):
                self._form(job, action.generation, action.allocation)
            case StopJob(job=job):
                if job in self._runs and self._runs[job].generation <= action.generation:
                    self._runs.pop(job).count(self.now)
                    self._interfere()
                self._at(self.now, Rank.WORLD, self._handle, JobStopped(job, action.generation))

    def _regular_round(self, number: int) -> None:
        self._round(number)
        # A product, not a sum: rounds and reports of the same moment must meet exactly.
        self._at(self.options.interval_s * (number + 1), Rank.ROUND, self._regular_round, number + 1)

    def _round_if_due(self) -> None:
        """Unless one has come since this was foreseen."""
        assert self._times is not None
        if self._times.next_s > self.now:
            return
        self._times.begin(self.now)
        state = self.scheduler.state
        is_needed = any(job.phase.may_be_given_gpus for job in state.jobs.values())
        self._round(state.round + 1 if is_needed else None)
        self._at(self._times.next_s, Rank.ROUND, self._round_if_due)

    def _round(self, number: int | None) -> None:
        """None: there is nobody to plan for, so that it does not count."""
        limit = self.options.world.max_time_s
        if self.now > limit:
            problem = f"{self._num_left} jobs had not ended by then ({self._names_left()})"
            raise InvalidSpec("world.max_time_s", limit, problem, "Raise it, or use another policy or a larger cluster")
        if number is not None:
            self._handle(RoundDue(number))
        self._at(self.now, Rank.SAMPLE, self._sample)  # once those that the round moves are where they go
        is_idle = not self._runs and not self._num_ahead
        self._idle_rounds = self._idle_rounds + 1 if is_idle else 0
        if self._idle_rounds > PATIENCE:
            gpus = self.scheduler.state.cluster.num_gpus
            problem = "the policy gives these jobs nothing, and nothing else will happen"
            fix = f"Check that they can run on the {gpus} GPUs that the cluster now has, or use another policy"
            raise InvalidSpec("workload", self._names_left(), problem, fix)

    def _sample(self) -> None:
        self.timeline.sample(self.now, self.scheduler.state, self._runs.values())
        if self.histories is not None:
            self.histories.sample(self.now, self._runs.values())

    def _names_left(self) -> str:
        left = [job_id for job_id in self._trainings if job_id not in self.scheduler.state.ended]
        return ", ".join(left[:5]) + (" …" if len(left) > 5 else "")

    def _make_plan(self, request: MakePlan) -> None:
        snapshot = request.snapshot
        if self.policy.needs_oracle:
            answers = {
                job_id: self._oracle.ask(self._trainings[job_id], self._runs.get(job_id), snapshot.cluster, self.now)
                for job_id in snapshot.jobs
            }
            snapshot = Snapshot(self.now, snapshot.round, snapshot.cluster, snapshot.jobs, FrozenMap(answers))
        began = time.process_time()
        plan, stats = self._ask_policy(snapshot, request.seed)
        self.policy_cpu_s.append(time.process_time() - began)
        is_known = plan == self._plan and plan.allocations.keys() <= snapshot.jobs.keys()
        if not is_known or snapshot.cluster is not self._planned_for:
            plan.check(snapshot)
            self._plan, self._planned_for = plan, snapshot.cluster
        self._handle(PlanMade(request.round, plan, stats=stats))

    def _ask_policy(self, snapshot: Snapshot, seed: int) -> tuple[Plan, FrozenMap[str, float]]:
        """What a policy of somebody else's raises or returns by mistake is told as its own failure."""
        name, doing = type(self.policy).__name__, f"planning round {snapshot.round}"
        try:
            plan, stats = self.policy.plan(snapshot, seed), FrozenMap(self.policy.stats())
        except PolluxError:
            raise
        except Exception as error:
            raise PolicyFailed(name, doing, " ".join(f"{type(error).__name__}: {error}".split())) from error
        if not isinstance(plan, Plan):
            raise PolicyFailed(name, doing, f"plan() returned {type(plan).__name__}, not a Plan")
        return plan, stats

    def _gets_replicas(self, job: JobId, allocation: Allocation) -> bool:
        """Whether it needs more than those that it has; they are started while it trains on."""
        if job not in self._runs:
            return False
        held = self._runs[job].allocation.gpus
        return any(count > held.get(node, 0) for node, count in allocation.gpus.items())

    def _join(self, job_id: JobId, generation: int, allocation: Allocation) -> None:
        """Replicas that were started for a running job are there; without all of them nothing changes."""
        job = self.scheduler.state.jobs.get(job_id)
        if job is None or not job.awaits(generation) or job_id not in self._runs:
            return  # it has ended, or was stopped meanwhile
        if any(node not in self.scheduler.state.cluster for node in allocation.gpus):
            self._handle(GenerationAbandoned(job_id, generation, "a node was lost before its replicas were ready"))
        else:
            self._form(job_id, generation, allocation)

    def _form(self, job: JobId, generation: int, allocation: Allocation) -> None:
        run = self._place(job, generation, allocation)
        self._at(run.ready_at_s, Rank.WORLD, self._get_ready, run)

    def _get_ready(self, run: Run) -> None:
        """Unless it was stopped or formed anew since: then nobody is left to tell."""
        if self._runs.get(run.training.id) is run:
            self._handle(ReplicasReady(run.training.id, run.generation))

    def _place(self, job: JobId, generation: int, allocation: Allocation) -> Run:
        """Put a job there, whether it comes from nowhere or from other GPUs."""
        before = self._runs.get(job)
        if before is not None:
            before.count(self.now)
        world = self.options.world
        ready_at_s = self.now + world.realloc_delay_s
        cluster = self.scheduler.state.cluster
        run = Run(self._trainings[job], generation, allocation, cluster, world.rank_order, self.now, ready_at_s)
        self._runs[job] = run
        self._interfere()
        self._predict(run)
        if self._agents_watch and self.options.agent.first_report_s is not None:
            self._at(ready_at_s + self.options.agent.first_report_s, Rank.REPORT, self._report_of, run)
        return run

    def _predict(self, run: Run) -> None:
        """Foresee the end of its epoch; with whole seconds only up to the next report, as the artifact does."""
        training = run.training
        start = max(run.counted_until_s, run.ready_at_s)
        left = run.goal - training.progress
        if self.options.world.whole_seconds:
            seconds = self._next_report_s - start
            if seconds <= 0 or training.progress + run.rate * seconds < run.goal:
                return
            end = start + round(left / run.rate)
        else:
            end = start + max(left, 0.0) / run.rate
        # An epoch that ends at once ends after the round: its job was still training when the round looked.
        rank = Rank.WORLD if end > self.now else Rank.AFTER_ROUND
        self._at(end, rank, self._end_epoch, run, run.version)

    def _end_epoch(self, run: Run, version: int) -> None:
        training = run.training
        if self._runs.get(training.id) is not run or run.version != version:
            return
        training.progress = run.goal
        run.counted_until_s = self.now
        training.epoch += 1
        if training.is_done:
            del self._runs[training.id]
            self._num_left -= 1
            if self.histories is not None:
                self.histories.let_go(training.id, self.now)
            self._handle(JobFinished(training.id, run.generation))
            self._interfere()
            return
        if self._agents_watch:
            run.observe(self.now)
            run.tune()
        else:
            run.find_speed()
        self._predict(run)

    def _report(self, number: int) -> None:
        self._next_report_s = self.options.agent.report_interval_s * (number + 1)
        for run in self._runs.values():
            self._look_at(run)
        if self.policy.reads_models:
            for run in list(self._runs.values()):
                if run.trains(self.now):
                    self._send_report(run)
        self._at(self._next_report_s, Rank.REPORT, self._report, number + 1)

    def _report_of(self, run: Run) -> None:
        """One job's own, for as long as it stays where it is."""
        if self._runs.get(run.training.id) is run:
            self._look_at(run)
            if self.policy.reads_models:
                self._send_report(run)
            self._at(self.now + self.options.agent.report_interval_s, Rank.REPORT, self._report_of, run)

    def _look_at(self, run: Run) -> None:
        """Count what it has done, and let its agent measure and tune."""
        run.count(self.now)
        if self._agents_watch:
            run.observe(self.now)
            run.tune()
        self._predict(run)

    def _send_report(self, run: Run) -> None:
        training = run.training
        gradient = training.truth.gradient(training.epoch, training.batch_size)
        model = training.agent.model(gradient, training.summary(), self.options.world.realloc_delay_s)
        self._handle(JobReported(training.id, run.generation, training.agent.profile, model))

    def _interfere(self) -> None:
        """Jobs on several nodes hinder each other where they meet."""
        share = self.options.world.interference
        if not share:
            return
        on_node: dict[NodeId, int] = {}
        spread = [run for run in self._runs.values() if run.shape.num_nodes > 1]
        for run in spread:
            for node in run.allocation.gpus:
                on_node[node] = on_node.get(node, 0) + 1
        for run in self._runs.values():
            meets = run.shape.num_nodes > 1 and any(on_node[node] > 1 for node in run.allocation.gpus)
            slowdown = 1.0 - share if meets else 1.0
            if slowdown != run.slowdown:
                run.count(self.now)
                run.slowdown = slowdown
                run.find_speed()
                self._predict(run)

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.options.seed))

    def _plan_failure(self, node: NodeId) -> None:
        mean = self.options.world.node_mtbf_s
        if mean is not None and node in self.scheduler.state.cluster:
            at = self.now - mean * float(np.log1p(-self._rng.random()))
            self._fails_at_s[node] = at
            self._at(at, Rank.WORLD, self._fail_node, node)

    def _fail_node(self, node_id: NodeId) -> None:
        cluster = self.scheduler.state.cluster
        if node_id in cluster and self._fails_at_s.get(node_id) == self.now:
            node = cluster[node_id]
            self._change_node(NodeLost(node_id))
            self._fails_at_s[node_id] = self.now
            self._at(self.now + self.options.world.node_repair_s, Rank.WORLD, self._repair_node, node, self.now)

    def _repair_node(self, node: Node, failed_at_s: float) -> None:
        if self._fails_at_s.get(node.id) == failed_at_s:
            self._change_node(NodeJoined(node))

    def _change_node(self, event: Event) -> None:
        self._handle(event)
        match event:
            case NodeJoined(node):
                self._fails_at_s.pop(node.id, None)
                self._plan_failure(node.id)
            case NodeLost(node_id):
                self._fails_at_s.pop(node_id, None)
                for run in [run for run in self._runs.values() if node_id in run.allocation.gpus]:
                    self._lose_node(run, node_id)

    def _lose_node(self, run: Run, node: NodeId) -> None:
        """The survivors re-form; a job that cannot do with them stops and begins its epoch anew."""
        job, spec = run.training.id, run.training.spec
        survivors = run.allocation.without(node)
        run.count(self.now)
        if survivors and survivors.num_gpus >= spec.gpu_bounds[0] and self.options.scheduler.in_place:
            reformed = self._place(job, run.generation, survivors)
            reformed.membership = run.membership + 1
            self._at(
                self.now, Rank.WORLD, self._handle, ReplicaLost(job, run.generation, reformed.membership, survivors)
            )
            if not run.trains(self.now):  # the scheduler still waits for it
                self._at(reformed.ready_at_s, Rank.WORLD, self._get_ready, reformed)
        else:
            del self._runs[job]
            run.training.fall_back()
            self._interfere()
            self._at(self.now, Rank.WORLD, self._handle, JobStopped(job, run.generation))
