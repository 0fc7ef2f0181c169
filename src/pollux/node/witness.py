"""The parent of a keeper: sees how its replicas end, should the keeper be killed. Linux.

    python -P -m pollux.node.witness --dir FOLDER [options of the keeper]

Whoever loses the keeper as a parent becomes a child of this process, which writes its exit code down (`node.exits`)
for the daemon to find. It holds nothing, listens to nobody, and ends when its last child has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from pollux.node import exits
from pollux.node.processes import children, exit_code_of, name_of

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    arguments = sys.argv[1:]
    folder = Path(arguments[arguments.index("--dir") + 1])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.fork()
    if keeper == 0:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "pollux.node.keeper", *arguments])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # as the keeper does: whoever wants it to end asks it
    signal.signal(signal.SIGTERM, lambda *_: _hand_on())
    sys.exit(watch(folder, keeper))


def watch(folder: Path, keeper: int) -> int:
    """Until no child is left. Returns the exit code of the keeper, as a shell would tell it."""
    code = 0
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return code
        if ended is None:
            continue
        if ended.si_pid == keeper:
            code = exit_code_of(ended) % 256 if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
        elif name_of(ended.si_pid) != exits.SHIM:
            exits.record_patiently(folder, ended.si_pid, exit_code_of(ended))
        os.waitpid(ended.si_pid, 0)


def _hand_on() -> None:
    """The keeper lets its children save before it ends; without one they are asked directly."""
    for pid in children(os.getpid()):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
