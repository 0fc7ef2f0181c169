"""Divisors read from torch's optimizers, against what their own steps divide by."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from pollux.agent.preconditioners import inverse_divisors, is_active, kind
from pollux.errors import InvalidSpec
from pollux.goodput.preconditioning import OPTIMIZERS

ADAPTIVE = {
    "adam": lambda p: optim.Adam(p),
    "adam, amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "adam, fused": lambda p: optim.Adam(p, fused=True),
    "adam, foreach": lambda p: optim.Adam(p, foreach=True),
    "adamw": lambda p: optim.AdamW(p, betas=(0.8, 0.95), eps=1e-6),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "rmsprop": lambda p: optim.RMSprop(p),
    "rmsprop, centered": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
}


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def train(optimizer: optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Gradients of every size between 0.5 and 2, so that no floor is in the way."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                size = torch.linspace(0.5, 2.0, p.numel(), dtype=p.dtype).reshape(p.shape)
                p.grad = size * torch.empty_like(p).uniform_(0.8, 1.2, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: optim.SGD(p, lr=0.1), "sgd"),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), "momentum"),
        (lambda p: optim.Adam(p), "adam"),
        (lambda p: optim.AdamW(p), "adamw"),
        (lambda p: optim.NAdam(p), "adam"),
        (lambda p: optim.RAdam(p), "adam"),
        (lambda p: optim.SparseAdam(p), "adam"),
        (lambda p: optim.Adagrad(p), "adagrad"),
        (lambda p: optim.RMSprop(p), "rmsprop"),
        (lambda p: optim.Adamax(p), "unknown"),
        (lambda p: optim.Adadelta(p), "unknown"),
    ],
)
def test_the_kind_of_an_optimizer_is_one_that_the_formulas_know(make, name):
    assert kind(make(parameters((2,)))) == name
    assert name in (*OPTIMIZERS, "unknown")


def test_a_class_derived_from_a_known_optimizer_is_of_its_kind():
    class Mine(optim.AdamW):
        pass

    assert kind(Mine(parameters((2,)))) == "adamw"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_has_no_divisor(momentum):
    optimizer = optim.SGD(parameters((2, 3), (4,)), lr=0.1, momentum=momentum)
    train(optimizer, 10)
    assert inverse_divisors(optimizer) == [[None, None]]


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_divisor_is_the_root_of_the_optimizers_own_second_moment(name):
    (p,) = parameters((3, 5))
    optimizer = ADAPTIVE[name]([p])
    train(optimizer, 40)
    ((inverse,),) = inverse_divisors(optimizer)
    state, group = optimizer.state[p], optimizer.param_groups[0]
    step = int(state["step"])
    if "adagrad" in name:
        expected = state["sum"].sqrt() + group["eps"]
    elif "rmsprop" in name:
        mean = state["grad_avg"] if group["centered"] else 0.0
        expected = (state["square_avg"] - mean * mean).sqrt() + group["eps"]
        if group["centered"]:
            # What is left of nearly constant gradients is near the floor; above it the formula holds.
            floor = (expected.square().mean() * (1 - group["alpha"]) / (1 - group["alpha"] ** step)).sqrt()
            assert (expected > floor).any()
            expected = expected.clamp(min=floor)
    else:
        beta2 = group["betas"][1]
        moment = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        expected = (moment / (1 - beta2**step)).sqrt() + group["eps"]
    assert 1.0 / inverse == pytest.approx(expected, rel=1e-6)


def test_a_step_of_adam_without_momentum_divides_by_the_divisor():
    (p,) = parameters((4,))
    optimizer = optim.Adam([p], lr=1.0, betas=(0.0, 0.999))
    train(optimizer, 500)
    ((inverse,),) = inverse_divisors(optimizer)
    before = p.detach().clone()
    p.grad = torch.full_like(p, 0.01)  # too small to change the moment by much
    optimizer.step()
    assert before - p.detach() == pytest.approx(0.01 * inverse, rel=2e-3)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_divisor_is_the_identity_up_to_the_fifth_step_and_real_after_it(name):
    optimizer = ADAPTIVE[name](parameters((2, 3), (4,)))
    assert inverse_divisors(optimizer) == [[None, None]]
    train(optimizer, 5)
    assert not is_active(inverse_divisors(optimizer))
    train(optimizer, 1)
    inverses = inverse_divisors(optimizer)
    assert is_active(inverses)
    assert [inverse.shape for inverse in inverses[0]] == [(2, 3), (4,)]


def test_radam_is_the_identity_for_as_long_as_it_does_not_divide_itself():
    (p,) = parameters((3,))
    optimizer = optim.RAdam([p], betas=(0.9, 0.6))  # its average never gets longer than 4 steps
    train(optimizer, 50)
    assert inverse_divisors(optimizer) == [[None]]


def test_every_parameter_group_has_its_own_settings():
    one, two = parameters((3,), (3,))
    optimizer = optim.Adam([{"params": [one], "eps": 1.0}, {"params": [two], "eps": 0.0}])
    train(optimizer, 20)
    (first,), (second,) = inverse_divisors(optimizer)
    assert 1.0 / first - 1.0 / second == pytest.approx(torch.ones(3), rel=0.3)


def test_the_optimizers_next_step_does_not_change_divisors_already_read():
    optimizer = optim.Adam(parameters((3,)))
    train(optimizer, 10)
    ((inverse,),) = inverse_divisors(optimizer)
    before = inverse.clone()
    train(optimizer, 10, seed=1)
    assert torch.equal(inverse, before)


def test_a_parameter_without_a_history_is_left_out_while_others_have_one():
    used, unused = parameters((3,), (4,))
    optimizer = optim.Adam([used, unused])
    for _ in range(10):
        used.grad = torch.ones_like(used)
        optimizer.step()
    (of_used, of_unused) = inverse_divisors(optimizer)[0]
    assert of_used == pytest.approx(torch.ones(3), rel=1e-3)
    assert of_unused == 0.0


@pytest.mark.parametrize("name", ["adam", "adam, amsgrad", "adagrad", "rmsprop", "rmsprop, centered"])
@pytest.mark.parametrize("steps", [30, 300])
def test_a_row_that_was_never_seen_does_not_outweigh_the_step_that_touches_it(name, steps):
    """Its divisor is no smaller than what that very step will divide it by, give or take."""
    (table,) = parameters((50, 4))
    optimizer = ADAPTIVE[name]([table])
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        gradient = torch.randn(50, 4, generator=generator, dtype=table.dtype)
        gradient[40:] = 0.0
        table.grad = gradient
        optimizer.step()
    ((inverse,),) = inverse_divisors(optimizer)
    group, state = optimizer.param_groups[0], optimizer.state[table]
    table.grad = torch.ones_like(table)  # of typical size
    optimizer.step()
    if name == "adagrad":
        applied = state["sum"].sqrt()
    elif "rmsprop" in name:
        applied = state["square_avg"].sqrt()
    else:
        applied = (state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["step"]))).sqrt()
    assert 1.0 / inverse[40:] == pytest.approx(applied[40:], rel=0.15)
    # The rows that were seen keep their own.
    assert (inverse[:40] < inverse[40:].min()).double().mean() > 0.95


def test_a_tensor_that_only_ever_had_zero_gradients_is_left_out():
    p, other = parameters((3,), (2,))
    optimizer = optim.Adam([p, other])
    for _ in range(10):
        p.grad, other.grad = torch.zeros_like(p), torch.ones_like(other)
        optimizer.step()
    assert torch.equal(inverse_divisors(optimizer)[0][0], torch.zeros(3, dtype=p.dtype))


def test_moments_in_half_precision_are_read_in_single():
    optimizer = optim.Adam(parameters((3, 3), dtype=torch.bfloat16))
    train_like = torch.linspace(0.5, 2.0, 9, dtype=torch.bfloat16).reshape(3, 3)
    for _ in range(10):
        optimizer.param_groups[0]["params"][0].grad = train_like.clone()
        optimizer.step()
    ((inverse,),) = inverse_divisors(optimizer)
    assert inverse.dtype == torch.float32
    assert 1.0 / inverse == pytest.approx(train_like.float(), rel=0.05)


def test_complex_parameters_have_a_divisor_for_each_part():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = optim.Adam([p])
    for _ in range(10):
        p.grad = torch.full_like(p, 3.0 + 4.0j)
        optimizer.step()
    ((inverse,),) = inverse_divisors(optimizer)
    assert 1.0 / inverse == pytest.approx(torch.tensor([[3.0, 4.0]] * 3), rel=1e-3)


def test_sparse_adam_counts_its_steps_without_tensors_and_is_read_alike():
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = optim.SparseAdam(table.parameters())
    for _ in range(10):
        optimizer.zero_grad()
        table(torch.tensor([0, 1])).sum().backward()
        optimizer.step()
    ((inverse,),) = inverse_divisors(optimizer)
    assert inverse[:2] == pytest.approx(torch.ones(2, 2), rel=1e-3)
    assert (inverse[2:] < 4.0).all()


def test_the_users_own_preconditioner_gets_parameter_state_and_group():
    one, two = parameters((2,), (3,))
    optimizer = optim.Adadelta([{"params": [one], "eps": 0.5}, {"params": [two]}])
    train(optimizer, 3)

    def mine(parameter, state, group):
        return state["square_avg"] + group["eps"] if parameter is one else None

    assert inverse_divisors(optimizer)[0] == [None]
    (first,), (second,) = inverse_divisors(optimizer, mine)
    assert first == pytest.approx(1.0 / (optimizer.state[one]["square_avg"] + 0.5))
    assert second is None


@pytest.mark.parametrize("wrong", [torch.ones(3), 2.0])
def test_a_users_divisor_of_another_shape_is_refused_with_a_fix(wrong):
    with pytest.raises(InvalidSpec, match=r"preconditioner .* shape \(2,\)") as caught:
        inverse_divisors(optim.SGD(parameters((2,)), lr=0.1), lambda *_: wrong)
    assert "None" in caught.value.fix


def test_step_counts_may_be_tensors_or_numbers_as_in_old_checkpoints():
    one, two = parameters((2,), (2,))
    optimizer = optim.Adam([one, two])
    train(optimizer, 10)
    before = inverse_divisors(optimizer)[0][1]
    assert isinstance(optimizer.state[two]["step"], torch.Tensor)
    optimizer.state[two]["step"] = 10
    assert torch.equal(inverse_divisors(optimizer)[0][1], before)
