"""Loops that are written wrongly: each error says what is wrong and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from pollux.errors import InvalidSpec, LoopMisuse
from pollux.torch import Job

from .loops import Classification, Indices, job_maker, perceptron, pinned, plain_body, sgd  # noqa: F401

M0 = 8


class Script:
    """A prepared job of four steps an epoch."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.own = perceptron()
        self.model, self.optimizer, self.loader = job.prepare(
            self.own, sgd(self.own), DataLoader(Classification(32), M0)
        )

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def run(self, body: Callable[[Any], None], epochs: int = 1) -> None:
        for _ in self.job.epochs(epochs):
            for batch in self.loader:
                body(batch)

    def train(self, batch: Any) -> None:
        plain_body(self.model, self.optimizer, batch, self.job.backward)


@pytest.fixture
def script(make_job) -> Script:
    return Script(pinned(make_job))


def in_two_passes(make_job) -> Script:
    return Script(pinned(make_job, max_per_gpu_batch_size=4))


# Loops


def test_the_loader_is_for_the_inside_of_epochs(script: Script) -> None:
    with pytest.raises(LoopMisuse, match=r"outside of the job's epochs.*for epoch in job.epochs"):
        next(iter(script.loader))
    script.run(script.train)
    with pytest.raises(LoopMisuse, match="outside of the job's epochs"):
        next(iter(script.loader))


def test_after_a_break_of_the_epochs_the_loader_is_outside_of_them(script: Script) -> None:
    for _ in script.job.epochs(2):
        for batch in script.loader:
            script.train(batch)
        break
    with pytest.raises(LoopMisuse, match="outside of the job's epochs"):
        next(iter(script.loader))


def test_the_loader_is_not_iterated_inside_its_own_loop(script: Script) -> None:
    with pytest.raises(LoopMisuse, match=r"twice at the same time.*job\.shard"):
        script.run(lambda batch: next(iter(script.loader)))


def test_epochs_are_not_nested(script: Script) -> None:
    for _ in script.job.epochs(1):
        with pytest.raises(LoopMisuse, match="inside another"):
            next(script.job.passes(2))


def test_an_error_in_the_loops_body_leaves_the_job_usable(script: Script) -> None:
    def fail(batch: Any) -> None:
        raise KeyError("the script's own")

    with pytest.raises(KeyError):
        script.run(fail)
    script.run(script.train)
    assert script.job.steps == 4


# Gradients and steps


def test_backward_belongs_into_the_loop(script: Script) -> None:
    batch = next(iter(DataLoader(Classification(32), M0)))
    with pytest.raises(LoopMisuse, match=r"outside the loop.*for batch in loader"):
        script.job.backward(script.loss(batch))


def test_backward_is_called_once_a_batch(script: Script) -> None:
    def body(batch: Any) -> None:
        script.job.backward(script.loss(batch))
        script.job.backward(script.loss(batch))

    with pytest.raises(LoopMisuse, match=r"twice for one batch.*Add the losses up"):
        script.run(body)


def test_the_losss_own_backward_is_noticed_at_the_step(script: Script) -> None:
    def body(batch: Any) -> None:
        script.loss(batch).backward()
        script.optimizer.step()

    with pytest.raises(LoopMisuse, match=r"job.backward has not seen.*instead of loss.backward"):
        script.run(body)


def test_the_losss_own_backward_is_noticed_among_passes(make_job) -> None:
    script = in_two_passes(make_job)

    def body(batch: Any) -> None:
        script.loss(batch).backward()
        script.optimizer.step()

    with pytest.raises(LoopMisuse, match=r"without job.backward\(loss\)"):
        script.run(body)


def test_a_body_without_backward_is_noticed(script: Script) -> None:
    with pytest.raises(LoopMisuse, match=r"without job.backward\(loss\)"):
        script.run(lambda batch: None)


def test_a_body_without_a_step_is_noticed(script: Script) -> None:
    with pytest.raises(LoopMisuse, match=r"without a step of the prepared optimizer.*step\(\) once in every body"):
        script.run(lambda batch: script.job.backward(script.loss(batch)))


