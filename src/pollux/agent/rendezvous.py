"""Members of a job find each other in its store and become a process group; and how to get out of a broken one.

The store is hosted by a daemon and outlives all replicas. Keys begin with generation and membership, so that what
was left behind by an earlier attempt is never read. Waiting for others is done by polling and ends as soon as a newer
membership is known; nothing here waits for a replica that is gone, but for a few milliseconds inside of gloo: see
`CONNECT_TIMEOUT_S`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pollux.agent.lingering import Lingering
from pollux.errors import InvalidSpec, Temporary
from pollux.wire.frames import parse_address
from pollux.wire.replicas import Join, Leave

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 30.0
LOOK_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
"""For how long gloo waits for a member's address, and five times that for its connection: all come at the same moment.

It matters if a member dies in just these milliseconds: the wait for a connection that will never come is the one that
cannot be cut short.
"""
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.02
RETRY_AFTER_S = 1.0

_OPEN_FILES = "/proc/self/fd"
_GLOO = ("gloo/transport/", "gloo/rendezvous/", "Application timeout caused pair closure")
"""In gloo's texts: where in its source an error was raised, which most begin with; and what a call is told that was
under way when another one ran out of time, which says no more than that."""
_MISUSE = "enforce fail"
"""In those of gloo's texts that report a broken rule, not a broken connection."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a member lets the others know when they gather."""

    rank: int
    step: int
    """Optimizer steps that its state holds."""
    has_state: bool
    address: str = ""
    """Where it gives its state away; empty: it does not."""
    key: str = ""
    """What a taker has to know."""
    sums: int = 0
    """How many sums outside of steps it has seen."""
    last_sum: tuple[float, ...] = ()
    is_inside: bool = False
    """Whether its script is in the loop over the loader."""


class GroupSockets:
    """The TCP connections that a process group opens, from a moment before it is made until `seal`.

    Told apart by their inodes: torch does not show them. On Linux only; elsewhere there are none, and a lost member is
    noticed by those alone that are connected to it. `store`: the connection over which the members find each other,
    which is cut as well while they do.
    """

    def __init__(self, store: frozenset[int] = frozenset()) -> None:
        self._store = store
        self._before = set(_socket_inodes()) - store
        self._after: set[int] | None = None
        self._group: ProcessGroup | None = None
        self._held: dict[int, socket.socket] = {}
        """By inode, those that were cut. While they are held, peers can still write to them."""
        self._lingering: Lingering | None = None

    def seal(self, group: ProcessGroup | None) -> None:
        """The group is made, or none is needed: sockets that are opened from now on are not its."""
        self._after = set() if group is None else set(_socket_inodes()) - self._store
        self._group = group
        if group is None or _is_nccl(group):
            return
        connections = list(self._own().values())
        self._lingering = Lingering(connections)
        for connection in connections:
            connection.close()  # a copy, as all of `_own`

    def cut(self) -> None:
        """Let every call of this member that waits in the group fail at once. From any thread.

        Others see nothing of it, and have to cut their own side: a write that fails in gloo's own thread may leave
        whoever waits for it waiting for ever, so that each side only stops reading, and its sockets are held open
        until `release`. Destroying or aborting the group instead does not do it: gloo keeps its sockets while anything
        refers to the group, and DDP does.
        """
        for inode, connection in self._own().items():
            with suppress(OSError):  # the other side has ended it
                connection.shutdown(socket.SHUT_RD)
            self._held[inode] = connection
        if self._group is not None and _is_nccl(self._group):
            with suppress(RuntimeError):  # NCCL hides its connections; aborting it is enough there
                self._group.abort()

    def release(self) -> None:
        """No member is in this group any more."""
        self._group = None
        if self._lingering is not None:
            self._lingering.end()
            self._lingering = None
        while self._held:
            self._held.popitem()[1].close()

    def _own(self) -> dict[int, socket.socket]:
        """By inode, copies of the group's connections that are not held yet."""
        found: dict[int, socket.socket] = {}
        for inode, descriptor in _socket_inodes().items():
            is_own = inode not in self._before and (self._after is None or inode in self._after)
            connection = _connection(descriptor, inode) if is_own and inode not in self._held else None
            if connection is not None:
                found[inode] = connection
        return found


@dataclass(frozen=True, slots=True)
class Made:
    """What a membership has for a process group. `group` is None for a single member, which needs none."""

    group: ProcessGroup | None
    sockets: GroupSockets


