"""The norms of measured steps: against truth with real replicas, against plain autograd, and what may go wrong.

The problem with a known answer is linear regression: x ~ N(0, diag c), y = xᵀw* + ε, ε ~ N(0, σ²), loss ½(xᵀw − y)².
With δ = w − w* the gradient is g = Cδ and its covariance Σ = (δᵀCδ + σ²) C + g gᵀ (derived in tests/goodput), so

    |Pg|² = Σ (gᵢ/pᵢ)²        tr(PΣPᵀ) = (δᵀCδ + σ²) Σ cᵢ/pᵢ² + |Pg|²
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import statistics
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pollux.agent.interval import Interval
from pollux.agent.noise_meter import NoiseMeter, difference_sample, sample
from pollux.errors import InvalidSpec, LoopMisuse
from pollux.goodput.noise import NoiseAverage, NoiseSample, from_difference, from_gradients

D = 24
M0 = 16
BATCH = 384  # the error of sqr falls with the root of all examples seen
WARM_STEPS = 100  # for Adam's second moment
SIGMA = 2.0
COVARIANCE = torch.linspace(0.5, 3.0, D)
DELTA = torch.linspace(1.0, -0.4, D)
ONE_EACH = NoiseAverage(window=1e9)
"""A plain mean of the samples."""


class Regression(nn.Module):
    """Two parameter groups: the first and the second half of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(DELTA[: D // 2].clone())
        self.second = nn.Parameter(DELTA[D // 2 :].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.first, self.second])

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.first]}, {"params": [self.second]}]


def examples(generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w* = 0, so that w is δ."""
    x = torch.randn(count, D, generator=generator) * COVARIANCE.sqrt()
    return x, SIGMA * torch.randn(count, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.5 * (model(x) - y).square().mean()


def truth(inverse: torch.Tensor | float) -> tuple[float, float]:
    """(|Pg|², φ) with P = diag(inverse)."""
    g = COVARIANCE * DELTA
    sqr = float((g * inverse).square().sum())
    trace = (float(DELTA @ g) + SIGMA**2) * float((COVARIANCE * torch.as_tensor(inverse).square()).sum()) + sqr
    return sqr, trace / sqr


def cuts(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """A contiguous slice in parts whose sizes differ by at most one."""
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def step(
    meter: NoiseMeter | None,
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    passes: int,
    rank: int = 0,
    replicas: int = 1,
    loss_scale: float = 1.0,
) -> None:
    """The gradients of one step as the agent takes them: weighted passes, the last of them synchronising."""
    x, y = batch
    model.zero_grad()
    if meter is not None:
        meter.begin_step()
    slices = cuts(*cuts(0, len(x), replicas)[rank], passes)
    for index, (a, b) in enumerate(slices):
        weight = replicas * (b - a) / len(x)
        is_last = index == passes - 1
        with contextlib.nullcontext() if is_last or replicas == 1 else model.no_sync():
            if meter is not None:
                meter.watch_pass()
            (loss_of(model, x[a:b], y[a:b]) * weight * loss_scale).backward()
            if meter is not None:
                meter.end_pass(weight, replicas)
    if meter is not None:
        meter.end_step(loss_scale)


def over_replicas(meter: NoiseMeter) -> tuple[list[float], list[float]]:
    """(local, total) of the whole step on every replica."""
    local = meter.local().clone()
    if distributed.is_initialized():
        distributed.all_reduce(local)
    return local.tolist(), meter.total().tolist()


# --- against truth, with real replicas and native DDP


def measure(rank: int, replicas: int, passes: int, optimizer_name: str) -> tuple[float, float, float, float]:
    """(sqr, φ) measured on every second step, then the true ones. The weights do not move."""
    model = Regression()
    ddp = DistributedDataParallel(model) if replicas > 1 else model
    if optimizer_name == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.groups, lr=0.0)
    else:
        optimizer = torch.optim.SGD(model.groups, lr=0.0, momentum=0.9)
    meter = NoiseMeter(optimizer)
    generator = torch.Generator().manual_seed(11)
    average = ONE_EACH
    for number in range(WARM_STEPS + 320 // min(replicas, 2)):
        is_measured = number % 3 != 0 and number >= WARM_STEPS
        batch = examples(generator, BATCH)
        step(meter if is_measured else None, ddp, batch, passes, rank, replicas)
        if is_measured:
            local, total = over_replicas(meter)
            average = average.update(sample(local, total, replicas * passes, BATCH / M0))
        optimizer.step()
    inverse: torch.Tensor | float = 1.0
    if optimizer_name == "adam":
        state = [optimizer.state[p] for p in (model.first, model.second)]
        moment = torch.cat([s["exp_avg_sq"] for s in state]) / (1.0 - 0.999 ** float(state[0]["step"]))
        inverse = 1.0 / (moment.sqrt() + 1e-8)
    assert meter.is_preconditioned == (optimizer_name == "adam")
    return average.stats()[0], average.noise_scale(M0), *truth(inverse)


def measure_all(rank: int, replicas: int) -> dict[tuple[str, int], tuple[float, float, float, float]]:
    several = (2, 4) if replicas == 1 else (1, 3)
    cases = [(name, passes) for name in ("sgd", "adam") for passes in several]
    if replicas == 4:  # on fewer cores: each optimizer and each number of passes once
        cases = [("sgd", 3), ("adam", 1)]
    return {(name, passes): measure(rank, replicas, passes, name) for name, passes in cases}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_noise_scale_is_the_analytic_one_with_and_without_accumulation(spawn, replicas):
    answers = spawn(measure_all, replicas)
    assert all(answer == answers[0] for answer in answers)
    for case, (sqr, phi, true_sqr, true_phi) in answers[0].items():
        assert phi == pytest.approx(true_phi, rel=0.1), case
        assert sqr == pytest.approx(true_sqr, rel=0.1), case


def measure_one_step(rank: int, replicas: int, passes: int, batch_size: int) -> list[list[float]]:
    """Adam-preconditioned (local, total) of one step; the same examples whatever the number of replicas."""
    model = Regression().double()
    optimizer = torch.optim.Adam(model.groups, lr=0.01)
    ddp = DistributedDataParallel(model) if replicas > 1 else model
    meter = NoiseMeter(optimizer)
    generator = torch.Generator().manual_seed(2)
    for number in range(9):
        x, y = examples(generator, batch_size)
        step(meter if number == 8 else None, ddp, (x.double(), y.double()), passes, rank, replicas)
        if number < 8:
            optimizer.step()
    assert meter.is_preconditioned
    return list(over_replicas(meter))


def invariant(rank: int, replicas: int) -> list[list[list[float]]]:
    """A batch in four slices of 6, and one in four of 5 and 6."""
    return [measure_one_step(rank, replicas, 4 // replicas, batch_size) for batch_size in (24, 22)]


def test_norms_of_a_step_do_not_depend_on_how_many_replicas_its_slices_are_on(spawn):
    alone = invariant(0, 1)
    for replicas in (2, 4):
        for answer in spawn(invariant, replicas):
            for norms, expected in zip(answer, alone, strict=True):
                assert norms == [pytest.approx(part, rel=1e-9) for part in expected]


# --- one replica


def gradients(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[count, parameters] by plain autograd."""
    rows = []
    for x, y in batches:
        parts = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize(("batch_size", "passes"), [(32, 2), (33, 2), (13, 5)])
def test_norms_are_those_of_plain_autograd_with_even_and_uneven_slices(generator, batch_size, passes):
    model = Regression()
    meter = NoiseMeter(torch.optim.SGD(model.groups, lr=0.1))
    x, y = examples(generator, batch_size)
    slices = cuts(0, batch_size, passes)
    sizes = [b - a for a, b in slices]
    g = gradients(model, [(x[a:b], y[a:b]) for a, b in slices]).double().numpy()
    expected = from_gradients(g, sizes, M0, starts=(0, D // 2))
    step(meter, model, (x, y), passes)
    taken = sample(meter.local().tolist(), meter.total().tolist(), passes, batch_size / M0)
    assert taken.sqr == pytest.approx(expected.sqr, rel=1e-4)
    assert taken.var == pytest.approx(expected.var, rel=1e-4)
    assert meter.num_groups == 2
    assert meter.local().dtype == meter.total().dtype == torch.float64


def test_a_measured_step_has_the_gradient_of_an_unmeasured_one(generator):
    model, batch = Regression(), examples(generator, 32)
    step(None, model, batch, 2)
    plain = [p.grad.clone() for p in model.parameters()]
    step(NoiseMeter(torch.optim.SGD(model.groups, lr=0.1)), model, batch, 2)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_two_neighbouring_steps_give_norms_and_dot_under_one_preconditioner(generator, name):
    model = Regression()
    adam = torch.optim.Adam(model.groups, lr=0.01)
    optimizer = adam if name == "adam" else torch.optim.SGD(model.groups, lr=0.01)
    for _ in range(10):
        step(None, model, examples(generator, 32), 1)
        optimizer.step()
    meter = NoiseMeter(optimizer, refresh_every=1)
    p = torch.ones(D)
    if name == "adam":
        moment = torch.cat([adam.state[q]["exp_avg_sq"] for q in model.parameters()])
        p = (moment / (1.0 - 0.999**10)).sqrt() + 1e-8
        halves = [half.square().mean() * (0.001 / (1.0 - 0.999**10)) for half in p.chunk(2)]
        p = torch.cat([half.clamp(min=floor.sqrt()) for half, floor in zip(p.chunk(2), halves, strict=True)])
    kept = []
    for number in range(2):
        batch = examples(generator, 32)
        kept.append(gradients(model, [batch])[0] / p)
        step(None, model, batch, 1)
        if number == 0:
            meter.keep_gradient()
        else:
            previous, current, dot = meter.difference()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # zeroes in place: what is kept must be a copy
    a, b = (vector.reshape(2, -1) for vector in kept)
    assert previous == pytest.approx(a.square().sum(dim=1), rel=1e-4)
    assert current == pytest.approx(b.square().sum(dim=1), rel=1e-4)
    assert dot == pytest.approx((a * b).sum(dim=1), rel=1e-3, abs=1e-3)
    with pytest.raises(LoopMisuse, match="keep_gradient"):
        meter.difference()


def test_the_differenced_noise_scale_is_the_analytic_one(generator):
    model = Regression()
    optimizer = torch.optim.SGD(model.groups, lr=0.0)
    meter, average = NoiseMeter(optimizer), ONE_EACH
    for _ in range(700):
        step(None, model, examples(generator, 32), 1)
        meter.keep_gradient()
        step(None, model, examples(generator, 32), 1)
        norms = [part.tolist() for part in meter.difference()]
        average = average.update(difference_sample(*norms, 32 / M0))
    assert average.biased
    assert average.noise_scale(M0) == pytest.approx(truth(1.0)[1], rel=0.1)


# --- mixed precision


def test_loss_scaling_leaves_the_norms_as_they_are(generator):
    model, batch = Regression(), examples(generator, 32)
    meter = NoiseMeter(torch.optim.SGD(model.groups, lr=0.1))
    step(meter, model, batch, 2)
    local, total = meter.local(), meter.total()
    for scale in (65536.0, torch.tensor(65536.0)):
        step(meter, model, batch, 2, loss_scale=scale)
        assert meter.local() == pytest.approx(local, rel=1e-5)
        assert meter.total() == pytest.approx(total, rel=1e-5)


def test_a_difference_takes_the_loss_scale_of_each_of_its_steps(generator):
    model = Regression()
    meter = NoiseMeter(torch.optim.SGD(model.groups, lr=0.1))
    batches = [examples(generator, 32) for _ in range(2)]
    answers = []
    for scales in ((1.0, 1.0), (1024.0, 256.0)):
        step(None, model, batches[0], 1, loss_scale=scales[0])
        meter.keep_gradient(scales[0])
        step(None, model, batches[1], 1, loss_scale=scales[1])
        answers.append(torch.stack(meter.difference(scales[1])))
    assert answers[1] == pytest.approx(answers[0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_do_not_overflow(dtype):
    model = nn.Linear(64, 64, bias=False).to(dtype)
    meter = NoiseMeter(torch.optim.SGD(model.parameters(), lr=0.1))
    meter.begin_step()
    meter.watch_pass()
    (model(torch.full((1, 64), 300.0, dtype=dtype)).sum()).backward()
    meter.end_pass(1.0)
    meter.end_step()
    meter_of_pair = NoiseMeter(torch.optim.SGD(model.parameters(), lr=0.1))
    meter_of_pair.keep_gradient()
    expected = pytest.approx([64 * 64 * 300.0**2], rel=1e-3)
    for norms in (meter.local(), meter.total(), *meter_of_pair.difference()):
        assert norms.tolist() == expected


def test_norms_that_are_not_finite_are_a_sample_that_counts_as_skipped():
    for bad in (math.nan, math.inf):
        for taken in (
            sample([1.0, bad], [1.0, 1.0], 2, 1.0),
            sample([2.0], [bad], 2, 1.0),
            difference_sample([1.0], [1.0], [bad], 1.0),
        ):
            assert not taken.is_usable
    assert difference_sample([math.inf], [1.0], [1.0], 1.0).biased
    assert ONE_EACH.update(sample([math.nan], [math.nan], 2, 3.0)).skipped == 1


def test_a_model_that_overflows_gives_such_norms(generator):
    model = Regression()
    meter = NoiseMeter(torch.optim.SGD(model.groups, lr=0.1))
    x, y = examples(generator, 32)
    step(meter, model, (x * math.inf, y), 2)
    assert not sample(meter.local().tolist(), meter.total().tolist(), 2, 1.0).is_usable


def test_norms_that_no_gradients_can_have_are_left_out_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        assert not sample([1.0], [4.0], 2, 1.0).is_usable
    assert "communication hook" in caplog.text


def test_samples_are_those_of_the_estimators():
    assert sample([3.0, 2.0], [1.0, 2.0], 2, 4.0) == NoiseSample((-1.0, 2.0), (8.0, 0.0), 4.0)
    assert difference_sample([3.0], [2.0], [1.0], 4.0) == from_difference(3.0, 2.0, 1.0, 4.0)


# --- all kinds of parameters


def norms_of(meter: NoiseMeter, backward: Any) -> tuple[list[float], list[float]]:
    """(local, total) of a step with one pass."""
    meter.begin_step()
    meter.watch_pass()
    backward()
    meter.end_pass(1.0)
    meter.end_step()
    return meter.local().tolist(), meter.total().tolist()


def test_parameters_without_a_gradient_count_as_zero():
    used, unused, frozen = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in (used, unused, frozen)], lr=0.1)
    meter = NoiseMeter(optimizer)
    local, total = norms_of(meter, lambda: used(torch.ones(1, 3)).sum().backward())
    assert local == total == pytest.approx([4.0, 0.0, 0.0])
    meter.keep_gradient()
    assert all(part.tolist() == pytest.approx([4.0, 0.0, 0.0]) for part in meter.difference())


def test_a_parameter_group_added_while_training_is_measured_too():
    one, two = nn.Linear(3, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    meter = NoiseMeter(optimizer)
    assert meter.num_groups == 1
    optimizer.add_param_group({"params": two.parameters()})
    local, _ = norms_of(meter, lambda: (one(torch.ones(1, 3)) + two(torch.ones(1, 2))).sum().backward())
    assert local == pytest.approx([4.0, 3.0])
    assert meter.num_groups == 2


def test_a_shared_weight_counts_with_the_sum_of_its_gradients():
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    meter = NoiseMeter(torch.optim.SGD(layer.parameters(), lr=0.1))
    local, total = norms_of(meter, lambda: layer(layer(torch.ones(1, 2))).sum().backward())
    assert local == total == pytest.approx([16.0])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, on its own call
@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparse adam"])
def test_sparse_gradients_have_the_norms_of_dense_ones(name):
    rows = torch.tensor([1, 3, 3, 0])

    def norms(sparse: bool) -> list[list[float]]:
        torch.manual_seed(1)
        table = nn.Embedding(6, 2, sparse=sparse)
        weights = torch.randn(4, 2)
        optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.0),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.0),
            # All rows are touched while the moments are built: Adam and SparseAdam then agree.
            "sparse adam": lambda p: (torch.optim.SparseAdam if sparse else torch.optim.Adam)(p, lr=1e-9),
        }[name](table.parameters())
        for _ in range(8):
            optimizer.zero_grad()
            (table(torch.arange(6)) * torch.linspace(1.0, 3.0, 12).reshape(6, 2)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        meter = NoiseMeter(optimizer)
        local, total = norms_of(meter, lambda: (table(rows) * weights).sum().backward())
        meter.keep_gradient()
        return [local, total, *(part.tolist() for part in meter.difference())]

    sparse, dense = norms(sparse=True), norms(sparse=False)
    assert sparse == [pytest.approx(norm, rel=1e-5) for norm in dense]


def test_complex_and_double_parameters_are_measured():
    one = nn.Parameter(torch.tensor([1.0 + 1.0j, 2.0]))
    two = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    meter = NoiseMeter(torch.optim.SGD([one, two], lr=0.1))

    def backward() -> None:
        (torch.view_as_real(one).square().sum() + two.square().sum()).backward()

    local, total = norms_of(meter, backward)
    assert local == total == pytest.approx([4.0 * 6.0 + 4.0])


def test_a_backward_that_builds_a_graph_leaves_none_behind():
    layer = nn.Linear(2, 1)
    meter = NoiseMeter(torch.optim.SGD(layer.parameters(), lr=0.1))

    def backward() -> None:
        loss = layer(torch.ones(1, 2)).square().sum()
        loss.backward(inputs=list(layer.parameters()), create_graph=True)

    with pytest.warns(UserWarning, match="create_graph"):
        norms_of(meter, backward)
    assert not meter.local().requires_grad
    assert not meter.total().requires_grad
    layer.zero_grad()


def test_long_tensors_have_exact_norms():
    weight = nn.Parameter(torch.rand(4096, 1024))
    meter = NoiseMeter(torch.optim.SGD([weight], lr=0.1))
    factor = torch.rand(4096, 1024)
    local, total = norms_of(meter, lambda: (weight * factor).sum().backward())
    assert local == total == pytest.approx([float(factor.double().square().sum())], rel=2e-6)


def test_a_compiled_model_is_measured_without_being_compiled_again(generator):
    model = Regression()
    compiled = torch.compile(model, backend="aot_eager")
    meter = NoiseMeter(torch.optim.SGD(model.groups, lr=0.1))
    batch = examples(generator, 32)
    step(None, compiled, batch, 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        step(meter, compiled, batch, 2)
        step(None, compiled, batch, 2)
    local = meter.local()
    step(meter, model, batch, 2)
    assert meter.local() == pytest.approx(local, rel=1e-5)


# --- the preconditioner's life


def test_the_preconditioner_takes_effect_after_the_fifth_step_and_is_then_refreshed_now_and_then(generator):
    model = Regression()
    optimizer = torch.optim.Adam(model.groups)
    meter = NoiseMeter(optimizer, refresh_every=3)
    active, inverses = [], []
    for _ in range(13):
        step(meter, model, examples(generator, 32), 2)
        active.append(meter.is_preconditioned)
        inverses.append(meter._inverses[0])
        optimizer.step()
    assert active == [False] * 6 + [True] * 7
    changes = [i for i in range(7, 13) if inverses[i] is not inverses[i - 1]]
    assert changes == [9, 12]


def test_an_optimizer_that_is_not_known_is_named_once_with_what_to_do(caplog):
    model = Regression()
    with caplog.at_level(logging.WARNING):
        meter = NoiseMeter(torch.optim.Adadelta(model.parameters()))
        for _ in range(3):
            meter.begin_step()
    assert len(caplog.records) == 1
    assert "Adadelta" in caplog.text
    assert "preconditioner=" in caplog.text


def test_the_users_preconditioner_is_used_and_no_warning_given(caplog, generator):
    model, batch = Regression(), examples(generator, 32)
    optimizer = torch.optim.Adadelta(model.parameters())
    with caplog.at_level(logging.WARNING):
        meter = NoiseMeter(optimizer, preconditioner=lambda parameter, *_: torch.full_like(parameter, 2.0))
    assert not caplog.records
    step(meter, model, batch, 2)
    plain = NoiseMeter(torch.optim.SGD(model.parameters(), lr=0.1))
    step(plain, model, batch, 2)
    assert meter.local() == pytest.approx(plain.local() / 4.0, rel=1e-6)
    assert meter.total() == pytest.approx(plain.total() / 4.0, rel=1e-6)


# --- hooks


def test_hooks_live_only_while_a_pass_is_measured(generator):
    model, batch = Regression(), examples(generator, 8)
    meter = NoiseMeter(torch.optim.SGD(model.groups, lr=0.1))
    meter.begin_step()
    meter.watch_pass()
    assert all(p._backward_hooks for p in model.parameters())
    loss_of(model, *batch).backward()
    meter.end_pass(1.0)
    assert not any(p._backward_hooks for p in model.parameters())


def test_an_unfinished_measurement_leaves_nothing_behind(generator):
    model, batch = Regression(), examples(generator, 8)
    meter = NoiseMeter(torch.optim.SGD(model.groups, lr=0.1))
    meter.begin_step()
    meter.watch_pass()
    meter.drop()
    assert not any(p._backward_hooks for p in model.parameters())
    with pytest.raises(LoopMisuse, match="watch_pass"):
        meter.local()
    with pytest.raises(LoopMisuse, match="end_step"):
        meter.total()
    loss_of(model, *batch).backward()
    meter.keep_gradient()
    meter.drop()
    with pytest.raises(LoopMisuse, match="keep_gradient"):
        meter.difference()
    step(meter, model, batch, 2)
    local = meter.local()
    meter.begin_step()
    meter.watch_pass()  # a pass that never came to its backward, and is dealt again
    step(meter, model, batch, 2)
    assert torch.equal(meter.local(), local)


def test_it_is_known_whose_gradient_completes_a_pass():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    meter = NoiseMeter(torch.optim.SGD(model.parameters(), lr=0.1))
    assert meter.last_parameter is None
    norms_of(meter, lambda: model(torch.ones(1, 2)).sum().backward())
    assert meter.last_parameter is model[0].weight


# --- how often


@dataclasses.dataclass
class Machine:
    """Step times with noise, outliers and drift; a measurement costs `excess` of a step."""

    excess: float
    seed: int = 0

    def run(self, interval: Interval, steps: int, key: object = "a", base: float = 0.01, consecutive: int = 1) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.rand(steps, 3, generator=generator).tolist()
        since = 0
        for number, (jitter, hiccup, _) in enumerate(noise):
            since += 1
            is_measured = since > interval.every - consecutive
            if since >= interval.every:
                since = 0
            seconds = base * (0.95 + 0.1 * jitter) * (1.0 + 0.5 * math.sin(number / 400.0))
            seconds *= 1.0 + (self.excess / consecutive if is_measured else 0.0)
            interval.observe(seconds * (30.0 if hiccup < 0.03 else 1.0), is_measured, key)


@pytest.mark.parametrize(("excess", "expected"), [(0.16, 16), (0.3, 30), (0.0, 4), (0.02, 4), (2.0, 64)])
@pytest.mark.parametrize("consecutive", [1, 2])
def test_the_interval_keeps_the_cost_of_measuring_within_budget(excess, expected, consecutive):
    found = []
    for seed in range(5):
        interval = Interval()
        assert interval.every == 8
        Machine(excess, seed).run(interval, 2000, consecutive=consecutive)
        found.append(interval.every)
    assert statistics.median(found) == pytest.approx(expected, rel=0.2)
    assert all(4 <= every <= 64 for every in found)


def test_the_interval_starts_small_and_waits_until_it_knows_enough():
    interval = Interval()
    for _ in range(4):
        interval.observe(0.01, False, "a")
        interval.observe(0.05, True, "a")
    interval.observe(0.01, False, "a")
    assert interval.every == 8
    interval.observe(0.05, True, "a")
    interval.observe(0.01, False, "a")
    assert interval.every == 64


def test_only_steps_of_the_same_batch_are_compared():
    interval = Interval()
    for _ in range(20):
        for _ in range(4):
            interval.observe(0.01, False, "small")
        interval.observe(0.4, False, "large")
        interval.observe(0.44, True, "large")
    assert interval.every == 10
    measured_only = Interval()
    for _ in range(50):
        measured_only.observe(0.01, False, "small")
        measured_only.observe(0.4, True, "large")
    assert measured_only.every == 8


def test_a_batch_that_is_new_keeps_the_interval_of_the_one_before_and_few_are_remembered():
    interval = Interval()
    Machine(0.3).run(interval, 600, key="a")
    before = interval.every
    interval.observe(0.02, False, "b")
    interval.observe(0.02, True, "b")
    interval.observe(0.02, False, "b")
    assert interval.every == before
    for key in range(100):
        interval.observe(0.01, False, key)
    assert len(interval._batches) == Interval.BATCHES


@pytest.mark.parametrize(
    ("field", "options"),
    [("budget", {"budget": 0.0}), ("smallest", {"smallest": 1}), ("smallest", {"smallest": 65})],
)
def test_bad_settings_of_the_interval_are_refused_with_a_fix(field, options):
    with pytest.raises(InvalidSpec) as caught:
        Interval(**options)
    assert caught.value.field == field
    assert caught.value.fix
