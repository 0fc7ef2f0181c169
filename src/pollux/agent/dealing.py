"""Which samples an optimizer step takes, and which of them each replica and each of its passes gets.

One global cursor runs over the order of a pass. Steps are *dealt* ahead of their use (loaders read ahead) and
*committed* when the optimizer has stepped; what was dealt and not committed is dealt again. All of it follows from
the cursor and the settings, so replicas agree without talking.
"""

from __future__ import annotations

from dataclasses import dataclass

from pollux.agent.batching import BatchConfig
from pollux.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far the data are consumed: `offset` samples of pass `pass_index`, after `step` optimizer steps in all."""

    pass_index: int = 0
    offset: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The samples of one optimizer step: positions [start, stop) of a pass over the data."""

    step: int
    pass_index: int
    start: int
    stop: int
    passes: int
    """How often each replica runs the model for it."""
    per_gpu_batch_size: int
    """What a pass is planned for; the passes of a last, short step may hold fewer."""
    is_measured: bool = False
    is_kept: bool = False
    """The step before a measured one; the differenced estimator keeps its gradient."""
    is_whole: bool = True
    """As large as configured and in as many passes: fit for the throughput profile."""
    ends_pass: bool = False
    """The next step belongs to the next pass over the data."""

    @property
    def batch_size(self) -> int:
        return self.stop - self.start

    def slice_of(self, rank: int, size: int, index: int) -> tuple[int, int]:
        """Positions of pass `index` of a replica: contiguous parts, whose sizes differ by at most one."""
        first, last = _part(self.start, self.stop, rank, size)
        return _part(first, last, index, self.passes)


def _part(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    length = stop - start
    return start + length * index // count, start + length * (index + 1) // count


@dataclass(slots=True)
class Measuring:
    """Which steps are measured: every k-th, the last of each k. `every` = 0: none."""

    every: int = 0
    shift: int = 0
    """Moved on where a measured step told nothing: else the short step that ends each pass may always be it."""
    splits: bool = True
    """One replica runs a measured step in two passes; False where a model's layers depend on the batch."""


class Dealer:
    """Deals the steps of pass after pass, without end."""

    def __init__(self, pass_length: int, config: BatchConfig, num_replicas: int) -> None:
        if pass_length < num_replicas:
            raise InvalidSpec(
                "dataset",
                pass_length,
                f"fewer samples than the {num_replicas} replicas",
                f"Run on at most {pass_length} replicas",
            )
        self.pass_length = pass_length
        self.config = config
        self.num_replicas = num_replicas
        self.measuring = Measuring()
        self.least = 1
        """Samples that a replica gets in a pass; two where a model's layers depend on the batch, unless M0 forbids."""
        self.committed = Cursor()
        self.dealt = Cursor()
        """Where the next step begins; a source that meets an end sooner than planned moves it."""

    def rewind(self) -> None:
        """Forget what was dealt and not committed."""
        self.dealt = self.committed

    def resume(self, cursor: Cursor) -> None:
        """Go on from there; the step after that may have fewer samples than there are replicas now."""
        self.committed = self.dealt = cursor

    def deal(self) -> StepPlan:
        """The next step."""
        plan = self._plan(self.dealt, self._size_at(self.pass_length - self.dealt.offset))
        self.dealt = after(plan)
        return plan

    def _size_at(self, remaining: int) -> int:
        """The configured size; less where the end of the pass would leave too few samples for the replicas."""
        size, least = min(self.config.batch_size, remaining), self.num_replicas * self.least
        left = remaining - size
        if not 0 < left < least:
            return size
        shortened = size - (least - left)
        return shortened if shortened >= least else remaining

    def _plan(self, at: Cursor, size: int) -> StepPlan:
        config, every = self.config, self.measuring.every
        passes = config.passes
        is_whole = size == config.batch_size
        if not is_whole:
            largest, smallest = -(-size // self.num_replicas), size // self.num_replicas
            # Every replica runs every pass, so the smallest slice bounds their number.
            passes = max(1, min(-(-largest // config.per_gpu_batch_size), smallest // self.least))
        place = at.step + self.measuring.shift
        is_measured = every > 0 and place % every == every - 1 and size >= self.num_replicas
        if is_measured and self.measuring.splits and self.num_replicas == 1 and passes == 1 and size > 1:
            passes, is_whole = 2, False
        return StepPlan(
            at.step,
            at.pass_index,
            at.offset,
            at.offset + size,
            passes,
            config.per_gpu_batch_size,
            is_measured,
            is_kept=every > 1 and place % every == every - 2,
            is_whole=is_whole,
            ends_pass=at.offset + size >= self.pass_length,
        )

    def commit(self, plan: StepPlan) -> None:
        """The optimizer has stepped on it. Steps are committed in the order in which they were dealt."""
        self.committed = after(plan)


def after(plan: StepPlan) -> Cursor:
    """Where the data stand once a step is done."""
    if plan.ends_pass:
        return Cursor(plan.pass_index + 1, 0, plan.step + 1)
    return Cursor(plan.pass_index, plan.stop, plan.step + 1)
