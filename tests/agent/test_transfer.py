"""The state that arrives is the one that was given; whoever dies, stalls or lies, nobody waits for ever."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pollux.agent import transfer
from pollux.agent.transfer import Giver, take
from pollux.errors import InvalidSpec, Temporary

HOST = "127.0.0.1"
PATIENCE_S = 30.0


def nothing() -> dict[str, Any]:
    return {}


def given(state: Any, *, full: bool = True) -> Any:
    """What arrives of a state."""
    with Giver(HOST, lambda: state, lambda: state) as giver:
        return take(giver.address, giver.key, full=full)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.view(-1).contiguous().view(torch.uint8), other.reshape(-1).view(torch.uint8))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


def test_tensors_of_all_kinds_arrive_as_they_are():
    state = {str(dtype): (torch.randn(7, 5) * 9).to(dtype) for dtype in DTYPES}
    state |= {
        "no axes": torch.tensor(3.5),
        "one": torch.tensor([True]),
        "empty": torch.empty(0, 4),
        "none": torch.zeros(0),
    }
    assert_same(given(state), state)


def test_a_tensor_with_gaps_arrives_without_them():
    table = torch.arange(60.0).view(6, 10)
    state = {"columns": table[:, ::3], "turned": table.t()[2:5], "wide": torch.ones(3, 1).expand(3, 4), "row": table[4]}
    taken = given(state)
    for name, tensor in state.items():
        assert torch.equal(taken[name], tensor), name
        assert taken[name].untyped_storage().nbytes() == tensor.numel() * 4, name


def test_the_order_of_axes_in_memory_stays():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    taken = given([image, image.transpose(0, 3), torch.randn(3, 4).t()])
    assert taken[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(taken[0], image)
    assert torch.equal(taken[1], image.transpose(0, 3))
    assert taken[2].stride() == (1, 4)


def test_lazy_conjugates_and_negatives_arrive_as_their_values():
    number = torch.tensor([1 + 2j, 3 - 4j])
    taken = given([number.conj(), number.conj().imag])
    assert taken[0].tolist() == [1 - 2j, 3 + 4j]
    assert taken[1].tolist() == [-2.0, 4.0]


def test_sparse_tensors_arrive():
    matrix = torch.eye(3).to_sparse()
    assert torch.equal(given({"matrix": matrix})["matrix"].to_dense(), torch.eye(3))


def test_modules_and_optimizers_go_on_from_what_arrives():
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(1)
        module(torch.randn(6, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first, second = network(), network()
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1) for module in (first, second)]
    step(first, optimizers[0])
    sent = {
        "model": first.state_dict(),
        "optimizer": optimizers[0].state_dict(),
        "step": 1,
        "rng": torch.get_rng_state(),
    }
    taken = given(sent)
    assert type(taken["model"]) is OrderedDict
    assert taken["model"]._metadata == sent["model"]._metadata
    second.load_state_dict(taken["model"])
    optimizers[1].load_state_dict(taken["optimizer"])
    step(first, optimizers[0])
    step(second, optimizers[1])
    assert_same(dict(second.state_dict()), dict(first.state_dict()))


def test_plain_values_and_shared_objects_arrive():
    weight = nn.Parameter(torch.ones(3))
    shared = [1, 2]
    state = {"a": None, 3: (1, 2.5, "x", b"y", {True}), "twice": [shared, shared], "tied": (weight, weight)}
    taken = given(state)
    assert taken["a"] is None
    assert taken[3] == state[3]
    assert taken["twice"][0] is taken["twice"][1]
    assert taken["tied"][0] is taken["tied"][1]
    assert type(taken["tied"][0]) is torch.Tensor
    assert not taken["tied"][0].requires_grad


def test_more_tensors_than_the_system_takes_in_one_call_arrive():
    state = [torch.full((index % 3 + 1,), index) for index in range(3000)]
    assert_same(given(state), state)


def test_what_is_taken_is_the_takers_own():
    weight = torch.ones(4)
    taken = given({"weight": weight})
    weight.fill_(7)
    assert taken["weight"].tolist() == [1.0] * 4


def test_each_state_is_made_once_when_it_is_first_asked_for():
    made: list[str] = []

    def make(name: str) -> dict[str, str]:
        made.append(name)
        return {"name": name}

    with Giver(HOST, lambda: make("small"), lambda: make("full")) as giver:
        assert made == []
        threads = [
            threading.Thread(target=take, args=(giver.address, giver.key), kwargs={"full": True}) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == ["full"]
        assert take(giver.address, giver.key, full=False) == {"name": "small"}
        assert take(giver.address, giver.key, full=True) == {"name": "full"}
        assert made == ["full", "small"]


def test_a_state_that_cannot_be_made_is_logged_and_the_other_one_still_given(caplog):
    def fail() -> dict[str, Any]:
        raise ValueError("no state today")

    with Giver(HOST, nothing, fail) as giver:
        with pytest.raises(Temporary, match="the other side has ended"):
            take(giver.address, giver.key, full=True)
        assert "ValueError: no state today" in caplog.text
        assert take(giver.address, giver.key, full=False) == {}


def test_a_wrong_key_is_refused(caplog):
    with Giver(HOST, nothing, lambda: {"secret": 1}) as giver:
        with pytest.raises(Temporary, match="refuses the key"):
            take(giver.address, "another", full=True)
        assert take(giver.address, giver.key, full=True) == {"secret": 1}
        assert giver.key not in caplog.text
    assert "without its key" in caplog.text


def listening(*answers: bytes, linger: bool = False) -> Iterator[str]:
    """Somebody who pretends to be a giver: sends the answers, each after what the taker says."""
    with socket.create_server((HOST, 0)) as server:
        ended = threading.Event()

        def run() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):  # the taker may have gone
                for answer in answers:
                    connection.sendall(answer)
                    connection.recv(1000)
                if linger:
                    ended.wait(PATIENCE_S)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"{HOST}:{server.getsockname()[1]}"
        ended.set()
        thread.join()


def test_a_state_from_somebody_without_the_key_is_not_loaded():
    header = b"cos\nabort\n(tR."  # a pickle that would end this process
    answer = len(header).to_bytes(8, "big") + bytes(32) + header
    for address in listening(bytes(32), answer):
        with pytest.raises(Temporary, match="does not know the key"):
            take(address, "key", full=True)


def test_an_absurd_length_is_not_waited_for():
    for address in listening(bytes(32), b"\xff" * 8):
        with pytest.raises(Temporary, match="no state"):
            take(address, "key", full=True)


def test_a_giver_that_says_nothing_is_given_up():
    for address in listening(bytes(32), linger=True):
        with pytest.raises(Temporary, match=r"not a byte within 0\.1 s"):
            take(address, "key", full=True, stall_timeout_s=0.1)


def test_a_taker_that_is_superseded_gives_up():
    for address in listening(bytes(32), linger=True):
        with pytest.raises(Temporary, match="superseded"):
            take(address, "key", full=True, is_superseded=lambda: True)


def test_nobody_at_the_address_is_a_failure_that_may_pass():
    with Giver(HOST, nothing, nothing) as giver:
        pass
    with pytest.raises(Temporary, match="did not come"):
        take(giver.address, giver.key, full=True)


def test_a_closed_giver_cuts_off_whom_it_serves():
    began, failed = threading.Event(), threading.Event()

    def slow() -> dict[str, Any]:
        began.set()
        assert failed.wait(PATIENCE_S)
        return {}

    giver = Giver(HOST, nothing, slow)

    def run() -> None:
        with pytest.raises(Temporary):
            take(giver.address, giver.key, full=True)
        failed.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(PATIENCE_S)
    giver.close()
    thread.join(PATIENCE_S)
    assert failed.is_set()
    giver.close()


def test_a_host_that_is_not_this_machine_is_refused():
    with pytest.raises(InvalidSpec, match=r"host = '192\.0\.2\.1'"):
        Giver("192.0.2.1", nothing, nothing)


BIG = 40_000_000
"""Bytes: more than both systems buffer."""


def give_for_ever(pipe: Any) -> None:
    with Giver(HOST, nothing, lambda: torch.zeros(BIG, dtype=torch.uint8)) as giver:
        pipe.send((giver.address, giver.key))
        time.sleep(PATIENCE_S)


def take_slowly(address: str, key: str, pipe: Any) -> None:
    """Takes the header and the first bytes, and says so."""
    read_into = transfer._Source.read_into

    def read_some(source: Any, buffer: memoryview) -> None:
        read_into(source, buffer[:1000])
        if len(buffer) > 1000:
            pipe.send("began")
            time.sleep(PATIENCE_S)

    transfer._Source.read_into = read_some  # type: ignore[method-assign]
    take(address, key, full=True)


@pytest.fixture(scope="module")
def server() -> Any:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pollux.torch"])
    return server


def test_a_giver_that_is_killed_in_the_middle_is_a_failure_that_may_pass(server, monkeypatch):
    ours, theirs = server.Pipe()
    process = server.Process(target=give_for_ever, args=(theirs,), daemon=True)
    process.start()
    address, key = ours.recv()
    read_into = transfer._Source.read_into

    def read_some(source: Any, buffer: memoryview) -> None:
        if len(buffer) == BIG:
            read_into(source, buffer[:1000])
            buffer = buffer[1000:]
            os.kill(process.pid, signal.SIGKILL)
        read_into(source, buffer)

    monkeypatch.setattr(transfer._Source, "read_into", read_some)
    with pytest.raises(Temporary, match="did not come"):
        take(address, key, full=True)
    process.join()


def test_a_taker_that_is_killed_in_the_middle_keeps_nobody_else_from_the_state(server, caplog):
    caplog.set_level(logging.INFO)
    state = torch.arange(BIG // 8)
    with Giver(HOST, nothing, lambda: state) as giver:
        ours, theirs = server.Pipe()
        process = server.Process(target=take_slowly, args=(giver.address, giver.key, theirs), daemon=True)
        process.start()
        assert ours.recv() == "began"
        process.kill()
        process.join()
        until_s = time.monotonic() + PATIENCE_S
        while "has not taken all of the state" not in caplog.text:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert torch.equal(take(giver.address, giver.key, full=True), state)