class Rendezvous:
    """One replica's connection to the store of its job. `Temporary` if the store is out of reach.

    `cut` may be called from any thread; the rest belongs to the training thread. Whatever waits for other replicas
    asks `is_superseded` again and again, and gives up once that is true.
    """

    def __init__(self, address: str, timeout_s: float = STORE_TIMEOUT_S) -> None:
        target = _host_and_port(address)
        self.address = address
        with self._reaching():
            _look_for(target)
            timeout = timedelta(seconds=timeout_s)
            self.store: Any = dist.TCPStore(*target, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._sockets: GroupSockets | None = None
        self._left: list[GroupSockets] = []
        """Of groups before the newest one, in which others may still be."""
        self._of = (0, 0)
        self._cut_below = (0, 0)
        # For the groups: it may be cut, and the store can still be asked. Made now, since connecting to a store looks
        # up the name of its host, which takes seconds where the name service is slow.
        self._groups_store: Any = None
        self._groups_inodes: frozenset[int] = frozenset()
        self._connect_for_groups()

    @staticmethod
    def host_towards(address: str) -> str:
        """The address of this machine from which another one is reached: the one to be reached at from there."""
        host, port = _host_and_port(address)
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])

    def gather(self, join: Join, card: Card, is_superseded: Callable[[], bool]) -> list[Card] | None:
        """Lay down this member's card; all cards, by rank, as soon as all members are here. None: superseded."""
        with self._reaching():
            self.store.set(_key(join, "card", join.rank), _written(card))
            keys = [_key(join, "card", rank) for rank in range(join.size)]
            if not self._appear(keys, is_superseded):
                return None
            return [_read(text) for text in self.store.multi_get(keys)]

    def offer(self, leave: Leave, card: Card) -> None:
        """As a replica that leaves: tell the members where to get the state from, whichever membership they are."""
        with self._reaching():
            self.store.set(f"{leave.generation}/offer", _written(card))

    def await_offer(self, join: Join, is_superseded: Callable[[], bool]) -> Card | None:
        """The card of the replica that leaves and hands over its state. None: superseded."""
        key = f"{join.generation}/offer"
        with self._reaching():
            return _read(self.store.get(key)) if self._appear([key], is_superseded) else None

    def tell_taken(self, join: Join) -> None:
        """As a member of a group that is made: nobody needs the replica that leaves any more."""
        with self._reaching():
            self.store.set(f"{join.generation}/taken", "")

    def await_taken(self, leave: Leave, timeout_s: float, is_superseded: Callable[[], bool] = lambda: False) -> bool:
        """As a replica that leaves: wait until it may go. False: not in time, or superseded."""
        until_s = time.monotonic() + timeout_s
        with self._reaching():
            return self._appear([f"{leave.generation}/taken"], lambda: time.monotonic() > until_s or is_superseded())

    def make_group(
        self,
        join: Join,
        device: torch.device,
        is_superseded: Callable[[], bool] = lambda: False,
        timeout_s: float = 1800.0,
    ) -> Made:
        """Wait until all members are here, and make them torch's default process group. There must be none yet.

        `timeout_s`: for how long a collective call waits for the others; torch's own default with gloo.
        A member that is lost meanwhile raises what `is_connection_loss` knows; `Temporary`: superseded, or `cut`.
        """
        if join.size > 1:
            # gloo is patient and deaf while it connects: nobody begins before all are about to.
            with self._reaching():
                self.store.set(_key(join, "here", join.rank), "")
                here = [_key(join, "here", rank) for rank in range(join.size)]
                if not self._appear(here, lambda: is_superseded() or self._is_cut(join)):
                    raise _superseded(join)
        if self._groups_store is None:
            self._connect_for_groups()
        sockets = GroupSockets(self._groups_inodes)
        if self._sockets is not None:
            self._left.append(self._sockets)
        with self._lock:
            self._sockets, self._of = sockets, (join.generation, join.membership)
        if self._is_cut(join):
            raise _superseded(join)
        if join.size == 1:
            sockets.seal(None)
            self._release()
            return Made(None, sockets)
        try:
            group = self._connect(join, "nccl" if device.type == "cuda" else "gloo", timeout_s)
        except RuntimeError as error:
            self._groups_store = None
            if is_connection_loss(error) and self._is_cut(join):
                raise _superseded(join) from error
            raise
        sockets.seal(group)
        made = Made(group, sockets)
        if self._is_cut(join):
            self._groups_store = None
            sockets.cut()
            leave_group(made)
            raise _superseded(join)
        self._release()
        return made

    def _release(self) -> None:
        """The members of the newest group have all left those before."""
        for sockets in self._left:
            sockets.release()
        self._left.clear()

    def close(self) -> None:
        """This replica is in no group any more, and will be in none."""
        self._release()
        if self._sockets is not None:
            self._sockets.release()

    def cut(self, older_than: tuple[int, int]) -> None:
        """Cut the group of a membership before (generation, membership), or the one that is being made."""
        with self._lock:
            self._cut_below = max(self._cut_below, older_than)
            sockets = self._sockets if self._of < older_than else None
        if sockets is not None:
            sockets.cut()

    def _is_cut(self, join: Join) -> bool:
        with self._lock:
            return (join.generation, join.membership) < self._cut_below

    def _connect_for_groups(self) -> None:
        before = _socket_inodes().keys()
        with self._reaching():
            self._groups_store = self.store.clone()
        self._groups_inodes = frozenset(_socket_inodes().keys() - before)

    def _connect(self, join: Join, backend: str, timeout_s: float) -> ProcessGroup:
        store = dist.PrefixStore(_key(join, "group"), self._groups_store)  # type: ignore[attr-defined]
        # torch names a group by how many this process has made since the last one was destroyed, those that failed
        # among them, and members look for each other under that name.
        dist.distributed_c10d._world.group_count = 0
        timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        dist.init_process_group(backend, store=store, rank=join.rank, world_size=join.size, timeout=timeout)
        group = dist.group.WORLD
        assert group is not None
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        return group

    def _appear(self, keys: list[str], is_superseded: Callable[[], bool]) -> bool:
        """Wait until the store has all of them; False: superseded."""
        pause_s = FIRST_PAUSE_S
        while not self.store.check(keys):
            if is_superseded():
                return False
            time.sleep(pause_s)
            pause_s = min(1.25 * pause_s, LONGEST_PAUSE_S)
        return True

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
            first = str(error).partition("\n")[0]
            raise Temporary(
                f"The store of the job at {self.address} is out of reach: {first}.", RETRY_AFTER_S
            ) from error


