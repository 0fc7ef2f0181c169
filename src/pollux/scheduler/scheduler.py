"""The scheduler: log the event, take it in, say what must be done. It knows no clock, no network and no engine."""

from __future__ import annotations

from pollux.core import Action, Event
from pollux.scheduler.reconcile import outstanding
from pollux.scheduler.state import SchedulerOptions, SchedulerState
from pollux.scheduler.store import EventLog, MemoryLog, Record


class Scheduler:
    """One cluster's scheduler. Its state is what its log says: a log with records in it is replayed first."""

    def __init__(self, log: EventLog | None = None, options: SchedulerOptions | None = None) -> None:
        self.log: EventLog = MemoryLog() if log is None else log
        self.state = SchedulerState(options)
        for record in self.log.records():
            self.state.apply(record.event, record.time_s)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in; return what must now be done in the world. `now` in seconds, on the driver's clock."""
        now = max(now, self.state.time_s)
        self.log.append(Record(now, event))
        return self.state.apply(event, now)

    def outstanding(self) -> list[Action]:
        """What the world was told and has not answered yet; to be said again after a restart."""
        return outstanding(self.state)
