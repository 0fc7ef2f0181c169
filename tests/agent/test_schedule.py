"""Schedules follow statistical progress."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from pollux.agent.batching import BatchConfig
from pollux.agent.schedule import ProgressSchedule, Turn

from .loops import Classification, job_maker, perceptron, pinned, plain_body, sgd  # noqa: F401

M0 = 8


class Counting:
    """A schedule that notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((*args, *kwargs.items()))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = [()] * state["calls"]


class At:
    """Progress that the test sets, and the turn of the loop; None: outside the loop."""

    def __init__(self) -> None:
        self.value: float | None = 0.0
        self.number, self.start = 0, 0.0

    def __call__(self) -> Turn | None:
        return None if self.value is None else Turn(self.number, self.start, self.value)


def test_inside_the_loop_a_schedule_steps_for_each_completed_iteration_of_m0() -> None:
    at, inner = At(), Counting()
    schedule = ProgressSchedule(inner, at)
    counts = []
    for progress in (0.0, 0.5, 1.0, 1.9, 4.3, 4.3, 5.0 - 1e-9, 7.0):
        at.value = progress
        schedule.step()
        counts.append(len(inner.calls))
    assert counts == [0, 0, 1, 1, 4, 4, 5, 7]


def test_outside_the_loop_every_call_is_passed_on() -> None:
    at, inner = At(), Counting()
    schedule = ProgressSchedule(inner, at)
    at.value = None
    schedule.step()
    schedule.step(0.3)
    schedule.step(metrics=0.2)
    assert inner.calls == [(), (0.3,), (("metrics", 0.2),)]


def test_a_value_is_passed_on_once_however_much_progress_was_made() -> None:
    at, inner = At(), Counting()
    schedule = ProgressSchedule(inner, at)
    for progress, metric in ((3.0, 0.5), (3.5, 0.4), (9.0, 0.3)):
        at.value = progress
        schedule.step(metric)
    assert inner.calls == [(0.5,), (0.3,)]


def test_a_schedule_that_pauses_for_a_turn_does_not_catch_up() -> None:
    at, inner = At(), Counting()
    schedule = ProgressSchedule(inner, at)
    at.number, at.start, at.value = 3, 48.0, 49.0  # the first three epochs did not call it
    schedule.step()
    assert len(inner.calls) == 1
    at.number, at.start, at.value = 4, 50.0, 51.0  # the turn after is counted on
    schedule.step()
    assert len(inner.calls) == 3
    at.number, at.start, at.value = 7, 80.0, 82.0
    schedule.step()
    assert len(inner.calls) == 5


def test_a_schedule_goes_on_from_its_state() -> None:
    at = At()
    first, second = ProgressSchedule(Counting(), at), ProgressSchedule(Counting(), at)
    at.value = 4.0
    first.step()
    second.load_state_dict(first.state_dict())
    at.value = 6.0
    second.step()
    assert len(second.calls) == 6


def test_a_cycle_is_completed_with_large_batches_just_as_with_small_ones(make_job) -> None:
    job = make_job(guard=False, measure_noise=False, max_batch_size=64)
    model = perceptron()
    optimizer = sgd(model)
    total = 10 * 3
    cycle = OneCycleLR(optimizer, 0.4, total_steps=total + 1)
    prepared, optimizer, loader, schedule = job.prepare(
        model, optimizer, DataLoader(Classification(80), M0, shuffle=True), cycle
    )
    adapter = job._made.adapter
    adapter.noise = adapter._trusted = dataclasses.replace(adapter.noise, sqr=(1.0,), var=(6.0,), weight=1.0)
    rates = []
    for _ in job.epochs(3):
        for batch in loader:
            plain_body(prepared, optimizer, batch, job.backward)
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
            assert cycle.last_epoch == int(min(job.progress, total) + 1e-6)
        adapter.apply(BatchConfig(24, 24, 1), "test", None)
    assert cycle.last_epoch == total
    assert job.steps < total
    assert max(rates) > 0.3
    assert rates[-1] < 0.01


def test_the_rate_is_scaled_in_the_step_alone_and_schedules_see_their_own(make_job) -> None:
    job = make_job(guard=False, measure_noise=False, max_batch_size=64, rule="linear")
    model = nn.Linear(1, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    inside: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: inside.append([group["lr"] for group in optimizer.param_groups]))
    own = StepLR(optimizer, 1, 0.5)
    prepared, optimizer, loader, schedule = job.prepare(
        model, optimizer, DataLoader(Classification(64), M0, shuffle=True), own
    )
    optimizer.register_step_pre_hook(lambda *_: inside.append([group["lr"] for group in optimizer.param_groups]))
    job._made.adapter.apply(BatchConfig(32, 32, 1), "test", None)
    assert job.learning_rate_factors == (4.0, 4.0)
    for _ in job.passes(1):
        for batch in loader:
            optimizer.zero_grad()
            job.backward(prepared(batch[0][:, :1]).mean())
            optimizer.step()
            assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    schedule.step()
    assert inside == [[0.5, 0.25], [2.0, 1.0]] * 2
    assert schedule.get_last_lr() == [0.25, 0.125]


@pytest.mark.parametrize("largest", [8, 3], ids=["one pass", "three passes"])
def test_a_plateau_or_a_position_given_in_the_loop_counts_once_a_step(make_job, largest: int) -> None:
    for make in (lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0), lambda o: CosineAnnealingWarmRestarts(o, 5)):
        model = perceptron()
        optimizer = sgd(model)
        job = pinned(make_job, max_per_gpu_batch_size=largest)
        prepared, optimizer, loader, schedule = job.prepare(
            model, optimizer, DataLoader(Classification(32), M0, shuffle=True), make(optimizer)
        )
        for _ in job.epochs(1):
            for batch in loader:
                plain_body(prepared, optimizer, batch, job.backward)
                schedule.step(1.0)
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(schedule.inner, ReduceLROnPlateau):
            assert rate == 0.1 * 0.5**3  # the first of four calls sets the best
        else:
            assert rate == pytest.approx(0.05 * (1 + torch.cos(torch.tensor(torch.pi / 5)).item()))
