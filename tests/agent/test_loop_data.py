"""Which samples a prepared loop delivers: each once a pass, in one order, however the steps are cut."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from pollux.agent.batching import BatchConfig
from pollux.agent.dealing import Dealer
from pollux.agent.loader import Feed
from pollux.agent.order import Order
from pollux.agent.replicas import Replicas
from pollux.torch import Job, permutation

from .loops import Indices, job_maker, pinned  # noqa: F401

M0 = 8
SIZE = 45


class Loop:
    """A loop over sample numbers that changes its batch size as told."""

    def __init__(self, job: Job, dataset: Dataset[Any], batch_size: int = M0, **settings: Any) -> None:
        model = nn.Linear(1, 1)
        self.job = job
        self.model, self.optimizer, self.loader = job.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(dataset, batch_size, **settings)
        )

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.job.backward(self.model(torch.ones(1, 1)).mean())
        self.optimizer.step()

    def resize(self, batch_size: int) -> None:
        self.job._made.adapter.apply(BatchConfig(batch_size, batch_size, 1), "test", None)

    def passes(self, count: int, between: Callable[[], None] = lambda: None) -> list[list[Any]]:
        """What each pass delivers; `between` runs after each body."""
        turns: list[list[Any]] = []
        for _ in self.job.passes(count):
            turns.append([])
            for batch in self.loader:
                turns[-1] += batch.tolist()
                self.train()
                between()
        return turns


def orders(count: int, size: int = SIZE) -> list[list[int]]:
    return [permutation(size, 0, index).tolist() for index in range(count)]


# Cuts


@pytest.mark.parametrize(
    "options",
    [
        {"adapt": False, "measure_noise": False},
        {"adapt": False},
        {"adapt": False, "max_per_gpu_batch_size": 3},
        {"adapt": False, "max_per_gpu_batch_size": 1, "measure_noise": False},
    ],
    ids=["plain", "measured", "accumulated", "one by one"],
)
@pytest.mark.parametrize("batch_size", [1, 7, 8, 45, 100])
def test_the_order_does_not_depend_on_how_steps_are_cut(make_job, options: dict[str, Any], batch_size: int) -> None:
    loop = Loop(make_job(**options), Indices(SIZE), batch_size, shuffle=True)
    assert loop.passes(2) == orders(2)


@pytest.mark.parametrize("is_persistent", [False, True], ids=["", "persistent"])
def test_the_order_does_not_depend_on_workers_that_read_ahead(make_job, is_persistent: bool) -> None:
    job = make_job(guard=False, measure_noise=False, max_batch_size=40)
    loop = Loop(
        job, Indices(SIZE), shuffle=True, num_workers=2, persistent_workers=is_persistent, in_order=not is_persistent
    )
    sizes = iter([8, 13, 40, 21, 9, 30])
    assert loop.passes(2, lambda: loop.resize(next(sizes, 16))) == orders(2)
    # A break in the middle, with batches on their way.
    seen: list[int] = []
    for turn in job.passes(1):
        for batch in loop.loader:
            seen += batch.tolist()
            loop.train()
            if len(seen) > 20:
                break
        for batch in loop.loader:
            seen += batch.tolist()
            loop.train()
        assert turn == 0
    assert seen == permutation(SIZE, 0, 2).tolist()
    job._made.loader._source._loader._iterator = None  # workers that persist end with it


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(8, 60), max_size=12), largest=st.integers(1, 60), leaves=st.sets(st.integers(0, 30)))
def test_changes_of_the_batch_size_and_breaks_lose_and_repeat_nothing(
    sizes: list[int], largest: int, leaves: set[int]
) -> None:
    job = Job(guard=False, max_batch_size=60, max_per_gpu_batch_size=largest)
    loop = Loop(job, Indices(SIZE), shuffle=True)
    committed: list[int] = []
    step: list[int] = []
    wanted, bodies = iter(sizes), 0
    for _ in job.passes(3):
        while not job._made.loop.is_over():
            step.clear()
            for batch in loop.loader:
                bodies += 1
                step += batch.tolist()
                if bodies in leaves:
                    break  # what its step has seen so far comes again
                before = job.steps
                is_last = job._made.stepper.is_last
                loop.train()
                if is_last:
                    committed += step
                    step.clear()
                    loop.resize(next(wanted, 16))
                assert job.steps == before  # counted once the body is over
    job.close()
    assert committed == [sample for one in orders(3) for sample in one]


def test_a_replica_without_a_sample_of_its_own_runs_the_others_for_nothing() -> None:
    """Two samples are left of a pass when a job goes on with three replicas."""
    taken = []
    for rank in range(3):
        replicas = Replicas(rank, 3, 1, torch.device("cpu"))
        dealer = Dealer(10, BatchConfig(6, 2, 1), 3)
        dealer.resume(dealer.committed.__class__(0, 8, 4))
        feed = Feed(Order(10, 0, shuffle=False), replicas, is_keyed=False)
        feed.dealer = dealer
        keys = next(iter(feed))
        plan, index = feed.dealt[0]
        start, stop = plan.slice_of(rank, 3, index)
        taken.append((keys, stop - start))
    assert taken == [([8, 9], 0), ([8], 1), ([9], 1)]


# Samplers


def test_without_shuffling_the_samples_come_in_sequence(make_job) -> None:
    assert Loop(pinned(make_job), Indices(SIZE)).passes(2) == [list(range(SIZE))] * 2


def test_a_sampler_of_the_users_is_followed(make_job) -> None:
    runs = []
    for options in ({}, {"max_per_gpu_batch_size": 3}):
        subset = Loop(pinned(make_job, **options), Indices(SIZE), sampler=SubsetRandomSampler(range(10, 30)))
        weighted = Loop(
            pinned(make_job, **options),
            Indices(SIZE),
            sampler=WeightedRandomSampler([0.0] * 40 + [1.0] * 5, 21),
        )
        assert len(subset.loader) == len(weighted.loader) == 3
        runs.append((subset.passes(2), weighted.passes(2)))
    assert runs[0] == runs[1]
    (first, second), weights = runs[0]
    assert sorted(first) == sorted(second) == list(range(10, 30))
    assert first != second
    assert {len(one) for one in weights} == {21}
    assert {sample for one in weights for sample in one} <= set(range(40, 45))


# Randomness inside samples


class Augmented(Indices):
    """A sample with noise from each of the three global sources."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        return torch.tensor([float(index), *noise], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_noise_of_a_sample_does_not_depend_on_the_batch(make_job, workers: int) -> None:
    runs = [
        Loop(pinned(make_job, **options), Augmented(SIZE), batch_size, shuffle=True, num_workers=workers).passes(2)
        for batch_size, options in ((8, {}), (20, {}), (20, {"max_per_gpu_batch_size": 7}))
    ]
    assert runs[0] == runs[1] == runs[2]
    first, second = ({sample[0]: sample[1:] for sample in one} for one in runs[0])
    assert all(first[index] != second[index] for index in first)  # a new draw in each pass
    assert len({value for noise in first.values() for value in noise}) == 3 * SIZE


