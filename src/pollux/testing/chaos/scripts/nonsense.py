"""What a broken or hostile agent may say to its daemon, over connections that are made as its agent makes them."""

from __future__ import annotations

import os
import random
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pollux.core import JobId, StopReason
from pollux.errors import PolluxError
from pollux.wire.frames import Channel
from pollux.wire.messages import AgentReport, pack
from pollux.wire.nodes import Done, Forget, Kill, ListRuns, NodeAnswer, Runs, StopRun
from pollux.wire.replicas import ReplicaStatus

PAUSE_S = 0.05
PATIENCE_S = 1.0
HUGE = 10**15
NOBODY = JobId("nobody-0")
ABSURD = ("NaN", "-1e300", "Infinity", "-5", '"many"', "1e308", "0", "null", "1e-320")
NUMBER = re.compile(r"(?<=[:\[, ])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?=[,\]}])")

Write = Callable[..., None]


@dataclass
class Overheard:
    """How the agent of this process connects, with whatever arguments that takes, and what it said last."""

    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    status: ReplicaStatus | None = None
    report: AgentReport | None = None

    def connect(self) -> Channel:
        return Channel.connect(*self.arguments, **self.options)


def listen_in() -> Overheard:
    """From now on."""
    heard = Overheard()
    connect, send = Channel.connect.__func__, Channel.send  # type: ignore[attr-defined]

    def connect_and_note(cls: type[Channel], *arguments: Any, **options: Any) -> Channel:
        heard.arguments, heard.options = arguments, options
        channel: Channel = connect(cls, *arguments, **options)
        return channel

    def send_and_note(channel: Channel, message: object, *timeout: float) -> None:
        if isinstance(message, ReplicaStatus):
            heard.status = message
        elif isinstance(message, AgentReport):
            heard.report = message
        send(channel, message, *timeout)

    Channel.connect = classmethod(connect_and_note)  # type: ignore[method-assign, assignment]
    Channel.send = send_and_note  # type: ignore[method-assign, assignment]
    return heard


def talk_nonsense(heard: Overheard, seconds: float, write: Write) -> None:
    """For so long. An order that the daemon should have refused and has not is written down as `obeyed`."""
    draw = random.Random(os.getpid())
    until_s = time.monotonic() + seconds
    times = 0
    while time.monotonic() < until_s:
        time.sleep(PAUSE_S)
        if heard.status is None:
            continue
        status, report = heard.status, heard.report
        with suppress(PolluxError, OSError, TimeoutError):
            match draw.randrange(6):
                case 0:
                    _stranger(draw)
                case 1:
                    _noise(heard, draw)
                case 2:
                    _impostor(heard, status, report, draw)
                case 3 if report is not None:
                    _late(heard, status, report, draw)
                case 4 if report is not None:
                    _absurd(heard, status, report, draw)
                case _:
                    _commander(heard, draw, write)
        heard.status, heard.report = status, report  # what this thread said is not what the agent says
        times += 1
    write("nonsense", times=times)


def _stranger(draw: random.Random) -> None:
    """Bytes in place of a handshake."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(os.environ["POLLUX_SOCKET"].removeprefix("unix:"))
        sock.sendall(secrets.token_bytes(draw.choice((1, 68, 5000))))


def _noise(heard: Overheard, draw: random.Random) -> None:
    """Frames that are no messages, too large, or cut off."""
    body = draw.choice((b"", b"{", secrets.token_bytes(300), b'{"type": "Kill"}', b"\xff" * 70, b"[" * 5000))
    with heard.connect() as channel:
        _send_bytes(channel, body, draw.choice((len(body), len(body) + 9, 2**31)))


def _impostor(heard: Overheard, own: ReplicaStatus, report: AgentReport | None, draw: random.Random) -> None:
    """It speaks for replicas and jobs that are not its own."""
    other = draw.choice(_others(heard))
    strange = (replace(own, replica="no-such"), replace(own, job=other, replica="1-1"), replace(own, job=other, pid=1))
    with heard.connect() as channel:
        channel.send(draw.choice(strange), PATIENCE_S)
        if report is not None:
            channel.send(replace(report, job=other), PATIENCE_S)
        channel.receive(NodeAnswer, PATIENCE_S)


def _late(heard: Overheard, own: ReplicaStatus, report: AgentReport, draw: random.Random) -> None:
    """A report of a generation that is over, or that never was."""
    with heard.connect() as channel:
        channel.send(own, PATIENCE_S)
        channel.send(replace(report, generation=draw.choice((1, report.generation + 1, HUGE))), PATIENCE_S)


def _absurd(heard: Overheard, own: ReplicaStatus, report: AgentReport, draw: random.Random) -> None:
    """Figures that no training has, as bytes: our own classes would not let them out."""

    def spoilt(number: re.Match[str]) -> str:
        return draw.choice(ABSURD) if draw.random() < 0.3 else number[0]

    with heard.connect() as channel:
        channel.send(own, PATIENCE_S)
        body = NUMBER.sub(spoilt, pack(report).decode("ascii")).encode("ascii")
        _send_bytes(channel, body, len(body))
        huge = draw.choice((1e308, 1e-308, 0.0))
        channel.send(replace(report, throughput=huge, goodput=huge, noise_scale=huge, loss=-huge), PATIENCE_S)


def _commander(heard: Overheard, draw: random.Random, write: Write) -> None:
    """It gives orders that are the service's to give, for jobs of others."""
    job = draw.choice(_others(heard))
    orders = (Kill(job, "1-1", 9), Kill(job, "1-2", 15), StopRun(job, HUGE, StopReason.CANCELLED), Forget(job, 1))
    order = draw.choice(orders)
    with heard.connect() as channel:
        channel.send(order, PATIENCE_S)
        if isinstance(channel.receive(NodeAnswer, PATIENCE_S), Done):
            write("obeyed", order=repr(order))


def _others(heard: Overheard) -> list[JobId]:
    """Jobs that are not its own, as far as the daemon tells."""
    with suppress(PolluxError, OSError, TimeoutError), heard.connect() as channel:
        channel.send(ListRuns(), PATIENCE_S)
        answer = channel.receive(NodeAnswer, PATIENCE_S)
        if isinstance(answer, Runs):
            return [run.job for run in answer.runs if run.job != os.environ["POLLUX_JOB"]] or [NOBODY]
    return [NOBODY]


def _send_bytes(channel: Channel, body: bytes, length: int) -> None:
    channel._write(length.to_bytes(4, "big") + body, time.monotonic() + PATIENCE_S)
