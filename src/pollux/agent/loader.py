"""The training loader: hands out the micro-batches of this replica, step after step, as the dealer deals them.

Where the samples come from is a `Source`: a map-style dataset (or `Shards`, which are one) through the user's own
DataLoader settings, or a stream. Between two micro-batches the loop's body has run, so all that happens at the
boundary of a step happens here, in `TrainingLoader.__iter__`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from pollux.agent.dealing import Cursor, Dealer, StepPlan, after
from pollux.agent.evaluation import rebuild
from pollux.agent.options import Options
from pollux.agent.order import Order, SamplerOrder
from pollux.agent.replicas import Replicas
from pollux.agent.seeding import SeededDataset, draws_randomness
from pollux.agent.shards import ShardedDataset, Shards, StreamCursor, stream_notice
from pollux.agent.stepping import Outcome
from pollux.errors import InvalidSpec

log = logging.getLogger(__name__)

ENDLESS = 2**62
"""Length of a pass over a stream, as long as its end was not seen."""

MicroBatch = tuple[StepPlan, int, Any]
"""A step, which of its passes this is, and the user's collated samples."""


class Source(Protocol):
    """Where micro-batches come from."""

    pass_length: int | None
    """Samples in one pass; None: unknown."""
    is_bounded: bool
    """Whether a pass ends after just so many, rather than where the samples do."""

    def micro_batches(self, dealer: Dealer) -> Iterator[MicroBatch]:
        """This replica's share of the steps from the dealer's committed cursor on, without end."""
        ...


