"""All jobs that hold GPUs in a virtual world: they form, train at their true speed, report, hinder each other and end.

A job that trains has at most one event ahead of it, the end of its epoch at its present speed; every change of speed
makes a new one and lets the old one lapse. Where all jobs are looked at together, it is foreseen again each time, and
what comes later than the next time is not noted at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pollux.core import (
    Allocation,
    Event,
    GenerationAbandoned,
    JobFinished,
    JobId,
    JobReported,
    JobStopped,
    NodeId,
    ReplicaLost,
    ReplicasReady,
    ResizeJob,
    StartJob,
    StopJob,
)
from pollux.policies.base import Policy
from pollux.scheduler import Scheduler
from pollux.simulator.agenda import Agenda, Rank
from pollux.simulator.lore import Lore
from pollux.simulator.options import Options
from pollux.simulator.run import Run, Training


class Runs:
    """Those of one world."""

    def __init__(
        self,
        agenda: Agenda,
        scheduler: Scheduler,
        tell: Callable[[Event], None],
        on_end: Callable[[JobId], None],
        trainings: Mapping[JobId, Training],
        policy: Policy,
        options: Options,
    ) -> None:
        """`tell` hands an event to the scheduler, and does what it then asks for; `on_end` hears of each job that has
        come to its end, before the scheduler does."""
        self.of_job: dict[JobId, Run] = {}
        self._agenda, self._scheduler, self._tell, self._on_end = agenda, scheduler, tell, on_end
        self._trainings = trainings
        self._policy = policy
        self._options = options
        self._agents_watch = policy.reads_models or policy.adapts_batch
        self._report_together = options.world.whole_seconds or (
            self._agents_watch and options.agent.first_report_s is None
        )
        self._next_report_s = options.agent.report_interval_s
        self._lore = Lore() if policy.shares_experience and options.agent.kind_prior else None

    def begin(self) -> None:
        """Foresee the first moment at which all report together, if there is one."""
        if self._report_together:
            self._agenda.at(self._next_report_s, Rank.REPORT, self._report, 1)

    def carry_out(self, action: StartJob | ResizeJob | StopJob) -> None:
        """Do with a job what the scheduler asks for."""
        match action:
            case ResizeJob(job=job) if self._options.world.warm_up_s and self._gets_replicas(job, action.allocation):
                ready_at_s = self._agenda.now + self._options.world.warm_up_s
                self._agenda.at(ready_at_s, Rank.WORLD, self._join, job, action.generation, action.allocation)
            case StartJob(job=job) | ResizeJob(job=job):
                self._form(job, action.generation, action.allocation)
            case StopJob(job=job):
                if job in self.of_job and self.of_job[job].generation <= action.generation:
                    self.of_job.pop(job).count(self._agenda.now)
                    self._interfere()
                self._agenda.at(self._agenda.now, Rank.WORLD, self._tell, JobStopped(job, action.generation))

    def lose_node(self, node: NodeId) -> None:
        """It is gone, and the scheduler knows."""
        for run in [run for run in self.of_job.values() if node in run.allocation.gpus]:
            self._lose_node(run, node)

    def _gets_replicas(self, job: JobId, allocation: Allocation) -> bool:
        """Whether it needs more than those that it has; they are started while it trains on."""
        if job not in self.of_job:
            return False
        held = self.of_job[job].allocation.gpus
        return any(count > held.get(node, 0) for node, count in allocation.gpus.items())

    def _join(self, job_id: JobId, generation: int, allocation: Allocation) -> None:
        """Replicas that were started for a running job are there; without all of them nothing changes."""
        job = self._scheduler.state.jobs.get(job_id)
        if job is None or not job.awaits(generation) or job_id not in self.of_job:
            return  # it has ended, or was stopped meanwhile
        if any(node not in self._scheduler.state.cluster for node in allocation.gpus):
            self._tell(GenerationAbandoned(job_id, generation, "a node was lost before its replicas were ready"))
        else:
            self._form(job_id, generation, allocation)

    def _form(self, job: JobId, generation: int, allocation: Allocation) -> None:
        run = self._place(job, generation, allocation)
        self._agenda.at(run.ready_at_s, Rank.WORLD, self._get_ready, run)

    def _get_ready(self, run: Run) -> None:
        """Unless it was stopped or formed anew since: then nobody is left to tell."""
        if self.of_job.get(run.training.id) is run:
            self._tell(ReplicasReady(run.training.id, run.generation))

    def _place(self, job: JobId, generation: int, allocation: Allocation) -> Run:
        """Put a job there, whether it comes from nowhere or from other GPUs."""
        before = self.of_job.get(job)
        if before is not None:
            before.count(self._agenda.now)
        world = self._options.world
        ready_at_s = self._agenda.now + world.realloc_delay_s
        cluster = self._scheduler.state.cluster
        training = self._trainings[job]
        if self._lore is not None:
            gpu_type = cluster[next(iter(allocation.gpus))].gpu_type
            self._lore.tell(training, gpu_type, self._scheduler.state.pool.kinds)
        run = Run(training, generation, allocation, cluster, world.rank_order, self._agenda.now, ready_at_s)
        self.of_job[job] = run
        self._interfere()
        self._predict(run)
        if self._agents_watch and self._options.agent.first_report_s is not None:
            self._agenda.at(ready_at_s + self._options.agent.first_report_s, Rank.REPORT, self._report_of, run)
        return run

    def _predict(self, run: Run) -> None:
        """Foresee the end of its epoch; where all report together only up to the next report."""
        training = run.training
        start = max(run.counted_until_s, run.ready_at_s)
        left = run.goal - training.progress
        if self._options.world.whole_seconds:  # as the artifact does
            seconds = self._next_report_s - start
            if seconds <= 0 or training.progress + run.rate * seconds < run.goal:
                return
            end = start + round(left / run.rate)
        else:
            end = start + max(left, 0.0) / run.rate
            if self._report_together and end > self._next_report_s:
                return
        # An epoch that ends at once ends after the round: its job was still training when the round looked.
        rank = Rank.WORLD if end > self._agenda.now else Rank.AFTER_ROUND
        self._agenda.at(end, rank, self._end_epoch, run, run.version)

    def _end_epoch(self, run: Run, version: int) -> None:
        training = run.training
        if self.of_job.get(training.id) is not run or run.version != version:
            return
        training.progress = run.goal
        run.counted_until_s = self._agenda.now
        training.epoch += 1
        if training.is_done:
            del self.of_job[training.id]
            self._on_end(training.id)
            self._tell(JobFinished(training.id, run.generation))
            self._interfere()
            return
        if self._agents_watch:
            run.observe(self._agenda.now)
            run.tune()
        else:
            run.find_speed()
        self._predict(run)

    def _report(self, number: int) -> None:
        self._next_report_s = self._options.agent.report_interval_s * (number + 1)
        for run in self.of_job.values():
            self._look_at(run)
        if self._policy.reads_models:
            for run in list(self.of_job.values()):
                if run.trains(self._agenda.now):
                    self._send_report(run)
        self._agenda.at(self._next_report_s, Rank.REPORT, self._report, number + 1)

    def _report_of(self, run: Run) -> None:
        """One job's own, for as long as it stays where it is."""
        if self.of_job.get(run.training.id) is run:
            self._look_at(run)
            if self._policy.reads_models:
                self._send_report(run)
            self._agenda.at(self._agenda.now + self._options.agent.report_interval_s, Rank.REPORT, self._report_of, run)

    def _look_at(self, run: Run) -> None:
        """Count what it has done, and let its agent measure and tune."""
        run.count(self._agenda.now)
        if self._agents_watch:
            run.observe(self._agenda.now)
            run.tune()
        self._predict(run)

    def _send_report(self, run: Run) -> None:
        training = run.training
        model = training.agent.model(run.gradient, training.summary(), self._options.world.realloc_delay_s)
        self._tell(JobReported(training.id, run.generation, training.agent.profile, model))

    def _interfere(self) -> None:
        """Jobs on several nodes hinder each other where they meet."""
        share = self._options.world.interference
        if not share:
            return
        on_node: dict[NodeId, int] = {}
        spread = [run for run in self.of_job.values() if run.shape.num_nodes > 1]
        for run in spread:
            for node in run.allocation.gpus:
                on_node[node] = on_node.get(node, 0) + 1
        for run in self.of_job.values():
            meets = run.shape.num_nodes > 1 and any(on_node[node] > 1 for node in run.allocation.gpus)
            slowdown = 1.0 - share if meets else 1.0
            if slowdown != run.slowdown:
                run.count(self._agenda.now)
                run.slowdown = slowdown
                run.find_speed()
                self._predict(run)

    def _lose_node(self, run: Run, node: NodeId) -> None:
        """The survivors re-form; a job that cannot do with them stops and begins its epoch anew."""
        job, spec = run.training.id, run.training.spec
        survivors = run.allocation.without(node)
        run.count(self._agenda.now)
        if survivors and survivors.num_gpus >= spec.gpu_bounds[0] and self._options.scheduler.in_place:
            reformed = self._place(job, run.generation, survivors)
            reformed.membership = run.membership + 1
            self._agenda.at(
                self._agenda.now,
                Rank.WORLD,
                self._tell,
                ReplicaLost(job, run.generation, reformed.membership, survivors),
            )
            if not run.trains(self._agenda.now):  # the scheduler still waits for it
                self._agenda.at(reformed.ready_at_s, Rank.WORLD, self._get_ready, reformed)
        else:
            del self.of_job[job]
            run.training.fall_back()
            self._interfere()
            self._agenda.at(self._agenda.now, Rank.WORLD, self._tell, JobStopped(job, run.generation))
