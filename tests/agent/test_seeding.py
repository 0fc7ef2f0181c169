"""Random augmentation: the same sample gets the same numbers, whoever reads it; nobody else notices."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from pollux.agent.seeding import (
    SeededDataset,
    SourceStates,
    draws_randomness,
    sources_kept,
)
from pollux.errors import LoopMisuse

Sample = tuple[int, float, float, float]


class Augmented(Dataset[Sample]):
    """Every sample draws from all three sources, a different number of times each."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Sample:
        for _ in range(index % 3):
            random.random()
        return index, random.gauss(0.0, 1.0), float(np.random.randn()), float(torch.rand(()))  # noqa: NPY002


class AugmentedInBatches(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [self[index] for index in indices]


class Plain(Dataset[int]):
    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError("no such sample")
        return index * 10


class PlainInBatches(Plain):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] + 1 for index in indices]


class DrawsAtTheEnd(Plain):
    def __getitem__(self, index: int) -> int:
        return int(np.random.randint(5)) if index == self.length - 1 else index  # noqa: NPY002


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def read(dataset: Dataset[Any], pass_index: int, batches: list[list[int]], num_workers: int = 0) -> dict[int, Any]:
    keys = [[(pass_index, index) for index in batch] for batch in batches]
    loader = DataLoader(dataset, batch_sampler=keys, num_workers=num_workers, collate_fn=as_list)
    return {sample[0]: sample for batch in loader for sample in batch}


IN_FOURS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
IN_OTHER_PARTS = [[11, 5, 2], [10, 3, 1, 0, 8], [7], [9, 4, 6]]


@pytest.mark.parametrize("dataset", [Augmented(), AugmentedInBatches()], ids=["single", "batches"])
def test_a_sample_draws_the_same_numbers_in_any_batch_and_in_workers(dataset: Dataset[Any]) -> None:
    seeded = SeededDataset(dataset, seed=3)
    expected = read(seeded, 0, IN_FOURS)
    assert len({sample[1:] for sample in expected.values()}) == 12, "each sample has its own numbers"
    assert read(seeded, 0, IN_OTHER_PARTS) == expected
    assert read(seeded, 0, IN_OTHER_PARTS, num_workers=2) == expected
    assert {i: seeded[0, i] for i in range(12)} == expected


def test_passes_and_seeds_draw_other_numbers() -> None:
    seen = [read(SeededDataset(Augmented(), seed), p, IN_FOURS)[5][1:] for seed, p in [(3, 0), (3, 1), (4, 0), (-1, 0)]]
    assert len(set(seen)) == 4
    assert len({number for numbers in seen for number in numbers}) == 12


def test_the_training_process_does_not_notice_that_samples_draw() -> None:
    random.gauss(0.0, 1.0)  # leaves a second number waiting inside the source
    np.random.randn()  # noqa: NPY002
    before = SourceStates.now()
    SeededDataset(Augmented(), seed=3).__getitems__([(0, 1), (0, 2)])
    assert before.is_now()
    with pytest.raises(IndexError):
        SeededDataset(Plain(), seed=3).__getitems__([(0, 99)])
    assert before.is_now()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn, lambda: torch.rand(())])
def test_a_draw_from_any_source_is_seen(draw: Any) -> None:
    with sources_kept():
        np.random.randn()  # noqa: NPY002 - makes two numbers: the next draw may take what is left over
        before = SourceStates.now()
        draw()
        assert not before.is_now()


def test_randomness_is_found_where_it_is_and_put_back() -> None:
    before = SourceStates.now()
    assert draws_randomness(Augmented())
    assert draws_randomness(AugmentedInBatches())
    assert draws_randomness(DrawsAtTheEnd(100))
    assert not draws_randomness(Plain())
    assert not draws_randomness(PlainInBatches())
    assert before.is_now()


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_datasets_shorter_than_the_probes_are_looked_at_whole(length: int) -> None:
    assert not draws_randomness(Plain(length))
    assert draws_randomness(DrawsAtTheEnd(length)) == (length > 0)


def test_a_sample_that_fails_is_named() -> None:
    class Broken(Plain):
        def __getitem__(self, index: int) -> int:
            if index:
                raise OSError("file is gone")
            return 0

    with pytest.raises(OSError, match="file is gone") as caught:
        draws_randomness(Broken())
    assert "sample 11 of the dataset" in caught.value.__notes__[0]


def test_a_dataset_that_makes_collated_batches_cannot_be_seeded() -> None:
    class Collated(Plain):
        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

    assert not draws_randomness(Collated())
    with pytest.raises(LoopMisuse, match=r"Collated.__getitems__\(\[4\]\) gave Tensor"):
        SeededDataset(Collated(), 0).__getitems__([(0, 4), (0, 5)])


def test_a_seeded_dataset_can_be_sent_to_spawned_workers() -> None:
    seeded = pickle.loads(pickle.dumps(SeededDataset(Augmented(), 3)))
    assert seeded[1, 5] == SeededDataset(Augmented(), 3)[1, 5]
    assert len(seeded) == 24
