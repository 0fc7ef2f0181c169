"""From measurements of a training task to an `Application`, with the errors of every step.

The catalogue's files are made by this code through `pollux profile fit`. Pure: rows in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pollux.applications.application import Application, MetricCurve, NoiseCurve
from pollux.applications.measured import EpochStats, Measured
from pollux.core import BatchLimits, FrozenMap
from pollux.errors import InvalidProfile
from pollux.goodput import (
    DEFAULT_FIT,
    PAPER,
    Fit,
    FitOptions,
    Observations,
    ThroughputModel,
    efficiency,
    fit,
    iteration_time,
)
from pollux.goodput.numerics import FloatArray
from pollux.goodput.published import published_procedure


class Facts(NamedTuple):
    """What no measurement says about a task."""

    title: str
    optimizer: str = "unknown"
    scaling_rule: str = "adascale"
    metric: str = "metric"
    higher_is_better: bool = True
    max_per_gpu_batch_size: int | None = None
    """Smaller than the largest measured one, where only that is safe."""


KNOWN = {
    "bert": Facts("BERT on SQuAD", "AdamW", "sqrt", "F1 (%)"),
    "cifar10": Facts("ResNet18 on CIFAR-10", "SGD", "adascale", "top-1 accuracy"),
    "deepspeech2": Facts("DeepSpeech2 on CMU-ARCTIC", "SGD", "adascale", "word error rate (%)", False),
    "imagenet": Facts("ResNet-50 on ImageNet", "SGD", "adascale", "top-1 accuracy"),
    "ncf": Facts("NeuMF on MovieLens", "Adam", "sqrt", "hit rate @ 10"),
    # 16 examples were traced, but the paper's jobs ran with at most 8.
    "yolov3": Facts("YOLOv3 on PASCAL VOC", "SGD", "adascale", "validation loss", False, 8),
}

MAX_KNOTS = 12
NOISE_TOLERANCE = 0.15
"""Mean error of ln φ over batch sizes below which a curve needs no further knot."""
LARGEST_LOG_RATIO = 12.0
"""Measured φ/M0 above e¹² is noise in a vanishing gradient: every batch size is efficient there."""


@dataclass(frozen=True, slots=True)
class FittedApplication:
    """An application and how well it follows the measurements."""

    application: Application
    fit: Fit
    published: Fit
    """The artifact's procedure on the same points."""
    heldout_mean_relative_error: float | None
    """Fitted to half of the placements, errors on the other half, mean of both ways; None with a single placement."""
    heldout_published_error: float | None
    noise_rms_log_error: float
    efficiency_mean_abs_error: float
    """Over all measured epochs and batch sizes."""


def fit_application(
    measured: Measured,
    gpu_type: str,
    source: str,
    model: ThroughputModel = PAPER,
    options: FitOptions = DEFAULT_FIT,
) -> FittedApplication:
    """Fit throughput, noise and metric of one task."""
    seen = measured.observations()
    facts = KNOWN.get(measured.name, Facts(measured.name))
    limits = _limits(measured, facts)
    fitted = fit(seen, model, options=options)
    noise = _noise_curve(measured, limits)
    initial = measured.epochs[limits.initial_batch_size]
    application = Application(
        name=measured.name,
        title=facts.title,
        optimizer=facts.optimizer,
        scaling_rule=facts.scaling_rule,
        limits=limits,
        epochs=len(initial),
        total_progress=min(rows[-1].progress for rows in measured.epochs.values()),
        throughput=FrozenMap({gpu_type: fitted.summary()}),
        noise=noise.curve,
        metric=_metric_curve(initial, facts),
        source=source,
    )
    return FittedApplication(
        application,
        fitted,
        published_procedure(seen),
        _heldout_error(measured, seen, lambda half: fit(half, model, options=options)),
        _heldout_error(measured, seen, published_procedure),
        noise.rms_log_error,
        noise.efficiency_error,
    )


def _limits(measured: Measured, facts: Facts) -> BatchLimits:
    sizes = [step.per_gpu_batch_size for step in measured.steps]
    return BatchLimits(
        min(measured.epochs), max(measured.epochs), min(sizes), facts.max_per_gpu_batch_size or max(sizes)
    )


