"""Estimators of the gradient noise scale φ = tr(PΣPᵀ)/|Pg|² (paper, section 3.1 and 4.2).

Two statistics are measured and smoothed apart: sqr ≈ |Pg|² and var ≈ tr(PΣPᵀ)/M0; their ratio is taken last. Here are
the estimators (squared norms in, `NoiseSample` out), their exponential average (`NoiseAverage`) and a thin layer on
NumPy gradient vectors for tests and teaching. No torch, no clock, no randomness: who computes the norms is the agent's
business, and the divisor p of P g = g/p comes from `preconditioning`.

A squared norm is a float, or an array [groups] with one value per parameter group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pollux.errors import InvalidModel
from pollux.goodput.efficiency import gain

Array: TypeAlias = NDArray[np.float64]
Norms: TypeAlias = float | Sequence[float] | Array

JENSEN_SLACK = 1.05
"""A mean gradient may seem longer than its parts by this factor: half-precision norms err by less than 1 %."""

LARGEST_USABLE = 1e150
"""Statistics beyond this have overflowed in all but name: their squares would not be finite."""


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """What one measured step says about the gradient, per parameter group. Raw: either statistic may be negative.

    `sqr` ≈ |Pg|² and `var` ≈ tr(PΣPᵀ)/M0. `scale` = M/M0 of one optimizer step, which is what the step ages a
    `NoiseAverage` by. `biased` marks the differenced estimator, whose two gradients belong to different parameters.
    """

    sqr: tuple[float, ...]
    var: tuple[float, ...]
    scale: float
    biased: bool = False

    def __post_init__(self) -> None:
        if len(self.sqr) != len(self.var) or not self.sqr:
            raise InvalidModel("var", self.var, f"has other groups than sqr = {self.sqr!r}", "Give one value per group")
        _positive("scale", self.scale, "Give M/M0 of the measured step")

    @classmethod
    def overflowed(cls, scale: float, biased: bool = False) -> NoiseSample:
        """The sample of a step whose norms were not finite (mixed precision): counted, and otherwise ignored."""
        return cls((math.nan,), (math.nan,), scale, biased)

    @property
    def is_usable(self) -> bool:
        # Written so that nan fails the comparison.
        return all(abs(x) < LARGEST_USABLE for x in (*self.sqr, *self.var))


def unbiased(local: Array, total: Array, count: int, scale: float) -> tuple[Array, Array]:
    """(sqr, var) from the mean squared norm of `count` gradients and the squared norm of their mean.

    Let gradient i be the mean over b_i examples, B = Σ b_i, w_i = b_i/B, so that E g_i = g and Cov g_i = Σ/b_i. Then

        total = |P Σ w_i g_i|²     E total = |Pg|² + tr(PΣPᵀ) Σ w_i²/b_i = |Pg|² + tr(PΣPᵀ)/B
        local = Σ w_i |P g_i|²     E local = |Pg|² + tr(PΣPᵀ) Σ w_i/b_i  = |Pg|² + tr(PΣPᵀ)·count/B

    Weighting the local norms by size, too, makes the sizes cancel: equal and unequal samples share one formula, with
    scale = B/M0. Two equations, two unknowns:

        var = (local − total)·scale/(count − 1)                    sqr = total − var/scale

    Hence the exact identities total = sqr + var/scale and local = sqr + count·var/scale, and var ≥ 0 because
    local − total = Σ w_i |P(g_i − Σ w_j g_j)|².
    """
    var = (local - total) * (scale / (count - 1))
    return total - (local - total) / (count - 1), var


def from_replicas(local_sqr_norm_mean: Norms, total_sqr_norm: Norms, count: int, scale: float) -> NoiseSample:
    """Many replicas, accumulation, or both: `count` = K(s+1) gradients that were averaged into one.

    `local_sqr_norm_mean` is the mean of |P g_i|², weighted by the sizes if those differ (`local_mean`), and
    `total_sqr_norm` is |P mean(g_i)|² with the same P. `scale` = M/M0 of the whole step.
    """
    local = _norms("local_sqr_norm_mean", local_sqr_norm_mean)
    total = _norms("total_sqr_norm", total_sqr_norm)
    _same_groups("total_sqr_norm", total, local)
    if count < 2:
        raise InvalidModel(
            "count", count, "one gradient says nothing about noise", "Split the batch, or use from_difference"
        )
    _positive("scale", scale, "Give M/M0 of the measured step")
    _not_longer("total_sqr_norm", total, local, "Divide it by the s+1 passes and the K replicas before taking its norm")
    sqr, var = unbiased(local, total, count, scale)
    return NoiseSample(_floats(sqr), _floats(var), float(scale))


def from_slices(
    sqr_norms: Sequence[Norms] | Array, sizes: Sequence[float] | Array, total_sqr_norm: Norms, M0: float
) -> NoiseSample:
    """As `from_replicas`, from every single |P g_i|² and the number of examples behind it.

    sqr_norms  [count] or [count, groups]  |P g_i|², with g_i the mean gradient over slice i
    sizes      [count]                     examples in slice i; an empty slice is no sample

    `total_sqr_norm` belongs to the mean over all examples, Σ (b_i/B) g_i.
    """
    _positive("M0", M0, "Give the initial batch size")
    local, count = local_mean(sqr_norms, sizes)
    return from_replicas(local, total_sqr_norm, count, float(np.sum(sizes)) / M0)


def local_mean(sqr_norms: Sequence[Norms] | Array, sizes: Sequence[float] | Array) -> tuple[Array, int]:
    """(Σ w_i |P g_i|² per group, number of samples) with w_i = b_i/B: the inputs of `from_replicas`.

    Each term is its replica's own, so the agent gets the sum from one all-reduce. A replica whose *loss* was weighted
    holds h_i = w_i g_i instead of g_i; its term is |P h_i|²/w_i.
    """
    weights = _numbers("sizes", sizes)
    norms = _numbers("sqr_norms", sqr_norms)
    if weights.ndim != 1 or len(weights) != len(norms):
        raise InvalidModel(
            "sizes", weights.tolist(), f"{len(norms)} norms need {len(norms)} sizes", "Give one size each"
        )
    used = weights > 0
    if not used.any():
        raise InvalidModel("sizes", weights.tolist(), "no slice holds an example", "Measure a step that has examples")
    return np.atleast_1d(weights[used] @ norms[used] / weights.sum()), int(used.sum())


def from_split_batch(
    first_sqr_norm: Norms, second_sqr_norm: Norms, total_sqr_norm: Norms, scale: float, sizes: tuple[int, int] = (1, 1)
) -> NoiseSample:
    """One replica whose measured step computed its batch in two parts: unbiased, and no old gradient is kept.

    `total_sqr_norm` is that of the step's gradient, (b1 g1 + b2 g2)/(b1 + b2). An odd batch has `sizes` (h, h+1).
    """
    first, second = _norms("first_sqr_norm", first_sqr_norm), _norms("second_sqr_norm", second_sqr_norm)
    _same_groups("second_sqr_norm", second, first)
    local, count = local_mean(np.stack([first, second]), sizes)
    return from_replicas(local, total_sqr_norm, count, scale)


def from_difference(previous_sqr_norm: Norms, current_sqr_norm: Norms, dot: Norms, scale: float) -> NoiseSample:
    """One replica that cannot split its batch: this step's gradient and the one before it as two samples. Biased.

    `dot` is (P g_previous)·(P g_current) with one P for both, and `scale` = M/M0 of *one* step. For gradients a and b,
    local = (|a|² + |b|²)/2 and total = |a + b|²/4 over 2M examples; `unbiased` then becomes sqr = a·b and
    var = |a − b|²/4 · 2·scale: what two independent gradients have in common is g. The parameters moved between the
    two, hence the flag.
    """
    previous = _norms("previous_sqr_norm", previous_sqr_norm)
    current = _norms("current_sqr_norm", current_sqr_norm)
    product = _norms("dot", dot, signed=True)
    _same_groups("current_sqr_norm", current, previous)
    _same_groups("dot", product, previous)
    _positive("scale", scale, "Give M/M0 of one step")
    _not_longer("dot", product, (previous + current) / 2.0, "Take all three under the same preconditioner")
    gap = previous + current - 2.0 * product
    return NoiseSample(_floats(product), _floats(gap * (scale / 2.0)), float(scale), biased=True)


@dataclass(frozen=True, slots=True)
class NoiseAverage:
    """Exponential averages of sqr and var, per parameter group. A value: `update` returns the next one.

    A sample that stands for `steps` optimizer steps is `scale·steps` batches of size M0 wide, and so much does it age
    the samples before it: they keep (1 − 1/window)^(scale·steps) of their weight. The first update therefore gives the
    sample itself (bias correction), and a constant stays that constant.

    Fields are plain numbers and tuples, so that JSON and pickle carry them into a checkpoint.
    """

    window: float = 1000.0
    """Length of memory in M0-batches; 1 − 1/1000 is the published 0.999."""
    min_samples: float = 32.0
    """Samples that the window holds at least, by stretching if need be (`fresh_share`). 1 never stretches."""
    var_floor: float = 1e-6
    """Least var of a group when used (published value). Not relative: lower it for models with tiny gradients."""

    sqr: tuple[float, ...] = (1.0,)
    var: tuple[float, ...] = (0.0,)
    weight: float = 0.0
    """Sum of the samples' weights, 0 before the first and towards 1 when the window is full."""
    weight_sqr: float = 0.0
    """Sum of the squares of the samples' weights."""
    scatter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Weighted (co)variances of the samples' group sums: sqr·sqr, sqr·var, var·var."""
    biased: bool = False
    """A differenced sample is among the averaged ones."""
    skipped: int = 0
    """Samples that were not finite."""

    def __post_init__(self) -> None:
        if not 1.0 < self.window < math.inf:
            raise InvalidModel("window", self.window, "not a length above one M0-batch", "The paper's is 1000")
        if not 1.0 <= self.min_samples < math.inf:
            raise InvalidModel("min_samples", self.min_samples, "not a number from 1 on", "1 turns stretching off")
        if not 0.0 <= self.var_floor < math.inf:
            raise InvalidModel("var_floor", self.var_floor, "not a number from 0 on", "The published value is 1e-6")
        if not 0 < len(self.sqr) == len(self.var):
            raise InvalidModel("var", self.var, f"has other groups than sqr = {self.sqr!r}", "Give one value per group")
        for field in ("sqr", "var", "scatter"):
            values = tuple(getattr(self, field))  # JSON has lists only
            if not all(map(math.isfinite, values)):
                raise InvalidModel(field, values, "not finite", "Start a new average: this one is damaged")
            object.__setattr__(self, field, values)

    def update(self, sample: NoiseSample, steps: int = 1) -> NoiseAverage:
        """The average with one more sample, which was measured once in `steps` optimizer steps.

        A sample that is not finite is counted and left out: the optimizer did not step on it either. The first
        unbiased sample after biased ones starts afresh.
        """
        if steps < 1:
            raise InvalidModel("steps", steps, "not a number of steps", "Give the steps since the last measured one")
        if not sample.is_usable:
            return dataclasses.replace(self, skipped=self.skipped + 1)
        old = self.restarted() if self.biased and not sample.biased else self
        if old.weight and len(old.sqr) != len(sample.sqr):
            raise InvalidModel(
                "sample",
                sample,
                f"has {len(sample.sqr)} parameter groups where the average has {len(old.sqr)}",
                "Start a new average when parameter groups change",
            )
        if not old.weight:
            nothing = (0.0,) * len(sample.sqr)
            old = dataclasses.replace(old, sqr=nothing, var=nothing)
        f = fresh_share(old.window, old.min_samples, sample.scale * steps)
        weight = (1.0 - f) * old.weight + f
        a = f / weight  # exactly 1 for the first sample
        keep = 1.0 - a
        d_sqr, d_var = sum(sample.sqr) - sum(old.sqr), sum(sample.var) - sum(old.var)
        ss, sv, vv = old.scatter
        return dataclasses.replace(
            old,
            sqr=tuple(keep * b + a * x for b, x in zip(old.sqr, sample.sqr, strict=True)),
            var=tuple(keep * b + a * x for b, x in zip(old.var, sample.var, strict=True)),
            weight=weight,
            weight_sqr=(1.0 - f) ** 2 * old.weight_sqr + f * f,
            scatter=(keep * (ss + a * d_sqr * d_sqr), keep * (sv + a * d_sqr * d_var), keep * (vv + a * d_var * d_var)),
            biased=old.biased or sample.biased,
        )

    def restarted(self) -> NoiseAverage:
        """The same settings and nothing averaged; also for the step at which a preconditioner takes effect."""
        return NoiseAverage(self.window, self.min_samples, self.var_floor, skipped=self.skipped)

    def cautious(self, errors: float = 1.0) -> NoiseAverage:
        """The same with a gradient longer by so many standard errors of its estimate: φ is rather too small.

        A few samples cannot tell a small gradient from none. Taken at their word they would promise that any batch
        is fully efficient; whoever acts on them acts on this. The longer the averaging, the less it differs.
        """
        n = self.effective_samples
        total_var = sum(max(var, 0.0) for var in self.var)
        if n <= 1.0 + 1e-9 or total_var <= 0.0:
            return self
        longer = errors * math.sqrt(max(self.scatter[0], 0.0) / (n - 1.0)) / total_var
        # The error is known of the groups' sum only; it is shared out as the noise is.
        sqr = tuple(max(sqr, 0.0) + longer * max(var, 0.0) for sqr, var in zip(self.sqr, self.var, strict=True))
        return dataclasses.replace(self, sqr=sqr)

    def group_stats(self) -> tuple[Array, Array]:
        """(sqr, var) [groups] for use: sqr ≥ 0 and var ≥ var_floor. Before the first sample 1 and the floor."""
        return np.maximum(self.sqr, 0.0), np.maximum(self.var, self.var_floor)

    def stats(self) -> tuple[float, float]:
        """(sqr, var) of the job: the groups' clamped values, summed."""
        sqr, var = self.group_stats()
        return float(sqr.sum()), float(var.sum())

    def noise_scale(self, M0: float) -> float:
        """φ in examples; infinite when no gradient can be told from the noise."""
        sqr, var = self.stats()
        return M0 * var / sqr if sqr > 0.0 else math.inf

    def group_gains(self, scale: float) -> Array:
        """AdaScale's gain of each parameter group [groups] at M = scale·M0: between 1 and `scale`."""
        _positive("scale", scale, "Give M/M0")
        sqr, var = self.group_stats()
        # With neither gradient nor noise in a group, any sqr > 0 makes its gain 1.
        return np.asarray(gain(np.where(sqr + var > 0.0, sqr, 1.0), var, scale))

    @property
    def effective_samples(self) -> float:
        """How many equally weighted samples would average out as well: (Σw)²/Σw²; 0 before the first."""
        return self.weight**2 / self.weight_sqr if self.weight_sqr else 0.0

    def relative_error(self) -> float:
        """Standard error of φ over φ, to first order, from the scatter of the samples; infinite if unknown.

        Takes the samples as independent and φ as constant in the window. Differenced samples of neighbouring steps
        share a gradient: theirs may be understated.
        """
        sqr, var, n = sum(self.sqr), sum(self.var), self.effective_samples
        if sqr <= 0.0 or var <= 0.0 or n <= 1.0 + 1e-9:
            return math.inf
        ss, sv, vv = self.scatter
        return math.sqrt(max(ss / sqr / sqr - 2.0 * sv / sqr / var + vv / var / var, 0.0) / (n - 1.0))


