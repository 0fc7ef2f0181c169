"""Connections that carry messages: to a daemon's local socket or its TCP port, and from there.

A frame is four bytes with the length of its body, highest first, and the body: one packed message. Before the first
message both sides prove that they know the same key: see `handshake`. What follows is not encrypted: the port belongs
in a network that its owner trusts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType, UnionType
from typing import Any, TypeVar, overload

from pollux.errors import InvalidDocument, InvalidSpec, Permanent, StaleGeneration, Temporary
from pollux.wire.credentials import ReplicaIdentity
from pollux.wire.handshake import (
    MAX_INTRODUCTION_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    check_daemon,
    introduction,
    recognised,
)
from pollux.wire.messages import MAX_MESSAGE_BYTES, pack, unpack
from pollux.wire.nodes import NodeAnswer, NodeRequest, Refused

T = TypeVar("T")

HANDSHAKE_TIMEOUT_S = 5.0
RETRY_AFTER_S = 1.0
"""What is advised after a connection was lost."""
MAX_BACKLOG_BYTES = 4 * MAX_MESSAGE_BYTES
"""What a peer that does not read may make us keep before it is dropped."""

_HEADER_BYTES = 4
_TOO_LONG_FOR_A_SOCKET = 108  # bytes of sun_path on Linux, the closing zero included


def parse_address(address: str) -> str | tuple[str, int]:
    """The path of a local socket (`unix:/path`), or host and port (`host:port`, `[::1]:port`)."""
    fix = "Give host:port or unix:/path/to/socket"
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or "\0" in path:
            raise InvalidSpec("address", address, "names no absolute path", fix)
        if len(os.fsencode(path)) >= _TOO_LONG_FOR_A_SOCKET:
            raise InvalidSpec("address", address, "is too long for the path of a socket", "Use a shorter folder")
        return path
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not port.isascii() or not 0 < int(port) < 65536:
        raise InvalidSpec("address", address, "is no address", fix)
    return host.removeprefix("[").removesuffix("]"), int(port)


class Channel:
    """The blocking side, for replicas, commands and tests.

    One thread may receive while others send. `Temporary`: the connection is lost, or was never made; make another.
    `Permanent`: the two sides do not have the same token, or the daemon knows no such credential.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        """Use `connect`."""
        self._socket = sock
        self._address = address
        self._sending = threading.Lock()
        self._received = bytearray()
        sock.setblocking(False)

    @classmethod
    def connect(cls, address: str, token: str, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Channel:
        """A connection on which both sides have proven that they know the token. A replica gives its credential."""
        target = parse_address(address)
        until_s = time.monotonic() + timeout_s
        try:
            if isinstance(target, str):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    sock.settimeout(timeout_s)
                    sock.connect(target)
                except BaseException:
                    sock.close()
                    raise
            else:
                sock = socket.create_connection(target, timeout_s)
                _tune(sock)
        except OSError as error:
            raise _lost(address, error) from error
        channel = cls(sock, address)
        try:
            channel._shake_hands(token, until_s)
        except TimeoutError as error:
            channel.close()
            raise _lost(address, error) from error
        except BaseException:
            channel.close()
            raise
        return channel

    def send(self, message: object, timeout_s: float = 30.0) -> None:
        """Returns when the system has taken all of it; a peer that reads nothing for that long is lost."""
        body = pack(message)
        with self._sending:
            try:
                self._write(_frame(body), time.monotonic() + timeout_s)
            except TimeoutError as error:
                self.close()  # half a frame is out: nobody can make sense of another one
                raise _lost(self._address, error) from error

    @overload
    def receive(self, kind: type[T], timeout_s: float | None = None) -> T: ...
    @overload
    def receive(self, kind: UnionType, timeout_s: float | None = None) -> Any: ...
    def receive(self, kind: Any, timeout_s: float | None = None) -> Any:
        """The next message, which has to be of that type or union.

        `TimeoutError`: not all of it came in time; the rest may still be received. `InvalidDocument`: it was something
        else; the ones after it can be received, unless it was too large.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        return unpack(self._read(MAX_MESSAGE_BYTES, until_s), kind)

    def fileno(self) -> int:
        """For `select`: readable when bytes have come that no call of `receive` has seen."""
        return self._socket.fileno()

    def close(self) -> None:
        """Also ends a `receive` that waits in another thread. May be called again."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shake_hands(self, token: str, until_s: float) -> None:
        theirs, mine = self._read(NONCE_BYTES, until_s), secrets.token_bytes(NONCE_BYTES)
        self._write(_frame(introduction(token, theirs, mine)), until_s)
        check_daemon(self._address, token, theirs, mine, self._read(PROOF_BYTES, until_s))

    def _write(self, frame: bytes, until_s: float) -> None:
        rest = memoryview(frame)
        try:
            while rest:
                try:
                    rest = rest[self._socket.send(rest) :]
                except BlockingIOError:
                    self._await(select.POLLOUT, until_s)
        except TimeoutError:
            raise
        except OSError as error:
            raise _lost(self._address, error) from error

    def _read(self, limit: int, until_s: float | None) -> bytes:
        """The body of the next frame."""
        while (end := self._end_of_frame(limit)) is None:
            try:
                came = self._socket.recv(1 << 18)
            except BlockingIOError:
                self._await(select.POLLIN, until_s)
                continue
            except OSError as error:
                raise _lost(self._address, error) from error
            if not came:
                raise _lost(self._address, None)
            self._received += came
        body = bytes(self._received[_HEADER_BYTES:end])
        del self._received[:end]
        return body

    def _end_of_frame(self, limit: int) -> int | None:
        """Where the first frame ends in what was received; None: not all of it is here."""
        if len(self._received) < _HEADER_BYTES:
            return None
        length = int.from_bytes(self._received[:_HEADER_BYTES], "big")
        if length > limit:
            self.close()
            raise _oversized(length, limit)
        end = _HEADER_BYTES + length
        return end if len(self._received) >= end else None

    def _await(self, what: int, until_s: float | None) -> None:
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError(f"{self._address}: nothing came in time")
        poll = select.poll()
        try:
            poll.register(self._socket, what)
        except ValueError:  # closed in another thread
            raise _lost(self._address, None) from None
        # At most a second: closing the socket in another thread does not always wake the one that polls it.
        poll.poll(1000 * min(1.0, 1.0 if left_s is None else left_s))


def ask(address: str, token: str, request: NodeRequest, timeout_s: float = 30.0) -> NodeAnswer:
    """One request on a connection of its own. What the daemon refuses raises: see `granted`."""
    until_s = time.monotonic() + timeout_s
    with Channel.connect(address, token, min(timeout_s, HANDSHAKE_TIMEOUT_S)) as channel:
        channel.send(request, timeout_s)
        try:
            answer: NodeAnswer = channel.receive(NodeAnswer, until_s - time.monotonic())
        except TimeoutError as error:
            raise _lost(address, error) from error
    return granted(request, answer)


def granted(request: NodeRequest, answer: NodeAnswer) -> NodeAnswer:
    """The answer, unless it is a refusal: `StaleGeneration` if a newer one is known there, else `Permanent`."""
    if not isinstance(answer, Refused):
        return answer
    if answer.is_stale:
        raise StaleGeneration(getattr(request, "job", "?"), getattr(request, "generation", 0), answer.generation)
    raise Permanent(answer.problem)


class Peer:
    """The asyncio side of a connection, for daemons. Errors as of `Channel`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        """Use `accept` or `dial`."""
        self.address = address
        """Of the other side, for logs."""
        self.identity: ReplicaIdentity | None = None
        """Whose credential the other side has proven to have; None: it knows the token."""
        self.pid = _pid_of(writer)
        """Of the process at the other side; None: of another machine, perhaps."""
        self._reader = reader
        self._writer = writer
        self._asking = asyncio.Lock()

    def send(self, message: object) -> None:
        """Hand the message to the loop and return at once. A peer that leaves too much unread is dropped."""
        transport = self._writer.transport
        if transport.is_closing():
            raise _lost(self.address, None)
        frame = _frame(pack(message))
        if transport.get_write_buffer_size() + len(frame) > MAX_BACKLOG_BYTES:
            transport.abort()
            raise Temporary(f"{self.address} does not read what it is sent, and was dropped.", RETRY_AFTER_S)
        self._writer.write(frame)

    async def flush(self) -> None:
        """Wait until little is left to send. Whoever answers requests waits here before it reads the next one."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise _lost(self.address, error) from error

    @overload
    async def receive(self, kind: type[T]) -> T: ...
    @overload
    async def receive(self, kind: UnionType) -> Any: ...
    async def receive(self, kind: Any) -> Any:
        """The next message, which has to be of that type or union.

        Not to be called again after it was cancelled or raised `InvalidDocument`: half a frame may be gone.
        """
        return unpack(await self._read(MAX_MESSAGE_BYTES), kind)

    async def ask(self, request: NodeRequest) -> NodeAnswer:
        """Send a request and wait for its answer, one after the other. What is refused raises: see `granted`."""
        async with self._asking:
            self.send(request)
            answer: NodeAnswer = await self.receive(NodeAnswer)
        return granted(request, answer)

    def close(self) -> None:
        """What was sent still goes out if the peer reads it. May be called again."""
        self._writer.close()

    def abort(self) -> None:
        """Close at once."""
        self._writer.transport.abort()

    async def _read(self, limit: int) -> bytes:
        try:
            length = int.from_bytes(await self._reader.readexactly(_HEADER_BYTES), "big")
            if length > limit:
                raise _oversized(length, limit)
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise _lost(self.address, None) from error
        except OSError as error:
            raise _lost(self.address, error) from error

    async def _welcome(self, token: str) -> None:
        mine = secrets.token_bytes(NONCE_BYTES)
        self._writer.write(_frame(mine))
        said = await self._read(MAX_INTRODUCTION_BYTES)
        try:
            self.identity, proof = recognised(self.address, token, mine, said)
        except Permanent:
            self._writer.write(_frame(b""))
            raise
        self._writer.write(_frame(proof))

    async def _introduce(self, token: str) -> None:
        theirs, mine = await self._read(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        self._writer.write(_frame(introduction(token, theirs, mine)))
        check_daemon(self.address, token, theirs, mine, await self._read(PROOF_BYTES))


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> Peer:
    """The daemon's side of a new connection. Whoever cannot prove in time that it knows the token is cut off.

    A replica proves that it has its credential: see `Peer.identity` before it is listened to.
    """
    peer = Peer(reader, writer, _name_of(writer))
    try:
        async with asyncio.timeout(timeout_s):
            await peer._welcome(token)
    except TimeoutError as error:
        peer.abort()
        raise _lost(peer.address, error) from error
    except BaseException:
        peer.close()
        raise
    _tune(writer.get_extra_info("socket"))
    return peer


async def dial(address: str, token: str, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Peer:
    """A connection to a daemon."""
    target = parse_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            if isinstance(target, str):
                reader, writer = await asyncio.open_unix_connection(target)
            else:
                reader, writer = await asyncio.open_connection(*target)
            peer = Peer(reader, writer, address)
            try:
                await peer._introduce(token)
            except BaseException:
                peer.abort()
                raise
    except OSError as error:  # TimeoutError is one of them
        raise _lost(address, error) from error
    _tune(writer.get_extra_info("socket"))
    return peer


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


def _oversized(length: int, limit: int) -> InvalidDocument:
    return InvalidDocument("message", f"{length} bytes", f"larger than {limit} bytes", "Send less in one message")


def _lost(address: str, error: Exception | None) -> Temporary:
    why = "" if error is None else f" ({type(error).__name__}: {error})".replace(": )", ")")
    return Temporary(f"The connection to {address} is lost{why}.", RETRY_AFTER_S)


def _name_of(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "the local socket"


def _pid_of(writer: asyncio.StreamWriter) -> int | None:
    """The system's word, for local sockets."""
    sock = writer.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        return None
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def _tune(sock: socket.socket) -> None:
    """Small messages go out at once; a machine that has gone is noticed even if it could not say so."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
