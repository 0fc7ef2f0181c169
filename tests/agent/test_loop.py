"""A prepared loop in one process: it is the plain loop, as long as nothing is adapted; and where its loops end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader

from pollux.agent.batching import BatchConfig
from pollux.torch import Job, permutation

from .loops import (
    FEATURES,
    Classification,
    Indices,
    job_maker,  # noqa: F401
    perceptron,
    pinned,
    plain_body,
    relative_difference,
    run_job,
    run_plain,
    sgd,
    weights,
)

M0 = 16
NOISY = {"sqr": (1.0,), "var": (4.0,), "weight": 1.0, "weight_sqr": 0.01}
"""Statistics under which twice M0 is worth 5/3 steps: gain = (1 + 4)/(1 + 4/2)."""


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    mine, theirs = weights(model), weights(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def clipped_body(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, backward: Any) -> None:
    x, y, _ = batch
    backward(nn.functional.cross_entropy(model(x), y))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5 ** (step / 50))


def prepare(job: Job, size: int, batch_size: int = M0, **settings: Any) -> tuple[Any, Any, Any]:
    """A loop over sample numbers."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return job.prepare(model, optimizer, DataLoader(Indices(size), batch_size, shuffle=True, **settings))


def train(job: Job, model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    job.backward(model(batch.float()[:, None]).mean())
    optimizer.step()


def trust(job: Job, **statistics: Any) -> None:
    """Have the job believe that it measured these statistics of the gradient."""
    adapter = job._made.adapter
    adapter.noise = adapter._trusted = dataclasses.replace(adapter.noise, **statistics)


# The plain loop, bit for bit


@pytest.mark.parametrize("size", [310, 320], ids=["short last batch", "whole batches"])
@pytest.mark.parametrize(
    "layer",
    [nn.Identity, lambda: nn.Dropout(0.3), lambda: nn.BatchNorm1d(16)],
    ids=["no layer", "dropout", "batch norm"],
)
def test_pinned_to_m0_the_weights_after_200_steps_are_the_plain_loops_bit_for_bit(
    make_job, size: int, layer: Callable[[], nn.Module]
) -> None:
    dataset = Classification(size)
    plain, ours = perceptron(layer()), perceptron(layer())
    optimizer = sgd(plain)
    run_plain(dataset, M0, plain, optimizer, 10, after_epoch=CosineAnnealingLR(optimizer, 10).step)
    job, optimizer = pinned(make_job), sgd(ours)
    run_job(job, dataset, M0, ours, optimizer, 10, schedule=CosineAnnealingLR(optimizer, 10))
    assert job.steps == 200
    assert job.progress == 200.0
    assert_equal(ours, plain)


@pytest.mark.parametrize("size", [310, 320], ids=["short last batch", "whole batches"])
def test_adamw_with_clipping_and_a_schedule_by_iterations_is_equal_bit_for_bit(make_job, size: int) -> None:
    dataset = Classification(size)
    plain, ours = perceptron(), perceptron()
    optimizer = adamw(plain)
    run_plain(dataset, M0, plain, optimizer, 10, body=clipped_body, after_step=halving(optimizer).step)
    job, optimizer = pinned(make_job), adamw(ours)
    run_job(job, dataset, M0, ours, optimizer, 10, body=clipped_body, schedule=halving(optimizer), each="step")
    assert_equal(ours, plain)


def test_with_workers_it_is_equal_bit_for_bit(make_job) -> None:
    dataset = Classification(70)
    plain = perceptron(nn.Dropout(0.3))
    run_plain(dataset, M0, plain, sgd(plain), 2, num_workers=2)
    ours = perceptron(nn.Dropout(0.3))
    run_job(pinned(make_job), dataset, M0, ours, sgd(ours), 2, num_workers=2)
    assert_equal(ours, plain)


def test_measuring_noise_moves_the_weights_by_rounding_alone(make_job) -> None:
    dataset = Classification(310)
    plain, ours = perceptron(), perceptron()
    run_plain(dataset, M0, plain, sgd(plain), 10)
    job = make_job(adapt=False)
    run_job(job, dataset, M0, ours, sgd(ours), 10)
    assert job.steps == 200
    assert job.noise_scale is not None
    assert job.noise_scale > 0.0
    assert relative_difference(ours, plain) < 1e-5


# Steps 6, 14 … are kept and 7, 15 … measured, at first: across the end of a pass, or always at its last, short step.
@pytest.mark.parametrize("size", [112, 128, 120, 110])
def test_measuring_the_noise_of_a_batch_normalised_model_leaves_its_passes_whole(make_job, size: int) -> None:
    dataset = Classification(size)
    plain, ours = perceptron(nn.BatchNorm1d(16)), perceptron(nn.BatchNorm1d(16))
    run_plain(dataset, M0, plain, sgd(plain), 8)
    job = make_job(adapt=False)
    run_job(job, dataset, M0, ours, sgd(ours), 8)
    assert job.noise_scale is not None
    assert_equal(ours, plain)


# Where loops end


def test_an_epoch_at_m0_is_one_pass(make_job) -> None:
    job = pinned(make_job)
    model, optimizer, loader = prepare(job, 50)
    assert len(loader) == 4
    turns = []
    for epoch in job.epochs(3):
        turns.append([])
        for batch in loader:
            turns[epoch] += batch.tolist()
            train(job, model, optimizer, batch)
        assert job.progress == 4.0 * (epoch + 1)
    assert turns == [permutation(50, 0, index).tolist() for index in range(3)]


def test_drop_last_leaves_out_what_does_not_fill_a_batch(make_job) -> None:
    job = pinned(make_job)
    model, optimizer, loader = prepare(job, 50, drop_last=True)
    assert len(loader) == 3
    for epoch in job.epochs(2):
        sizes = []
        for batch in loader:
            sizes.append(len(batch))
            train(job, model, optimizer, batch)
        assert sizes == [16, 16, 16]
        assert job.progress == 3.0 * (epoch + 1)


def test_a_larger_batch_needs_more_passes_for_an_epoch(make_job) -> None:
    job = make_job(guard=False, measure_noise=False, max_batch_size=64)
    model, optimizer, loader = prepare(job, 160)
    trust(job, **NOISY)
    job._made.adapter.apply(BatchConfig(32, 32, 1), "test", None)
    seen: list[int] = []
    for _ in job.epochs(3):
        for batch in loader:
            seen += batch.tolist()
            train(job, model, optimizer, batch)
    # 30 iterations of M0, 5/3 a step: 18 steps of 32 samples are 576 of 160 a pass.
    assert job.steps == 18
    assert job.progress == pytest.approx(30.0)
    assert job._made.adapter.total_progress == pytest.approx(30.0)
    passes = [permutation(160, 0, index).tolist() for index in range(4)]
    assert seen == [sample for one in passes for sample in one][:576]


def test_passes_deliver_every_sample_once_whatever_the_batch_size(make_job) -> None:
    job = make_job(guard=False, measure_noise=False, max_batch_size=64)
    model, optimizer, loader = prepare(job, 150)
    trust(job, **NOISY)
    turns: list[list[int]] = []
    for _ in job.passes(4):
        turns.append([])
        for batch in loader:
            turns[-1] += batch.tolist()
            train(job, model, optimizer, batch)
        job._made.adapter.apply(BatchConfig(20 * len(turns), 20, 1), "test", None)
    assert turns == [permutation(150, 0, index).tolist() for index in range(4)]
    assert job._made.adapter.total_progress is None


def test_two_loops_in_a_row_go_on_where_the_first_ended(make_job) -> None:
    job = pinned(make_job)
    model, optimizer, loader = prepare(job, 48)
    seen: list[int] = []
    for loop in (job.epochs(1), job.epochs(2), job.passes(1)):
        for _ in loop:
            for batch in loader:
                seen += batch.tolist()
                train(job, model, optimizer, batch)
    assert job.progress == 12.0
    assert seen == [sample for index in range(4) for sample in permutation(48, 0, index).tolist()]


def test_a_step_taken_before_a_break_counts_and_an_unfinished_one_is_dealt_again(make_job) -> None:
    job = pinned(make_job)
    model, optimizer, loader = prepare(job, 48)
    order = permutation(48, 0, 0).tolist()
    seen = []
    for epoch in job.epochs(3):
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if epoch == 0 and number == 1:
                break  # before its step
            train(job, model, optimizer, batch)
            if epoch == 1 and number == 1:
                break  # after its step
        else:
            assert epoch == 2
    assert seen[0] == order[:16]
    assert seen[1] == seen[2] == order[16:32]
    assert seen[3] == order[32:]
    assert [len(batch) for batch in seen] == [16] * 7
    assert job.steps == 6  # 1 + 2 + 3: the epoch after a break is a whole one
    assert job.progress == 6.0


def test_a_break_in_the_middle_of_an_accumulated_step_leaves_no_gradient_behind(make_job) -> None:
    dataset = Classification(48)
    whole, broken = perceptron(), perceptron()

    def zero_last(model: Any, optimizer: Any, batch: Any, backward: Any) -> None:
        backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()

    run_plain(dataset, M0, whole, sgd(whole), 1, body=zero_last)
    job = pinned(make_job, max_per_gpu_batch_size=4)
    model, optimizer, loader = job.prepare(broken, sgd(broken), DataLoader(dataset, M0, shuffle=True))
    for turn in job.passes(1):
        for number, batch in enumerate(loader):
            if number == 6:
                break  # two passes of four into the second step
            zero_last(model, optimizer, batch, job.backward)
        for number, batch in enumerate(loader):
            if number == 3:  # between the last backward of the step and the optimizer
                job.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
                break
            zero_last(model, optimizer, batch, job.backward)
        for batch in loader:
            zero_last(model, optimizer, batch, job.backward)
        assert turn == 0
    assert job.steps == 3
    assert relative_difference(broken, whole) < 1e-5


def test_breaking_out_of_the_epochs_ends_the_loop_and_another_may_follow(make_job) -> None:
    job = pinned(make_job)
    model, optimizer, loader = prepare(job, 48)
    for epoch in job.epochs(100):
        for batch in loader:
            train(job, model, optimizer, batch)
        if epoch == 1:
            break
    assert job.steps == 6
    for _ in job.epochs(1):
        for batch in loader:
            train(job, model, optimizer, batch)
    assert job.steps == 9


@pytest.mark.parametrize("is_inside", [True, False], ids=["in the loop", "between epochs"])
def test_stop_ends_the_loop_at_hand_and_no_other(make_job, is_inside: bool) -> None:
    job = pinned(make_job)
    model, optimizer, loader = prepare(job, 160)
    epochs = []
    for epoch in job.epochs(100):
        epochs.append(epoch)
        for batch in loader:
            train(job, model, optimizer, batch)
            if is_inside and job.steps == 13:
                job.stop("enough")
        if epoch == 1 and not is_inside:
            job.stop("enough")
    assert len(epochs) < 20  # two beats are 128 steps at most
    assert is_inside or epochs == [0, 1]
    before = job.steps
    for _ in job.epochs(3):
        for batch in loader:
            train(job, model, optimizer, batch)
    assert job.steps == before + 30


# What a script may keep, and the model it sees


def test_the_prepared_model_shows_the_attributes_and_names_of_the_users(make_job) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 3)
            self.temperature = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        def predict(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).argmax(1)

    own = Model()
    optimizer, loader = sgd(own), DataLoader(Classification(32), M0)
    given = loader, own, optimizer
    prepared_loader, model, same = make_job().prepare(*given)
    assert same is optimizer
    assert prepared_loader.batch_size == M0
    assert prepared_loader.dataset is loader.dataset
    assert model.temperature == 2.0
    assert model.layer is own.layer
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
    assert [id(p) for p in model.parameters()] == [id(p) for p in own.parameters()]
    model.eval()
    assert not own.training
    model.train()
    assert own.layer.training
    assert model.predict(torch.zeros(2, FEATURES)).shape == (2,)
    model.load_state_dict(Model().state_dict())
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing


