"""Delays processes, threads, log messages and files, so that a test that does not wait for them is likely to fail.

Python runs this file in every process that has its folder in PYTHONPATH (`tests/repeat.py --late S`). Each process and
each thread starts S seconds late, threads log late, and renamed or linked files appear late under their new names.
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
