"""SIGTERM while a job trains: finish the step, save, leave. Outside of its loops a process ends as it always would."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM

LONGEST_LEAVE_S = 180
"""How long a data-loading process that was asked to end waits for the training process to end it."""


@contextlib.contextmanager
def on_terminate(ask: Callable[[], None], *, is_managed: bool = False) -> Iterator[None]:
    """Inside, the first SIGTERM calls `ask`; a second one ends the process at once.

    Not so under a daemon (`is_managed`), which forces by SIGKILL, and may repeat a SIGTERM that it thinks lost: there
    none after the first has any effect, also afterwards.
    """
    if not _may_handle():
        yield
        return
    own, is_asked = os.getpid(), False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        if not is_managed or os.getpid() != own:  # whoever was forked in here is nothing to the daemon
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ask()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        is_kept = (is_managed and is_asked) or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        if not is_kept:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: not set by Python


def ignore_terminate() -> None:
    """From here to the end of the process, which is near and must not get another exit code."""
    if _may_handle():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _may_handle() -> bool:
    """Only the main thread may handle signals."""
    return threading.current_thread() is threading.main_thread()


def outlast_terminate() -> None:
    """In a data-loading process: go on after SIGTERM, which launchers send to whole process groups.

    The training process needs samples for the step that it finishes, and torch has it fail when a worker dies. The
    worker ends when it is told to or its parent is gone; if neither happens, by an alarm.
    """
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(LONGEST_LEAVE_S))