def fresh_share(window: float, min_samples: float, age: float) -> float:
    """The weight of a new sample that is `age` M0-batches wide; all older ones together keep the rest.

    1 − (1 − 1/window)^age, but at most 2/(min_samples + 1). Constant shares f add up to (2 − f)/f effective samples,
    so the cap is where those are `min_samples`: if only every k-th step is measured, or M is very large, the window
    grows beyond `window` rather than judge by a handful of samples. The default of 32 leaves the published smoothing
    as it is when every step is measured and M ≤ 62·M0.
    """
    share = -math.expm1(age * math.log1p(-1.0 / window))
    return max(min(share, 2.0 / (min_samples + 1.0)), 1e-15)


def group_sqr_norms(gradients: Array, p: Array | float = 1.0, starts: Sequence[int] = (0,)) -> Array:
    """|P g|² of each parameter group: [..., groups].

    gradients  [..., d]  gradients as flat vectors
    p          [d]       divisor of the preconditioner
    starts     [groups]  first element of each group, from 0, growing
    """
    squares: Array = np.add.reduceat((gradients / p) ** 2, starts, axis=-1)
    return squares


def from_gradients(
    gradients: Array, sizes: Sequence[float] | Array, M0: float, p: Array | float = 1.0, starts: Sequence[int] = (0,)
) -> NoiseSample:
    """The sample of one step from its gradients [count, d], each the mean over `sizes[i]` examples. For teaching."""
    weights = np.asarray(sizes, dtype=np.float64)
    mean = weights @ gradients / weights.sum()
    return from_slices(group_sqr_norms(gradients, p, starts), sizes, group_sqr_norms(mean, p, starts), M0)


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(values.tolist())


