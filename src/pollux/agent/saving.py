"""When a checkpoint is due, who writes it, and which one a job goes on from. What is in it: `state`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pollux.agent.checkpoint import Checkpoints, Loaded, number_of
from pollux.agent.checkpoint_writer import CheckpointWriter
from pollux.agent.replicas import Replicas
from pollux.agent.snapshot import snapshot
from pollux.errors import CheckpointError

log = logging.getLogger(__name__)

LAST_WRITE_S = 120.0
"""How long the end of a job waits for its last checkpoint."""


class Saver:
    """Writes the job's checkpoints on the first replica, off its training thread; without a folder does nothing."""

    def __init__(
        self,
        folder: Path | None,
        keep: int,
        every_s: float,
        replicas: Replicas,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._replicas = replicas
        self._every_s = every_s
        self._clock = clock or time.monotonic
        self._last_s = self._clock()
        self._checkpoints = Checkpoints(folder, keep, patience_s=LAST_WRITE_S) if folder is not None else None
        self._writer: CheckpointWriter | None = None

    def check(self) -> None:
        """Whether there will be a place for checkpoints: better now than hours later."""
        if self._checkpoints is not None and self._replicas.is_main:
            self._checkpoints.check_writable()

    def assign_role(self) -> None:
        """The first replica writes. Another one may have written until now, and still be at it."""
        if self._checkpoints is None:
            return
        if self._replicas.is_main and self._writer is None:
            self._writer = CheckpointWriter(self._checkpoints)
        elif not self._replicas.is_main:
            self.close()

    @property
    def is_on(self) -> bool:
        return self._checkpoints is not None

    @property
    def is_due(self) -> bool:
        """Asked on the first replica; the others hear of it."""
        return self.is_on and self._clock() - self._last_s >= self._every_s

    def latest(self) -> Loaded | None:
        """The checkpoint that all replicas go on from; a collective call."""
        if self._checkpoints is None:
            return None
        if self._replicas.size == 1:
            return self._checkpoints.load_latest(self._replicas.device)
        # One replica sorts out the damaged ones before the others look.
        found = self._checkpoints.load_latest("cpu") if self._replicas.is_main else None
        number = torch.tensor([0 if found is None else number_of(found.path)], device=self._replicas.device)
        chosen = int(self._replicas.sum(number).item())
        if not chosen or found is not None:
            return found
        path = next((path for path in self._checkpoints.list() if number_of(path) == chosen), None)
        if path is None:
            raise CheckpointError(
                str(self._checkpoints.folder),
                f"replica {self._replicas.rank} does not find checkpoint {chosen} that the first one reads",
                "Use a folder that all nodes share",
            )
        return self._checkpoints.load(path, "cpu")

    def save(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], *, wait: bool) -> bool:
        """Take a copy now and have it written; `wait` until it is on disk. False: it is not, or will not be.

        Whoever calls this writes: the first replica, or one that leaves and alone has the state.
        """
        self._last_s = self._clock()
        if self._checkpoints is None:
            return False
        if self._writer is None:
            self._writer = CheckpointWriter(self._checkpoints)
        copies = {name: snapshot(state, name) for name, state in parts.items()}
        is_taken = self._writer.submit(step, copies, facts)
        if is_taken and (not wait or self._writer.flush(LAST_WRITE_S)):
            return True
        log.error("the checkpoint of step %d is not on disk: %s", step, self._writer.last_error or "too slow")
        return False

    @property
    def last_path(self) -> Path | None:
        return self._writer.last_path if self._writer is not None else None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(LAST_WRITE_S)
            self._writer = None
