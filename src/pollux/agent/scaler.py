"""GradScaler among accumulation passes: it works on the last pass of a step only, when gradients are whole."""

from __future__ import annotations

import sys
from typing import Any

import torch

FRAMES_UP = 8
"""Between an optimizer's hook and the GradScaler that called the optimizer lie fewer."""


class StepScaler:
    """The user's GradScaler as the training loop holds it; what is not here is the GradScaler's own."""

    def __init__(self, inner: torch.amp.GradScaler) -> None:
        self.inner = inner
        self.is_last_pass = True
        """Set by the agent before each pass."""
        self.unscaled_loss: torch.Tensor | None = None
        self.did_skip = False
        """The last step was left out: its gradients were not finite."""

    def scale(self, outputs: Any) -> Any:
        self.unscaled_loss = outputs.detach() if isinstance(outputs, torch.Tensor) else None
        return self.inner.scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self.is_last_pass:
            self.inner.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not self.is_last_pass:
            return None
        self.did_skip = True  # the agent's hook on the optimizer takes it back
        return self.inner.step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if self.is_last_pass:
            self.inner.update(new_scale)

    def take_loss(self) -> torch.Tensor | None:
        """What was last scaled, once."""
        loss, self.unscaled_loss = self.unscaled_loss, None
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def is_in_scaler_step() -> bool:
    """Whether a GradScaler is what called the optimizer: one that nobody told us of can be noticed in no other way."""
    frame = sys._getframe(1)
    for _ in range(FRAMES_UP):
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
