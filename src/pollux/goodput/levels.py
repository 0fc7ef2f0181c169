"""The built-in throughput models: the paper's (section 3.2), and the same with a third level of locality.

    T_grad(m)          = α_grad + β_grad·m
    T_sync(K, level)   = 0 for one GPU, else α_level + β_level·(K − 2)
    T_iter(K, N, m, s) = s·T_grad + (T_grad^γ + T_sync^γ)^(1/γ)

A *level* is how far a job is spread: within a node, over nodes and, in the `racks` model, over racks.
"""

from __future__ import annotations

import importlib
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pollux.errors import InvalidModel, UnknownName
from pollux.goodput import levels_kernel as kernel
from pollux.goodput.candidates import Candidates, Layout
from pollux.goodput.envelope import Grid, Spans
from pollux.goodput.fit_options import FitOptions
from pollux.goodput.numerics import FLOOR, FloatArray, Real, line, overlap
from pollux.goodput.observations import Observations
from pollux.goodput.throughput import Minimum, Prior, Theta, ThroughputModel, iteration_time

RATIO_FIRMNESS = 10.0
"""How much firmer a fit believes in scaling (β/α → 0) than in no overlap (γ → 1): the artifact's 1e-2 and 1e-3."""


class ThetaSys(NamedTuple):
    """θ_sys of the paper: seconds, seconds per example or per extra replica, and the overlap exponent."""

    alpha_grad: Real
    beta_grad: Real
    alpha_local: Real
    beta_local: Real
    alpha_node: Real
    beta_node: Real
    gamma: Real


class ThetaRacks(NamedTuple):
    """θ_sys with a third pair for jobs that span racks."""

    alpha_grad: Real
    beta_grad: Real
    alpha_local: Real
    beta_local: Real
    alpha_node: Real
    beta_node: Real
    alpha_rack: Real
    beta_rack: Real
    gamma: Real


class LevelsModel(ThroughputModel):
    """The paper's model with two or three levels; parameters α, β of compute, of each level, then γ ∈ [1, 10]."""

    def __init__(self, name: str, theta: type[ThetaSys] | type[ThetaRacks]) -> None:
        self.name = name
        self.parameters = theta._fields
        self.num_levels = (len(self.parameters) - 3) // 2
        self.upper = (math.inf,) * (len(self.parameters) - 1) + (10.0,)
        self._bounds = np.array(self.lower), np.array(self.upper)

    def __reduce__(self) -> tuple[object, ...]:
        return throughput_model, (self.name,)  # in another process, too, there is one of each

    @property
    def lower(self) -> tuple[float, ...]:
        return (FLOOR,) * (len(self.parameters) - 1) + (1.0,)

    def level(self, N: Real, R: Real) -> Real:
        """0 within a node, 1 over nodes, 2 over racks (with three levels)."""
        over_nodes = (N > 1) * 1
        return over_nodes if self.num_levels == 2 else over_nodes + (R > 1)

    def t_grad(self, theta: Theta, m: Real) -> Real:
        return theta[0] + theta[1] * m

    def t_sync(self, theta: Theta, K: Real, level: Real) -> Real:
        """Seconds to all-reduce among K replicas, if nothing overlapped."""
        seconds: Real = 0.0
        for index in range(self.num_levels):
            seconds = seconds + (level == index) * (theta[2 + 2 * index] + theta[3 + 2 * index] * (K - 2))
        return (K > 1) * seconds

    def t_step(self, theta: Theta, K: Real, level: Real, m: Real) -> Real:
        return overlap(self.t_grad(theta, m), self.t_sync(theta, K, level), theta[-1])

    def starts(self, seen: Observations) -> FloatArray:
        """Straight lines through what is seen, once with little and once with much overlap."""
        level = self.level(seen.N, seen.R)
        compute = line(seen.m, seen.t_grad)
        grad = np.minimum(compute[0] + compute[1] * seen.m, 0.999 * seen.t_iter)
        rows = []
        for gamma in (1.2, 3.0):
            sync = np.maximum(seen.t_iter**gamma - grad**gamma, (0.02 * seen.t_iter) ** gamma) ** (1.0 / gamma)
            row = list(compute)
            for index in range(self.num_levels):
                here = (seen.K > 1) & (level == index)
                row += line(seen.K[here] - 2.0, sync[here]) if here.any() else (FLOOR, FLOOR)
            rows.append([*row, gamma])
        return np.array(rows)

    def prior(self, seen: Observations) -> Prior:
        """Optimism for the unseen (paper, section 4.1): free communication until it was measured.

        One batch size only: half of the time is taken as constant. A level never used costs nothing; one never used
        with K > 2 does not grow with K. Neither is believed to be cheaper than 1.1 times the level below. Never K > 1:
        no overlap.
        """
        held: dict[int, float] = {}
        at_least: list[tuple[int, int, float]] = []
        if (seen.m == seen.m[0]).all():
            held[0] = float(seen.t_grad.mean()) / 2.0
        levels = np.asarray(self.level(seen.N, seen.R)).tolist()
        most_gpus = [1.0] * self.num_levels
        for gpus, level in zip(seen.K.tolist(), levels, strict=True):
            most_gpus[level] = max(most_gpus[level], gpus)
        for index, gpus in enumerate(most_gpus):
            alpha, beta = 2 + 2 * index, 3 + 2 * index
            for parameter in [alpha, beta] if gpus <= 1 else [beta] if gpus <= 2 else []:
                held[parameter] = FLOOR
                if index > 0:
                    at_least.append((parameter, parameter - 2, 1.1))
        if max(most_gpus) <= 1:
            held[len(self.parameters) - 1] = 1.0
        return Prior(held, tuple(at_least))

    def penalties(self, theta: FloatArray) -> FloatArray:
        """γ − 1 (overlap must be earned), and β/α of each level (scaling is believed until disproved)."""
        ratios = theta[3:-1:2] / theta[2:-1:2]
        return np.concatenate([[theta[-1] - 1.0], math.sqrt(RATIO_FIRMNESS) * ratios])

    def minimise(self, seen: Observations, prior: Prior, start: FloatArray, options: FitOptions) -> Minimum:
        free = np.ones(len(start))
        free[list(prior.held)] = 0.0
        found = kernel.minimise(
            start,
            free,
            self._bounds[0],
            self._bounds[1],
            *self._loss(seen, prior, options),
            options.max_iterations,
            options.tolerance,
        )
        return Minimum(*found)

    def loss(self, seen: Observations, theta: Theta, options: FitOptions) -> float:
        """The loss of a fit with these options at given parameters, to compare fits by."""
        return self.loss_and_slopes(seen, theta, options)[0]

    def loss_and_slopes(self, seen: Observations, theta: Theta, options: FitOptions) -> tuple[float, FloatArray]:
        """`loss` with its gradient [P]."""
        at = np.array(theta, dtype=float)
        gradient, curvature = np.zeros(len(at)), np.zeros((len(at), len(at)))
        value = kernel.loss_and_slopes(at, *self._loss(seen, Prior({}), options), gradient, curvature)
        return value, gradient

    def cheapest(self, theta: Theta, K: int, level: Real, choice: Candidates, a: float, b: float) -> tuple[int, float]:
        return kernel.cheapest(np.asarray(theta), K, int(level), choice.m, choice.s, choice.initial_share, a, b)

    def cheapest_of_classes(
        self, theta: FloatArray, share: FloatArray, layout: Layout
    ) -> tuple[FloatArray, FloatArray]:
        return kernel.cheapest_of_classes(
            theta,
            share,
            layout.K,
            layout.level,
            layout.first,
            layout.length,
            layout.m,
            layout.s,
            layout.initial_share,
        )

    def times(self, theta: FloatArray, spans: Spans, grid: Grid, count: int) -> FloatArray:
        seconds = np.empty((len(theta), count))
        cells = spans.low, spans.high, spans.level
        kernel.iteration_seconds(theta, *cells, grid.first, grid.size, grid.s, grid.sizes, seconds)
        return seconds

    def _loss(
        self, seen: Observations, prior: Prior, options: FitOptions
    ) -> tuple[FloatArray, FloatArray, float, FloatArray, FloatArray]:
        """The kernel's rows, half_weight, delta, penalty and ties."""
        rows = np.empty((len(seen), 5))
        rows[:, 0] = seen.K
        rows[:, 1] = self.level(seen.N, seen.R)
        rows[:, 2] = seen.m
        np.log(seen.t_grad, out=rows[:, 3])
        np.log(seen.t_iter, out=rows[:, 4])
        strength = options.penalty_weight / (len(seen) if options.penalty_fades else 1.0)
        penalty = np.array([strength, RATIO_FIRMNESS * strength])
        ties = np.array(prior.at_least, dtype=float).reshape(-1, 3)
        return rows, np.array([options.grad_weight, 1.0]), options.delta, penalty, ties


