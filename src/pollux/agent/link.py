"""A replica's connection to the daemon of its node: it says how it stands and hears whom to train with.

A thread of its own does all of it. It speaks when something changes and every heartbeat, comes back for as long as the
daemon is away, and begins each connection with the newest status. Training goes on whatever happens here.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pollux.core import JobId
from pollux.errors import InvalidDocument, Permanent, Temporary
from pollux.wire.frames import Channel
from pollux.wire.messages import AgentReport
from pollux.wire.replicas import Instruction, Join, Leave, ReplicaPhase, ReplicaStatus

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
POST_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 5.0
"""A daemon that takes nothing for so long is treated as gone."""
_WAIT_S = 0.05
"""How long the training thread waits at a time, so that it hears signals in between."""


@dataclass(eq=False)
class _Post:
    """A report on its way."""

    report: AgentReport
    is_over: threading.Event = field(default_factory=threading.Event)
    is_sent: bool = False
    error: InvalidDocument | None = None


class Link:
    """Tells the daemon of this replica and hears its instructions.

    Only `post` raises, only `post` and `wait` block. The thread starts with the first word and ends with `close`, or
    with the process.
    """

    def __init__(self, address: str, credential: str, job: JobId, replica: str, heartbeat_s: float) -> None:
        """`address`: unix:/path or host:port. `credential`: of this replica."""
        self._address = address
        self._credential = credential
        self._job = job
        self._replica = replica
        self._heartbeat_s = heartbeat_s
        self.on_instruction: Callable[[Instruction], None] = lambda instruction: None
        """Called in the link's thread once `newest` shows it."""
        self.on_repair: Callable[[Join], None] = lambda join: None
        """Called in the link's thread when members are lost, before `newest` shows the instruction."""
        self._lock = threading.Condition()
        self._status: ReplicaStatus | None = None
        self._is_changed = False
        self._newest: Join | Leave | None = None
        self._posts: deque[_Post] = deque()
        self._is_connected = False
        self._is_closing = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._run, name="pollux-link", daemon=True)

    # From the training thread and others

    def tell(
        self,
        phase: ReplicaPhase,
        generation: int,
        membership: int,
        step: int,
        has_state: bool,
        has_finished: bool = False,
    ) -> None:
        """How this replica stands from now on. Said at once; a step that is all that has changed with the next beat."""
        with self._lock:
            if self._is_closing:
                return
            before = self._status
            place = (phase, generation, membership)
            is_there = before is not None and place == (before.phase, before.generation, before.membership)
            self._status = ReplicaStatus(
                self._job,
                self._replica,
                os.getpid(),
                *place,
                step,
                has_state,
                since_s=before.since_s if before is not None and is_there else time.time(),
                has_finished=has_finished,
            )
            is_new = not is_there or before is None or has_state != before.has_state
            if not is_new:
                return
            self._is_changed = True
        if before is None:
            self._thread.start()
        self._nudge()

    @property
    def newest(self) -> Join | Leave | None:
        """What to become: the instruction with the highest (generation, membership) so far."""
        return self._newest

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    def wait(self, newer_than: tuple[int, int], timeout_s: float | None) -> Join | Leave | None:
        """The newest instruction once it is beyond (generation, membership); None: not in time, or closed."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            while self._newest is None or self._newest.place <= newer_than:
                left_s = _WAIT_S if until_s is None else until_s - time.monotonic()
                if left_s <= 0 or self._is_closing:
                    return None
                self._lock.wait(min(left_s, _WAIT_S))
            return self._newest

    def post(self, report: AgentReport) -> None:
        """Returns when the system has taken the report for the daemon.

        `Temporary`: there is no connection, or it was not taken in time. `InvalidDocument`: it is too large.
        """
        post = _Post(report)
        with self._lock:
            if not self._is_connected:
                raise self._unsent()
            self._posts.append(post)
        self._nudge()
        post.is_over.wait(POST_TIMEOUT_S)
        with self._lock, suppress(ValueError):
            self._posts.remove(post)
        if post.error is not None:
            raise post.error
        if not post.is_sent:
            raise self._unsent()

    def close(self, timeout_s: float = 1.0) -> None:
        """Say the last word, if it can be said in that time. May be called again."""
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
            self._lock.notify_all()
        if was_closing:
            return
        self._nudge()
        if self._status is None:
            self._let_go()
        else:
            self._thread.join(timeout_s)

    # In the thread

    def _run(self) -> None:
        pause_s, has_complained = FIRST_PAUSE_S, False
        while True:
            began_s = time.monotonic()
            try:
                with Channel.connect(self._address, self._credential, CONNECT_TIMEOUT_S) as channel:
                    if has_complained:
                        log.info("The daemon at %s is back.", self._address)
                    has_complained = False
                    self._converse(channel)
            except Exception as error:
                # Even what will not pass by itself: a daemon may come back with the right token.
                if not has_complained and not self._is_closing:
                    trace = None if isinstance(error, Temporary | Permanent) else error
                    log.warning(
                        "No word to the daemon at %s; training goes on. %s", self._address, error, exc_info=trace
                    )
                has_complained = True
            finally:
                self._disconnected()
            if self._is_closing:
                self._let_go()
                return
            if time.monotonic() - began_s > LONGEST_PAUSE_S:  # not one that hangs up on us each time
                pause_s = FIRST_PAUSE_S
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _converse(self, channel: Channel) -> None:
        """Until the link is closed; raises when the connection is lost."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        next_s = self._say_status(channel)
        with self._lock:
            self._is_connected = True
        while True:
            left_s = max(next_s - time.monotonic(), 0.0)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * left_s)}
            if self._woken in ready:
                self._drain()
            if channel.fileno() in ready:
                self._listen(channel)
            with self._lock:
                is_closing, is_changed = self._is_closing, self._is_changed
            if is_changed or time.monotonic() >= next_s:
                next_s = self._say_status(channel)
            self._send_posts(channel)
            if is_closing:
                return

    def _say_status(self, channel: Channel) -> float:
        """Returns when to say it again."""
        with self._lock:
            status, self._is_changed = self._status, False
        assert status is not None  # the thread starts with the first one
        channel.send(status, SEND_TIMEOUT_S)
        return time.monotonic() + self._heartbeat_s

    def _send_posts(self, channel: Channel) -> None:
        while True:
            with self._lock:
                if not self._posts:
                    return
                post = self._posts.popleft()
            try:
                channel.send(post.report, SEND_TIMEOUT_S)
                post.is_sent = True
            except InvalidDocument as error:  # nothing of it went out
                post.error = error
            finally:
                post.is_over.set()

    def _listen(self, channel: Channel) -> None:
        """Follow all that has come."""
        while True:
            try:
                instruction: Instruction = channel.receive(Instruction, 0)
            except TimeoutError:
                return
            except InvalidDocument as error:
                log.warning("The daemon at %s says what is no instruction: %s", self._address, error)
                continue
            self._follow(instruction)

    def _follow(self, instruction: Instruction) -> None:
        if instruction.job != self._job:
            log.warning("An instruction for job %s has come to job %s.", instruction.job, self._job)
            return
        if self._newest is not None and instruction.place <= self._newest.place:
            return
        if isinstance(instruction, Join) and instruction.is_repair:
            try:
                self.on_repair(instruction)
            except Exception:
                log.exception("The group of the members before could not be cut.")
        with self._lock:
            self._newest = instruction
            self._lock.notify_all()
        try:
            self.on_instruction(instruction)
        except Exception:
            log.exception("The others were not told of the instruction.")

    def _disconnected(self) -> None:
        with self._lock:
            self._is_connected = False
            posts = list(self._posts)
            self._posts.clear()
        for post in posts:
            post.is_over.set()

    def _unsent(self) -> Temporary:
        return Temporary(f"The daemon at {self._address} does not take the report.", LONGEST_PAUSE_S)

    # The pipe that wakes the thread

    def _nudge(self) -> None:
        with self._lock:
            if self._wake >= 0:
                with suppress(BlockingIOError):  # full: it will wake up
                    os.write(self._wake, b"!")

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _sleep(self, seconds: float) -> None:
        """Until there is something to say, at the longest."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if poll.poll(1000 * seconds):
            self._drain()

    def _let_go(self) -> None:
        with self._lock:
            os.close(self._woken)
            os.close(self._wake)
            self._wake = -1
