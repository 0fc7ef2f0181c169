"""The journal of a run: each change of batch size, learning rate and fortune, as lines of JSON and for TensorBoard.

One replica writes, on the thread that calls: a line is one small write. A disk that fails is logged once and fails
nothing else; a disk that hangs holds the caller up, as it does a checkpoint.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Protocol

from pollux.core import dumps, loads
from pollux.errors import InvalidDocument, MissingDependency
from pollux.wire.entries import JournalEntry, LearningRateChanged, RunState, TrainingResumed, TrainingStarted
from pollux.wire.messages import AgentReport

log = logging.getLogger(__name__)

SILENT_CHANGE = 0.01
"""A factor that has moved by no more than this share is not news: under AdaScale it moves a little with every step."""

_HEAD = b'{"body":'  # what every line begins with, for the codec sorts keys
_BLOCK_BYTES = 1 << 16


class ScalarWriter(Protocol):
    """The part of torch's `SummaryWriter` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


class Journal:
    """Appends to the file and, opt-in, to a TensorBoard directory; with both None it only tells.

    An entry that `write` has returned from survives the death of the process, though not of the machine. `tell` hears
    of every entry, wherever it is written: the reporter's `note`. `clock` gives seconds since 1970.
    """

    def __init__(
        self,
        path: Path | None,
        tensorboard: Path | None = None,
        *,
        tell: Callable[[JournalEntry], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._file: int | None = None
        self._lost = 0
        self._lock = threading.RLock()  # a handler of a signal may write while the training thread does
        self._scalars = None if tensorboard is None else _summary_writer(tensorboard)
        self._tell = tell
        self._clock = clock
        self._told_factors: tuple[float, ...] | None = None

    def write(self, entry: JournalEntry) -> None:
        """Append one entry."""
        if isinstance(entry, TrainingStarted | TrainingResumed | LearningRateChanged):
            self._told_factors = entry.state.learning_rate_factors
        if self._tell is not None:
            self._tell(entry)
        if self._path is not None:
            with self._lock:
                self._append(self._path, dumps(entry))
        self.scalars(entry.state.step, _setting(entry.state))

    def learning_rate(self, state: RunState) -> None:
        """Write an entry if the factors have moved by more than 1 % since they were last told."""
        factors, before = state.learning_rate_factors, self._told_factors
        if before is None:
            self._told_factors = factors
        elif _has_moved(before, factors):
            self.write(LearningRateChanged(self._clock(), state, before))

    def report(self, report: AgentReport) -> None:
        """The figures of a report as scalars; they are not entries, and the file does not get them."""
        figures = {
            "loss": report.loss,
            "throughput": report.throughput,
            "efficiency": report.efficiency,
            "goodput": report.goodput,
            "noise_scale": report.noise_scale,
        }
        known = {name: value for name, value in figures.items() if value is not None}
        self.scalars(report.state.step, {**_setting(report.state), **known})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers for TensorBoard, each as pollux/<name>; those that are not finite are left out."""
        if self._scalars is None:
            return
        try:
            for name, value in values.items():
                if isfinite(value):
                    self._scalars.add_scalar(f"pollux/{name}", value, step)
        except Exception as error:  # its writer hands on whatever its own thread died of
            self._scalars = None
            log.warning("Nothing more is written for TensorBoard; training goes on. %s", error)

    def close(self) -> None:
        """Write out what TensorBoard still buffers; may be called again."""
        with self._lock:
            self._close_file()
        if self._scalars is not None:
            scalars, self._scalars = self._scalars, None
            try:
                scalars.close()
            except Exception as error:
                log.warning("The last numbers for TensorBoard could not be written. %s", error)

    def _append(self, path: Path, line: str) -> None:
        try:
            if self._file is None:
                self._file = _open(path)
            text = line.encode("ascii") + b"\n"
            if (taken := os.write(self._file, text)) < len(text):
                raise OSError(f"The disk took {taken} of {len(text)} bytes")
        except OSError as error:
            self._close_file()  # opening it anew will cut off what may have become half a line
            if not self._lost:
                log.warning("The journal %s cannot be written; training goes on. %s", path, error)
            self._lost += 1
        else:
            if self._lost:
                log.warning("The journal %s is written again; it lacks %d entries.", path, self._lost)
            self._lost = 0

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                os.close(file)


def read_journal(path: Path) -> list[JournalEntry]:
    """All entries, oldest first. A last line without its end was being written when the job died: it is left out."""
    return list(_entries(path))


def _entries(path: Path) -> Iterator[JournalEntry]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield loads(line, JournalEntry)
            except InvalidDocument as error:
                fix = f"{error.fix}, or take the line out of {path}"
                raise InvalidDocument(f"line {number}: {error.field}", error.value, error.problem, fix) from None


def _open(path: Path) -> int:
    """The file, ready to be appended to: a line that a dead process left unfinished is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _HEAD.startswith(os.pread(file, len(_HEAD), 0)):
            raise OSError(f"{path} is no journal, and is left as it is")
        size = os.fstat(file).st_size
        if (end := _end_of_lines(file, size)) < size:
            os.ftruncate(file, end)
    except OSError:
        os.close(file)
        raise
    return file


def _end_of_lines(file: int, size: int) -> int:
    """Where the last complete line ends; 0 if there is none."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _summary_writer(folder: Path) -> ScalarWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingDependency("tensorboard", "A journal for TensorBoard", "tensorboard") from error
    try:
        writer: ScalarWriter = SummaryWriter(str(folder), flush_secs=10)
    except OSError as error:
        log.warning("Nothing is written for TensorBoard; training goes on. %s", error)
        return None
    return writer


def _setting(state: RunState) -> dict[str, float]:
    factors = state.learning_rate_factors
    names = (
        ["learning_rate_factor"] if len(factors) == 1 else [f"learning_rate_factor/{g}" for g in range(len(factors))]
    )
    return {"batch_size": state.batch.batch_size, **dict(zip(names, factors, strict=True))}


def _has_moved(before: tuple[float, ...], after: tuple[float, ...]) -> bool:
    if len(before) != len(after):
        return True
    return any(abs(new - old) > SILENT_CHANGE * abs(old) for old, new in zip(before, after, strict=True))
