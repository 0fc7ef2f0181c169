"""The state of a replica goes to another one over a TCP connection of their own, past all process groups.

One connection carries one state: 32 random bytes of the giver; what the taker wants, 32 of its own and a keyed hash;
the length of the header, another keyed hash and the header (a pickle in which tensors are numbers); the memory of the
tensors, one after the other; a byte that says thanks. The header is loaded only if its hash shows that it was made by
a replica that knows the key, which members tell each other through the rendezvous store.
"""

from __future__ import annotations

import hmac
import io
import itertools
import logging
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pollux.errors import InvalidSpec, Temporary
from pollux.wire.frames import parse_address

log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 30.0
"""A side from which not one byte comes for so long is lost."""
POLL_S = 0.05
"""How often those who wait look whether that still makes sense."""
MAX_HEADER_BYTES = 2**30
RETRY_AFTER_S = 0.1

_RANDOM_BYTES = 32
_HASH_BYTES = 32
_LENGTH = struct.Struct(">Q")
_FULL, _SMALL, _THANKS = b"F", b"S", b"T"
_BUFFERS_AT_ONCE = 512  # Linux takes 1024 in one call
_HANDSHAKE_TIMEOUT_S = 5.0

Layout: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Type, shape and strides of a tensor whose elements fill its memory without gaps."""


class Giver:
    """Hands the state of this replica to others that know `address`, `key` and the secret, until closed.

    `key` may be shown: the job's store, where it lies, is open to whoever reaches it. `secret` is the job's.
    `host`: of this machine, as other nodes reach it. `make_small` and `make_full` are called when the first taker asks
    for what they make, at most once each, in a thread of the giver. What they return is sent from where it is, without
    a copy on a CPU: the training thread must leave it alone until the takers have it.
    """

    def __init__(
        self, host: str, make_small: Callable[[], Any], make_full: Callable[[], Any], secret: str = ""
    ) -> None:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            fix = "Give a name or an address of this machine that the other nodes reach"
            raise InvalidSpec("host", host, f"nobody can be waited for there ({error})", fix) from None
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.key = secrets.token_hex(32)
        self._secret = secret
        self._states = {_SMALL: _Once(make_small), _FULL: _Once(make_full)}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._listen, name="pollux-giver", daemon=True).start()

    def close(self) -> None:
        """Cut off whoever is still being served. May be called again."""
        with self._lock:
            self._is_closed = True
            sockets = [self._listener, *self._connections]
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> Giver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection, peer[0]), name="pollux-giver", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            _limit_waiting(connection, socket.SO_SNDTIMEO, STALL_TIMEOUT_S)
            asked = self._asked(connection)
            if asked is None:
                log.warning("%s asked for the state of this replica without its key, and is refused.", peer)
                connection.sendall(_LENGTH.pack(0))
                return
            kind, nonces = asked
            try:
                header, memories = self._states[kind].get()
            except Exception:
                log.exception("%s asked for the state of this replica, which could not be made.", peer)
                return
            opening = _LENGTH.pack(len(header)) + _proof(self._secret + self.key, b"giver", nonces + header)
            _send(connection, itertools.chain((memoryview(opening), memoryview(header)), memories))
            _Source(connection).read(len(_THANKS))  # who ends before that has not got all that was sent
        except OSError as error:
            if not self._is_closed:
                log.info("%s has not taken all of the state: %s", peer, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _asked(self, connection: socket.socket) -> tuple[bytes, bytes] | None:
        """Small or full, and what both sides have drawn; None for somebody who does not know the key."""
        mine = secrets.token_bytes(_RANDOM_BYTES)
        connection.sendall(mine)
        answer = _Source(connection, _HANDSHAKE_TIMEOUT_S).read(1 + _RANDOM_BYTES + _HASH_BYTES)
        kind, theirs, proof = answer[:1], answer[1 : 1 + _RANDOM_BYTES], answer[1 + _RANDOM_BYTES :]
        if kind in self._states and hmac.compare_digest(
            proof, _proof(self._secret + self.key, b"taker", kind + mine + theirs)
        ):
            return kind, mine + theirs
        return None


def take(
    address: str,
    key: str,
    *,
    full: bool,
    is_superseded: Callable[[], bool] = lambda: False,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> Any:
    """The small or the full state of the giver there, with its tensors in fresh memory of the CPU.

    `key`: the giver's, after the secret if there is one.
    `Temporary`: the giver is gone, says nothing for `stall_timeout_s`, or refuses the key; or this is superseded.
    """
    target = parse_address(address)
    if isinstance(target, str):
        raise InvalidSpec("address", address, "is a local socket", "Give host:port, as the giver has it")
    try:
        with socket.create_connection(target, min(stall_timeout_s, _HANDSHAKE_TIMEOUT_S)) as connection:
            source = _Source(connection, stall_timeout_s, is_superseded)
            kind, theirs, mine = (
                _FULL if full else _SMALL,
                source.read(_RANDOM_BYTES),
                secrets.token_bytes(_RANDOM_BYTES),
            )
            connection.sendall(kind + mine + _proof(key, b"taker", kind + theirs + mine))
            (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
            if length == 0:
                raise Temporary(
                    f"The giver at {address} refuses the key: it gives for another membership.", RETRY_AFTER_S
                )
            if length > MAX_HEADER_BYTES:
                raise Temporary(f"What {address} announces is no state: {length} bytes of header.", RETRY_AFTER_S)
            proof, header = source.read(_HASH_BYTES), source.read(length)
            if not hmac.compare_digest(proof, _proof(key, b"giver", theirs + mine + header)):
                raise Temporary(f"{address} does not know the key: it is no giver of this job.", RETRY_AFTER_S)
            state = _unpacked(header, source)
            connection.sendall(_THANKS)
            return state
    except OSError as error:  # a timeout is one of them
        raise Temporary(
            f"The state did not come from {address} ({type(error).__name__}: {error}).", RETRY_AFTER_S
        ) from error


@dataclass(frozen=True, slots=True)
class _Header:
    layouts: list[Layout]
    state: bytes
    """A pickle in which each tensor is its position in `layouts`."""


class _Once:
    """A state that is made and packed when it is first asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._packed: tuple[bytes, list[memoryview]] | None = None
        # CUDA's current device belongs to the thread: whatever `make` does shall happen on the one that trains.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def get(self) -> tuple[bytes, list[memoryview]]:
        with self._lock, torch.no_grad():
            if self._packed is None:
                if self._device is not None:
                    torch.cuda.set_device(self._device)
                    torch.cuda.synchronize()  # the training thread may use a stream of its own
                self._packed = _packed(self._make())
            return self._packed


