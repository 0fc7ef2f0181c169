"""Settings of a fit, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.errors import InvalidModel


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How to fit; the defaults are ours, `PUBLISHED` is the artifact's loss."""

    delta: float = 0.05
    """Log error from which on the loss grows linearly (pseudo-Huber); 0: root mean square, as in the artifact."""
    grad_weight: float = 0.3
    """Weight of an accumulation pass's error beside that of a whole iteration, which is what decisions rest on."""
    penalty_weight: float = 1e-3
    """Of (γ − 1)², and ten times that of each (β/α)²."""
    penalty_fades: bool = True
    """Divide the penalties by the number of observations: a prior counts as much as one measurement."""
    max_iterations: int = 200
    tolerance: float = 1e-6
    """Relative gain of the loss below which a fit has converged."""
    stuck_factor: float = 1.5
    """A warm start whose loss grew by more than this factor is not trusted: all starts are tried as well …"""
    doubtful_loss: float = 0.12
    """… and so is one that ends above this loss: on measured traces good fits end at 0.05 to 0.1."""

    def __post_init__(self) -> None:
        for field in ("delta", "grad_weight", "penalty_weight", "tolerance", "stuck_factor", "doubtful_loss"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
                raise InvalidModel(f"FitOptions.{field}", value, "must be finite and not negative", "Use the default")
        if not isinstance(self.max_iterations, int) or self.max_iterations < 1:
            raise InvalidModel(
                "FitOptions.max_iterations", self.max_iterations, "must be a whole number ≥ 1", "Use the default"
            )


DEFAULT_FIT = FitOptions()

PUBLISHED = FitOptions(delta=0.0, grad_weight=1.0, penalty_fades=False, max_iterations=5000, tolerance=1e-14)
"""The artifact's loss, minimised to the end."""
