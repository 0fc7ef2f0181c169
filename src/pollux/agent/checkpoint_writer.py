"""Writing checkpoints off the training thread: at most one in the making, at most one waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.agent.checkpoint import Checkpoints
from pollux.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Order:
    step: int
    parts: Mapping[str, Any]
    facts: Mapping[str, Any]


class CheckpointWriter:
    """Hands snapshots to a thread that lives only while there is something to write.

    No failed write fails training: it is logged as an error once, with the fix, kept in `last_error` until a write
    succeeds, and the next checkpoint is tried as ever. A process that ends without `close` still finishes what was
    submitted, because the thread is no daemon.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.last_error: CheckpointError | None = None
        self.last_path: Path | None = None
        """The newest checkpoint that this writer completed."""
        self._changed = threading.Condition()
        self._waiting: _Order | None = None
        self._is_busy = False
        self._is_closed = False

    def submit(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
        """Takes a snapshot to be written; never waits for the disk. False if it is not taken: closed, or no thread.

        While one is being written, only the newest other one waits: an older one that waits is dropped for it.
        """
        with self._changed:
            if self._is_closed:
                return False
            if self._waiting is not None:
                log.info("checkpoint of step %d not written: that of step %d is newer", self._waiting.step, step)
            self._waiting = _Order(step, parts, facts)
            if not self._is_busy:
                try:
                    threading.Thread(target=self._write_all, name="pollux-checkpoint").start()
                except RuntimeError as error:
                    self._waiting = None
                    self._failed(self._unwritten(error, "Allow this process more threads (ulimit -u)"))
                    return False
                self._is_busy = True
            return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is left to write. True if that came in time and the last write succeeded."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_busy, timeout_s) and self.last_error is None

    def close(self, timeout_s: float | None = None) -> bool:
        """Takes nothing more and flushes. May be called twice."""
        with self._changed:
            self._is_closed = True
        return self.flush(timeout_s)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                order, self._waiting = self._waiting, None
                if order is None:
                    self._is_busy = False
                    self._changed.notify_all()
                    return
            self._write(order)
            del order  # or its memory would be held while the next one is waited for

    def _write(self, order: _Order) -> None:
        try:
            path = self.checkpoints.save(order.step, order.parts, order.facts)
        except CheckpointError as error:
            self._failed(error)
        except Exception as error:
            log.debug("unexpected failure while writing a checkpoint", exc_info=True)
            self._failed(self._unwritten(error, "Please report this"))
        else:
            if self.last_error is not None:
                log.info("checkpoints are written again: %s", path)
            self.last_path, self.last_error = path, None

    def _unwritten(self, error: Exception, fix: str) -> CheckpointError:
        return CheckpointError(str(self.checkpoints.folder), f"no checkpoint was written: {error!r}", fix)

    def _failed(self, error: CheckpointError) -> None:
        is_news = self.last_error is None or self.last_error.problem != error.problem
        log.log(logging.ERROR if is_news else logging.DEBUG, "%s Training goes on; the next one is tried.", error)
        self.last_error = error
