"""Iterable datasets: shards are a partition of the pass however it is cut, streams are read by position."""

from __future__ import annotations

import itertools
import logging
import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from pollux.agent.seeding import SourceStates
from pollux.agent.shards import ShardedDataset, ShardOrder, Shards, StreamCursor, stream_notice
from pollux.errors import InvalidSpec, LoopMisuse

repeatable = settings(max_examples=100, deadline=None, derandomize=True)
sizes_of_shards = st.lists(st.integers(1, 9), min_size=1, max_size=8)
SIZES = [3, 7, 1, 5]


class Lists(IterableDataset[Any]):
    """Shards with random access; counts its calls."""

    def __init__(self, sizes: Sequence[int] = SIZES, real: Sequence[int] | None = None) -> None:
        self.said = sizes
        self.real = sizes if real is None else real
        self.calls: list[tuple[int, int, int]] = []

    def sizes(self) -> Sequence[int]:
        return self.said

    def read(self, shard: int, start: int, stop: int) -> Iterable[Any]:
        self.calls.append((shard, start, stop))
        end = stop if stop < self.said[shard] else self.real[shard]
        return [(shard, sample) for sample in range(start, end)]

    def __iter__(self) -> Iterator[Any]:
        for shard, size in enumerate(self.said):
            yield from self.read(shard, 0, size)


class Generators(Lists):
    """Shards that are read one sample after the other."""

    def read(self, shard: int, start: int, stop: int) -> Iterator[Any]:
        yield from super().read(shard, start, stop)


class Augmented(Lists):
    def read(self, shard: int, start: int, stop: int) -> Iterator[Any]:
        for sample in range(start, stop):
            yield shard, sample, random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def keys(pass_index: int, start: int, stop: int) -> list[tuple[int, int]]:
    return [(pass_index, position) for position in range(start, stop)]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def cuts(total: int, data: st.DataObject) -> list[tuple[int, int]]:
    inner = data.draw(st.lists(st.integers(0, total), max_size=6))
    edges = [0, *sorted(inner), total]
    return list(itertools.pairwise(edges))


@repeatable
@given(sizes_of_shards, st.integers(-5, 5), st.integers(0, 3), st.booleans(), st.data())
def test_any_cut_of_a_pass_gives_the_same_samples_each_once(
    sizes: list[int], seed: int, pass_index: int, shuffle: bool, data: st.DataObject
) -> None:
    order = ShardOrder(sizes, seed, shuffle)
    whole = [(s, i) for s, a, b in order.ranges(pass_index, 0, sum(sizes)) for i in range(a, b)]
    assert sorted(whole) == [(s, i) for s, size in enumerate(sizes) for i in range(size)]
    again = ShardOrder(sizes, seed, shuffle)
    parts = [again.ranges(pass_index, a, b) for a, b in cuts(sum(sizes), data)]
    assert [(s, i) for part in parts for s, a, b in part for i in range(a, b)] == whole
    for part in parts:
        assert len({shard for shard, _, _ in part}) == len(part), "one range for each shard"
        assert all(a < b for _, a, b in part)


def test_passes_and_seeds_read_the_shards_in_other_orders() -> None:
    many = [4] * 20
    order = ShardOrder(many, seed=1)
    orders = [order.shards(0), order.shards(1), order.shards(2), ShardOrder(many, seed=2).shards(0)]
    assert all(sorted(shards) == list(range(20)) for shards in orders)
    assert len({tuple(shards) for shards in orders}) == 4
    assert order.shards(0) == orders[0]
    assert ShardOrder(many, seed=1, shuffle=False).shards(5) == list(range(20))


def test_the_order_of_a_seed_never_changes() -> None:
    assert ShardOrder([1] * 8, seed=1).shards(0) == [0, 4, 3, 1, 6, 2, 7, 5]


