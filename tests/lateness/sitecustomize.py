"""What happens beside a test happens late, so that one that does not wait for it fails each time and not by chance.

Python runs this file in every process that finds its folder in PYTHONPATH (`tests/repeat.py --late S`). In all of them,
by so many seconds: a process begins late, so does each thread, what a thread logs is logged late, and files are late
under the names that they are moved or linked to.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

LATE_S = float(os.environ.get("LATE_S") or 0.0)


def late(act: Callable[..., Any]) -> Callable[..., Any]:
    def act_late(*arguments: Any, **more: Any) -> Any:
        time.sleep(LATE_S)
        return act(*arguments, **more)

    return act_late


def start_late(thread: threading.Thread) -> None:
    thread.run = late(thread.run)  # type: ignore[method-assign]
    start(thread)


def handle_late(logger: logging.Logger, record: logging.LogRecord) -> None:
    if threading.current_thread() is not threading.main_thread() and record.levelno >= logging.INFO:
        time.sleep(LATE_S)
    handle(logger, record)


start, handle = threading.Thread.start, logging.Logger.handle
if LATE_S:
    time.sleep(LATE_S)
    for name in ("rename", "replace", "link", "symlink"):
        setattr(os, name, late(getattr(os, name)))
    threading.Thread.start = start_late  # type: ignore[method-assign]
    logging.Logger.handle = handle_late  # type: ignore[method-assign]
