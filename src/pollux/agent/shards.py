"""Iterable datasets: exactly once through a small protocol, at least once without.

`Shards` says how many samples each shard of a dataset holds and reads a range of one. That is enough to treat the
whole as a map-style dataset of Σ sizes samples (`ShardedDataset`): a pass reads the shards in an order that follows
from the seed and the pass, the samples of a shard in their own order, and any cut of the positions into ranges gives
the same samples. Any other `IterableDataset` is a stream that can only be read from its start (`StreamCursor`).
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch.utils.data import Dataset, IterableDataset

from pollux.agent.seeding import SampleKey, SourceStates, digest, seed_sources, sources_kept
from pollux.errors import InvalidSpec, LoopMisuse

ShardRange: TypeAlias = tuple[int, int, int]
"""(shard, start, stop): the samples [start, stop) of a shard."""


@runtime_checkable
class Shards(Protocol):
    """A dataset in parts of known size. Usually an `IterableDataset` with these two methods on top.

    Random numbers that `read` draws for a sample follow from (seed, pass, position) where it makes the samples one by
    one, as a generator does.
    """

    def sizes(self) -> Sequence[int]:
        """The number of samples in each shard; the same on every replica and in every pass."""
        ...

    def read(self, shard: int, start: int, stop: int) -> Iterable[Any]:
        """The samples [start, stop) of a shard, in order, the same every time.

        Where seeking is cheap, return a list: it is called for exactly the samples of a micro-batch. Where it is dear
        (tar, gzip), write a generator: it is opened up to the end of the shard, kept open, and read on, also over
        samples that belong to other replicas.
        """
        ...


class ShardOrder:
    """Which samples of which shards the positions [0, num_samples) of a pass are."""

    def __init__(self, sizes: Sequence[int], seed: int, shuffle: bool = True) -> None:
        self.sizes = [_checked_size(shard, size) for shard, size in enumerate(sizes)]
        if not self.sizes:
            raise InvalidSpec("sizes", [], "a dataset without shards", "Give the number of samples in each shard")
        self.seed = seed
        self.num_samples = sum(self.sizes)
        self._shuffle = shuffle
        self._pass: tuple[int, list[int], list[int]] | None = None

    def shards(self, pass_index: int) -> list[int]:
        """The shards in the order in which a pass reads them."""
        return list(self._order(pass_index)[0])

    def ranges(self, pass_index: int, start: int, stop: int) -> list[ShardRange]:
        """The positions [start, stop) of a pass as ranges of shards, in order."""
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"positions [{start}, {stop}) of a pass of {self.num_samples} samples")
        shards, firsts = self._order(pass_index)
        found = []
        place = bisect.bisect_right(firsts, start) - 1
        while start < stop:
            shard, offset = shards[place], start - firsts[place]
            taken = min(self.sizes[shard] - offset, stop - start)
            found.append((shard, offset, offset + taken))
            start += taken
            place += 1
        return found

    def _order(self, pass_index: int) -> tuple[list[int], list[int]]:
        """(shards as read, position of the first sample of each); kept for one pass."""
        if self._pass is None or self._pass[0] != pass_index:
            shards = list(range(len(self.sizes)))
            if self._shuffle:
                # Sorted by hash, not shuffled: no library's change of mind can move a resumed job's samples.
                shards.sort(key=lambda shard: digest(self.seed, pass_index, shard))
            firsts = [0, *itertools.accumulate(self.sizes[shard] for shard in shards[:-1])]
            self._pass = pass_index, shards, firsts
        return self._pass[1:]


def _checked_size(shard: int, size: int) -> int:
    try:
        checked = operator.index(size)
    except TypeError:
        checked = 0
    if checked < 1:
        raise InvalidSpec(f"sizes()[{shard}]", size, "not a number of samples", "Leave empty shards out")
    return checked


class ShardedDataset(Dataset[Any]):
    """`Shards` as a map-style dataset under `SampleKey`s (pass, position); the order of positions is 0, 1, 2 …

    `seeded=False` saves about 20 µs a sample where `read` draws no random numbers.
    """

    def __init__(self, shards: Shards, seed: int, shuffle: bool = True, seeded: bool = True) -> None:
        self.shards = shards
        self.order = ShardOrder(shards.sizes(), seed, shuffle)
        self._seeded = seeded
        self._stays_open = inspect.isgeneratorfunction(shards.read)
        self._open: _OpenShard | None = None

    def __len__(self) -> int:
        return self.order.num_samples

    def __getitem__(self, key: SampleKey) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[SampleKey]) -> list[Any]:
        samples: list[Any] = []
        with sources_kept() if self._seeded else nullcontext():
            for pass_index, start, stop in _runs(keys):
                position = start
                for shard, first, last in self.order.ranges(pass_index, start, stop):
                    samples += self._read(shard, first, last, pass_index, position)
                    position += last - first
        return samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def _read(self, shard: int, start: int, stop: int, pass_index: int, position: int) -> list[Any]:
        reader = self._reader_at(shard, start, stop)
        taken = []
        for offset in range(stop - start):
            if self._seeded:
                seed_sources(self.order.seed, pass_index, position + offset)
            taken.append(reader.next())
        if reader.is_done:
            reader.check_end()
        else:
            self._open = reader
        return taken

    def _reader_at(self, shard: int, start: int, stop: int) -> _OpenShard:
        kept, self._open = self._open, None
        if kept is not None:
            if kept.reaches(shard, start):
                kept.skip_to(start)
                return kept
            kept.close()
        size = self.order.sizes[shard]
        return _OpenShard(self.shards, shard, start, size if self._stays_open else stop, size)


def _runs(keys: Sequence[SampleKey]) -> Iterator[tuple[int, int, int]]:
    """(pass, start, stop) for every run of consecutive positions."""
    at = 0
    while at < len(keys):
        pass_index, start = keys[at]
        first = at
        while at < len(keys) and keys[at] == (pass_index, start + at - first):
            at += 1
        yield pass_index, start, start + at - first


class _OpenShard:
    """A reader in the middle of a shard: has delivered the samples before `at` and promised those before `stop`."""

    def __init__(self, shards: Shards, shard: int, start: int, stop: int, size: int) -> None:
        self._call = f"read({shard}, {start}, {stop})"
        self._iterator = iter(shards.read(shard, start, stop))
        self._shard, self._start, self._stop, self._size = shard, start, stop, size
        self._at = start
        self._pid = os.getpid()

    @property
    def is_done(self) -> bool:
        return self._at == self._stop

    def reaches(self, shard: int, start: int) -> bool:
        # A forked worker shares its parent's open files and would move the parent's place in them.
        return self._shard == shard and self._at <= start < self._stop and self._pid == os.getpid()

    def skip_to(self, start: int) -> None:
        while self._at < start:
            self.next()

    def next(self) -> Any:
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise self._miscounted(f"{self._call} ended after {self._at - self._start} samples") from None
        self._at += 1
        return sample

    def check_end(self) -> None:
        """To be asked once all promised samples are delivered: there must be no other."""
        beyond = sum(1 for _ in itertools.islice(self._iterator, 1))
        self.close()
        if beyond:
            raise self._miscounted(f"{self._call} yields more than {self._stop - self._start} samples")

    def close(self) -> None:
        getattr(self._iterator, "close", lambda: None)()

    def _miscounted(self, problem: str) -> InvalidSpec:
        fix = f"Let sizes() say how many samples shard {self._shard} holds, and read() yield just those asked for"
        return InvalidSpec(f"sizes()[{self._shard}]", self._size, problem, fix)


def stream_notice(dataset: IterableDataset[Any]) -> str:
    """What to log at the start for an iterable dataset that is no `Shards`."""
    return (
        f"{type(dataset).__name__} is a stream: every replica reads all of it and keeps its own samples, and a resumed "
        "job reads over those that were used. Each sample counts at least once, and just once only if the stream is "
        "the same on every replica and each time. Give the dataset sizes() and read() (pollux.torch.Shards) for "
        "exactly once."
    )


class StreamCursor:
    """Reads an iterable dataset by position. Positions ascend within a pass; each pass starts a new iterator.

    What the dataset draws from the global random sources follows from (seed, pass), and nobody else's draws disturb it
    nor are disturbed, so that a shuffling stream can be the same on every replica and after a resume.

    To be used in one process: a dataset that splits itself among DataLoader workers must see none, or one.
    """

    def __init__(self, dataset: IterableDataset[Any], seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        self._pass: int | None = None
        self._iterator: Iterator[Any] = iter(())
        self._at = 0
        self._ended = False
        self._sources: SourceStates | None = None

    def take(self, pass_index: int, start: int, stop: int) -> list[Any]:
        """The samples [start, stop) of a pass; fewer, or none, where the stream ends before `stop`.

        All replicas that take the whole range of a step see the same end, and agree without talking.
        """
        with sources_kept():
            if self._pass != pass_index:
                self._begin(pass_index)
            elif self._sources is not None:
                self._sources.restore()
            if start < self._at:
                raise LoopMisuse(
                    f"position {start} of pass {pass_index} was asked for after position {self._at - 1}",
                    "A stream cannot go back: take ascending positions, or make a new StreamCursor",
                )
            self._advance(start - self._at)
            samples = self._advance(stop - self._at, keep=True)
            self._sources = SourceStates.now()
        return samples

    def _begin(self, pass_index: int) -> None:
        seed_sources(self.seed, pass_index, 0)
        self._iterator = iter(self.dataset)
        self._pass, self._at, self._ended = pass_index, 0, False

    def _advance(self, count: int, keep: bool = False) -> list[Any]:
        samples = []
        for _ in range(0 if self._ended else count):
            try:
                sample = next(self._iterator)
            except StopIteration:
                self._ended = True
                if not self._at:
                    raise LoopMisuse(
                        f"pass {self._pass} over {type(self.dataset).__name__} has no sample at all",
                        "Let its __iter__ start anew each time it is called",
                    ) from None
                break
            self._at += 1
            if keep:
                samples.append(sample)
        return samples
