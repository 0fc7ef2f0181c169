"""Mechanism: events in, actions out. Decisions are the policies'; effects are the world's."""

from pollux.scheduler.saving import SavedState
from pollux.scheduler.scheduler import Scheduler
from pollux.scheduler.state import SchedulerOptions, SchedulerState
from pollux.scheduler.store import EventLog, MemoryLog, Record

__all__ = ["EventLog", "MemoryLog", "Record", "SavedState", "Scheduler", "SchedulerOptions", "SchedulerState"]
