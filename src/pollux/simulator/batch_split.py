"""How a given total batch size is divided among GPUs and passes, by the rules of the published simulator.

For jobs whose batch size is fixed or just set; a job that tunes its batch size asks `goodput.best` instead.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

from pollux.core import BatchLimits, checks
from pollux.errors import InvalidSpec


class SingleGpu(StrEnum):
    """When a job on one GPU must accumulate, although its batch would fit into one pass.

    The published agent insists on it because its noise estimator is poor on one GPU; ours splits a measured batch.
    """

    FREE = "free"
    """Never: ours."""
    ABOVE_INITIAL = "above_initial"
    """If the batch size is above M0: the artifact's jobs."""
    ALWAYS = "always"
    """At any batch size: what the artifact's Optimus believes of them."""


@lru_cache(maxsize=1 << 16)
def split(
    batch_size: int, num_gpus: int, limits: BatchLimits, single_gpu: SingleGpu = SingleGpu.FREE
) -> tuple[int, int]:
    """(per_gpu_batch_size, accumulation_steps): the fewest passes that fit into memory, all of the same size.

    Rounded upwards, so the batch in use, K·m·(s + 1), is at least `batch_size` (2048 on 6 GPUs is 2052), unless that
    exceeds the largest batch size allowed. A small batch on many GPUs makes m fall below
    `limits.min_per_gpu_batch_size`.
    """
    checks.whole(InvalidSpec, "batch_size", batch_size, 1)
    checks.whole(InvalidSpec, "num_gpus", num_gpus, 1)
    share = _ceil_div(batch_size, num_gpus)
    accumulation_steps = _ceil_div(share, limits.max_per_gpu_batch_size) - 1
    if num_gpus == 1 and _must_accumulate(batch_size, limits, single_gpu):
        accumulation_steps = max(1, accumulation_steps)
    passes = accumulation_steps + 1
    per_gpu_batch_size = min(_ceil_div(share, passes), limits.max_batch_size // (num_gpus * passes))
    if per_gpu_batch_size == 0:
        raise InvalidSpec(
            "num_gpus",
            num_gpus,
            f"cannot share a batch of at most {limits.max_batch_size} in {passes} passes",
            "Use fewer GPUs or raise max_batch_size",
        )
    return per_gpu_batch_size, accumulation_steps


def _must_accumulate(batch_size: int, limits: BatchLimits, single_gpu: SingleGpu) -> bool:
    match single_gpu:
        case SingleGpu.FREE:
            return False
        case SingleGpu.ABOVE_INITIAL:
            return batch_size > limits.initial_batch_size
        case SingleGpu.ALWAYS:
            return True


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
