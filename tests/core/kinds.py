"""A small profile registry, and jobs that go into one; other test folders may use them."""

from __future__ import annotations

from pollux.core import (
    BatchLimits,
    FrozenMap,
    GradientStats,
    GradientSums,
    Job,
    JobModel,
    JobSpec,
    KindProfile,
    Observation,
    ObservationKey,
    Phase,
    Profile,
    ProfileRegistry,
    Progress,
    Shape,
    Tally,
)

LIMITS = BatchLimits(32, 512, 1, 64)


def profile(*sizes: int, m: int = 16, count: int = 1, gpu_type: str = "t4") -> Profile:
    """One second a pass, on each of these numbers of GPUs."""
    seen = {ObservationKey(Shape(size), m): Observation(0.0, 0, float(count), 0.25 * count, count) for size in sizes}
    return Profile(FrozenMap({gpu_type: FrozenMap(seen)}))


def model(done: float, total: float | None = 100.0, fingerprint: str | None = None, noise: float = 3.0) -> JobModel:
    gradient, progress = GradientStats(1.0, noise), Progress(done, total)
    return JobModel(LIMITS, gradient, progress=progress, realloc_delay_s=2.0, fingerprint=fingerprint)


def ended(name: str, phase: Phase = Phase.SUCCEEDED, **fields: object) -> Job:
    more: dict[str, object] = {"model": model(90.0), "profile": profile(1, 2), **fields}
    return Job(JobSpec(name, application="net"), 0.0, phase=phase, finished_at_s=1.0, **more)  # type: ignore[arg-type]


def registry(*names: str) -> ProfileRegistry:
    """With one entry under each name; one under `net` if none is given."""
    entry = KindProfile(
        profile(1, 4),
        3,
        FrozenMap({0: GradientSums(3.0, 288.0, 3)}),
        Tally(2, 6400.0, 2 * 3200.0**2),
        Tally(3, 6.0, 12.0),
        LIMITS,
        5.0,
    )
    return ProfileRegistry(FrozenMap(dict.fromkeys(names or ("net",), entry)), "a test")
