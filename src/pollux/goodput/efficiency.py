"""Statistical efficiency: how much of each example's work counts towards progress (paper, section 2.2 and 3.1).

Two equivalent forms: φ, the gradient noise scale in examples, and the pair (sqr, var) that the agent measures,
with φ = M0·var/sqr. The pair also knows φ = ∞ (sqr = 0), where any batch size is fully efficient.
"""

from __future__ import annotations

from pollux.goodput.numerics import Real


def noise_scale(sqr: Real, var: Real, M0: Real) -> Real:
    """φ in examples, from sqr ≈ |Pg|² > 0 and var ≈ tr(PΣPᵀ)/M0."""
    return M0 * var / sqr


def efficiency(phi: Real, M0: Real, M: Real) -> Real:
    """Progress per example at batch size M relative to M0; in (0, 1] for M ≥ M0 and finite φ."""
    return (phi + M0) / (phi + M)


def shares(sqr: Real, var: Real) -> tuple[Real, Real]:
    """(a, b): how much of the gradient of one M0-batch is signal and how much is noise; they sum to one.

    EFFICIENCY(M) = 1/(b + a·M/M0). Halved first, since a sum of two large floats may overflow.
    """
    half = 0.5 * sqr + 0.5 * var
    return 0.5 * sqr / half, 0.5 * var / half


def gain(sqr: Real, var: Real, scale: Real) -> Real:
    """How many M0-iterations one iteration at M = scale·M0 is worth; 1 ≤ gain ≤ scale for scale ≥ 1.

    This is AdaScale's factor; gain(scale)/scale is the efficiency. Needs sqr, var ≥ 0, not both zero.
    """
    return (var + sqr) / (var / scale + sqr)
