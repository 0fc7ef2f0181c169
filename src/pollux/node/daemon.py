"""The node daemon: puts its parts together, runs them until it is told to end, and leaves its replicas running.

`serve` is what `pollux node` calls; `Daemon` is for programs that have a loop of their own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pollux import __version__
from pollux.core import FrozenMap, JobId, NodeId
from pollux.errors import PolluxError
from pollux.node.accounts import account_of
from pollux.node.devices import gpu_type, visible_devices
from pollux.node.fingerprint import fingerprint
from pollux.node.folder import NodeFile, StateFolder
from pollux.node.home import Home
from pollux.node.hosting import Hosting
from pollux.node.inherited import inherited, whole
from pollux.node.keeper_client import KeeperClient
from pollux.node.logs import remove_old
from pollux.node.private_log import PrivateLog
from pollux.node.processes import send_signal
from pollux.node.run import RunOptions
from pollux.node.serving import Server, Watchers
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import NodeDescription, ReplicaNews, ReportNews

log = logging.getLogger(__name__)

PARENT_EVERY_S = 1.0
KEEPER_EVERY_S = 5.0
RETRY_S = 1.0
CLEAN_EVERY_S = 86400.0
MAX_LOG_BYTES = 10 * 2**20
"""Of node.log, before it becomes node.log.1."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    heartbeat_s: float = 1.0
    """How often replicas give a sign of life."""
    hang_after_s: float = 15.0
    """A replica that is silent for so long is killed."""
    keeper_hang_after_s: float = 30.0
    """A keeper that does not answer for so long is killed, and gets a successor. Replicas train on."""
    end_grace_s: float = 10.0
    """How long replicas may save when all is ended."""
    advertised_host: str = ""
    """Where other machines reach this one; empty: the host that it listens on, or its name if that is any."""
    is_ephemeral: bool = False
    """All replicas end with the daemon, and it with its parent process."""
    keep_logs_s: float = 30 * 86400.0
    """How long the logs of a job stay here after its end."""
    gpu_type: str = ""
    """What its slots are called instead of what they are; empty: what the driver says."""
    replica_env: FrozenMap[str, str] = field(default_factory=FrozenMap)
    """Variables that every replica here finds in its environment."""
    job_env: tuple[str, ...] = ()
    """Names of variables that jobs find as they are in the daemon's environment, beside those that all do."""
    inherits_env: bool = False
    """Jobs find all of the daemon's environment: somebody's own script runs in it, and nobody else's."""
    job_user: str = ""
    """Whom jobs run as; empty: as the daemon does."""
    preload: tuple[str, ...] | None = None
    """What the keeper imports for replicas; None: torch and Pollux."""
    run: RunOptions = field(default_factory=RunOptions)


