"""What the service does while its log cannot be written, as on a full disk: it says so, waits, and tries again.

What was told to it meanwhile did not happen: whoever told it hears so, or tells it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pollux.errors import BackendError
from pollux.service.store import SqliteLog

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Trouble:
    """`on_over` is called when there is none any more."""

    def __init__(self, store: SqliteLog, on_over: Callable[[], None]) -> None:
        self.warnings: tuple[str, ...] = ()
        """For those who look at the cluster."""
        self._store = store
        self._on_over = on_over
        self._is_closed = False

    def close(self) -> None:
        """Nothing is tried any more."""
        self._is_closed = True

    def note(self, error: BackendError) -> None:
        """The log could not be written."""
        if not self.warnings:
            log.error("The log cannot be written, and nothing changes until it can: %s", error)
            asyncio.get_running_loop().call_later(RETRY_S, self._try)
        self.warnings = (f"The service cannot write: {error} Jobs train on; nothing is started or changed meanwhile.",)

    def insist(self, write: Callable[[], None]) -> None:
        """Have it written, now or later: for what does not decide anything, and must not hold up what does."""
        if self._is_closed:
            return
        try:
            write()
        except BackendError as error:
            self.note(error)
            asyncio.get_running_loop().call_later(RETRY_S, self.insist, write)

    def _try(self) -> None:
        if self._is_closed:
            return
        try:
            self._store.put("tried_at_s", f"{time.time():.0f}")
        except BackendError:
            asyncio.get_running_loop().call_later(RETRY_S, self._try)
            return
        log.info("The log can be written again.")
        self.warnings = ()
        self._on_over()
