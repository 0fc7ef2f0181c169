"""How a total batch size is divided among replicas and passes, and between which bounds it may move.

A batch need not divide evenly: replicas and passes then differ by one example, and m is the larger size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pollux.core import BatchLimits, checks
from pollux.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """One step: `batch_size` examples in all, at most `per_gpu_batch_size` of them in each pass of each replica."""

    batch_size: int
    per_gpu_batch_size: int
    passes: int
    """Accumulation passes and the synchronising one: s + 1."""

    def __post_init__(self) -> None:
        checks.whole(InvalidSpec, "batch_size", self.batch_size, 1)
        checks.whole(InvalidSpec, "per_gpu_batch_size", self.per_gpu_batch_size, 1)
        checks.whole(InvalidSpec, "passes", self.passes, 1)

    @property
    def accumulation_steps(self) -> int:
        return self.passes - 1

    def is_within(self, limits: BatchLimits, num_gpus: int) -> bool:
        """Whether so many replicas can run it: sizes inside the limits, all examples dealt, no pass empty.

        A small m is no obstacle: M0 or M_max may force it below `min_per_gpu_batch_size`.
        """
        slots = num_gpus * self.passes
        return (
            limits.initial_batch_size <= self.batch_size <= limits.max_batch_size
            and self.per_gpu_batch_size <= limits.max_per_gpu_batch_size
            and slots <= self.batch_size <= slots * self.per_gpu_batch_size
        )


def initial_config(limits: BatchLimits, num_gpus: int) -> BatchConfig:
    """Where a job begins: M0, or more where the replicas need it to get the smallest per-GPU batch size each."""
    return _split(limits.initial_batch_size, limits, num_gpus)


def fitted_to(config: BatchConfig, limits: BatchLimits, num_gpus: int) -> BatchConfig:
    """The same total batch size for another number of replicas or other limits; moved no further than they demand."""
    return _split(config.batch_size, limits, num_gpus)


def narrowed(
    limits: BatchLimits, *, max_batch_size: int | None = None, max_per_gpu_batch_size: int | None = None
) -> BatchLimits:
    """Limits with lower upper ends, but never below the lower ends: M0 and the smallest per-GPU batch size."""
    total, per_gpu = limits.max_batch_size, limits.max_per_gpu_batch_size
    if max_batch_size is not None:
        total = max(limits.initial_batch_size, min(total, max_batch_size))
    if max_per_gpu_batch_size is not None:
        per_gpu = max(limits.min_per_gpu_batch_size, min(per_gpu, max_per_gpu_batch_size))
    return replace(limits, max_batch_size=total, max_per_gpu_batch_size=per_gpu)


def _split(wanted: int, limits: BatchLimits, num_gpus: int) -> BatchConfig:
    """The fewest passes that fit into memory: at equal batch size more are never faster.

    M0 and M_max are kept before `min_per_gpu_batch_size`: the user's learning rate depends on them, only speed on it.
    """
    checks.whole(InvalidSpec, "num_gpus", num_gpus, 1)
    lowest = max(limits.initial_batch_size, limits.min_per_gpu_batch_size * num_gpus)
    batch_size = min(max(wanted, lowest), limits.max_batch_size)
    passes = _ceil_div(_ceil_div(batch_size, num_gpus), limits.max_per_gpu_batch_size)
    if batch_size < num_gpus * passes:  # some pass would be empty
        batch_size = _without_empty_passes(num_gpus * passes, limits, num_gpus)
        passes = _ceil_div(batch_size // num_gpus, limits.max_per_gpu_batch_size)
    return BatchConfig(batch_size, _ceil_div(batch_size, num_gpus * passes), passes)


def _without_empty_passes(rounded_up: int, limits: BatchLimits, num_gpus: int) -> int:
    """A multiple of `num_gpus`; needed only if it exceeds M_max, or where a pass holds a single example."""
    rounded_down = rounded_up - num_gpus
    if rounded_up <= limits.max_batch_size:
        return rounded_up
    if rounded_down >= limits.initial_batch_size and rounded_down > 0:
        return rounded_down
    raise InvalidSpec(
        "max_batch_size",
        limits.max_batch_size,
        f"no batch from {limits.initial_batch_size} up to it gives each pass of {num_gpus} replicas an example",
        "Raise max_batch_size or use fewer replicas",
    )


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
