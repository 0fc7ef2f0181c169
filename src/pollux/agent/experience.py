"""What other jobs of this job's kind have measured, as the daemon of this node was told it.

The daemon keeps it in a file, which it replaces when the scheduler knows more. Nothing here is reported: the registry
must not hear its own words again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pollux.core import Profile, loads
from pollux.errors import InvalidInput
from pollux.goodput.pooled import Corrected, Kind

log = logging.getLogger(__name__)


class Experience:
    """For the tuner's thread. What cannot be read or used is logged once and left out: the job's own measurements do.

    A model is made once for each file and GPU type, which takes the interpreter up to half a second.
    """

    def __init__(self, path: Path | None) -> None:
        """None: nobody tells."""
        self._path = path
        self._seen: object = None
        """Which file was read: it is replaced, never changed."""
        self._profile = Profile()
        self._models: dict[str, Corrected | None] = {}

    def on(self, gpu_type: str) -> Corrected | None:
        """What is known of the kind on such GPUs now."""
        self._look()
        if gpu_type not in self._models:
            self._models[gpu_type] = self._model(gpu_type)
        return self._models[gpu_type]

    def forget(self) -> None:
        """Do without it until there is another."""
        self._profile, self._models = Profile(), {}

    def _look(self) -> None:
        if self._path is None:
            return
        try:
            found = self._path.stat()
        except OSError:  # mostly: there is nothing to tell
            if self._seen is not None:
                self._seen = None
                self.forget()
            return
        if (seen := (found.st_ino, found.st_mtime_ns)) == self._seen:
            return
        self._seen = seen
        self.forget()
        try:
            self._profile = loads(self._path.read_bytes(), Profile)
        except (OSError, InvalidInput) as error:
            log.warning("What others of this kind have measured cannot be read, and is left out: %s", error)

    def _model(self, gpu_type: str) -> Corrected | None:
        kind = Kind()
        try:
            kind.note(self._profile.of_type(gpu_type))
            return kind.model()
        except Exception as error:  # whatever it is, the job's own measurements do
            log.warning("What others of this kind have measured cannot be used, and is left out: %s", error)
            return None
