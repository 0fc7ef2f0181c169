"""Two to four real replicas: what they train on, what they agree on, and that they come to what one replica does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.agent.training import (
    Run,
    Samples,
    adamw,
    delivered,
    expected,
    loader_of,
    network,
    sgd,
    train,
    train_turn,
)
from torch import nn
from torch.utils.data import DataLoader

from pollux.agent.batching import BatchConfig
from pollux.agent.memory import TRIED_STEPS
from pollux.agent.tuner import Measured, Tuned, tune
from pollux.torch import Job

SIZES = (11, 30, 12, 17, 64, 11)
"""Total batch sizes that few numbers of replicas divide."""


def change_often(job: Job) -> None:
    """Another batch size every few steps, on all replicas alike."""
    made = job._made
    if made.stepper.is_last and job.steps % 3 == 2:
        size = SIZES[job.steps // 3 % len(SIZES)]
        made.adapter.apply(BatchConfig(size, size, 1), "the test says so", None)


def changing(rank: int, replicas: int, per_gpu: int | None, measure: bool) -> Run:
    job = Job(
        max_batch_size=64, max_per_gpu_batch_size=per_gpu, adapt=False, seed=5, measure_noise=measure, guard=False
    )
    run = train(job, loader_of(203, 11), turns=3, after=change_often)
    job.close()
    return run


def all_changing(rank: int, replicas: int) -> dict[Any, Run]:
    return {case: changing(rank, replicas, *case) for case in ((None, True), (4, True), (None, False))}


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_each_pass_delivers_each_sample_once_in_an_order_that_the_number_of_replicas_does_not_change(spawn, replicas):
    answers = spawn(all_changing, replicas)
    for case in answers[0]:
        runs = [answer[case] for answer in answers]
        assert delivered(runs) == expected(203, 3, seed=5), case
        for run in runs[1:]:
            assert run.settings == runs[0].settings
            assert run.weights.tobytes() == runs[0].weights.tobytes()
    sizes = {size for _, _, size, _, _ in answers[0][None, True].settings}
    assert sizes == set(SIZES)


CHOSEN = (40, 17, 128, 33, 64, 16)


def until_changed(rank: int, replicas: int) -> Run:
    """Decisions of a tuner that likes change, in its own thread at its own times; then the first replica stops all."""
    job = Job(max_batch_size=256, report_every_s=0.02, seed=1, guard=False)
    answers = itertools.count()

    def restless(measured: Measured, warm: Any, options: Any, told: Any) -> Tuned:
        size = CHOSEN[next(answers) % len(CHOSEN)]
        return dataclasses.replace(tune(measured, warm, options), config=BatchConfig(size, size, 1))

    changes: list[int] = []

    def after(job: Job) -> None:
        if not changes:
            if job.is_main:
                job._made.tuner._work = restless
            job._made.adapter._wanted_beat = lambda: 5
        if [job.batch_size] != changes[-1:]:
            changes.append(job.batch_size)
        if job.is_main and len(changes) > len(CHOSEN):
            job.stop("it has changed often enough")

    run = train(job, loader_of(1500, 16), turns=1000, passes=False, after=after)
    adapter = job._made.adapter
    run.answer = changes, dataclasses.asdict(adapter.noise), adapter.loss, job.steps, job.progress
    job.close()
    return run


def test_replicas_that_adapt_agree_on_everything_at_every_step_and_stop_together(spawn):
    runs = spawn(until_changed, 2)
    for run in runs[1:]:
        assert run.settings == runs[0].settings
        assert run.weights.tobytes() == runs[0].weights.tobytes()
        assert run.answer == runs[0].answer
    assert set(runs[0].answer[0]) == set(CHOSEN)
    assert any(factor > 1.0 for *_, factors in runs[0].settings for factor in factors)
    assert len({progress for _, progress, *_ in runs[0].settings}) == runs[0].answer[3]
    seen = delivered(runs)
    assert seen == expected(1500, math.ceil(len(seen) / 1500), seed=1)[: len(seen)]


def fixed(rank: int, replicas: int, per_gpu: int | None, make_optimizer: Any) -> Run:
    job = Job(adapt=False, max_batch_size=64, max_per_gpu_batch_size=per_gpu)
    run = train(job, loader_of(203, 16), turns=8, make_optimizer=make_optimizer)
    run.answer = max(size for _, size in ((step, len(indices)) for step, indices in run.seen))
    job.close()
    return run


def all_fixed(rank: int, replicas: int) -> list[Run]:
    return [fixed(rank, replicas, per_gpu, make) for per_gpu in (None, 4) for make in (sgd, adamw)]


def test_a_run_at_fixed_batch_size_is_that_of_one_replica_whatever_the_replicas_and_passes(spawn):
    alone = [fixed(0, 1, None, make) for make in (sgd, adamw)] * 2
    answers = spawn(all_fixed, 2)
    assert [run.answer for run in answers[0]] == [8, 8, 4, 4]
    for number, one in enumerate(alone):
        assert one.settings[-1][0] >= 100
        # AdamW divides by small numbers, so that it makes more of rounding.
        tolerance = 1e-5 if number % 2 == 0 else 1e-3
        for answer in answers:
            difference = np.linalg.norm(answer[number].weights - one.weights)
            assert difference <= tolerance * np.linalg.norm(one.weights)


def stop_between(rank: int, replicas: int) -> tuple[list[int], list[int]]:
    """Only one replica asks, once between two epochs; a second loop runs all the same."""
    job = Job(adapt=False)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(64, 8))
    ran: tuple[list[int], list[int]] = ([], [])
    for number in range(2):
        for epoch in job.epochs(3):
            train_turn(job, model, optimizer, loader, Run(), lambda: None)
            ran[number].append(epoch)
            if number == 0 and epoch == 1 and rank == replicas - 1:
                job.stop("one is enough")
    job.close()
    return ran


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_replica_that_asks_to_stop_between_epochs_ends_that_loop_everywhere(spawn, replicas):
    assert spawn(stop_between, replicas) == [([0, 1], [0, 1, 2])] * replicas


# --- evaluation


def evaluate(rank: int, replicas: int, count: int) -> tuple[float, float, list[int], int]:
    """With the prepared model, in evaluation mode: replicas run it a different number of times."""
    job = Job(adapt=False)
    module = network(nn.BatchNorm1d(8))
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(64, 8))
    samples = Samples(count)
    shard = job.shard(DataLoader(samples, batch_size=4))
    seen: list[int] = []
    means = []
    for _ in job.passes(2):
        train_turn(job, model, optimizer, loader, Run(), lambda: None)
        model.eval()
        mean = job.average("mean index")
        seen.clear()
        for x, _, index in shard:
            model(x)  # with gradients: they forgot torch.no_grad()
            mean.add(index.float().mean(), count=len(index))
            seen.extend(index.tolist())
        means.append(mean.compute())
        mean.reset()
        model.train()
    job.close()
    return means[0], means[1], seen, len(shard)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_evaluation_counts_each_sample_once_though_replicas_have_different_numbers_of_batches(spawn, replicas):
    count = 4 * replicas + 1
    answers = spawn(evaluate, replicas, count)
    assert sorted(index for answer in answers for index in answer[2]) == list(range(count))
    assert {answer[:2] for answer in answers} == {((count - 1) / 2,) * 2}
    if replicas > 1:
        assert len({answer[3] for answer in answers}) > 1


# --- out of memory


class Cramped(nn.Module):
    """Runs out of memory with more than `most` samples in a pass: in the forward, or in the backward."""

    def __init__(self, inner: nn.Module, most: float, where: str) -> None:
        super().__init__()
        self.inner = inner
        self.most = most
        self.where = where
        self.failures = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if len(x) > self.most:
            if self.where == "forward":
                self.fail()
            elif y.requires_grad:
                y.register_hook(self.fail)
        return y

    def fail(self, *_: Any) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError("there is not enough of it")


def cramped(rank: int, replicas: int, where: str, extra: Any, fails_from: int) -> Run:
    """The last replica has less memory than the others; batches grow after some steps."""
    is_tight = rank == replicas - 1
    model = Cramped(network(*extra()), 6 if is_tight else math.inf, where)
    job = Job(adapt=False, max_batch_size=64, guard=False)

    def after(job: Job) -> None:
        if job._made.stepper.is_last and job.steps == fails_from:
            job._made.adapter.apply(BatchConfig(40, 20, 1), "the test says so", None)

    run = train(job, loader_of(203, 8), turns=2, model=model, after=after)
    buffers = torch.cat([b.float().flatten() for b in model.buffers()] or [torch.zeros(0)])
    bound = job._made.adapter.limits.max_per_gpu_batch_size
    run.answer = model.failures, bound, job.batch_size, bool(buffers.isfinite().all())
    job.close()
    return run


def nothing() -> tuple[nn.Module, ...]:
    return ()


def batch_norm() -> tuple[nn.Module, ...]:
    return (nn.BatchNorm1d(8),)


def all_cramped(rank: int, replicas: int) -> list[Run]:
    cases = [("forward", nothing), ("backward", nothing), ("forward", batch_norm), ("backward", batch_norm)]
    return [cramped(rank, replicas, where, extra, 9) for where, extra in cases]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_out_of_memory_on_one_replica_has_all_of_them_do_the_step_again_in_smaller_passes(spawn, replicas):
    answers = spawn(all_cramped, replicas)
    for number in range(4):
        runs = [answer[number] for answer in answers]
        assert delivered(runs) == expected(203, 2)
        assert {run.weights.tobytes() for run in runs} == {runs[0].weights.tobytes()}
        assert np.isfinite(runs[0].weights).all()
        assert runs[-1].answer[0] >= 1
        assert {run.answer[2] for run in runs} == {40}
        assert max(len(indices) for _, indices in runs[-1].seen) <= 6
        assert len({run.answer[1] for run in runs}) == 1
        assert all(run.answer[3] for run in runs)


def late_failure(rank: int, replicas: int) -> None:
    """A size that has worked does not fit any more, on the second replica."""
    model = Cramped(network(), math.inf, "forward")

    def after(job: Job) -> None:
        if job.steps > TRIED_STEPS and rank == 1:
            model.most = 1.0

    try:
        train(Job(adapt=False), loader_of(203, 8), turns=2, model=model, after=after)
    except torch.OutOfMemoryError as error:
        raise AssertionError(" ".join(error.__notes__)) from None


def test_out_of_memory_at_a_size_that_had_fitted_raises_with_what_to_do(spawn):
    with pytest.raises(AssertionError, match=r"replica 1 failed[^$]*max_per_gpu_batch_size=2"):
        spawn(late_failure, 2)