# Iterable datasets


class InShards(IterableDataset[int]):
    """Ten shards of unequal size, with `sizes` and `read` as `pollux.torch.Shards` has them."""

    def sizes(self) -> list[int]:
        return [3, 9, 1, 4, 6, 2, 8, 5, 4, 3]

    def read(self, shard: int, start: int, stop: int) -> list[int]:
        first = sum(self.sizes()[:shard])
        return list(range(first + start, first + stop))

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_delivered_exactly_once(make_job, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    runs = [
        Loop(make_job(adapt=False, max_per_gpu_batch_size=largest), InShards(), num_workers=workers).passes(2)
        for largest in (8, 3)
    ]
    assert runs[0] == runs[1]
    assert [sorted(one) for one in runs[0]] == [list(range(SIZE))] * 2
    assert runs[0][0] != runs[0][1]
    assert not caplog.messages


class Stream(IterableDataset[int]):
    """Forty-five numbers, shuffled by whatever source torch has."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SIZE).tolist()


@pytest.mark.parametrize("options", [{}, {"max_per_gpu_batch_size": 3}, {"measure_noise": True}], ids=str)
@pytest.mark.parametrize("batch_size", [1, 8, 9, 45, 60])
def test_a_stream_is_read_to_its_end_in_every_pass(make_job, options: dict[str, Any], batch_size: int) -> None:
    job = make_job(**{"adapt": False, "measure_noise": False, **options})
    turns = Loop(job, Stream(), batch_size).passes(3)
    assert [sorted(one) for one in turns] == [list(range(SIZE))] * 3
    assert turns == Loop(pinned(make_job), Stream(), 5).passes(3)
    assert turns[0] != turns[1]


def test_a_stream_is_announced_as_such(make_job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Loop(pinned(make_job), Stream(), num_workers=2, drop_last=True)
    assert "Stream is a stream" in caplog.text
    assert "at least once" in caplog.text
    assert "num_workers = 2 is not used" in caplog.text
    assert "drop_last is not used" in caplog.text


def test_a_stream_of_known_length_has_epochs_which_may_end_inside_a_pass(make_job) -> None:
    job = make_job(adapt=False, measure_noise=False, samples_per_pass=40)
    loop = Loop(job, Stream())
    assert len(loop.loader) == 5
    turns: list[list[int]] = []
    for _ in job.epochs(3):
        turns.append([])
        for batch in loop.loader:
            turns[-1] += batch.tolist()
            loop.train()
    assert job.progress == 15.0
    whole = Loop(pinned(make_job), Stream()).passes(3)
    assert [sample for one in turns for sample in one] == [sample for one in whole for sample in one][:114]
    assert [len(one) for one in turns] == [40, 37, 37]


def test_a_stream_without_end_is_a_single_pass(make_job) -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            number = 0
            while True:
                yield number
                number += 1

    job = make_job(adapt=False, samples_per_pass=16)
    loop = Loop(job, Endless())
    seen: list[int] = []
    for _ in job.epochs(4):
        for batch in loop.loader:
            seen += batch.tolist()
            loop.train()
    assert seen == list(range(64))


def test_what_the_script_draws_is_not_disturbed_by_reading(make_job) -> None:
    draws = []
    for dataset in (Indices(SIZE), Augmented(SIZE), InShards(), Stream()):
        loop = Loop(pinned(make_job), dataset)
        torch.manual_seed(1)
        taken = []
        for _ in loop.job.passes(1):
            for number, _ in enumerate(loop.loader):
                if number == 0:
                    torch.manual_seed(1)  # DataLoader itself draws a seed when its loop begins
                taken.append(float(torch.rand(())))
                loop.train()
        draws.append(taken)
    assert draws[0] == draws[1] == draws[2] == draws[3]
