"""A service without a world: a real scheduler, its events in a list, and answers that a test puts in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from pollux.core import (
    Allocation,
    Event,
    FrozenMap,
    Job,
    JobCancelled,
    JobId,
    JobPaused,
    JobRescaled,
    JobResumed,
    JobSubmitted,
    KindsImported,
    Node,
    NodeDrained,
    NodeId,
    NodeJoined,
    Plan,
    PlanMade,
    ReplicasReady,
    RoundDue,
)
from pollux.errors import Permanent, UnknownName
from pollux.scheduler import Scheduler
from pollux.scheduler.store import MemoryLog, Record
from pollux.service.options import ServiceOptions
from pollux.service.store import StoredEvent
from pollux.wire.api import LogFile
from pollux.wire.entries import JournalEntry
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import LogPart

TOKEN = "s3cret-token"
START_S = 1_700_000_000.0


class FakeLog(MemoryLog):
    """A log that also tells its story, as the one of the service does."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[StoredEvent] = []
        self.changed = asyncio.Event()

    @property
    def last_number(self) -> int:
        return len(self.stored)

    def append(self, record: Record) -> None:
        super().append(record)
        job = getattr(record.event, "job", "")
        self._store(record.time_s, record.event, job)

    def note(self, at_s: float, entry: JournalEntry, job: JobId) -> None:
        self._store(at_s, entry, job)

    def events(self, after=0, limit=1000, job=None, *, last=None) -> list[StoredEvent]:
        found = [each for each in self.stored if each.number > after and job in (None, each.job)]
        return found[:limit] if last is None else found[-last:]

    def _store(self, at_s: float, document: Event | JournalEntry, job: str) -> None:
        self.stored.append(StoredEvent(len(self.stored) + 1, at_s, type(document).__name__, job, document))
        self.changed.set()


@dataclass
class FakeService:
    """Two nodes of two GPUs each. Time is what `now_s` says."""

    options: ServiceOptions = field(default_factory=lambda: ServiceOptions(Path("/nowhere"), policy="fifo"))
    started_at_s: float = START_S
    now_s: float = START_S
    is_recovering: bool = False
    warnings: tuple[str, ...] = ()
    is_ending: bool = False
    reports: dict[str, AgentReport] = field(default_factory=dict)
    log_files: tuple[LogFile, ...] = ()
    printed: bytes = b""
    away: set[str] = field(default_factory=set)
    ended_with: list[bool] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    refuses: Exception | None = None
    """What the next order raises."""

    def __post_init__(self) -> None:
        self.log = FakeLog()
        self.scheduler = Scheduler(self.log)
        for name in ("n0", "n1"):
            self.hear(NodeJoined(Node(NodeId(name), 2)))

    def hear(self, event: Event) -> None:
        self.scheduler.handle(event, self.now_s)

    def place(self, **gpus: dict[str, int]) -> None:
        """Make and carry out a plan: names of jobs with the GPUs of each node."""
        number = self.scheduler.state.round + 1
        self.hear(RoundDue(number))
        allocations = {JobId(job): Allocation(FrozenMap(held)) for job, held in gpus.items()}
        self.hear(PlanMade(number, Plan(FrozenMap(allocations))))
        for job in gpus:
            self.hear(ReplicasReady(JobId(job), self.scheduler.state.jobs[JobId(job)].issued_generation))

    def check(self, request):
        if self.refuses is not None:
            raise self.refuses
        return request

    def submit(self, request) -> Job:
        self.check(request)
        number = len(self.scheduler.state.jobs) + len(self.scheduler.state.ended) + 1
        spec = request.spec(JobId(f"j-{number}"), "/checkpoints")
        self.hear(JobSubmitted(spec))
        return self.job(spec.id)

    def pause(self, job_id: JobId) -> Job:
        return self._order(job_id, JobPaused(job_id))

    def resume(self, job_id: JobId) -> Job:
        return self._order(job_id, JobResumed(job_id))

    def cancel(self, job_id: JobId) -> Job:
        return self._order(job_id, JobCancelled(job_id))

    def scale(self, job_id: JobId, min_gpus: int, max_gpus: int | None) -> Job:
        return self._order(job_id, JobRescaled(job_id, min_gpus, max_gpus))

    def _order(self, job_id: JobId, event: Event) -> Job:
        if self.refuses is not None:
            raise self.refuses
        if self.job(job_id).phase.is_terminal:
            raise Permanent(f"Job {job_id} has ended.")
        self.hear(event)
        return self.job(job_id)

    def drain(self, node: NodeId) -> None:
        self.hear(NodeDrained(self.scheduler.state.cluster[node].id))

    def undrain(self, node: NodeId) -> None:
        self.hear(NodeJoined(Node(self.scheduler.state.cluster[node].id, 2)))

    def import_kinds(self, registry, *, replaces: bool) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.hear(KindsImported(registry.kinds, replaces))

    def job(self, job_id: JobId) -> Job:
        found = self.scheduler.state.job(job_id)
        if found is None:
            raise UnknownName("job", job_id, self.scheduler.state.jobs)
        return found

    def report_of(self, job_id: JobId) -> AgentReport | None:
        return self.reports.get(job_id)

    def waits_for(self, job: Job) -> str:
        return "" if job.phase.holds_gpus or job.phase.is_terminal else "free GPUs"

    def node_state(self, node: NodeId) -> str:
        if node in self.away:
            return "away"
        return "ready" if self.scheduler.state.cluster[node].schedulable else "drained"

    def node_address(self, node: NodeId) -> str:
        return f"unix:/nodes/{node}"

    async def logs(self, job_id: JobId) -> tuple[LogFile, ...]:
        return self.log_files

    async def read_log(self, job_id: JobId, node: NodeId, replica: str, offset: int, limit: int) -> LogPart:
        if (replica, node) not in {(each.replica, each.node) for each in self.log_files}:
            raise UnknownName("log", f"{node}/{replica}", [])
        begin = offset if offset >= 0 else max(len(self.printed) + offset, 0)
        part = self.printed[begin : begin + limit]
        return LogPart(part.decode(), begin + len(part))

    async def wait_for_event(self, after: int, timeout_s: float) -> None:
        while self.log.last_number <= after:
            self.log.changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.log.changed.wait()
            except TimeoutError:
                return

    def end(self, *, stop_jobs: bool) -> None:
        self.is_ending = True
        self.ended_with.append(stop_jobs)
