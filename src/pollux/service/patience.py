"""How long the REST API waits for those who ask, and for how many of them: no connection stays for nothing.

A request whose head is not there in time is cut off, as is one whose answer nobody reads; a body that does not come is
answered by 408 (`requests`). A request that was heard may take as long as it likes: polls wait for their news.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from pollux.wire.answers import to_plain
from pollux.wire.api import Problem

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    head_s: float = 10.0
    """From the first byte of a connection, or of its next request, to the end of the head."""
    body_s: float = 30.0
    """From there to the end of the body, and more where a body may be large: see `for_body`."""
    slowest_bytes_per_s: float = 256 * 1024.0
    unread_s: float = 30.0
    """How long an answer may wait to be read on."""
    idle_s: int = 5
    """Between two requests on one connection."""
    max_connections: int = 500
    """Of a thousand files that a process may have open. Beyond, those go that have not asked for anything yet."""

    def for_body(self, max_bytes: int) -> float:
        """How many seconds a body of that size may take."""
        return self.body_s + max_bytes / self.slowest_bytes_per_s


def protocol(patience: Patience) -> type[H11Protocol]:
    """What uvicorn is to speak with each connection of one server."""

    class Connection(_Connection):
        limits = patience
        unasked: dict[_Connection, None] = {}  # noqa: RUF012 - shared by the connections of this server

    return Connection


class _Connection(H11Protocol):
    limits: Patience
    unasked: dict[_Connection, None]
    """Connections that are to send a head, in the order in which that began."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._has_spoken = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > self.limits.max_connections:
            oldest = next(iter(self.unasked))
            log.warning(
                "There are more than %d connections: one that asks nothing is cut.", self.limits.max_connections
            )
            oldest.cut(503, "There are too many connections. Come back in a moment.", "Retry-After: 1\r\n")

    def data_received(self, data: bytes) -> None:
        self._has_spoken = True
        super().data_received(data)
        if self._is_asking:
            self._stop_expecting()
        elif self._head_timer is None and not self.transport.is_closing():
            self._expect_head()  # of its next request; or the rest of a body comes that nobody wants any more

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.limits.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def cut(self, status: int, detail: str, header: str = "") -> None:
        """Say why, to one who still waits for its first answer, and end the connection even if that is not read."""
        if self.cycle is None and (self._has_spoken or status != 408):
            title = {408: "Request Timeout", 503: "Service Unavailable"}[status]
            body = json.dumps(to_plain(Problem(title, status, detail))).encode()
            head = f"HTTP/1.1 {status} {title}\r\nContent-Type: application/problem+json\r\n{header}"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self._stop_expecting()
        self.transport.close()
        self.loop.call_later(self.limits.unread_s, self.transport.abort)

    @property
    def _is_asking(self) -> bool:
        """A request was heard and is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self.unasked[self] = None
        self._head_timer = self.loop.call_later(self.limits.head_s, self._give_up)

    def _stop_expecting(self) -> None:
        self.unasked.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        self.cut(408, f"The head of the request was not there after {self.limits.head_s:g} s.")

    def _stop_waiting_for_reader(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
