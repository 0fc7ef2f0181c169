"""GradScaler in a prepared loop: passes, skipped steps, and what they count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pollux.agent.scaler import StepScaler
from pollux.errors import LoopMisuse

from .loops import (
    Classification,
    InOrder,
    job_maker,  # noqa: F401
    perceptron,
    pinned,
    relative_difference,
    sgd,
)

M0 = 8
DATASET = Classification(30)
EPOCHS = 3
OVERFLOWS = 5
"""The sample whose loss is infinite, once."""

Fused = pytest.mark.parametrize("is_fused", [False, True], ids=["sgd", "fused adamw"])


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)


def make_optimizer(model: nn.Module, is_fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) if is_fused else sgd(model)


class Script:
    """The body of a loop with a GradScaler; the first time that the sample comes its gradient is infinite."""

    def __init__(self, scaler: Any, unscales: bool = False, overflows: bool = True) -> None:
        self.scaler = scaler
        self.unscales = unscales
        self.is_armed = overflows

    def __call__(self, model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
        x, y, index = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            loss = nn.functional.cross_entropy(model(x), y)
        if self.is_armed and OVERFLOWS in index.tolist():
            self.is_armed = False
            loss = loss * torch.inf
        backward(self.scaler.scale(loss))
        if self.unscales:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        self.scaler.step(optimizer)
        self.scaler.update()


def run_plain(model: nn.Module, optimizer: Any, script: Script, steps: int) -> None:
    """So many steps that were not skipped."""
    loader = DataLoader(DATASET, M0, sampler=InOrder(30))
    done = 0
    while done < steps:
        for batch in loader:
            before = script.is_armed
            script(model, optimizer, batch, lambda loss: loss.backward())
            done += script.is_armed == before
            if done == steps:
                break


def run_job(job: Any, model: nn.Module, optimizer: Any, script: Script) -> list[int]:
    """The samples, in their order."""
    model, optimizer, loader, script.scaler = job.prepare(
        model, optimizer, DataLoader(DATASET, M0, shuffle=True), script.scaler
    )
    seen: list[int] = []
    for _ in job.epochs(EPOCHS):
        for batch in loader:
            seen += batch[2].tolist()
            script(model, optimizer, batch, job.backward)
    return seen


@pytest.mark.parametrize("unscales", [False, True], ids=["", "clipping"])
@pytest.mark.parametrize("largest", [8, 3], ids=["one pass", "three passes"])
@Fused
def test_a_step_with_an_infinite_gradient_is_left_out_and_makes_no_progress(
    make_job, is_fused: bool, largest: int, unscales: bool
) -> None:
    plain, ours = perceptron(), perceptron()
    expected, script = Script(make_scaler(), unscales), Script(make_scaler(), unscales)
    run_plain(plain, make_optimizer(plain, is_fused), expected, 4 * EPOCHS)
    job = pinned(make_job, max_per_gpu_batch_size=largest)
    seen = run_job(job, ours, make_optimizer(ours, is_fused), script)
    assert isinstance(script.scaler, StepScaler)
    assert job.progress == 4.0 * EPOCHS
    assert job.steps == 4 * EPOCHS + 1  # the skipped one moves the cursor on
    first = InOrder(30)
    assert seen == [sample for _ in range(4) for sample in first][: len(seen)]
    assert script.scaler.get_scale() == expected.scaler.get_scale()
    assert relative_difference(ours, plain) < (1e-3 if is_fused else 2e-5)


def test_noise_is_measured_free_of_the_scale(make_job) -> None:
    noises = []
    for initial in (1.0, 65536.0):
        model = perceptron()
        scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=1000)
        job = make_job(adapt=False)
        run_job(job, model, sgd(model), Script(scaler, overflows=False))
        noises.append(job.noise_scale)
    assert noises[0] is not None
    assert noises[0] == pytest.approx(noises[1], rel=1e-3)


def test_a_scaler_that_is_off_changes_nothing(make_job) -> None:
    model = perceptron()
    job = pinned(make_job, max_per_gpu_batch_size=3)
    run_job(job, model, sgd(model), Script(torch.amp.GradScaler("cpu", enabled=False), overflows=False))
    assert job.progress == 4.0 * EPOCHS


@pytest.mark.parametrize("passes", [1, 3])
def test_a_scaler_that_was_not_prepared_is_noticed_at_the_first_step(make_job, passes: int) -> None:
    model = perceptron()
    job = pinned(make_job, max_per_gpu_batch_size=-(-M0 // passes))
    script = Script(make_scaler())
    prepared, optimizer, loader = job.prepare(model, sgd(model), DataLoader(DATASET, M0, shuffle=True))

    def run() -> None:
        for _ in job.epochs(1):
            for batch in loader:
                script(prepared, optimizer, batch, job.backward)

    with pytest.raises(LoopMisuse, match=r"a GradScaler that job\.prepare was not given"):
        run()
    assert job.steps == 0
