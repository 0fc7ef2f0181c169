"""Hypothesis strategies for what travels, and one plain example of each; other test folders may use them."""

from __future__ import annotations

import dataclasses
from typing import get_args

from hypothesis import strategies as st
from tests.core.strategies import (
    amounts,
    counts,
    generations,
    maps,
    maybe,
    models,
    names,
    profiles,
    progresses,
    sizes,
    texts,
    times,
)

from pollux.core import Progress
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
)
from pollux.wire.messages import AgentReport

factors = st.lists(st.floats(0, 1e6), max_size=3).map(tuple)
settings_of_batch = st.builds(BatchSetting, sizes, sizes, counts)
states = st.builds(RunState, counts, progresses(), sizes, settings_of_batch, factors, counts, counts)

_FIELDS = {
    TrainingStarted: {"seed": maybe(counts)},
    TrainingResumed: {"checkpoint": names, "seed": maybe(counts)},
    BatchChanged: {"before": settings_of_batch, "reason": names, "predicted_gain": maybe(amounts)},
    LearningRateChanged: {"before": factors},
    GuardFired: {"reason": names, "figures": maps(names, times)},
    ReplicasChanged: {"before": sizes, "reason": names},
    OutOfMemory: {"tried": sizes, "max_per_gpu_batch_size": sizes},
    CheckpointSaved: {"checkpoint": names},
    TrainingFinished: {"reason": texts},
    TrainingStopped: {"reason": names},
}
ENTRY_TYPES = get_args(JournalEntry)
ENTRIES = {kind: st.builds(kind, at_s=times, state=states, **_FIELDS[kind]) for kind in ENTRY_TYPES}
entries = st.one_of(*ENTRIES.values())

reports = st.builds(
    AgentReport,
    job=names,
    generation=generations,
    sent_at_s=times,
    state=states,
    profile=maybe(profiles),
    model=maybe(models),
    loss=maybe(times),
    throughput=maybe(amounts),
    efficiency=maybe(amounts),
    goodput=maybe(amounts),
    noise_scale=maybe(amounts),
    notices=st.lists(entries, max_size=3).map(tuple),
    notices_dropped=counts,
)


def state_at(step: int, **changes) -> RunState:
    plain = RunState(step, Progress(float(step), 1000.0), 2, BatchSetting(64, 32), (1.0,), 0, 64 * step)
    return dataclasses.replace(plain, **changes)


def entry_at(step: int) -> JournalEntry:
    return CheckpointSaved(1e9 + step, state_at(step), f"checkpoints/{step}")


def report_at(step: int, **changes) -> AgentReport:
    return dataclasses.replace(AgentReport("j", 3, 1e9 + step, state_at(step)), **changes)
