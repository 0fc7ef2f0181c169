"""The daemon's side of the keeper: finds the one that runs on a folder, or starts it, and asks it for processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pollux
from pollux.core import JobId
from pollux.errors import Permanent, Temporary
from pollux.node.fingerprint import fingerprint
from pollux.node.folder import last_lines
from pollux.node.inherited import inherited
from pollux.node.lines import MAX_LINE_BYTES, Message, encoded
from pollux.node.processes import command_of
from pollux.node.starting_keeper import WITNESS, StartingKeeper, bury, gone, is_served, socket_of
from pollux.wire.nodes import Launch

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Imports take seconds, and many times that on a machine that is busy with them on all cores."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Child:
    """A replica of the keeper. `pid`: 0 while it is being started. `exit_code`: None while it lives; negative: the
    signal that ended it."""

    tag: str
    pid: int
    exit_code: int | None


class NoKeeper(Temporary):
    """Nothing was asked: the keeper is gone, and another one is not ready yet."""


class LostKeeper(Temporary):
    """It was asked, and is gone: it may have been done or not."""


class KeeperClient:
    """All methods are for one event loop. Calls raise `LostKeeper` if the keeper is lost meanwhile, and `NoKeeper`
    from then on: `connect` again.

    `on_exit(tag, pid, exit_code)`, `on_store_exit(job, pid)` and `on_lost()` are called in the loop. A replica's end is
    told to the client that is connected when it happens; later ones find it in `children`.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, user: str = "") -> None:
        """`environment`: what every replica finds, and the keeper itself, by default what is `inherited` of ours.
        `user`: whom replicas run as; empty: as we do."""
        self._environment = dict(inherited(os.environ) if environment is None else environment)
        self._as_user = {"user": user} if user else {}  # a keeper of an earlier version knows no users
        self.on_exit: Callable[[str, int, int], None] = lambda tag, pid, exit_code: None
        self.on_store_exit: Callable[[str, int], None] = lambda job, pid: None
        self.on_lost: Callable[[], None] = lambda: None
        self.pid = 0
        """Of the keeper."""
        self._parent = 0
        """Of the keeper: its witness, unless that was killed."""
        self._folder = Path()
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._count = 0
        self._is_closing = False
        self._starting: StartingKeeper | None = None
        """The one that we have started last, until it answers."""
        self._problem: Exception = Permanent("The client is not connected to a keeper. Call connect first.")

    async def connect(
        self, folder: Path, *, preload: Iterable[str] | None = None, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Reach the keeper of the folder. If none answers, start one, which takes seconds.

        `preload`: what a new keeper imports, in place of torch and Pollux. Takes the place of another client.
        """
        await self._disconnect()
        await self._end_starting()
        self._is_closing = False
        self._folder = folder
        try:
            async with asyncio.timeout(timeout_s):
                while (reached := await self._reach()) is None:
                    if self._starting is None:
                        if not is_served(socket_of(folder)):
                            self._starting = StartingKeeper(folder, preload, self._environment)
                    elif (code := self._starting.exit_code) is not None:
                        await self._end_starting()
                        if code != 0:  # else it left the place to another one, which was lost since
                            raise self._dead(f"The keeper ended with {code} before it was ready")
                    await asyncio.sleep(POLL_S)
                reader, self._writer = reached
                await self._settle_start()
                self._listening = asyncio.get_running_loop().create_task(self._listen(reader))
                with suppress(NoKeeper, LostKeeper):  # which `on_lost` tells
                    await self.children()  # to connect is not enough: who asks for something is the keeper's daemon
        except TimeoutError:
            await self._end_starting()
            raise self._dead(f"The keeper did not answer within {timeout_s:g} s") from None

    async def _settle_start(self) -> None:
        """The one that answers has begun. If that is another one than we have started, ours is one too many."""
        if self._starting is not None and self._starting.is_that(self.pid):
            self._starting.release()
            self._starting = None
        await self._end_starting()

    async def _end_starting(self) -> None:
        if self._starting is not None:
            await self._starting.end()
            self._starting = None

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to a keeper that is ready; waits while it gets ready. None: nobody listens, or it ended."""
        try:
            reader, writer = await asyncio.open_unix_connection(socket_of(self._folder), limit=MAX_LINE_BYTES)
        except OSError:
            return None
        hello: Message = {}
        try:
            with suppress(ConnectionError, ValueError):
                hello = json.loads(await reader.readline() or "{}")
        finally:
            if hello.get("event") != "hello":
                writer.close()
        if hello.get("event") != "hello":
            return None
        if hello.get("version") != pollux.__version__:
            log.warning("The keeper has version %s of Pollux, we have %s.", hello.get("version"), pollux.__version__)
        self.pid, self._parent = _peer(writer), int(hello.get("parent", 0))
        return reader, writer

    async def spawn(
        self, tag: str, launch: Launch, environment: dict[str, str], log: Path, claim: Path | None = None
    ) -> int:
        """Start a replica, called job/replica; its pid. Its environment: that of all, then the launch's, then this.
        `claim`: where its process makes its mark (`node.claims`).

        A tag that was started before, and is not forgotten, is not started again: its pid is told, and its end if it
        has ended.
        """
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        program = {
            "script": launch.script,
            "arguments": list(launch.arguments),
            "directory": launch.directory,
            "environment": {**self._environment, **launch.environment, **environment},
            **self._as_user,
        }
        what = {"tag": tag, "program": program, "log": str(log.absolute()), "claim": str(claim or "")}
        if launch.is_plain:
            answer = await self._ask("run_command", **what)
        else:
            answer = await self._ask("spawn", **what, fingerprint=fingerprint(launch))
        return int(answer["pid"])

    async def host_store(self, job: JobId, host: str = "127.0.0.1") -> tuple[int, int]:
        """Pid and port of the job's store, started if there is none. `host`: the one address that it listens on."""
        answer = await self._ask("host_store", job=job, host=host, **self._as_user)
        return int(answer["pid"]), int(answer["port"])

    async def children(self) -> list[Child]:
        """Replicas that live, and those that ended and are not forgotten."""
        return [Child(*child) for child in (await self._ask("children"))["children"]]

    async def kill(self, tag: str, number: int) -> bool:
        """Send a signal, unless the replica has ended: then False. Never hits another process of the same number."""
        return bool((await self._ask("kill", tag=tag, signal=int(number)))["is_sent"])

    async def forget(self, tag: str) -> None:
        """Drop the exit code of a replica that has ended; one that lives is left as it is."""
        await self._ask("forget", tag=tag)

    async def forget_job(self, job: JobId) -> None:
        """End the job's store and template, drop its exit codes. Replicas that live go on."""
        await self._ask("forget_job", job=job)

    async def close(self, *, end: bool, grace_s: float = 5.0) -> None:
        """Leave the keeper to the next daemon; or, `end`, have it end with all its processes, and wait for that.

        These have `grace_s` from SIGTERM to SIGKILL. May be called again; `on_lost` is not called.
        """
        self._is_closing = True
        if end and self._writer is not None:
            with suppress(Temporary):
                await self._ask("end", grace_s=float(grace_s))
            await gone(self.pid)
            if WITNESS in command_of(self._parent):
                await gone(self._parent)  # it sees the end of the keeper, and has nothing left to do
        await self._end_starting()  # also without `end`: nobody would know of it, and it may come up much later
        await self._disconnect()
        self._problem = Permanent("The client of the keeper is closed.")
        bury()

    async def _ask(self, do: str, **fields: object) -> Message:
        if self._writer is None:
            raise self._problem
        self._count += 1
        number = self._count
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = answered
        try:
            self._writer.write(encoded({"id": number, "do": do, **fields}))
            answer: Message = await answered
        finally:
            self._asked.pop(number, None)
        if "error" not in answer:
            return answer
        raise Temporary(answer["error"], 1.0) if answer.get("is_temporary") else Permanent(answer["error"])

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        is_replaced = False
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                message = json.loads(line)
                is_replaced = is_replaced or message.get("event") == "replaced"
                self._take(message)
        if is_replaced:
            self._problem = Permanent("Another daemon has taken the keeper over. End one of the two.")
            log.error("%s", self._problem)
        else:
            self._problem = NoKeeper(f"The keeper, process {self.pid}, is gone.", 1.0)
        self._lose()
        bury()
        if not is_replaced and not self._is_closing:
            self.on_lost()

    def _take(self, message: Message) -> None:
        soon = asyncio.get_running_loop().call_soon  # after those who wait for an answer that came before it
        match message:
            case {"id": int(number)} if number in self._asked and not self._asked[number].done():
                self._asked[number].set_result(message)
            case {"event": "exit", "tag": tag, "pid": pid, "exit_code": exit_code}:
                soon(self.on_exit, tag, pid, exit_code)
            case {"event": "store_exit", "job": job, "pid": pid}:
                soon(self.on_store_exit, job, pid)

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        problem = self._problem
        if isinstance(problem, NoKeeper):  # these were asked, and may even have been done
            problem = LostKeeper(f"The keeper, process {self.pid}, was lost before it answered.", 1.0)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(problem)

    async def _disconnect(self) -> None:
        writer = self._writer
        if self._listening is not None:
            self._listening.cancel()
            with suppress(asyncio.CancelledError):
                await self._listening
            self._listening = None
        self._lose()
        if writer is not None:
            with suppress(OSError):
                await writer.wait_closed()

    def _dead(self, problem: str) -> Permanent:
        path = self._folder / "keeper.log"
        return Permanent(f"{problem}. The end of {path}: {last_lines(path, 12, 1500) or 'nothing'}")


def _peer(writer: asyncio.StreamWriter) -> int:
    sock = writer.get_extra_info("socket")
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid
