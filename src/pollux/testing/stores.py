"""What every event log must do: subclass `StoreContract`, say how to make and reopen yours; pytest runs the rest."""

from __future__ import annotations

from typing import Any

import pytest

from pollux.core import JobId, JobPaused, JobSpec, JobSubmitted, NodeId, NodeLost, RoundDue
from pollux.scheduler import EventLog, Record, Scheduler, SchedulerState

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

    def handled(self, log: EventLog, *records: Record) -> Scheduler:
        """A scheduler on this log that has been told these events."""
        scheduler = Scheduler(log)
        for record in records:
            scheduler.handle(record.event, record.time_s)
        return scheduler

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
        scheduler = self.handled(log, *RECORDS)
        assert Scheduler(self.reopen(log)).state == scheduler.state

    def test_nothing_has_been_saved_in_a_new_log(self) -> None:
        assert self.make().latest() is None
        assert self.reopen(self.filled()).latest() is None

    def test_what_was_saved_comes_back_equal_and_knows_its_last_record(self) -> None:
        log = self.make()
        scheduler = self.handled(log, *RECORDS[:3])
        scheduler.save()
        saved = scheduler.state.saved()
        for found in (log, self.reopen(log)):
            latest = found.latest()
            assert latest is not None
            number, state = latest
            assert state == saved
            assert list(found.records(number)) == []

    def test_an_empty_state_can_be_saved(self) -> None:
        log = self.make()
        self.handled(log).save()
        back = self.handled(self.reopen(log), *RECORDS)
        assert back.state == self.handled(self.make(), *RECORDS).state

    @pytest.mark.parametrize("number", range(len(RECORDS) + 1))
    def test_what_was_saved_and_the_records_since_lead_to_the_same_state_as_all_records(self, number: int) -> None:
        log = self.make()
        scheduler = self.handled(log, *RECORDS[:number])
        scheduler.save()
        for record in RECORDS[number:]:
            scheduler.handle(record.event, record.time_s)
        reopened = self.reopen(log)
        latest = reopened.latest()
        assert latest is not None
        assert tuple(reopened.records(latest[0])) == RECORDS[number:]
        assert Scheduler(reopened).state == scheduler.state == self.handled(self.make(), *RECORDS).state

    def test_of_several_saved_states_the_newest_counts(self) -> None:
        log = self.make()
        scheduler = self.handled(log)
        for record in RECORDS:
            scheduler.handle(record.event, record.time_s)
            scheduler.save()
        scheduler.handle(RECORDS[0].event, RECORDS[-1].time_s)
        log = self.reopen(log)
        latest = log.latest()
        assert latest is not None
        assert latest[1] == self.handled(self.make(), *RECORDS).state.saved()
        assert len(list(log.records(latest[0]))) == 1

    def test_a_saved_state_is_used_instead_of_the_records_in_it(self) -> None:
        log = self.filled()
        other = SchedulerState()
        other.apply(RoundDue(7), 3.0)
        log.save(other.saved())
        assert Scheduler(self.reopen(log)).state == other

    def test_a_reopened_log_with_a_saved_state_goes_on_where_it_ended(self) -> None:
        log = self.make()
        self.handled(log, *RECORDS[:2]).save()
        log = self.reopen(log)
        scheduler = self.handled(log, *RECORDS[2:])
        assert Scheduler(self.reopen(log)).state == scheduler.state == self.handled(self.make(), *RECORDS).state
        scheduler.save()
        latest = self.reopen(log).latest()
        assert latest is not None
        assert latest[1] == scheduler.state.saved()
