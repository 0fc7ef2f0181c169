"""What was learnt of each kind of job, for the next job of that kind: the entries of the profile registry.

Sums and counts, as in `profile`: they merge exactly and say how much they weigh. Of each entry the size is bounded, and
so is the number of entries. Nobody's data, weights or names of jobs are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from pollux.core import checks
from pollux.core.frozenmap import FrozenMap
from pollux.core.job import Job
from pollux.core.model import BatchLimits, GradientStats, Progress
from pollux.core.phase import Phase
from pollux.core.profile import Observation, ObservationKey, Profile
from pollux.errors import InvalidModel

NUM_STAGES = 20
"""Parts of a training, of equal progress."""
MAX_OBSERVATIONS = 512
"""Of one kind, over all GPU types."""
MAX_KINDS = 128
"""Those that no job has ended of for the longest time make room."""


def kind_of(job: Job) -> str | None:
    """What its owner says it is, else the fingerprint that its agent reports; None before the first report."""
    if job.spec.application is not None:
        return job.spec.application
    return None if job.model is None else job.model.fingerprint


def stage_of(progress: Progress | None) -> int | None:
    """Which part of its training a job is in, from 0 on; None if its length is unknown."""
    if progress is None or not (total := progress.total):
        return None
    done = progress.done
    return min(int(NUM_STAGES * (done / total)), NUM_STAGES - 1) if done < total else NUM_STAGES - 1


@dataclass(frozen=True, slots=True)
class GradientSums:
    """Gradient statistics of jobs in one stage of their training."""

    sqr: float
    example_var: float
    """Variance of the gradient of a single example, M0 · var: so that jobs with different M0 add up."""
    count: int

    def __post_init__(self) -> None:
        checks.finite(InvalidModel, "sqr", self.sqr, 0)
        checks.finite(InvalidModel, "example_var", self.example_var, 0)
        checks.whole(InvalidModel, "count", self.count, 1)
        if self.sqr == 0 and self.example_var == 0:
            raise InvalidModel("sqr", self.sqr, "sqr and example_var are both 0", "Leave this stage out")

    def merge(self, other: GradientSums) -> GradientSums:
        return GradientSums(self.sqr + other.sqr, self.example_var + other.example_var, self.count + other.count)

    def stats(self, initial_batch_size: int) -> GradientStats | None:
        """The mean, for a job with that M0; None if it is too small to be told from 0."""
        sqr, var = self.sqr / self.count, self.example_var / self.count / initial_batch_size
        return GradientStats(sqr, var) if sqr or var else None


@dataclass(frozen=True, slots=True)
class Tally:
    """A figure of several jobs: how many had it, its sum and the sum of its squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        checks.whole(InvalidModel, "count", self.count, 0)
        checks.finite(InvalidModel, "total", self.total, 0)
        checks.finite(InvalidModel, "squares", self.squares, 0)
        if self.count == 0 and (self.total or self.squares):
            raise InvalidModel("count", 0, "there are sums, but of nothing", "Count what was added")

    @classmethod
    def of(cls, value: float | None) -> Tally:
        """Of one job; None: it does not know."""
        return cls() if value is None else cls(1, value, value * value)

    def merge(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def stddev(self) -> float | None:
        """Of the values, not of their mean."""
        if not self.count:
            return None
        mean = self.total / self.count
        return sqrt(max(self.squares / self.count - mean * mean, 0.0))


@dataclass(frozen=True, slots=True)
class KindProfile:
    """What the jobs of one kind that have ended leave to those that come."""

    profile: Profile = field(default_factory=Profile)
    num_jobs: int = 0
    gradients: FrozenMap[int, GradientSums] = field(default_factory=FrozenMap)
    """By stage of training, from 0 to `NUM_STAGES` - 1; a stage that nobody has reported from is absent."""
    work: Tally = field(default_factory=Tally)
    """Examples at M0 (iterations × M0) of those that succeeded: as declared, else as done by the last report."""
    realloc_delay_s: Tally = field(default_factory=Tally)
    """What a re-allocation cost them, as each measured it last."""
    limits: BatchLimits | None = None
    """Of the latest."""
    latest_s: float = 0.0
    """When the latest went in, by the clock of the cluster."""

    def __post_init__(self) -> None:
        checks.instance(InvalidModel, "profile", self.profile, Profile)
        checks.whole(InvalidModel, "num_jobs", self.num_jobs, 0)
        checks.frozen(InvalidModel, "gradients", self.gradients)
        for stage in self.gradients:
            if not 0 <= stage < NUM_STAGES:
                fix = f"Give stages from 0 to {NUM_STAGES - 1}"
                raise InvalidModel(f"gradients[{stage}]", stage, "is no stage of a training", fix)
        checks.instance(InvalidModel, "work", self.work, Tally)
        checks.instance(InvalidModel, "realloc_delay_s", self.realloc_delay_s, Tally)
        checks.instance(InvalidModel, "limits", self.limits, BatchLimits, optional=True)
        checks.finite(InvalidModel, "latest_s", self.latest_s, None)
        if len(self.profile) > MAX_OBSERVATIONS:
            object.__setattr__(self, "profile", _weightiest(self.profile, MAX_OBSERVATIONS))

    @classmethod
    def of(cls, job: Job, gradients: Mapping[int, GradientStats], now_s: float) -> KindProfile:
        """What one job leaves. `gradients`: what it reported in each stage that it went through."""
        model, limits, sums = job.model, job.spec.limits, FrozenMap[int, GradientSums]()
        work = delay_s = None
        if model is not None:
            limits, delay_s, progress = model.limits, model.realloc_delay_s, model.progress
            initial = limits.initial_batch_size
            if job.phase is Phase.SUCCEEDED and progress is not None:
                work = initial * (progress.done if progress.total is None else progress.total)
            sums = FrozenMap(
                {stage: GradientSums(seen.sqr, initial * seen.var, 1) for stage, seen in gradients.items()}
            )
        return cls(job.profile, 1, sums, Tally.of(work), Tally.of(delay_s), limits, now_s)

    def merge(self, other: KindProfile) -> KindProfile:
        """Both together. Order does not matter, but for the rounding of floats and once observations are dropped."""
        return KindProfile(
            self.profile.merge(other.profile),
            self.num_jobs + other.num_jobs,
            self.gradients.merged(other.gradients, GradientSums.merge),
            self.work.merge(other.work),
            self.realloc_delay_s.merge(other.realloc_delay_s),
            max(self, other, key=_recency).limits,
            max(self.latest_s, other.latest_s),
        )

    def gradient_at(self, share: float, initial_batch_size: int) -> GradientStats | None:
        """What to expect at that share of the progress: of the nearest stage that was reported from."""
        if not self.gradients:
            return None
        wanted = int(min(max(NUM_STAGES * share, 0.0), NUM_STAGES - 1))
        nearest = min(self.gradients, key=lambda stage: (abs(stage - wanted), stage))
        return self.gradients[nearest].stats(initial_batch_size)


@dataclass(frozen=True, slots=True)
class ProfileRegistry:
    """The registry as a document: what one cluster exports and another one imports."""

    kinds: FrozenMap[str, KindProfile] = field(default_factory=FrozenMap)
    made_by: str = ""
    """Which program wrote it, for people."""

    def __post_init__(self) -> None:
        check_kinds("kinds", self.kinds)
        checks.text(InvalidModel, "made_by", self.made_by, may_be_empty=True)


def check_kinds(name: str, kinds: FrozenMap[str, KindProfile]) -> None:
    """Raise `InvalidModel` for what no registry may hold."""
    checks.frozen(InvalidModel, name, kinds)
    if len(kinds) > MAX_KINDS:
        raise InvalidModel(name, len(kinds), f"more than {MAX_KINDS} kinds", "Leave some out")
    for kind, profile in kinds.items():
        checks.text(InvalidModel, f"{name}: kind", kind)
        checks.instance(InvalidModel, f'{name}["{kind}"]', profile, KindProfile)


def pooled(kinds: FrozenMap[str, KindProfile], more: FrozenMap[str, KindProfile]) -> FrozenMap[str, KindProfile]:
    """Both together; the least recent kinds are dropped if there are too many."""
    together = kinds.merged(more, KindProfile.merge)
    if len(together) <= MAX_KINDS:
        return together
    latest = sorted(together, key=lambda kind: (-together[kind].latest_s, kind))[:MAX_KINDS]
    return FrozenMap({kind: together[kind] for kind in latest})


def _recency(profile: KindProfile) -> tuple[float, tuple[int, ...]]:
    """At the same time the larger limits count, so that the order of merging does not."""
    known = profile.limits
    if known is None:
        return float("-inf"), ()
    sizes = known.initial_batch_size, known.max_batch_size, known.min_per_gpu_batch_size, known.max_per_gpu_batch_size
    return profile.latest_s, sizes


def _weightiest(profile: Profile, count: int) -> Profile:
    """So many of the observations. Each shape keeps its best measured ones: a size that nobody knows costs more than a
    batch size that nobody knows."""
    of_shape: dict[object, list[tuple[int, str, ObservationKey, Observation]]] = {}
    for gpu_type, seen in profile.observations.items():
        for key, one in seen.items():
            of_shape.setdefault((gpu_type, key.shape), []).append(
                (one.accum_count + one.sync_count, gpu_type, key, one)
            )
    ranked = [
        (rank, -passes, gpu_type, key, one)
        for group in of_shape.values()
        for rank, (passes, gpu_type, key, one) in enumerate(sorted(group, key=lambda each: (-each[0], each[2])))
    ]
    kept: dict[str, dict[ObservationKey, Observation]] = {}
    for _, _, gpu_type, key, one in sorted(ranked, key=lambda each: each[:4])[:count]:
        kept.setdefault(gpu_type, {})[key] = one
    return Profile(FrozenMap({gpu_type: FrozenMap(seen) for gpu_type, seen in kept.items()}))
