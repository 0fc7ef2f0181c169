"""Averages: weighted by count, on the device until asked for, whole over replicas and checkpoints."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.agent.metrics import Average, Averages, Reduce
from pollux.errors import InvalidSpec, LoopMisuse

repeatable = settings(max_examples=50, deadline=None, derandomize=True)
batches = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=6)


class Together:
    """All-reduce between the threads of a test."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.vectors: dict[int, torch.Tensor] = {}

    def reduce_of(self, rank: int) -> Reduce:
        def reduce(vector: torch.Tensor) -> torch.Tensor:
            self.vectors[rank] = vector
            self.barrier.wait()
            total = torch.stack([self.vectors[r] for r in range(self.size)]).sum(0)
            self.barrier.wait()
            return total

        return reduce

    def run(self, function: Callable[[int, Reduce], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: function(rank, self.reduce_of(rank)), range(self.size)))


@repeatable
@given(batches, st.sampled_from(["float", "tensor", "tensor count", "mixed"]))
def test_the_mean_is_over_samples_not_over_batches(values: list[list[float]], how: str) -> None:
    average = Average()
    for number, batch in enumerate(values):
        data = torch.tensor(batch, dtype=torch.float64)
        value, count = data.mean(), torch.tensor(len(batch))
        match how if how != "mixed" else ["float", "tensor", "tensor count"][number % 3]:
            case "float":
                average.add(value.item(), len(batch))
            case "tensor":
                average.add(value, len(batch))
            case "tensor count":
                average.add(value, count)
    flat = [x for batch in values for x in batch]
    assert average.compute() == pytest.approx(sum(flat) / len(flat), abs=1e-9)


def test_nothing_added_is_nan_and_reset_forgets() -> None:
    average = Average()
    assert math.isnan(average.compute())
    average.add(2.0)
    average.add(torch.tensor(4.0))
    assert average.compute() == 3.0
    assert average.compute() == 3.0, "asking changes nothing"
    average.add(6.0)
    assert average.compute() == 4.0
    average.reset()
    assert math.isnan(average.compute())


def test_a_value_over_no_samples_changes_nothing() -> None:
    average = Average()
    average.add(5.0)
    average.add(math.nan, 0)
    average.add(torch.tensor(math.nan), 0)
    average.add(torch.tensor(math.nan), torch.tensor(0))
    average.add(math.nan, torch.tensor(0))
    assert average.compute() == 5.0
    average.add(math.nan, 1)
    assert math.isnan(average.compute())


def test_many_small_halves_are_summed_in_double() -> None:
    average = Average()
    for _ in range(1000):
        average.add(torch.tensor(0.1, dtype=torch.float16), 1000)
    assert average.compute() == pytest.approx(float(torch.tensor(0.1, dtype=torch.float16)), rel=1e-12)


def test_a_loss_is_taken_without_its_graph_and_in_or_out_of_inference_mode() -> None:
    average = Average()
    with torch.inference_mode():
        inside = torch.tensor([3.0])
        average.add(inside)
    loss = torch.tensor(5.0, requires_grad=True) * 1.0
    average.add(loss, torch.tensor(1.0))
    average.add(inside)
    with torch.inference_mode():
        average.add(torch.tensor(5.0), torch.tensor(1))
    assert average.compute() == 4.0
    loss.backward()


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
@pytest.mark.parametrize("value", [1.0, torch.tensor(1.0)], ids=["float", "tensor"])
def test_a_count_that_is_none_is_refused(value: Any, count: float) -> None:
    with pytest.raises(InvalidSpec, match="count = "):
        Average().add(value, count)


def test_a_tensor_of_many_values_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"value = \(3,\): not one number"):
        Average().add(torch.ones(3), 3)


def test_replicas_agree_and_a_checkpoint_carries_the_whole_to_any_number_of_them() -> None:
    def train(rank: int, reduce: Reduce) -> tuple[float, Any]:
        averages = Averages(reduce)
        averages["loss"].add(torch.tensor(float(rank)), rank + 1)
        averages["accuracy"].add(0.25 * rank)
        averages["unused"]
        assert averages["loss"].compute() == pytest.approx(8 / 6)
        return averages.compute()["loss"], averages.merged_state()

    answers = Together(3).run(train)
    assert [mean for mean, _ in answers] == pytest.approx([8 / 6] * 3)
    saved = answers[0][1]
    assert saved == {
        "accuracy": {"sum": 0.75, "count": 3.0},
        "loss": {"sum": 8.0, "count": 6.0},
        "unused": {"sum": 0.0, "count": 0.0},
    }
    saved = json.loads(json.dumps(saved))

    def resume(rank: int, reduce: Reduce) -> dict[str, float]:
        averages = Averages(reduce)
        averages["loss"].add(99.0)
        averages["new"].add(99.0)
        averages.load_state_dict(saved, is_main=rank == 0)
        averages["accuracy"].add(0.5)
        return averages.compute()

    for means in Together(2).run(resume):
        assert means["loss"] == pytest.approx(8 / 6)
        assert means["accuracy"] == pytest.approx(1.75 / 5)
        assert math.isnan(means["new"])
        assert math.isnan(means["unused"])


def test_an_average_has_its_own_plain_state() -> None:
    average = Average()
    average.add(torch.tensor(2.0), 3)
    state = average.state_dict()
    assert state == {"sum": 6.0, "count": 3.0}
    other = Average()
    other.load_state_dict(state)
    other.add(4.0, 3)
    assert other.compute() == 3.0
    other.load_state_dict(state, is_main=False)
    assert math.isnan(other.compute())


@pytest.mark.parametrize("size", [2, 3])
def test_an_average_that_only_one_replica_knows_is_told_to_all(size: int) -> None:
    def train(rank: int, reduce: Reduce) -> str:
        averages = Averages(reduce)
        averages["loss"].add(1.0)
        if rank == 0:
            averages["on main"].add(1.0)
        with pytest.raises(LoopMisuse, match="not under is_main") as caught:
            averages.merged_state()
        return str(caught.value)

    answers = Together(size).run(train)
    assert "this one loss, on main" in answers[0]
    assert all("this one loss." in answer for answer in answers[1:])


def test_no_averages_are_no_trouble() -> None:
    assert Averages().merged_state() == {}
    averages = Averages()
    averages["loss"].add(1.0)
    assert averages["loss"] is averages["loss"]
    assert averages.state_dict() == {"loss": {"sum": 1.0, "count": 1.0}}
    averages.reset()
    assert averages.state_dict() == {"loss": {"sum": 0.0, "count": 0.0}}
