"""What was measured of a job: seconds and counts, summed per GPU type, shape and per-GPU batch size.

Sums, not means: they merge exactly and say how much they weigh. Fitted parameters are not here; see `model`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.core import checks
from pollux.core.allocation import Shape
from pollux.core.frozenmap import FrozenMap
from pollux.errors import InvalidProfile


@dataclass(frozen=True, slots=True, order=True)
class ObservationKey:
    """Under which circumstances something was measured."""

    shape: Shape
    per_gpu_batch_size: int

    def __post_init__(self) -> None:
        checks.instance(InvalidProfile, "shape", self.shape, Shape)
        checks.whole(InvalidProfile, "per_gpu_batch_size", self.per_gpu_batch_size, 1)


@dataclass(frozen=True, slots=True)
class Observation:
    """Sums over passes: an *accumulation* pass only adds to the gradient, a *synchronising* pass ends a step."""

    accum_time_s: float
    """Seconds of all accumulation passes."""
    accum_count: int
    sync_pass_time_s: float
    """Seconds of all synchronising passes, synchronisation included."""
    sync_time_s: float
    """Seconds of those that only waited for synchronisation, the part that did not overlap with computing."""
    sync_count: int

    def __post_init__(self) -> None:
        checks.finite(InvalidProfile, "accum_time_s", self.accum_time_s, 0)
        checks.whole(InvalidProfile, "accum_count", self.accum_count, 0)
        checks.finite(InvalidProfile, "sync_pass_time_s", self.sync_pass_time_s, 0)
        checks.finite(InvalidProfile, "sync_time_s", self.sync_time_s, 0)
        checks.whole(InvalidProfile, "sync_count", self.sync_count, 0)
        if self.sync_time_s > self.sync_pass_time_s:
            raise InvalidProfile(
                "sync_time_s",
                self.sync_time_s,
                f"more than sync_pass_time_s = {self.sync_pass_time_s}, which it is a part of",
                "Measure the waiting inside the synchronising pass",
            )
        if self.accum_time_s > 0 and self.accum_count == 0:
            raise InvalidProfile("accum_time_s", self.accum_time_s, "time without a pass", "Count each timed pass")
        if self.sync_pass_time_s > 0 and self.sync_count == 0:
            raise InvalidProfile("sync_pass_time_s", self.sync_pass_time_s, "time without a pass", "Count each one")

    def merge(self, other: Observation) -> Observation:
        """Both together. Order and grouping do not matter, but for the rounding of floats."""
        return Observation(
            self.accum_time_s + other.accum_time_s,
            self.accum_count + other.accum_count,
            self.sync_pass_time_s + other.sync_pass_time_s,
            self.sync_time_s + other.sync_time_s,
            self.sync_count + other.sync_count,
        )

    @property
    def grad_time_s(self) -> float:
        """Mean seconds to compute one gradient, over passes of both kinds. Needs a synchronising pass."""
        self._need_sync("grad_time_s")
        computing = self.accum_time_s + (self.sync_pass_time_s - self.sync_time_s)
        return computing / (self.accum_count + self.sync_count)

    @property
    def iteration_time_s(self) -> float:
        """Mean seconds of one synchronising pass: an iteration without accumulation. Needs such a pass."""
        self._need_sync("iteration_time_s")
        return self.sync_pass_time_s / self.sync_count

    def _need_sync(self, wanted: str) -> None:
        if self.sync_count == 0:
            raise InvalidProfile(
                "sync_count", 0, f"{wanted} needs a synchronising pass", "Measure until one step has ended"
            )


@dataclass(frozen=True, slots=True)
class Profile:
    """All observations of a job, by GPU type."""

    observations: FrozenMap[str, FrozenMap[ObservationKey, Observation]] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        checks.frozen(InvalidProfile, "observations", self.observations)
        for gpu_type, of_type in self.observations.items():
            checks.frozen(InvalidProfile, f'observations["{gpu_type}"]', of_type)

    def __bool__(self) -> bool:
        return any(map(len, self.observations.values()))

    def of_type(self, gpu_type: str) -> FrozenMap[ObservationKey, Observation]:
        """What was measured on that type; empty if nothing was."""
        return self.observations.get(gpu_type) or FrozenMap()

    def add(self, gpu_type: str, key: ObservationKey, observation: Observation) -> Profile:
        """This profile with one more observation, merged into what is there under the same key."""
        checks.text(InvalidProfile, "gpu_type", gpu_type)
        known = self.of_type(gpu_type)
        merged = known[key].merge(observation) if key in known else observation
        return Profile(self.observations.with_item(gpu_type, known.with_item(key, merged)))

    def merge(self, other: Profile) -> Profile:
        """Both together. Order and grouping do not matter, but for the rounding of floats."""
        return Profile(self.observations.merged(other.observations, _merge_types))

    def __len__(self) -> int:
        """Under how many circumstances something was measured, over all GPU types."""
        return sum(map(len, self.observations.values()))


def _merge_types(
    mine: FrozenMap[ObservationKey, Observation], theirs: FrozenMap[ObservationKey, Observation]
) -> FrozenMap[ObservationKey, Observation]:
    return mine.merged(theirs, Observation.merge)
