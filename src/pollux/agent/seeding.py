"""Augmentation that depends on the sample, not on who reads it.

A loader hands `SeededDataset` a `SampleKey` for each sample. Whatever the dataset draws while it makes a sample, from
Python's `random`, from NumPy's global source or from torch's CPU generator, follows from the seed, the pass and the
sample: the same with any number of replicas, workers and passes over the model. Sources of the dataset's own (a
`numpy.random.Generator` that it keeps, say) are not seen here, nor is what `collate_fn` draws.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from pollux.errors import LoopMisuse

SampleKey: TypeAlias = tuple[int, int]
"""(pass, sample): what a batch sampler yields lists of. Plain ints, because datasets may index with them."""

_SEEDS = struct.Struct("<QQI")  # random, torch, NumPy (whose global source takes 32 bits)


def digest(seed: int, pass_index: int, index: int) -> bytes:
    """20 bytes that follow from the three numbers alone, on every machine and in every version."""
    return blake2b(b"%d/%d/%d" % (seed, pass_index, index), digest_size=_SEEDS.size).digest()


def seed_sources(seed: int, pass_index: int, index: int) -> None:
    """Put the three global sources into the state that belongs to one sample of one pass."""
    for_random, for_torch, for_numpy = _SEEDS.unpack(digest(seed, pass_index, index))
    random.seed(for_random)
    np.random.seed(for_numpy)  # noqa: NPY002 - the global source is the one that datasets draw from
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would seed all GPUs, too


@dataclass(frozen=True, slots=True, eq=False)
class SourceStates:
    """Where the three global sources are."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor

    @classmethod
    def now(cls) -> SourceStates:
        state = np.random.get_state()  # noqa: NPY002
        assert isinstance(state, tuple)
        return cls(random.getstate(), state, torch.default_generator.get_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.default_generator.set_state(self.torch)

    def is_now(self) -> bool:
        now = SourceStates.now()
        return (
            self.python == now.python
            and all(np.array_equal(mine, other) for mine, other in zip(self.numpy, now.numpy, strict=True))
            and torch.equal(self.torch, now.torch)
        )


@contextlib.contextmanager
def sources_kept() -> Iterator[None]:
    """Draw and seed at will inside; afterwards the three global sources are where they were."""
    before = SourceStates.now()
    try:
        yield
    finally:
        before.restore()


def draws_randomness(dataset: Dataset[Any], probes: int = 3) -> bool:
    """Whether making a sample moves one of the global sources; they are put back. Reads a few samples to find out.

    The samples are made in this process. A dataset that opens its file with the first sample would then share it with
    forked workers: where a loader has workers, seed without asking.
    """
    length = len(dataset)  # type: ignore[arg-type]
    count = min(probes, length)
    before = SourceStates.now()
    try:
        for probe in range(count):
            index = probe * (length - 1) // max(count - 1, 1)
            try:
                many = _batch_method(dataset)
                _ = dataset[index] if many is None else many([index])
            except Exception as error:
                error.add_note(f"Raised by sample {index} of the dataset, read to see whether it draws random numbers.")
                raise
            if not before.is_now():
                return True
        return False
    finally:
        before.restore()


class SeededDataset(Dataset[Any]):
    """A map-style dataset under `SampleKey`s, whose random draws follow from (seed, pass, sample).

    Where the training process makes the samples, its own random numbers (dropout …) go on as if nothing had been drawn.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: SampleKey) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[SampleKey]) -> list[Any]:
        # One by one even where the dataset makes batches: which samples meet in a batch depends on the replicas.
        samples = []
        with sources_kept():  # once for all: NumPy's state alone takes 0.1 ms
            for pass_index, index in keys:
                seed_sources(self.seed, pass_index, index)
                samples.append(_one(self.dataset, index))
        return samples


def _batch_method(dataset: Dataset[Any]) -> Callable[[list[int]], Any] | None:
    """The method by which torch's loaders ask a dataset for a whole batch, if it has one."""
    return getattr(dataset, "__getitems__", None) or None


def _one(dataset: Dataset[Any], index: int) -> Any:
    """One sample, made the way a loader would make it."""
    many = _batch_method(dataset)
    if many is None:
        return dataset[index]
    samples = many([index])
    if not isinstance(samples, list | tuple) or len(samples) != 1:
        raise LoopMisuse(
            f"{type(dataset).__name__}.__getitems__([{index}]) gave {type(samples).__name__}, not a list of one sample",
            "Let __getitems__ return one sample for each index, and make the batch in collate_fn",
        )
    return samples[0]
