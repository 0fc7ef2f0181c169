"""Fitting a throughput model to what a job measured of itself (paper, section 4.1).

Residuals are logarithms of predicted over measured times, of passes without and with communication. The default loss
grows linearly beyond a few per cent, so that one odd measurement (a batch size that hits a slow kernel, a noisy node)
does not bend the whole model; `PUBLISHED` restores the loss of the paper's artifact. What the observations cannot tell
is held at optimistic priors, which invite exploration. Formulas: docs/goodput.md; differences: docs/deviations.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pollux.core import FrozenMap, ThroughputFit
from pollux.errors import InvalidModel
from pollux.goodput.fit_options import DEFAULT_FIT, FitOptions
from pollux.goodput.levels import PAPER
from pollux.goodput.numerics import FloatArray
from pollux.goodput.observations import Observations
from pollux.goodput.throughput import Minimum, Prior, ThroughputModel


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted parameters, and how far to trust them."""

    model: ThroughputModel
    theta: tuple[float, ...]
    """In the order of `model.parameters`; always finite and inside the bounds."""
    loss: float
    mean_relative_error: float
    """Mean of |predicted / measured − 1| over the iteration times."""
    residuals: tuple[float, ...]
    """predicted / measured − 1 of each iteration time, in the order of the observations."""
    priors: tuple[str, ...]
    """Parameters that no observation has told about yet."""
    converged: bool
    """False: the budget of work ran out first; the parameters are the best found, not the best there are."""
    iterations: int
    max_gpus_observed: int
    max_nodes_observed: int

    def summary(self) -> ThroughputFit:
        """The part that travels and is stored."""
        return ThroughputFit(
            model=self.model.name,
            params=FrozenMap(dict(zip(self.model.parameters, self.theta, strict=True))),
            priors=self.priors,
            mean_relative_error=self.mean_relative_error,
            converged=self.converged,
            max_gpus_observed=self.max_gpus_observed,
            max_nodes_observed=self.max_nodes_observed,
        )


def fit(
    seen: Observations,
    model: ThroughputModel = PAPER,
    warm: Fit | None = None,
    options: FitOptions = DEFAULT_FIT,
) -> Fit:
    """Fit `model` to one job's observations, from its earlier fit if there is one.

    Never raises on valid observations and never returns nan; `converged` says when the work ran out. Several starts
    are tried without an earlier fit, or when the earlier one leads nowhere.
    """
    prior = model.prior(seen)
    if warm is None:
        return _best_of(seen, model, prior, model.starts(seen), options)
    if warm.model is not model:
        raise InvalidModel(
            "warm", warm.model.name, f"is a fit of another model than {model.name!r}", "Fit without it once"
        )
    start = np.array(warm.theta)
    newly_seen = [
        index for index, name in enumerate(model.parameters) if name in warm.priors and index not in prior.held
    ]
    if newly_seen:  # what was a prior has no value worth starting from
        start[newly_seen] = model.starts(seen)[0, newly_seen]
    found = _best_of(seen, model, prior, start[None], options)
    got_worse = found.loss > options.stuck_factor * warm.loss + 1e-3
    if got_worse or found.loss > options.doubtful_loss or not warm.converged:
        fresh = _best_of(seen, model, prior, model.starts(seen), options)
        return fresh if fresh.loss < found.loss else found
    return found


def fit_many(
    jobs: Sequence[Observations],
    model: ThroughputModel = PAPER,
    warm: Sequence[Fit | None] | None = None,
    options: FitOptions = DEFAULT_FIT,
) -> list[Fit]:
    """`fit` for each of many jobs."""
    earlier = list(warm) if warm is not None else [None] * len(jobs)
    if len(earlier) != len(jobs):
        raise InvalidModel("warm", len(earlier), f"there are {len(jobs)} jobs", "Give one earlier fit, or None, a job")
    return [fit(seen, model, old, options) for seen, old in zip(jobs, earlier, strict=True)]


def report(seen: Observations, model: ThroughputModel, prior: Prior, found: Minimum) -> Fit:
    """What a run of a fit found, with its errors on the observations."""
    theta = tuple(prior.settle(found.theta).tolist())
    predicted = model.t_step(theta, seen.K, model.level(seen.N, seen.R), seen.m)
    residuals = predicted / seen.t_iter - 1.0
    unseen = {*prior.held, *(index for index, _, _ in prior.at_least)}
    return Fit(
        model=model,
        theta=theta,
        loss=float(found.loss),
        mean_relative_error=float(np.abs(residuals).sum()) / len(seen),
        residuals=tuple(residuals.tolist()),
        priors=tuple(name for index, name in enumerate(model.parameters) if index in unseen),
        converged=bool(found.converged),
        iterations=int(found.iterations),
        max_gpus_observed=int(max(seen.K.tolist())),
        max_nodes_observed=int(max(seen.N.tolist())),
    )


def _best_of(seen: Observations, model: ThroughputModel, prior: Prior, starts: FloatArray, options: FitOptions) -> Fit:
    """Minimise from each start and report the lowest loss."""
    for index, value in prior.held.items():
        starts[:, index] = value
    runs = (model.minimise(seen, prior, start, options) for start in starts)
    return report(seen, model, prior, min(runs, key=lambda run: run.loss))
