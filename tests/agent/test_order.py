"""The order of samples: fixed by the seed and the pass, on every machine and for every reader."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from pollux.agent.order import Order, SamplerOrder, permutation


@given(size=st.integers(0, 500), seed=st.integers(0, 2**70), pass_index=st.integers(0, 10**6))
def test_a_permutation_holds_every_sample_once(size: int, seed: int, pass_index: int) -> None:
    assert sorted(permutation(size, seed, pass_index).tolist()) == list(range(size))


def test_permutations_are_the_same_for_ever() -> None:
    assert permutation(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert permutation(8, 0, 1).tolist() == [3, 7, 4, 2, 1, 6, 5, 0]
    assert permutation(8, 5, 0).tolist() == [3, 6, 2, 4, 5, 7, 0, 1]


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(permutation(50, seed, index).tolist()) for seed in range(4) for index in range(4)}
    assert len(orders) == 16


@given(reads=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(0, 12)), max_size=20))
def test_any_reading_of_an_order_gives_its_permutation(reads: list[tuple[int, int, int]]) -> None:
    order = Order(30, 1, shuffle=True)
    for pass_index, start, length in reads:
        stop = min(start + length, 30)
        assert order.indices(pass_index, start, stop) == permutation(30, 1, pass_index)[start:stop].tolist()


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert Order(10, 3, shuffle=False).indices(5, 2, 6) == [2, 3, 4, 5]


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0, 0.0] * 5, 12),
    "weighted with a generator": lambda: WeightedRandomSampler([1.0] * 20, 12, generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler(range(3, 15)),
    "with replacement": lambda: RandomSampler(range(20), replacement=True, num_samples=12),
    "random": lambda: Shuffled(),
}


class Shuffled(Sampler[int]):
    """Draws from Python and NumPy."""

    def __len__(self) -> int:
        return 12

    def __iter__(self):
        indices = random.sample(range(100), 12)
        np.random.shuffle(indices)  # noqa: NPY002
        return iter(indices)


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_the_users_sampler_draws_the_same_on_every_replica_and_disturbs_no_other_draw(make) -> None:
    torch.manual_seed(1)
    undisturbed = torch.rand(1)
    torch.manual_seed(1)
    first = SamplerOrder(make(), 4)
    drawn = [first.indices(index, 0, 12) for index in range(3)]
    assert torch.equal(torch.rand(1), undisturbed)
    torch.manual_seed(77)
    other = SamplerOrder(make(), 4)
    assert other.indices(2, 0, 12) == drawn[2]  # a resumed job begins there
    assert other.indices(0, 0, 12) == drawn[0]
    assert drawn[0] != drawn[1] != drawn[2]
    assert SamplerOrder(make(), 5).indices(0, 0, 12) != drawn[0]


def test_a_sampler_that_wants_to_know_the_epoch_is_told_the_pass() -> None:
    class Epochal(Sampler[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 2

        def __iter__(self):
            return iter([self.epoch, self.epoch])

    assert SamplerOrder(Epochal(), 0).indices(7, 0, 2) == [7, 7]
