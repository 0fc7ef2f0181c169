"""In which order a pass delivers the samples: fixed by the seed and the number of the pass, not by who reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pollux.agent.seeding import seed_sources, sources_kept
from pollux.errors import InvalidSpec


def permutation(num_samples: int, seed: int, pass_index: int) -> NDArray[np.int64]:
    """The shuffled sample indices of one pass.

    By sorting raw random bits, whose stream NumPy keeps for ever: a shuffle of its own may change between versions.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, pass_index])).random_raw(num_samples)
    return np.argsort(bits, kind="stable")


class Order:
    """The sample index at every position of every pass. Keeps the last two passes: loaders read ahead into the next."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._shuffle = shuffle
        self._kept: dict[int, NDArray[np.int64]] = {}

    def indices(self, pass_index: int, start: int, stop: int) -> list[int]:
        order = self._kept.get(pass_index)
        if order is None:
            order = self.make(pass_index)
            self._kept = {p: o for p, o in self._kept.items() if p == pass_index - 1}
            self._kept[pass_index] = order
        indices: list[int] = order[start:stop].tolist()
        return indices

    def make(self, pass_index: int) -> NDArray[np.int64]:
        if self._shuffle:
            return permutation(self.num_samples, self.seed, pass_index)
        return np.arange(self.num_samples)


class SamplerOrder(Order):
    """The order of the user's own sampler (weighted, a subset …), drawn under a seed so that all replicas agree."""

    def __init__(self, sampler: Any, seed: int) -> None:
        if not hasattr(sampler, "__len__"):
            raise InvalidSpec("sampler", type(sampler).__name__, "does not say how long a pass is", "Give it a __len__")
        super().__init__(len(sampler), seed, shuffle=False)
        self._sampler = sampler
        if not np.array_equal(self.make(0), self.make(0)):
            raise InvalidSpec(
                "sampler",
                type(sampler).__name__,
                "draws from a random source of its own, so that no pass could be repeated or shared",
                "Draw from its `generator` (a torch.Generator) or from the global sources of torch, numpy or random",
            )

    def make(self, pass_index: int) -> NDArray[np.int64]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(pass_index)
        with sources_kept():
            seed_sources(self.seed, pass_index, 0)
            generator = getattr(self._sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(torch.default_generator.initial_seed())
            order = np.fromiter((int(index) for index in self._sampler), dtype=np.int64)
        if len(order) != self.num_samples:
            raise InvalidSpec(
                "sampler",
                type(self._sampler).__name__,
                f"drew {len(order)} samples for pass {pass_index}, its len() is {self.num_samples}",
                "Use a sampler whose every pass has the same length",
            )
        return order