def _numbers(field: str, value: object, signed: bool = False) -> Array:
    try:
        numbers = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError):
        raise InvalidModel(field, value, "not numbers in a regular shape", "Give one number per group") from None
    if numbers.size == 0:
        raise InvalidModel(field, value, "is empty", "Give one number per group")
    if not (abs(numbers) < LARGEST_USABLE).all():
        raise InvalidModel(
            field, value, "not finite", "For a step that overflowed, hand NoiseSample.overflowed to the average"
        )
    if not signed and (numbers < 0.0).any():
        raise InvalidModel(field, value, "negative", "Squared norms and numbers of examples are 0 or more")
    return numbers


def _norms(field: str, value: Norms, signed: bool = False) -> Array:
    norms = _numbers(field, value, signed)
    if norms.ndim != 1:
        raise InvalidModel(field, value, f"has shape {norms.shape}", "Give a number, or one number per group")
    return norms


def _same_groups(field: str, values: Array, other: Array) -> None:
    if values.shape != other.shape:
        raise InvalidModel(
            field, values.tolist(), f"has {len(values)} groups, the other norms {len(other)}", "Give the same groups"
        )


def _not_longer(field: str, whole: Array, parts: Array, fix: str) -> None:
    """Refuse what no gradients can give. Over all groups at once: a vanishing group may break it by rounding alone."""
    if whole.sum() > JENSEN_SLACK * parts.sum():
        problem = f"exceeds the mean squared norm of the single gradients, {parts.tolist()}"
        raise InvalidModel(field, whole.tolist(), problem, fix)


def _positive(field: str, value: float, fix: str) -> None:
    if not 0.0 < value < math.inf:
        raise InvalidModel(field, value, "not a positive finite number", fix)
