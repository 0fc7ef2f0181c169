"""The event log in SQLite: what must survive, who may write, what is found after damage."""

import logging
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import zlib
from contextlib import closing, contextmanager

import pytest

from pollux.core import JobId, JobPaused, JobResumed, JobSpec, JobSubmitted, NodeId, NodeLost, Progress, RoundDue, dumps
from pollux.errors import Permanent
from pollux.scheduler import Record, Scheduler
from pollux.service import schema, store
from pollux.service.store import SqliteLog, StoredEvent
from pollux.testing import StoreContract
from pollux.testing.stores import RECORDS
from pollux.wire.entries import BatchSetting, CheckpointSaved, RunState

VERSION_1 = r"""
CREATE TABLE records (number INTEGER PRIMARY KEY, document TEXT NOT NULL);
INSERT INTO records VALUES (1, '{"body":{"event":{"body":{"cause":"","spec":{"command":["python","a.py"],"id":"é1"}},"type":"JobSubmitted"},"time_s":0.5},"schema":1,"type":"Record"}');
INSERT INTO records VALUES (2, '{"body":{"event":{"body":{"cause":"timer","round":1},"type":"RoundDue"},"time_s":0.30000000000000004},"schema":1,"type":"Record"}');
INSERT INTO records VALUES (3, '{"body":{"event":{"body":{"cause":"","node":"a"},"type":"NodeLost"},"time_s":1000000000.0},"schema":1,"type":"Record"}');
INSERT INTO records VALUES (4, '{"body":{"event":{"body":{"cause":"","job":"é1"},"type":"JobPaused"},"time_s":1000000000.0},"schema":1,"type":"Record"}');
PRAGMA application_id = 1347374168;
PRAGMA user_version = 1;
"""  # noqa: E501
"""A file as the first version wrote it. Never changed: it stands for the files that exist."""

RECORDS_OF_VERSION_1 = (
    Record(0.5, JobSubmitted(JobSpec(JobId("é1"), command=("python", "a.py")))),
    Record(0.1 + 0.2, RoundDue(1, cause="timer")),
    Record(1e9, NodeLost(NodeId("a"))),
    Record(1e9, JobPaused(JobId("é1"))),
)

NOTICE = CheckpointSaved(1.5, RunState(7, Progress(7.0, 10.0), 1, BatchSetting(8, 8), (1.0,), 0, 56), "step-7")

WRITER = """
import itertools, pathlib, sys
from pollux.core import RoundDue
from pollux.scheduler import Record, Scheduler
from pollux.service.store import SqliteLog

log = SqliteLog(pathlib.Path(sys.argv[1]))
scheduler = Scheduler(log)
for number in itertools.count(log.last_number + 1):
    log.append(Record(float(number), RoundDue(number)))
    if number % 50 == 0:
        scheduler.save()
        log.prune(number - 120.0)
    print(number, flush=True)
"""
"""Appends as fast as it can and says each number when `append` has returned."""


class TestSqliteLog(StoreContract):
    """A crash is a copy of the files as they are at that moment; the memory that the processes share is lost."""

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path):
        self.folder, self.logs = tmp_path, []
        yield
        for log in self.logs:
            log.close()

    def make(self):
        self.logs.append(SqliteLog(self.folder / f"{len(self.logs)}.db"))
        return self.logs[-1]

    def reopen(self, log):
        new = self.folder / f"{len(self.logs)}.db"
        for ending in ("", "-wal"):
            # By another process: to open and close the file here would drop SQLite's locks on it.
            subprocess.run(["cp", f"{log.path}{ending}", f"{new}{ending}"], check=True)
        return self.make()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pollux.db"


@pytest.fixture
def log(path):
    with SqliteLog(path) as log:
        yield log


