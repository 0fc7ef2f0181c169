"""Damaged log files: what can be read is kept, in order, and the damaged file is not lost."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest

from pollux.core import JobId, JobSpec, JobSubmitted
from pollux.errors import Permanent
from pollux.scheduler import Record, Scheduler
from pollux.service import salvage, serving
from pollux.service.options import ServiceOptions
from pollux.service.place import ClusterFolder
from pollux.service.store import SqliteLog

COUNT = 200


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pollux.db"


@pytest.fixture(scope="module")
def fill(tmp_path_factory):
    """`fill(path, save_at)`: a log of that many jobs; made once, as each record waits for the disk."""
    made = {}

    def make(save_at):
        path = tmp_path_factory.mktemp("log") / "pollux.db"
        with SqliteLog(path) as log:
            scheduler = Scheduler(log)
            for number in range(1, COUNT + 1):
                scheduler.handle(JobSubmitted(JobSpec(JobId(f"j-{number}"), name="x" * 100)), float(number))
                if number in save_at:
                    scheduler.save()
            log.put("home/j-1", "1 n0")
        return path

    def fill(path, save_at=()):
        if save_at not in made:
            made[save_at] = make(save_at)
        for name in ("pollux.db", "pollux.last"):
            shutil.copy(made[save_at].parent / name, path.parent / name)

    return fill


def jobs(path):
    with salvage.opened(path) as log:
        return list(Scheduler(log).state.jobs), log.num_lost


def test_a_whole_file_is_opened_as_it_is(path, fill):
    fill(path)
    assert jobs(path) == ([f"j-{number}" for number in range(1, COUNT + 1)], 0)
    assert not list(path.parent.glob("*damaged*"))


@pytest.mark.parametrize("save_at", [(), (COUNT // 2,)])
def test_a_file_without_its_end_leads_to_what_came_before(path, fill, save_at, caplog):
    fill(path, save_at)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 5])
    with caplog.at_level(logging.WARNING):
        found, lost = jobs(path)
    assert found == [f"j-{number}" for number in range(1, len(found) + 1)]
    assert len(found) >= COUNT // 2, "more than half of the file is there"
    assert len(found) + lost == COUNT
    assert "It is kept as" in caplog.text
    assert (path.parent / "pollux.damaged1.db").stat().st_size < len(content)
    with SqliteLog(path) as log:  # and it goes on from there
        log.append(Record(1.0, JobSubmitted(JobSpec(JobId("next")))))


@pytest.mark.parametrize("hit", [COUNT // 4, COUNT * 3 // 4])
def test_a_record_whose_text_was_hit_is_found_although_sqlite_sees_nothing(path, fill, hit):
    """Before the saved state it costs the history up to there, after it what was decided since."""
    fill(path, (COUNT // 2,))
    content = path.read_bytes()
    at = content.index(f'"id":"j-{hit}"'.encode())
    path.write_bytes(content[:at] + b"\0" * 8 + content[at + 8 :])
    found, lost = jobs(path)
    assert len(found) == (COUNT if hit < COUNT // 2 else hit - 1)
    assert lost == COUNT - len(found)
    with SqliteLog(path, read_only=True) as log:
        assert log.events(limit=1)[0].number == (hit + 1 if hit < COUNT // 2 else 1)


def test_what_is_no_database_any_more_is_put_aside(path, fill):
    fill(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert jobs(path) == ([], COUNT)
    path.write_bytes(random.Random(1).randbytes(4096))
    assert jobs(path)[0] == []
    assert (path.parent / "pollux.damaged2.db").exists()


@pytest.mark.parametrize("seed", range(12))
def test_damage_anywhere_leaves_a_log_that_replays(path, fill, seed):
    """Whatever page is hit: the log that comes of it is a beginning of the one that was."""
    fill(path, (COUNT // 3, COUNT * 2 // 3))
    chance = random.Random(seed)
    content = bytearray(path.read_bytes())
    page = chance.randrange(1, len(content) // 4096)
    content[page * 4096 : (page + 1) * 4096] = chance.randbytes(4096)
    path.write_bytes(content)
    found, problem = [], ""
    try:
        found, _ = jobs(path)
    except Permanent as error:  # a record whose text was hit says which one it is, and what to do
        problem = str(error)
    assert "cannot be read" in problem if problem else len(found) >= COUNT // 3
    assert found == [f"j-{number}" for number in range(1, len(found) + 1)]


def test_the_process_of_the_service_goes_on_with_what_can_be_read(fill, monkeypatch):
    found = []

    class Looks:
        """In place of the service: takes its log, and has ended."""

        def __init__(self, options, place, provider, store):
            self.options = options
            found.append((store.last_number, store.num_lost))

        async def run(self):
            pass

        def end(self, *, stop_jobs):
            pass

    monkeypatch.setattr(serving, "Service", Looks)
    with tempfile.TemporaryDirectory(prefix="sv-", dir="/tmp") as home:
        place = ClusterFolder(Path(home) / "cluster")
        place.make()
        place.lock()
        try:
            fill(place.database)
            content = place.database.read_bytes()
            at = content.index(b'"id":"j-100"')
            place.database.write_bytes(content[:at] + b"\0" * 8 + content[at + 8 :])
            asyncio.run(serving._serve(ServiceOptions(place.path, port=0), place))
        finally:
            place.unlock()
    assert found == [(99, COUNT - 99)]


def test_a_file_of_another_program_is_not_touched(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    shutil.copy(path, path.parent / "copy")
    with pytest.raises(Permanent, match="another program"):
        salvage.opened(path)
    assert path.read_bytes() == (path.parent / "copy").read_bytes()
