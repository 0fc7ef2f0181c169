"""The same training twice: as a plain loop of torch, and prepared by a job. For tests in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pollux.torch import Job, permutation

FEATURES, CLASSES = 6, 3


@pytest.fixture(name="make_job", autouse=True)
def job_maker() -> Iterator[Callable[..., Job]]:
    """`make_job(**options)`: jobs that are closed after the test, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    jobs: list[Job] = []

    def make(**options: Any) -> Job:
        jobs.append(Job(**options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
    torch.set_num_threads(threads)


def pinned(make_job: Callable[..., Job], **options: Any) -> Job:
    """A job that neither adapts nor measures."""
    return make_job(adapt=False, measure_noise=False, **options)


class Classification(Dataset[Any]):
    """Samples (features, class, index), generated."""

    def __init__(self, size: int, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, FEATURES, generator=generator)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


class Indices(Dataset[int]):
    """Every sample is its own number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def perceptron(*between: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 16), *between, nn.ReLU(), nn.Linear(16, CLASSES))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def relative_difference(model: nn.Module, other: nn.Module) -> float:
    """Of all parameters together."""
    pairs = [
        (a.detach().double(), b.detach().double()) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    ]
    gap = sum(float((a - b).square().sum()) for a, b in pairs)
    return (gap / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


class InOrder(torch.utils.data.Sampler[int]):
    """The order that a job of this seed uses, for the plain loop: pass after pass."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed, self.pass_index = size, seed, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = permutation(self.size, self.seed, self.pass_index)
        self.pass_index += 1
        return iter(order.tolist())


Body = Callable[[nn.Module, torch.optim.Optimizer, Any, Callable[[torch.Tensor], None]], None]
"""(model, optimizer, batch, backward): what the loop does with a batch."""


def plain_body(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, backward: Any) -> None:
    x, y, _ = batch
    optimizer.zero_grad()
    backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()


def run_plain(
    dataset: Dataset[Any],
    batch_size: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    *,
    body: Body = plain_body,
    after_step: Callable[[], Any] = lambda: None,
    after_epoch: Callable[[], Any] = lambda: None,
    **settings: Any,
) -> nn.Module:
    """torch alone, on the samples in the order of a job."""
    loader = DataLoader(dataset, batch_size, sampler=InOrder(len(dataset)), **settings)  # type: ignore[arg-type]
    torch.manual_seed(11)
    for _ in range(epochs):
        for batch in loader:
            body(model, optimizer, batch, lambda loss: loss.backward())
            after_step()
        after_epoch()
    return model


def run_job(
    job: Job,
    dataset: Dataset[Any],
    batch_size: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    *,
    body: Body = plain_body,
    schedule: Any = None,
    each: str = "epoch",
    watch: Callable[[Any], None] = lambda _: None,
    **settings: Any,
) -> nn.Module:
    """The same with a job; `schedule` steps once each "epoch" or "step"; `watch` sees every micro-batch first."""
    loader = DataLoader(dataset, batch_size, shuffle=True, **settings)
    parts = [model, optimizer, loader] + ([schedule] if schedule is not None else [])
    prepared, optimizer, loader, *rest = job.prepare(*parts)
    torch.manual_seed(11)
    for _ in job.epochs(epochs):
        for batch in loader:
            watch(batch)
            body(prepared, optimizer, batch, job.backward)
            if rest and each == "step":
                rest[0].step()
        if rest and each == "epoch":
            rest[0].step()
    return model
