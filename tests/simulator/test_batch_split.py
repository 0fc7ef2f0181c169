"""Dividing a batch among GPUs and passes: the published rules, and what always holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import BatchLimits
from pollux.errors import InvalidSpec
from pollux.simulator.batch_split import SingleGpu, split

CIFAR10 = BatchLimits(128, 4096, 32, 1024)
BERT = BatchLimits(12, 384, 4, 12)
NCF = BatchLimits(256, 32768, 32, 32768)


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, BatchLimits, SingleGpu]:
    initial = draw(st.integers(1, 512))
    largest = initial * draw(st.integers(2, 128))
    smallest = draw(st.integers(1, 64))
    limits = BatchLimits(initial, largest, smallest, smallest * draw(st.integers(1, 64)))
    num_gpus = draw(st.integers(1, max(1, min(64, largest // 2))))
    return draw(st.integers(1, largest)), num_gpus, limits, draw(st.sampled_from(SingleGpu))


def published(
    batch_size: int, num_gpus: int, limits: BatchLimits, single_gpu: SingleGpu = SingleGpu.FREE
) -> tuple[int, int]:
    """The rules as the artifact computes them, in floats."""
    local = math.ceil(batch_size / num_gpus - 1e-8)
    accum = math.ceil(local / limits.max_per_gpu_batch_size - 1e-8) - 1
    is_above = batch_size > limits.initial_batch_size
    if num_gpus == 1 and (single_gpu == "always" or (single_gpu == "above_initial" and is_above)):
        accum = max(1, accum)
    atomic = math.ceil(local / (accum + 1) - 1e-8)
    return min(atomic, int(limits.max_batch_size / (num_gpus * (accum + 1)))), accum


@pytest.mark.parametrize(
    ("batch_size", "num_gpus", "limits", "expected"),
    [
        (128, 1, CIFAR10, (128, 0)),
        (2048, 6, CIFAR10, (342, 0)),  # 2052 in all
        (4096, 1, CIFAR10, (1024, 3)),
        (4096, 3, CIFAR10, (682, 1)),  # 683 would be 4098 in all, above the largest
        (384, 5, BERT, (10, 6)),  # 77 a GPU in 7 passes of 11 is 385, so one less
        (128, 64, CIFAR10, (2, 0)),  # below the smallest: told as it is
    ],
)
def test_a_batch_is_divided_by_the_published_rules(batch_size, num_gpus, limits, expected):
    assert split(batch_size, num_gpus, limits) == published(batch_size, num_gpus, limits) == expected


@pytest.mark.parametrize(
    ("single_gpu", "at_initial", "above"),
    [
        (SingleGpu.FREE, (256, 0), (32768, 0)),
        (SingleGpu.ABOVE_INITIAL, (256, 0), (16384, 1)),
        (SingleGpu.ALWAYS, (128, 1), (16384, 1)),
    ],
)
def test_one_gpu_accumulates_when_told_to(single_gpu, at_initial, above):
    assert split(256, 1, NCF, single_gpu) == at_initial
    assert split(32768, 1, NCF, single_gpu) == above
    assert split(4096, 1, CIFAR10, single_gpu) == (1024, 3)  # more than one extra pass already
    assert split(32768, 2, NCF, single_gpu) == (16384, 0)


@given(problems())
def test_the_batch_in_use_reaches_the_one_asked_for_and_stays_within_limits(problem):
    batch_size, num_gpus, limits, _ = problem
    try:
        m, s = split(*problem)
    except InvalidSpec:  # more GPUs and passes than examples
        assert published(*problem)[0] == 0
        return
    assert (m, s) == published(*problem)
    assert 1 <= m <= limits.max_per_gpu_batch_size
    in_use = num_gpus * m * (s + 1)
    assert in_use <= limits.max_batch_size
    is_clipped = num_gpus * (m + 1) * (s + 1) > limits.max_batch_size
    assert in_use >= batch_size or is_clipped
    assert in_use < batch_size + num_gpus * (s + 1)
    # no pass too many, but for the one that is forced
    assert s <= 1 or num_gpus * s * limits.max_per_gpu_batch_size < batch_size


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(InvalidSpec, match="fewer GPUs"):
        split(64, 100, BatchLimits(64, 64, 1, 64))
    with pytest.raises(InvalidSpec, match="batch_size"):
        split(0, 1, CIFAR10)
    with pytest.raises(InvalidSpec, match="num_gpus"):
        split(128, 0, CIFAR10)
