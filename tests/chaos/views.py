"""A job as the service shows it."""

from __future__ import annotations

from pollux.core import FrozenMap, JobId, Phase
from pollux.wire.api import JobView

SUCCEEDED = JobView(
    id=JobId("works-1"),
    name="works",
    team="000-works",
    phase=Phase.SUCCEEDED,
    is_rigid=True,
    priority=0,
    min_gpus=1,
    max_gpus=1,
    gpus=0,
    allocation=FrozenMap({}),
    next_allocation=None,
    generation=1,
    reallocations=0,
    failures=0,
    retries=0,
    submitted_at_s=0.0,
    started_at_s=1.0,
    finished_at_s=9.0,
    attained_gpu_s=8.0,
)
