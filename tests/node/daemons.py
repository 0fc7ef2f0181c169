"""Daemons in threads of the test's process, with a keeper of few words and replicas that say what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pollux.core import FrozenMap, JobId, NodeId, Progress
from pollux.errors import Permanent
from pollux.node.daemon import Daemon, DaemonOptions
from pollux.node.keeper_client import Child, KeeperClient, NoKeeper
from pollux.node.run import RunOptions
from pollux.wire.entries import BatchSetting, RunState
from pollux.wire.frames import Channel, ask
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import Done, Launch, ListReplicas, NodeNews, ReplicaHere, ReplicaNews, RunNews, Watch
from pollux.wire.replicas import Instruction, ReplicaPhase, ReplicaStatus

PATIENT_S = 60.0
"""Half of the time that a test has: a hang is a failure, a slow machine is none."""
QUICK = RunOptions(ready_timeout_s=20.0, repair_grace_s=0.1, stop_timeout_s=10.0, node_timeout_s=1.0)


def until(holds: Callable[[], Any]) -> Any:
    """What `holds` returns as soon as it is true."""
    end_s = time.monotonic() + PATIENT_S
    while not (result := holds()):
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)
    return result


def freeze(pid: int) -> None:
    """Stop a process, and wait until it stands still: a signal that comes earlier would still be heeded."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