def test_a_compiled_model_trains_to_the_same_weights(make_job) -> None:
    dataset = Classification(48)
    plain, ours = perceptron(), perceptron()
    run_plain(dataset, M0, plain, sgd(plain), 2)
    compiled = torch.compile(ours, backend="aot_eager")
    job = make_job(adapt=False, max_per_gpu_batch_size=8)
    loader = DataLoader(dataset, M0, shuffle=True)
    model, optimizer, loader = job.prepare(compiled, sgd(ours), loader)
    for _ in job.epochs(2):
        for batch in loader:
            plain_body(model, optimizer, batch, job.backward)
    assert relative_difference(ours, plain) < 1e-5


def test_averages_weigh_by_counts_and_registered_objects_come_back_as_they_were(make_job) -> None:
    job = make_job()
    job.average("accuracy").add(0.5, 10)
    job.average("accuracy").add(torch.tensor(1.0), 30)
    assert job.average("accuracy").compute() == pytest.approx(0.875)
    job.state["best"] = 0.3
    ema = nn.Linear(2, 2)
    assert job.register("ema", ema) is ema
    assert job.state == {"best": 0.3}
    assert job.is_main
    assert job.num_replicas == 1
    assert job.device == torch.device("cpu")
    assert job.shard(DataLoader(Indices(5), 2)).dataset.size == 5
