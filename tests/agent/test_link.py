"""What a replica says reaches the daemon, and what the daemon says counts in its order, however often it is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pollux.agent import link as module
from pollux.agent.link import Link
from pollux.agent.reporter import Reporter
from pollux.core import JobId, Progress
from pollux.errors import InvalidDocument, Temporary
from pollux.wire.entries import BatchSetting, RunState
from pollux.wire.frames import Peer, accept
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import Done
from pollux.wire.replicas import Join, Leave, ReplicaPhase, ReplicaStatus

PATIENCE_S = 30.0
RARELY_S = 1000.0
"""A heartbeat that no test sees."""
JOB = JobId("j")


class Daemon:
    """The other side: takes connections, remembers what comes, says what it is told to. May go and come back."""

    def __init__(self, folder: str, token: str = "secret") -> None:
        self.address = f"unix:{folder}/node.sock"
        self._path = f"{folder}/node.sock"
        self._token = token
        self.came: queue.Queue[Any] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.AbstractServer | None = None
        self._peers: list[Peer] = []
        self._readers: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._do(self._start())

    def stop(self) -> None:
        self._do(self._stop())

    def say(self, *messages: object) -> None:
        async def send() -> None:
            for message in messages:
                self._peers[-1].send(message)

        self._do(send())

    def next(self, kind: type = ReplicaStatus) -> Any:
        message = self.came.get(timeout=PATIENCE_S)
        assert type(message) is kind
        return message

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def _stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for peer in self._peers:
            peer.abort()
        if self._readers:
            await asyncio.wait(self._readers)
        self._peers.clear()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._readers.add(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(Exception):
            peer = await accept(reader, writer, self._token)
            self._peers.append(peer)
            while True:
                self.came.put(await peer.receive(ReplicaStatus | AgentReport))
        writer.close()
        self._readers.discard(asyncio.current_task())  # type: ignore[arg-type]


@pytest.fixture
def folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(dir="/tmp")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def daemon(folder) -> Iterator[Daemon]:
    daemon = Daemon(folder)
    daemon.start()
    yield daemon
    daemon.end()


@pytest.fixture
def link(daemon) -> Iterator[Link]:
    with linked(daemon) as link:
        yield link


@contextlib.contextmanager
def linked(daemon: Daemon, heartbeat_s: float = RARELY_S, token: str = "secret") -> Iterator[Link]:
    link = Link(daemon.address, token, JOB, "1-0", heartbeat_s)
    yield link
    link.close(PATIENCE_S)
    assert not link._thread.is_alive()


def train(link: Link, generation: int = 1, membership: int = 0, step: int = 0) -> None:
    link.tell(ReplicaPhase.TRAINING, generation, membership, step, True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def join(generation: int, membership: int = 0, *, is_repair: bool = False) -> Join:
    return Join(JOB, generation, membership, 0, 2, 1, "h:1", is_repair)


def report_at(step: int) -> AgentReport:
    state = RunState(step, Progress(float(step), 1000.0), 2, BatchSetting(64, 32), (1.0,), 0, 64 * step)
    return AgentReport(JOB, 3, 1e9 + step, state)


# Told


def test_a_changed_status_is_said_at_once(daemon, link):
    began_s = time.time()
    link.tell(ReplicaPhase.STARTING, 1, 0, 0, False)
    first = daemon.next()
    assert (first.job, first.replica, first.pid) == (JOB, "1-0", os.getpid())
    assert (first.phase, first.generation, first.membership, first.step) == (ReplicaPhase.STARTING, 1, 0, 0)
    assert not first.has_state
    assert began_s <= first.since_s <= time.time()
    link.tell(ReplicaPhase.STARTING, 1, 0, 0, True)
    second = daemon.next()
    assert second.has_state
    assert second.since_s == first.since_s
    train(link, step=7)
    third = daemon.next()
    assert (third.phase, third.step) == (ReplicaPhase.TRAINING, 7)
    assert third.since_s >= first.since_s
    train(link, 2, 1, 8)
    assert (daemon.next().generation, link.newest) == (2, None)


def test_heartbeats_repeat_the_status_with_the_step_of_now(daemon):
    with linked(daemon, heartbeat_s=0.02) as link:
        train(link, step=1)
        first = daemon.next()
        assert daemon.next() == first
        train(link, step=2)
        until(lambda: daemon.next().step == 2)
        train(link, step=3)
        until(lambda: daemon.next().step == 3)
        assert daemon.next().since_s == first.since_s


def test_the_last_word_is_said_before_the_link_closes(daemon):
    with linked(daemon) as link:
        train(link)
        daemon.next()
        link.tell(ReplicaPhase.LEAVING, 1, 0, 5, True)
    assert daemon.next().phase is ReplicaPhase.LEAVING
    train(link)
    link.close()
    assert link.wait((0, 0), None) is None
    assert daemon.came.empty()


def test_a_link_that_never_spoke_closes():
    descriptors = os.listdir("/proc/self/fd")
    link = Link("unix:/nowhere", "t", JOB, "1-0", 1.0)
    link.close()
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_a_closed_link_leaves_no_file_open_and_no_thread(daemon):
    with linked(daemon) as link:
        train(link)
        daemon.next()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        with linked(daemon) as link:
            train(link)
            daemon.next()
    until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before)


# Away and back


def test_a_daemon_that_comes_back_hears_the_status_of_now_first(daemon, link, caplog):
    caplog.set_level(logging.INFO)
    train(link, step=1)
    daemon.next()
    daemon.stop()
    until(lambda: not link.is_connected)
    train(link, 1, 1, step=2)
    train(link, 1, 1, step=3)
    until(lambda: "training goes on" in caplog.text)
    daemon.start()
    came = daemon.next()
    assert (came.membership, came.step) == (1, 3)
    until(lambda: link.is_connected)
    assert "is back" in caplog.text
    assert sum("training goes on" in record.message for record in caplog.records) == 1


def test_a_daemon_may_come_late(folder):
    daemon = Daemon(folder)
    with linked(daemon) as link:
        train(link)
        until(lambda: link._thread.is_alive())
        daemon.start()
        assert daemon.next().phase is ReplicaPhase.TRAINING
    daemon.end()


def test_a_wrong_token_is_tried_again_and_never_stops_training(daemon, caplog):
    with linked(daemon, token="wrong") as link:
        train(link)
        until(lambda: "refuses the token" in caplog.text)
        assert not link.is_connected
        assert link.newest is None
        link._credential = "secret"
        assert daemon.next().phase is ReplicaPhase.TRAINING
    assert "wrong" not in caplog.text


# Heard


def test_the_newest_instruction_counts_in_whatever_order_they_come(daemon, link):
    train(link)
    daemon.next()
    assert link.newest is None
    daemon.say(join(2, 1), join(2, 0), join(1, 5), join(2, 1))
    assert link.wait((1, 0), PATIENCE_S) == join(2, 1)
    daemon.say(Leave(JOB, 3), join(2, 7))
    assert link.wait((2, 1), PATIENCE_S) == Leave(JOB, 3)
    assert link.wait((3, 0), 0.0) is None
    assert link.wait((3, 0), 0.01) is None


def test_a_repair_is_told_before_it_shows_and_only_once(daemon, link):
    seen: list[tuple[Join, object, str]] = []
    link.on_repair = lambda join: seen.append((join, link.newest, threading.current_thread().name))
    train(link)
    daemon.next()
    repair = join(1, 1, is_repair=True)
    daemon.say(repair, repair, join(2), join(1, 4, is_repair=True))
    assert link.wait((1, 1), PATIENCE_S) == join(2)
    daemon.say(join(3))
    assert link.wait((2, 0), PATIENCE_S) == join(3)
    assert seen == [(repair, None, "pollux-link")]


def test_a_repair_shows_even_if_the_cut_fails(daemon, link, caplog):
    def fail(join: Join) -> None:
        raise RuntimeError("no scissors")

    link.on_repair = fail
    train(link)
    daemon.next()
    daemon.say(join(1, 1, is_repair=True))
    assert link.wait((1, 0), PATIENCE_S) is not None
    assert "no scissors" in caplog.text


def test_what_is_no_instruction_of_this_job_is_dropped(daemon, link, caplog):
    train(link)
    daemon.next()
    daemon.say(Done(), Join(JobId("another"), 9, 0, 0, 1, 1, "h:1"), join(2))
    assert link.wait((1, 0), PATIENCE_S) == join(2)
    assert "no instruction" in caplog.text
    assert "job another" in caplog.text


def test_waiting_is_interrupted_by_signals(daemon, link):
    class StopError(Exception):
        pass

    def handle(number: int, frame: object) -> None:
        raise StopError

    train(link)
    daemon.next()
    before = signal.signal(signal.SIGTERM, handle)
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
        with pytest.raises(StopError):
            link.wait((1, 0), None)
    finally:
        signal.signal(signal.SIGTERM, before)
    train(link, step=5)  # and the lock is free


# Reports


def test_reports_go_along(daemon, link):
    train(link)
    daemon.next()
    until(lambda: link.is_connected)
    link.post(report_at(3))
    assert daemon.next(AgentReport) == report_at(3)


def test_a_reporter_may_post_through_the_link(daemon, link):
    pauses: list[float] = []
    reporter = Reporter(link.post, pause=pauses.append)
    reporter.send(report_at(1))
    until(lambda: bool(pauses))
    train(link)
    daemon.next()
    assert daemon.next(AgentReport) == report_at(1)
    reporter.close(PATIENCE_S)


def test_a_report_without_a_connection_is_to_be_sent_later(daemon, link):
    with pytest.raises(Temporary, match="does not take the report"):
        link.post(report_at(1))
    train(link)
    daemon.next()
    daemon.stop()
    until(lambda: not link.is_connected)
    with pytest.raises(Temporary, match="does not take the report"):
        link.post(report_at(1))


def test_a_report_that_is_too_large_is_refused_and_the_connection_lives_on(daemon, link, monkeypatch):
    train(link)
    daemon.next()
    until(lambda: link.is_connected)
    monkeypatch.setattr("pollux.wire.messages.MAX_MESSAGE_BYTES", 100)
    with pytest.raises(InvalidDocument, match="larger than"):
        link.post(report_at(1))
    monkeypatch.undo()
    link.post(report_at(2))
    assert daemon.next(AgentReport) == report_at(2)


def test_a_daemon_that_reads_nothing_holds_up_neither_training_nor_reports(folder, monkeypatch):
    monkeypatch.setattr(module, "POST_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/node.sock")
        silent.listen()
        link = Link(f"unix:{folder}/node.sock", "secret", JOB, "1-0", 0.01)
        for step in range(1000):
            link.tell(list(ReplicaPhase)[step % 6], 1, 0, step, True)
        with pytest.raises(Temporary):
            link.post(report_at(1))
        assert link.wait((1, 0), 0.05) is None
        link.close(PATIENCE_S)
