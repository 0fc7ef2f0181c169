"""The connections of replicas on this node: they tell how they stand, and are handed their instructions."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from pollux.errors import Permanent, PolluxError
from pollux.node.hosted import Hosted
from pollux.node.processes import send_signal
from pollux.node.roster import Roster
from pollux.wire.frames import Peer
from pollux.wire.messages import AgentReport
from pollux.wire.replicas import Instruction, ReplicaStatus

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""A process that a replica has left behind may hold its connection open: nobody waits longer for it to be closed."""


class Links:
    """`on_heard` is called for each word of a replica on itself, `on_report` for each report of its job."""

    def __init__(
        self, roster: Roster, on_heard: Callable[[Hosted], None], on_report: Callable[[AgentReport], None]
    ) -> None:
        self._roster = roster
        self._on_heard = on_heard
        self._on_report = on_report
        self._served: dict[Peer, asyncio.Event] = {}
        """Set when the connection is closed."""

    async def serve(self, peer: Peer, first: ReplicaStatus) -> None:
        """Listen to a replica until its connection is lost, or until it has made another one."""
        hosted = self._hosted(first)
        if hosted.is_alive:
            if hosted.link is not None:
                hosted.link.close()
            hosted.link = peer
            if hosted.told is not None:
                hand(hosted, hosted.told)
        message: ReplicaStatus | AgentReport = first
        self._served[peer] = closed = asyncio.Event()
        try:
            while hosted.link is peer or not hosted.is_alive:
                self._take(hosted, message)
                message = await peer.receive(ReplicaStatus | AgentReport)
        finally:
            del self._served[peer]
            closed.set()
            if hosted.link is peer:
                hosted.link = None

    async def hear_out(self, hosted: Hosted) -> None:
        """Of a replica that has ended: what it said last may not have been read yet, and tells how it ended."""
        peer = hosted.link
        if peer is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._served[peer].wait()
        peer.close()

    def _hosted(self, first: ReplicaStatus) -> Hosted:
        hosted = self._roster.find(first.job, first.replica)
        if hosted is not None and not hosted.is_alive and not hosted.pid:
            log.warning("%s, which was given up when its keeper was lost, is ended.", hosted.tag)
            send_signal(first.pid, signal.SIGKILL)
        if hosted is None or (hosted.pid != first.pid and (hosted.pid or not hosted.is_alive)):
            raise Permanent(f"{first.job}/{first.replica} with pid {first.pid} is not a replica of this node.")
        return hosted

    def _take(self, hosted: Hosted, message: ReplicaStatus | AgentReport) -> None:
        is_own = isinstance(message, AgentReport) or message.replica == hosted.replica
        if message.job != hosted.job or not is_own:
            raise Permanent(f"{hosted.tag} speaks for another: it is not heard any more.")
        hosted.heard_at_s = time.monotonic()
        if isinstance(message, AgentReport):
            self._on_report(message)
        elif hosted.is_alive:  # else how it ended is what counts
            hosted.status = message
            self._on_heard(hosted)


def hand(hosted: Hosted, instruction: Instruction) -> None:
    """Now, if its link is up."""
    try:
        if hosted.link is not None:
            hosted.link.send(instruction)
    except PolluxError as error:  # it comes back, and is told again
        log.info("%s was not reached: %s", hosted.tag, error)
