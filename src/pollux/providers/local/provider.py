"""Daemons on this machine that act as nodes, for as long as a service wants them, and longer than it lives."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.core import FrozenMap, Node, NodeId
from pollux.errors import Permanent, UnknownName
from pollux.providers.base import ProvidedNode, Provider
from pollux.providers.local.devices import DeviceReport, describe_devices, slots_of_each
from pollux.providers.local.remains import end_remains
from pollux.providers.local.supervised import REMAINS_GRACE_S, SupervisedDaemon, Wanted

if TYPE_CHECKING:
    from pollux.node.folder import StateFolder

log = logging.getLogger(__name__)

EVERY_S = 1.0
WHILE_STARTING_S = 0.1


class LocalProvider(Provider):
    """The nodes n0, n1 … with their state in `folder`/nodes; one provider at a time uses a folder.

    GPUs are shared out evenly; on a machine without, each node has `slots` CPU slots, by default its share of the
    cores. `options`: more of `pollux node`. `environment`: of the daemons, by default ours. `labels`: of every node.
    `replica_env`: what every replica finds in its environment; `job_env`: names of what it finds there as the daemons
    do. `job_user`: whom jobs run as. `gpu_type`: what the slots are called instead of what
    they are; they are CPU slots then, and no GPU is used. `InvalidSpec` if the folder, the token or the numbers will
    not do.
    """

    def __init__(
        self,
        folder: Path,
        token_file: Path,
        nodes: int = 1,
        slots: int | None = None,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        gpu_type: str | None = None,
        labels: Mapping[str, str] | None = None,
        replica_env: Mapping[str, str] | None = None,
        job_env: Sequence[str] = (),
        job_user: str = "",
    ) -> None:
        from pollux.node import devices
        from pollux.node.folder import StateFolder

        self._folder = folder.absolute() / "nodes"
        self._token_file = token_file
        self._options = tuple(options)
        self._environment = dict(os.environ if environment is None else environment)
        self._labels = FrozenMap(labels or {})
        self._replica_env = FrozenMap(replica_env or {})
        self._job_env = tuple(job_env)
        self._job_user = job_user
        report = DeviceReport([]) if gpu_type else describe_devices(self._environment)
        if report.problem:
            log.warning("%s", report.problem)
        self._named_type = gpu_type
        self._gpu_type = gpu_type or devices.gpu_type(report.devices)
        room = slots_of_each(nodes, slots, report.devices)
        self._wanted: dict[NodeId, SupervisedDaemon] = {}
        for position in range(nodes):
            node = NodeId(f"n{position}")
            mine = report.devices[position * room : (position + 1) * room]
            self._wanted[node] = self._daemon(StateFolder(self._folder / node, token_file), room, mine)
        self._daemons: dict[NodeId, SupervisedDaemon] = {}
        """Those that are nodes now."""
        self._on_change: Callable[[], None] = lambda: None
        self._told: object = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, on_change: Callable[[], None]) -> None:
        """Also ends what an earlier provider had on more nodes, and waits for that: its GPUs may be ours now."""
        self._on_change = on_change
        unwanted = [self._daemon(folder, 1, ()) for folder in self._unwanted()]
        for daemon in unwanted:
            log.info("Node %s is not wanted any more, and is ended.", daemon.node)
        self._daemons = dict(self._wanted)
        found = (daemon.look() for daemon in self._wanted.values())
        await asyncio.gather(*found, *(daemon.end() for daemon in unwanted))
        self._tell()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def nodes(self) -> tuple[ProvidedNode, ...]:
        return tuple(
            ProvidedNode(
                Node(node, daemon.slots, daemon.gpu_type or self._gpu_type, self._labels), daemon.folder.address
            )
            for node, daemon in self._daemons.items()
        )

    def reached_at(self, node: NodeId) -> str:
        return self._known(node).reached_at

    async def request(self, count: int) -> tuple[NodeId, ...]:
        raise Permanent(
            f"This machine has no more nodes: {len(self._daemons)} share its GPUs or cores already, and {count} more "
            "are asked for. End it, and start it again with more nodes or slots; or use another machine."
        )

    async def release(self, node: NodeId) -> None:
        daemon = self._known(node)
        await daemon.end()
        self._daemons.pop(node, None)
        log.info("Node %s is released.", node)
        self._tell()

    async def close(self, *, end: bool) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
            self._watching = None
        if end:
            await asyncio.gather(*(daemon.end() for daemon in self._daemons.values()))
        self._daemons = {}

    async def _watch(self) -> None:
        while True:
            is_starting = any(not daemon.is_ready for daemon in self._daemons.values())
            await asyncio.sleep(WHILE_STARTING_S if is_starting else EVERY_S)
            try:
                await asyncio.gather(*(daemon.look() for daemon in self._daemons.values()))
                for node, daemon in list(self._daemons.items()):
                    if daemon.is_given_up:
                        await self._give_up(node, daemon)
                self._tell()
            except Exception:
                log.exception("A bug: the daemons were not looked after this time.")

    async def _give_up(self, node: NodeId, daemon: SupervisedDaemon) -> None:
        """Nobody can tell its replicas anything: they are ended before their jobs may start elsewhere."""
        log.error(
            "Node %s is given up: its daemon dies whenever it is started. Mend what it says, then start the service "
            "again. Its last lines in %s: %s",
            *(node, daemon.folder.path, daemon.last_words),
        )
        await end_remains(daemon.folder, REMAINS_GRACE_S)
        self._daemons.pop(node, None)

    def _tell(self) -> None:
        said = (self.nodes(), [daemon.reached_at for daemon in self._daemons.values()])
        if said != self._told:
            self._told = said
            self._on_change()

    def _known(self, node: NodeId) -> SupervisedDaemon:
        try:
            return self._daemons[node]
        except KeyError:
            raise UnknownName("node", node, self._daemons) from None

    def _unwanted(self) -> list[StateFolder]:
        """Of nodes that an earlier provider had, and that still have processes."""
        from pollux.node.folder import StateFolder, is_locked

        folders = [path for path in sorted(self._folder.glob("n*/")) if path.name not in self._wanted]
        left = [path for path in folders if is_locked(path / "lock") or (path / "keeper.sock").exists()]
        return [StateFolder(path, self._token_file) for path in left]

    def _daemon(self, folder: StateFolder, slots: int, devices: Sequence[str]) -> SupervisedDaemon:
        from pollux.node import launching

        node = NodeId(folder.path.name)
        command = [*launching.COMMAND, "--dir", str(folder.path), "--node", node, "--slots", str(slots)]
        command += ["--token-file", str(folder.token_file), *self._options]
        if self._named_type is not None:
            command += ["--gpu-type", self._named_type]
        for name, value in self._replica_env.items():
            command += ["--env", f"{name}={value}"]
        for name in self._job_env:
            command += ["--job-env", name]
        if self._job_user:
            command += ["--job-user", self._job_user]
        environment = {**self._environment, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        wanted = Wanted(node, slots, self._gpu_type, self._replica_env, self._job_env, self._job_user)
        return SupervisedDaemon(wanted, folder, command, environment)
