"""A folder of checkpoints: the format on disk, written so that a crash at any moment leaves only whole ones.

    <folder>/checkpoint-000007-step-1200/       the seventh written; the highest number is the newest
        model.pt, optimizer.pt, …               one file a part: torch.load(path, weights_only=True), no Pollux needed
        manifest.json                           version, step, facts, size and SHA-256 of each file, and its own
    <folder>/checkpoint-000006-step-1000.damaged    did not verify when it was to be loaded: set aside, not removed
    <folder>/.writing-…, .removing-…            what a writer that died left over; the next one clears it
    <folder>/.lock                              held while somebody writes

What a checkpoint holds, and when it is written, is the job's business; how it is written without holding up training is
`checkpoint_writer`'s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pollux import __version__
from pollux.agent.manifest import FileFacts, Manifest, UnusableError
from pollux.agent.snapshot import checked, snapshot
from pollux.core import checks
from pollux.errors import CheckpointError, InvalidSpec

__all__ = ["Checkpoints", "Loaded", "Manifest", "snapshot"]

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
DAMAGED = ".damaged"
LEFT_OVER = (".writing-", ".removing-")
NAME = re.compile(r"checkpoint-(\d{6,})-step-(\d+)")
PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that verified, in memory."""

    path: Path
    step: int
    parts: dict[str, Any]
    facts: dict[str, Any]
    created: str
    skipped: tuple[CheckpointError, ...] = ()
    """Newer ones that could not be used, newest first."""


