"""JSON, one object a line, over local sockets: how the keeper speaks with the daemon, templates and stores."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

MAX_LINE_BYTES = 8 * 2**20
"""An environment may have megabytes; more than this is not ours."""


def encoded(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


class Lines:
    """One end of a connection, in a loop that waits for none of them. Other threads stay away.

    `on_line` is called for each message, `on_end` once: when the other side is gone, sends what is no message, or does
    not read what it is sent.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_line: Callable[[Message], None],
        on_end: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._selector = selector
        self._on_line = on_line
        self._on_end = on_end
        self._received = bytearray()
        self._to_send = bytearray()
        self.is_open = True
        selector.register(sock, selectors.EVENT_READ, self.ready)

    def ready(self) -> None:
        """Read and write what can be. Calls back."""
        self._write()
        while self.is_open:
            try:
                chunk = self._sock.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            self._received += chunk
            *lines, rest = self._received.split(b"\n")
            self._received = rest
            is_last = not chunk or len(rest) > MAX_LINE_BYTES
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:
                    message = None
                if not isinstance(message, dict):
                    is_last = True
                    break
                self._on_line(message)
                if not self.is_open:
                    return
            if is_last:
                self._lose()

    def send(self, message: Message) -> None:
        """Goes out in order, now or when there is room. After the end of the connection: nothing happens."""
        if self.is_open:
            self._to_send += encoded(message)
            self._write()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is out, for no longer than that."""
        if self.is_open:
            self._sock.settimeout(timeout_s)
            try:
                self._sock.sendall(self._to_send)
            except OSError:
                self.close()

    def close(self) -> None:
        """`on_end` is not called. May be called again."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._sock)
            self._sock.close()

    def _write(self) -> None:
        if not self.is_open:
            return
        try:
            while self._to_send:
                del self._to_send[: self._sock.send(self._to_send)]
        except BlockingIOError:
            if len(self._to_send) > MAX_LINE_BYTES:
                self._lose()
                return
        except OSError:
            self._to_send.clear()  # what the other side said before it went is still to be read
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._to_send else 0)
        if self._selector.get_key(self._sock).events != wanted:
            self._selector.modify(self._sock, wanted, self.ready)

    def _lose(self) -> None:
        if self.is_open:
            self.close()
            self._on_end()