@pytest.mark.parametrize("sizes", [[3, 0], [3, -2], [3, 1.5], [3, None]])
def test_a_size_that_is_no_number_of_samples_is_refused(sizes: list[Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"sizes\(\)\[1\] = .*: not a number of samples"):
        ShardOrder(sizes, seed=0)


def test_a_dataset_without_shards_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="without shards"):
        ShardOrder([], seed=0)


def test_sizes_may_be_numpy_integers() -> None:
    assert ShardOrder(np.array([2, 3]), seed=0).num_samples == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (10, 17)])
def test_positions_outside_of_the_pass_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match="of a pass of 16 samples"):
        ShardOrder(SIZES, seed=0).ranges(0, *span)


def test_the_protocol_can_be_told_from_other_datasets() -> None:
    assert isinstance(Lists(), Shards)
    assert not isinstance(Counting(3), Shards)


@repeatable
@given(st.sampled_from([Lists, Generators]), st.booleans(), st.data())
def test_sharded_samples_do_not_depend_on_who_reads_which_part(
    kind: type[Lists], seeded: bool, data: st.DataObject
) -> None:
    whole = ShardedDataset(Lists(), seed=4).__getitems__(keys(2, 0, 16))
    readers = [ShardedDataset(kind(), seed=4, seeded=seeded) for _ in range(data.draw(st.integers(1, 3)))]
    parts = []
    for count, (start, stop) in enumerate(cuts(16, data)):
        parts += readers[count % len(readers)].__getitems__(keys(2, start, stop))
    assert parts == whole


def test_a_list_reader_is_called_for_what_is_needed() -> None:
    shards = Lists()
    dataset = ShardedDataset(shards, seed=4, shuffle=False)
    assert dataset.__getitems__(keys(0, 2, 9)) == [(0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    assert shards.calls == [(0, 2, 3), (1, 0, 6)]
    assert dataset[0, 15] == (3, 4)


def test_a_generator_is_opened_once_a_shard_and_read_over_the_parts_of_others() -> None:
    shards = Generators()
    dataset = ShardedDataset(shards, seed=4, shuffle=False)
    for start, stop in [(0, 2), (2, 4), (4, 5), (8, 9), (12, 16)]:
        dataset.__getitems__(keys(0, start, stop))
    assert shards.calls == [(0, 0, 3), (1, 0, 7), (3, 1, 5)]


def test_a_generator_is_opened_anew_to_go_back_and_for_a_new_pass() -> None:
    shards = Generators([8])
    dataset = ShardedDataset(shards, seed=4)
    assert dataset.__getitems__(keys(0, 4, 6)) == dataset.__getitems__(keys(0, 4, 6))
    dataset.__getitems__(keys(1, 6, 8))
    dataset.__getitems__(keys(1, 0, 1))
    assert shards.calls == [(0, 4, 8), (0, 4, 8), (0, 0, 8)]


@pytest.mark.parametrize("kind", [Lists, Generators])
@pytest.mark.parametrize(("real", "said"), [(6, r"ended after 6 samples"), (8, r"yields more than 7 samples")])
def test_a_shard_of_another_size_than_said_is_named(kind: type[Lists], real: int, said: str) -> None:
    dataset = ShardedDataset(kind(SIZES, [3, real, 1, 5]), seed=4, shuffle=False)
    dataset.__getitems__(keys(0, 0, 3))
    with pytest.raises(InvalidSpec, match=rf"sizes\(\)\[1\] = 7: read\(1, 0, 7\) {said}"):
        dataset.__getitems__(keys(0, 3, 10))


def test_a_reader_that_fails_is_not_read_on() -> None:
    class Fails(Lists):
        def read(self, shard: int, start: int, stop: int) -> Iterator[Any]:
            self.calls.append((shard, start, stop))
            yield from range(start, min(stop, 4))
            if len(self.calls) == 1:
                raise OSError("connection lost")
            yield from range(4, stop)

    dataset = ShardedDataset(Fails([8]), seed=0)
    with pytest.raises(OSError, match="connection lost"):
        dataset.__getitems__(keys(0, 0, 6))
    assert dataset.__getitems__(keys(0, 0, 6)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Lists, Generators])
def test_a_loader_reads_shards_like_a_map_style_dataset(kind: type[Lists], num_workers: int) -> None:
    dataset = ShardedDataset(kind(), seed=4)
    assert len(dataset) == 16
    batches = [keys(0, start, min(start + 3, 16)) for start in range(0, 16, 3)]
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=num_workers, collate_fn=as_list)
    assert [sample for batch in loader for sample in batch] == dataset.__getitems__(keys(0, 0, 16))


