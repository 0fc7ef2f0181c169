"""How a batch is divided: by properties, for all limits and numbers of replicas."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pollux.agent.batching import BatchConfig, fitted_to, initial_config, narrowed
from pollux.core import BatchLimits
from pollux.errors import InvalidSpec


@st.composite
def limits(draw):
    initial, smallest = draw(st.integers(1, 300)), draw(st.integers(1, 40))
    most = draw(st.integers(initial, 20 * initial))
    return BatchLimits(initial, most, smallest, draw(st.integers(smallest, 400)))


replicas = st.integers(1, 16)


def is_possible(box: BatchLimits, num_gpus: int) -> bool:
    """Whether some batch size gives every pass an example; it does unless a pass holds one only."""
    step = num_gpus if box.max_per_gpu_batch_size == 1 else 1
    return box.max_batch_size >= num_gpus and box.max_batch_size // step * step >= box.initial_batch_size


@given(limits(), replicas)
@example(BatchLimits(3, 3, 1, 1), 2)
@example(BatchLimits(3, 4, 1, 1), 2)
@example(BatchLimits(2, 3, 1, 1), 2)
def test_the_initial_batch_is_as_near_to_m0_as_the_replicas_allow(box, num_gpus):
    if not is_possible(box, num_gpus):
        with pytest.raises(InvalidSpec, match="max_batch_size"):
            initial_config(box, num_gpus)
        return
    config = initial_config(box, num_gpus)
    assert config.is_within(box, num_gpus)
    wanted = min(max(box.initial_batch_size, box.min_per_gpu_batch_size * num_gpus), box.max_batch_size)
    assert config.batch_size == wanted or (
        box.max_per_gpu_batch_size == 1 and abs(config.batch_size - wanted) < num_gpus
    )


@given(limits(), replicas)
def test_passes_are_as_few_and_as_equal_as_can_be(box, num_gpus):
    assume(is_possible(box, num_gpus))
    config = initial_config(box, num_gpus)
    slots = num_gpus * config.passes
    assert config.per_gpu_batch_size == -(-config.batch_size // slots)
    if config.passes > 1:
        assert num_gpus * (config.passes - 1) * box.max_per_gpu_batch_size < config.batch_size


@given(limits(), replicas, replicas, st.integers(1, 9000))
def test_another_number_of_replicas_keeps_the_batch_size_where_it_can(box, before, after, size):
    assume(is_possible(box, before) and is_possible(box, after))
    config = fitted_to(BatchConfig(size, 1, 1), box, before)
    moved = fitted_to(config, box, after)
    assert moved.is_within(box, after)
    assert fitted_to(moved, box, after) == moved
    lowest = max(box.initial_batch_size, box.min_per_gpu_batch_size * after)
    if box.max_per_gpu_batch_size > 1 and lowest <= config.batch_size:
        assert moved.batch_size == config.batch_size


def test_a_batch_of_1000_on_3_replicas_stays_1000():
    box = BatchLimits(1000, 8000, 1, 200)
    assert initial_config(box, 3) == BatchConfig(1000, 167, 2)
    assert fitted_to(BatchConfig(1000, 167, 2), box, 8) == BatchConfig(1000, 125, 1)


def test_more_replicas_than_the_largest_batch_has_examples_are_refused_with_a_way_out():
    with pytest.raises(InvalidSpec, match=r"max_batch_size = 4: .* 8 replicas .*use fewer replicas"):
        initial_config(BatchLimits(2, 4, 1, 4), 8)


@given(limits(), st.integers(-5, 9000), st.integers(-5, 500))
def test_narrowed_limits_are_never_wider_and_never_below_the_lower_ends(box, most, most_per_gpu):
    less = narrowed(box, max_batch_size=most, max_per_gpu_batch_size=most_per_gpu)
    assert box.initial_batch_size == less.initial_batch_size <= less.max_batch_size <= box.max_batch_size
    assert less.max_batch_size == box.initial_batch_size or less.max_batch_size <= most
    assert box.min_per_gpu_batch_size <= less.max_per_gpu_batch_size <= box.max_per_gpu_batch_size
    assert narrowed(box) == box


def test_a_config_that_does_not_hold_its_batch_is_not_within_the_limits():
    box = BatchLimits(8, 64, 1, 32)
    assert BatchConfig(8, 4, 1).is_within(box, 2)
    assert not BatchConfig(9, 4, 1).is_within(box, 2)
    assert not BatchConfig(8, 4, 5).is_within(box, 2)  # ten passes for eight examples
    assert not BatchConfig(66, 33, 1).is_within(box, 2)
