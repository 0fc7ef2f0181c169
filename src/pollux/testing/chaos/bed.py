"""What a campaign needs of the cluster that it disturbs: the seam behind which the hosts are.

`LocalBed` (local_bed.py) is one machine. A bed of several hosts implements the same protocol: it finds and signals
processes wherever they are. The folder of the cluster, that of its nodes and the witness files of jobs must be readable
and writable from where the campaign runs, as over a shared file system.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pollux.service.place import ClusterFolder
from pollux.testing.chaos.processes import Process, Role
from pollux.wire.service_client import ServiceClient


@dataclass(frozen=True, slots=True)
class Told:
    """How a command ended, and what it said."""

    exit_code: int | None
    """None: it was given up on after `seconds`."""
    out: str
    err: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.exit_code == 0

    def __str__(self) -> str:
        how = "did not end" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        return f"{how} after {self.seconds:.1f} s: {(self.err or self.out).strip() or 'it said nothing'}"


@dataclass(frozen=True, slots=True)
class Sent:
    """A signal that reached a process that lived."""

    process: Process
    number: int
    at_s: float


@dataclass
class Record:
    """Which signals a campaign has sent: what really happened to processes follows from it."""

    sent: list[Sent] = field(default_factory=list)

    def note(self, process: Process, number: int) -> None:
        self.sent.append(Sent(process, number, time.time()))

    def is_killed(self, pid: int, began: int) -> bool:
        return any((one.process.pid, one.process.began, one.number) == (pid, began, 9) for one in self.sent)

    def nodes_without_record(self, since_s: float, until_s: float, *, has_witnesses: bool) -> set[str]:
        """Nodes on which all that could have kept an exit code was killed in that time."""
        killed = {
            role: {
                one.process.node
                for one in self.sent
                if one.number == 9 and one.process.role is role and since_s <= one.at_s <= until_s
            }
            for role in (Role.KEEPER, Role.WITNESS)
        }
        return killed[Role.KEEPER] & killed[Role.WITNESS] if has_witnesses else killed[Role.KEEPER]


class Bed(Protocol):
    """A cluster that may be disturbed, and all that it leaves behind."""

    home: Path
    """For files of the campaign: witness files of jobs, backups. Never full."""
    folder: ClusterFolder
    record: Record
    nodes: Sequence[str]
    retry_pause_s: float
    """Of its service; needed to replay its log."""

    def up(self, *options: str, timeout_s: float = ...) -> Told:
        """`pollux up`, with what makes this cluster what it is."""

    def pollux(self, *arguments: str, timeout_s: float = ...) -> Told:
        """Any other command, to its end."""

    def client(self, timeout_s: float = ...) -> ServiceClient:
        """Of the service that runs. `Temporary` if none does."""

    def find(self, role: Role | None = None, node: str | None = None) -> list[Process]:
        """The processes of the cluster that live now, on all hosts; None: all of them."""

    def send(self, process: Process, number: int) -> bool:
        """A signal, which goes to the record if the process lived."""

    def node_folder(self, node: str) -> Path:
        """The state folder of its daemon."""

    def fill_disk(self) -> str | None:
        """Leave no room where the cluster keeps its files. None: done; else why that cannot be done here."""

    def free_disk(self) -> None:
        """Nothing happens if it is not full."""

    def keep(self) -> Path:
        """End everything that runs and keep the files: where they are."""

    def close(self) -> None:
        """End everything, and remove all files. May be called again."""
