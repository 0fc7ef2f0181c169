"""Templates: processes that have done the imports of a job's script already. Its replicas are forked from them.

Only imports that the script would do first anyway are done: those above its first statement that acts. Whatever a new
process would not have in the same way makes a template useless: threads, CUDA, a seeded random generator, a module
that looked at a variable which is another one for each replica. The keeper then forks replicas from itself.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from pollux.node.claims import make_claim
from pollux.node.forking import Program, detach, entry, fork, noting_exit_code, take_place
from pollux.node.lines import Message, encoded

REPLICA = "pollux.agent.running:main"
"""By name: this room does not know the agent's."""
PER_REPLICA = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
PER_REPLICA |= {"MASTER_ADDR", "MASTER_PORT"}
"""With all POLLUX_…: variables that no template has."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()
    may_fail: bool = False
    """The script catches what it raises."""

    @property
    def is_done(self) -> bool:
        module = sys.modules.get(self.module)
        return module is not None and all(hasattr(module, name) for name in self.names if name != "*")


def leading_imports(script: str) -> list[Wanted]:
    """What the script imports before it does anything else; nothing if it cannot be read."""
    try:
        body = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return list(_wanted(body))


def run_replica(program: Program, log: str | int, claim: str) -> None:
    """The role of a replica, from the fork to the end of its script. `log`: its file, or a descriptor of it."""
    if claim:
        make_claim(claim)
    detach(log, user=program.user)
    with noting_exit_code():
        take_place(program)
        entry(REPLICA)(program.script)


def run_template(
    program: Program, log: str, imports: Iterable[Wanted], keeper: socket.socket, logs: socket.socket
) -> None:
    """The role of a template: import, tell the keeper, then fork a replica for each of its requests, until it is gone.

    What imports print goes to the log of the replica that asked first. Logs come open, one with each request over
    `logs`: the user that a template has become may not open them.
    """
    detach(log, keep=(keeper.fileno(), logs.fileno()), user=program.user)
    keeper.setblocking(True)
    shared = {name: value for name, value in program.environment.items() if not _is_per_replica(name)}
    take_place(replace(program, environment=shared))
    chance = _chance()
    with _Watch() as watch:
        problem = _do(imports) or _unfit(chance)
    if problem:
        keeper.sendall(encoded({"problem": problem}))
        os._exit(0)  # not by sys.exit: nothing that modules have registered for a script's end is due here
    gc.collect()
    gc.freeze()
    keeper.sendall(encoded({"reads": watch.reads}))
    with keeper.makefile("rb") as requests:
        for line in requests:
            _, descriptors, _, _ = socket.recv_fds(logs, 1, 1)
            if not descriptors:  # the keeper is gone
                break
            _fork_orphan(json.loads(line), descriptors[0], watch.changes, keeper, logs, requests)
            os.close(descriptors[0])
    os._exit(0)


def _fork_orphan(
    request: Message,
    log: int,
    changes: Mapping[str, str | None],
    keeper: socket.socket,
    logs: socket.socket,
    requests: IO[bytes],
) -> None:
    """Fork through a process that ends at once: the replica is then the keeper's child, which sees its exit code.

    The one in between tells the pid, before it ends: so the keeper has been told when it can be told of an end.
    """

    def release() -> None:
        requests.close()
        keeper.close()
        logs.close()

    tag = request["tag"]
    program = Program(**request["program"])
    changed = {**program.environment, **changes}
    environment = {name: value for name, value in changed.items() if value is not None}
    stated = replace(program, environment=environment, user="")  # we are that user
    replica = partial(run_replica, stated, log, request["claim"])
    problem = ""
    try:
        middle = os.fork()
    except OSError as error:
        keeper.sendall(encoded({"tag": tag, "error": f"cannot be forked ({error})"}))
        return
    if middle == 0:
        pid = 0
        try:
            pid = fork(partial(_run_orphan, os.getpid(), replica), release)
        except OSError as error:
            problem = f"cannot be forked ({error})"
        try:
            keeper.sendall(encoded({"tag": tag, "error": problem} if problem else {"tag": tag, "pid": pid}))
        finally:
            os._exit(0)
    if os.waitpid(middle, 0)[1]:
        keeper.sendall(encoded({"tag": tag, "error": "was lost while it was forked"}))


def _run_orphan(parent: int, role: Callable[[], None]) -> None:
    """Only with the parent that stays: a script may ask to be told when it ends."""
    while os.getppid() == parent:
        time.sleep(0.0005)
    role()


def _do(imports: Iterable[Wanted]) -> str:
    """What went wrong, if anything did."""
    for wanted in imports:
        try:
            module = importlib.import_module(wanted.module)
            for name in wanted.names:
                if name != "*" and not hasattr(module, name):
                    importlib.import_module(f"{wanted.module}.{name}")
        except BaseException as error:
            if not wanted.may_fail:
                return f"the import of {wanted.module} fails ({type(error).__name__}: {error})"
    return ""


def _unfit(chance: Mapping[str, object]) -> str:
    """Why replicas must not be forked from this process, if so."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "its imports use CUDA, which does not survive a fork"
    if len(os.listdir("/proc/self/task")) > 1:
        return "its imports start threads, which do not survive a fork"
    after = _chance()
    seeded = [name for name, state in chance.items() if after[name] != state]
    return f"its imports seed or use the random numbers of {' and '.join(seeded)}" if seeded else ""


def _chance() -> dict[str, object]:
    """The states of the generators that scripts share."""
    states: dict[str, object] = {"random": random.getstate()}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state()
        states["numpy"] = (state[1].tobytes(), *state[2:])
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = bytes(torch.get_rng_state().tolist())
    return states


class _Watch:
    """Inside: which variables are read, with the values that were there before, and which are changed.

    `os.environ` is watched, as that is how modules read it; C code that calls getenv is not seen.
    """

    def __init__(self) -> None:
        self.reads: dict[str, str | None] = {}
        self.changes: dict[str, str | None] = {}

    def __enter__(self) -> _Watch:
        watch = self

        class Watched(os._Environ):  # type: ignore[type-arg]
            def __getitem__(self, name: str) -> str:
                value: str | None = None
                try:
                    value = super().__getitem__(name)
                    return value
                finally:
                    if name not in watch.changes:
                        watch.reads.setdefault(name, value)

            def __setitem__(self, name: str, value: str) -> None:
                super().__setitem__(name, value)
                watch.changes[name] = value

            def __delitem__(self, name: str) -> None:
                super().__delitem__(name)
                watch.changes[name] = None

        self._plain = type(os.environ)
        os.environ.__class__ = Watched
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.__class__ = self._plain


def _is_per_replica(name: str) -> bool:
    return name in PER_REPLICA or name.startswith("POLLUX_")


def _wanted(body: Iterable[ast.stmt], may_fail: bool = False) -> Iterator[Wanted]:
    for statement in body:
        match statement:
            case ast.Import(names):
                yield from (Wanted(alias.name, (), may_fail) for alias in names)
            case ast.ImportFrom(module=None) | ast.ImportFrom(module="__future__"):
                pass
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield Wanted(module, tuple(alias.name for alias in names), may_fail)
            case ast.Try(body=inner) if all(isinstance(one, ast.Import | ast.ImportFrom) for one in inner):
                yield from _wanted(inner, True)
            case ast.Expr(ast.Constant()) | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass  # a decorator or a base class may act, but hardly on what is imported below it
            case ast.Assign(targets=[ast.Name()], value=ast.Constant()) | ast.AnnAssign(target=ast.Name()):
                pass
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                pass
            case _:
                return
