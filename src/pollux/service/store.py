"""The event log in one SQLite file: records, agents' notices, saved states, and small facts of the service.

A record is on the disk when `append` returns (write-ahead log, synchronous=FULL): it survives kill -9 at any point, and
a loss of power as far as the disk keeps what fsync promised. docs/decisions/0007-live-service.md has the measurements.

One process writes at a time; others may read meanwhile. An object belongs to the thread that made it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pollux.core import Event, JobId, dumps, loads
from pollux.errors import InvalidDocument, Permanent
from pollux.scheduler import Record, SavedState
from pollux.service import schema
from pollux.service.high_water import HighWaterMark
from pollux.service.schema import DamagedLog, clear_errors
from pollux.wire.entries import JournalEntry

KEPT_SNAPSHOTS = 2
"""The newest, and one to fall back on if that cannot be read."""
BUSY_TIMEOUT_S = 5.0
"""How long another program may hold the file locked before a call gives up."""
WAL_BYTES = 16 * 2**20
"""The write-ahead log is cut back to this after a burst."""
BATCH = 500
"""Records read at a time. No transaction stays open between two batches: it would keep the log from being cut."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event that the scheduler handled, or one notice of an agent."""

    number: int
    at_s: float
    kind: str
    """The name of its class."""
    job: str
    """Empty if it is not about one."""
    document: Event | JournalEntry


