"""How the cluster in a folder stands when nobody answers there, in sentences that say what to do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pollux.errors import Permanent

if TYPE_CHECKING:
    from pollux.service.place import ClusterFolder, ServiceFile

SETTLE_S = 5.0
"""A service that runs says again within seconds where it is, if somebody has removed its files; one that starts may
take longer."""
LOOK_S = 0.05


def settled(folder: ClusterFolder, wait_s: float | None = None) -> ServiceFile | None:
    """Where the service is that runs here; one that does not say so is given some time. None: there is none, or it
    still does not."""
    from pollux.service.place import read_token

    until_s = time.monotonic() + (SETTLE_S if wait_s is None else wait_s)
    while folder.is_locked:
        running = folder.running()
        try:
            read_token(folder.token_file)
            if running is not None:
                return running
        except Permanent:
            if time.monotonic() > until_s and not hangs(folder):
                raise
        if time.monotonic() > until_s or hangs(folder):
            return running
        time.sleep(LOOK_S)
    return None


def hangs(folder: ClusterFolder) -> str:
    """What to do about a service that somebody has stopped; empty if nobody has."""
    from pollux.node.locks import holder, is_stopped

    pid = holder(folder.lock_file)
    if not pid or not is_stopped(pid):
        return ""
    return (
        f"The service of the cluster in {folder.path} (pid {pid}) is stopped, as by SIGSTOP or Ctrl-Z. Let it go on "
        f"with kill -CONT {pid}; or kill it with kill -9 {pid}, and start it again with pollux up{option(folder)}: "
        "jobs do not notice."
    )


def no_service(folder: ClusterFolder) -> str:
    where = option(folder)
    if folder.is_locked:
        return hangs(folder) or (
            f"The cluster in {folder.path} is just starting, or its service hangs ({folder.holder}): it does not say "
            f"where it listens. Try again in a few seconds; if that goes on, see {folder.log}, kill it with kill -9, "
            f"and start it again with pollux up{where}: jobs do not notice."
        )
    left = left_in(folder)
    was_killed = folder.service_file() is not None
    if left.replicas and not left.daemons:
        return f"The service and the daemons of the cluster in {folder.path} were killed; {goes_on(folder, left)}"
    if was_killed:
        return (
            f"The service of the cluster in {folder.path} was killed; its jobs may train on. Start it again with "
            f"pollux up{where}, or end all with pollux down{where}."
        )
    if left:
        return f"The service of the cluster in {folder.path} has ended; {goes_on(folder, left)}"
    return f"No cluster runs in {folder.path}. Start one with pollux up{where}."


def option(folder: ClusterFolder) -> str:
    """What names this folder in a command; empty for the usual one."""
    return "" if folder.path == type(folder)().path else f" --dir {folder.path}"


@dataclass(frozen=True, slots=True)
class Left:
    """What lives on in a folder without a service."""

    daemons: int
    replicas: int
    """Processes of jobs on nodes whose daemon is gone; of the others the daemons know."""

    def __bool__(self) -> bool:
        return bool(self.daemons or self.replicas)


def left_in(folder: ClusterFolder) -> Left:
    from pollux.node.folder import NodeFiles, is_locked
    from pollux.providers.local.remains import left_replicas

    nodes = [NodeFiles(path) for path in folder.node_folders()]
    orphaned = [node for node in nodes if not is_locked(node.lock_file)]
    return Left(len(nodes) - len(orphaned), sum(len(left_replicas(node)) for node in orphaned))


def goes_on(folder: ClusterFolder, left: Left) -> str:
    """How to get hold of what a service left when it ended."""
    where = option(folder)
    who = "its daemons and jobs go on"
    if not left.daemons:
        who = "1 process of a job runs" if left.replicas == 1 else f"{left.replicas} processes of jobs run"
        who += " on without them"
    return f"{who}: pollux up{where} finds them, pollux down{where} ends them."
