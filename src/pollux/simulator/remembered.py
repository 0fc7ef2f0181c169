"""Step times that were interpolated before, kept in the user's cache folder.

Interpolating needs SciPy and a triangulation, which take longer than a run; a run asks for some hundred values, mostly
the same ones as the run before. A file belongs to the measurements and the SciPy that it was made with (by a digest),
so it can never be stale; it may be deleted at any time, and what cannot be read or written is done without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

FORMAT = b"pollux step times 1"
Key = tuple[int, int, int]
"""Nodes, GPUs, examples a GPU."""
Times = tuple[float, float] | None
"""Seconds of a step, and of its synchronisation; None: beyond what was measured."""


def cache_folder() -> Path | None:
    """`POLLUX_CACHE`, else `pollux` in the user's cache folder; None, for no cache, if the variable is empty."""
    chosen = os.environ.get("POLLUX_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    with contextlib.suppress(RuntimeError):  # a user without a home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pollux"
    return None


class Remembered:
    """The values of one application. Loaded at once, written by `save`."""

    def __init__(self, measurements: Iterable[Path] = ()) -> None:
        """`measurements` are the files that the values are interpolated from; without any, nothing is kept."""
        measurements = tuple(measurements)
        folder = cache_folder() if measurements else None
        self._file = None if folder is None else folder / f"step-times-{_digest(measurements)}.json"
        self._values = self._load()
        self._is_new = False

    def recall(self, key: Key, find_out: Callable[[Key], Times]) -> Times:
        """What was found out before, or is now."""
        try:
            return self._values[key]
        except KeyError:
            times = self._values[key] = find_out(key)
            self._is_new = True
            return times

    def save(self) -> None:
        """Write what is new, together with what other processes have written meanwhile."""
        if not self._is_new or self._file is None:
            return
        self._values = {**self._load(), **self._values}
        import tempfile  # slow, and mostly there is nothing new

        text = json.dumps([[key, times] for key, times in self._values.items()])
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._file.parent, prefix=".writing-") as folder:
                temporary = Path(folder) / self._file.name
                temporary.write_text(text, encoding="utf-8")
                os.replace(temporary, self._file)
            self._is_new = False

    def _load(self) -> dict[Key, Times]:
        if self._file is None:
            return {}
        try:
            rows = json.loads(self._file.read_text(encoding="utf-8"))
            return {(int(nodes), int(gpus), int(size)): _times(times) for (nodes, gpus, size), times in rows}
        except (OSError, ValueError, TypeError, LookupError):
            return {}


def _times(plain: list[float] | None) -> Times:
    if plain is None:
        return None
    step, sync = plain
    return float(step), float(sync)


def _digest(files: Iterable[Path]) -> str:
    """Of the measurements, and of the SciPy that is installed: another one may triangulate otherwise."""
    found = hashlib.sha256(FORMAT)
    scipy = find_spec("scipy")
    installed = [Path(scipy.origin).with_name("version.py")] if scipy is not None and scipy.origin else []
    for file in (*installed, *files):
        with contextlib.suppress(OSError):
            found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:24]