class SqliteLog:
    """An `EventLog` in a file. Records and notices share one sequence of numbers without gaps; pruning makes some."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open it; make it (mode 0600) or bring it to the newest schema if need be. Read-only ones do neither."""
        self.path = path
        self._unreadable: set[int] = set()  # numbers of snapshots
        self._lock = None if read_only else _lock(path)
        try:
            with clear_errors(path):
                self._db = _open_read_only(path) if read_only else _open(path)
        except BaseException:
            if self._lock is not None:
                self._lock.close()
            raise
        self._mark = None if read_only else HighWaterMark(path.with_suffix(".last"))
        self.num_lost = 0
        """Records that were there once and are missing at the end of the log, as it was opened."""
        if self._mark is not None:
            self.num_lost = max(self._mark.read() - self.last_number, 0)
            self._mark.write(self.last_number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another writer in. May be called again."""
        self._db.close()
        if self._mark is not None:
            self._mark.close()
        if self._lock is not None:
            self._lock.close()

    @property
    def last_number(self) -> int:
        """The number of the latest record or notice; 0: there is none."""
        with clear_errors(self.path):
            newest = "SELECT max(number) FROM records UNION ALL SELECT max(number) FROM snapshots"
            return max(number or 0 for (number,) in self._db.execute(newest))

    def check(self) -> None:
        """`DamagedLog` if a page does not fit the others, or a record is no text, or no JSON. Reads all of it."""
        with clear_errors(self.path):
            (answer,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if answer != "ok":
                raise DamagedLog(f"{self.path} is damaged: {answer}.")
            rows = self._db.execute("SELECT number, kind, job, document, json_valid(document) FROM records")
            for number, _, _, _, is_valid in rows:
                if not is_valid:
                    raise DamagedLog(f"{self.path} is damaged: record {number} is no JSON.")

    def fill(self, records: Iterable[Any], snapshots: Iterable[Any], facts: Iterable[Any]) -> None:
        """Put rows of another file into this one, which is new."""
        with clear_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                columns = "number, document, at_s, kind, job, is_notice"
                self._db.executemany(f"INSERT INTO records ({columns}) VALUES (?, ?, ?, ?, ?, ?)", records)
                self._db.executemany("INSERT INTO snapshots VALUES (?, ?)", snapshots)
                self._db.executemany("INSERT INTO facts VALUES (?, ?)", facts)
                self._db.execute("COMMIT")
            finally:
                self._db.rollback()  # nothing to do after a commit
        if self._mark is not None:
            self.num_lost -= self.last_number
            self._mark.write(self.last_number)

    def append(self, record: Record) -> None:
        self._insert(record.time_s, record.event, schema.job_of(record.event), dumps(record), is_notice=False)

    def note(self, at_s: float, entry: JournalEntry, job: JobId) -> None:
        """Keep an agent's notice, as durably as a record. It is numbered like one and never replayed."""
        self._insert(at_s, entry, job, dumps(entry), is_notice=True)

    def records(self, after: int = 0) -> Iterator[Record]:
        query = "SELECT number, document FROM records WHERE number > ? AND NOT is_notice ORDER BY number LIMIT ?"
        while True:
            with clear_errors(self.path):
                rows = self._db.execute(query, (after, BATCH)).fetchall()
            for number, document in rows:
                yield self._read(number, document, Record)
            if len(rows) < BATCH:
                return
            after = rows[-1][0]

    def events(
        self, after: int = 0, limit: int = 1000, job: str | None = None, *, last: int | None = None
    ) -> list[StoredEvent]:
        """Records and notices with a number above `after`, oldest first: the first `limit` of them, or the `last`."""
        where, values = ("number > ?", [after]) if job is None else ("number > ? AND job = ?", [after, job])
        order, count = ("ASC", limit) if last is None else ("DESC", last)
        columns = "number, at_s, kind, job, document, is_notice"
        query = f"SELECT {columns} FROM records WHERE {where} ORDER BY number {order} LIMIT ?"
        with clear_errors(self.path):
            rows = self._db.execute(query, [*values, count]).fetchall()
        return [
            StoredEvent(number, at_s, kind, about, self._document(number, document, is_notice))
            for number, at_s, kind, about, document, is_notice in sorted(rows)
        ]

    def save(self, saved: SavedState) -> None:
        state = zlib.compress(dumps(saved).encode(), 1)  # also carries a checksum
        with clear_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for number in self._unreadable:
                    self._db.execute("DELETE FROM snapshots WHERE number = ?", (number,))
                self._db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (self.last_number, state))
                newest = "SELECT number FROM snapshots ORDER BY number DESC LIMIT ?"
                self._db.execute(f"DELETE FROM snapshots WHERE number NOT IN ({newest})", (KEPT_SNAPSHOTS,))
                self._db.execute("COMMIT")
            finally:
                self._db.rollback()  # nothing to do after a commit
        self._unreadable.clear()

    def saved_states(self) -> Iterator[tuple[int, SavedState]]:
        """All that are kept and can be read, newest first, each with the number of the last record in it."""
        for number, document in self._snapshots():
            try:
                saved = loads(document, SavedState)
            except InvalidDocument as error:
                self._pass_over(number, error)
            else:
                yield number, saved

    def latest(self) -> tuple[int, SavedState] | None:
        """As the protocol has it. A state that cannot be read is passed over, with a warning in the log."""
        for number, saved in self.saved_states():
            return number, saved
        if self._unreadable:
            with clear_errors(self.path):
                (kept,) = self._db.execute("SELECT count(*) FROM records").fetchone()
            if kept < self.last_number:
                raise Permanent(
                    f"{self.path} has no saved state that can be read, and the records from before were pruned. "
                    "Restore a backup, or move the file away to begin with an empty log."
                )
            log.warning("no saved state can be read: all %d records are replayed", kept)
        return None

    def prune(self, before_s: float) -> int:
        """Drop records and notices from before that time which both of the newest saved states include; how many.

        Both, so that either of them alone leads to the present. The file does not shrink: its pages are used again.
        """
        whole = [number for number, _ in self._snapshots()]
        if len(whole) < KEPT_SNAPSHOTS:
            return 0
        with clear_errors(self.path):
            drop = "DELETE FROM records WHERE number <= ? AND at_s < ?"
            return self._db.execute(drop, (whole[-1], before_s)).rowcount

    def backup(self, path: Path) -> None:
        """Copy everything, as it is at one moment, to a new file of mode 0600; it appears whole or not at all.

        A read-only object in another process (or thread) can do it while the writer goes on.
        """
        if path.exists():
            raise Permanent(f"{path} exists already. Give the backup another name.")
        part = path.with_name(path.name + ".part")
        with clear_errors(path):
            part.unlink(missing_ok=True)
            _create(part)
            try:
                with closing(sqlite3.connect(part, isolation_level=None)) as copy:
                    self._db.backup(copy)
                    copy.execute("PRAGMA journal_mode = DELETE")  # no second file beside it
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def get(self, key: str) -> str | None:
        """A fact that `put` has kept."""
        with clear_errors(self.path):
            row = self._db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, value: str) -> None:
        """Keep a fact, as durably as a record, in place of the one before."""
        with clear_errors(self.path):
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, value))

    def _insert(self, at_s: float, what: Event | JournalEntry, job: str, document: str, *, is_notice: bool) -> None:
        row = (self.last_number + 1, document, at_s, type(what).__name__, job, is_notice)
        with clear_errors(self.path):
            self._db.execute(
                "INSERT INTO records (number, document, at_s, kind, job, is_notice) VALUES (?, ?, ?, ?, ?, ?)", row
            )
        if self._mark is not None:
            self._mark.write(row[0])

    def _snapshots(self) -> Iterator[tuple[int, bytes]]:
        """The documents of the saved states that are whole by their checksums, newest first."""
        with clear_errors(self.path):
            numbers = self._db.execute("SELECT number FROM snapshots ORDER BY number DESC").fetchall()
        for (number,) in numbers:
            if number in self._unreadable:
                continue
            try:
                query = "SELECT CAST(state AS BLOB) FROM snapshots WHERE number = ?"
                (state,) = self._db.execute(query, (number,)).fetchone()
                document = zlib.decompress(state)
            except (sqlite3.DatabaseError, zlib.error) as error:
                self._pass_over(number, error)
            else:
                yield number, document

    def _pass_over(self, number: int, error: Exception) -> None:
        log.warning("the state saved after record %d cannot be read and is passed over: %s", number, error)
        self._unreadable.add(number)

    def _document(self, number: int, document: str, is_notice: int) -> Event | JournalEntry:
        stored = self._read(number, document, JournalEntry if is_notice else Record)
        return stored.event if isinstance(stored, Record) else stored

    def _read(self, number: int, document: str, kind: Any) -> Any:
        try:
            return loads(document, kind)
        except InvalidDocument as error:
            raise Permanent(
                f"{self.path} has a record that cannot be read, number {number} ({error}) "
                "Use the version of Pollux that wrote it, or restore a backup."
            ) from error


