"""What every provider must do: subclass `ProviderContract`, say how to make and to harm yours; pytest runs the rest.

Nodes take seconds to start, so the tests of a class share them: each leaves, or makes anew, what the next one expects.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from pollux.core import NodeId
from pollux.errors import Permanent, Temporary, UnknownName
from pollux.providers.base import Provider
from pollux.wire.frames import ask
from pollux.wire.nodes import DescribeNode, NodeDescription

T = TypeVar("T")

PATIENT_S = 100.0
"""Generous: a machine that is busy with other tests takes many times as long as an idle one."""


class ProviderUnderTest:
    """A provider, the loop that it lives in, and what it has told."""

    def __init__(self, make: Callable[[], Provider], token: str) -> None:
        self._make = make
        self._token = token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._provider: Provider | None = None
        self.num_changes = 0

    @property
    def provider(self) -> Provider:
        """Started if there is none."""
        if self._provider is None:
            self._provider = self.run(self._started())
        return self._provider

    async def _started(self) -> Provider:
        provider = self._make()
        await provider.start(self._changed)
        return provider

    def _changed(self) -> None:
        self.num_changes += 1

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENT_S)

    def names(self) -> list[NodeId]:
        provider = self.provider

        async def names() -> list[NodeId]:
            return [given.node.id for given in provider.nodes()]

        return self.run(names())

    def address(self, node: NodeId) -> str:
        return next(given.address for given in self.provider.nodes() if given.node.id == node)

    def description(self, node: NodeId, address: str = "") -> NodeDescription:
        """What its daemon says of itself as soon as it answers."""

        def asked() -> NodeDescription | None:
            try:
                said = ask(address or self.address(node), self._token, DescribeNode(), 5.0)
            except (Temporary, Permanent):
                return None
            assert isinstance(said, NodeDescription)
            return said

        return until(asked)

    def pids(self) -> dict[NodeId, int]:
        return {node: self.description(node).pid for node in self.names()}

    def close(self, *, end: bool) -> None:
        if self._provider is not None:
            self.run(self._provider.close(end=end))
        self._provider = None

    def stop(self) -> None:
        try:
            self.provider  # noqa: B018  # finds what a test has left, to end it
            self.close(end=True)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class ProviderContract:
    """Tests of one kind of `Provider`; in each class one cluster of `NODES` nodes is used from test to test."""

    NODES = 2

    @classmethod
    def make(cls, nodes: int) -> Provider:
        """A provider of so many nodes, with the same place and name for all that it keeps each time."""
        raise NotImplementedError

    @classmethod
    def token(cls) -> str:
        """That the daemons ask for."""
        raise NotImplementedError

    @classmethod
    def kill(cls, said: NodeDescription) -> None:
        """Kill this daemon where it runs, without a word."""
        raise NotImplementedError

    @classmethod
    def left(cls) -> object:
        """What still runs of all nodes together: something that is true if anything does."""
        raise NotImplementedError

    @classmethod
    def clean_up(cls) -> None:
        """Called after the last test, whatever happened; nothing runs any more, unless the provider is broken."""

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls) -> Iterator[ProviderUnderTest]:
        world = ProviderUnderTest(lambda: cls.make(cls.NODES), cls.token())
        try:
            yield world
        finally:
            try:
                world.stop()
            finally:
                cls.clean_up()

    def test_there_are_as_many_nodes_as_asked_for_and_each_daemon_answers_by_its_name(
        self, world: ProviderUnderTest
    ) -> None:
        names = world.names()
        assert len(set(names)) == len(names) == self.NODES
        for given in world.provider.nodes():
            said = world.description(given.node.id)
            assert (said.node, said.slots) == (given.node.id, given.node.num_gpus)

    def test_the_service_is_told_that_there_are_nodes(self, world: ProviderUnderTest) -> None:
        world.names()
        assert world.num_changes > 0

    def test_other_daemons_reach_a_node_by_host_and_port(self, world: ProviderUnderTest) -> None:
        for node in world.names():
            address = until(lambda node=node: world.provider.reached_at(node))  # type: ignore[misc]
            host, _, port = address.rpartition(":")
            assert host
            assert port.isdecimal()
            assert world.description(node, address).node == node

    def test_a_node_that_is_none_has_no_address(self, world: ProviderUnderTest) -> None:
        with pytest.raises(UnknownName):
            world.provider.reached_at(NodeId("nobody"))

    def test_daemons_outlive_the_provider_and_the_next_one_finds_them(self, world: ProviderUnderTest) -> None:
        names, pids = world.names(), world.pids()
        world.close(end=False)
        assert world.names() == names
        assert world.pids() == pids

    def test_a_killed_daemon_comes_back_under_its_name(self, world: ProviderUnderTest) -> None:
        names, victim = world.names(), world.names()[-1]
        before = world.description(victim)
        others = {node: pid for node, pid in world.pids().items() if node != victim}
        self.kill(before)
        until(lambda: world.description(victim).pid != before.pid)
        assert world.names() == names
        assert {node: pid for node, pid in world.pids().items() if node != victim} == others
        assert until(lambda: world.provider.reached_at(victim))

    def test_a_request_brings_nodes_or_says_why_not(self, world: ProviderUnderTest) -> None:
        before, problem = world.names(), ""
        more: tuple[NodeId, ...] = ()
        try:
            more = world.run(world.provider.request(1))
        except Permanent as error:
            problem = str(error)
        assert (len(more) == 1) != (len(problem.split()) > 3)
        assert not {*more} & {*before}
        until(lambda: set(world.names()) == {*before, *more})
        for node in more:
            assert world.description(node).node == node
            world.run(world.provider.release(node))

    def test_a_released_node_is_gone(self, world: ProviderUnderTest) -> None:
        stays, goes = world.names()[0], world.names()[-1]
        pid, address, told = world.description(stays).pid, world.address(goes), world.num_changes
        world.description(goes)
        world.run(world.provider.release(goes))
        assert goes not in world.names()
        assert world.num_changes > told
        with pytest.raises(Temporary):
            ask(address, self.token(), DescribeNode(), 5.0)
        assert world.description(stays).pid == pid
        with pytest.raises(UnknownName):
            world.run(world.provider.release(goes))

    def test_at_the_end_no_process_is_left(self, world: ProviderUnderTest) -> None:
        world.pids()
        assert self.left()
        world.close(end=True)
        assert not self.left()


def until(holds: Callable[[], T | None]) -> T:
    """What it returns as soon as that is true."""
    end_s = time.monotonic() + PATIENT_S
    while not (result := holds()):
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)
    return result
