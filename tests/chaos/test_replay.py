"""The replay of a log after a campaign: it notices a state that its records do not lead to, also after damage."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
from tests.chaos.views import SUCCEEDED

from pollux.core import JobId, JobPaused, JobResumed, JobSpec, JobSubmitted, Phase
from pollux.scheduler import Scheduler, SchedulerOptions
from pollux.service.options import ServiceOptions
from pollux.service.place import ClusterFolder
from pollux.service.store import SqliteLog
from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.replay import check_before_damage, check_replay
from pollux.testing.chaos.violations import Kind

JOB = JobId("works-1")
PENDING = replace(SUCCEEDED, id=JOB, phase=Phase.PENDING, generation=0)
RETRY_PAUSE_S = 0.2


@dataclass
class Files:
    """All that a replay asks of a bed."""

    home: Path
    folder: ClusterFolder
    retry_pause_s: float = RETRY_PAUSE_S


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    """One that a service has left: nine records, and the states after the third and the sixth are saved."""
    folder = ClusterFolder(tmp_path / "cluster")
    folder.path.mkdir()
    seed = ServiceOptions(folder.path).seed
    options = SchedulerOptions(seed=seed, retry_pause_s=RETRY_PAUSE_S, abandoned_starts_fail=True)
    with SqliteLog(folder.database) as log:
        scheduler = Scheduler(log, options)
        scheduler.handle(JobSubmitted(JobSpec(JOB)), 1.0)
        for number in range(2, 10):
            scheduler.handle(JobResumed(JOB) if number % 2 else JobPaused(JOB), float(number))
            if number in (3, 6):
                scheduler.save()
    return cast(Bed, Files(tmp_path, folder))


def change(bed: Bed, *statements: str) -> None:
    with closing(sqlite3.connect(bed.folder.database, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


LOSE_BEGINNING = "DELETE FROM records WHERE number <= 3"
LOSE_A_RECORD_BETWEEN = "DELETE FROM records WHERE number = 5"
LOSE_ALL_SAVED = "DELETE FROM snapshots"


def test_a_log_that_leads_to_what_the_service_said_is_well(bed: Bed) -> None:
    assert list(check_replay(bed, {JOB: PENDING})) == []
    assert list(check_before_damage(bed)) == []


def test_what_the_service_said_is_compared(bed: Bed) -> None:
    for said in (replace(PENDING, phase=Phase.PAUSED), replace(PENDING, failures=1), replace(PENDING, id="other")):
        assert [one.kind for one in check_replay(bed, {said.id: said})] == [Kind.WRONG_STATE]


@pytest.mark.parametrize("check", [lambda bed: check_replay(bed, {}), check_before_damage])
class TestBoth:
    def test_a_record_that_a_saved_state_knows_of_and_the_log_lacks_is_noticed(
        self, bed: Bed, check: Callable[[Bed], list[object]]
    ) -> None:
        change(bed, LOSE_A_RECORD_BETWEEN)
        assert len(list(check(bed))) == 2  # from the first record, and from the older saved state

    def test_and_also_in_a_log_that_lost_its_beginning(self, bed: Bed, check: Callable[[Bed], list[object]]) -> None:
        change(bed, LOSE_BEGINNING)
        assert list(check(bed)) == []
        change(bed, LOSE_A_RECORD_BETWEEN)
        assert len(list(check(bed))) == 1

    def test_a_log_that_leads_nowhere_is_told(self, bed: Bed, check: Callable[[Bed], list[object]]) -> None:
        change(bed, LOSE_BEGINNING, LOSE_ALL_SAVED)
        (violation,) = check(bed)
        assert "begins with record 4" in str(violation)

    def test_without_saved_states_the_records_alone_are_replayed(
        self, bed: Bed, check: Callable[[Bed], list[object]]
    ) -> None:
        change(bed, LOSE_ALL_SAVED)
        assert list(check(bed)) == []


def test_what_the_fault_is_to_meet_is_left_as_it_was(bed: Bed) -> None:
    """With what a killed service leaves: a log that is not in the database yet."""
    database = bed.folder.database
    with SqliteLog(database) as log:  # nothing is tidied up while somebody has it open
        Scheduler(log).handle(JobPaused(JOB), 10.0)
        before = {path.name: path.read_bytes() for path in database.parent.iterdir() if path.suffix != ".lock"}
        assert any(name.endswith("-wal") and data for name, data in before.items())
        assert list(check_before_damage(bed)) == []
        assert {name: (database.parent / name).read_bytes() for name in before} == before
    assert [path.name for path in bed.home.iterdir()] == ["cluster"]
