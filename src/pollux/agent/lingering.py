"""Connections of a replica that outlive it for a moment, should it be killed.

Where the other end of a connection has closed, gloo may take a write that failed for one that waits, and then nothing
ever wakes the thread that waits for it. It takes a peer that dies between two writes of one all-reduce, which busy
machines see once in forty kills. So the system must not close the connections of the dead before those who live have
heard of the loss from their daemons and stopped using them: a small process has them open as well.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from socket import socket

log = logging.getLogger(__name__)

LINGER_S = 3
"""How long the dead stay connected. Survivors hear of it in milliseconds, on a busy machine in a second."""

_HOLD = f"read _; sleep {LINGER_S}"
"""Nothing is ever written to its input, which ends with this process."""


class Lingering:
    """Keeps connections open until `end`, or for `LINGER_S` after this process is gone."""

    def __init__(self, connections: Sequence[socket]) -> None:
        self._holder: subprocess.Popen[bytes] | None = None
        try:
            self._holder = subprocess.Popen(
                ["/bin/sh", "-c", _HOLD, "pollux-linger"],  # the last for those who list processes
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                pass_fds=[connection.fileno() for connection in connections],
                start_new_session=True,  # lest it is killed with its parent
            )
        except OSError as error:
            log.warning("the connections of this replica would end with it, at which others may hang: %s", error)

    def end(self) -> None:
        """Nobody needs the connections any more. May be called again."""
        if self._holder is not None:
            with self._holder:  # closes its input and waits
                self._holder.kill()
            self._holder = None