@contextmanager
def running(script, *arguments):
    """Another process with this script; killed at the end."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def rounds(log, *numbers):
    for number in numbers:
        log.append(Record(float(number), RoundDue(number)))


def saved_after(log, *numbers):
    """Rounds, and the state after them saved."""
    scheduler = Scheduler(log)
    for number in numbers:
        scheduler.handle(RoundDue(number), float(number))
    scheduler.save()
    return scheduler.state


def damage(path, change, *values):
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(change, values).rowcount > 0


def numbers_of_snapshots(path):
    with closing(sqlite3.connect(path)) as db:
        return [number for (number,) in db.execute("SELECT number FROM snapshots ORDER BY number")]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


class TestCrashes:
    @pytest.mark.parametrize("seed", range(3))
    def test_every_number_that_a_killed_process_has_told_is_there(self, path, seed):
        told = 0
        for lines in random.Random(seed).sample(range(1, 150), 3):
            with running(WRITER, path) as writer:
                for _ in range(lines):
                    told = int(writer.stdout.readline())
                writer.send_signal(signal.SIGKILL)
                told = max([told, *(int(line) for line in writer.stdout if line.endswith("\n"))])
            with SqliteLog(path) as log:
                assert log.last_number in (told, told + 1)
                kept = [record.event.round for record in log.records()]
                assert kept == list(range(kept[0], log.last_number + 1))
                assert kept[0] <= max(1, told - 119)
            with closing(sqlite3.connect(path)) as db:
                assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    def test_every_commit_is_synced(self, log):
        assert log._db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert log._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)

    def test_a_file_that_was_only_created_is_a_new_log(self, path):
        path.touch()
        with SqliteLog(path) as log:
            assert log.last_number == 0


class TestWriters:
    def test_a_second_writer_is_refused(self, log, path):
        with pytest.raises(Permanent, match=r"pollux.db is being written to by another process. .*pollux down"):
            SqliteLog(path)
        rounds(log, 1)

    def test_a_writer_in_another_process_is_refused(self, path):
        with running(WRITER, path) as writer:
            writer.stdout.readline()
            with pytest.raises(Permanent, match=r"pollux.db is being written to"):
                SqliteLog(path)

    def test_a_closed_one_lets_another_in(self, log, path):
        log.close()
        log.close()
        SqliteLog(path).close()

    def test_a_child_that_outlives_a_killed_writer_does_not_hold_the_lock(self, path):
        script = """
import os, pathlib, sys, time
from pollux.service.store import SqliteLog

