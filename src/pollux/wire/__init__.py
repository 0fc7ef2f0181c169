"""Versioned messages between the agent of a job, the node's daemon, the faces and the service; and the clients.

Knows core and nothing above it: no torch, no server. Importing it loads the standard library only. Messages of nodes
and replicas, and the connections that carry them, are in `wire.nodes`, `wire.replicas` and `wire.frames`.
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
    ReplicasChanged,
    RunState,
    TrainingFinished,
    TrainingResumed,
    TrainingStarted,
    TrainingStopped,
    surviving,
)
from pollux.wire.frames import Channel, Peer, accept, ask, dial
from pollux.wire.messages import MAX_MESSAGE_BYTES, AgentReport, finite, pack, unpack

__all__ = [
    "DEFAULT_PATH",
    "MAX_MESSAGE_BYTES",
    "AgentReport",
    "BatchChanged",
    "BatchSetting",
    "Channel",
    "CheckpointSaved",
    "GuardFired",
    "JournalEntry",
    "LearningRateChanged",
    "OutOfMemory",
    "Peer",
    "ReplicasChanged",
    "ReportClient",
    "RunState",
    "TrainingFinished",
    "TrainingResumed",
    "TrainingStarted",
    "TrainingStopped",
    "accept",
    "ask",
    "dial",
    "finite",
    "pack",
    "surviving",
    "unpack",
]