def _heldout_error(measured: Measured, seen: Observations, fit_half: Callable[[Observations], Fit]) -> float | None:
    """Mean |predicted / measured − 1| on placements that the fit did not see; both halves take their turn."""
    placements = sorted({(len(step.placement), step.placement) for step in measured.steps})
    if len(placements) < 2:
        return None
    first_half = {placement for _, placement in placements[::2]}
    in_first = np.array([step.placement in first_half for step in measured.steps])
    errors = []
    for mask in (in_first, ~in_first):
        half, other = fit_half(seen.subset(mask)), seen.subset(~mask)
        level = half.model.level(other.N, other.R)
        predicted = iteration_time(half.model, half.theta, other.K, level, other.m, 0)
        errors.append(np.abs(predicted / other.t_iter - 1.0))
    return float(np.concatenate(errors).mean())


class _Noise(NamedTuple):
    curve: NoiseCurve
    rms_log_error: float
    efficiency_error: float


def _noise_curve(measured: Measured, limits: BatchLimits) -> _Noise:
    """ln(φ/M0) over progress and batch size, with few knots."""
    sizes = sorted(measured.epochs)
    if len({len(measured.epochs[size]) for size in sizes}) > 1:
        lengths = {size: len(measured.epochs[size]) for size in sizes}
        raise InvalidProfile("epochs", lengths, "differ between batch sizes", "Trace the same epochs at each")
    log_ratio = np.array([[_log_ratio(row) for row in measured.epochs[size]] for size in sizes]).T  # [E, B]
    middles = (np.arange(len(log_ratio)) + 0.5) / len(log_ratio)
    knots, values = piecewise_linear(middles, log_ratio, NOISE_TOLERANCE, MAX_KNOTS)
    doublings = np.log2(np.array(sizes) / limits.initial_batch_size)
    degree = min(2, len(sizes) - 1)
    powers = doublings[:, None] ** np.arange(3) * (np.arange(3) <= degree)
    coefficients = np.linalg.lstsq(powers, values.T, rcond=None)[0].T
    curve = NoiseCurve(tuple(knots.tolist()), tuple((c0, c1, c2) for c0, c1, c2 in coefficients.tolist()))
    fitted = np.array([[curve.log_ratio(at, u) for u in doublings.tolist()] for at in middles.tolist()])
    batch = np.array(sizes, dtype=float)
    M0 = limits.initial_batch_size
    error = efficiency(M0 * np.exp(fitted), M0, batch) - efficiency(M0 * np.exp(log_ratio), M0, batch)
    return _Noise(curve, float(np.sqrt(((fitted - log_ratio) ** 2).mean())), float(np.abs(error).mean()))


def _log_ratio(row: EpochStats) -> float:
    if row.grad_sqr <= 0.0:
        return LARGEST_LOG_RATIO
    return min(max(math.log(max(row.grad_var, 1e-300) / row.grad_sqr), -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)


def _metric_curve(rows: Sequence[EpochStats], facts: Facts) -> MetricCurve:
    ends = (np.arange(len(rows)) + 1.0) / len(rows)
    values = np.array([[row.metric] for row in rows])
    tolerance = 0.02 * float(np.ptp(values)) if len(rows) > 1 else 0.0
    knots, fitted = piecewise_linear(ends, values, tolerance, MAX_KNOTS)
    rounded = tuple(float(f"{value:.3g}") for value in fitted[:, 0])  # validation runs repeat no better than that
    return MetricCurve(facts.metric, facts.higher_is_better, tuple(knots.tolist()), rounded)


def piecewise_linear(x: FloatArray, y: FloatArray, tolerance: float, max_knots: int) -> tuple[FloatArray, FloatArray]:
    """A line of few pieces through many points: knots [k] among x, and values [k, columns] by least squares.

    x  [n]           rising
    y  [n, columns]  curves that share the knots

    Knots are added where the curves, on average, are furthest off, until that is within `tolerance`.
    """
    if len(x) == 1:
        return np.array([0.0, 1.0]), np.repeat(y, 2, axis=0)
    chosen = [0, len(x) - 1]
    while True:
        knots = x[chosen]
        hats = np.array([np.interp(x, knots, unit) for unit in np.eye(len(knots))]).T  # [n, k]
        values = np.linalg.lstsq(hats, y, rcond=None)[0]
        off = np.abs((hats @ values - y).mean(axis=1))
        off[chosen] = 0.0
        worst = int(off.argmax())
        if off[worst] <= tolerance or len(chosen) >= max_knots:
            return knots, values
        chosen = sorted([*chosen, worst])
