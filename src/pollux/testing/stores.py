"""What every event log must do: subclass `StoreContract`, say how to make and reopen yours; pytest runs the rest."""

from __future__ import annotations

from typing import Any

from pollux.core import JobId, JobPaused, JobSpec, JobSubmitted, NodeId, NodeLost, RoundDue
from pollux.scheduler import EventLog, Record, Scheduler

RECORDS = (
    Record(0.0, JobSubmitted(JobSpec(JobId("é→\n\"'"), command=("python", "")))),
    Record(0.1 + 0.2, RoundDue(1, cause="timer")),
    Record(0.1 + 0.2, RoundDue(1, cause="timer")),
    Record(1e9, NodeLost(NodeId("a"))),
    Record(1e9, JobPaused(JobId("é→\n\"'"))),
)
"""Awkward text, a number without a short decimal, two equal records, two of the same moment."""


class StoreContract:
    """Tests of one kind of `EventLog`."""

    def make(self) -> EventLog:
        """A new, empty log."""
        raise NotImplementedError

    def reopen(self, log: Any) -> EventLog:
        """The same log as another process would find it after this one has died without closing it."""
        raise NotImplementedError

    def filled(self) -> EventLog:
        log = self.make()
        for record in RECORDS:
            log.append(record)
        return log

    def test_a_new_log_is_empty(self) -> None:
        assert list(self.make().records()) == []
        assert list(self.reopen(self.make()).records()) == []

    def test_records_come_back_equal_and_in_order(self) -> None:
        assert tuple(self.filled().records()) == RECORDS

    def test_records_can_be_read_again(self) -> None:
        log = self.filled()
        assert list(log.records()) == list(log.records())

    def test_nothing_that_was_appended_is_lost_by_a_crash(self) -> None:
        log = self.make()
        for number, record in enumerate(RECORDS, 1):
            log.append(record)
            assert tuple(self.reopen(log).records()) == RECORDS[:number]

    def test_a_reopened_log_goes_on_where_it_ended(self) -> None:
        log = self.reopen(self.filled())
        log.append(RECORDS[0])
        assert tuple(self.reopen(log).records()) == (*RECORDS, RECORDS[0])

    def test_logs_do_not_share_records(self) -> None:
        full, empty = self.filled(), self.make()
        assert len(list(full.records())) == len(RECORDS)
        assert list(empty.records()) == []

    def test_a_scheduler_comes_back_from_it(self) -> None:
        log = self.make()
        scheduler = Scheduler(log)
        for record in RECORDS:
            scheduler.handle(record.event, record.time_s)
        assert Scheduler(self.reopen(log)).state == scheduler.state
