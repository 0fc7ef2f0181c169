"""Evaluation loaders: each sample at one replica, once; everything else as the user set it."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from pollux.agent.evaluation import CHOOSES_SAMPLES, rebuild, shard_loader
from pollux.agent.metrics import Average
from pollux.agent.seeding import SeededDataset
from pollux.errors import InvalidSpec, LoopMisuse


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.offset = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index + self.offset


class Stream(IterableDataset[int]):
    """Splits itself among workers, as torch asks of iterable datasets."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.offset = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first + self.offset, self.length + self.offset, step))


class EvensThenOdds:
    """A sampler of the user's own."""

    def __init__(self, length: int) -> None:
        self.order = [*range(0, length, 2), *range(1, length, 2)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class PairsAndTriples:
    """A batch sampler of the user's own."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 2
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, 5 - size

    def __len__(self) -> int:
        return len(list(iter(self)))


def values(loader: DataLoader[Any]) -> list[int]:
    return [int(value) for batch in loader for value in batch]


def parts(loader: DataLoader[Any], size: int) -> list[list[int]]:
    return [values(shard_loader(loader, rank, size)) for rank in range(size)]


LENGTHS = [0, 1, 2, 3, 7, 16, 23]
LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "sequential": lambda n: DataLoader(Numbers(n), batch_size=4),
    "shuffled": lambda n: DataLoader(Numbers(n), batch_size=4, shuffle=n > 0),
    "drop_last": lambda n: DataLoader(Numbers(n), batch_size=4, drop_last=True),
    "subset": lambda n: DataLoader(Numbers(2 * n), batch_size=4, sampler=SubsetRandomSampler(list(range(n)))),
    "own sampler": lambda n: DataLoader(Numbers(n), batch_size=4, sampler=EvensThenOdds(n)),
    "own sampler, drop_last": lambda n: DataLoader(Numbers(n), 4, sampler=EvensThenOdds(n), drop_last=True),
    "own batch sampler": lambda n: DataLoader(Numbers(n), batch_sampler=PairsAndTriples(n)),
    "torch's batch sampler": lambda n: DataLoader(
        Numbers(n), batch_sampler=BatchSampler(SequentialSampler(range(n)), 4, True)
    ),
    "stream": lambda n: DataLoader(Stream(n), batch_size=4),
    "stream, drop_last": lambda n: DataLoader(Stream(n), batch_size=4, drop_last=True),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_sample_counts_once_over_all_replicas(kind: str, size: int, length: int) -> None:
    counted = sorted(value for part in parts(LOADERS[kind](length), size) for value in part)
    assert counted == list(range(length))


@pytest.mark.parametrize("kind", ["sequential", "shuffled", "subset"])
def test_shares_are_contiguous_and_differ_by_one_sample_at_most(kind: str) -> None:
    shares = parts(LOADERS[kind](23), 4)
    assert [len(share) for share in shares] == [5, 6, 6, 6]
    assert [value for share in shares for value in share] == list(range(23))


@pytest.mark.parametrize("kind", ["own sampler", "own batch sampler"])
def test_a_sampler_of_the_users_own_keeps_its_batches(kind: str) -> None:
    def batches(loader: DataLoader[Any]) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    loader = LOADERS[kind](23)
    shares = [batches(shard_loader(loader, rank, 2)) for rank in range(2)]
    assert shares == [batches(loader)[0::2], batches(loader)[1::2]]
    assert [len(shard_loader(loader, rank, 2)) for rank in range(2)] == [len(share) for share in shares]


@pytest.mark.parametrize("make", [LOADERS["sequential"], lambda n: DataLoader(Numbers(n), None, sampler=range(n))])
def test_a_shards_length_is_its_number_of_batches(make: Callable[[int], DataLoader[Any]]) -> None:
    for rank in range(3):
        shard = shard_loader(make(23), rank, 3)
        assert len(shard) == sum(1 for _ in shard)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(11), batch_size=None),
        DataLoader(Numbers(11), batch_size=None, sampler=EvensThenOdds(11)),
        DataLoader(Stream(11), batch_size=None),
    ],
    ids=["sequential", "own sampler", "stream"],
)
def test_loaders_without_batches_are_split_by_item(loader: DataLoader[Any]) -> None:
    shares = [[int(value) for value in shard_loader(loader, rank, 3)] for rank in range(3)]
    assert sorted(value for share in shares for value in share) == list(range(11))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("make", [Numbers, Stream])
def test_workers_deliver_the_same_samples(make: Callable[[int], Dataset[int]]) -> None:
    shares = parts(DataLoader(make(23), batch_size=4, num_workers=2), 2)
    assert sorted(shares[0] + shares[1]) == list(range(23))


def test_one_replica_keeps_its_loader() -> None:
    loader = DataLoader(Numbers(9), batch_size=4, shuffle=True)
    assert shard_loader(loader, 0, 1) is loader


def test_what_is_not_as_the_user_set_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shard_loader(DataLoader(Numbers(9), batch_size=4, shuffle=True, drop_last=True), 0, 2)
    shard_loader(DataLoader(Numbers(9), batch_size=4, sampler=EvensThenOdds(9)), 0, 2)
    said = " ".join(record.message for record in caplog.records)
    assert "drop_last=True is ignored" in said
    assert "evaluated in sequence" in said
    assert "EvensThenOdds is split by every 2-th batch: it has to yield the same" in said


@pytest.mark.parametrize(
    "sampler",
    [
        DistributedSampler(Numbers(9), num_replicas=2, rank=0),
        WeightedRandomSampler([1.0] * 9, 9),
        RandomSampler(Numbers(9), num_samples=4),
        RandomSampler(Numbers(9), replacement=True),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
@pytest.mark.parametrize("size", [1, 2])
def test_samplers_that_would_not_count_each_sample_once_are_refused(sampler: Any, size: int) -> None:
    with pytest.raises(LoopMisuse, match=type(sampler).__name__):
        shard_loader(DataLoader(Numbers(9), batch_size=4, sampler=sampler), 0, size)
    with pytest.raises(LoopMisuse, match=type(sampler).__name__):
        shard_loader(DataLoader(Numbers(9), batch_sampler=BatchSampler(sampler, 4, False)), 0, size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_replicas_is_refused(rank: int) -> None:
    with pytest.raises(InvalidSpec, match="rank = "):
        shard_loader(DataLoader(Numbers(9)), rank, 2)


def doubled(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 2


def init(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.offset = 100  # type: ignore[attr-defined]


SETTINGS: dict[str, Any] = {
    "num_workers": 1,
    "collate_fn": doubled,
    "pin_memory": True,
    "timeout": 30,
    "worker_init_fn": init,
    "multiprocessing_context": multiprocessing.get_context("fork"),
    "generator": torch.Generator(),
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory_device": "cuda",
    "in_order": False,
}


def test_the_test_below_knows_every_setting_of_this_torch() -> None:
    assert set(SETTINGS) == set(inspect.signature(DataLoader).parameters) - CHOOSES_SAMPLES


def test_a_loader_like_the_users_has_all_its_settings() -> None:
    loader = DataLoader(Numbers(9), batch_size=4, shuffle=True, drop_last=True, **SETTINGS)
    for like in (rebuild(loader, [[1, 2], [3]], loader.dataset), shard_loader(loader, 0, 2)):
        settings = {name: getattr(like, name) for name in SETTINGS}
        assert {**settings, "worker_init_fn": like.worker_init_fn.init} == SETTINGS
        assert like.dataset is loader.dataset
    assert shard_loader(loader, 0, 2).batch_size == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rebuilt_loader_reads_other_batches_from_another_dataset(num_workers: int) -> None:
    loader = DataLoader(Numbers(9), batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=doubled)
    rebuilt = rebuild(loader, [[(0, 4), (0, 2)], [(0, 8)]], SeededDataset(loader.dataset, 0))
    assert [batch.tolist() for batch in rebuilt] == [[8, 4], [16]]


@pytest.mark.usefixtures("spawn")  # its server has torch loaded
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_worker_init_fn_finds_the_users_own_dataset(context: str) -> None:
    loader = DataLoader(Numbers(9), batch_size=4, num_workers=1, worker_init_fn=init, multiprocessing_context=context)
    assert values(rebuild(loader, [[(0, 4), (0, 2)]], SeededDataset(loader.dataset, 0))) == [104, 102]


def test_a_worker_init_fn_of_a_stream_finds_it() -> None:
    loader = DataLoader(Stream(9), batch_size=4, num_workers=2, worker_init_fn=init)
    assert sorted(value for part in parts(loader, 2) for value in part) == list(range(100, 109))


def test_a_dataset_that_makes_its_own_batches_cannot_be_dealt() -> None:
    with pytest.raises(LoopMisuse, match="batch_size=None"):
        rebuild(DataLoader(Numbers(9), batch_size=None), [[1]], Numbers(9))


def test_a_loader_with_its_own_iteration_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Prefetching(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    rebuild(Prefetching(Numbers(9)), [[1]], Numbers(9))
    assert "Prefetching has an __iter__ of its own" in caplog.text


def evaluate(rank: int, size: int, length: int) -> tuple[list[int], float]:
    data = torch.arange(length, dtype=torch.float32)
    loader = shard_loader(DataLoader(TensorDataset(data), batch_size=4), rank, size)

    def reduce(vector: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(vector)
        return vector

    mean, seen = Average(reduce), []
    with torch.inference_mode():
        for (batch,) in loader:
            seen += batch.tolist()
            mean.add(batch.mean(), count=len(batch))
    return seen, mean.compute()


@pytest.mark.parametrize("length", [1, 23])
def test_real_replicas_evaluate_each_sample_once_and_agree_on_the_mean(
    spawn: Callable[..., list[Any]], length: int
) -> None:
    answers = spawn(evaluate, 2, length)
    assert [value for seen, _ in answers for value in seen] == list(range(length))
    assert [mean for _, mean in answers] == pytest.approx([(length - 1) / 2] * 2)