def test_another_optimizer_is_noticed(script: Script) -> None:
    other = sgd(script.own)

    def body(batch: Any) -> None:
        script.job.backward(script.loss(batch))
        other.step()

    with pytest.raises(LoopMisuse, match=r"on the optimizer that job.prepare gave back"):
        script.run(body)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_closure_is_refused(make_job, passes: int) -> None:
    script = Script(pinned(make_job, max_per_gpu_batch_size=M0 // passes))

    def body(batch: Any) -> None:
        script.job.backward(script.loss(batch))
        script.optimizer.step(lambda: script.loss(batch))

    with pytest.raises(LoopMisuse, match=r"given a closure.*Compute the loss in the loop"):
        script.run(body)


def test_a_loss_of_many_numbers_is_refused(script: Script) -> None:
    def body(batch: Any) -> None:
        script.job.backward(nn.functional.cross_entropy(script.model(batch[0]), batch[1], reduction="none"))

    with pytest.raises(LoopMisuse, match=r"shape \(8,\).*the mean over the batch"):
        script.run(body)


def test_a_second_step_on_one_batch_is_no_second_iteration(script: Script) -> None:
    def body(batch: Any) -> None:
        script.train(batch)
        script.optimizer.step()

    script.run(body)
    assert script.job.steps == 4
    assert script.job.progress == 4.0


# Preparing


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Classification(32), M0, **settings)


def test_prepare_is_called_once(script: Script) -> None:
    with pytest.raises(LoopMisuse, match=r"prepare was called twice.*in one call"):
        script.job.prepare(script.own, script.optimizer, loader())


@pytest.mark.parametrize("use", [lambda job: job.epochs(1), lambda job: job.batch_size, lambda job: job.stop()])
def test_a_job_without_anything_to_train_says_so(make_job, use: Any) -> None:
    with pytest.raises(LoopMisuse, match=r"nothing to train yet.*job.prepare"):
        use(make_job())


@pytest.mark.parametrize("missing", ["model", "optimizer", "loader"])
def test_prepare_names_what_is_missing(make_job, missing: str) -> None:
    model = perceptron()
    parts = {"model": model, "optimizer": sgd(model), "loader": loader()}
    del parts[missing]
    with pytest.raises(LoopMisuse, match=f"given no {missing}.*job.prepare\\(model, optimizer, loader\\)"):
        make_job().prepare(*parts.values())


def test_prepare_takes_one_of_each_kind(make_job) -> None:
    model = perceptron()
    with pytest.raises(InvalidSpec, match=r"Linear.*a second model.*one nn.Module"):
        make_job().prepare(model, nn.Linear(1, 1), sgd(model), loader())
    with pytest.raises(InvalidSpec, match=r"dict.*neither a model.*job.register"):
        make_job().prepare(model, sgd(model), loader(), {})


def test_parts_must_belong_together(make_job) -> None:
    model, other = perceptron(), perceptron()
    with pytest.raises(InvalidSpec, match=r"4 of its parameters are not the model's.*model.parameters\(\)"):
        make_job().prepare(model, sgd(other), loader())
    with pytest.raises(InvalidSpec, match=r"StepLR.*another optimizer"):
        make_job().prepare(model, sgd(model), loader(), StepLR(sgd(model), 1))


def test_a_model_under_ddp_is_refused(make_job) -> None:
    model = perceptron()
    replicated = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(replicated)
    replicated.module = model
    with pytest.raises(InvalidSpec, match=r"replicates the model itself.*bare model"):
        make_job().prepare(replicated, sgd(model), loader())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(32))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


class Shrinking(Sampler[int]):
    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


REFUSED: dict[str, tuple[Callable[[], DataLoader[Any]], str]] = {
    "distributed sampler": (
        lambda: loader(sampler=DistributedSampler(Indices(32), num_replicas=2, rank=0)),
        r"divides the samples itself.*plain DataLoader",
    ),
    "no batch size": (lambda: DataLoader(Indices(32), None), "batch size is unknown.*Give DataLoader a batch_size"),
    "batch sampler": (
        lambda: DataLoader(Indices(32), batch_sampler=BatchSampler(RandomSampler(range(32)), 4, False)),
        "batch size is unknown",
    ),
    "no samples": (lambda: DataLoader(Indices(0), M0), "a pass has no sample"),
    "nothing left": (lambda: DataLoader(Indices(5), M0, drop_last=True), "no sample.*batch_size of at most"),
    "sampler without length": (lambda: loader(sampler=Endless()), "Endless.*how long a pass is.*__len__"),
}


@pytest.mark.parametrize(("make_loader", "message"), REFUSED.values(), ids=REFUSED)
def test_a_loader_that_cannot_be_divided_is_refused(make_job, make_loader: Any, message: str) -> None:
    model = perceptron()
    with pytest.raises(InvalidSpec, match=message):
        make_job().prepare(model, sgd(model), make_loader())


def test_a_sampler_that_draws_another_number_than_it_says_is_named(make_job) -> None:
    model = perceptron()
    job = pinned(make_job)
    with pytest.raises(InvalidSpec, match=r"Shrinking.*drew 20 samples for pass 0, its len\(\) is 32"):
        job.prepare(model, sgd(model), loader(sampler=Shrinking()))


def test_epochs_of_a_stream_need_its_length_and_so_does_len(make_job) -> None:
    model = perceptron()
    job = make_job()
    _, _, prepared = job.prepare(model, sgd(model), DataLoader(Stream(), M0))
    with pytest.raises(LoopMisuse, match=r"number of samples in a pass.*samples_per_pass.*job.passes"):
        job.epochs(3)
    with pytest.raises(TypeError, match="samples_per_pass"):
        len(prepared)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batchsize": 64}, r"max_batchsize = 64: no such option.*max_batch_size"),
        ({"max_batch_size": 0}, "max_batch_size = 0"),
        ({"hysteresis": 0.5}, "hysteresis = 0.5"),
        ({"adapt": "yes"}, "adapt = 'yes'"),
        ({"noise_budget": 0.0}, "noise_budget = 0.0"),
        ({"seed": -1}, "seed = -1"),
        ({"samples_per_pass": 1.5}, "samples_per_pass = 1.5"),
    ],
)
def test_options_are_checked_when_the_job_is_made(make_job, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        make_job(**options)


def test_the_largest_batch_is_not_below_the_loaders(make_job) -> None:
    model = perceptron()
    with pytest.raises(InvalidSpec, match=r"max_batch_size = 4: less than the batch size of the loader, 8.*Raise it"):
        make_job(max_batch_size=4).prepare(model, sgd(model), loader())


def test_registered_objects_need_a_state_and_a_name_of_their_own(make_job) -> None:
    job = make_job()
    job.register("ema", nn.Linear(1, 1))
    with pytest.raises(LoopMisuse, match="'ema' twice"):
        job.register("ema", nn.Linear(1, 1))
    with pytest.raises(InvalidSpec, match=r"has no state_dict.*job.state"):
        job.register("best", 3.0)
