"""The jobs that have their home here, by name: what the service asks of them, and what they have to tell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from pollux.core import Allocation, Event, GenerationAbandoned, JobId, JobStopped, NodeId, StopReason
from pollux.errors import InvalidSpec, Permanent, PolluxError, Temporary
from pollux.node.folder import StateFolder
from pollux.node.homed import HomedJob, Surroundings
from pollux.node.hosting import Hosting
from pollux.node.run import JobRun, RunOptions
from pollux.wire.nodes import (
    Launch,
    NodeNews,
    ReplicaNews,
    ReportNews,
    ResizeRun,
    RunJob,
    RunNews,
    RunStatus,
    StopRun,
)

log = logging.getLogger(__name__)

STORE_PAUSE_S = 1.0
LONGEST_STORE_PAUSE_S = 30.0
REMEMBERED_S = 24 * 3600.0
"""How long a job that has ended is found again by a daemon that starts."""


class Home:
    """`publish` gets what the watchers of a job are to hear. Requests raise `PolluxError` if they are refused."""

    def __init__(
        self,
        folder: StateFolder,
        node: NodeId,
        hosting: Hosting,
        publish: Callable[[RunNews | ReportNews], None],
        fingerprint: Callable[[Launch], str],
        options: RunOptions | None = None,
    ) -> None:
        self._around = Surroundings(folder, node, hosting, self._announce, self.hear, options or RunOptions())
        self._publish = publish
        self._fingerprint = fingerprint
        self._jobs: dict[JobId, HomedJob] = {}
        self._searches: set[asyncio.Task[None]] = set()
        """For stores of jobs that a daemon found without one."""

    # Requests

    async def start(self, request: RunJob) -> None:
        job, launch = request.job, request.launch
        if launch.job != job:
            raise InvalidSpec("launch.job", launch.job, f"is not the job {job!r} of the request", "Name one job")
        if not request.allocation:
            raise InvalidSpec("allocation", {}, "holds nothing to run the job on", "Give it at least one GPU")
        if launch.is_plain and request.allocation.num_gpus != 1:
            fix = "Allocate 1 on the node that it is to run on; launch.gpus says how many slots it holds"
            problem = "a plain command is one process"
            raise InvalidSpec("allocation", dict(request.allocation.gpus), problem, fix)
        self._check_addresses(request.allocation, request.addresses)
        fingerprint = await asyncio.to_thread(self._fingerprint, launch)
        homed = self._jobs.get(job)
        if homed is not None and homed.is_another(launch):
            self._replace(homed)
            homed = None
        if homed is None:
            run = JobRun(job, self._around.options)
            homed = self._jobs[job] = HomedJob(self._around, run, launch, request.addresses, fingerprint)
        async with homed.changing:
            try:
                store = "" if launch.is_plain else await self._around.hosting.host_store(job, request.generation)
                homed.run.store = store
                orders = homed.run.start(request.generation, request.allocation, time.monotonic())
            except Exception:
                if homed.run.is_over:
                    self._around.hosting.forget(job, request.generation)  # the store may have been started for nothing
                if homed.saved is None:
                    self._jobs.pop(job, None)
                raise
            self._jobs[job] = homed  # a request before this one may have failed
            if orders:
                homed.begin(launch, fingerprint)
            homed.learn_addresses(request.addresses)
            homed.experience = request.experience
            log.info("Job %s: generation %d starts, %s.", job, request.generation, _told(request.allocation))
            homed.carry_out(orders)

    async def resize(self, request: ResizeRun) -> None:
        job, allocation = request.job, request.allocation
        homed = self._jobs.get(job)
        if homed is None:
            self._announce(GenerationAbandoned(job, request.generation, "The job does not run here."))
            return
        if homed.launch.is_plain:
            raise Permanent(f"Job {job} is a plain command, which keeps its GPUs. Stop it, and run it with others.")
        if not allocation:
            raise InvalidSpec("allocation", {}, "holds nothing to run the job on", "Stop the job instead")
        self._check_addresses(allocation, {**homed.addresses, **request.addresses})
        async with homed.changing:
            fingerprint = await asyncio.to_thread(self._fingerprint, homed.launch)
            in_place = fingerprint == homed.fingerprint
            orders = homed.run.resize(request.generation, allocation, in_place, time.monotonic())
            if orders and not in_place:
                homed.fingerprint = fingerprint
            homed.learn_addresses(request.addresses)
            homed.experience = request.experience
            how = "in place" if in_place else "by checkpoint and restart, for its code has changed"
            log.info("Job %s: to generation %d, %s, %s.", job, request.generation, _told(allocation), how)
            homed.carry_out(orders)

    async def stop(self, request: StopRun) -> None:
        homed = self._jobs.get(request.job)
        if homed is None:
            self._announce(JobStopped(request.job, request.generation))
            return
        async with homed.changing:
            orders = homed.run.stop(request.generation, request.reason, time.monotonic())
            log.info("Job %s is to stop: %s.", request.job, request.reason)
            homed.carry_out(orders)

    def stop_unheard(self) -> None:
        """The token was changed, and replicas which know the old one alone are not heard any more: before they would
        be taken for hung, their jobs save and stop, to be started again. Plain commands have nothing to say."""
        for homed in self._jobs.values():
            if not homed.run.is_over and not homed.launch.is_plain:
                log.warning("Job %s knows another token: it saves and stops, to be started again.", homed.job)
                self._preempt(homed)

    async def stop_all(self, timeout_s: float) -> None:
        """Let every job here save and stop, and wait for that, but no longer."""
        until_s = time.monotonic() + timeout_s
        for homed in self._jobs.values():
            if not homed.run.is_over:
                self._preempt(homed)
        while not all(homed.run.is_over for homed in self._jobs.values()) and time.monotonic() < until_s:
            await asyncio.sleep(0.02)

    def runs(self) -> tuple[RunStatus, ...]:
        return tuple(homed.run.description() for homed in self._jobs.values())

    def standing(self, job: str) -> Iterator[RunNews]:
        """What somebody who begins to watch this job, or all of them, has to hear first."""
        for name, homed in self._jobs.items():
            if job in ("", name):
                for event in homed.run.standing():
                    yield RunNews(time.time(), event)

    def is_home_of(self, job: JobId) -> bool:
        return job in self._jobs

    def runs_job(self, job: JobId) -> bool:
        """Whether the job has its home here, and is not over."""
        return job in self._jobs and not self._jobs[job].run.is_over

    def drop(self, job: JobId) -> None:
        """Forget a job that is over."""
        if (homed := self._jobs.pop(job, None)) is not None:
            homed.close()

    # What happens

    def hear(self, news: NodeNews) -> None:
        """News of a node of any job here: of this one, or of another."""
        match news:
            case ReplicaNews(job=job, node=node, replica=here) if homed := self._jobs.get(job):
                homed.hear(node, here)
            case ReportNews(report=report) if report.job in self._jobs:
                self._publish(news)

    async def store_lost(self, job: JobId) -> None:
        """The rendezvous store of a job has ended: it gets another one, which its members hear of."""
        homed = self._jobs.get(job)
        if homed is None or homed.run.is_over:
            return
        log.warning("Job %s: its store is lost, and gets a successor.", job)
        await self._find_store(homed)

    async def recover(self, *, is_after_reboot: bool = False) -> None:
        """Go on with the jobs of the daemon before; after a restart of the machine, with what other nodes have of them.

        Those that nothing is left of have stopped.
        """
        for job in self._around.folder.jobs():
            path = self._around.folder.run_file(job)
            try:
                homed = HomedJob.restored(self._around, job)
            except FileNotFoundError:
                continue
            except PolluxError as error:
                log.error("Job %s is not run any more: %s cannot be read. %s", job, path, error)
                path.replace(path.with_suffix(".unreadable"))
                continue
            if homed.run.is_over and time.time() - path.stat().st_mtime > REMEMBERED_S:
                path.unlink()
                continue
            self._jobs[job] = homed
            log.info("Job %s is found again: %s.", job, homed.run.phase)
            if is_after_reboot and not homed.run.is_over:
                homed.lose_home()
            if not homed.run.is_over and not homed.launch.is_plain:
                try:
                    homed.run.store = await self._around.hosting.host_store(job, homed.run.issued_generation)
                except PolluxError as error:
                    log.error("Job %s has no store: %s", job, error)
                    search = asyncio.create_task(self._find_store(homed))
                    self._searches.add(search)
                    search.add_done_callback(self._searches.discard)
            homed.find_nodes()

    def close(self) -> None:
        for search in self._searches:
            search.cancel()
        for homed in self._jobs.values():
            homed.close()

    # Inside

    def _replace(self, homed: HomedJob) -> None:
        """Another job had this id, by a log that is lost. What it left is kept aside; `Permanent` while it runs."""
        job = homed.job
        if not homed.run.is_over:
            raise Permanent(f"Another job with the id {job} runs on node {self._around.node}. Cancel it, or wait.")
        aside = self._around.folder.set_aside(job)
        log.warning("Another job had the id %s: what it left is in %s.", job, aside)
        self.drop(job)

    async def _find_store(self, homed: HomedJob) -> None:
        """However long it takes: what trains needs none until its members change. Requests are served meanwhile."""
        pause_s = STORE_PAUSE_S
        while not homed.run.is_over:
            try:
                store = await self._around.hosting.host_store(homed.job, homed.run.issued_generation)
            except PolluxError as error:
                problem = error.args[0] if isinstance(error, Temporary) else error
                log.error("Job %s has no store: %s Next try in %g s.", homed.job, problem, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_STORE_PAUSE_S)
                continue
            async with homed.changing:
                if homed.run.is_over:
                    self._around.hosting.forget(homed.job, homed.run.issued_generation)  # it came too late
                else:
                    homed.run.store = store
                    homed.tick()
            return

    def _preempt(self, homed: HomedJob) -> None:
        newest = homed.run.issued_generation
        homed.carry_out(homed.run.stop(newest, StopReason.PREEMPTED, time.monotonic()))

    def _announce(self, event: Event) -> None:
        log.info("%s", event)
        self._publish(RunNews(time.time(), event))

    def _check_addresses(self, allocation: Allocation, addresses: Mapping[NodeId, str]) -> None:
        for node in allocation.gpus:
            if node != self._around.node and node not in addresses:
                fix = "Give host:port of its daemon"
                raise InvalidSpec("addresses", dict(addresses), f"node {node!r} is missing", fix)


def _told(allocation: Allocation) -> str:
    return ", ".join(f"{count} on {node}" for node, count in allocation.gpus.items())
