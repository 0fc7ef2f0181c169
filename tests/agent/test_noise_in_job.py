"""The noise scale through a whole job, data and loop included, against the analytic one of linear regression.

The samples are a fixed set of normal ones, so that the truth is theirs: the weights hardly move, and a pass takes each
of them once. The problem is that of test_noise_meter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.agent.test_noise_meter import Regression, examples, loss_of
from tests.agent.training import Run, loader_of, network, sgd, steady, train_turn
from torch import nn
from torch.utils.data import DataLoader

from pollux.agent.noise_meter import NoiseMeter
from pollux.torch import Job

COUNT, BATCH = 32 * 960 + 5, 960
PASSES = 5
X, Y = examples(torch.Generator().manual_seed(11), COUNT)


class Truth:
    """φ of the set of samples under the P that steps were measured with, which moves a little with Adam's state."""

    def __init__(self, model: Regression) -> None:
        w = torch.cat([model.first, model.second]).detach().double()
        each = (X.double() @ w - Y.double())[:, None] * X.double()
        self._sqr, self._var = each.mean(0).square(), each.var(0)
        self.sqr = self.var = 0.0

    def add(self, meter: NoiseMeter) -> None:
        p = torch.cat([torch.ones(len(self._sqr) // 2) if one is None else one for one in meter._inverses]).double()
        self.sqr += float((self._sqr * p * p).sum())
        self.var += float((self._var * p * p).sum())

    @property
    def noise_scale(self) -> float:
        return self.var / self.sqr


def measured(rank: int, replicas: int, name: str, per_gpu: int | None) -> tuple[float, float, int]:
    """(measured φ, true φ, number of passes in a step)."""
    job = Job(adapt=False, noise_window=1e9, max_per_gpu_batch_size=per_gpu, guard=False)
    module = Regression()
    truth = Truth(module)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.groups, lr=1e-9, momentum=0.9)
    if name == "adam":
        optimizer = torch.optim.Adam(module.groups, lr=1e-9)
    loader = DataLoader(range(COUNT), batch_size=BATCH, shuffle=True, collate_fn=lambda at: (X[at], Y[at]))
    model, optimizer, loader = job.prepare(module, optimizer, loader)
    made = job._made
    made.adapter._wanted_interval = lambda: 1  # every step
    for number in job.passes(PASSES):
        if number == 2:  # Adam's second moment has settled
            made.adapter.noise = made.adapter.noise.restarted()
        for x, y in loader:
            optimizer.zero_grad()
            job.backward(loss_of(model, x, y))
            optimizer.step()
            if number >= 2 and made.stepper.is_last:
                truth.add(made.stepper._meter)
    assert made.stepper._meter.is_preconditioned == (name == "adam")
    found = job.noise_scale
    job.close()
    assert found is not None
    return found, truth.noise_scale, made.dealer.config.passes


ALL = (("sgd", 1), ("sgd", 3), ("adam", 1), ("adam", 3))
"""Optimizers, and how many passes a step has."""


def all_measured(rank: int, replicas: int, cases: Sequence[tuple[str, int]]) -> list[tuple[float, float, int]]:
    return [
        measured(rank, replicas, name, BATCH // replicas // passes if passes > 1 else None) for name, passes in cases
    ]


# Four are more than there are cores: each optimizer and each number of passes once.
@pytest.mark.parametrize(("replicas", "cases"), [(1, ALL), (2, ALL), (4, ALL[1:3])], ids=["1", "2", "4"])
def test_the_noise_scale_of_a_job_is_the_analytic_one(spawn, replicas, cases):
    answers = spawn(all_measured, replicas, cases)
    assert all(answer == answers[0] for answer in answers)
    for (found, true, passes), (_, expected_passes) in zip(answers[0], cases, strict=True):
        print(f"{replicas} replicas, {passes} passes: {found / true - 1:+.1%} of {true:.1f}")
        assert passes == expected_passes
        assert found == pytest.approx(true, rel=0.1)


def test_one_replica_with_batch_normalisation_compares_neighbouring_steps():
    job = Job(adapt=False)
    module = network(nn.BatchNorm1d(8))
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(203, 16))
    steady(job)
    run = Run()
    for _ in job.passes(8):
        train_turn(job, model, optimizer, loader, run, lambda: None)
    # No step was split, measured ones neither.
    assert len({step for step, _ in run.seen}) == len(run.seen)
    assert job.noise_scale is not None
    assert math.isfinite(job.noise_scale)
    assert job._made.adapter.noise.effective_samples > 5
    job.close()


def unmeasured(**options: Any) -> Job:
    job = Job(adapt=False, **options)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(203, 16))
    for _ in job.passes(2):
        train_turn(job, model, optimizer, loader, Run(), lambda: None)
    job.close()
    return job


def test_a_job_that_is_not_to_measure_knows_no_noise_scale():
    assert unmeasured(measure_noise=False).noise_scale is None
    assert unmeasured().noise_scale is not None
