"""What a forked process does before it becomes something else. Linux.

A child leaves the frames of its parent by the exception `Forked`, which only `run` catches: so it can never come back
to its parent's loop, and at its end threads, atexit handlers and buffers come to theirs as with any script.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.node import exits
from pollux.node.accounts import account_of, become
from pollux.node.exit_codes import HOPELESS

_LAST_DESCRIPTOR = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Program:
    """A script, and all of the world that it is to see."""

    script: str
    arguments: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    user: str = ""
    """Whom it runs as; empty: as the keeper does."""


class Forked(BaseException):
    """Raised in a new process: what to do there."""

    def __init__(self, role: Callable[[], object]) -> None:
        super().__init__(role)
        self.role = role


def fork(role: Callable[[], object], release: Callable[[], None]) -> int:
    """The pid of a child that does `role` under `run`; `release` closes what it must not keep.

    The role has all signals blocked until it calls `detach`. `OSError` if the machine has no room for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if pid == 0:
        release()
        raise Forked(role)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def run(role: Callable[[], object]) -> None:
    """Do that; in each process that is forked meanwhile, do what it was forked for."""
    following: Callable[[], object] | None = role
    while following is not None:
        current, following = following, None
        try:
            current()
        except Forked as forked:
            following = forked.role


def write_ends_to(folder: Path) -> None:
    """Scripts of processes that are forked from this one write their exit codes down there themselves (`node.exits`).

    One that ends by a signal cannot. So a script that ended, and of which nobody knows how, was killed.
    """
    global _exits
    _exits = folder


def spare_the_end() -> None:
    """Have scripts of processes that are forked from this one end without the interpreter being taken apart.

    That takes half a second where torch is loaded, and several on a busy machine: as long, a GPU would not be free. To
    be called before anything else is imported, so that whatever that has registered with atexit comes first.
    """
    atexit.register(_end_at_once)


def _end_at_once() -> None:
    if _exit_code is None:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or a disk that is full
            stream.flush()
    if _exits is not None:
        with suppress(OSError):  # also if this is the process of another user, who may not write there
            exits.record(_exits, os.getpid(), _exit_code)
    os._exit(_exit_code)


@contextmanager
def noting_exit_code() -> Iterator[None]:
    """Run a script inside, so that `spare_the_end` knows how it ended."""
    global _exit_code
    try:
        yield
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        _exit_code = code & 0xFF if isinstance(code, int) else 1
        raise
    except KeyboardInterrupt:  # python ends by that signal then
        raise
    except BaseException as error:
        _exit_code = HOPELESS if getattr(error, "is_lasting", False) else 1
        raise
    _exit_code = 0


def entry(name: str) -> Callable[..., Any]:
    """`module:function`, imported now."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def open_log(path: str, user: str = "") -> int:
    """The file that the outputs of a replica are appended to. Its user owns it, and may not pass the folder it is in:
    so it can be opened anew as /dev/stdout, and not be found."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if user:
        os.fchown(log, account_of(user).uid, -1)
    return log


def detach(output: str | int | None = None, *, keep: Iterable[int] = (), user: str = "") -> None:
    """Be a process of its own: new session, plain signals, no descriptors but 0, 1, 2 and `keep`.

    Standard input is empty. `output`: the file to which both outputs are appended, or its descriptor; they stay where
    they are without. `user`: become that one.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ours = number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)
        # What a shell or nohup had the cluster ignore is no business of its jobs; python itself ignores these two.
        is_inherited = signal.getsignal(number) is signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ)
        if is_ours or is_inherited:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    forget_log()
    if output is not None:
        log = open_log(output, user) if isinstance(output, str) else output
        os.dup2(log, 1)
        os.dup2(log, 2)
    first = 3
    for kept in (*sorted(keep), _LAST_DESCRIPTOR):
        os.closerange(first, kept)
        first = kept + 1
    _put(os.open(os.devnull, os.O_RDONLY), 0)
    if user:
        become(account_of(user))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def take_place(program: Program) -> None:
    """Its environment, directory, arguments and module path, as python would have made them for the script."""
    os.environ.clear()
    os.environ.update(program.environment)
    try:
        os.chdir(program.directory)
    except OSError as error:
        sys.exit(f"pollux: cannot run in directory {program.directory!r} ({error.strerror}). Give one that exists.")
    sys.argv[:] = [program.script, *program.arguments]
    theirs = _pythonpath(program.environment)
    sys.path[:] = list(dict.fromkeys([os.path.dirname(os.path.realpath(program.script)), *theirs, *_installed]))
    importlib.invalidate_caches()


def write_log(level: int = logging.INFO) -> None:
    """Let this room log to standard error. The root logger is left to the scripts, which find it as in a new python."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    room = logging.getLogger("pollux.node")
    room.addHandler(handler)
    room.setLevel(level)
    room.propagate = False


def forget_log() -> None:
    """Undo `write_log`."""
    room = logging.getLogger("pollux.node")
    room.handlers.clear()
    room.setLevel(logging.NOTSET)
    room.propagate = True


def _put(descriptor: int, place: int) -> None:
    if descriptor != place:
        os.dup2(descriptor, place)
        os.close(descriptor)


def _pythonpath(environment: Mapping[str, str]) -> list[str]:
    value = environment.get("PYTHONPATH")
    return [os.path.abspath(part) for part in value.split(os.pathsep)] if value else []


_exit_code: int | None = None
"""Of the script that has ended in this process."""
_exits: Path | None = None

_installed = [part for part in sys.path if part not in _pythonpath(os.environ)]
"""What this python finds without being told; read before anything changes it."""
