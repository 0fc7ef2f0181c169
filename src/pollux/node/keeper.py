"""The keeper of a node: a process that has torch loaded, and forks replicas, commands and stores from itself. Linux.

    python -P -m pollux.node.keeper --dir FOLDER [--preload torch,torch._dynamo,pollux.torch] [--idle-s 600]

It is the parent of all of them, or becomes it: they outlive the daemon, which may end and come back, and their exit
codes wait here until it forgets them. It does as little as possible, in one thread, never touches CUDA, and ends when
it is told to, or after a while when it is alone and has nothing to tell. Its client is `keeper_client`, its parent a
`witness`, which takes over its children should it be killed.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pollux
from pollux.node import exits
from pollux.node.commands import watch_command
from pollux.node.forking import Program, detach, entry, fork, run, spare_the_end, write_ends_to, write_log
from pollux.node.lines import Lines, Message
from pollux.node.processes import children, end_leftovers, exit_code_of, is_running, start_ticks
from pollux.node.template_pool import Start, Templates
from pollux.node.templates import run_replica

log = logging.getLogger("pollux.node.keeper")

PRELOAD = ("torch", "torch._dynamo", "pollux.torch")
"""In this order: the last one needs the first, and the first optimizer of a script would need the second."""
STORE = "pollux.agent.store_host:main"
IDLE_S = 600.0
GRACE_S = 5.0
PR_SET_CHILD_SUBREAPER = 36

Answer: TypeAlias = Callable[[Message], None]


@dataclass(slots=True)
class Replica:
    tag: str
    pid: int
    began: int
    is_command: bool = False
    shim: int = 0
    """Of a command: its parent, which is our child in its place."""
    exit_code: int | None = None


@dataclass(slots=True)
class Store:
    pid: int
    port: int | None = None
    answers: list[Answer] = field(default_factory=list)


class Keeper:
    """All that is known. `serve` returns when it is over; children leave it by `Forked`."""

    def __init__(self, path: Path, listener: socket.socket, made: Mapping[str, str], idle_s: float) -> None:
        """`made`: variables that the imports of the keeper have set, and that those of a script would have."""
        self._path = path
        self._listener = listener
        self._made = made
        self._idle_s = idle_s
        self._alone_since_s = time.monotonic()
        self._grace_s: float | None = None
        """Once the keeper is to end: how long its children may take."""
        self._end_answer: Answer | None = None
        self._daemon: Lines | None = None
        self._replicas: dict[str, Replica] = {}
        self._answers: dict[str, list[Answer]] = {}
        """By tag: who waits for the pid of a replica that has no process yet."""
        self._stores: dict[str, Store] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._templates = Templates(self._selector, self._release, self._began, self._failed, self._fork_here)
        # Replicas come to us when the process that forked them ends.
        self._can_adopt = ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        for sock in (listener, self._woken, self._wake):
            sock.setblocking(False)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end_soon(GRACE_S))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        while self._grace_s is None:
            for key, _ in self._selector.select(self._patience_s()):
                key.data()
            self._look_at_the_clock()
        self._end(self._grace_s)

    # The daemon

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            log.warning("Process %d of user %d is refused: the keeper belongs to user %d.", pid, uid, os.geteuid())
            sock.close()
            return
        lines = Lines(sock, self._selector, lambda message: self._heard(lines, pid, message), lambda: self._left(lines))
        lines.send({"event": "hello", "version": pollux.__version__, "parent": os.getppid()})

    def _heard(self, lines: Lines, pid: int, message: Message) -> None:
        """Who asks for something is the daemon. Who only connects wants to know whether a keeper serves here."""
        if self._daemon is not lines:
            if self._daemon is not None:
                log.warning("Process %d takes the place of the daemon before.", pid)
                self._daemon.send({"event": "replaced"})
                self._daemon.close()
            self._daemon = lines
        self._asked(lines, message)

    def _left(self, lines: Lines) -> None:
        if self._daemon is lines:
            log.info("The daemon is gone.")
            self._daemon = None
            self._alone_since_s = time.monotonic()

    def _tell(self, message: Message) -> None:
        if self._daemon is not None:
            self._daemon.send(message)

    def _asked(self, lines: Lines, message: Message) -> None:
        def answer(content: Message) -> None:
            lines.send({"id": message.get("id"), **content})

        do = message.get("do")
        try:
            match message:
                case {
                    "do": "spawn",
                    "tag": str(tag),
                    "program": dict(program),
                    "log": str(file),
                    "claim": str(claim),
                    "fingerprint": str(code),
                }:
                    self._spawn(Start(tag, self._program(**program), file, claim), code, answer)
                case {
                    "do": "run_command",
                    "tag": str(tag),
                    "program": dict(program),
                    "log": str(file),
                    "claim": str(claim),
                }:
                    self._spawn(Start(tag, Program(**program), file, claim, is_command=True), "", answer)
                case {"do": "host_store", "job": str(job), "host": str(host)}:
                    self._host_store(job, host, str(message.get("user", "")), answer)
                case {"do": "children"}:
                    known = [[one.tag, one.pid, one.exit_code] for one in self._replicas.values()]
                    answer({"children": [*known, *([tag, 0, None] for tag in self._answers)]})
                case {"do": "kill", "tag": str(tag), "signal": int(number)}:
                    answer({"is_sent": self._kill(tag, number)})
                case {"do": "forget", "tag": str(tag)}:
                    self._forget(tag)
                    answer({})
                case {"do": "forget_job", "job": str(job)}:
                    self._forget_job(job)
                    answer({})
                case {"do": "end", "grace_s": float(grace_s)}:
                    self._end_answer = answer
                    self._end_soon(grace_s)
                case _:
                    log.warning("A request is refused: %r is unknown, or lacks a field.", do)
                    answer({"error": f"The keeper does not understand the request {do!r}."})
        except (OSError, TypeError, ValueError) as error:
            log.exception("The request %r failed.", do)
            answer({"error": f"The keeper cannot do {do!r} ({error}).", "is_temporary": isinstance(error, OSError)})

    # Replicas

    def _program(self, **fields: object) -> Program:
        program = Program(**fields)  # type: ignore[arg-type]  # a wrong name is refused, a wrong type harms the replica
        return replace(program, environment={**self._made, **program.environment})

    def _spawn(self, start: Start, fingerprint: str, answer: Answer) -> None:
        """A tag names one process until it is forgotten: whoever asks again is told its pid."""
        if (known := self._replicas.get(start.tag)) is not None:
            answer({"pid": known.pid})
            if known.exit_code is not None:
                self._tell_exit(known)
            return
        if start.tag in self._answers:
            self._answers[start.tag].append(answer)
            return
        self._answers[start.tag] = [answer]
        try:
            is_taken = self._can_adopt and not start.is_command and self._templates.take(start, fingerprint)
        except OSError as error:
            self._failed(start, f"finds no room for its template ({error})")
            return
        if not is_taken:
            self._fork_here(start)

    def _fork_here(self, start: Start) -> None:
        if self._grace_s is not None:
            self._failed(start, "is not started: the keeper ends")
            return
        try:
            if start.is_command:
                self._fork_command(start)
            else:
                self._began(start, fork(partial(run_replica, start.program, start.log, start.claim), self._release))
        except OSError as error:
            self._failed(start, f"cannot be forked ({error})")

    def _fork_command(self, start: Start) -> None:
        told, tells = os.pipe()
        watch = partial(watch_command, start.program, start.log, start.claim, self._path.parent, tells)
        shim = fork(watch, self._release)  # not under a `finally`, which the child would come by
        os.close(tells)
        with open(told, "rb") as report:
            pid = int(report.read() or 0)  # the shim tells it before it does anything else
        if pid:
            self._began(start, pid, shim)
        else:
            self._failed(start, "was lost while it was forked")

    def _began(self, start: Start, pid: int, shim: int = 0) -> None:
        self._replicas[start.tag] = Replica(start.tag, pid, start_ticks(pid), start.is_command, shim)
        log.info("%s is process %d.", start.tag, pid)
        for answer in self._answers.pop(start.tag):
            answer({"pid": pid})

    def _failed(self, start: Start, problem: str) -> None:
        log.error("%s %s.", start.tag, problem)
        for answer in self._answers.pop(start.tag):
            answer({"error": f"{start.tag} {problem}.", "is_temporary": True})

    def _kill(self, tag: str, number: int) -> bool:
        """Only a process that is still the same: its number may belong to another one by now."""
        replica = self._replicas.get(tag)
        if replica is None or replica.exit_code is not None or start_ticks(replica.pid) != replica.began:
            return False
        os.kill(replica.pid, number)
        return True

    def _forget(self, tag: str) -> None:
        replica = self._replicas.get(tag)
        if replica is not None and replica.exit_code is not None:
            del self._replicas[tag]
            exits.remove(self._path.parent, replica.pid, replica.began)

    # Stores

    def _host_store(self, job: str, host: str, user: str, answer: Answer) -> None:
        store = self._stores.get(job) or self._fork_store(job, host, user)
        if store.port is None:
            store.answers.append(answer)
        else:
            answer({"pid": store.pid, "port": store.port})

    def _fork_store(self, job: str, host: str, user: str) -> Store:
        def heard(message: Message) -> None:
            store.port = int(message["port"])
            log.info("Job %s: its store is process %d, port %d.", job, store.pid, store.port)
            while store.answers:
                store.answers.pop()({"pid": store.pid, "port": store.port})

        ours, theirs = socket.socketpair()
        lines = Lines(ours, self._selector, heard, lambda: None)
        try:
            store = Store(fork(partial(_run_store, host, user, theirs), self._release))
        except OSError:
            lines.close()
            theirs.close()
            raise
        theirs.close()
        self._stores[job] = store
        return store

    def _forget_job(self, job: str) -> None:
        """Its replicas that live are not touched."""
        self._templates.drop(job)
        if (store := self._stores.pop(job, None)) is not None:
            os.kill(store.pid, signal.SIGTERM)
        for tag in [tag for tag in self._replicas if tag.startswith(f"{job}/")]:
            self._forget(tag)

    # Ends

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # The pid of a replica is told before its end can reach us: after this all of them are known.
                self._templates.drain()
                self._write_down(ended.si_pid, exit_code_of(ended))
                os.waitpid(ended.si_pid, 0)
                self._note_end(ended.si_pid, exit_code_of(ended))

    def _write_down(self, pid: int, exit_code: int) -> None:
        """Before it is reaped: should the keeper be killed now, its witness sees the same end."""
        if any(pid == one.pid and one.exit_code is None for one in self._replicas.values()):
            try:
                exits.record(self._path.parent, pid, exit_code)
            except OSError as error:
                log.warning("How process %d ended is known to this process alone: %s", pid, error)

    def _note_end(self, pid: int, exit_code: int) -> None:
        """Other processes than these were forgotten, or left behind by a replica."""
        self._templates.ended(pid)
        for replica in self._replicas.values():
            if pid == (replica.shim or replica.pid) and replica.exit_code is None:
                if replica.shim and (written := exits.read(self._path.parent, replica.pid, replica.began)) is not None:
                    exit_code = written  # else the shim tells by its own end, or was killed, and the command with it
                replica.exit_code = exit_code
                log.info("%s, process %d, ended with %d.", replica.tag, replica.pid, exit_code)
                if replica.is_command:
                    self._clear_after(replica)
                self._tell_exit(replica)
                return
        for job, store in list(self._stores.items()):
            if store.pid == pid:
                del self._stores[job]
                log.info("Job %s: its store, process %d, ended with %d.", job, pid, exit_code)
                for answer in store.answers:
                    answer({"error": f"The store of job {job} ended with {exit_code} before it served. {_advice()}"})
                self._tell({"event": "store_exit", "job": job, "pid": pid})

    def _clear_after(self, command: Replica) -> None:
        """What a command started in other sessions, as torchrun does, has come to us and must not hold its GPUs."""
        known = {one.shim or one.pid for one in self._replicas.values()}
        job = command.tag.partition("/")[0]
        for pid in end_leftovers(set(children(os.getpid())) - known, f"POLLUX_JOB={job}"):
            log.info("Process %d, which %s left behind, is ended.", pid, command.tag)

    def _tell_exit(self, replica: Replica) -> None:
        self._tell({"event": "exit", "tag": replica.tag, "pid": replica.pid, "exit_code": replica.exit_code})

    def _release(self) -> None:
        """In a child: close all sockets of the keeper, lest one of them closes a number that is another file's then."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wake.close()

    def _patience_s(self) -> float | None:
        now_s = time.monotonic()
        ends = [] if (deadline_s := self._templates.next_deadline_s) is None else [deadline_s]
        if self._daemon is None:
            ends.append(max(self._alone_since_s + self._idle_s, now_s + 1.0))
        return max(0.0, min(ends) - now_s) if ends else None

    def _look_at_the_clock(self) -> None:
        now_s = time.monotonic()
        self._templates.look_at_the_clock(now_s)
        if self._daemon is not None or now_s < self._alone_since_s + self._idle_s:
            return
        is_needed = self._stores or self._answers or any(one.exit_code is None for one in self._replicas.values())
        can_tell = self._replicas and self._path.exists()
        if not is_needed and not can_tell:
            log.info("Nobody came for %g s, and there is nothing to tell.", self._idle_s)
            self._end_soon(GRACE_S)

    def _end_soon(self, grace_s: float) -> None:
        self._grace_s = grace_s

    def _end(self, grace_s: float) -> None:
        """SIGTERM to replicas and stores, a while later SIGKILL to every child and to what these leave behind."""
        self._path.unlink(missing_ok=True)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._templates.drop_all()
        alive = [one.pid for one in self._replicas.values() if one.exit_code is None]
        for pid in (*alive, *(store.pid for store in self._stores.values())):
            os.kill(pid, signal.SIGTERM)
        end_s = time.monotonic() + grace_s
        while _has_children():
            if time.monotonic() >= end_s:
                for pid in children(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
            self._reap()
        log.info("The keeper ends.")
        if self._end_answer is not None:
            self._end_answer({})
        if self._daemon is not None:
            self._daemon.flush(1.0)


def _run_store(host: str, user: str, report: socket.socket) -> None:
    detach(keep=(report.fileno(),), user=user)
    os.chdir("/")
    entry(STORE)(host, report.detach())


def _advice() -> str:
    """What may help against a store that does not serve."""
    if find_spec("torch") is None:
        return (
            f"The package 'torch' is not installed in {sys.executable}. Install it with: pip install 'pollux[torch]'."
        )
    return "See keeper.log in the folder of the node."


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _listen(path: Path, starter: tuple[int, int] | None = None) -> socket.socket | None:
    """None: another keeper serves there, or the starter has ended. Who connects from now on waits until the imports
    are done.

    `starter`: pid and ticks of the process that waits for this keeper. Were that killed, nobody would know that one
    more is about to listen, and those who end all keepers of the folder would pass it by.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # of two that start at once, one listens
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
            else:
                log.info("Another keeper serves %s.", path)
                return None
        if starter is not None and not is_running(*starter):
            log.info("Process %d, which has started this keeper, is gone.", starter[0])
            return None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(8)
        return listener
    finally:
        os.close(folder)


def _preload(names: Iterable[str]) -> dict[str, str]:
    """Import them; the environment variables that they have set."""
    before = dict(os.environ)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            log.warning("Replicas start without %s: %s: %s", name, type(error).__name__, error)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        log.warning("%d threads run after the imports; what is forked has only the first.", threads)
    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def main() -> None:
    spare_the_end()
    parser = argparse.ArgumentParser(prog="pollux.node.keeper")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--preload", default=",".join(PRELOAD))
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    parser.add_argument("--starter", type=int, nargs=2, metavar=("PID", "TICKS"))
    given = parser.parse_args()
    write_log()
    path = given.dir / "keeper.sock"
    listener = _listen(path, given.starter and tuple(given.starter))
    if listener is None:
        return
    exits.prepare(given.dir)
    write_ends_to(given.dir)
    made = _preload([name for name in given.preload.split(",") if name])
    os.chdir("/")  # lest a folder that is not ours cannot be removed or unmounted
    sys.argv[1:] = []
    log.info("The keeper is ready.")
    run(Keeper(path, listener, made, given.idle_s).serve)


if __name__ == "__main__":
    main()