class Checkpoints:
    """The checkpoints of one job. Reading needs no right to write; only one process of a job may write.

    `patience_s`: how long `save` waits for another process of the job that still writes. Threads may share it.
    `now` and `open_file` (a path to a file open for writing) are there for tests.
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 3,
        *,
        patience_s: float = 0.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        open_file: Callable[[Path], BinaryIO] = lambda path: path.open("wb"),
    ) -> None:
        checks.whole(InvalidSpec, "keep", keep, 1)
        self.folder = Path(folder)
        self.keep = keep
        self._patience_s = patience_s
        self._now = now
        self._open = open_file
        self._writing = threading.Lock()

    def list(self) -> tuple[Path, ...]:
        """The checkpoints under their own name, newest last. They may still turn out to be damaged."""
        return tuple(path for path in self._entries() if path.suffix != DAMAGED)

    def check_writable(self) -> None:
        """Makes the folder and tries a small write, so that a job hears at its start what would fail hours later."""
        with self._sole_writer():
            probe = self.folder / f"{LEFT_OVER[0]}probe-{secrets.token_hex(4)}"
            self._write_file(probe, lambda file: file.write(b"probe"))
            probe.unlink()

    def save(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Writes a checkpoint and returns its folder once it would survive a power cut. Blocks for as long as it takes.

        Each part becomes `<name>.pt`; `facts` is JSON. Nothing that training changes meanwhile may be in `parts`: see
        `snapshot`. After a failure (`CheckpointError`) the earlier checkpoints are as they were.
        """
        checks.whole(InvalidSpec, "step", step, 0)
        for name in parts:
            if not PART.fullmatch(name):
                raise InvalidSpec("part", name, "is no file name", "Use letters, digits, - and _")
        states = {name: checked(state, name) for name, state in parts.items()}
        with self._sole_writer(self._patience_s):
            path = self._write(step, states, facts)
            self._remove_old()
        return path

    def verify(self, path: Path) -> Manifest:
        """Reads every byte and returns the manifest. Raises `CheckpointError` with what is wrong first of all."""
        manifest = Manifest.read(path / MANIFEST)
        for name, facts in manifest.files.items():
            facts.verify(path / name)
        return manifest

    def load(self, path: Path, map_location: Any = "cpu") -> Loaded:
        """Verifies and reads one checkpoint. All replicas must load the same one: let rank 0 find it, tell the rest."""
        manifest = self.verify(path)
        parts = {}
        for name in manifest.files:
            try:
                parts[Path(name).stem] = torch.load(path / name, map_location=map_location, weights_only=True)
            except Exception as error:  # torch raises almost anything; the bytes are right, so it is not damage
                reason = str(error).partition("\n")[0] or type(error).__name__
                problem = f"torch {torch.__version__} cannot read it (written by {manifest.torch}): {reason}"
                raise UnusableError(str(path / name), problem, "Use the torch version that wrote it") from error
        return Loaded(path, manifest.step, parts, manifest.facts, manifest.created)

    def load_latest(self, map_location: Any = "cpu") -> Loaded | None:
        """The newest checkpoint that verifies; None if there never was one.

        Every newer one that cannot be used is logged with its path and problem; a damaged one is renamed to `.damaged`
        if the folder allows it. If none is left, raises `CheckpointError`: training must not begin anew unasked.
        """
        entries = self._entries()
        skipped: tuple[CheckpointError, ...] = ()
        for path in reversed(entries):
            if path.suffix == DAMAGED:
                continue
            try:
                return replace(self.load(path, map_location), skipped=skipped)
            except CheckpointError as error:
                skipped += (error,)
                kept = path if isinstance(error, UnusableError) else _set_aside(path)
                log.warning(
                    "checkpoint %s cannot be used, trying the one before: %s It is kept as %s", path, error, kept
                )
        if not entries:
            return None
        problems = [f"{error.path}: {error.problem}" for error in skipped]
        problems += [f"{path}: found damaged before" for path in entries if path.suffix == DAMAGED]
        raise CheckpointError(
            str(self.folder),
            f"none of the {len(entries)} checkpoints can be used ({'; '.join(problems)})",
            "To train from the beginning, remove the folder or give another one",
            is_lasting=True,
        )

    def _entries(self) -> tuple[Path, ...]:
        """Whole and damaged checkpoints, newest last."""
        try:
            return tuple(sorted(filter(number_of, self.folder.iterdir()), key=number_of))
        except FileNotFoundError:
            return ()
        except OSError as error:
            problem = f"cannot be listed: {error.strerror}"
            raise CheckpointError(str(self.folder), problem, "Give a folder that this process may read") from error

    @contextlib.contextmanager
    def _sole_writer(self, patience_s: float = 0.0) -> Iterator[None]:
        """The right to write, with the folder made and what dead writers left over removed. OSErrors get advice."""
        with self._writing, contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.folder / ".lock").open("ab"))
                _take(lock, self.folder, patience_s)
                # Explicitly: a data-loading process forked meanwhile has the file open, too, and would keep the lock.
                stack.callback(_release, lock)
                for path in self.folder.iterdir():
                    if path.name.startswith(LEFT_OVER):
                        _delete(path)
                yield
            except OSError as error:
                raise self._not_written(error) from error

    def _not_written(self, error: OSError) -> CheckpointError:
        problem = f"no checkpoint was written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CheckpointError(str(self.folder), problem, f"Free space there, or keep fewer (keep = {self.keep})")
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR):
            return CheckpointError(str(self.folder), problem, "Give a folder that this process may write")
        return CheckpointError(str(self.folder), problem, "Check the file system of this folder")

    def _write(self, step: int, states: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        number = 1 + max(map(number_of, self._entries()), default=0)
        path = self.folder / f"checkpoint-{number:06d}-step-{step}"
        draft = self.folder / f"{LEFT_OVER[0]}{path.name}-{secrets.token_hex(4)}"
        draft.mkdir()
        try:
            files = {f"{name}.pt": self._write_part(draft / f"{name}.pt", state) for name, state in states.items()}
            manifest = Manifest(step, self._now().isoformat(), dict(facts), files, __version__, str(torch.__version__))
            document = manifest.document()
            self._write_file(draft / MANIFEST, lambda file: file.write(document))
            _sync_folder(draft)
            draft.rename(path)
        except BaseException:
            _delete(draft)
            raise
        _sync_folder(self.folder)
        return path

    def _write_part(self, path: Path, state: Any) -> FileFacts:
        return self._write_file(path, lambda file: torch.save(state, file))

    def _write_file(self, path: Path, write: Callable[[Any], object]) -> FileFacts:
        """Size and SHA-256 of what `write` wrote. It is on the disk when this returns."""
        with self._open(path) as file:
            hashed = _Hashed(file)
            write(hashed)
            if hashed.error is not None:
                raise hashed.error
            file.flush()
            os.fsync(file.fileno())
        return FileFacts(hashed.size, hashed.sha256.hexdigest())

    def _remove_old(self) -> None:
        """Leaves the newest `keep`, and as many damaged ones. Not being able to is no reason to fail."""
        entries = self._entries()
        damaged = [path for path in entries if path.suffix == DAMAGED]
        whole = [path for path in entries if path.suffix != DAMAGED]
        for path in (*whole[: -self.keep], *damaged[: -self.keep]):
            doomed = path.with_name(f"{LEFT_OVER[1]}{path.name}-{secrets.token_hex(4)}")
            try:
                # Renamed first: half of a checkpoint must never stand under its name.
                path.rename(doomed)
            except OSError as error:
                log.warning("the old checkpoint %s could not be removed: %s", path, error)
            else:
                _delete(doomed)


class _Hashed:
    """The face of a file that torch.save needs, with the checksum of what goes through it.

    The first error is kept and the rest of the bytes dropped: an exception inside of torch's writer, which is C++,
    would come out as a RuntimeError about file positions.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self.sha256.update(data)
            self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """torch.save calls it; `_write_file` flushes."""


def number_of(path: Path) -> int:
    """The running number of a checkpoint, from 1; 0 for any other file."""
    name = NAME.fullmatch(path.name.removesuffix(DAMAGED))
    return int(name[1]) if name else 0


def _set_aside(path: Path) -> Path:
    """The new path of a damaged checkpoint; the old one in a folder that cannot be written."""
    aside = path.with_name(path.name + DAMAGED)
    try:
        return path.rename(aside)
    except OSError:
        return path


def _take(lock: BinaryIO, folder: Path, patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(0.1)
    except BlockingIOError as error:
        raise CheckpointError(
            str(folder), "another process is writing a checkpoint here", "Give each job a folder of its own"
        ) from error
    except OSError:
        # A file system without locks. One writer a job is the rule anyway; the lock only catches those who break it.
        log.debug("no locks in %s", folder)


def _release(lock: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)


def _delete(path: Path) -> None:
    """As far as possible: what stays carries a name that is cleared with the next write."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)
