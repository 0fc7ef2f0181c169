"""A cluster for tests of commands: the REST API of a fake service on a loopback port, found by its folder."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from tests.service.fake_service import FakeService

from pollux import __version__
from pollux.core import FrozenMap, JobId, JobSpec, JobSubmitted, NodeId
from pollux.service.place import ClusterFolder, ServiceFile
from pollux.service.rest import create_app
from pollux.wire.api import LogFile
from pollux.wire.nodes import LogPart

PATIENT_S = 30.0
COMMAND = ("python", "train.py")


class LiveFake(FakeService):
    """Its replicas print what tests say; a test may act in its loop while a command follows it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output: dict[tuple[str, str], bytes] = {}
        self.looks = 0
        self.on_look: Callable[[int], None] = lambda looks: None
        """Called with how often somebody has asked for logs, before the answer."""

    def add(self, name: str = "", **fields: object) -> JobId:
        number = len(self.scheduler.state.jobs) + len(self.scheduler.state.ended) + 1
        spec = JobSpec(JobId(f"j-{number}"), name, COMMAND, "/work", env=FrozenMap({"KEY": "hidden"}), **fields)  # type: ignore[arg-type]
        self.hear(JobSubmitted(spec))
        return spec.id

    def prints(self, node: str, replica: str, text: str, *, is_running: bool = True, at_s: float = 1.0) -> None:
        key = (node, replica)
        self.output[key] = self.output.get(key, b"") + text.encode()
        file = LogFile(replica, NodeId(node), len(self.output[key]), is_running, at_s)
        others = (each for each in self.log_files if (each.node, each.replica) != key)
        self.log_files = (*others, file)

    async def logs(self, job_id: JobId) -> tuple[LogFile, ...]:
        self.looks += 1
        self.on_look(self.looks)
        return self.log_files

    async def read_log(self, job_id: JobId, node: NodeId, replica: str, offset: int, limit: int) -> LogPart:
        part = self.output[node, replica][offset : offset + limit]
        return LogPart(part.decode(), offset + len(part))


@contextmanager
def serving(service: FakeService, folder: ClusterFolder, pid: int = 4242) -> Iterator[str]:
    """The REST API of the service, with the folder as if its process ran there: the address."""
    folder.make()
    folder.lock()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(create_app(service, folder.token()), log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    folder.write_service_file(ServiceFile(pid, url, __version__, 1.0))
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(PATIENT_S)
        listener.close()
        folder.remove_service_file()
        folder.unlock()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Not pytest's: the paths of sockets must be short."""
    path = Path(tempfile.mkdtemp(prefix="live-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path)
