"""The daemon of one node as the service sees it: requests go there in order, news come from there.

It connects by itself, and again for ever. What is asked while the daemon is out of reach is dropped: whoever asked
learns from `on_there` what really runs, and asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pollux.core import NodeId
from pollux.errors import Permanent, PolluxError, StaleGeneration
from pollux.wire import Peer, dial
from pollux.wire.nodes import (
    DescribeNode,
    Forget,
    JobRequest,
    ListRuns,
    NodeAnswer,
    NodeDescription,
    NodeNews,
    NodeRequest,
    Runs,
    RunStatus,
    Watch,
)

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
PING_AFTER_S = 5.0
ANSWER_WITHIN_S = 30.0
"""A daemon that takes longer is out of reach, even if its connections stand. Reading the script of a job counts."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Called in the loop, never from within a call of the link."""

    on_there: Callable[[NodeId, NodeDescription, tuple[RunStatus, ...]], None]
    """Connected, anew or for the first time; what its daemon says of itself and runs. News follow."""
    on_away: Callable[[NodeId], None]
    on_news: Callable[[NodeId, NodeNews], None]
    on_refused: Callable[[NodeId, JobRequest | Forget, PolluxError], None]


class DaemonLink:
    """One node's link, until `close`."""

    def __init__(self, node: NodeId, address: str, token: str, callbacks: Callbacks) -> None:
        self.node = node
        self.address = address
        """A new one is used from the next connection on."""
        self.is_there = False
        self._token = token
        self._callbacks = callbacks
        self._requests: asyncio.Queue[JobRequest | Forget] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, request: JobRequest | Forget) -> None:
        if self.is_there:
            self._requests.put_nowait(request)

    async def ask(self, request: NodeRequest) -> NodeAnswer:
        """One question on a connection of its own: it neither waits for what was sent before nor holds it up."""
        async with asyncio.timeout(ANSWER_WITHIN_S):
            peer = await dial(self.address, self._token)
            try:
                return await peer.ask(request)
            finally:
                peer.close()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._visit()
            except (PolluxError, OSError) as error:  # TimeoutError is an OSError
                if self.is_there:
                    log.warning("Node %s is out of reach: %s", self.node, error)
            except Exception:
                log.exception("Node %s: a bug; the connection is made anew.", self.node)
            if self.is_there:
                self.is_there, pause_s = False, FIRST_PAUSE_S
                self._requests = asyncio.Queue()
                self._callbacks.on_away(self.node)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _visit(self) -> None:
        """Raises when the connection is lost."""
        asking = await dial(self.address, self._token)
        try:
            watching = await dial(self.address, self._token)
        except BaseException:
            asking.abort()
            raise
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._arrive(asking, watching)
            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(self._listen(watching)), loop.create_task(self._work(asking))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            asking.close()
            watching.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _arrive(self, asking: Peer, watching: Peer) -> None:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            who = await asking.ask(DescribeNode())
            if not isinstance(who, NodeDescription) or who.node != self.node:
                raise Permanent(f"{self.address} is {who}, not the daemon of node {self.node}.")
            await watching.ask(Watch())  # before the list, so that nothing falls between the two
            listed = await asking.ask(ListRuns())
            if not isinstance(listed, Runs):
                raise Permanent(f"{self.address} does not list its jobs, but answers {listed}.")
        log.info("Node %s is there, pid %d, with %d jobs at home.", self.node, who.pid, len(listed.runs))
        self.is_there = True
        self._callbacks.on_there(self.node, who, listed.runs)

    async def _listen(self, peer: Peer) -> None:
        while True:
            news: NodeNews = await peer.receive(NodeNews)
            self._callbacks.on_news(self.node, news)

    async def _work(self, peer: Peer) -> None:
        requests = self._requests
        while True:
            request: JobRequest | Forget | DescribeNode
            try:
                async with asyncio.timeout(PING_AFTER_S):
                    request = await requests.get()
            except TimeoutError:
                request = DescribeNode()
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await peer.ask(request)
            except (Permanent, StaleGeneration) as error:
                if not isinstance(request, DescribeNode):
                    self._callbacks.on_refused(self.node, request, error)
