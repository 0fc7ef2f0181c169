"""Small trainings that write down which samples they saw, for tests with one and with several replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from pollux.torch import Job, permutation

WIDTH = 6

torch.set_num_threads(1)


class Samples(Dataset):
    """Regression on noise: sample i is (x, y, i)."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = self.x.sum(1) + torch.randn(count, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def network(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


def loader_of(count: int, batch_size: int, **settings: Any) -> DataLoader:
    return DataLoader(Samples(count), batch_size=batch_size, shuffle=True, **settings)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def weights_of(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def steady(job: Job) -> None:
    """A beat at every step, every eighth one measured: neither depends on how fast the machine is."""
    adapter = job._made.adapter
    adapter._beat_every = 1
    adapter._wanted_beat = lambda: 1
    adapter._wanted_interval = lambda: 8


@dataclass
class Run:
    """What one replica saw."""

    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    """(step, samples) of each pass of a step that the optimizer took."""
    settings: list[tuple[Any, ...]] = field(default_factory=list)
    """At each pass: what has to be equal on all replicas."""
    losses: list[float] = field(default_factory=list)
    weights: np.ndarray | None = None
    answer: Any = None


def train_turn(job: Job, model: nn.Module, optimizer: Any, loader: Any, run: Run, after: Callable[[], None]) -> None:
    """The loop over the loader, with a call of `after` at the end of each pass."""
    pending: list[tuple[int, list[int]]] = []
    for x, y, index in loader:
        step = job.steps
        run.settings.append(
            (step, job.progress, job.batch_size, job._made.dealer.measuring.every, job.learning_rate_factors)
        )
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x).squeeze(1), y)
        job.backward(loss)
        optimizer.step()
        run.losses.append(float(loss.detach()))
        pending.append((step, index.tolist()))
        stepper = job._made.stepper
        if stepper.is_last:
            run.seen += [] if stepper._has_failed else pending
            pending = []
        after()


def train(
    job: Job,
    loader: DataLoader,
    *,
    turns: int = 1,
    passes: bool = True,
    model: nn.Module | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    after: Callable[[Job], None] = lambda _: None,
) -> Run:
    run = Run()
    module = network() if model is None else model
    prepared, optimizer, loader = job.prepare(module, make_optimizer(module), loader)
    for _ in job.passes(turns) if passes else job.epochs(turns):
        train_turn(job, prepared, optimizer, loader, run, lambda: after(job))
    run.weights = weights_of(module)
    return run


def delivered(runs: Iterable[Run]) -> list[int]:
    """All samples in the order of the steps; inside a step by replica, inside a replica by pass."""
    runs = list(runs)
    steps = sorted({step for run in runs for step, _ in run.seen})
    by_step = [{step: list(group) for step, group in itertools.groupby(run.seen, lambda one: one[0])} for run in runs]
    return [index for step in steps for of in by_step for _, indices in of.get(step, ()) for index in indices]


def expected(count: int, passes: int, seed: int = 0) -> list[int]:
    return [int(index) for number in range(passes) for index in permutation(count, seed, number)]
