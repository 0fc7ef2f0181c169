"""The SQLite file of the service: what is in it, version by version, and how an older file becomes a newer one.

A new file takes every step from nothing, so the steps are the only description of the tables. A step that was released
is never changed; another one follows it.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pollux.core import Event, loads
from pollux.errors import DiskFull, InvalidDocument, Permanent
from pollux.node.folder import is_full
from pollux.scheduler import Record

APPLICATION_ID = 0x504F4C58
"""In the header of our files ("POLX"): a database of somebody else is never touched."""

_RESTORE = "Restore a backup, or move it away to begin with an empty log"
_ADVICE = {
    "SQLITE_NOTADB": f"It is no event log of Pollux, or it is damaged. {_RESTORE}",
    "SQLITE_CORRUPT": f"It is damaged. {_RESTORE}",
    "SQLITE_BUSY": "Another program holds it locked. Close that program",
    "SQLITE_FULL": "Make room on the disk",
    "SQLITE_CANTOPEN": "Check that it is a file in a folder that you may write to",
    "SQLITE_READONLY": "Check that you may write to it and to its folder",
    "SQLITE_CONSTRAINT": "Another program has written to it. Close that program, then start the service again",
}


class DamagedLog(Permanent):
    """What is in the file is not what SQLite wrote there."""


def _keep_records(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE records (number INTEGER PRIMARY KEY, document TEXT NOT NULL)")


def _describe_records(db: sqlite3.Connection) -> None:
    """Notices beside the records, both to be found by job; saved states; facts."""
    for column in ("at_s REAL NOT NULL DEFAULT 0", "kind TEXT NOT NULL DEFAULT ''", "job TEXT NOT NULL DEFAULT ''"):
        db.execute(f"ALTER TABLE records ADD COLUMN {column}")
    db.execute("ALTER TABLE records ADD COLUMN is_notice INTEGER NOT NULL DEFAULT 0")
    for (number,) in db.execute("SELECT number FROM records").fetchall():
        (document,) = db.execute("SELECT document FROM records WHERE number = ?", (number,)).fetchone()
        record = loads(document, Record)
        described = record.time_s, type(record.event).__name__, job_of(record.event), number
        db.execute("UPDATE records SET at_s = ?, kind = ?, job = ? WHERE number = ?", described)
    db.execute("CREATE INDEX records_by_job ON records (job)")
    db.execute("CREATE TABLE snapshots (number INTEGER PRIMARY KEY, state BLOB NOT NULL)")
    db.execute("CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL)")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_keep_records, _describe_records)
"""The n-th makes a file of version n out of one of version n - 1."""


def job_of(event: Event) -> str:
    """The job that it is about; empty if it is not about one."""
    return getattr(event, "job", "")


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """Which version the file has; 0: nothing is in it yet. Files that we must not write to are refused."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (application or version or tables):
        raise Permanent(f"{path} is a database of another program. Give another folder with --dir.")
    if version > len(MIGRATIONS):
        raise Permanent(
            f"{path} has schema {version}, and this version of Pollux knows {len(MIGRATIONS)}. "
            "Use the version of Pollux that wrote it, or a newer one."
        )
    return int(version)


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Bring the file to the newest version, in one transaction: after a failure it is as it was."""
    version = version_of(db, path)
    if version == len(MIGRATIONS):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for step in MIGRATIONS[version:]:
            step(db)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        db.execute("COMMIT")
    except InvalidDocument as error:
        raise Permanent(f"{path} has a record that cannot be read ({error}) {_RESTORE}.") from error
    finally:
        db.rollback()  # nothing to do after a commit


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Let errors of SQLite and of the file system name the file and what to do."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a bug of ours: no state of the file explains it
    except sqlite3.DatabaseError as error:
        # Extended codes (SQLITE_IOERR_WRITE) begin with the name of their group. Text that is no UTF-8 has no code.
        name = getattr(error, "sqlite_errorname", "SQLITE_CORRUPT")
        group = "_".join(name.split("_")[:2])
        advice = _ADVICE.get(group, "Check the disk and the system's log")
        kind: type[Permanent] = Permanent
        if group == "SQLITE_FULL" or is_full(path):
            kind, advice = DiskFull, _ADVICE["SQLITE_FULL"]
        elif group in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
            kind = DamagedLog
        raise kind(f"{path} cannot be used: {error}. {advice}.") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path} cannot be used: {error.strerror}. {_ADVICE['SQLITE_FULL']}.") from error
        raise Permanent(f"{path} cannot be used: {error.strerror}. {_ADVICE['SQLITE_CANTOPEN']}.") from error
