"""Forks wait until gloo has let go of what it was lent. A future stands for gloo: C++ that refers to a tensor."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pollux.agent import lending
from pollux.agent.lending import await_gloo, give_back, handle_of
from pollux.agent.replicas import Replicas


class Holder:
    """Refers to a tensor in C++, until it is told to let go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.future: torch.futures.Future[torch.Tensor] | None = torch.futures.Future()
        self.future.set_result(tensor)

    def let_go(self) -> None:
        self.future = None


def counts_cpp() -> bool:
    tensors = [torch.ones(3)]
    holder = Holder(tensors[0])
    (count,) = lending._references(tensors)
    holder.let_go()
    return count > lending._FREE


pytestmark = pytest.mark.skipif(not counts_cpp(), reason="this torch lets go of tensors without coming into Python")


@pytest.fixture(autouse=True)
def nothing_lent():
    await_gloo()
    assert lending._given_back == []


def test_a_handle_holds_the_same_numbers():
    vector = torch.ones(3)
    handle_of(vector).add_(1)
    assert vector.tolist() == [2.0] * 3


def test_what_nobody_holds_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(lending.time, "sleep", lambda seconds: pytest.fail("waited"))
    give_back(handle_of(torch.ones(3)))
    await_gloo()
    assert lending._given_back == []


def test_what_is_held_is_waited_for():
    handle = handle_of(torch.ones(3))
    holder = Holder(handle)
    give_back(handle)
    del handle
    order = []

    def let_go_later() -> None:
        time.sleep(0.05)
        order.append("let go")
        holder.let_go()

    thread = threading.Thread(target=let_go_later)
    thread.start()
    await_gloo()
    order.append("forked")
    thread.join()
    assert order == ["let go", "forked"]
    assert lending._given_back == []


def test_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(lending, "PATIENCE_S", 0.01)
    handle = handle_of(torch.ones(3))
    holder = Holder(handle)
    give_back(handle)
    del handle
    await_gloo()
    monkeypatch.setattr(lending.time, "sleep", lambda seconds: pytest.fail("waited again"))
    await_gloo()
    holder.let_go()


def test_sums_that_are_under_way_are_not_waited_for_and_those_that_are_done_are_given_back(tmp_path, monkeypatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        replicas = Replicas(0, 2, 1, torch.device("cpu"), dist.group.WORLD)  # a group of one is enough to be lent to
        pending = replicas.sum_async(torch.ones(3))
        monkeypatch.setattr(lending, "PATIENCE_S", 1e9)
        await_gloo()
        assert pending.wait().tolist() == [1.0] * 3
        replicas.sum_async(torch.ones(3))  # and never waited for
        await_gloo()
        assert lending._given_back == []
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 and later need none of this")
def test_every_fork_waits():
    handle = handle_of(torch.ones(3))
    holder = Holder(handle)
    give_back(handle)
    del handle
    threading.Timer(0.05, holder.let_go).start()

    child = os.fork()
    if not child:
        os._exit(0 if not lending._given_back else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
