"""The live driver: the scheduler that the simulator runs, and around it the clock, the planner, the log, the daemons.

Everything happens in one asyncio loop: each event is written to the log, taken in by the scheduler, and what it asks
for is handed to the world, before the next one is looked at. Only planning goes on beside it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pollux.core import (
    Action,
    Allocation,
    Event,
    Job,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobId,
    JobPaused,
    JobRecovered,
    JobReported,
    JobRescaled,
    JobResumed,
    JobSpec,
    JobSubmitted,
    KindsImported,
    MakePlan,
    Node,
    NodeDrained,
    NodeId,
    NodeJoined,
    Phase,
    ProfileRegistry,
    RoundDue,
    dumps,
    loads,
)
from pollux.errors import BackendError, InvalidJob, Permanent, PolicyFailed, PolluxError, UnknownName
from pollux.policies import registry
from pollux.providers.base import Provider
from pollux.scheduler import Scheduler, SchedulerOptions
from pollux.scheduler.reports import is_news
from pollux.service.experience import Experience
from pollux.service.ledger import Ledger
from pollux.service.options import ServiceOptions
from pollux.service.place import ClusterFolder
from pollux.service.placing import hopeless, waits_for
from pollux.service.planning import Planner
from pollux.service.recovery import from_ledger, sentence
from pollux.service.rounds import Rounds
from pollux.service.store import SqliteLog
from pollux.service.trouble import RETRY_S, Trouble
from pollux.service.world import World
from pollux.wire.api import LogFile
from pollux.wire.entries import Entry
from pollux.wire.jobspec import JobRequest, check_files, uses_pollux
from pollux.wire.jobspec.launch import launch_of
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import Launch, ListLogs, LogPart, LogsHere, ReadLog

log = logging.getLogger(__name__)

PRUNE_EVERY_S = 3600.0
REMEMBERED_NOTICES = 1024
"""Of each job; an agent that missed an answer, and a daemon that is found again, send their last notices again."""


class Service:
    """What the REST API talks to. Requests raise `UnknownName` (no such job or node), `Permanent` (it cannot be done
    now or any more) or `InvalidJob`, and then nothing has changed."""

    def __init__(
        self,
        options: ServiceOptions,
        place: ClusterFolder,
        provider: Provider,
        store: SqliteLog,
        planner: Planner | None = None,
    ) -> None:
        self.options = options
        self.started_at_s = time.time()
        self.is_recovering = True
        self.is_ending = False
        self.log = store
        self.policy = registry.make(options.policy, options.policy_options)
        self.scheduler = Scheduler(
            store,
            SchedulerOptions(seed=options.seed, retry_pause_s=options.retry_pause_s, abandoned_starts_fail=True),
        )
        self._time_s = self.scheduler.state.time_s
        self._looked_s = time.monotonic()
        self._place = place
        self._ledger = Ledger(place.jobs)
        self._lost = ""
        """What people are told of a log that has lost its end."""
        self._world = World(
            provider,
            place.token(),
            self.scheduler,
            store,
            self._launch,
            Experience(self.policy.shares_experience),
            self._hear,
            self._hear_report,
            self._ledger.note,
            options.node_grace_s,
        )
        self._planner = planner or Planner(options.policy, options.policy_options, options.plan_timeout_s)
        self._rounds = Rounds(options.interval_s, options.gather_s, options.early_gap_s)
        self._to_plan: MakePlan | None = None
        self._reports: dict[JobId, AgentReport] = {}
        self._fresh: set[JobId] = set()
        """Jobs whose last report the scheduler has not seen."""
        self._notices: dict[JobId, deque[Entry]] = {}
        self._bell = asyncio.Event()
        """Rings with the next entry of the log; then there is another one."""
        self._ending = asyncio.Event()
        self._stops_jobs = False
        self._since_saved = 0
        self._trouble = Trouble(store, lambda: self._rounds.hurry(0.0))

    # Its life

    async def run(self) -> None:
        """From the recovery of what was, to the end that `end` asks for."""
        planning = asyncio.create_task(self._recover_and_plan())
        pruning = asyncio.create_task(self._prune())
        ending = asyncio.create_task(self._ending.wait())
        try:
            done, _ = await asyncio.wait({planning, pruning, ending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {ending}:
                task.result()  # neither of them ends but by an exception
            planning.cancel()
            await asyncio.wait([planning])
            if self._stops_jobs:
                await self._stop_jobs()
        finally:
            for task in (planning, pruning, ending):
                task.cancel()
            await asyncio.gather(planning, pruning, ending, return_exceptions=True)
            await self._planner.close()
            await self._world.close(end_nodes=self._ending.is_set() and self._stops_jobs)
            self._trouble.close()
            self._save()

    def end(self, *, stop_jobs: bool) -> None:
        """Let `run` return soon. `stop_jobs`: jobs save and stop, and all daemons end; else they go on without us."""
        self.is_ending = True
        self._stops_jobs |= stop_jobs
        self._ending.set()
        self._ring()

    async def _recover_and_plan(self) -> None:
        state = self.scheduler.state
        log.info("The log is replayed: %d jobs have ended, %d have not.", len(state.ended), len(state.jobs))
        await self._recover_jobs()
        warming = asyncio.create_task(self._planner.warm_up())
        await self._world.start(self.options.recovery_s)
        self.is_recovering = False
        log.info("Ready: %d GPUs on %d nodes.", state.cluster.num_gpus, len(state.cluster.nodes))
        await warming
        while True:
            await self._rounds.due()
            try:
                await self._plan()
            except (PolluxError, OSError) as error:  # a full disk, a locked database: the next round may do
                log.error("A round came to nothing: %s", error)

    async def _recover_jobs(self) -> None:
        """Take up what the log has lost, as far as the files of the jobs know it; as soon as the log can be written."""
        state = self.scheduler.state
        found: list[Event] = []
        is_done = False
        while not is_done:
            try:
                for event in list(from_ledger(self._ledger.entries(state.ended), state)):
                    self._hear(event, None)
                    found.append(event)
                is_done = True
            except BackendError as error:
                self._trouble.note(error)
                await asyncio.sleep(RETRY_S)
        for job_id in state.jobs:  # a version before may not have written their files
            self._keep_in_ledger(job_id)
        if warning := sentence(self.log.num_lost, [event for event in found if isinstance(event, JobRecovered)]):
            log.error("%s", warning)
            self._lost = warning

    async def _plan(self) -> None:
        state = self.scheduler.state
        self._tell_reports()
        if not any(job.phase.may_be_given_gpus for job in state.jobs.values()):
            return
        self._hear(RoundDue(state.round + 1), None)
        request, self._to_plan = self._to_plan, None
        if request is None:
            return
        try:
            made = await self._planner.plan(request)
        except PolicyFailed as error:
            log.error("There is no plan for round %d: %s", request.round, error)
            return
        self._hear(made, None)

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(PRUNE_EVERY_S)
            try:
                self.scheduler.save()
                self.log.prune(self._now_s() - 86400 * self.options.keep_days)
            except PolluxError as error:
                log.error("The log was not cut: %s", error)

    async def _stop_jobs(self) -> None:
        until_s = time.monotonic() + self.options.stop_timeout_s
        self._world.stop_all()
        while held := [job.id for job in self.scheduler.state.jobs.values() if job.phase.holds_gpus]:
            if time.monotonic() > until_s:
                log.error("Not stopped in time: %s.", ", ".join(held))
                return
            await asyncio.sleep(0.05)

    # Requests

    def check(self, request: JobRequest) -> JobRequest:
        """As it would be run; `InvalidJob` if that can never be.

        A script that does not use pollux.torch would never say that it is ready: it is taken for a plain command.
        """
        faults = check_files(request)
        if not faults and request.script is not None and not uses_pollux(Path(request.script)):
            request = request.with_gpus()
        faults += hopeless(self._spec(request, JobId("job")), self._world.nodes)
        if faults:
            raise InvalidJob(faults)
        return request

    def submit(self, request: JobRequest) -> Job:
        request = self.check(request)
        state = self.scheduler.state
        spec = self._spec(request, self._ledger.new_id(request.name, len(state.jobs) + len(state.ended)))
        self._hear(JobSubmitted(spec, cause="api"), None)
        return self.job(spec.id)

    def pause(self, job_id: JobId) -> Job:
        return self._request(job_id, JobPaused(job_id, cause="api"))

    def resume(self, job_id: JobId) -> Job:
        job = self.job(job_id)
        if not job.phase.is_terminal and job.phase not in (Phase.PAUSED, Phase.PAUSING):
            raise Permanent(f"Job {job_id} is {job.phase}, not paused: there is nothing to resume.")
        return self._request(job_id, JobResumed(job_id, cause="api"))

    def cancel(self, job_id: JobId) -> Job:
        return self._request(job_id, JobCancelled(job_id, cause="api"))

    def scale(self, job_id: JobId, min_gpus: int, max_gpus: int | None) -> Job:
        job = self.job(job_id)
        if job.spec.rigid:
            raise Permanent(f"Job {job_id} is a plain command: its number of GPUs, {job.spec.requested_gpus}, stays.")
        event = JobRescaled(job_id, min_gpus, max_gpus, cause="api")
        if faults := hopeless(job.spec, self._world.nodes, min_gpus):
            raise InvalidJob(faults)
        return self._request(job_id, event)

    def drain(self, node: NodeId) -> None:
        self._known_node(node)
        self._hear(NodeDrained(node, cause="api"), None)

    def undrain(self, node: NodeId) -> None:
        found = self._known_node(node)
        if not self._world.is_there(node):
            raise Permanent(f"Node {node} is away: it takes jobs again when its daemon answers.")
        self._hear(NodeJoined(found, cause="api"), None)

    def import_kinds(self, registry: ProfileRegistry, *, replaces: bool) -> None:
        """Add to the profile registry, or put all of it in place of what is there."""
        self._hear(KindsImported(registry.kinds, replaces, cause="api"), None)

    def _request(self, job_id: JobId, event: Event) -> Job:
        job = self.job(job_id)
        if job.phase.is_terminal:
            raise Permanent(f"Job {job_id} has {_ENDS[job.phase]}: nothing can be changed any more.")
        self._hear(event, None)
        return self.job(job_id)

    # Questions

    def job(self, job_id: JobId) -> Job:
        found = self.scheduler.state.job(job_id)
        if found is None:
            raise UnknownName("job", job_id, self.scheduler.state.jobs)
        return found

    def report_of(self, job_id: JobId) -> AgentReport | None:
        """The last one, also of a job that has ended."""
        if job_id not in self._reports:
            stored = self.log.get(f"report/{job_id}")
            if stored is None:
                return None
            try:
                self._reports[job_id] = loads(stored, AgentReport)
            except PolluxError as error:  # of another version: the next one replaces it
                log.warning("The last report of job %s cannot be read: %s", job_id, error)
                return None
        return self._reports[job_id]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What people should know who look at the cluster."""
        return (*((self._lost,) if self._lost else ()), *self._trouble.warnings)

    def waits_for(self, job: Job) -> str:
        """Why it does not run; empty if it does."""
        return waits_for(job, self.scheduler.state, self._now_s(), self.is_recovering)

    def node_state(self, node: NodeId) -> str:
        if not self._world.is_there(node):
            return "away"
        cluster = self.scheduler.state.cluster
        return "ready" if node in cluster and cluster[node].schedulable else "drained"

    def node_address(self, node: NodeId) -> str:
        return self._world.address(node)

    async def logs(self, job_id: JobId) -> tuple[LogFile, ...]:
        """What its replicas have printed, on all nodes that answer, oldest first."""
        self.job(job_id)
        nodes = [node.id for node in self._world.nodes if self._world.is_there(node.id)]
        answers = await asyncio.gather(
            *(self._world.ask(node, ListLogs(job_id)) for node in nodes), return_exceptions=True
        )
        found: list[LogFile] = []
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, LogsHere):
                found += (
                    LogFile(here.replica, node, here.size, here.is_running, here.modified_at_s) for here in answer.logs
                )
            else:
                log.warning("The logs of job %s on node %s are not known: %s", job_id, node, answer)
        return tuple(sorted(found, key=lambda file: (file.modified_at_s, file.replica)))

    async def read_log(self, job_id: JobId, node: NodeId, replica: str, offset: int, limit: int) -> LogPart:
        self.job(job_id)
        try:
            answer = await self._world.ask(node, ReadLog(job_id, replica, offset, limit))
        except Permanent:  # it has no such log, or there cannot be one of that name
            listed = await self._world.ask(node, ListLogs(job_id))
            known = {here.replica for here in listed.logs} if isinstance(listed, LogsHere) else set()
            if replica in known:
                raise
            raise UnknownName(f"log of job {job_id} on node {node}", replica, known) from None
        if not isinstance(answer, LogPart):
            raise Permanent(f"Node {node} answers {type(answer).__name__} instead of a log. Update its daemon.")
        return answer

    async def wait_for_event(self, after: int, timeout_s: float) -> None:
        """Until the log has something with a higher number, or so long."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.log.last_number <= after and not self.is_ending:
                    await self._bell.wait()
        except TimeoutError:
            pass

    # What happens

    def _hear(self, event: Event, origin: NodeId | None) -> None:
        """Every event comes through here."""
        if isinstance(event, JobFinished | JobFailed) and event.job in self._fresh:
            self._tell_report(event.job)  # the registry is to have what it measured last
        if not is_news(self.scheduler.state, event):
            log.info("heard again %s", type(event).__name__, extra=_told(event, origin))
            return
        try:
            actions = self.scheduler.handle(event, self._now_s())
        except BackendError as error:  # of the log: nothing has happened
            self._trouble.note(error)
            raise
        # From here on it has happened, and nothing may make it look otherwise to whoever told it.
        log.info("heard %s", type(event).__name__, extra=_told(event, origin))
        for action in actions:
            if isinstance(action, MakePlan):
                self._to_plan = action
            else:
                log.info("do %s", type(action).__name__, extra=_told(action, None))
                self._world.do(action, origin)
        self._after(event)
        self._rounds.note(event, self.scheduler.state)

    def _after(self, event: Event) -> None:
        self._ring()
        job_id = getattr(event, "job", None)
        job = self.scheduler.state.job(job_id) if job_id else None
        if job is not None and not isinstance(event, JobReported):
            self._keep_in_ledger(job.id)
        if job is not None and job.phase.is_terminal and job.id in self._reports:
            self._keep_report(job.id)
        if job is not None and job.phase is Phase.PENDING and job.retry_at_s is not None:
            self._rounds.hurry(max(0.0, job.retry_at_s - self.scheduler.state.time_s))
        self._since_saved += 1
        if self._since_saved >= self.options.save_every:
            self._since_saved = 0
            self._save()

    def _save(self) -> None:
        try:
            self.scheduler.save()
        except BackendError as error:
            log.error("The state was not saved, and the next start takes longer: it replays the log. %s", error)

    def _keep_in_ledger(self, job_id: JobId) -> None:
        self._trouble.insist(lambda: self._ledger.keep(self.job(job_id)))  # as it stands when that can be done

    def _keep_report(self, job_id: JobId) -> None:
        """For the next service."""
        self._trouble.insist(lambda: self.log.put(f"report/{job_id}", dumps(self._reports[job_id])))

    def _hear_report(self, report: AgentReport) -> None:
        if self.scheduler.state.job(report.job) is None:
            return
        before = self._reports.get(report.job)
        if before is not None:  # "nothing new" must not make us forget what was new in the one before
            report = replace(report, profile=report.profile or before.profile, model=report.model or before.model)
        if before is None or report.generation >= before.generation:  # else told by the home that the job had before
            self._reports[report.job] = report
            self._fresh.add(report.job)
        seen = self._notices.get(report.job)
        if seen is None:
            stored = self.log.events(job=report.job, last=2 * REMEMBERED_NOTICES)
            seen = deque((one.document for one in stored if isinstance(one.document, Entry)), REMEMBERED_NOTICES)
            self._notices[report.job] = seen
        for notice in report.notices:
            if notice not in seen:
                try:
                    self.log.note(self._now_s(), notice, report.job)
                except BackendError as error:
                    self._trouble.note(error)
                    raise
                seen.append(notice)  # not earlier: one that could not be kept comes again
                self._ring()

    def _tell_reports(self) -> None:
        """The scheduler needs to know how jobs stand when it plans, and not more often."""
        for job_id in sorted(self._fresh):
            self._tell_report(job_id)

    def _tell_report(self, job_id: JobId) -> None:
        report = self._reports[job_id]
        job = self.scheduler.state.jobs.get(job_id)
        if job is not None and job.expects(report.generation):
            self._hear(report.as_event(), None)
            self._keep_report(job_id)
        self._fresh.discard(job_id)

    def _ring(self) -> None:
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    # Inside

    def _now_s(self) -> float:
        """Seconds since 1970. Goes on at its pace where the clock was set back, lest retries wait for hours."""
        looked_s = time.monotonic()
        self._time_s = max(time.time(), self._time_s + looked_s - self._looked_s)
        self._looked_s = looked_s
        return self._time_s

    def _launch(self, spec: JobSpec) -> Launch:
        self._place.make_checkpoints(spec.id, spec.checkpoint_dir)
        return launch_of(spec, fixed_batch=not self.policy.adapts_batch)

    def _spec(self, request: JobRequest, job_id: JobId) -> JobSpec:
        return request.spec(job_id, str(self._place.checkpoint_dir(job_id)))

    def _known_node(self, node: NodeId) -> Node:
        nodes = {one.id: one for one in self._world.nodes}
        if node not in nodes:
            raise UnknownName("node", node, nodes)
        return nodes[node]


_ENDS = {Phase.SUCCEEDED: "succeeded", Phase.FAILED: "failed", Phase.CANCELLED: "been cancelled"}


def _told(what: Event | Action, origin: NodeId | None) -> dict[str, Any]:
    """What the log may say of it: plain values alone, never a specification, for that may hold secrets."""
    said: dict[str, Any] = {}
    for one in fields(what):
        value = getattr(what, one.name)
        if isinstance(value, Allocation):
            said[one.name] = dict(value.gpus)
        elif isinstance(value, str | int | float) and value != "":
            said[one.name] = value
        elif isinstance(value, JobSpec | Node):
            said["id"] = value.id
    if origin is not None:
        said["told_by"] = origin
    return {"data": said}
