"""Real replicas gather, form groups, are killed in the middle of everything, and form groups again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pollux.agent import rendezvous as module
from pollux.agent.rendezvous import Card, Made, Rendezvous, is_connection_loss, leave_group
from pollux.core import JobId
from pollux.errors import InvalidSpec, Temporary
from pollux.wire.replicas import Join, Leave

HOST = "127.0.0.1"
PATIENCE_S = 60.0
CPU = torch.device("cpu")


def never() -> bool:
    return False


def joining(rank: int, size: int, membership: int = 0, generation: int = 1) -> Join:
    return Join(JobId("j"), generation, membership, rank, size, 1, "unused:1")


def host_store(pipe: Any) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipe.send(store.port)
    pipe.poll(None)  # until the test has ended


class Processes:
    """Functions of this module, each call in a process of its own: `pipe` is its first argument."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pollux.torch"])
        self._started: list[Any] = []

    def start(self, function: Callable[..., None], *args: Any) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=function, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self._started.append((process, ours))  # those who wait on their pipe end when it is closed
        return process, ours

    def answers(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        """What function(rank, size, *args) returns in so many processes; None for one that was killed."""
        pipes = [self.start(_answer, function, rank, size, *args)[1] for rank in range(size)]
        answers = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(PATIENCE_S), f"replica {rank} hangs"
            try:
                is_answer, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                answers.append(None)
                continue
            assert is_answer, value
            answers.append(value)
        return answers

    def end(self) -> None:
        for process, _ in self._started:
            process.kill()
            process.join()


def _answer(pipe: Any, function: Callable[..., Any], rank: int, size: int, *args: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    try:
        pipe.send((True, function(rank, size, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # some of these have broken groups


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.end()


@pytest.fixture
def store(processes) -> str:
    _, pipe = processes.start(host_store)
    return f"{HOST}:{pipe.recv()}"


# Without groups


def test_all_members_see_all_cards(store):
    cards = [Card(rank, 10 + rank, rank > 0, f"h:{rank}", "key", 3, (1.5, 2.0), True) for rank in range(3)]
    seen: dict[int, list[Card] | None] = {}

    def member(rank: int) -> None:
        seen[rank] = Rendezvous(store).gather(joining(rank, 3), cards[rank], never)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == dict.fromkeys(range(3), cards)


def test_cards_of_other_memberships_are_not_seen(store):
    rendezvous = Rendezvous(store)
    for membership, generation in ((1, 1), (0, 2)):
        assert rendezvous.gather(joining(0, 1, membership, generation), Card(0, 5, True), never)
    asked = iter((False, False, True))
    assert rendezvous.gather(joining(1, 2), Card(1, 5, True), lambda: next(asked)) is None


def test_a_replica_that_leaves_hands_over_to_whichever_membership_comes(store):
    leaver, member = Rendezvous(store), Rendezvous(store)
    leave, join = Leave(JobId("j"), 2, 0, store, hands_over=True), joining(0, 1, membership=3, generation=2)
    assert member.await_offer(join, lambda: True) is None
    assert not leaver.await_taken(leave, 0.0)
    assert not leaver.await_taken(leave, PATIENCE_S, lambda: True)
    leaver.offer(leave, Card(0, 99, True, "h:1", "key"))
    assert member.await_offer(join, never) == Card(0, 99, True, "h:1", "key")
    member.tell_taken(join)
    assert leaver.await_taken(leave, PATIENCE_S)


def test_a_single_member_needs_no_group(store):
    made = Rendezvous(store).make_group(joining(0, 1), CPU)
    assert made.group is None
    assert not dist.is_initialized()
    made.sockets.cut()
    leave_group(made)


def test_a_member_stops_waiting_for_others_when_it_is_superseded(store):
    rendezvous = Rendezvous(store)
    with pytest.raises(Temporary, match=r"1\.0 is superseded"):
        rendezvous.make_group(joining(0, 2), CPU, lambda: True)
    rendezvous.cut((1, 1))
    with pytest.raises(Temporary, match=r"1\.0 is superseded"):
        rendezvous.make_group(joining(0, 2), CPU)
    with pytest.raises(Temporary, match=r"1\.0 is superseded"):
        rendezvous.make_group(joining(0, 1), CPU)
    assert rendezvous.make_group(joining(0, 1, 1), CPU).group is None


def test_a_store_that_is_gone_is_not_knocked_at_for_long(monkeypatch):
    """Another one may be there already, whose address can be heard only by those who do not wait for this one."""
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    knocks = []
    monkeypatch.setattr(module.dist, "TCPStore", lambda *_, **__: knocks.append(1))
    with pytest.raises(Temporary, match="out of reach"):
        Rendezvous(address)
    assert not knocks


def test_a_store_that_is_gone_is_a_failure_that_may_pass(processes):
    process, pipe = processes.start(host_store)
    rendezvous = Rendezvous(f"{HOST}:{pipe.recv()}")
    process.kill()
    process.join()
    with pytest.raises(Temporary, match="out of reach"):
        rendezvous.gather(joining(0, 1), Card(0, 0, False), never)
    with pytest.raises(Temporary, match="out of reach"):
        Rendezvous(rendezvous.address, timeout_s=0.1)


def test_the_store_is_not_at_a_local_socket():
    with pytest.raises(InvalidSpec, match="local socket"):
        Rendezvous("unix:/tmp/x")


def test_a_host_is_reached_from_an_address_of_this_machine():
    assert Rendezvous.host_towards(f"{HOST}:1") == HOST


# Groups


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


def train(wrapped: nn.Module, steps: int) -> None:
    for _ in range(steps):
        wrapped(torch.randn(4, 8)).square().sum().backward()
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


def reform_often(rank: int, size: int, store: str, times: int) -> tuple[list[int], list[int], float]:
    rendezvous = Rendezvous(store)
    network_ = network()
    descriptors, threads = [], []
    for membership in range(times):
        join = joining((rank + membership) % size, size, membership)  # ranks may change
        made = rendezvous.make_group(join, CPU)
        wrapped = DistributedDataParallel(network_)
        train(wrapped, 2)
        del wrapped
        leave_group(made)
        descriptors.append(len(os.listdir("/proc/self/fd")))
        threads.append(len(os.listdir("/proc/self/task")))
    return descriptors, threads, sum(parameter.sum().item() for parameter in network_.parameters())


def test_groups_are_formed_again_and_again_and_leave_no_file_open(processes, store):
    answers = processes.answers(reform_often, 2, store, 30)
    assert answers[0][2] == answers[1][2]
    for counts in (*answers[0][:2], *answers[1][:2]):
        assert max(counts[5:]) <= max(counts[:5]) + 2


def slow_collective(rank: int, size: int, store: str) -> float:
    module.CONNECT_TIMEOUT_S = 0.4
    made = Rendezvous(store).make_group(joining(rank, size), CPU)
    if rank == 1:
        time.sleep(0.9)
    total = torch.ones(3)
    dist.all_reduce(total)
    leave_group(made)
    return float(total.sum())


def test_collectives_have_more_patience_than_the_making_of_the_group(processes, store):
    assert processes.answers(slow_collective, 2, store) == [6.0, 6.0]


def in_sum(wrapped: nn.Module, act: Callable[[], None]) -> None:
    dist.all_reduce(torch.ones(5))
    act()
    dist.all_reduce(torch.ones(1000), async_op=True).wait()


def in_forward(wrapped: nn.Module, act: Callable[[], None]) -> None:
    train(wrapped, 1)
    act()
    while True:  # the first one may be done with buffers that the others wait for
        wrapped(torch.randn(4, 8))


def in_backward(wrapped: nn.Module, act: Callable[[], None]) -> None:
    total = wrapped(torch.randn(4, 8)).sum()
    act()
    total.backward()


def survive(
    rank: int, size: int, store: str, membership: int, where: Callable[..., None], dies: bool
) -> tuple[str, float] | None:
    """The last member is lost there; the others notice and go on without it."""
    rendezvous = Rendezvous(store)
    network_ = network()
    made = rendezvous.make_group(joining(rank, size, membership), CPU)
    wrapped = DistributedDataParallel(network_)

    def act() -> None:
        if rank == size - 1:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(PATIENCE_S)
        # As the link's thread does when the daemon says so.
        threading.Timer(0.2, rendezvous.cut, [(1, membership + 1)]).start()

    with pytest.raises(RuntimeError) as caught:
        where(wrapped, act)
    assert is_connection_loss(caught.value), caught.value
    text = str(caught.value)
    del wrapped, caught
    rendezvous.cut((1, membership + 1))
    leave_group(made)
    join = joining(rank, size - 1, membership + 1)
    assert rendezvous.gather(join, Card(rank, 1, True), never) is not None
    made = rendezvous.make_group(join, CPU)
    wrapped = DistributedDataParallel(network_)
    train(wrapped, 2)
    answer = sum(parameter.sum().item() for parameter in network_.parameters())
    leave_group(made)
    return text, answer


@pytest.mark.parametrize("where", [in_sum, in_forward, in_backward])
@pytest.mark.parametrize("dies", [True, False], ids=["killed", "hung"])
def test_survivors_notice_wherever_a_member_is_lost_and_go_on(processes, store, where, dies):
    pipes = [processes.start(_answer, survive, rank, 3, store, 0, where, dies)[1] for rank in range(3)]
    answers = []
    for pipe in pipes[:2]:
        assert pipe.poll(PATIENCE_S)
        is_answer, value = pipe.recv()
        assert is_answer, value
        answers.append(value)
    assert answers[0][1] == answers[1][1]


def wait_in_vain(rank: int, size: int, store: str) -> list[str]:
    """The last member takes part in nothing; what each of several calls of the first, under way at once, raises."""
    Rendezvous(store).make_group(joining(rank, size), CPU, timeout_s=0.5)
    if rank:
        time.sleep(PATIENCE_S)
    calls = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(6)]
    failures: list[str] = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call.wait()
        assert is_connection_loss(caught.value), caught.value
        failures.append(str(caught.value))
    return failures


def test_all_calls_that_run_out_of_time_together_say_that_a_member_is_lost(processes, store):
    pipe, _ = (processes.start(_answer, wait_in_vain, rank, 2, store)[1] for rank in range(2))
    assert pipe.poll(PATIENCE_S)
    is_answer, failures = pipe.recv()
    assert is_answer, failures
    # gloo gives the place in its source to one of them only.
    assert len({"gloo/transport/" in failure for failure in failures}) == 2, failures


def make_while_lost(rank: int, size: int, store: str) -> tuple[str, int]:
    """The second member is said to be here and never connects; then the daemon names other members."""
    rendezvous = Rendezvous(store)
    rendezvous.store.set("1.0/here/1", "")
    threading.Timer(0.3, rendezvous.cut, [(1, 1)]).start()
    with pytest.raises(Temporary, match="superseded"):
        rendezvous.make_group(joining(rank, 2), CPU)
    assert not dist.is_initialized()
    made: Made = rendezvous.make_group(joining(0, 1, 1), CPU)
    return "went on", 0 if made.group is None else 1


def test_a_member_that_is_lost_while_the_group_is_made_is_not_waited_for(processes, store):
    assert processes.answers(make_while_lost, 1, store) == [("went on", 0)]


def connect_and_die(rank: int, size: int, store: str, after_s: float) -> str:
    """The last member is killed while gloo connects. Whatever comes of it: the others can form a group afterwards."""
    module.CONNECT_TIMEOUT_S = 0.4
    rendezvous = Rendezvous(store)
    join = joining(rank, size)
    rendezvous.gather(join, Card(rank, 0, True), never)
    if rank == size - 1:
        threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
    threading.Timer(0.3, rendezvous.cut, [(1, 1)]).start()
    groups: list[Made] = []

    def train_on() -> None:
        groups.append(rendezvous.make_group(join, CPU))
        while True:
            dist.all_reduce(torch.ones(3))

    with pytest.raises((RuntimeError, Temporary)) as caught:
        train_on()
    assert isinstance(caught.value, Temporary) or is_connection_loss(caught.value), caught.value
    for made in groups:
        rendezvous.cut((1, 1))
        leave_group(made)
    made = rendezvous.make_group(joining(rank, size - 1, 1), CPU)
    total = torch.ones(3)
    dist.all_reduce(total)
    leave_group(made)
    return str(total.tolist())


@pytest.mark.parametrize("after_ms", [0, 2, 5])
def test_a_member_that_dies_while_gloo_connects_delays_the_others_only(processes, store, after_ms):
    pipes = [processes.start(_answer, connect_and_die, rank, 3, store, after_ms / 1000)[1] for rank in range(3)]
    for pipe in pipes[:2]:
        assert pipe.poll(PATIENCE_S)
        assert pipe.recv() == (True, str([2.0] * 3))


def test_errors_of_the_script_are_no_lost_connection():
    errors: list[BaseException] = [ValueError("gloo/transport/tcp"), KeyboardInterrupt(), RuntimeError("out of memory")]
    for wrong in (
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: nn.Linear(2, 3)(torch.ones(4)),
        lambda: dist.barrier(),
    ):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            wrong()
        errors.append(caught.value)
    errors.append(RuntimeError("[enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes."))
    for error in errors:
        assert not is_connection_loss(error), error


def test_errors_of_torch_about_connections_are_known():
    for kind in (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        assert is_connection_loss(kind("x"))
    assert is_connection_loss(RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms"))