def test_what_a_generator_draws_belongs_to_the_sample() -> None:
    before = SourceStates.now()
    whole = ShardedDataset(Augmented(), seed=4).__getitems__(keys(0, 0, 16))
    assert len({sample[2:] for sample in whole}) == 16
    odd = ShardedDataset(Augmented(), seed=4)
    for start, stop in [(1, 2), (4, 9), (13, 14)]:
        assert odd.__getitems__(keys(0, start, stop)) == whole[start:stop]
    assert before.is_now()


def test_an_open_generator_does_not_keep_a_dataset_from_spawned_workers() -> None:
    dataset = ShardedDataset(Generators(), seed=4)
    dataset.__getitems__(keys(0, 0, 2))
    sent = pickle.loads(pickle.dumps(dataset))
    assert sent.__getitems__(keys(0, 2, 9)) == dataset.__getitems__(keys(0, 2, 9))


class Counting(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Shuffling(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        waiting = list(range(12))
        while waiting:
            yield waiting.pop(random.randrange(len(waiting)))


def test_a_stream_is_read_by_position_and_says_where_it_ends() -> None:
    cursor = StreamCursor(Counting(10))
    assert cursor.take(0, 2, 4) == [2, 3]
    assert cursor.take(0, 4, 4) == []
    assert cursor.take(0, 6, 9) == [6, 7, 8]
    assert cursor.take(0, 9, 12) == [9]
    assert cursor.take(0, 12, 15) == []
    assert cursor.take(1, 0, 2) == [0, 1]
    assert StreamCursor(Counting(10)).take(3, 20, 25) == []


def test_a_stream_does_not_go_back() -> None:
    cursor = StreamCursor(Counting(10))
    cursor.take(0, 2, 6)
    with pytest.raises(LoopMisuse, match="position 3 of pass 0 was asked for after position 5"):
        cursor.take(0, 3, 4)
    cursor.take(0, 6, 20)
    with pytest.raises(LoopMisuse, match="cannot go back"):
        cursor.take(0, 9, 12)


def test_a_shuffling_stream_is_the_same_for_all_and_undisturbed_by_training() -> None:
    whole = StreamCursor(Shuffling(), seed=2).take(0, 0, 20)
    assert sorted(whole) == list(range(12))
    replicas = [StreamCursor(Shuffling(), seed=2) for _ in range(2)]
    parts: list[int] = []
    for start in range(0, 12, 4):
        for rank, cursor in enumerate(replicas):
            parts += cursor.take(0, start + 2 * rank, start + 2 * rank + 2)
            random.random()  # the training's own
    assert parts == whole
    assert StreamCursor(Shuffling(), seed=2).take(0, 5, 9) == whole[5:9]
    assert StreamCursor(Shuffling(), seed=2).take(1, 0, 12) != whole
    before = SourceStates.now()
    replicas[0].take(1, 0, 5)
    assert before.is_now()


def test_a_stream_that_cannot_start_again_is_named() -> None:
    class Once(Counting):
        def __init__(self) -> None:
            self.iterator = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.iterator

    cursor = StreamCursor(Once())
    assert cursor.take(0, 0, 5) == [0, 1, 2]
    with pytest.raises(LoopMisuse, match="pass 1 over Once has no sample"):
        cursor.take(1, 0, 5)


def test_the_notice_says_at_least_once_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        logging.getLogger(__name__).warning(stream_notice(Counting(3)))
    assert "at least once" in caplog.text
    assert "sizes() and read()" in caplog.text
