"""A log file for its owner alone, that begins anew when it is large."""

from __future__ import annotations

import os
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler


class PrivateLog(RotatingFileHandler):
    """Files that only their owner may read: commands and paths of everybody's jobs are in them."""

    def _open(self) -> TextIOWrapper:
        os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.chmod(self.baseFilename, 0o600)  # one that was there before
        return super()._open()
