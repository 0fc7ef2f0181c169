"""Inverse divisors 1/p of an optimizer's preconditioner, P g = g/p, read from the optimizer's own state.

The formulas are `pollux.goodput.preconditioning`'s. Here is where each torch optimizer keeps its second moment, from
which step on it is trusted, and what becomes of elements that it has hardly seen. Nothing here writes to the
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import torch
from torch import optim

from pollux.errors import InvalidSpec
from pollux.goodput import preconditioning

Preconditioner: TypeAlias = Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], torch.Tensor | None]
"""The user's own: `(parameter, state, group) -> divisor`, of the parameter's shape or None for the identity.

`state` is the optimizer's state of that parameter (empty before the first step), `group` its parameter group.
"""

Inverse: TypeAlias = torch.Tensor | None
"""1/p elementwise; None is the identity."""

UNKNOWN: Final = "unknown"


def kind(optimizer: optim.Optimizer) -> str:
    """The name of the optimizer in `preconditioning.OPTIMIZERS`, or "unknown"."""
    match optimizer:
        case optim.AdamW():
            return "adamw"
        # The three others divide as Adam does: NAdam changes the numerator only, RAdam multiplies all elements of a
        # step by one factor, and SparseAdam leaves out the rows that a batch did not touch.
        case optim.Adam() | optim.NAdam() | optim.RAdam() | optim.SparseAdam():
            return "adam"
        case optim.Adagrad():
            return "adagrad"
        case optim.RMSprop():
            return "rmsprop"
        case optim.SGD():
            return "momentum" if any(group["momentum"] for group in optimizer.param_groups) else "sgd"
    return UNKNOWN


def inverse_divisors(optimizer: optim.Optimizer, user: Preconditioner | None = None) -> list[list[Inverse]]:
    """1/p of every parameter, by parameter group. New tensors: the optimizer's next step does not change them.

    All None (identity) for SGD, for unknown optimizers, and up to step 5 of the others (`is_active` is then false).
    Once one parameter is past that, one that is not (frozen until now, or never in a batch) gets 1/p = 0: the units of
    g and g/p do not mix, and a zero leaves it out until its own moments are known.

    The host waits for the device at most once per device, to read the step counts where those live there (fused and
    capturable optimizers).
    """
    groups = optimizer.param_groups
    if user is not None:
        return [[_users(user, p, optimizer.state.get(p, {}), group) for p in group["params"]] for group in groups]
    divisor = _DIVISORS.get(kind(optimizer))
    if divisor is None:
        return [[None] * len(group["params"]) for group in groups]
    steps = iter(_steps(optimizer.state.get(p, {}) for group in groups for p in group["params"]))
    trusted = [[_is_trusted(optimizer, group, next(steps)) for _ in group["params"]] for group in groups]
    if not any(map(any, trusted)):
        return [[None] * len(group["params"]) for group in groups]
    return [
        [
            divisor(optimizer.state[p], group, step).reciprocal_() if step else torch.zeros((), device=p.device)
            for p, step in zip(group["params"], of_group, strict=True)
        ]
        for group, of_group in zip(groups, trusted, strict=True)
    ]


def is_active(inverses: Iterable[Iterable[Inverse]]) -> bool:
    """Whether any parameter has a real divisor. When this changes, statistics from before and after do not mix."""
    return any(inverse is not None for group in inverses for inverse in group)


def _is_trusted(optimizer: optim.Optimizer, group: dict[str, Any], step: int) -> int:
    """The step count if the second moment behind it is worth dividing by, else 0.

    Adam's limit of 5 steps serves AdaGrad and RMSprop as well: a moment of one gradient is that gradient, and AdaGrad
    has a state of zeros even before the first.
    """
    if step <= preconditioning.ADAM_WARMUP_STEPS:
        return 0
    if isinstance(optimizer, optim.RAdam):
        # RAdam itself divides only once its moving average is longer than 5 steps.
        beta2 = float(group["betas"][1])
        length = 2.0 / (1.0 - beta2) - 1.0 - 2.0 * step * beta2**step / (1.0 - beta2**step)
        return step if length > 5.0 else 0
    return step


# An element that the optimizer has hardly seen (a rare row of an embedding) has a moment near zero, and 1/p near 1/ε:
# its next gradient alone would outweigh all others. The optimizer never applies that divisor: the step that brings the
# gradient g also adds a share of g² to the moment, and divides by √share·|g| at least. The share is 1 − β2 in Adam and
# 1 − α in RMSprop, both of the uncorrected moment, and 1 in AdaGrad. Not knowing g, take g² as what the seen elements
# of this tensor have had per step: the mean of their corrected moments, for AdaGrad the mean of Σg²/steps.


def _adam(state: dict[str, Any], group: dict[str, Any], step: int) -> torch.Tensor:
    beta2 = float(group["betas"][1])
    moment = _real(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])
    moment = _floored(moment, (1.0 - beta2) / (1.0 - beta2**step))
    return _tensor(preconditioning.adam(moment, step, beta2, group["eps"]))


def _adagrad(state: dict[str, Any], group: dict[str, Any], step: int) -> torch.Tensor:
    return _tensor(preconditioning.adagrad(_floored(_real(state["sum"]), 1.0 / step), group["eps"]))


def _rmsprop(state: dict[str, Any], group: dict[str, Any], step: int) -> torch.Tensor:
    alpha = float(group["alpha"])
    moment = _real(state["square_avg"])
    if group["centered"]:
        mean = _real(state["grad_avg"])
        moment = torch.addcmul(moment, mean, mean, value=-1.0).clamp_(min=0.0)
    return _tensor(preconditioning.rmsprop(_floored(moment, (1.0 - alpha) / (1.0 - alpha**step)), group["eps"]))


_DIVISORS: Final[dict[str, Callable[[dict[str, Any], dict[str, Any], int], torch.Tensor]]] = {
    "adam": _adam,
    "adamw": _adam,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
}


def _floored(moment: torch.Tensor, share: float) -> torch.Tensor:
    """A copy, at least `share` of the mean of its non-zero entries; infinite where nothing was ever seen."""
    seen = moment.count_nonzero()
    floor = torch.where(seen > 0, moment.sum() * share / seen, torch.inf)
    return moment.clamp(min=floor)


def _real(moment: torch.Tensor) -> torch.Tensor:
    """In at least single precision; complex ones as pairs, which is how torch's optimizers see them."""
    if moment.is_complex():
        moment = torch.view_as_real(moment)
    return moment if moment.dtype is torch.float64 else moment.float()


