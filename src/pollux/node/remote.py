"""The daemon of another node, as the home of one job sees it: requests go there in order, news come from there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pollux.core import JobId, NodeId
from pollux.errors import Permanent, PolluxError, StaleGeneration
from pollux.wire import Peer, dial
from pollux.wire.nodes import (
    DescribeNode,
    ListReplicas,
    NodeDescription,
    NodeNews,
    NodeRequest,
    ReplicaHere,
    ReplicaList,
    Watch,
)

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
PING_AFTER_S = 5.0
ANSWER_WITHIN_S = 10.0
"""A node that takes longer is out of reach, even if its connections stand."""


class RemoteNode:
    """Connects by itself, and again for ever. Callbacks run in the loop, never from within `send`.

    It counts as there until `on_gone`; what is sent after that is dropped, for `on_back` says what is really there.
    """

    def __init__(
        self,
        job: JobId,
        node: NodeId,
        address: str,
        token: str,
        *,
        on_gone: Callable[[NodeId], None],
        on_back: Callable[[NodeId, Sequence[ReplicaHere]], None],
        on_news: Callable[[NodeNews], None],
        on_refused: Callable[[NodeId, NodeRequest, PolluxError], None],
        is_there: bool = True,
    ) -> None:
        self.address = address
        """Of its daemon; a new one is used from the next connection on."""
        self._job = job
        self._node = node
        self._token = token
        self._on_gone = on_gone
        self._on_back = on_back
        self._on_news = on_news
        self._on_refused = on_refused
        self._is_there = is_there
        self._is_finishing = False
        self._requests: asyncio.Queue[NodeRequest | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, request: NodeRequest) -> None:
        self._is_finishing = False
        if self._is_there:
            self._requests.put_nowait(request)

    def finish(self) -> None:
        """Close once everything was sent, unless more comes. A node that is out of reach is still waited for."""
        self._is_finishing = True
        self._requests.put_nowait(None)

    def close(self) -> None:
        self._task.cancel()

    @property
    def is_closed(self) -> bool:
        return self._task.done()

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._visit()
                return
            except (PolluxError, OSError) as error:  # TimeoutError is an OSError
                if self._is_there:
                    log.warning("Node %s of job %s is out of reach: %s", self._node, self._job, error)
                    pause_s = FIRST_PAUSE_S
                    self._leave()
            except Exception:
                log.exception("Node %s of job %s: a bug; the connection is made anew.", self._node, self._job)
                self._leave()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _leave(self) -> None:
        if self._is_there:
            self._is_there = False
            while not self._requests.empty():
                self._requests.get_nowait()
            self._on_gone(self._node)

    async def _visit(self) -> None:
        """Returns when there is nothing left to do there; raises when the connection is lost."""
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
            if not isinstance(who, NodeDescription) or who.node != self._node:
                raise Permanent(f"{self.address} is {who}, not the daemon of node {self._node}.")
            await watching.ask(Watch(self._job, replicas=True))
            if self._is_there:
                return
            listed = await asking.ask(ListReplicas(self._job))
            if not isinstance(listed, ReplicaList):
                raise Permanent(f"{self.address} does not list its replicas, but answers {listed}.")
        log.info("Node %s of job %s is there again.", self._node, self._job)
        self._is_there = True
        self._on_back(self._node, listed.replicas)

    async def _listen(self, peer: Peer) -> None:
        while True:
            news: NodeNews = await peer.receive(NodeNews)
            self._on_news(news)

    async def _work(self, peer: Peer) -> None:
        while not (self._is_finishing and self._requests.empty()):
            try:
                async with asyncio.timeout(PING_AFTER_S):
                    request = await self._requests.get()
            except TimeoutError:
                request = DescribeNode()
            if request is None:
                continue
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await peer.ask(request)
            except (Permanent, StaleGeneration) as error:
                self._on_refused(self._node, request, error)
