"""What a job may be told by its script. Every field has a default that works; the first three are the ones people set.

What its owner asks for in the job's specification (`BatchVariables`) comes before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pollux.agent.environment import BatchVariables, variable
from pollux.agent.preconditioners import Preconditioner
from pollux.agent.rules import ScalingRule
from pollux.core import BatchLimits, checks
from pollux.errors import InvalidSpec

SAFE_GROWTH = 32
"""Up to this multiple of M0 the authors found adaptation safe (paper, section 3.1)."""

STEPS_A_PASS = 10
"""Without `max_batch_size`, a batch is at most this share of the data."""

AS_WRITTEN = BatchVariables()
"""The owner leaves all to the script."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a job adapts, measures, saves and reports."""

    max_batch_size: int | None = None
    """Largest total batch size; None: 32 × the loader's, and at most a tenth of the data."""
    max_per_gpu_batch_size: int | None = None
    """What fits into one GPU; None: found out by trying, at most twice what has worked."""
    checkpoint_dir: str | Path | None = None
    """Where checkpoints and the journal go; None: `POLLUX_CHECKPOINT_DIR`, and without that nowhere."""

    adapt: bool = True
    """False: the batch size stays at the loader's, and with it the learning rate."""
    min_per_gpu_batch_size: int = 1
    rule: str | ScalingRule | Callable[[int, int], float] = "auto"
    """How the learning rate follows the batch size: adascale, sqrt, linear, legw, adamscale, none, or your own;
    auto: adascale for SGD, else sqrt."""
    seed: int = 0
    """Of the order of samples and of the randomness inside them."""
    hysteresis: float = 1.05
    """A batch size is left only for one whose goodput is predicted to be so many times better."""
    guard: bool = True
    """Step back towards the initial batch size when the loss does not follow the predicted progress."""

    measure_noise: bool = True
    """False: no gradient is measured, so the batch size does not grow."""
    noise_budget: float = 0.01
    """Share of the training time that measuring may cost."""
    noise_window: float = 1000.0
    """How many batches of M0 the noise is averaged over."""
    preconditioner: Preconditioner | None = None
    """For an optimizer that Pollux does not know: (parameter, its state, its group) → what it divides gradients by."""
    batch_dependent: bool | None = None
    """Whether layers mix the samples of a batch; None: look for batch normalisation."""
    sample_randomness: bool | None = None
    """Whether `dataset[i]` draws random numbers, to be seeded by the sample; None: look."""
    samples_per_pass: int | None = None
    """Length of an iterable dataset that does not know it; `epochs` needs one."""

    emulate: str | None = None
    """The application whose pace, noise and loss the job takes over, as on an emulated cluster: `cifar10:0.2`."""

    report_every_s: float = 30.0
    """How often the model is fitted, the batch size tuned and a report sent."""
    checkpoint_every_s: float = 300.0
    keep_checkpoints: int = 3
    tensorboard: str | Path | None = None
    """A folder for TensorBoard; needs pollux[tensorboard]."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Handed to DistributedDataParallel, for instance {"find_unused_parameters": True}."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_per_gpu_batch_size", "samples_per_pass"):
            checks.whole(InvalidSpec, name, getattr(self, name), 1, optional=True)
        for name in ("min_per_gpu_batch_size", "keep_checkpoints"):
            checks.whole(InvalidSpec, name, getattr(self, name), 1)
        checks.whole(InvalidSpec, "seed", self.seed, 0)
        for name in ("adapt", "guard", "measure_noise"):
            checks.flag(InvalidSpec, name, getattr(self, name))
        for name in ("batch_dependent", "sample_randomness"):
            if getattr(self, name) is not None:
                checks.flag(InvalidSpec, name, getattr(self, name))
        for name in ("checkpoint_dir", "tensorboard"):
            if not isinstance(getattr(self, name), str | Path | None):
                raise InvalidSpec(name, getattr(self, name), "not a path", "Give the path of a folder")
        if self.emulate is not None:
            checks.text(InvalidSpec, "emulate", self.emulate)
        if not isinstance(self.ddp, Mapping):
            raise InvalidSpec("ddp", self.ddp, "not a dictionary", 'Give for instance {"bucket_cap_mb": 50}')
        if self.ddp.get("static_graph"):
            raise InvalidSpec("ddp", dict(self.ddp), "static_graph rules out accumulation", "Leave static_graph out")
        checks.finite(InvalidSpec, "hysteresis", self.hysteresis, 1)
        checks.finite(InvalidSpec, "noise_window", self.noise_window, 1, above=True)
        for name in ("noise_budget", "report_every_s", "checkpoint_every_s"):
            checks.finite(InvalidSpec, name, getattr(self, name), 0, above=True)

    def told(self, asked: BatchVariables) -> Options:
        """These options with what the owner asks for in their place."""
        return replace(
            self,
            max_batch_size=asked.max_batch_size or self.max_batch_size,
            min_per_gpu_batch_size=asked.min_per_gpu_batch_size or self.min_per_gpu_batch_size,
            max_per_gpu_batch_size=asked.max_per_gpu_batch_size or self.max_per_gpu_batch_size,
            adapt=self.adapt and not asked.is_fixed,
            # A batch size that is to be kept, and is not M0, would otherwise be taken back to it.
            guard=self.guard and (asked.batch_size is None or (self.adapt and not asked.is_fixed)),
        )

    def limits(
        self, loader_batch_size: int, pass_length: int | None, asked: BatchVariables = AS_WRITTEN
    ) -> BatchLimits:
        """The batch sizes that a job may use. M0 is the loader's, unless the owner has asked for another one."""
        initial = asked.initial_batch_size or loader_batch_size
        largest = self.max_batch_size
        if largest is None:
            largest = SAFE_GROWTH * initial
            if pass_length is not None:
                largest = max(initial, min(largest, pass_length // STEPS_A_PASS))
            largest = max(largest, asked.batch_size or 0)
        if largest < initial:
            raise _too_small(initial, largest, asked)
        if asked.batch_size is not None and not initial <= asked.batch_size <= largest:
            raise InvalidSpec(
                variable("batch_size"),
                asked.batch_size,
                f"not between the initial batch size {initial} and max_batch_size = {largest}",
                "Correct batch_size in the job's specification, or give initial_batch_size or max_batch_size there",
            )
        per_gpu = min(self.max_per_gpu_batch_size or largest, largest)
        # Alone a job starts at M0 whatever the least is, and without adaptation it stays there.
        least = min(self.min_per_gpu_batch_size, per_gpu, initial) if self.adapt else 1
        return BatchLimits(initial, largest, least, per_gpu)


def _too_small(initial: int, largest: int, asked: BatchVariables) -> InvalidSpec:
    """Who said the larger one, and who the smaller?"""
    if asked.max_batch_size is None and asked.initial_batch_size is not None:
        return InvalidSpec(
            variable("initial_batch_size"),
            initial,
            f"greater than the script's max_batch_size = {largest}",
            "Lower initial_batch_size in the job's specification, or give max_batch_size there",
        )
    name = "max_batch_size" if asked.max_batch_size is None else variable("max_batch_size")
    return InvalidSpec(
        name,
        largest,
        f"less than the batch size of the loader, {initial}",
        "Raise it, or lower the batch_size of the DataLoader: Pollux starts there and never goes below",
    )
