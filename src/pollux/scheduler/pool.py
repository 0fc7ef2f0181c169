"""The profile registry: what jobs that have ended leave to others of their kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pollux.core import FrozenMap, GradientStats, Job, JobId, JobModel, KindProfile, KindsImported, kind_of
from pollux.core.kinds import pooled, stage_of
from pollux.errors import InvalidInput


@dataclass(slots=True)
class Pool:
    """Part of the scheduler's state, and changed by it alone.

    A job goes in once, when it ends. While it runs only the stages of its training are noted, each once.
    """

    kinds: FrozenMap[str, KindProfile] = field(default_factory=FrozenMap)
    """Replaced, never changed: whoever holds it may compare by identity, and so for each kind in it."""
    stages: dict[JobId, dict[int, GradientStats]] = field(default_factory=dict)
    """Of each job that has not ended: its gradient as first reported from each stage."""

    def note(self, job_id: JobId, model: JobModel) -> None:
        """It reports this. Comes with every report of every job: most are from a stage that is noted already."""
        if (stage := stage_of(model.progress)) is None or model.gradient is None:
            return
        seen = self.stages.get(job_id)
        if seen is None:
            self.stages[job_id] = {stage: model.gradient}
        elif stage not in seen:
            seen[stage] = model.gradient

    def take(self, job: Job, now_s: float) -> None:
        """It has ended, well or not. One that has measured nothing leaves nothing."""
        stages, kind = self.stages.pop(job.id, {}), kind_of(job)
        if kind is None or not job.profile:
            return
        try:
            self.kinds = pooled(self.kinds, FrozenMap({kind: KindProfile.of(job, stages, now_s)}))
        except (InvalidInput, OverflowError):
            return  # sums beyond what a float holds: whatever that job measured, it was no time

    def bring(self, event: KindsImported, now_s: float) -> None:
        """Imported ones count as of now: what their clock says means nothing here."""
        brought = FrozenMap({kind: replace(profile, latest_s=now_s) for kind, profile in event.kinds.items()})
        try:
            self.kinds = brought if event.replaces else pooled(self.kinds, brought)
        except (InvalidInput, OverflowError):
            return  # as above, and an event of the log must never stop a replay
