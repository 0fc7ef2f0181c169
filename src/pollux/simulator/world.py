"""The virtual world: jobs that train, nodes that come and go, and the scheduler that is also deployed.

Time jumps from event to event (`agenda`). Here is what the scheduler hears and does: events, rounds, plans. What
happens to jobs is in `runs`, and what happens to nodes in `nodes`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pollux.core import (
    Cluster,
    Event,
    FrozenMap,
    JobId,
    JobSpec,
    JobSubmitted,
    MakePlan,
    Plan,
    PlanMade,
    RoundDue,
    Snapshot,
)
from pollux.errors import InvalidSpec, PolicyFailed, PolluxError
from pollux.policies.base import Policy
from pollux.scheduler import EventLog, Scheduler
from pollux.scheduler.rounds import RoundTimes
from pollux.simulator.agenda import Agenda, Rank
from pollux.simulator.cluster_file import NodeChange
from pollux.simulator.knowledge import Knowledge
from pollux.simulator.nodes import Nodes
from pollux.simulator.options import Options
from pollux.simulator.oracle import OracleSource
from pollux.simulator.run import Training
from pollux.simulator.runs import Runs
from pollux.simulator.timeline import Histories, Timeline
from pollux.simulator.truth import Truth

PATIENCE = 1000
"""Rounds in which nothing runs and nothing is ahead before the rest of the jobs counts as stuck."""


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
        self.timeline = Timeline()
        self.histories: Histories | None = None
        """Who wants them gives one before the run, to be filled: they take memory."""
        self.policy_cpu_s: list[float] = []
        self._agenda = Agenda()
        self._trainings: dict[JobId, Training] = {}
        self._runs = Runs(self._agenda, self.scheduler, self._handle, self._note_end, self._trainings, policy, options)
        self._oracle = OracleSource(policy.needs_oracle, options)
        self._plan = Plan()
        self._planned_for = Cluster()
        """The last plan that was checked, and its cluster: most rounds change nothing."""
        self._idle_rounds = 0
        gap_s = options.early_gap_s
        self._times = None if gap_s is None else RoundTimes(options.interval_s, gap_s, 0.0, self.now)
        """None: no round comes early."""
        Nodes(self._agenda, self.scheduler, self._handle, self._runs, options).begin(cluster, changes)
        nothing_known: dict[str | None, Knowledge] = defaultdict(lambda: Knowledge(options.agent.published_fit))
        for submitted_at_s, spec in specs:
            truth, knowledge = truths[spec.application or ""], nothing_known[spec.application]
            self._trainings[spec.id] = Training(spec, truth, options.agent, knowledge)
            self._agenda.at(submitted_at_s, Rank.WORLD, self._handle, JobSubmitted(spec))
        self._num_left = len(self._trainings)
        if self._times is None:
            self._agenda.at(options.interval_s, Rank.ROUND, self._regular_round, 1)
        else:
            self._agenda.at(self._times.next_s, Rank.ROUND, self._round_if_due)
        self._runs.begin()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._agenda.now

    def run(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Until every job has ended; `on_end` is called for each."""
        while self._num_left:
            left = self._num_left
            self._agenda.step()
            if self._num_left < left:
                on_end()

    def _note_end(self, job: JobId) -> None:
        self._num_left -= 1
        if self.histories is not None:
            self.histories.let_go(job, self.now)

    def _handle(self, event: Event) -> None:
        for action in self.scheduler.handle(event, self.now):
            if isinstance(action, MakePlan):
                self._make_plan(action)
            else:
                self._runs.carry_out(action)
        if self._times is not None:
            before_s = self._times.next_s
            self._times.note(event, self.scheduler.state, self.now)
            if self._times.next_s < before_s:
                self._agenda.at(self._times.next_s, Rank.ROUND, self._round_if_due)

    def _regular_round(self, number: int) -> None:
        self._round(number)
        # A product, not a sum: rounds and reports of the same moment must meet exactly.
        self._agenda.at(self.options.interval_s * (number + 1), Rank.ROUND, self._regular_round, number + 1)

    def _round_if_due(self) -> None:
        """Unless one has come since this was foreseen."""
        assert self._times is not None
        if self._times.next_s > self.now:
            return
        self._times.begin(self.now)
        state = self.scheduler.state
        is_needed = any(job.phase.may_be_given_gpus for job in state.jobs.values())
        self._round(state.round + 1 if is_needed else None)
        self._agenda.at(self._times.next_s, Rank.ROUND, self._round_if_due)

    def _round(self, number: int | None) -> None:
        """None: there is nobody to plan for, so that it does not count."""
        limit = self.options.world.max_time_s
        if self.now > limit:
            problem = f"{self._num_left} jobs had not ended by then ({self._names_left()})"
            raise InvalidSpec("world.max_time_s", limit, problem, "Raise it, or use another policy or a larger cluster")
        if number is not None:
            self._handle(RoundDue(number))
        self._agenda.at(self.now, Rank.SAMPLE, self._sample)  # once those that the round moves are where they go
        is_idle = not self._runs.of_job and not self._agenda.num_happening
        self._idle_rounds = self._idle_rounds + 1 if is_idle else 0
        if self._idle_rounds > PATIENCE:
            gpus = self.scheduler.state.cluster.num_gpus
            problem = "the policy gives these jobs nothing, and nothing else will happen"
            fix = f"Check that they can run on the {gpus} GPUs that the cluster now has, or use another policy"
            raise InvalidSpec("workload", self._names_left(), problem, fix)

    def _sample(self) -> None:
        self.timeline.sample(self.now, self.scheduler.state, self._runs.of_job.values())
        if self.histories is not None:
            self.histories.sample(self.now, self._runs.of_job.values())

    def _names_left(self) -> str:
        left = [job_id for job_id in self._trainings if job_id not in self.scheduler.state.ended]
        return ", ".join(left[:5]) + (" …" if len(left) > 5 else "")

    def _make_plan(self, request: MakePlan) -> None:
        snapshot = request.snapshot
        if self.policy.needs_oracle:
            answers = {
                job_id: self._oracle.ask(
                    self._trainings[job_id], self._runs.of_job.get(job_id), snapshot.cluster, self.now
                )
                for job_id in snapshot.jobs
            }
            snapshot = replace(snapshot, oracle=FrozenMap(answers))
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
