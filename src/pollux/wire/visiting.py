"""A daemon as somebody sees it who needs it for long: requests go there in order, news come from there."""

from __future__ import annotations

import abc
import asyncio
import logging

from pollux.errors import BackendError, Permanent, PolluxError, StaleGeneration
from pollux.wire.frames import Peer, dial
from pollux.wire.nodes import DescribeNode, NodeAnswer, NodeNews, NodeRequest

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
PING_AFTER_S = 5.0
HEAR_AGAIN_S = 1.0


class Visitor(abc.ABC):
    """Connects by itself, and again for ever. The methods that subclasses give run in the loop, never within `send`.

    It has one connection for requests and one for news. What is sent while the daemon is not there is dropped: whoever
    sends learns in `arrive` what is really there, and asks again.
    """

    def __init__(self, what: str, address: str, token: str, *, is_there: bool, answer_within_s: float) -> None:
        """`what`: for the log. A daemon that takes longer to answer is out of reach, even if its connections stand."""
        self.address = address
        """Of the daemon; a new one is used from the next connection on."""
        self.is_there = is_there
        self._what = what
        self._token = token
        self._answer_within_s = answer_within_s
        self._is_finishing = False
        self._requests: asyncio.Queue[NodeRequest | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @abc.abstractmethod
    async def arrive(self, asking: Peer, watching: Peer) -> None:
        """Both connections stand: begin to watch, see what is there, set `is_there`."""

    @abc.abstractmethod
    def left(self) -> None:
        """It was there and is out of reach."""

    @abc.abstractmethod
    def heard(self, news: NodeNews) -> None:
        """Take it in wholly; or not at all, and raise `BackendError`: then it is told again, before anything else."""

    @abc.abstractmethod
    def refused(self, request: NodeRequest, error: PolluxError) -> None: ...

    def send(self, request: NodeRequest) -> None:
        self._is_finishing = False
        if self.is_there:
            self._requests.put_nowait(request)

    async def ask(self, request: NodeRequest) -> NodeAnswer:
        """One question on a connection of its own: it neither waits for what was sent before nor holds it up."""
        async with asyncio.timeout(self._answer_within_s):
            peer = await dial(self.address, self._token)
            try:
                return await peer.ask(request)
            finally:
                peer.close()

    def finish(self) -> None:
        """Close once everything was sent, unless more comes. A daemon that is out of reach is still waited for."""
        self._is_finishing = True
        self._requests.put_nowait(None)

    def close(self) -> None:
        self._task.cancel()

    async def closed(self) -> None:
        """After `close`: nothing of it runs any more."""
        await asyncio.wait([self._task])

    @property
    def is_closed(self) -> bool:
        return self._task.done()

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            was_there = self.is_there
            try:
                await self._visit()
                return
            except (PolluxError, OSError) as error:  # TimeoutError is an OSError
                if self.is_there:
                    log.warning("%s is out of reach: %s", self._what, error)
            except Exception:
                log.exception("%s: a bug; the connection is made anew.", self._what)
            if self.is_there or was_there:
                pause_s = FIRST_PAUSE_S
            if self.is_there:
                self.is_there = False
                while not self._requests.empty():
                    self._requests.get_nowait()
                try:
                    self.left()
                except Exception:
                    log.exception("%s: a bug in what follows from its loss.", self._what)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

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
            async with asyncio.timeout(self._answer_within_s):
                await self.arrive(asking, watching)
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

    async def _listen(self, peer: Peer) -> None:
        while True:
            news: NodeNews = await peer.receive(NodeNews)
            while True:
                try:
                    self.heard(news)
                    break
                except BackendError as error:  # of whoever hears it, such as a disk that is full: it must not be lost
                    log.warning("%s: its news cannot be taken in now, and waits. %s", self._what, error)
                    await asyncio.sleep(HEAR_AGAIN_S)

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
                async with asyncio.timeout(self._answer_within_s):
                    await peer.ask(request)
            except (Permanent, StaleGeneration) as error:
                self.refused(request, error)
