"""Learning-rate rules: what the learning rate is multiplied by when a step is larger than M0 (paper, section 3).

The user's schedule says the learning rate at M0. For steps of M = scale·M0 samples the agent asks its rule for one
factor per parameter group, and takes the factors back after each step. No torch here: rules are arithmetic.

A rule of your own is an object with `factors`, held to `pollux.testing.ScalingRuleContract`, or simply a function
(M0, M) → factor, which is the paper's SCALE_LR.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from pollux.errors import InvalidModel, InvalidSpec, UnknownName
from pollux.goodput.noise import NoiseAverage

ROUNDING: Final = 1e-6
"""At M0 a factor this close to 1 is 1: a rule may divide before it multiplies."""

ScaleLr: TypeAlias = Callable[[int, int], float]
"""The paper's SCALE_LR: (M0, M) → the factor of all parameter groups."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a rule may know of the step that is about to be taken. The same on all replicas."""

    scale: float
    """M/M0 of this step, from 1 on: where a pass ends with fewer than M0 samples, it is 1."""
    noise: NoiseAverage
    """Measured so far, per parameter group. Before the first sample its weight is 0, and its gains are no one's."""
    num_groups: int
    """Parameter groups of the optimizer."""
    progress: float
    """Iterations of M0 that all steps so far were worth."""
    iterations_per_epoch: float
    """Iterations of M0 in one traversal of the data."""
    initial_batch_size: int
    """M0 in samples."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.scale < math.inf:
            raise InvalidModel("scale", self.scale, "not a number from 1 on", "Give max(M/M0, 1)")
        if not 0.0 <= self.progress < math.inf:
            raise InvalidModel("progress", self.progress, "not a number from 0 on", "Give the iterations of M0 so far")
        for field in ("num_groups", "iterations_per_epoch", "initial_batch_size"):
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidModel(field, getattr(self, field), "not a positive finite number", "Count at least one")

    @property
    def batch_size(self) -> int:
        """M in samples."""
        return round(self.scale * self.initial_batch_size)


class ScalingRule(Protocol):
    """Says how much a larger batch raises the learning rate.

    Called on the training thread, at most once a step, on every replica by itself. So the answer must follow from
    `scaling` alone: a rule that remembers or draws random numbers would let replicas, or a resumed job, drift apart.
    """

    def factors(self, scaling: Scaling) -> Sequence[float]:
        """One factor per parameter group, each finite and above 0; exactly 1.0 where `scaling.scale` is 1."""
        ...


@dataclass(frozen=True, slots=True)
class AdaScale:
    """The gain of each parameter group, between 1 and scale: a step learns as much as `gain` steps at M0 would.

    For SGD and momentum. Groups that were not measured yet keep their learning rate: 1.0.
    """

    def factors(self, scaling: Scaling) -> Sequence[float]:
        return _measured_gains(scaling)


@dataclass(frozen=True, slots=True)
class AdamScale:
    """The root of each group's gain: published code uses it for Adam, the paper does not. 1.0 before measurements."""

    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [math.sqrt(gain) for gain in _measured_gains(scaling)]


@dataclass(frozen=True, slots=True)
class SquareRoot:
    """√scale. The paper's choice for Adam and AdamW."""

    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [math.sqrt(scaling.scale)] * scaling.num_groups


@dataclass(frozen=True, slots=True)
class Linear:
    """scale: right as long as noise dominates the gradient, too much after that."""

    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [scaling.scale] * scaling.num_groups


@dataclass(frozen=True, slots=True)
class Legw:
    """√scale after a linear warm-up that is `scale` times as long as the schedule's own, in epochs (LEGW).

    The recipe at M0 is the user's schedule, and it contains the warm-up: from 0 over `base_warmup_epochs`, which are
    W0 iterations. LEGW wants √scale·min(1, progress/(scale·W0)) times the learning rate without that warm-up. Over
    what the schedule gives already, min(1, progress/W0), that is

        √scale · min(1, max(progress, W0)/(scale·W0))

    which is exactly 1 at M0 whatever the progress, and never 0: 1/√scale while the schedule warms up, then rising to
    √scale. Hence keep the warm-up in the schedule. Without one, training starts at 1/√scale rather than at 0, and at
    M0 does not warm up at all. `base_warmup_epochs` = 0 leaves √scale.

    The length follows the current scale. So a batch that grows before `scale·W0` makes the factor fall.
    """

    base_warmup_epochs: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.base_warmup_epochs < math.inf:
            raise InvalidSpec(
                "base_warmup_epochs", self.base_warmup_epochs, "not a number from 0 on", "Give your schedule's warm-up"
            )

    def factors(self, scaling: Scaling) -> Sequence[float]:
        at_initial = self.base_warmup_epochs * scaling.iterations_per_epoch
        warm = 1.0
        if at_initial > 0.0:
            warm = min(1.0, max(scaling.progress, at_initial) / (scaling.scale * at_initial))
        return [math.sqrt(scaling.scale) * warm] * scaling.num_groups


