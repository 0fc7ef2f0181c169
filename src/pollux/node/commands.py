"""A plain command: a program that knows nothing of Pollux, in place of a replica's script. Linux.

It is forked from the keeper like a replica, and then is another program: nothing of the keeper is left in it.
"""

from __future__ import annotations

import os
import signal

from pollux.node.claims import make_claim
from pollux.node.forking import Program, detach

NOT_FOUND = 127
NOT_RUN = 126
"""The exit codes that shells have for them."""


def run_command(program: Program, log: str, claim: str) -> None:
    """The role of a command, from the fork on. The program is searched in the PATH of its own environment.

    No shell is involved. What cannot be run ends with a sentence in its log, and an exit code as of a shell.
    """
    if claim:
        make_claim(claim)
    detach(log, user=program.user)
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


def _end(problem: str, exit_code: int) -> None:
    """Not by sys.exit: nothing that was registered in the keeper is due here."""
    os.write(2, f"pollux: {problem}\n".encode("utf-8", "backslashreplace"))
    os._exit(exit_code)
