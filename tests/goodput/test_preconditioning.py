"""The divisors of the optimizers' preconditioners, against a step of each optimizer written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pollux.errors import InvalidModel, UnknownName
from pollux.goodput.noise import from_gradients
from pollux.goodput.preconditioning import ADAM_WARMUP_STEPS, OPTIMIZERS, preconditioner

V = np.array([0.0, 1e-6, 0.25, 4.0])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_sgd_and_momentum_leave_the_gradient_as_it_is(optimizer):
    assert preconditioner(optimizer) == 1.0
    assert preconditioner(optimizer, V, step=100) == 1.0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_without_state_leaves_the_gradient_as_it_is(optimizer):
    assert preconditioner(optimizer, None, step=100) == 1.0


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_is_the_identity_up_to_its_fifth_step(optimizer):
    assert preconditioner(optimizer, V, step=ADAM_WARMUP_STEPS) == 1.0
    assert np.shape(preconditioner(optimizer, V, step=ADAM_WARMUP_STEPS + 1)) == V.shape


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_divides_by_the_corrected_root_of_its_second_moment(optimizer):
    p = preconditioner(optimizer, V, step=9, beta2=0.99, eps=1e-3)
    assert p == pytest.approx([math.sqrt(v / (1 - 0.99**9)) + 1e-3 for v in V])


def test_adam_fed_a_constant_gradient_divides_by_its_size():
    g, v = np.array([0.5, -2.0]), np.zeros(2)
    for _ in range(20):
        v = 0.999 * v + 0.001 * g * g
    assert preconditioner("adam", v, step=20, eps=0.0) == pytest.approx(abs(g))


def test_adagrad_and_rmsprop_divide_by_the_plain_root():
    for optimizer in ("adagrad", "rmsprop"):
        assert preconditioner(optimizer, V, eps=1e-3) == pytest.approx([math.sqrt(v) + 1e-3 for v in V])


def test_only_operators_are_used_so_that_any_kind_of_array_works():
    class Symbol:
        """Knows nothing but the operators; writes down what was done."""

        def __init__(self, text: str) -> None:
            self.text = text

        def __pow__(self, other: float) -> Symbol:
            return Symbol(f"({self.text} ** {other:g})")

        def __truediv__(self, other: float) -> Symbol:
            return Symbol(f"({self.text} / {other:g})")

        def __add__(self, other: float) -> Symbol:
            return Symbol(f"({self.text} + {other:g})")

    v = Symbol("v")
    assert preconditioner("adam", v, step=10, beta2=0.0, eps=0.5).text == "(((v ** 0.5) / 1) + 0.5)"
    assert preconditioner("adagrad", v, eps=0.5).text == "((v ** 0.5) + 0.5)"
    assert preconditioner("rmsprop", v, eps=0.5).text == "((v ** 0.5) + 0.5)"


def test_a_common_factor_of_the_divisor_leaves_the_noise_scale_as_it_is():
    gradients = np.random.default_rng(1).normal(1.0, 1.0, size=(4, 6))
    p = np.linspace(0.5, 2.0, 6)
    one, two = (from_gradients(gradients, [8] * 4, 16, q) for q in (p, 7.0 * p))
    assert one.var[0] / one.sqr[0] == pytest.approx(two.var[0] / two.sqr[0])


def test_an_unknown_optimizer_is_answered_with_the_known_ones():
    with pytest.raises(UnknownName, match="adamw"):
        preconditioner("adamz", V)


@pytest.mark.parametrize(
    ("field", "settings"),
    [("eps", {"eps": -1.0}), ("eps", {"eps": math.nan}), ("beta2", {"beta2": 1.0}), ("step", {"step": -1})],
)
def test_bad_settings_are_refused_with_the_field(field, settings):
    with pytest.raises(InvalidModel) as caught:
        preconditioner("adam", V, **settings)
    assert caught.value.field == field
