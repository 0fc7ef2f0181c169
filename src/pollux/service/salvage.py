"""A damaged log file: what can be read of it becomes a new one, and the damaged one is kept beside it.

Of use is what leads to a state: a saved one, or none, and the records after it, up to the first that cannot be read,
for what follows was decided upon it. The jobs of the part that is lost are taken up from their own files
(`service.ledger`) and from the daemons.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

from pollux.service.schema import DamagedLog
from pollux.service.store import SqliteLog

log = logging.getLogger(__name__)

_COLUMNS = "number, document, at_s, kind, job, is_notice"


def opened(path: Path) -> SqliteLog:
    """The log in that file; a damaged one is replaced by what can be read of it, and the log says so."""
    try:
        return _checked(path)
    except DamagedLog as damage:
        aside = _set_aside(path)
        log.error("%s It is kept as %s; what can be read of it goes into a new one.", damage, aside)
        new = SqliteLog(path)
        try:
            _copy(aside, new)
        except BaseException:
            new.close()
            raise
        return new


def _checked(path: Path) -> SqliteLog:
    opened_log = SqliteLog(path)
    try:
        opened_log.check()
    except BaseException:
        opened_log.close()
        raise
    return opened_log


def _set_aside(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}.damaged{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    for ending in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + ending).rename(aside.with_name(aside.name + ending))
    return aside


def _copy(damaged: Path, new: SqliteLog) -> None:
    with closing(sqlite3.connect(damaged, isolation_level=None)) as old, suppress(sqlite3.DatabaseError):
        old.execute("PRAGMA writable_schema = ON")  # else SQLite refuses a truncated file
        snapshots = [row for row in _rows(old, "snapshots", "number, state") if _is_whole(row[1])]
        saved = max((number for number, _ in snapshots), default=0)
        before, after = list(_records(old, count(saved, -1))), list(_records(old, count(saved + 1)))
        # No gap between a state and the records after it.
        useful = [row for row in snapshots if row[0] >= saved - len(before)]
        new.fill([*reversed(before), *after], useful, list(_rows(old, "facts", "key, value")))
        log.warning("%d records and %d saved states were read from %s.", len(before) + len(after), len(useful), damaged)


def _is_whole(state: bytes) -> bool:
    try:
        zlib.decompress(state)
    except (zlib.error, TypeError):
        return False
    return True


def _is_json(document: str) -> bool:
    try:
        json.loads(document)
    except ValueError:
        return False
    return True


def _records(db: sqlite3.Connection, numbers: Iterable[int]) -> Iterator[Any]:
    """Those of these numbers, up to the first that cannot be read."""
    for number in numbers:
        row = _row(db, "records", _COLUMNS, number)
        if row is None or not _is_json(row[1]):
            return
        yield row


def _rows(db: sqlite3.Connection, table: str, columns: str) -> list[Any]:
    """All that are found from either end of a small table, but for those that cannot be read themselves."""
    found = set[int]()
    for order in ("ASC", "DESC"):
        with suppress(sqlite3.DatabaseError):
            for (rowid,) in db.execute(f"SELECT rowid FROM {table} NOT INDEXED ORDER BY rowid {order}"):
                found.add(rowid)
    rows = (_row(db, table, columns, rowid) for rowid in sorted(found))
    return [row for row in rows if row is not None]


def _row(db: sqlite3.Connection, table: str, columns: str, rowid: int) -> Any:
    """None: there is none, or it lies on a page that cannot be read."""
    with suppress(sqlite3.DatabaseError):
        return db.execute(f"SELECT {columns} FROM {table} WHERE rowid = ?", (rowid,)).fetchone()
    return None
