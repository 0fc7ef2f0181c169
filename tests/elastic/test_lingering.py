"""A replica that is killed stays connected for a moment: gloo may hang where a peer's connection ends at any time."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.elastic.trial import PATIENCE_S

from pollux.agent.lingering import LINGER_S

REPLICA = """
import socket, sys, time
from types import SimpleNamespace
from pollux.agent.rendezvous import GroupSockets

sockets = GroupSockets()
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sockets.seal(SimpleNamespace(name=lambda: sys.argv[2]))
if sys.argv[3] == "left":
    sockets.release()
connection.sendall(b"!")
time.sleep(3600)
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE_S)
        yield made


def kill_one(listener: socket.socket, backend: str, stage: str) -> socket.socket:
    """The connection to a replica that was in a group, and is dead by now."""
    port = str(listener.getsockname()[1])
    with subprocess.Popen([sys.executable, "-c", REPLICA, port, backend, stage]) as replica:
        try:
            connection, _ = listener.accept()
            connection.settimeout(PATIENCE_S)
            assert connection.recv(1) == b"!"
        finally:
            replica.kill()
    return connection


def has_ended(connection: socket.socket, timeout_s: float = 0.0) -> bool:
    """Nothing was sent that could be read instead."""
    return bool(select.select([connection], [], [], timeout_s)[0])


def test_a_killed_member_stays_connected_until_the_others_have_heard_of_it(listener):
    with kill_one(listener, "gloo", "member") as connection:
        assert not has_ended(connection)
        for _ in range(2):  # the second would meet the answer to the first
            connection.sendall(b"?")
        assert not has_ended(connection)
        # Who has not heard of it by then may be cut off from its daemon, and has to see it by itself.
        with suppress(ConnectionResetError):  # what was sent was not read
            assert connection.recv(1) == b""


@pytest.mark.parametrize(("backend", "stage"), [("gloo", "left"), ("nccl", "member")])
def test_connections_that_nobody_needs_end_with_the_replica(listener, backend, stage):
    with kill_one(listener, backend, stage) as connection:
        assert has_ended(connection, LINGER_S / 2)
