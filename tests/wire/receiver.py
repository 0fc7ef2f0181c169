"""A receiver on loopback that misbehaves as it is told."""

from __future__ import annotations

import contextlib
import queue
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PATIENCE_S = 60.0
"""Long past what anything here needs: reaching it is a failure, not a matter of speed."""


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: bytes


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.receiver.requests.put(Request(self.path, dict(self.headers), body))
        # A client that has given up closes its end; what is then written to it fails.
        with contextlib.suppress(OSError):
            self.server.receiver.behave(self)

    def log_message(self, *_args: object) -> None:
        pass


class _LocalServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


Behaviour = Callable[[BaseHTTPRequestHandler], None]


class Receiver:
    """Listens from its making on; every request goes into `requests` before the behaviour answers it."""

    def __init__(self, behave: Behaviour, *, path: Path | None = None, port: int = 0) -> None:
        self.behave = behave
        self.requests: queue.Queue[Request] = queue.Queue()
        if path is None:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
            self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        else:
            self._server = _LocalServer(str(path), _Handler)
            self.url = f"unix:{path}"
        self._server.receiver = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def next(self) -> Request:
        return self.requests.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def receiving(behave: Behaviour, **where: object) -> Iterator[Receiver]:
    receiver = Receiver(behave, **where)
    try:
        yield receiver
    finally:
        receiver.close()


def answer(status: int, body: bytes = b"", **headers: str) -> Behaviour:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def raw(text: bytes) -> Behaviour:
    """These bytes instead of HTTP, and then the end."""
    return lambda handler: handler.wfile.write(text)


@dataclass
class Hang:
    """Says nothing until it is released, and then answers 204."""

    release: threading.Event

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        self.release.wait(PATIENCE_S)
        answer(204)(handler)


def drip(handler: BaseHTTPRequestHandler) -> None:
    """An answer that never stands still and never ends."""
    handler.wfile.write(b"HTTP/1.1 ")
    while True:
        handler.wfile.write(b"2")
        threading.Event().wait(0.005)
