"""Steps as they are dealt: whatever is configured, changed, lost and dealt again, each pass is divided without rest."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.agent.batching import BatchConfig, fitted_to, initial_config
from pollux.agent.dealing import Cursor, Dealer, StepPlan, after
from pollux.core import BatchLimits
from pollux.errors import InvalidSpec


def make(pass_length: int, batch_size: int, replicas: int = 1, largest: int | None = None) -> Dealer:
    limits = BatchLimits(batch_size, 64 * batch_size, 1, largest or 64 * batch_size)
    return Dealer(pass_length, initial_config(limits, replicas), replicas)


def sizes(plan: StepPlan, replicas: int) -> list[int]:
    parts = [plan.slice_of(rank, replicas, index) for rank in range(replicas) for index in range(plan.passes)]
    return [stop - start for start, stop in parts]


def check_slices(plan: StepPlan, replicas: int) -> None:
    """The slices are the step's positions in their order; none is empty, none more than one larger than another.

    But for the step after a resume, which may be too short for more replicas than there were.
    """
    at = plan.start
    for rank in range(replicas):
        for index in range(plan.passes):
            start, stop = plan.slice_of(rank, replicas, index)
            assert start == at
            at = stop
    assert at == plan.stop
    parts = sizes(plan, replicas)
    assert min(parts) >= 1 or (plan.batch_size < replicas and not plan.is_measured)
    assert max(parts) - min(parts) <= 1


CHANGES = st.one_of(
    st.tuples(st.just("batch"), st.integers(1, 400), st.integers(1, 60)),
    st.tuples(st.just("measure"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("rewind")),
    st.tuples(st.just("ahead"), st.integers(1, 4)),
    st.tuples(st.just("resume"), st.integers(1, 5)),
)


@settings(max_examples=150)
@given(
    length=st.integers(5, 300),
    initial=st.integers(5, 60),
    replicas=st.integers(1, 5),
    changes=st.lists(CHANGES, max_size=30),
)
def test_every_pass_is_delivered_once_whatever_happens_between_steps(
    length: int, initial: int, replicas: int, changes: list[tuple[object, ...]]
) -> None:
    limits = BatchLimits(initial, 400, 1, 400)
    dealer = Dealer(length, initial_config(limits, replicas), replicas)
    at = Cursor()
    for kind, *values in changes:
        has_resumed = False
        if kind == "batch":
            bounds = BatchLimits(initial, 400, 1, values[1])
            dealer.config = fitted_to(BatchConfig(max(values[0], initial), values[0], 1), bounds, replicas)
        elif kind == "measure":
            dealer.measuring.every, dealer.measuring.splits = values
        elif kind == "rewind":
            dealer.rewind()
        elif kind == "ahead":  # dealt, and lost
            for _ in range(values[0]):
                check_slices(dealer.deal(), replicas)
            dealer.rewind()
        else:  # a crash: another process, another number of replicas
            replicas, config = values[0], dealer.config
            cursor, measuring = dealer.committed, dealer.measuring
            dealer = Dealer(length, fitted_to(config, limits, replicas), replicas)
            dealer.measuring = measuring
            dealer.resume(cursor)
            has_resumed = True
        plan = dealer.deal()
        assert (plan.step, plan.pass_index, plan.start) == (at.step, at.pass_index, at.offset)
        assert plan.stop <= length
        assert plan.ends_pass == (plan.stop == length)
        check_slices(plan, replicas)
        assert has_resumed or min(sizes(plan, replicas)) >= 1
        dealer.commit(plan)
        at = dealer.committed
        assert at == after(plan)
        assert at.offset < length


@given(length=st.integers(5, 500), initial=st.integers(1, 60), replicas=st.integers(1, 5), largest=st.integers(1, 60))
def test_a_pass_of_a_replica_holds_no_more_than_fits(length: int, initial: int, replicas: int, largest: int) -> None:
    dealer = make(length, initial, replicas, largest)
    while dealer.committed.pass_index == 0:
        plan = dealer.deal()
        dealer.commit(plan)
        if plan.batch_size >= replicas * plan.passes + replicas:  # else a replica has too few to go round
            assert max(sizes(plan, replicas)) <= largest
        assert plan.is_whole == (plan.batch_size == dealer.config.batch_size)


@given(length=st.integers(1, 300), initial=st.integers(1, 300))
def test_one_replica_takes_the_steps_of_a_plain_loader(length: int, initial: int) -> None:
    dealer = make(length, initial)
    plans = [dealer.deal() for _ in range(-(-length // initial) + 1)]
    starts = list(range(0, length, initial))
    assert [(plan.start, plan.stop) for plan in plans[:-1]] == [(s, min(s + initial, length)) for s in starts]
    assert [plan.passes for plan in plans] == [1] * len(plans)
    assert (plans[-1].pass_index, plans[-1].start) == (1, 0)


def test_the_end_of_a_pass_leaves_no_replica_without_a_sample() -> None:
    dealer = make(21, 10, replicas=4)
    plans = [dealer.deal() for _ in range(3)]
    assert [plan.batch_size for plan in plans] == [10, 7, 4]
    dealer = make(9, 4, replicas=4)
    assert [dealer.deal().batch_size for _ in range(2)] == [4, 5]


@pytest.mark.parametrize(("left", "is_measured"), [(1, False), (3, False), (4, True), (5, True)])
def test_a_step_with_fewer_samples_than_replicas_is_not_measured(left: int, is_measured: bool) -> None:
    """Some of them would have no gradient to compare. It can only be the first step after a resume by more replicas."""
    dealer = make(20, 10, replicas=4)
    dealer.measuring.every = 1
    dealer.resume(Cursor(0, 20 - left, 7))
    plan = dealer.deal()
    assert (plan.batch_size, plan.is_measured) == (left, is_measured)
    assert dealer.deal().is_measured  # a whole one again


def test_every_kth_step_is_measured_and_the_one_before_is_kept() -> None:
    dealer = make(1000, 10)
    dealer.measuring.every = 4
    plans = [dealer.deal() for _ in range(9)]
    assert [plan.step for plan in plans if plan.is_measured] == [3, 7]
    assert [plan.step for plan in plans if plan.is_kept] == [2, 6]
    assert [plan.passes for plan in plans] == [1, 1, 1, 2, 1, 1, 1, 2, 1]
    assert [plan.step for plan in plans if not plan.is_whole] == [3, 7]
    dealer.measuring.shift = 1
    assert [plan.step for plan in (dealer.deal() for _ in range(4)) if plan.is_measured] == [10]


def test_measured_steps_are_not_split_where_layers_depend_on_the_batch_or_passes_suffice() -> None:
    dealer = make(100, 10)
    dealer.measuring.every, dealer.measuring.splits = 1, False
    assert dealer.deal().passes == 1
    assert make_measured(100, 10, largest=4).passes == 3
    assert make_measured(100, 10, replicas=2).passes == 1
    assert make_measured(100, 1).passes == 1


def make_measured(length: int, batch_size: int, **more: int) -> StepPlan:
    dealer = make(length, batch_size, **more)
    dealer.measuring.every = 1
    return dealer.deal()


def test_a_dataset_smaller_than_the_replicas_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"3: fewer samples than the 4 replicas.*at most 3"):
        make(3, 8, replicas=4)
