"""The log of the service process: one JSON object a line, in a private file that rotates by itself, without secrets.

`at` is UTC. Fields that a caller gives as `extra={"job": …}` stand beside the fixed ones; exceptions are text.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pollux.node.private_log import PrivateLog

MAX_BYTES = 10 * 2**20
NUM_OLD = 4
"""Rotated files beside the one that is written: five in all."""
BLANK = "[secret]"

_FIXED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_UNWANTED = frozenset({"color_message", "taskName"})
"""uvicorn's copy of its message with colours; what Python 3.12 adds to every record."""


def setup(path: Path, level: int | str = logging.INFO, secrets: Iterable[str] = ()) -> None:
    """Send everything that is logged in this process to the file; no text of `secrets` gets into it.

    Call it once at the start, before uvicorn, which must be given `log_config=None`: its own configuration would take
    its loggers away again. Another call replaces the file.
    """
    handler = _PrivateFile(path, maxBytes=MAX_BYTES, backupCount=NUM_OLD, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(JsonLines(secrets))
    root = logging.getLogger()
    for earlier in [other for other in root.handlers if isinstance(other, _PrivateFile)]:
        root.removeHandler(earlier)
        earlier.close()
    root.addHandler(handler)
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class JsonLines(logging.Formatter):
    """A line for every record; secrets are blanked in all that comes from outside of this class."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        # The longest first: one may be a part of another.
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": self._plain(_message(record)),
        }
        for name, value in vars(record).items():
            if name not in _FIXED and name not in _UNWANTED:
                fields.setdefault(name, self._plain(value))
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = self._plain(self.formatException(record.exc_info))
        if record.stack_info:
            fields["stack"] = self._plain(record.stack_info)
        return json.dumps(fields, ensure_ascii=False)

    def _plain(self, value: object) -> Any:
        """What JSON can hold, without secrets. Texts are blanked before JSON's escapes could disguise them."""
        match value:
            case None | bool() | int():
                return value
            case float() if math.isfinite(value):
                return value
            case Mapping():
                return {self._plain(str(key)): self._plain(item) for key, item in value.items()}
            case list() | tuple() | set() | frozenset():
                return [self._plain(item) for item in value]
        text = str(value)
        for secret in self._secrets:
            text = text.replace(secret, BLANK)
        return text


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # whoever logs with the wrong arguments must still be read, and logging must not raise
        return f"{record.msg} {record.args!r}"


class _PrivateFile(PrivateLog):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """A full disk must not end the service. The record is not told here: it may hold a secret."""
        problem = f"{self.baseFilename} cannot be written to: {sys.exc_info()[1]!r}\n"
        with suppress(OSError, ValueError):  # standard error may be a file on the same disk, or closed
            if sys.stderr is not None:
                sys.stderr.write(problem)
