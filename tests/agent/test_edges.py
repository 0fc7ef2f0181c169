"""What scripts do that no tutorial shows: found by reading the agent as its user would."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Sampler

from pollux.agent.batching import BatchConfig
from pollux.errors import InvalidSpec, LoopMisuse
from pollux.torch import Job

from .loops import Classification, job_maker, perceptron, pinned, plain_body, sgd  # noqa: F401
from .training import network, weights_of
from .training import sgd as small_sgd

M0 = 8


def loader(size: int = 64, batch_size: int = M0) -> DataLoader:
    return DataLoader(Classification(size), batch_size, shuffle=True)


def test_a_parameter_group_that_is_added_later_gets_a_factor_too(make_job) -> None:
    job = make_job(guard=False, measure_noise=False, max_batch_size=64, rule="sqrt")
    model = perceptron()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    prepared, optimizer, batches = job.prepare(model, optimizer, loader())
    for epoch in job.epochs(2):
        for batch in batches:
            plain_body(prepared, optimizer, batch, job.backward)
        if epoch == 0:
            optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.01})
            job._made.adapter.apply(BatchConfig(4 * M0, 4 * M0, 1), "test", None)
    assert job.learning_rate_factors == (2.0, 2.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_a_prepared_model_can_be_copied_and_averaged(make_job) -> None:
    job = pinned(make_job)
    model = perceptron()
    prepared, _, _ = job.prepare(model, sgd(model), loader())
    for twin in (copy.deepcopy(prepared), torch.optim.swa_utils.AveragedModel(prepared).module):
        assert twin(torch.ones(1, 6)).tolist() == prepared(torch.ones(1, 6)).tolist()


def test_a_schedule_that_was_not_handed_over_is_refused_at_the_first_step(make_job) -> None:
    job = pinned(make_job)
    model = perceptron()
    optimizer = sgd(model)
    StepLR(optimizer, 10)
    prepared, optimizer, batches = job.prepare(model, optimizer, loader(), None)[:3]

    def run() -> None:
        for _ in job.epochs(1):
            for batch in batches:
                plain_body(prepared, optimizer, batch, job.backward)

    with pytest.raises(LoopMisuse, match=r"schedule that job\.prepare was not given"):
        run()


def train(job: Job, epochs: int, batch_size: int = M0, size: int = 64) -> list[int]:
    """The epochs that were run."""
    model = perceptron()
    prepared, optimizer, batches = job.prepare(model, sgd(model), loader(size, batch_size))
    run = []
    for epoch in job.epochs(epochs):
        for batch in batches:
            plain_body(prepared, optimizer, batch, job.backward)
        run.append(epoch)
    job.close()
    return run


def test_a_finished_loop_goes_on_when_given_more_epochs_and_says_so_when_not(make_job, tmp_path, caplog) -> None:
    def job() -> Job:
        return pinned(make_job, checkpoint_dir=tmp_path)

    assert train(job(), 2) == [0, 1]
    assert train(job(), 2) == []
    assert "has ended before" in caplog.text
    assert train(job(), 4) == [2, 3]


OTHER = [({"batch_size": 16}, "initial_batch_size"), ({"size": 80}, "pass_length")]


@pytest.mark.parametrize(("options", "name"), OTHER)
def test_a_checkpoint_of_another_batch_size_or_dataset_is_refused(make_job, tmp_path: Path, options, name) -> None:
    train(pinned(make_job, checkpoint_dir=tmp_path), 1)
    with pytest.raises(InvalidSpec, match=rf"{name}.*was made with.*another checkpoint_dir"):
        train(pinned(make_job, checkpoint_dir=tmp_path), 2, **options)


class OwnSource(Sampler[int]):
    def __init__(self) -> None:
        self.source = random.Random(0)

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        return iter(self.source.sample(range(64), 64))


def test_a_sampler_with_a_random_source_of_its_own_is_refused(make_job) -> None:
    model = perceptron()
    with pytest.raises(InvalidSpec, match=r"OwnSource.*random source of its own"):
        pinned(make_job).prepare(model, sgd(model), DataLoader(Classification(64), M0, sampler=OwnSource()))


def test_a_stop_inside_the_loop_is_the_end_of_it(make_job) -> None:
    job = pinned(make_job)
    model = perceptron()
    prepared, optimizer, batches = job.prepare(model, sgd(model), loader())
    epochs = []
    for epoch in job.epochs(5):
        epochs.append(epoch)
        for batch in batches:
            plain_body(prepared, optimizer, batch, job.backward)
            if epoch == 1:
                job.stop("enough")
                break
    assert epochs == [0, 1]


def test_without_adaptation_the_batch_size_is_the_loaders_whatever_the_least_per_gpu(make_job) -> None:
    job = pinned(make_job, min_per_gpu_batch_size=32)
    model = perceptron()
    job.prepare(model, sgd(model), loader())
    assert job.batch_size == M0


def in_eval_mode(rank: int, replicas: int) -> list[float]:
    """As a fine-tuning script that never calls model.train()."""
    job = Job(adapt=False)
    model = network().eval()
    prepared, optimizer, batches = job.prepare(model, small_sgd(model), DataLoader(Classification(96), 8, shuffle=True))
    for _ in job.epochs(2):
        for x, _, _ in batches:
            optimizer.zero_grad()
            job.backward(prepared(x).square().mean())
            optimizer.step()
    job.close()
    return weights_of(model).tolist()


def by_a_method(rank: int, replicas: int) -> str:
    job = Job(adapt=False)
    model = network()
    prepared, _, batches = job.prepare(model, small_sgd(model), DataLoader(Classification(96), 8, shuffle=True))
    try:
        for _ in job.epochs(1):
            for x, _, _ in batches:
                job.backward(prepared.module(x).square().mean())
    except LoopMisuse as error:
        return str(error)
    finally:
        job.close()
    return "nothing was said"


def unfrozen_later(rank: int, replicas: int) -> list[float]:
    job = Job(adapt=False)
    model = network(nn.Linear(8, 8))
    model[1].requires_grad_(False)
    prepared, optimizer, batches = job.prepare(model, small_sgd(model), DataLoader(Classification(96), 8, shuffle=True))
    for _ in job.epochs(3):
        for x, _, _ in batches:
            optimizer.zero_grad()
            job.backward(prepared(x).square().mean())
            optimizer.step()
        model[1].requires_grad_(True)
    job.close()
    return weights_of(model).tolist()


def edges(rank: int, replicas: int) -> tuple[list[float], str, list[float]]:
    return in_eval_mode(rank, replicas), by_a_method(rank, replicas), unfrozen_later(rank, replicas)


def test_gradients_are_averaged_in_eval_mode_and_after_unfreezing_and_what_ddp_cannot_see_is_refused(spawn) -> None:
    (evaluated, said, unfrozen), (other_evaluated, other_said, other_unfrozen) = spawn(edges, 2)
    assert evaluated == other_evaluated
    assert "without calling the prepared model" in said
    assert said == other_said
    assert unfrozen == other_unfrozen