def _tensor(divisor: Any) -> torch.Tensor:
    assert isinstance(divisor, torch.Tensor)
    return divisor


def _steps(states: Iterable[dict[str, Any]]) -> list[int]:
    """The step counts; 0 where there is no state. Those of one device are read in one transfer."""
    counts = [state.get("step", 0) for state in states]
    on_device: dict[torch.device, list[int]] = {}
    for index, count in enumerate(counts):
        if isinstance(count, torch.Tensor) and count.device.type != "cpu":
            on_device.setdefault(count.device, []).append(index)
    for indices in on_device.values():
        read = torch.stack([counts[i] for i in indices]).tolist()
        for i, count in zip(indices, read, strict=True):
            counts[i] = count
    return [int(count) for count in counts]


def _users(user: Preconditioner, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> Inverse:
    divisor = user(parameter, state, group)
    if divisor is None:
        return None
    if not isinstance(divisor, torch.Tensor) or divisor.shape not in (parameter.shape, ()):
        got = tuple(divisor.shape) if isinstance(divisor, torch.Tensor) else divisor
        raise InvalidSpec(
            "preconditioner",
            got,
            f"no divisor for a parameter of shape {tuple(parameter.shape)}",
            "Return a tensor of the parameter's shape, or None for the identity",
        )
    return divisor.detach().reciprocal()