class Daemon:
    """One node. `run` may be called once."""

    def __init__(
        self,
        folder: Path,
        node: NodeId,
        host: str = "127.0.0.1",
        port: int = 0,
        slots: int | None = None,
        options: DaemonOptions | None = None,
        *,
        token_file: Path | None = None,
        keeper: KeeperClient | None = None,
    ) -> None:
        self.folder = StateFolder(folder, token_file)
        self.node = node
        self._host = host
        self._port = port
        self._slots = count_slots() if slots is None else slots
        self._options = options or DaemonOptions()
        self._account = account_of(self._options.job_user) if self._options.job_user else None
        named = self._options.job_env
        passed_on = whole(os.environ) if self._options.inherits_env else inherited(os.environ, named, self._account)
        self._inherited = FrozenMap(passed_on)
        self._keeper = keeper or KeeperClient(passed_on, self._options.job_user)
        self._stopping = asyncio.Event()
        self._ends_all = self._options.is_ephemeral
        self.address = ""
        """host:port, once `run` listens."""

    def stop(self, *, end_all: bool = False) -> None:
        """Let `run` return soon. `end_all`: replicas, stores and keeper end, too."""
        self._ends_all |= end_all
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`. `Permanent` if another daemon uses the folder, `OSError` if the port is taken."""
        self.folder.lock()
        try:
            self.folder.admit(self._account)
            await self._run()
        finally:
            self.folder.close()

    async def _run(self) -> None:
        options, watchers, keeper = self._options, Watchers(), self._keeper
        reached_at = options.advertised_host or (
            socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host
        )

        def hear(news: ReplicaNews) -> None:
            watchers.publish(news)
            home.hear(news)

        def report(report: AgentReport) -> None:
            watchers.publish(ReportNews(report), is_of_home=home.is_home_of(report.job))

        def store_lost(job: JobId) -> None:
            chores.append(asyncio.create_task(home.store_lost(job)))

        def keeper_lost() -> None:
            hosting.orphan()
            chores.append(asyncio.create_task(self._renew_keeper()))

        devices = tuple(visible_devices(os.environ))
        hosting = Hosting(
            self.folder,
            self.node,
            keeper,
            hear,
            report,
            store_lost,
            slots=self._slots,
            devices=devices,
            gpu_type=options.gpu_type,
            extra=options.replica_env,
            inherited=self._inherited,
            host=self._host,
            reached_at=reached_at,
            heartbeat_s=options.heartbeat_s,
            hang_after_s=options.hang_after_s,
            keeper_timeout_s=options.run.ready_timeout_s,
        )
        home = Home(self.folder, self.node, hosting, watchers.publish, fingerprint, options.run)
        kind = options.gpu_type or gpu_type(devices)
        description = NodeDescription(
            self.node,
            os.getpid(),
            __version__,
            self._slots,
            kind,
            devices[: self._slots],
            options.replica_env,
            options.job_env,
            options.job_user,
        )
        server = Server(self.folder, description, hosting, home, watchers)
        keeper.on_exit, keeper.on_lost = hosting.ended, keeper_lost
        keeper.on_store_exit = lambda job, pid: hosting.store_ended(JobId(job), pid)
        chores = [asyncio.create_task(hosting.watch_silence())]
        if options.is_ephemeral:
            chores.append(asyncio.create_task(self._watch_parent(os.getppid())))
        try:
            await keeper.connect(self.folder.path, preload=options.preload)
            if is_after_reboot := self.folder.is_after_reboot:
                log.warning("The machine was restarted: what ran on node %s has stopped.", self.node)
            await hosting.recover(is_after_reboot=is_after_reboot)
            await home.recover(is_after_reboot=is_after_reboot)
            with suppress(OSError):  # tried again below
                self.folder.note_boot()
            if self.folder.has_new_token:
                home.stop_unheard()
            chores.append(asyncio.create_task(self._remove_old_logs(hosting, home)))
            chores.append(asyncio.create_task(self._watch_keeper()))
            before = self.folder.node_file()
            port = await server.listen(self._host, self._port, before.port if before else 0)
            self.address = f"{reached_at}:{port}"
            await self._write_down(NodeFile(self.node, os.getpid(), reached_at, port))
            log.info("Node %s listens at %s and %s, pid %d.", self.node, self.address, self.folder.socket, os.getpid())
            await self._stopping.wait()
        finally:
            if self._ends_all:
                log.info("All is ended: %d replicas, stores, and the keeper.", hosting.num_alive)
                await home.stop_all(options.end_grace_s)
                await hosting.end_all(options.end_grace_s)
            num_alive = hosting.num_alive
            is_idle = bool(self.address) and hosting.is_idle  # else it may not know yet what lives here
            for chore in chores:
                chore.cancel()
            home.close()
            hosting.close()
            await server.close()
            await keeper.close(end=self._ends_all or is_idle)
            self.folder.leave(is_for_good=self._ends_all)
            if num_alive:
                who = "1 replica trains" if num_alive == 1 else f"{num_alive} replicas train"
                log.info("Node %s ends; %s on. A daemon on this folder finds them.", self.node, who)
            else:
                log.info("Node %s ends.", self.node)

    async def _write_down(self, file: NodeFile) -> None:
        """What others find this daemon by, and the next one itself. On a full disk it waits until there is room, and
        serves meanwhile: its replicas are worth more than a clean start."""
        while not self._stopping.is_set():
            try:
                self.folder.note_boot()
                self.folder.copy_token()
                self.folder.write_node_file(file)
                return
            except OSError as error:
                log.error("Nothing can be written to %s, and nobody finds this daemon: %s", self.folder.path, error)
                await asyncio.sleep(RETRY_S)

    async def _renew_keeper(self) -> None:
        """Replicas of the keeper that is gone live on: see `Hosting.orphan`."""
        while True:
            try:
                await self._keeper.connect(self.folder.path, preload=self._options.preload)
                return
            except (PolluxError, OSError) as error:
                log.error("There is no keeper, so that no replica can be started: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _watch_keeper(self) -> None:
        while True:
            await asyncio.sleep(KEEPER_EVERY_S)
            with suppress(PolluxError):  # it is being renewed
                try:
                    async with asyncio.timeout(self._options.keeper_hang_after_s):
                        await self._keeper.children()
                except TimeoutError:
                    log.warning("The keeper, process %d, does not answer, and is killed.", self._keeper.pid)
                    send_signal(self._keeper.pid, signal.SIGKILL)

    async def _remove_old_logs(self, hosting: Hosting, home: Home) -> None:
        """Now and once a day."""

        def is_wanted(job: JobId) -> bool:
            return home.runs_job(job) or hosting.has_job(job)

        while True:
            for job in remove_old(self.folder, time.time() - self._options.keep_logs_s, is_wanted):
                home.drop(job)
                await asyncio.sleep(0)  # others have something to do as well
            await asyncio.sleep(CLEAN_EVERY_S)

    async def _watch_parent(self, parent: int) -> None:
        while os.getppid() == parent:
            await asyncio.sleep(PARENT_EVERY_S)
        log.warning("The process that started this daemon is gone.")
        self.stop(end_all=True)


def serve(
    folder: Path,
    node: NodeId,
    host: str = "127.0.0.1",
    port: int = 0,
    slots: int | None = None,
    options: DaemonOptions | None = None,
    token_file: Path | None = None,
) -> int:
    """Run a daemon until a signal, and log to node.log and to the terminal. The exit code.

    SIGTERM leaves replicas and keeper running, for the next daemon on this folder; SIGINT, and any end of an ephemeral
    daemon, ends them. `InvalidSpec` if the folder or the token will not do.
    """
    daemon = Daemon(folder, node, host, port, slots, options, token_file=token_file)
    handlers: list[logging.Handler] = [
        logging.StreamHandler(),
        PrivateLog(daemon.folder.log, maxBytes=MAX_LOG_BYTES, backupCount=3, encoding="utf-8"),
    ]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=handlers)
    try:
        asyncio.run(_until_signal(daemon))
    except (PolluxError, OSError) as error:
        log.error("%s", error)
        return 1
    return 0


async def _until_signal(daemon: Daemon) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, daemon.stop)
    loop.add_signal_handler(signal.SIGINT, partial(daemon.stop, end_all=True))
    await daemon.run()


def count_slots() -> int:
    """GPUs that this process may use, counted without any library; CPU cores where there are none."""
    devices = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices and visible is not None:
        devices = [name for name in visible.split(",") if name.strip()]
    return len(devices) or os.cpu_count() or 1