class _Pickler(pickle.Pickler):
    """Leaves tensors out and collects them. What is not plain memory (sparse, quantized) is pickled as torch does."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._positions: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) not in (Tensor, torch.nn.Parameter):
            return None
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            return None
        if id(value) not in self._positions:  # the list keeps it alive, so that nothing else gets its id
            self._positions[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._positions[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, position: int) -> Tensor:
        return self._tensors[position]


def _packed(state: Any) -> tuple[bytes, list[memoryview]]:
    """The header, and the memory of the tensors in its order."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(state)
    dense = [_dense(tensor) for tensor in pickler.tensors]
    layouts = [(each.dtype, tuple(each.shape), each.stride()) for each in dense]
    header = pickle.dumps(_Header(layouts, file.getvalue()), pickle.HIGHEST_PROTOCOL)
    return header, [_memory(each) for each in dense if each.numel()]


def _unpacked(header: bytes, source: _Source) -> Any:
    content: _Header = pickle.loads(header)
    tensors = [torch.empty_strided(shape, stride, dtype=dtype) for dtype, shape, stride in content.layouts]
    for tensor in tensors:
        if tensor.numel():
            source.read_into(_memory(tensor))
    return _Unpickler(io.BytesIO(content.state), tensors).load()


def _dense(tensor: Tensor) -> Tensor:
    """The same values in CPU memory without gaps: the tensor's own memory if it is such. The order of axes stays.

    Optimizers take another path, which rounds in another way, when weights and moments differ in that order.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor
    return tensor.clone()


def _memory(tensor: Tensor) -> memoryview:
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer


def _send(connection: socket.socket, buffers: Iterable[memoryview]) -> None:
    """Send all of them; many small ones in one call."""
    for batch in _batches(buffers):
        while batch:
            sent = connection.sendmsg(batch)
            done = 0
            while done < len(batch) and sent >= len(batch[done]):
                sent -= len(batch[done])
                done += 1
            batch = batch[done:]
            if batch:
                batch[0] = batch[0][sent:]


def _batches(buffers: Iterable[memoryview]) -> Iterable[list[memoryview]]:
    rest = iter(buffers)
    while batch := list(itertools.islice(rest, _BUFFERS_AT_ONCE)):
        yield batch


def _limit_waiting(connection: socket.socket, option: int, seconds: float) -> None:
    """Let the system itself wait for the peer, no longer than that: it then moves all bytes in one call."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


class _Source:
    """Reads exactly what is asked for, as long as something comes and it is wanted."""

    def __init__(
        self,
        connection: socket.socket,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connection = connection
        self._stall_timeout_s = stall_timeout_s
        self._is_superseded = is_superseded
        _limit_waiting(connection, socket.SO_RCVTIMEO, POLL_S)

    def read(self, count: int) -> bytes:
        buffer = bytearray(count)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def read_into(self, buffer: memoryview) -> None:
        last_s = time.monotonic()
        while buffer:
            if self._is_superseded():
                raise Temporary("The state is not needed any more: the membership is superseded.", RETRY_AFTER_S)
            try:
                count = self._connection.recv_into(buffer, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if time.monotonic() - last_s > self._stall_timeout_s:
                    raise TimeoutError(f"not a byte within {self._stall_timeout_s:g} s") from None
                continue
            if count == 0:
                raise ConnectionResetError("the other side has ended")
            buffer = buffer[count:]
            last_s = time.monotonic()


def _proof(key: str, side: bytes, content: bytes) -> bytes:
    return hmac.digest(key.encode(), b"pollux " + side + content, "sha256")
