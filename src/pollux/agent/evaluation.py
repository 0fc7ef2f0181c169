"""Loaders like the user's: with other samples for training, and with this replica's share for evaluation."""

from __future__ import annotations

import atexit
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from pollux.agent.replicas import Replicas
from pollux.agent.signals import outlast_terminate
from pollux.errors import InvalidSpec, LoopMisuse

log = logging.getLogger(__name__)

CHOOSES_SAMPLES = frozenset({"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})
"""The arguments of `DataLoader` that say which samples come; all others say how, and are carried over."""


def rebuild(loader: DataLoader[Any], batch_sampler: Iterable[list[Any]], dataset: Dataset[Any]) -> DataLoader[Any]:
    """A loader with the settings of `loader` that reads the batches of `batch_sampler` from `dataset`.

    A `worker_init_fn` still finds the user's own dataset in `get_worker_info().dataset`.
    """
    if loader.batch_sampler is None:
        raise LoopMisuse(
            "the DataLoader has batch_size=None, so its dataset makes the batches and their size cannot be chosen",
            "Give the DataLoader a batch_size and let the dataset deliver single samples",
        )
    return OrderlyLoader(dataset, batch_sampler=batch_sampler, **_settings(loader, dataset))


def shard_loader(loader: DataLoader[Any], rank: int, size: int) -> DataLoader[Any]:
    """A loader like `loader` that delivers the share of replica `rank` of `size`: each sample at one replica, once.

    `batch_size` is that of one replica here. Shares may differ in size, and in number of batches: no sample is
    repeated to even them out, so do not call collectives per batch. By what the loader reads:

    - in sequence, shuffled (evaluated in sequence instead) or a `SubsetRandomSampler`: contiguous shares;
    - a sampler or batch sampler of the user's own: every `size`-th batch, which asks for the same batches in the same
      order on every replica;
    - an `IterableDataset`: every `size`-th sample, under the same condition.

    `drop_last` is ignored: evaluation counts every sample. Samplers that split the data themselves or draw samples
    with chance are refused, with one replica, too: a script that runs alone shall run on many.
    """
    if not 0 <= rank < size:
        raise InvalidSpec("rank", rank, f"not one of {size} replicas", f"Give a rank from 0 to {size - 1}")
    batches = loader.batch_sampler
    sampler, batch_size, drop_last = loader.sampler, loader.batch_size, loader.drop_last
    if type(batches) is BatchSampler:  # may be the user's: then the loader says nothing of what is in it
        sampler, batch_size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
    _refuse(getattr(batches, "sampler", sampler))
    if drop_last:
        log.warning("drop_last=True is ignored in evaluation, so that every sample counts.")
    elif size == 1:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        stream = EveryNthSample(loader.dataset, rank, size)
        return OrderlyLoader(stream, batch_size=batch_size, **_settings(loader, stream))
    dataset, settings = loader.dataset, _settings(loader, loader.dataset)
    source: object = batches
    if batches is None or type(batches) is BatchSampler:
        samples = _known_samples(sampler)
        if samples is not None:
            part = samples[len(samples) * rank // size : len(samples) * (rank + 1) // size]
            return OrderlyLoader(dataset, batch_size=batch_size, sampler=part, **settings)
        source = sampler
        batches = BatchSampler(sampler, batch_size, drop_last=False) if batch_size is not None else None
    log.info(
        "%s is split by every %d-th batch: it has to yield the same in the same order on every replica.",
        type(source).__name__,
        size,
    )
    if batches is None:  # the dataset makes the batches
        return OrderlyLoader(dataset, batch_size=None, sampler=EveryNth(sampler, rank, size), **settings)
    return OrderlyLoader(dataset, batch_sampler=EveryNth(batches, rank, size), **settings)


class ShardedLoader:
    """The user's loader, of which each iteration delivers this replica's share: among those that train then."""

    def __init__(self, loader: DataLoader[Any], replicas: Replicas) -> None:
        shard_loader(loader, 0, 1)  # says now what it refuses
        self.inner = loader
        self._replicas = replicas

    def _share(self) -> DataLoader[Any]:
        return shard_loader(self.inner, self._replicas.rank, self._replicas.size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._share())

    def __len__(self) -> int:
        return len(self._share())

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, in a copy
            raise AttributeError(name)
        return getattr(self.inner, name)


class OrderlyLoader(DataLoader[Any]):
    """Its workers are told to end when the process ends.

    Else Python would do it, by a SIGTERM, and wait: but they outlast that one (`_WorkerInit`). torch lets workers that
    are persistent, and those of an iterator that somebody still holds, come to this.
    """

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        if self.num_workers:
            _with_workers.add(iterator)
        return iterator


_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    for iterator in list(_with_workers):
        iterator._shutdown_workers()


class EveryNth:
    """Of what a sampler yields, every `size`-th item from `rank` on."""

    def __init__(self, sampler: Iterable[Any], rank: int, size: int) -> None:
        self.sampler = sampler
        self.rank = rank
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for count, item in enumerate(self.sampler):
            if count % self.size == self.rank:
                yield item

    def __len__(self) -> int:
        return len(range(self.rank, len(self.sampler), self.size))  # type: ignore[arg-type]


class EveryNthSample(IterableDataset[Any]):
    """Of what an iterable dataset yields (in each worker), every `size`-th sample from `rank` on.

    Has no length: with workers that would depend on how the dataset splits itself among them.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(EveryNth(self.dataset, self.rank, self.size))


class _WorkerInit:
    """The user's `worker_init_fn`, which is to find the user's dataset and not what Pollux wrapped around it."""

    def __init__(self, init: Callable[[int], None] | None, dataset: Dataset[Any]) -> None:
        self.init = init
        self.dataset = dataset  # pickled together with its wrapper, so that a spawned worker has it once

    def __call__(self, worker_id: int) -> None:
        outlast_terminate()
        if self.init is not None:
            object.__setattr__(get_worker_info(), "dataset", self.dataset)  # torch guards it against assignment
            self.init(worker_id)


def _settings(loader: DataLoader[Any], dataset: Dataset[Any]) -> dict[str, Any]:
    """Every constructor argument of this torch's `DataLoader` that does not choose samples, as `loader` has it."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        log.warning("%s has an __iter__ of its own, which Pollux does not call.", type(loader).__name__)
    names = [name for name in inspect.signature(DataLoader).parameters if name not in CHOOSES_SAMPLES]
    settings = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        settings["worker_init_fn"] = _WorkerInit(loader.worker_init_fn, loader.dataset)
    return settings


def _known_samples(sampler: object) -> Sequence[int] | None:
    """The samples that one of torch's samplers delivers, in an order all replicas know."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is RandomSampler:
        log.info("The shuffled loader is evaluated in sequence, so that the replicas agree on their shares.")
        return range(len(sampler))
    if type(sampler) is SubsetRandomSampler:
        return sampler.indices
    return None


def _refuse(sampler: object) -> None:
    match sampler:
        case DistributedSampler():
            problem, fix = "splits the samples among replicas by itself", "Hand in the loader without it"
        case WeightedRandomSampler():
            problem, fix = "draws samples by chance, each any number of times", "Hand in a loader over the samples once"
        case RandomSampler() if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            problem = "draws some of the samples by chance, others on each replica"
            fix = "Hand in a loader over the samples that count (torch.utils.data.Subset)"
        case _:
            return
    raise LoopMisuse(f"the loader to evaluate has a {type(sampler).__name__}, which {problem}", fix)
