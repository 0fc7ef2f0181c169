"""The daemon of one node as the service sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pollux.core import NodeId
from pollux.errors import Permanent, PolluxError
from pollux.wire.frames import Peer
from pollux.wire.nodes import (
    DescribeNode,
    ListRuns,
    NodeDescription,
    NodeNews,
    NodeRequest,
    Runs,
    RunStatus,
    Watch,
)
from pollux.wire.visiting import Visitor

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 30.0
"""Reading the script of a job counts."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    on_there: Callable[[NodeId, NodeDescription, tuple[RunStatus, ...]], None]
    """Connected, anew or for the first time; what its daemon says of itself and runs. News follow."""
    on_away: Callable[[NodeId], None]
    on_news: Callable[[NodeId, NodeNews], None]
    on_refused: Callable[[NodeId, NodeRequest, PolluxError], None]


class DaemonLink(Visitor):
    """One node's link, until `close`."""

    def __init__(self, node: NodeId, address: str, token: str, callbacks: Callbacks) -> None:
        self.node = node
        self._callbacks = callbacks
        super().__init__(f"Node {node}", address, token, is_there=False, answer_within_s=ANSWER_WITHIN_S)

    async def arrive(self, asking: Peer, watching: Peer) -> None:
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

    def left(self) -> None:
        self._callbacks.on_away(self.node)

    def heard(self, news: NodeNews) -> None:
        self._callbacks.on_news(self.node, news)

    def refused(self, request: NodeRequest, error: PolluxError) -> None:
        self._callbacks.on_refused(self.node, request, error)