class FakeKeeper(KeeperClient):
    """Starts `sleep` for a replica. Outlives daemons, as the real one does; ends are kept while none is there."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.kept: dict[str, int | None] = {}
        self.stores: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self.forgotten: list[str] = []
        self.num_stores = 0
        self.is_broken = False
        self.is_lost = False
        self.has_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def connect(self, folder, *, preload=None, timeout_s=0.0) -> None:
        self._loop = asyncio.get_running_loop()

    async def spawn(self, tag, launch, environment, log, claim=None) -> int:
        self._check()
        if tag not in self.processes:
            log.write_text("first\nsecond\n\nRuntimeError: it broke\n")
            self.environments[tag] = environment
            process = self.processes[tag] = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            self.kept[tag] = None
            threading.Thread(target=self._reap, args=(tag, process)).start()
        return self.processes[tag].pid

    def _reap(self, tag: str, process: subprocess.Popen[bytes]) -> None:
        self.kept[tag] = code = process.wait()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: self.on_exit(tag, process.pid, code))

    def end(self, tag: str, number: int = signal.SIGKILL) -> None:
        self.processes[tag].send_signal(number)

    def _check(self) -> None:
        if self.is_broken:
            raise Permanent("The keeper has a bad day.")
        if self.is_lost:
            raise NoKeeper("The keeper is gone.", 1.0)

    async def host_store(self, job, host="") -> tuple[int, int]:
        self._check()
        if job not in self.stores:
            self.num_stores += 1
            self.stores[job] = subprocess.Popen(["sleep", "1000"]), 1000 + self.num_stores
        process, port = self.stores[job]
        return process.pid, port

    def end_store(self, job: str) -> None:
        process, _ = self.stores.pop(job)
        process.kill()
        process.wait()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self.on_store_exit(job, process.pid))

    async def children(self) -> list[Child]:
        return [Child(tag, self.processes[tag].pid, code) for tag, code in self.kept.items()]

    async def forget(self, tag) -> None:
        self.kept.pop(tag, None)

    async def forget_job(self, job) -> None:
        self.forgotten.append(job)
        if job in self.stores:
            self.end_store(job)

    async def close(self, *, end, grace_s=0.0) -> None:
        self._loop = None
        self.has_ended = end
        if end:
            self.kill_all()

    def kill_all(self) -> None:
        for process in [*self.processes.values(), *(process for process, _ in self.stores.values())]:
            process.kill()
            process.wait()


class Node:
    """A daemon on a folder; `stop` it and `start` it again as often as you like."""

    def __init__(self, folder: Path, name: str = "a", keeper: FakeKeeper | None = None, **settings: Any) -> None:
        self.folder = folder
        self.name = NodeId(name)
        self.keeper = keeper or FakeKeeper()
        self.links: list[Replica] = []
        """All that were ever made."""
        self.token_file = settings.pop("token_file", None)
        self.slots = settings.pop("slots", 4)
        self.options = DaemonOptions(**{"run": QUICK, "hang_after_s": 600.0, "end_grace_s": 2.0, **settings})

    def start(self) -> Node:
        self.daemon = Daemon(
            self.folder, self.name, "127.0.0.1", 0, self.slots, self.options,
            token_file=self.token_file, keeper=self.keeper,
        )  # fmt: skip
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        until(lambda: self.daemon.address or not self.thread.is_alive())
        if self.failure is not None:
            raise self.failure
        return self

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self.daemon.run()

        try:
            asyncio.run(main())
        except BaseException as error:
            self.failure = error

    def stop(self, *, end_all: bool = False) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(lambda: self.daemon.stop(end_all=end_all))
        self.thread.join(PATIENT_S)
        assert not self.thread.is_alive()

    def end(self) -> None:
        """Leave nothing behind."""
        for link in self.links:
            link.close()
        self.stop(end_all=True)
        self.keeper.kill_all()

    @property
    def token(self) -> str:
        return self.daemon.folder.token

    @property
    def address(self) -> str:
        return self.daemon.address

    def ask(self, request: Any) -> Any:
        return ask(self.daemon.folder.address, self.token, request, PATIENT_S)

    def connect(self) -> Channel:
        return Channel.connect(self.address, self.token, PATIENT_S)

    def replicas(self, job: str = "j") -> dict[str, ReplicaHere]:
        return {here.replica: here for here in self.ask(ListReplicas(JobId(job))).replicas}

    def pid(self, replica: str, job: str = "j") -> int:
        return until(lambda: self.replicas(job)[replica].pid)

    def living(self, count: int, job: str = "j") -> list[Replica]:
        """Links to the replicas that live here, as soon as there are that many; the oldest comes first."""

        def names() -> list[str] | None:
            living = [here for here in self.replicas(job).values() if here.exit_code is None and here.pid]
            return [here.replica for here in living] if len(living) == count else None

        return [Replica(self, name, job) for name in until(names)]

    @contextlib.contextmanager
    def watching(self, job: str = "", replicas: bool = False) -> Iterator[Watching]:
        with self.connect() as channel:
            channel.send(Watch(job, replicas))
            channel.receive(Done, PATIENT_S)
            yield Watching(channel)


class Watching:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def news(self) -> NodeNews:
        return self.channel.receive(NodeNews, PATIENT_S)

    def event(self, kind: type) -> Any:
        """The next event of that kind; others are passed over."""
        while True:
            news = self.news()
            if isinstance(news, RunNews) and isinstance(news.event, kind):
                return news.event

    def replica(self, holds: Callable[[ReplicaNews], bool]) -> ReplicaNews:
        while True:
            news = self.news()
            if isinstance(news, ReplicaNews) and holds(news):
                return news


class Replica:
    """The link of a replica, spoken by the test."""

    def __init__(self, node: Node, replica: str, job: str = "j", pid: int | None = None) -> None:
        self.node = node
        self.job = JobId(job)
        self.replica = replica
        self.pid = pid or node.pid(replica, job)
        self.channel = Channel.connect(node.daemon.folder.address, node.token, PATIENT_S)
        node.links.append(self)

    def say(
        self, phase=ReplicaPhase.TRAINING, generation=1, membership=0, step=1, has_state=True, has_finished=False
    ) -> Replica:
        how = phase, generation, membership, step, has_state, 0.0, has_finished
        self.channel.send(ReplicaStatus(self.job, self.replica, self.pid, *how))
        return self

    def hears(self) -> Instruction:
        return self.channel.receive(Instruction, PATIENT_S)

    def hears_to_the_end(self) -> None:
        """Raises when the connection is lost."""
        while True:
            self.hears()

    def close(self) -> None:
        self.channel.close()


def report(step: int = 5, **fields: Any) -> AgentReport:
    state = RunState(step, Progress(float(step), 1000.0), 2, BatchSetting(64, 32), (1.0,), 0, 64 * step)
    return AgentReport(JobId("j"), 1, 0.0, state, **fields)


def launch(folder: Path, job: str = "j", **fields: Any) -> Launch:
    script = folder / "train.py"
    if not script.exists():
        script.write_text("import time\ntime.sleep(1000)\n")
    return Launch(JobId(job), str(script), directory=str(folder), environment=FrozenMap(), **fields)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Sockets want short paths, and pytest's are long."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="pollux-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
