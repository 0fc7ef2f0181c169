"""A plain command: a program that knows nothing of Pollux, in place of a replica's script. Linux.

It is forked from the keeper like a replica, and then is another program: nothing of the keeper is left in it. Its
parent is a *shim*, a fork of the keeper that waits for it, writes its exit code down, and ends what it left behind.
The command cannot outlive its shim. So a command without a record was killed: it has not come to its end.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path
from typing import NoReturn

from pollux.node import exits
from pollux.node.claims import NOT_MINE, make_claim
from pollux.node.forking import Program, detach
from pollux.node.processes import children, end_leftovers, exit_code_of

NOT_FOUND = 127
NOT_RUN = 126
"""The exit codes that shells have for them."""


PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
LEFTOVER_TRIES = 100
RECORD_TRIES = 30
"""Of a shim that finds no room for its record, a second each; its keeper, if that lives, then hears it all the same."""


def watch_command(program: Program, log: str, claim: str, folder: Path, told: int) -> NoReturn:
    """The role of a shim: start the command, tell its pid to the descriptor `told`, and end as it does.

    `folder`: where exit codes are written down. No signal reaches a shim but SIGKILL and SIGSTOP.
    """
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _run_command(program, log, claim, shim)
    os.write(told, b"%d" % pid)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, exits.SHIM.encode(), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.setsid()
    os.closerange(3, 2**31 - 1)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    exit_code = -signal.SIGKILL if ended is None else exit_code_of(ended)
    exits.record_patiently(folder, pid, exit_code, RECORD_TRIES)
    os.waitpid(pid, 0)
    for _ in range(LEFTOVER_TRIES):  # whatever it started comes to us as its parents end
        if not end_leftovers(children(shim), f"POLLUX_JOB={program.environment.get('POLLUX_JOB')}"):
            break
        time.sleep(0.01)
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(shim, -exit_code)
    os._exit(exit_code)


def _run_command(program: Program, log: str, claim: str, shim: int) -> NoReturn:
    """The program is searched in the PATH of its own environment.

    No shell is involved. What cannot be run ends with a sentence in its log, and an exit code as of a shell.
    """
    if claim:
        make_claim(claim)
    detach(log, user=program.user)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # not earlier: a change of user undoes it
    if os.getppid() != shim:
        os._exit(NOT_MINE)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # python ignores them, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    try:
        os.chdir(program.directory)
    except OSError as error:
        _end(f"cannot run in directory {program.directory!r} ({error.strerror}). Give one that exists.", NOT_RUN)
    name = program.script
    try:
        os.execvpe(name, [name, *program.arguments], dict(program.environment))
    except (FileNotFoundError, NotADirectoryError):
        where = "there is no such file" if "/" in name else "it is in no folder of its PATH"
        if "/" in name and os.path.exists(name):
            where = "the interpreter that its first line names does not exist"
        _end(f"cannot run {name!r}: {where}. Give the path of a program.", NOT_FOUND)
    except OSError as error:
        fix = "Give a program that may be executed; a script needs a first line such as #!/bin/sh."
        _end(f"cannot run {name!r} ({error.strerror}). {fix}", NOT_RUN)
    except ValueError as error:
        _end(f"cannot run {name!r}: its arguments or its environment are not fit for a program ({error}).", NOT_RUN)


def _end(problem: str, exit_code: int) -> NoReturn:
    """Not by sys.exit: nothing that was registered in the keeper is due here."""
    os.write(2, f"pollux: {problem}\n".encode("utf-8", "backslashreplace"))
    os._exit(exit_code)
