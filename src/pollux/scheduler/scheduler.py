"""The scheduler: log the event, take it in, say what must be done. It knows no clock, no network and no engine."""

from __future__ import annotations

from pollux.core import Action, Event
from pollux.scheduler.reconcile import outstanding
from pollux.scheduler.saving import SavedState
from pollux.scheduler.state import SchedulerOptions, SchedulerState
from pollux.scheduler.store import EventLog, MemoryLog, Record


class Scheduler:
    """One cluster's scheduler. Its state is what its log says: what was saved last, and the records since then."""

    def __init__(self, log: EventLog | None = None, options: SchedulerOptions | None = None) -> None:
        self.log: EventLog = MemoryLog() if log is None else log
        number, saved = self.log.latest() or (0, SavedState())
        self.state = SchedulerState.restored(saved, options)
        for record in self.log.records(number):
            self.state.apply(record.event, record.time_s)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in; return what must now be done in the world. `now` in seconds, on the driver's clock."""
        now = max(now, self.state.time_s)
        self.log.append(Record(now, event))
        return self.state.apply(event, now)

    def save(self) -> None:
        """Have the log keep the state of now, so that the next start need not replay what led to it."""
        self.log.save(self.state.saved())

    def outstanding(self) -> list[Action]:
        """What the world was told and has not answered yet; to be said again after a restart."""
        return outstanding(self.state)