log = SqliteLog(pathlib.Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(100)
"""
        with running(script, path) as writer:
            child = int(writer.stdout.readline())
            try:
                writer.kill()
                writer.wait()
                SqliteLog(path).close()
            finally:
                os.kill(child, signal.SIGKILL)

    def test_one_that_could_not_be_opened_does_not_hold_the_lock(self, path):
        path.write_bytes(b"no database" * 100)
        with pytest.raises(Permanent):
            SqliteLog(path)
        path.unlink()
        SqliteLog(path).close()

    def test_only_the_owner_may_read_the_files(self, path):
        path.touch(0o644)
        with SqliteLog(path) as log:
            rounds(log, 1)
            files = list(path.parent.iterdir())
            names = {f"pollux.db{ending}" for ending in ("", "-wal", "-shm", ".lock")} | {"pollux.last"}
            assert {file.name for file in files} == names
            assert {mode(file) for file in files} == {0o600}


class TestReaders:
    def test_a_reader_sees_what_is_written_meanwhile(self, log, path):
        with SqliteLog(path, read_only=True) as reader:
            assert list(reader.records()) == []
            for record in RECORDS:
                log.append(record)
            assert tuple(reader.records()) == RECORDS
            assert reader.last_number == len(RECORDS)

    def test_a_reader_cannot_write(self, log, path):
        with SqliteLog(path, read_only=True) as reader:
            with pytest.raises(Permanent, match="readonly"):
                rounds(reader, 1)
            with pytest.raises(Permanent, match="readonly"):
                reader.put("key", "value")
        assert log.last_number == 0

    def test_a_reader_may_come_when_nobody_writes(self, log, path):
        rounds(log, 1)
        log.close()
        with SqliteLog(path, read_only=True) as reader:
            assert reader.last_number == 1

    def test_an_unfinished_read_does_not_keep_the_log_from_growing_or_changing(self, log, monkeypatch):
        monkeypatch.setattr(store, "BATCH", 2)
        rounds(log, 1, 2, 3)
        reading = log.records()
        assert next(reading).event == RoundDue(1)
        rounds(log, 4, 5)
        assert [record.event.round for record in reading] == [2, 3, 4, 5]

    def test_a_reader_needs_a_file(self, path):
        with pytest.raises(Permanent, match=r"pollux.db cannot be used: unable to open"):
            SqliteLog(path, read_only=True)
        assert not path.exists()

    def test_a_reader_does_not_migrate(self, path):
        with closing(sqlite3.connect(path)) as db:
            db.executescript(VERSION_1)
        with pytest.raises(Permanent, match=r"has schema 1, and only the service may bring it to 2. .*pollux up"):
            SqliteLog(path, read_only=True)


class TestEvents:
    def test_a_notice_is_numbered_like_a_record_and_never_replayed(self, log):
        rounds(log, 1)
        log.note(1.5, NOTICE, JobId("a"))
        rounds(log, 2)
        assert log.last_number == 3
        assert [record.event.round for record in log.records()] == [1, 2]
        assert [record.event.round for record in log.records(after=2)] == [2]
        assert log.events() == [
            StoredEvent(1, 1.0, "RoundDue", "", RoundDue(1)),
            StoredEvent(2, 1.5, "CheckpointSaved", "a", NOTICE),
            StoredEvent(3, 2.0, "RoundDue", "", RoundDue(2)),
        ]

    def test_events_are_found_by_job_and_by_number(self, log):
        a, b = JobId("a"), JobId("b")
        submitted = JobSubmitted(JobSpec(a))
        log.append(Record(0.0, submitted))
        rounds(log, 2, 3)
        log.append(Record(4.0, JobPaused(b)))
        log.note(5.0, NOTICE, a)
        log.append(Record(6.0, JobResumed(a)))

        def found(**which):
            return [event.number for event in log.events(**which)]

        assert found() == [1, 2, 3, 4, 5, 6]
        assert found(after=2, limit=3) == [3, 4, 5]
        assert found(last=2) == [5, 6]
        assert found(after=5, last=3) == [6]
        assert found(job="a") == [1, 5, 6]
        assert found(job="a", after=1, limit=1) == [5]
        assert found(job="a", last=2) == [5, 6]
        assert found(job="c") == found(after=6) == found(last=0) == []
        assert log.events(job="a", limit=1)[0].document == submitted

    def test_a_damaged_notice_does_not_stop_a_replay(self, log, path):
        rounds(log, 1)
        log.note(1.5, NOTICE, JobId("a"))
        damage(path, "UPDATE records SET document = 'x' WHERE number = 2")
        assert len(list(log.records())) == 1
        with pytest.raises(Permanent, match=r"pollux.db has a record that cannot be read, number 2 "):
            log.events()

    def test_a_damaged_record_stops_a_replay(self, log, path):
        rounds(log, 1, 2)
        damage(path, "UPDATE records SET document = substr(document, 9) WHERE number = 2")
        with pytest.raises(Permanent, match=r"number 2 .*restore a backup"):
            Scheduler(log)

    def test_facts_are_kept(self, log, path):
        assert log.get("seed") is None
        log.put("seed", "1")
        log.put("seed", "é")
        log.close()
        with SqliteLog(path) as again:
            assert again.get("seed") == "é"


class TestSnapshots:
    def test_the_last_two_are_kept(self, log, path):
        for number in (1, 2, 3, 4):
            saved_after(log, number)
        assert numbers_of_snapshots(path) == [3, 4]

    def test_saving_twice_without_news_is_one_snapshot(self, log, path):
        saved_after(log, 1)
        saved_after(log)
        assert numbers_of_snapshots(path) == [1]

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE snapshots SET state = x'00' WHERE number = 4",
            "UPDATE snapshots SET state = substr(state, 1, length(state) - 5) WHERE number = 4",
            "UPDATE snapshots SET state = 'a text' WHERE number = 4",
            f"UPDATE snapshots SET state = x'{zlib.compress(b'{}').hex()}' WHERE number = 4",
        ],
    )
    def test_a_damaged_one_falls_back_on_the_one_before(self, log, path, caplog, change):
        saved_after(log, 1, 2)
        state = saved_after(log, 3, 4)
        rounds(log, 5)
        state.apply(RoundDue(5), 5.0)
        damage(path, change)
        assert log.latest()[0] == 2
        assert "saved after record 4 cannot be read" in caplog.text
        assert Scheduler(log).state == state

    def test_without_a_readable_one_everything_is_replayed(self, log, path, caplog):
        saved_after(log, 1, 2)
        state = saved_after(log, 3)
        damage(path, "UPDATE snapshots SET state = x'00'")
        assert log.latest() is None
        assert "all 3 records are replayed" in caplog.text
        assert Scheduler(log).state == state

    def test_the_next_save_replaces_a_damaged_one_and_not_the_good_one(self, log, path):
        saved_after(log, 1)
        saved_after(log, 2)
        damage(path, "UPDATE snapshots SET state = x'00' WHERE number = 2")
        saved_after(log, 3)
        assert numbers_of_snapshots(path) == [1, 3]
        saved_after(log, 4)
        assert numbers_of_snapshots(path) == [3, 4]

    def test_a_failed_save_leaves_the_ones_before(self, log, path):
        saved_after(log, 1)
        saved_after(log, 2)
        rounds(log, 3)
        log._db.execute("CREATE TRIGGER fails BEFORE DELETE ON snapshots BEGIN SELECT RAISE(ABORT, 'no'); END")
        with pytest.raises(Permanent):
            log.save(Scheduler(log).state.saved())
        assert numbers_of_snapshots(path) == [1, 2]
        rounds(log, 4)


class TestPruning:
    def test_only_what_both_snapshots_include_is_dropped(self, log):
        saved_after(log, 1, 2, 3)
        state = saved_after(log, 4, 5)
        rounds(log, 6)
        state.apply(RoundDue(6), 6.0)
        assert log.prune(before_s=100.0) == 3
        assert [event.number for event in log.events()] == [4, 5, 6]
        assert Scheduler(log).state == state

    def test_only_what_is_older_is_dropped_notices_too(self, log):
        rounds(log, 1)
        log.note(1.5, NOTICE, JobId("a"))
        rounds(log, 2)
        saved_after(log)
        saved_after(log, 3)
        assert log.prune(before_s=2.0) == 2
        assert [event.number for event in log.events()] == [3, 4]
        assert log.prune(before_s=2.0) == 0

    def test_nothing_is_dropped_without_two_readable_snapshots(self, log, path, caplog):
        rounds(log, 1)
        assert log.prune(100.0) == 0
        saved_after(log, 2)
        assert log.prune(100.0) == 0
        saved_after(log, 3)
        damage(path, "UPDATE snapshots SET state = x'00' WHERE number = 3")
        assert log.prune(100.0) == 0
        assert "cannot be read" in caplog.text

    @pytest.mark.parametrize("damaged", [3, 5])
    def test_either_snapshot_is_enough_afterwards(self, log, path, damaged):
        saved_after(log, 1, 2, 3)
        state = saved_after(log, 4, 5)
        log.prune(100.0)
        damage(path, "UPDATE snapshots SET state = x'00' WHERE number = ?", damaged)
        assert Scheduler(log).state == state

    def test_without_any_the_log_is_refused_rather_than_half_replayed(self, log, path):
        saved_after(log, 1)
        saved_after(log, 2)
        log.prune(100.0)
        damage(path, "UPDATE snapshots SET state = x'00'")
        with pytest.raises(Permanent, match=r"no saved state that can be read, .*Restore a backup"):
            Scheduler(log)

    def test_numbers_go_on_when_all_records_are_dropped(self, log, path):
        rounds(log, 1, 2)
        saved_after(log)
        log.append(Record(3.0, RoundDue(3)))
        saved_after(log)
        log.prune(100.0)
        damage(path, "DELETE FROM records")
        assert log.last_number == 3
        rounds(log, 4)
        assert log.events()[0].number == 4


class TestBackup:
    def test_a_copy_can_be_used_in_place_of_it(self, log, path):
        state = saved_after(log, 1, 2)
        log.put("seed", "1")
        copy = path.with_name("copy.db")
        log.backup(copy)
        rounds(log, 3)
        assert mode(copy) == 0o600
        assert not list(path.parent.glob("copy.db?*"))
        with SqliteLog(copy) as back:
            assert back.last_number == 2
            assert back.get("seed") == "1"
            assert Scheduler(back).state == state

    def test_it_is_whole_while_another_process_writes(self, path):
        with running(WRITER, path) as writer:
            for number in range(20):
                told = int(writer.stdout.readline())
                copy = path.with_name(f"copy{number}.db")
                with SqliteLog(path, read_only=True) as reader:
                    reader.backup(copy)
                with SqliteLog(copy, read_only=True) as back:
                    kept = [record.event.round for record in back.records()]
                    assert back.last_number >= told
                    assert kept == list(range(kept[0], back.last_number + 1))

    def test_nothing_is_overwritten(self, log, path):
        with pytest.raises(Permanent, match=r"pollux.db exists already. Give the backup another name."):
            log.backup(path)

    def test_a_failed_one_leaves_nothing(self, log, path, monkeypatch):
        with pytest.raises(Permanent, match=r"copy.db cannot be used: No such file or directory"):
            log.backup(path.with_name("nowhere") / "copy.db")

        def full(old, new):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(path), "rename", full)
        with pytest.raises(Permanent, match="No space left"):
            log.backup(path.with_name("copy.db"))
        assert not list(path.parent.glob("copy.db*"))


class TestFiles:
    def test_what_is_no_database_is_refused_and_left_alone(self, path):
        path.write_bytes(b"no database" * 100)
        path.chmod(0o644)
        with pytest.raises(Permanent, match=r"pollux.db cannot be used: file is not a database. .*Restore a backup"):
            SqliteLog(path)
        assert path.read_bytes() == b"no database" * 100
        assert mode(path) == 0o644

    def test_a_database_of_somebody_else_is_refused_and_left_alone(self, path):
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE theirs (x)")
        before = path.read_bytes()
        with pytest.raises(Permanent, match=r"pollux.db is a database of another program"):
            SqliteLog(path)
        assert path.read_bytes() == before

    def test_a_newer_schema_is_refused(self, log, path):
        log.close()
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version = 99")
        for read_only in (False, True):
            with pytest.raises(Permanent, match=r"has schema 99, and this version of Pollux knows 2. Use the version"):
                SqliteLog(path, read_only=read_only)

    def test_damaged_pages_are_told(self, log, path):
        rounds(log, *range(1, 200))
        log.close()
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (path.stat().st_size - 4096))
        with pytest.raises(Permanent, match=r"malformed. It is damaged. Restore a backup"), SqliteLog(path) as damaged:
            list(damaged.records())

    def test_a_file_that_another_program_holds_locked_is_told(self, log, path, monkeypatch):
        log.close()
        monkeypatch.setattr(store, "BUSY_TIMEOUT_S", 0.0)
        with SqliteLog(path) as log, closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(Permanent, match=r"database is locked. Another program holds it locked"):
                rounds(log, 1)
            other.execute("ROLLBACK")
            rounds(log, 1)

    def test_a_full_disk_is_told_and_the_record_is_not_there(self, log):
        (pages,) = log._db.execute("PRAGMA page_count").fetchone()
        log._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(Permanent, match=r"is full. Make room on the disk."):
            log.append(Record(0.0, RoundDue(1, cause="x" * 100_000)))
        assert log.last_number == 0
        rounds(log, 1)

    def test_a_number_that_somebody_took_is_told(self, log, path, monkeypatch):
        rounds(log, 1)
        monkeypatch.setattr(SqliteLog, "last_number", 0)
        with pytest.raises(Permanent, match="Another program has written to it"):
            rounds(log, 1)

    @pytest.mark.parametrize("name", ["nowhere/pollux.db", "folder"])
    def test_a_place_where_it_cannot_be_is_told(self, tmp_path, name):
        folder = tmp_path / "folder"
        folder.mkdir(mode=0o755)
        with pytest.raises(Permanent, match=r"cannot be used: .* folder that you may write to"):
            SqliteLog(tmp_path / name)
        assert mode(folder) == 0o755


class TestMigration:
    @pytest.fixture
    def old(self, path):
        with closing(sqlite3.connect(path)) as db:
            db.executescript(VERSION_1)
        return path

    @staticmethod
    def dump(path):
        with closing(sqlite3.connect(path)) as db:
            return [*db.iterdump(), db.execute("PRAGMA user_version").fetchone()]

    def test_a_file_of_version_1_gets_the_newest_schema_with_all_its_records(self, old):
        with SqliteLog(old) as log:
            assert tuple(log.records()) == RECORDS_OF_VERSION_1
            assert [(event.number, event.at_s, event.kind, event.job) for event in log.events()] == [
                (1, 0.5, "JobSubmitted", "é1"),
                (2, 0.1 + 0.2, "RoundDue", ""),
                (3, 1e9, "NodeLost", ""),
                (4, 1e9, "JobPaused", "é1"),
            ]
            assert [event.number for event in log.events(job="é1")] == [1, 4]
            log.note(2e9, NOTICE, JobId("é1"))
            saved_after(log)
            assert log.last_number == 5

    def test_it_has_the_same_tables_as_a_new_one(self, old, tmp_path):
        def tables(path):
            SqliteLog(path).close()
            with closing(sqlite3.connect(path)) as db:
                return db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()

        assert tables(old) == tables(tmp_path / "new.db")

    def test_an_interrupted_one_leaves_the_file_as_it_was(self, old, monkeypatch):
        before = self.dump(old)

        def interrupted(db):
            schema._describe_records(db)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", (schema.MIGRATIONS[0], interrupted))
            with pytest.raises(KeyboardInterrupt):
                SqliteLog(old)
        assert self.dump(old) == before
        with SqliteLog(old) as log:
            assert tuple(log.records()) == RECORDS_OF_VERSION_1

    def test_a_process_killed_in_the_middle_leaves_the_file_as_it_was(self, old):
        before = self.dump(old)
        script = """
import os, pathlib, signal, sys
from pollux.service import schema
from pollux.service.store import SqliteLog

def killed(db):
    schema._describe_records(db)
    os.kill(os.getpid(), signal.SIGKILL)

schema.MIGRATIONS = (schema.MIGRATIONS[0], killed)
SqliteLog(pathlib.Path(sys.argv[1]))
"""
        assert subprocess.run([sys.executable, "-c", script, old]).returncode == -signal.SIGKILL
        assert self.dump(old) == before
        with SqliteLog(old) as log:
            assert tuple(log.records()) == RECORDS_OF_VERSION_1

    def test_a_record_that_cannot_be_read_is_told_and_the_file_is_left_as_it_was(self, old):
        damage(old, "UPDATE records SET document = 'x' WHERE number = 3")
        before = self.dump(old)
        with pytest.raises(Permanent, match=r"pollux.db has a record that cannot be read .*Restore a backup"):
            SqliteLog(old)
        assert self.dump(old) == before


def test_documents_are_those_of_the_codec(log, path):
    log.append(RECORDS[0])
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT document FROM records").fetchall() == [(dumps(RECORDS[0]),)]


def test_nothing_is_warned_of_in_a_healthy_log(log, caplog):
    caplog.set_level(logging.DEBUG)
    saved_after(log, 1)
    saved_after(log, 2)
    log.prune(100.0)
    Scheduler(log)
    assert caplog.records == []