class Feed(Sampler[list[Any]]):
    """The batch sampler under the DataLoader: deals a step whenever the one before is used up.

    A DataLoader with workers asks ahead; what it asked for is remembered in order, with its step.
    """

    def __init__(self, order: Order | None, replicas: Replicas, is_keyed: bool) -> None:
        self._order = order
        self._replicas = replicas
        self._is_keyed = is_keyed
        self.dealer: Dealer | None = None
        self.dealt: deque[tuple[StepPlan, int]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        dealer = self.dealer
        assert dealer is not None
        while True:
            plan = dealer.deal()
            for index in range(plan.passes):
                start, stop = plan.slice_of(self._replicas.rank, self._replicas.size, index)
                if start == stop:
                    # Fewer samples than replicas, after a resume: this one runs the model all the same, for nothing.
                    start, stop = plan.start, plan.stop
                self.dealt.append((plan, index))
                yield self._keys(plan.pass_index, start, stop)

    def _keys(self, pass_index: int, start: int, stop: int) -> list[Any]:
        if self._order is None:
            return [(pass_index, position) for position in range(start, stop)]
        indices = self._order.indices(pass_index, start, stop)
        return [(pass_index, index) for index in indices] if self._is_keyed else indices


class IndexedSource:
    """A map-style dataset, read by the user's DataLoader settings: workers, collate function, pinned memory …"""

    is_bounded = True

    def __init__(self, loader: DataLoader[Any], options: Options, replicas: Replicas) -> None:
        dataset: Any = loader.dataset
        if isinstance(dataset, Shards):
            dataset = ShardedDataset(
                dataset, options.seed, getattr(dataset, "shuffle", True), options.sample_randomness is not False
            )
            order, is_keyed, num_samples = None, True, len(dataset)
        else:
            order = _order(loader, options.seed)
            num_samples = order.num_samples
            asked = options.sample_randomness
            # With workers it is not tried out: files that a dataset opens for its first sample must not be forked.
            is_keyed = (loader.num_workers > 0 or draws_randomness(dataset)) if asked is None else asked
            if is_keyed:
                dataset = SeededDataset(dataset, options.seed)
        if loader.drop_last and loader.batch_size:
            # As in the user's own loop: what does not fill a batch of M0, however large batches become.
            num_samples -= num_samples % loader.batch_size
        if not num_samples:
            fix = "Use a batch_size of at most its length" if loader.drop_last else "Give it samples"
            raise InvalidSpec("dataset", type(loader.dataset).__name__, "a pass has no sample", fix)
        self.pass_length: int | None = num_samples
        self._feed = Feed(order, replicas, is_keyed)
        self._loader = rebuild(loader, self._feed, dataset)
        self._loader.in_order = True  # whatever the user's says: batches are matched to steps by their order

    def micro_batches(self, dealer: Dealer) -> Iterator[MicroBatch]:
        dealer.rewind()
        self._feed.dealer = dealer
        dealt = self._feed.dealt
        dealt.clear()
        for batch in self._loader:
            plan, index = dealt.popleft()
            yield plan, index, batch


class StreamSource:
    """An iterable dataset: read in the training process, by every replica, from the start of each pass."""

    is_bounded = False

    def __init__(self, loader: DataLoader[Any], options: Options, replicas: Replicas) -> None:
        dataset = loader.dataset
        assert isinstance(dataset, IterableDataset)
        log.warning(stream_notice(dataset))
        if loader.num_workers:
            log.warning("num_workers = %d is not used: a stream is read in the training process", loader.num_workers)
        if loader.drop_last:
            log.warning("drop_last is not used: where a stream ends shows only with its last sample")
        self.pass_length = options.samples_per_pass
        self._collate = loader.collate_fn
        self._dataset = dataset
        self._seed = options.seed
        self._replicas = replicas

    def micro_batches(self, dealer: Dealer) -> Iterator[MicroBatch]:
        dealer.rewind()
        cursor = StreamCursor(self._dataset, self._seed)
        ahead: list[Any] = []
        while True:
            plan = dealer.deal()
            # One sample more than needed, to see whether the stream goes on.
            ahead += cursor.take(plan.pass_index, plan.start + len(ahead), plan.stop + 1)
            samples, ahead = ahead[: plan.batch_size], ahead[plan.batch_size :]
            if not samples:  # shorter than the last time
                dealer.dealt = Cursor(plan.pass_index + 1, 0, plan.step)
                continue
            if not ahead:
                plan = self._last(plan, samples)
                dealer.dealt = after(plan)
            for index in range(plan.passes):
                start, stop = plan.slice_of(self._replicas.rank, self._replicas.size, index)
                yield plan, index, self._collate(samples[start - plan.start : stop - plan.start])

    def _last(self, plan: StepPlan, samples: list[Any]) -> StepPlan:
        """The last step of a pass, with what the stream still gave; no replica gets nothing: samples are repeated."""
        size = self._replicas.size
        while len(samples) < size:
            samples.append(samples[-1])
        passes = max(1, min(plan.passes, len(samples) // size))
        is_whole = plan.is_whole and len(samples) == plan.batch_size
        return dataclasses.replace(
            plan, stop=plan.start + len(samples), passes=passes, is_whole=is_whole, ends_pass=True
        )


def source_of(loader: DataLoader[Any], options: Options, replicas: Replicas) -> Source:
    """Where the samples of the user's loader come from."""
    if loader.batch_size is None:
        raise InvalidSpec(
            "loader",
            "batch_sampler or batch_size=None",
            "its batch size is unknown",
            "Give DataLoader a batch_size, the total one to start with; a sampler may be your own",
        )
    if isinstance(loader.dataset, IterableDataset) and not isinstance(loader.dataset, Shards):
        return StreamSource(loader, options, replicas)
    return IndexedSource(loader, options, replicas)


def _order(loader: DataLoader[Any], seed: int) -> Order:
    sampler: Any = loader.sampler
    if isinstance(loader.batch_sampler, BatchSampler):
        sampler = loader.batch_sampler.sampler
    if isinstance(sampler, DistributedSampler):
        raise InvalidSpec(
            "sampler",
            "DistributedSampler",
            "the job divides the samples itself",
            "Give the plain DataLoader, with shuffle=True if you like, and the total batch size",
        )
    if isinstance(sampler, SequentialSampler):
        return Order(len(sampler), seed, shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return Order(sampler.num_samples, seed, shuffle=True)
    return SamplerOrder(sampler, seed)


class Loop(Protocol):
    """What the loader needs of the job at the boundaries of steps."""

    dealer: Dealer

    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def is_over(self) -> bool: ...
    def begin_pass(self, plan: StepPlan, index: int) -> None: ...
    def end_pass(self, plan: StepPlan) -> Outcome: ...
    def cut_short(self, plan: StepPlan) -> None: ...
    def before_fetching(self) -> None: ...


class TrainingLoader:
    """What `job.prepare` gives back for the DataLoader. To be iterated inside `job.epochs` or `job.passes`."""

    def __init__(self, inner: DataLoader[Any], source: Source, loop: Loop, iterations_per_pass: int | None) -> None:
        self.inner = inner
        self.dataset = inner.dataset
        self.batch_size = inner.batch_size
        """M0, the batch size that training starts with. What it is now: `job.batch_size`."""
        self._source = source
        self._loop = loop
        self._iterations = iterations_per_pass

    def __len__(self) -> int:
        """Iterations of M0 in one pass: what a schedule by iterations counts in."""
        if self._iterations is None:
            raise TypeError("the length of this iterable dataset is unknown: give Job(samples_per_pass=…)")
        return self._iterations

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        loop.enter()
        try:
            while not loop.is_over():
                yield from self._until_redealt()
        finally:
            loop.leave()

    def _until_redealt(self) -> Iterator[Any]:
        """Micro-batches until the loop is over, or a step must be dealt again in smaller passes."""
        loop = self._loop
        loop.before_fetching()
        for plan, index, batch in self._source.micro_batches(loop.dealer):
            loop.begin_pass(plan, index)
            try:
                yield batch
            except GeneratorExit:  # the user's break
                loop.cut_short(plan)
                raise
            outcome = loop.end_pass(plan)
            if outcome in (Outcome.RETRY, Outcome.REGROUPED):
                return
            if outcome is not Outcome.ACCUMULATED and loop.is_over():
                return
            loop.before_fetching()
