"""Out of memory: the step is dealt again in smaller passes, and training goes on as if it had fitted."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pollux.agent.batching import BatchConfig
from pollux.agent.memory import MemoryBound, stand_in
from pollux.core import BatchLimits
from pollux.errors import LoopMisuse
from pollux.torch import permutation

from .loops import (
    CLASSES,
    FEATURES,
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

M0 = 16
DATASET = Classification(44)


class Fails(torch.autograd.Function):
    """The identity, whose backward does not fit for more than so many samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, most: int) -> torch.Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("no memory in the backward")
        return gradient, None


class Small(nn.Module):
    """A model on a device that holds the activations of so many samples, in one of the two directions."""

    def __init__(self, most: int, direction: str, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = perceptron(layer or nn.Identity())
        self.most = most
        self.direction = direction
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.direction == "forward" and len(x) > self.most:
            raise torch.OutOfMemoryError("no memory in the forward")
        if torch.is_grad_enabled():
            self.sizes.append(len(x))
        return Fails.apply(self.inner(x), self.most if self.direction == "backward" else 10**9)  # type: ignore[no-any-return]


def clipping(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
    optimizer.zero_grad()
    backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("most", "body"), [(1, plain_body), (3, clipping), (7, plain_body), (8, clipping)])
def test_a_step_that_does_not_fit_is_repeated_in_smaller_passes(
    make_job, caplog: pytest.LogCaptureFixture, body: Any, most: int, direction: str
) -> None:
    plain, ours = perceptron(nn.Identity()), Small(most, direction)
    run_plain(DATASET, M0, plain, sgd(plain), 3, body=body)
    job = pinned(make_job)
    with caplog.at_level(logging.WARNING):
        run_job(job, DATASET, M0, ours, sgd(ours), 3, body=body)
    assert relative_difference(ours.inner, plain) < 2e-5
    assert job.steps == 9
    assert job.batch_size == M0
    bounds = [8, 4, 2, 1]
    tried = [16, *bounds[: bounds.index(max(bound for bound in bounds if bound <= most)) + 1]]
    expected = [f"out of memory with {a} samples in a pass: at most {b} from now on" for a, b in pairwise(tried)]
    assert [record.message for record in caplog.records] == expected
    assert job._made.adapter.limits.max_per_gpu_batch_size == tried[-1]
    assert max(ours.sizes[-12:]) <= most


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_still_counts_once(make_job, direction: str, workers: int) -> None:
    ours = Small(5, direction)
    job = make_job(adapt=False)
    loader = DataLoader(DATASET, M0, shuffle=True, num_workers=workers)
    model, optimizer, loader = job.prepare(ours, sgd(ours), loader)
    counted: list[int] = []
    step: list[int] = []
    for _ in job.passes(2):
        for batch in loader:
            step += batch[2].tolist()
            plain_body(model, optimizer, batch, job.backward)
            if job._made.stepper.is_last:
                counted += step if job._made.stepper.is_complete else []
                step.clear()
    assert counted == [sample for index in range(2) for sample in permutation(44, 0, index).tolist()]
    assert job.steps == 6


def test_a_later_growth_that_does_not_fit_is_taken_back(make_job, tmp_path: Path) -> None:
    ours = Small(20, "forward")
    job = make_job(guard=False, measure_noise=False, max_batch_size=64, checkpoint_dir=tmp_path)
    model, optimizer, loader = job.prepare(ours, sgd(ours), DataLoader(DATASET, M0, shuffle=True))
    for turn in job.passes(3):
        for batch in loader:
            plain_body(model, optimizer, batch, job.backward)
        if turn == 0:
            job._made.adapter.apply(BatchConfig(40, 40, 1), "test", None)
    job.close()
    assert job._made.dealer.config == BatchConfig(40, 20, 2)
    assert job._made.adapter.loss is not None
    entries = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    found = [entry for entry in entries if "out_of_memory" in json.dumps(entry).lower() or "OutOfMemory" in str(entry)]
    assert len(found) == 1
    assert "40" in json.dumps(found[0])
    assert "20" in json.dumps(found[0])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_single_sample_that_does_not_fit_ends_with_a_clear_error(make_job, direction: str) -> None:
    ours = Small(0, direction)
    with pytest.raises(LoopMisuse, match=r"out of memory with 1 sample in a pass.*smaller model or a larger device"):
        run_job(pinned(make_job), DATASET, M0, ours, sgd(ours), 1)


def test_batch_normalisation_survives_a_forward_that_does_not_fit(make_job) -> None:
    ours = Small(8, "forward", nn.BatchNorm1d(16))
    run_job(make_job(adapt=False), DATASET, M0, ours, sgd(ours), 2)
    statistics = ours.inner[1]
    assert isinstance(statistics, nn.BatchNorm1d)
    assert statistics.training
    # Two passes for each of the whole steps and two for the last of 12: the failed attempt left no trace.
    assert int(statistics.num_batches_tracked) == 12


@pytest.mark.parametrize("is_fused", [False, True], ids=["sgd", "fused adamw"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_scaler_sees_only_the_step_that_fitted(make_job, direction: str, is_fused: bool) -> None:
    ours = Small(5, direction)
    optimizer = torch.optim.AdamW(ours.parameters(), fused=True) if is_fused else sgd(ours)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    job = pinned(make_job)
    model, optimizer, loader, scaler = job.prepare(ours, optimizer, DataLoader(DATASET, M0, shuffle=True), scaler)
    for _ in job.epochs(3):
        for x, y, _ in loader:
            optimizer.zero_grad()
            job.backward(scaler.scale(nn.functional.cross_entropy(model(x), y)))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert job.progress == 9.0
    assert scaler.get_scale() == 256.0 * 2**3


def test_out_of_memory_outside_of_the_loop_is_the_scripts(make_job) -> None:
    ours = Small(4, "forward")
    model, _, _ = pinned(make_job).prepare(ours, sgd(ours), DataLoader(DATASET, M0))
    with pytest.raises(torch.OutOfMemoryError, match="in the forward"):
        model(torch.zeros(5, FEATURES))
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="in the forward"):
        model(torch.zeros(5, FEATURES))


# The bound


def test_a_size_is_proven_by_three_steps_and_bounded_by_a_failure() -> None:
    memory = MemoryBound(BatchLimits(8, 64, 2, 64))
    for _ in range(2):
        memory.succeeded(16)
    memory.succeeded(8)
    assert not memory.is_proven(8)
    for _ in range(3):
        memory.succeeded(16)
    assert memory.is_proven(16)
    assert not memory.is_proven(17)
    assert memory.failed(64).max_per_gpu_batch_size == 32
    assert memory.proven == 16
    assert memory.failed(16).max_per_gpu_batch_size == 8
    assert memory.proven == 8
    assert memory.failed(3).max_per_gpu_batch_size == 2
    with pytest.raises(LoopMisuse, match="with 2 samples in a pass, the fewest allowed"):
        memory.failed(2)


def test_a_measured_step_in_halves_proves_nothing_of_the_whole(make_job) -> None:
    ours = perceptron()
    job = make_job(adapt=False)
    model, optimizer, loader = job.prepare(ours, sgd(ours), DataLoader(DATASET, M0, shuffle=True))
    job._made.dealer.measuring.every = 1
    job._made.adapter._interval._every = 1
    for _ in job.epochs(2):
        for batch in loader:
            plain_body(model, optimizer, batch, job.backward)
            job._made.dealer.measuring.every = 1
    assert job._made.adapter._memory.proven == 0


def test_the_stand_in_has_the_outputs_of_the_whole() -> None:
    class Many(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, table: torch.Tensor) -> dict[str, Any]:
            assert len(x) <= 2
            out = x * scale + table.sum()
            return {"all": out, "pair": (out.sum(1), "name"), "mean": out.mean()}

    x, scale, table = torch.randn(13, 4), torch.randn(13, 1), torch.randn(5)
    outputs = stand_in(Many(), (x,), {"scale": scale, "table": table})
    expected = x * scale + table.sum()
    assert torch.equal(outputs["all"], expected)
    assert torch.equal(outputs["pair"][0], expected.sum(1))
    assert outputs["pair"][1] == "name"
    assert outputs["mean"].dim() == 0
    assert not outputs["all"].requires_grad


def test_the_stand_in_tries_ever_smaller_parts() -> None:
    seen: list[int] = []

    class Tiny(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            if len(x) > 1:
                raise torch.OutOfMemoryError("no memory")
            return x.expand(-1, CLASSES)

    assert stand_in(Tiny(), (torch.ones(40, 1),), {}).shape == (40, CLASSES)
    assert seen == [5, 2, *[1] * 40]