@dataclass(frozen=True, slots=True)
class Unscaled:
    """1.0 at any batch size."""

    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [1.0] * scaling.num_groups


@dataclass(frozen=True, slots=True)
class FromFunction:
    """The paper's SCALE_LR(M0, M) as a rule: one factor for all parameter groups."""

    scale_lr: ScaleLr

    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [self.scale_lr(scaling.initial_batch_size, scaling.batch_size)] * scaling.num_groups


RULES: Final[dict[str, Callable[[], ScalingRule]]] = {
    "adascale": AdaScale,
    "adamscale": AdamScale,
    "sqrt": SquareRoot,
    "linear": Linear,
    "legw": Legw,
    "none": Unscaled,
}


def rule_named(rule: str | ScalingRule | ScaleLr) -> ScalingRule:
    """The rule of that name; a rule as it is; a function (M0, M) → factor as a rule."""
    if isinstance(rule, str):
        if rule not in RULES:
            raise UnknownName("rule", rule, RULES)
        return RULES[rule]()
    if isinstance(rule, type):
        raise InvalidSpec("rule", rule.__name__, "is a class", f"Pass an instance: {rule.__name__}(…)")
    if callable(getattr(rule, "factors", None)):
        return rule  # type: ignore[return-value]  # mypy cannot see that `factors` tells it from a function
    if callable(rule):
        _takes_two(rule)
        return FromFunction(rule)
    raise InvalidSpec(
        "rule",
        rule,
        "is no learning-rate rule",
        f"Pass one of {', '.join(sorted(RULES))}, or a function (M0, M) → factor",
    )


def default_rule(optimizer_kind: str) -> ScalingRule:
    """The paper's choice: AdaScale for plain SGD and momentum, the square root for all others, known or not.

    Kinds as in `pollux.goodput.preconditioning.OPTIMIZERS`, in any case.
    """
    return AdaScale() if optimizer_kind.lower() in ("sgd", "momentum") else SquareRoot()


def checked_factors(rule: ScalingRule, scaling: Scaling) -> tuple[float, ...]:
    """The rule's answer as plain floats, held to what `ScalingRule` promises. What the rule raises passes through."""
    answer = rule.factors(scaling)
    try:
        factors = tuple(map(float, answer))
    except (TypeError, ValueError):
        fix = "Return one number per parameter group"
        raise _refusal(rule, scaling, answer, "no sequence of numbers", fix) from None
    if len(factors) != scaling.num_groups:
        problem = f"{len(factors)} for {scaling.num_groups} parameter groups"
        fix = "Return one number per parameter group, scaling.num_groups of them"
        raise _refusal(rule, scaling, factors, problem, fix)
    if not all(0.0 < factor < math.inf for factor in factors):
        fix = "Return finite numbers above 0; 1.0 leaves a learning rate as it is"
        raise _refusal(rule, scaling, factors, "not all finite and above 0", fix)
    if scaling.scale > 1.0:
        return factors
    if any(abs(factor - 1.0) > ROUNDING for factor in factors):
        problem = "changes the learning rate at M0, the batch size that it was chosen for"
        fix = "Return 1.0 at scale 1, and put warm-up and decay into a schedule"
        raise _refusal(rule, scaling, factors, problem, fix)
    return (1.0,) * len(factors)


def _refusal(rule: ScalingRule, scaling: Scaling, answer: object, problem: str, fix: str) -> InvalidSpec:
    name = _function_name(rule.scale_lr) if isinstance(rule, FromFunction) else type(rule).__name__
    return InvalidSpec(f"factors of the learning-rate rule {name} at scale {scaling.scale:g}", answer, problem, fix)


def _measured_gains(scaling: Scaling) -> list[float]:
    """The gain of each parameter group; 1.0 while there is no measurement of these groups.

    An average over another number of groups was measured before a group was added.
    """
    noise = scaling.noise
    if noise.weight > 0.0 and len(noise.sqr) == scaling.num_groups:
        gains: list[float] = noise.group_gains(scaling.scale).tolist()
        return gains
    return [1.0] * scaling.num_groups


def _takes_two(function: ScaleLr) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions hide theirs; then the first call tells
        return
    try:
        signature.bind(1, 1)
    except TypeError:
        name = f"{_function_name(function)}{signature}"
        raise InvalidSpec("rule", name, "cannot be called with (M0, M)", "Pass a function of two batch sizes") from None


def _function_name(function: ScaleLr) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
