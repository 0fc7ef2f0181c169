"""The daemon of another node, as the home of one job sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pollux.core import JobId, NodeId
from pollux.errors import Permanent, PolluxError
from pollux.wire.frames import Peer
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
from pollux.wire.visiting import Visitor

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 10.0


class RemoteNode(Visitor):
    """It counts as there until `on_gone`; what is sent after that is dropped, for `on_back` says what really is."""

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
        self._job = job
        self._node = node
        self._on_gone = on_gone
        self._on_back = on_back
        self._on_news = on_news
        self._on_refused = on_refused
        what = f"Node {node} of job {job}"
        super().__init__(what, address, token, is_there=is_there, answer_within_s=ANSWER_WITHIN_S)

    async def arrive(self, asking: Peer, watching: Peer) -> None:
        who = await asking.ask(DescribeNode())
        if not isinstance(who, NodeDescription) or who.node != self._node:
            raise Permanent(f"{self.address} is {who}, not the daemon of node {self._node}.")
        await watching.ask(Watch(self._job, replicas=True))
        if self.is_there:
            return
        listed = await asking.ask(ListReplicas(self._job))
        if not isinstance(listed, ReplicaList):
            raise Permanent(f"{self.address} does not list its replicas, but answers {listed}.")
        log.info("%s is there again.", self._what)
        self.is_there = True
        self._on_back(self._node, listed.replicas)

    def left(self) -> None:
        self._on_gone(self._node)

    def heard(self, news: NodeNews) -> None:
        self._on_news(news)

    def refused(self, request: NodeRequest, error: PolluxError) -> None:
        self._on_refused(self._node, request, error)