PAPER = LevelsModel("paper", ThetaSys)
RACKS = LevelsModel("racks", ThetaRacks)
_BUILT_IN: dict[str, ThroughputModel] = {model.name: model for model in (PAPER, RACKS)}


@lru_cache(maxsize=64)
def throughput_model(name: str) -> ThroughputModel:
    """The model of that name: a built-in one, or `package.module:attribute` for one of the user's.

    The attribute is a model, or a class of models that needs no arguments. The same name gives the same object.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise UnknownName("throughput model", name, [*_BUILT_IN, "package.module:attribute"])
    try:
        found = getattr(importlib.import_module(module), attribute)
        model: ThroughputModel = found() if isinstance(found, type) else found
    except Exception as error:  # whatever the user's module raises
        problem = f"{type(error).__name__}: {error}"
        fix = "Make the module importable wherever the job's model is read"
        raise InvalidModel("throughput model", name, problem, fix) from error
    missing = [member for member in ("parameters", "t_grad", "t_step", "starts") if not hasattr(model, member)]
    if missing:
        fix = "Subclass pollux.goodput.ThroughputModel"
        raise InvalidModel("throughput model", name, f"has no {', '.join(missing)}", fix)
    return model


def t_grad(theta: ThetaSys, m: Real) -> Real:
    """Seconds of one pass over m examples (paper's model)."""
    return PAPER.t_grad(theta, m)


def t_sync(theta: ThetaSys, K: Real, N: Real) -> Real:
    """Seconds to all-reduce among K replicas spread over N nodes (paper's model)."""
    return PAPER.t_sync(theta, K, PAPER.level(N, 1))


def t_iter(theta: ThetaSys, K: Real, N: Real, m: Real, s: Real = 0) -> Real:
    """Seconds per iteration: s accumulation passes, then one that synchronises (paper's model)."""
    return iteration_time(PAPER, theta, K, PAPER.level(N, 1), m, s)
