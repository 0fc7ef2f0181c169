"""Those who ask slowly, or not at all: they are cut off in time, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import uvicorn
from tests.service.fake_service import TOKEN, FakeService

from pollux.errors import PolluxError
from pollux.service.patience import Patience
from pollux.service.rest import create_app
from pollux.service.serving import http_config
from pollux.wire.service_client import ServiceClient

PATIENT_S = 60.0
SHORT = Patience(head_s=2.0, body_s=2.0, slowest_bytes_per_s=1e12, unread_s=2.0, idle_s=2)
BEARER = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
POST = f"POST /v1/jobs HTTP/1.1\r\n{BEARER}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@contextmanager
def serving(patience: Patience, service: FakeService | None = None) -> Iterator[int]:
    """The port of a server."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(http_config(create_app(service or FakeService(), TOKEN, patience), patience))  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENT_S)
        listener.close()


def connected(port: int, said: str = "") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), PATIENT_S)
    connection.sendall(said.encode())
    return connection


def told(connection: socket.socket) -> str:
    """All that is said until the other side ends the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts).decode()


def problem(text: str) -> dict[str, object]:
    head, _, body = text.partition("\r\n\r\n")
    assert "application/problem+json" in head
    return json.loads(body)


def is_cut(connection: socket.socket, said: bytes) -> bool:
    """Whether the other side ends the connection although one goes on speaking."""
    until_s = time.monotonic() + PATIENT_S
    try:
        while time.monotonic() < until_s:
            connection.sendall(said)
            time.sleep(0.02)
    except TimeoutError:
        return False  # nobody reads, and nobody ends it
    except OSError:
        return True
    return False


def is_served(port: int) -> bool:
    """A client that is itself too slow on a busy machine tries again."""
    until_s = time.monotonic() + PATIENT_S
    while time.monotonic() < until_s:
        with suppress(PolluxError), ServiceClient(f"http://127.0.0.1:{port}", TOKEN) as client:
            return client.health().status == "ok" and client.jobs().jobs == ()
    return False


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("", ""),
        ("GET /v1/health HT", "408"),
        ("GET /v1/health HTTP/1.1\r\nHost: local", "408"),
        (POST, "408"),
        (f"{POST}{{", "408"),
    ],
)
def test_two_hundred_slow_ones_are_cut_off_and_others_are_served_meanwhile(said: str, answer: str) -> None:
    with serving(SHORT) as port, ExitStack() as stack:
        slow = [stack.enter_context(connected(port, said)) for _ in range(200)]
        assert is_served(port)
        for connection in slow:
            text = told(connection)
            assert text.startswith(f"HTTP/1.1 {answer}" if answer else ""), text
            if answer:
                assert "was not there after 2 s" in str(problem(text)["detail"])


def test_one_that_goes_on_dripping_is_cut_off_as_well() -> None:
    with serving(SHORT) as port, connected(port, "GET /v1/health HTTP/1.1\r\n") as slow:
        assert is_cut(slow, b"X: y\r\n")


def test_a_body_that_nobody_wanted_does_not_keep_a_connection() -> None:
    with serving(SHORT) as port, connected(port, POST.replace(TOKEN, "wrong")) as slow:
        assert slow.recv(65536).startswith(b"HTTP/1.1 401")
        assert is_cut(slow, b"x")


def test_the_next_request_of_a_connection_has_to_come_in_time_too() -> None:
    ask = f"GET /v1/health HTTP/1.1\r\n{BEARER}\r\n"
    with serving(SHORT) as port, connected(port, f"{ask}GET /v1/he") as slow:
        text = told(slow)
        assert text.startswith("HTTP/1.1 200")
        assert text.count("HTTP/1.1") == 1


def test_an_answer_that_nobody_reads_is_not_kept_for_ever() -> None:
    asked = f"GET /v1/openapi.json HTTP/1.1\r\n{BEARER}\r\n" * 1000
    with serving(SHORT) as port, connected(port) as silent:
        assert is_cut(silent, asked.encode())


def test_a_poll_may_wait_longer_than_anything_else() -> None:
    with serving(SHORT) as port, ServiceClient(f"http://127.0.0.1:{port}", TOKEN) as client:
        last = client.events().next
        assert client.events(last, wait_s=2 * SHORT.head_s).events == ()


def test_of_too_many_the_oldest_that_has_not_asked_goes() -> None:
    crowded = Patience(head_s=PATIENT_S, max_connections=20)
    with serving(crowded) as port, ExitStack() as stack:
        idle = [stack.enter_context(connected(port, "GET /v1/hea")) for _ in range(20)]
        assert is_served(port)
        text = told(idle[0])
        assert text.startswith("HTTP/1.1 503")
        assert "Retry-After: 1" in text
        assert problem(text)["status"] == 503
        idle[1].sendall(f"lth HTTP/1.1\r\n{BEARER}Connection: close\r\n\r\n".encode())
        assert told(idle[1]).startswith("HTTP/1.1 200")


def test_a_large_body_may_take_longer() -> None:
    patience = Patience()
    assert patience.for_body(1 << 20) == 34.0
    assert patience.for_body(32 << 20) == 158.0
