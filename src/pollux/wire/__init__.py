"""Versioned messages between the agent of a job, the node's daemon, the faces and the service; and the client.

Knows core and nothing above it: no torch, no server. Importing it loads the standard library only.
"""

from pollux.wire.client import DEFAULT_PATH, ReportClient
from pollux.wire.entries import (
    BatchChanged,
    BatchSetting,
    CheckpointSaved,
    GuardFired,
    JournalEntry,
    LearningRateChanged,
    OutOfMemory,
    RunState,
    TrainingFinished,
    TrainingResumed,
    TrainingStarted,
    TrainingStopped,
    surviving,
)
from pollux.wire.messages import MAX_MESSAGE_BYTES, AgentReport, finite, pack, unpack

__all__ = [
    "DEFAULT_PATH",
    "MAX_MESSAGE_BYTES",
    "AgentReport",
    "BatchChanged",
    "BatchSetting",
    "CheckpointSaved",
    "GuardFired",
    "JournalEntry",
    "LearningRateChanged",
    "OutOfMemory",
    "ReportClient",
    "RunState",
    "TrainingFinished",
    "TrainingResumed",
    "TrainingStarted",
    "TrainingStopped",
    "finite",
    "pack",
    "surviving",
    "unpack",
]
