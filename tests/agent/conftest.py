"""Real replicas and scripts for tests: processes forked from a server that has torch loaded, gloo on loopback."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch

PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pollux.torch"]
PATIENCE_S = 100.0
"""Long past what any of these tests needs: a hang is a failure, not a matter of speed."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun_environment(rank: int, replicas: int, port: int) -> dict[str, str]:
    """What torchrun would set for a process on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(replicas),
        "LOCAL_WORLD_SIZE": str(replicas),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _replica(pipe: Connection, function: Callable[..., Any], rank: int, replicas: int, port: int, args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(torchrun_environment(rank, replicas, port))
    try:
        torch.distributed.init_process_group(
            "gloo", rank=rank, world_size=replicas, timeout=datetime.timedelta(seconds=60)
        )
        pipe.send((True, function(rank, replicas, *args)))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)


def _alone(pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)


Spawn = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def server() -> ForkServerContext:
    """Its processes are forked from one that has torch loaded, which takes seconds."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


@pytest.fixture(scope="session")
def spawn(server: ForkServerContext) -> Spawn:
    """`spawn(function, replicas, *args)`: what function(rank, replicas, *args) answers in so many real processes."""

    def run(function: Callable[..., Any], replicas: int, *args: Any) -> list[Any]:
        port = free_port()
        return _run(server, _replica, [(function, rank, replicas, port, args) for rank in range(replicas)])

    return run


@pytest.fixture(scope="session")
def fork(server: ForkServerContext) -> Spawn:
    """`fork(function, first, second …)`: what function(*first) and so on answer, all at once, in a process each.

    `patience_s`: for those that compute for long; such a test has a time-out of its own.
    """

    def run(function: Callable[..., Any], *each: Any, patience_s: float = PATIENCE_S) -> list[Any]:
        return _run(server, _alone, [(function, args) for args in each], patience_s)

    return run


def _run(
    server: ForkServerContext,
    target: Callable[..., None],
    each: Sequence[tuple[Any, ...]],
    patience_s: float = PATIENCE_S,
) -> list[Any]:
    pipes, processes = [], []
    for args in each:
        ours, theirs = server.Pipe()
        process = server.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _answers(pipes, patience_s)
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _answers(pipes: Sequence[Connection], patience_s: float) -> list[Any]:
    """Of all of them: where one fails the others fail as well, for they lose it, and nobody knows who is first."""
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(answers) + len(failures) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers and rank not in failures]
        ready = wait(waiting, timeout=patience_s)
        if not ready:
            silent = [rank for rank in range(len(pipes)) if rank not in answers and rank not in failures]
            failures |= dict.fromkeys(silent, "It gave no answer.")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                is_answer, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                is_answer, value = False, "It died without a word."
            if is_answer:
                answers[rank] = value
            else:
                failures[rank] = value
    if failures:
        raise AssertionError("\n".join(f"replica {rank} failed:\n{why}" for rank, why in failures.items()))
    return [answers[rank] for rank in range(len(pipes))]
