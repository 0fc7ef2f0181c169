"""A step in several passes: the plain loop with the large batch, for every way to write the loop's body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from .loops import (
    Classification,
    job_maker,  # noqa: F401
    perceptron,
    pinned,
    plain_body,
    relative_difference,
    run_job,
    run_plain,
    sgd,
)

M0 = 10
CLOSE = 2e-5
DATASET = Classification(44)  # four whole steps and one of four
EPOCHS = 4


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def zero_after(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
    backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()


def zero_in_place(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(loss_of(model, batch))
    optimizer.step()


def zero_in_place_after(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
    backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def zero_the_model(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
    model.zero_grad()
    backward(loss_of(model, batch))
    optimizer.step()


def clip_norm(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
    optimizer.zero_grad()
    backward(loss_of(model, batch))
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()


def clip_value(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
    optimizer.zero_grad()
    backward(loss_of(model, batch))
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    optimizer.step()


def loss_with_one_element(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
    optimizer.zero_grad()
    backward(loss_of(model, batch).reshape(1))
    optimizer.step()


BODIES = [
    plain_body,
    zero_after,
    zero_in_place,
    zero_in_place_after,
    zero_the_model,
    clip_norm,
    clip_value,
    loss_with_one_element,
]


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model[0], model[2]  # type: ignore[index]
    groups = [{"params": first.parameters(), "lr": 0.2}, {"params": second.parameters(), "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "groups": two_groups,
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "adamw foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "tensor rate": lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9),
}


@pytest.mark.parametrize("largest", [1, 3, 4, 9])
@pytest.mark.parametrize("body", BODIES)
def test_passes_add_up_to_the_large_batch(make_job, body: Any, largest: int) -> None:
    plain, ours = perceptron(), perceptron()
    run_plain(DATASET, M0, plain, sgd(plain), EPOCHS, body=body)
    job = pinned(make_job, max_per_gpu_batch_size=largest)
    sizes: list[int] = []
    run_job(job, DATASET, M0, ours, sgd(ours), EPOCHS, body=body, watch=lambda batch: sizes.append(len(batch[1])))
    assert job.steps == 5 * EPOCHS
    assert max(sizes) <= largest
    assert sum(sizes) == 44 * EPOCHS
    assert relative_difference(ours, plain) < CLOSE


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_passes_add_up_for_every_optimizer(make_job, make_optimizer: Any) -> None:
    plain, ours = perceptron(), perceptron()
    run_plain(DATASET, M0, plain, make_optimizer(plain), EPOCHS)
    job = make_job(adapt=False, max_per_gpu_batch_size=4)
    run_job(job, DATASET, M0, ours, make_optimizer(ours), EPOCHS)
    assert job.noise_scale is not None
    # Divisors of tiny gradients make much of rounding.
    assert relative_difference(ours, plain) < 1e-3


SCHEDULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a cycle by steps": (lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=5 * EPOCHS + 1), "step"),
    "stairs by steps": (lambda optimizer: StepLR(optimizer, 3, 0.7), "step"),
    "stairs by epochs": (lambda optimizer: StepLR(optimizer, 2, 0.3), "epoch"),
}


@pytest.mark.parametrize(("make_schedule", "each"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_count_steps_and_not_passes(make_job, make_schedule: Any, each: str) -> None:
    plain, ours = perceptron(), perceptron()
    optimizer = sgd(plain)
    expected = make_schedule(optimizer)
    run_plain(DATASET, M0, plain, optimizer, EPOCHS, **{f"after_{each}": expected.step})
    job, optimizer = pinned(make_job, max_per_gpu_batch_size=4), sgd(ours)
    schedule = make_schedule(optimizer)
    run_job(job, DATASET, M0, ours, optimizer, EPOCHS, schedule=schedule, each=each)
    assert schedule.get_last_lr() == expected.get_last_lr()
    assert relative_difference(ours, plain) < CLOSE


def test_a_plateau_is_met_by_the_metric_of_each_epoch(make_job) -> None:
    plain, ours = perceptron(), perceptron()
    optimizer = sgd(plain)
    expected = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    run_plain(DATASET, M0, plain, optimizer, EPOCHS, after_epoch=lambda: expected.step(1.0))
    job, optimizer = pinned(make_job, max_per_gpu_batch_size=4), sgd(ours)
    own = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model, optimizer, loader, schedule = job.prepare(ours, optimizer, DataLoader(DATASET, M0, shuffle=True), own)
    for _ in job.epochs(EPOCHS):
        for batch in loader:
            plain_body(model, optimizer, batch, job.backward)
        schedule.step(metrics=1.0)
    assert optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert relative_difference(ours, plain) < CLOSE


def test_sparse_gradients_and_unused_parameters_take_part(make_job) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.table = nn.Embedding(44, 3, sparse=True)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    def body(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(batch[2]), batch[1]))
        optimizer.step()

    plain, ours = Lookup(), Lookup()
    run_plain(DATASET, M0, plain, torch.optim.SGD(plain.parameters(), lr=0.5), 2, body=body)
    job = make_job(adapt=False, max_per_gpu_batch_size=4)
    run_job(job, DATASET, M0, ours, torch.optim.SGD(ours.parameters(), lr=0.5), 2, body=body)
    assert relative_difference(ours, plain) < CLOSE
