"""The vector that replicas sum once a beat: measurements of all, decisions of the first.

Everything that must happen on all replicas at the same step rides in it, so that no other message is needed. It is
summed while training goes on, and read one beat later.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from pollux.agent.batching import BatchConfig


@dataclass(frozen=True, slots=True)
class Beat:
    """Sums over the replicas. Decisions are the first replica's: the others add zero."""

    samples: float = 0.0
    """How many samples were trained on since the last beat."""
    stop: float = 0.0
    """Replicas whose script wants to end the loop."""
    leave: float = 0.0
    """Replicas that a signal asked to end."""
    behind: float = 0.0
    """Replicas of an emulated job that are too far behind its pace."""
    save: float = 0.0
    """A checkpoint is due."""
    batch_size: float = 0.0
    per_gpu_batch_size: float = 0.0
    passes: float = 0.0
    measure_every: float = 0.0
    beat_every: float = 0.0

    @property
    def config(self) -> BatchConfig | None:
        """The new batch configuration, if one was decided."""
        if not self.batch_size:
            return None
        return BatchConfig(int(self.batch_size), int(self.per_gpu_batch_size), int(self.passes))


_NAMES = tuple(field.name for field in fields(Beat))


def pack(beat: Beat, measured: torch.Tensor) -> torch.Tensor:
    """One float64 vector. `measured` (the summed loss, norms of gradients) is on the device and is not read here."""
    head = torch.tensor([getattr(beat, name) for name in _NAMES], dtype=torch.float64)
    return torch.cat([head.to(measured.device, non_blocking=True), measured])


def unpack(vector: torch.Tensor) -> tuple[Beat, list[float]]:
    """The beat, and what was measured."""
    values = vector.tolist()
    return Beat(*values[: len(_NAMES)]), values[len(_NAMES) :]
