"""Divisors p of the optimizers' preconditioners, P g = g/p elementwise (paper, section 3.1).

The formulas stand here once. They use nothing but operators, so that NumPy arrays and torch tensors both do, on
whatever device they live. The noise statistics of one step need the same p for the single gradients and their mean.
"""

from __future__ import annotations

from typing import Any, Final

from pollux.errors import InvalidModel, UnknownName

ADAM_WARMUP_STEPS: Final = 5
"""Adam's second moment is trusted after this many steps (published code)."""

OPTIMIZERS: Final = ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop")


def adam(second_moment: Any, step: int, beta2: float, eps: float) -> Any:
    """√v / √(1 − β2^step) + ε; identity up to step 5. AdamW divides alike; for AMSGrad give the running maximum."""
    if step <= ADAM_WARMUP_STEPS:
        return 1.0
    return second_moment**0.5 / (1.0 - beta2**step) ** 0.5 + eps


def adagrad(sum_of_squares: Any, eps: float) -> Any:
    """√Σg² + ε."""
    return sum_of_squares**0.5 + eps


def rmsprop(second_moment: Any, eps: float) -> Any:
    """√v + ε. The missing bias correction is a common factor, which φ does not see. Centred: give v − mean²."""
    return second_moment**0.5 + eps


def preconditioner(
    optimizer: str, second_moment: Any = None, *, step: int = 0, beta2: float = 0.999, eps: float = 1e-8
) -> Any:
    """The divisor p of `optimizer`: 1.0, or elementwise like `second_moment`.

    `second_moment` is what the optimizer divides by before the root: v of Adam and RMSprop, Σg² of AdaGrad; None while
    there is no state, which gives the identity. `step` counts the updates behind it (Adam only).

    Momentum has p = 1: φ is that of the gradient which enters its filter, and what the filter multiplies it by, in the
    end 1/(1 − β), is the same for every element, for g and for its noise.

    When p departs from the identity, restart the average: statistics under two preconditioners do not mix.
    """
    if optimizer not in OPTIMIZERS:
        raise UnknownName("optimizer", optimizer, OPTIMIZERS)
    if not eps >= 0.0:
        raise InvalidModel("eps", eps, "not a number from 0 on", "Give the optimizer's own ε")
    if not 0.0 <= beta2 < 1.0:
        raise InvalidModel("beta2", beta2, "outside [0, 1)", "Give the optimizer's own β2")
    if step < 0:
        raise InvalidModel("step", step, "negative", "Give the number of updates so far")
    if second_moment is None:
        return 1.0
    match optimizer:
        case "adam" | "adamw":
            return adam(second_moment, step, beta2, eps)
        case "adagrad":
            return adagrad(second_moment, eps)
        case "rmsprop":
            return rmsprop(second_moment, eps)
        case _:
            return 1.0
