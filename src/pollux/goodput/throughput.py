"""The seam for throughput models: how long a job's passes take, as a function of GPUs, nodes and batch size.

A throughput model is a small stateless object that implements `ThroughputModel`. The built-in ones are in `levels`:
`paper` (the default) and `racks`; yours is named by its dotted path. See docs/goodput.md for a worked example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from pollux.goodput.generic_fit import minimise_generic
from pollux.goodput.numerics import FLOOR, FloatArray, Real
from pollux.goodput.observations import Observations

if TYPE_CHECKING:
    from pollux.goodput.candidates import Candidates, Layout
    from pollux.goodput.envelope import Grid, Spans
    from pollux.goodput.fit_options import FitOptions

Theta: TypeAlias = Sequence[Real] | FloatArray
"""Parameters in the order of `ThroughputModel.parameters`: numbers, or arrays that broadcast (many jobs at once)."""


class Prior(NamedTuple):
    """What a fit holds at an optimistic value because the observations cannot tell it yet.

    held      {index of parameter: value} during the fit
    at_least  (index, index of another, factor): reported as at least factor × the other, in this order
    """

    held: dict[int, float]
    at_least: tuple[tuple[int, int, float], ...] = ()

    def settle(self, theta: FloatArray) -> FloatArray:
        """Parameters as they are reported: the unseen raised to what is seen nearest to them."""
        settled = theta.copy()
        for index, other, factor in self.at_least:
            settled[index] = max(settled[index], factor * settled[other])
        return settled


class Minimum(NamedTuple):
    """Where one run of a fit ended."""

    theta: FloatArray
    loss: float
    converged: bool
    iterations: int


class ThroughputModel(Protocol):
    """How long a job's passes take.

    Subclass it and give `name`, `parameters`, `upper`, `t_grad`, `t_step` and `starts`; the rest has defaults. Methods
    are pure and broadcast over `theta`, K, level and m. Times are seconds, finite and positive for parameters inside
    their bounds. An iteration is s accumulation passes of `t_grad` each, then one of `t_step`, which synchronises.
    """

    name: str
    """By which `throughput_model` finds it again: for a user's model its dotted path, `package.module:attribute`."""
    parameters: tuple[str, ...]
    """Names of the parameters, in the order of theta."""
    upper: tuple[float, ...]
    """Largest allowed values; the smallest are `lower`."""

    @property
    def lower(self) -> tuple[float, ...]:
        """Smallest allowed values."""
        return (FLOOR,) * len(self.parameters)

    def level(self, N: Real, R: Real) -> Real:
        """What of (nodes, racks) matters: equal K and equal level take the same time. Default: the nodes."""
        return N

    def t_grad(self, theta: Theta, m: Real) -> Real:
        """Seconds of one forward and backward pass over m examples, without communication."""
        ...

    def t_step(self, theta: Theta, K: Real, level: Real, m: Real) -> Real:
        """Seconds of the last pass of an iteration: compute, communication and what overlaps of the two."""
        ...

    def starts(self, seen: Observations) -> FloatArray:
        """Where a fit begins: one row of parameters for each start [S, P]."""
        ...

    def prior(self, seen: Observations) -> Prior:
        """What the observations cannot identify. Default: nothing, all is fitted."""
        return Prior({})

    def penalties(self, theta: FloatArray) -> FloatArray:
        """Terms [Q] whose squares a fit keeps small, where the observations leave a choice. Default: none."""
        return np.zeros(0)

    def minimise(self, seen: Observations, prior: Prior, start: FloatArray, options: FitOptions) -> Minimum:
        """One run of a fit from one start, moved inside the bounds. Default: SciPy, slopes by finite differences."""
        return Minimum(*minimise_generic(self, seen, prior, start, options))

    def cheapest(self, theta: Theta, K: int, level: Real, choice: Candidates, a: float, b: float) -> tuple[int, float]:
        """Index and value of the lowest T_iter·(a + b·M0/M) among candidates; the first of equals."""
        cost = iteration_time(self, theta, K, level, choice.m, choice.s) * (a + b * choice.initial_share)
        index = int(np.argmin(cost))
        return index, float(cost[index])

    def cheapest_of_classes(
        self, theta: FloatArray, share: FloatArray, layout: Layout
    ) -> tuple[FloatArray, FloatArray]:
        """`cheapest` for jobs with parameters [J, P] and noise shares b [J]: cost and line of each class [J, C]."""
        seconds = iteration_times(self, theta, layout)
        cost = seconds * (1.0 - share[:, None] + share[:, None] * layout.initial_share)
        lowest = np.minimum.reduceat(cost, layout.first, axis=1)
        is_lowest = cost == np.repeat(lowest, layout.length, axis=1)
        place = np.where(is_lowest, np.arange(cost.shape[1]), cost.shape[1])
        return lowest, np.minimum.reduceat(place, layout.first, axis=1)

    def times(self, theta: FloatArray, spans: Spans, grid: Grid, count: int) -> FloatArray:
        """T_iter [J, count] of every candidate in the grid of each span's GPUs at its level, span after span; for
        parameters [J, P]."""
        columns, parts = tuple(theta.T[..., None]), []
        for low, high, level in zip(spans.low.tolist(), spans.high.tolist(), spans.level.tolist(), strict=True):
            of = grid.slice(low, high)
            seconds = iteration_time(self, columns, grid.K[of], level, grid.m[of], grid.s[of])
            parts.append(np.broadcast_to(seconds, (len(theta), of.stop - of.start)))
        return np.concatenate(parts, axis=1)


def iteration_times(model: ThroughputModel, theta: FloatArray, layout: Layout) -> FloatArray:
    """Seconds per iteration [J, L] of every line of a layout, for parameters [J, P]."""
    columns = tuple(theta.T[..., None])
    seconds = iteration_time(model, columns, layout.K, layout.level, layout.m, layout.s)
    return np.broadcast_to(seconds, (len(theta), len(layout.m)))


def iteration_time(model: ThroughputModel, theta: Theta, K: Real, level: Real, m: Real, s: Real) -> Real:
    """Seconds per iteration: s accumulation passes, then one that synchronises."""
    return s * model.t_grad(theta, m) + model.t_step(theta, K, level, m)


def throughput(model: ThroughputModel, theta: Theta, K: Real, level: Real, m: Real, s: Real = 0) -> Real:
    """Examples per second: K·m·(s + 1) / T_iter."""
    return K * m * (s + 1) / iteration_time(model, theta, K, level, m, s)
