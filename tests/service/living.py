"""A service on fake daemons, for tests: started, killed, and started again on the same folder."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.service.fake_daemons import TOKEN, FakeDaemon, FakeProvider

from pollux.core import Job, JobId, MakePlan, Node, NodeId, Phase, PlanMade
from pollux.policies import registry
from pollux.scheduler import Scheduler
from pollux.service.options import ServiceOptions
from pollux.service.place import ClusterFolder
from pollux.service.planning import Planner
from pollux.service.service import Service
from pollux.service.store import SqliteLog
from pollux.wire.jobspec import parse


class InlinePlanner(Planner):
    """Plans in this process."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy, {}, 10.0)
        self._made = registry.make(policy)

    async def plan(self, request: MakePlan) -> PlanMade:
        await asyncio.sleep(0)
        return PlanMade(request.round, self._made.plan(request.snapshot, request.seed))


class Living:
    """`async with Living(2, 2) as living`: two nodes of two GPUs."""

    def __init__(self, *gpus: int, policy: str = "fifo-backfill", **options: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sv-", dir="/tmp"))
        self.place = ClusterFolder(self.folder)
        self.place.make()
        self.place.token_file.write_text(TOKEN)
        (self.folder / "train.py").write_text("from pollux.torch import Job\n")
        self.daemons = [FakeDaemon(Node(NodeId(f"n{number}"), count)) for number, count in enumerate(gpus)]
        defaults: dict[str, Any] = {"interval_s": 60.0, "retry_pause_s": 0.01, "early_gap_s": 0.01, "gather_s": 0.001}
        self.options = ServiceOptions(self.folder, policy=policy, **{**defaults, **options})

    async def __aenter__(self) -> Living:
        for daemon in self.daemons:
            await daemon.start()
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
        for daemon in self.daemons:
            await daemon.stop()
            shutil.rmtree(daemon.folder, ignore_errors=True)
        await asyncio.sleep(0.02)  # connections that were just being made end, too
        shutil.rmtree(self.folder, ignore_errors=True)

    async def start(self, *, wait: bool = True) -> None:
        self.store = SqliteLog(self.place.database)
        self.provider = FakeProvider(*self.daemons)
        planner = InlinePlanner(self.options.policy)
        self.service = Service(self.options, self.place, self.provider, self.store, planner)
        self.running = asyncio.create_task(self.service.run())
        if wait:
            await self.until(lambda: not self.service.is_recovering)

    async def kill(self) -> None:
        """As by kill -9: nothing is saved, nobody is told. The daemons live on."""
        self.service.scheduler.save = lambda: None  # type: ignore[method-assign]
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running
        self.store.close()

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    async def until(self, is_so: Callable[[], object], timeout_s: float = 50.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_so():
                if self.running.done():
                    self.running.result()
                await asyncio.sleep(0.002)

    async def submit(self, until: Phase | None = Phase.RUNNING, **fields: object) -> Job:
        document = {"command": "python train.py", "working_dir": str(self.folder), **fields}
        job = self.service.submit(parse(document))
        if until is not None:
            await self.reach(job.id, until)
        return self.job(job.id)

    async def reach(self, job: JobId, phase: Phase) -> Job:
        await self.until(lambda: self.job(job).phase is phase)
        return self.job(job)

    def job(self, job: JobId) -> Job:
        return self.service.job(job)

    def daemon_of(self, job: JobId) -> FakeDaemon:
        """Its home."""
        return next(daemon for daemon in self.daemons if job in daemon.runs)

    def opened(self) -> SqliteLog:
        """The log, while no service runs."""
        return SqliteLog(self.place.database)

    def replayed(self) -> Scheduler:
        """What a service that starts now would know, from the log alone and without any snapshot."""
        with SqliteLog(self.place.database, read_only=True) as log:
            scheduler = Scheduler(options=self.service.scheduler.state.options)
            for record in log.records():
                scheduler.state.apply(record.event, record.time_s)
            return scheduler


def live(main: Callable[[Living], Coroutine[Any, Any, None]], *gpus: int, **options: Any) -> None:
    """Run a test's coroutine on a living service."""

    async def run() -> None:
        async with asyncio.timeout(110):
            async with Living(*(gpus or (2, 2)), **options) as living:
                await main(living)

    asyncio.run(run())
