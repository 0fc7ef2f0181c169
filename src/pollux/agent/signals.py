"""SIGTERM while a job trains: finish the step, save, leave. Outside of its loops a process ends as it always would."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM

LONGEST_LEAVE_S = 180
"""How long a data-loading process that was asked to end waits for the training process to end it."""


@contextlib.contextmanager
def on_terminate(ask: Callable[[], None]) -> Iterator[None]:
    """Inside, the first SIGTERM calls `ask`; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ask()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: not set by Python


def outlast_terminate() -> None:
    """In a data-loading process: go on after SIGTERM, which launchers send to whole process groups.

    The training process needs samples for the step that it finishes, and torch has it fail when a worker dies. The
    worker ends when it is told to or its parent is gone; if neither happens, by an alarm.
    """
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(LONGEST_LEAVE_S))
