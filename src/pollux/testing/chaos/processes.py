"""Who is who among the processes of a cluster on this machine: from /proc and from the files of its nodes. Linux."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pollux.node.processes import began_at
from pollux.service.place import ClusterFolder


class Role(StrEnum):
    SERVICE = "service"
    PLANNER = "planner"
    DAEMON = "daemon"
    WITNESS = "witness"
    """The parent of a keeper, which keeps exit codes; versions without it have no such process."""
    KEEPER = "keeper"
    STORE = "store"
    REPLICA = "replica"
    """Of an elastic job, or a plain command."""
    OTHER = "other"
    """Templates, lingering shells, children of commands, commands of people."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    began: int
    """In the kernel's ticks: tells it from a later one with the same pid."""
    role: Role
    command: str
    node: str = ""
    job: str = ""
    replica: str = ""

    @property
    def lives(self) -> bool:
        return began_at(self.pid) == self.began

    def __str__(self) -> str:
        who = "/".join(part for part in (self.node, self.job, self.replica) if part)
        return f"{self.role} {f'{who} ' if who else ''}(pid {self.pid})"


def processes_of(home: Path, folder: ClusterFolder) -> list[Process]:
    """All that name `home` in their command line, their environment or as their working directory, but us."""
    known = {pid: (Role.STORE, node, job, "") for node, job, pid in _stores(folder)}
    known |= {pid: (Role.REPLICA, node, job, name) for node, job, name, pid in _replicas(folder)}
    keepers = _keepers(folder)
    found: dict[int, Process] = {}
    for pid, command in _table(home):
        role, node, job, replica = known.get(pid) or (
            *(_role(pid, command, folder, keepers), _node_of(command, folder)),
            *("", ""),
        )
        if pid != os.getpid() and (began := began_at(pid)):
            found[pid] = Process(pid, began, role, command.replace("\0", " ").strip(), node, job, replica)
    return _with_families(found)


def _with_families(found: dict[int, Process]) -> list[Process]:
    """What a replica has started is of its node and of its job, too."""
    families = {pid: _parent_and_session(pid) for pid in found}
    is_new = True
    while is_new:
        is_new = False
        for pid, one in found.items():
            for kin in families[pid]:
                elder = found.get(kin)
                if not one.node and elder is not None and elder.role in (Role.REPLICA, Role.OTHER) and elder.node:
                    found[pid] = replace(one, node=elder.node, job=elder.job)
                    is_new = True
                    break
    return list(found.values())


def _parent_and_session(pid: int) -> tuple[int, ...]:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return int(fields[1]), int(fields[3])
    return ()


def _role(pid: int, command: str, folder: ClusterFolder, keepers: set[int]) -> Role:
    if "\0pollux.service.planning\0" in command:
        return Role.PLANNER
    if f"\0up\0--foreground\0--dir\0{folder.path}\0" in command:
        return Role.SERVICE
    if not _node_of(command, folder):
        return Role.OTHER
    if "\0pollux.node.witness\0" in command:
        return Role.WITNESS
    if "\0pollux.node.keeper\0" in command:
        return Role.KEEPER if pid in keepers else Role.OTHER
    return Role.DAEMON if "\0node\0" in command else Role.OTHER


def _node_of(command: str, folder: ClusterFolder) -> str:
    """Whose folder it names; empty: none."""
    found = re.search(rf"\0{re.escape(str(folder.nodes))}/([^/\0]+)", command)
    return found[1] if found else ""


def _table(home: Path) -> Iterator[tuple[int, str]]:
    mark = os.fsencode(home)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()  # empty: it has ended, and nobody has asked how
            if not command:
                continue
            is_ours = mark in command or mark in (folder / "environ").read_bytes()
            if is_ours or mark in os.fsencode(os.readlink(folder / "cwd")):
                yield int(folder.name), command.decode("utf-8", "replace")


def _keepers(folder: ClusterFolder) -> set[int]:
    """Those that listen on keeper.sock: what is forked from a keeper has the same command and closes that."""
    listening = set()
    for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[3] == "00010000" and fields[7].startswith(str(folder.nodes)):
            listening.add(f"socket:[{fields[6]}]")
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"\0pollux.node.keeper\0" in (path / "cmdline").read_bytes() and any(
                os.readlink(handle) in listening for handle in (path / "fd").iterdir()
            ):
                found.add(int(path.name))
    return found


def _replicas(folder: ClusterFolder) -> Iterator[tuple[str, str, str, int]]:
    """Node, job, name and pid of those that live."""
    for node, job, saved in _saved(folder):
        for one in saved.get("replicas", ()):
            pid, began = one.get("pid", 0), one.get("began", 0)
            if one.get("exit_code") is None and pid and began_at(pid) == began:
                yield node, job, str(one.get("replica", "")), pid


def _stores(folder: ClusterFolder) -> Iterator[tuple[str, str, int]]:
    for node, job, saved in _saved(folder):
        store = saved.get("store")
        if store and began_at(store["pid"]) == store["began"]:
            yield node, job, store["pid"]


def _saved(folder: ClusterFolder) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path in folder.nodes.glob("n*/jobs/*/replicas.json"):
        with suppress(OSError, ValueError):
            saved = json.loads(path.read_text("utf-8"))
            if isinstance(saved, dict):
                yield path.parents[2].name, path.parents[0].name, saved
