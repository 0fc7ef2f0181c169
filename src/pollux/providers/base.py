"""The seam between the service and whatever gives it nodes."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

from pollux.core import Node, NodeId


@dataclass(frozen=True, slots=True)
class ProvidedNode:
    """A node, and where the service reaches its daemon: `unix:/path` or `host:port`."""

    node: Node
    address: str


class Provider(abc.ABC):
    """Gives nodes with a daemon each, and keeps the daemons running. All methods are for one event loop.

    Daemons outlive the provider. The next one of the same configuration finds them under the same names, and their
    replicas notice nothing.
    """

    @abc.abstractmethod
    async def start(self, on_change: Callable[[], None]) -> None:
        """Find the daemons, or start them; returns when each is started, which is before it answers.

        `on_change` is called in the loop whenever `nodes` or `reached_at` would say something else than before.
        """

    @abc.abstractmethod
    def nodes(self) -> tuple[ProvidedNode, ...]:
        """All nodes, in a fixed order; also those whose daemon is just being started again."""

    @abc.abstractmethod
    def reached_at(self, node: NodeId) -> str:
        """host:port where the daemons of other nodes reach this one; empty as long as nobody knows.

        `UnknownName`: there is no such node.
        """

    @abc.abstractmethod
    async def request(self, count: int) -> tuple[NodeId, ...]:
        """So many nodes more. `Permanent`: there are none, and why."""

    @abc.abstractmethod
    async def release(self, node: NodeId) -> None:
        """Give the node back: its replicas save, its daemon ends and stays ended. `UnknownName`: no such node."""

    @abc.abstractmethod
    async def close(self, *, end: bool) -> None:
        """Let go of the daemons, or, `end`, end them: replicas save first, and no process is left. May be repeated."""