def _lock(path: Path) -> sqlite3.Connection:
    """Be the only writer until it is closed or the process ends.

    A lock of SQLite's on a file of its own: children do not inherit it, as they would flock's, and it holds between
    two connections of one process, as plain POSIX locks do not.
    """
    beside = path.with_name(path.name + ".lock")
    with clear_errors(path):
        _create(beside)
        lock = sqlite3.connect(beside, isolation_level=None, timeout=0)
        try:
            lock.execute("PRAGMA journal_mode = OFF")  # nothing is ever written: no second file
            lock.execute("BEGIN EXCLUSIVE")
        except BaseException as error:
            lock.close()
            if getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY":
                fix = "End that one (pollux down), or give another folder with --dir"
                raise Permanent(f"{path} is being written to by another process. {fix}.") from None
            raise
    return lock


def _open(path: Path) -> sqlite3.Connection:
    _create(path)
    db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    try:
        schema.version_of(db, path)  # before anything is written to a file that may not be ours
        path.chmod(0o600)
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise Permanent(f"{path} is on a file system that has no shared memory. Put it on a local disk.")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        schema.migrate(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _open_read_only(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    try:
        version = schema.version_of(db, path)
        if version < len(schema.MIGRATIONS):
            problem = f"has schema {version}, and only the service may bring it to {len(schema.MIGRATIONS)}"
            raise Permanent(f"{path} {problem}. Start the service once (pollux up).")
    except BaseException:
        db.close()
        raise
    return db


def _create(path: Path) -> None:
    """See to it that the file is there; a new one is for its owner only.

    An existing one is not opened: closing it again would drop the locks that this process holds on it.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A new file survives a loss of power only with its entry in the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