def _look_for(store: tuple[str, int]) -> None:
    """`OSError` if nobody listens there, at once: torch would knock for all of its patience, while another store waits.

    A store listens before anybody is told of it.
    """
    socket.create_connection(store, LOOK_TIMEOUT_S).close()


def leave_group(made: Made) -> None:
    """Destroy the default process group, so that another can be made. Cut a broken one before.

    Its connections close when the last reference to it goes, such as that of DDP.
    """
    if made.group is None:
        return
    try:
        dist.destroy_process_group()
    except Exception as error:
        log.info("The process group did not end well, which does no harm: %s", error)


def is_connection_loss(error: BaseException) -> bool:
    """Whether it says that other replicas, or the store, are out of reach: not that a call was wrong."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return any(place in text for place in _GLOO) and _MISUSE not in text


def _is_nccl(group: ProcessGroup) -> bool:
    return dist.Backend.NCCL in group.name().lower()


def _host_and_port(address: str) -> tuple[str, int]:
    target = parse_address(address)
    if isinstance(target, str):
        raise InvalidSpec("address", address, "is a local socket", "Give host:port of the job's store")
    return target


def _key(join: Join, what: str, rank: int | None = None) -> str:
    name = f"{join.generation}.{join.membership}/{what}"
    return name if rank is None else f"{name}/{rank}"


def _written(card: Card) -> str:
    return json.dumps(asdict(card))


def _read(text: bytes) -> Card:
    fields = json.loads(text)
    return Card(**{**fields, "last_sum": tuple(fields["last_sum"])})


def _superseded(join: Join) -> Temporary:
    return Temporary(f"Membership {join.generation}.{join.membership} is superseded.", RETRY_AFTER_S)


def _socket_inodes() -> dict[int, int]:
    """The sockets of this process: inode and file descriptor."""
    found: dict[int, int] = {}
    with suppress(FileNotFoundError):  # not Linux
        for name in os.listdir(_OPEN_FILES):
            with suppress(OSError):  # closed since
                kind, _, inode = os.readlink(f"{_OPEN_FILES}/{name}").partition(":")
                if kind == "socket":
                    found[int(inode.strip("[]"))] = int(name)
    return found


def _connection(descriptor: int, inode: int) -> socket.socket | None:
    """Another descriptor of a TCP connection. None: it is none, or listens (gloo ends if that fails)."""
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed since
        return None
    found = os.fstat(copy)
    if not stat.S_ISSOCK(found.st_mode) or found.st_ino != inode:  # another file has its number now
        os.close(copy)
        return None
    connection = socket.socket(fileno=copy)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            connection.getpeername()  # fails if it is not connected
            return connection
    connection.close()
    return None
