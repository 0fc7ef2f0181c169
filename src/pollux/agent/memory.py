"""How large a pass may be. Nobody knows what fits before it was tried, so a larger pass is tried with care."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pollux.agent.batching import narrowed
from pollux.agent.model import batch_dependent_layers
from pollux.core import BatchLimits
from pollux.errors import LoopMisuse

TRIED_STEPS = 3
"""So many steps of a new size must have succeeded before it counts as fitting."""

CHUNKS = 8
"""The stand-in for a forward that did not fit is computed in so many parts, without gradients."""


class MemoryBound:
    """The largest per-GPU batch size that has worked, and the largest that may be tried."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.proven = 0
        self._tried = (0, 0)

    def is_proven(self, per_gpu_batch_size: int) -> bool:
        return per_gpu_batch_size <= self.proven

    def succeeded(self, per_gpu_batch_size: int) -> None:
        """A whole step of that size went well."""
        if per_gpu_batch_size <= self.proven:
            return
        size, count = self._tried
        self._tried = (per_gpu_batch_size, count + 1 if size == per_gpu_batch_size else 1)
        if self._tried[1] >= TRIED_STEPS:
            self.proven = per_gpu_batch_size

    def failed(self, per_gpu_batch_size: int) -> BatchLimits:
        """A step of that size did not fit: the limits from now on."""
        smaller = max(per_gpu_batch_size // 2, self.limits.min_per_gpu_batch_size)
        if smaller >= per_gpu_batch_size:
            raise _hopeless(per_gpu_batch_size)
        self.proven = min(self.proven, smaller)
        self.limits = dataclasses.replace(self.limits, max_per_gpu_batch_size=smaller)
        return self.limits

    def regrouped(self) -> None:
        """Those who join have tried nothing yet, and all must come to trust a size at the same step."""
        self._tried = (0, 0)

    def resume(self, max_per_gpu_batch_size: int, proven: int) -> None:
        """What an earlier run of the job found out; the bound that this run was given holds all the same."""
        self.limits = narrowed(self.limits, max_per_gpu_batch_size=max_per_gpu_batch_size)
        self.proven = min(proven, self.limits.max_per_gpu_batch_size)


def stand_in(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of a forward that did not fit, without gradients and a few samples at a time.

    The training loop goes on with them to the end of its body; their loss is about right, their backward is left out.
    """
    # Batch normalisation refuses a part of one sample, and would count samples that come again.
    unmixed = [layer for layer in batch_dependent_layers(module) if layer.training]
    for layer in unmixed:
        layer.eval()
    try:
        return _in_parts(module, args, kwargs)
    finally:
        for layer in unmixed:
            layer.train()


def _in_parts(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, _ = tree_flatten((args, kwargs))
    sizes = [leaf.size(0) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    with torch.no_grad():
        if not sizes:
            return module(*args, **kwargs)
        size = sizes[0]
        step = max(1, -(-size // CHUNKS))
        while True:
            with contextlib.suppress(torch.OutOfMemoryError):
                outputs = [_part(module, args, kwargs, size, slice(at, at + step)) for at in range(0, size, step)]
                return tree_map(_join, outputs[0], *outputs[1:])
            if step == 1:
                raise _hopeless(1)
            step //= 2


def _hopeless(samples: int) -> LoopMisuse:
    return LoopMisuse(
        f"out of memory with {samples} sample{'s' * (samples > 1)} in a pass, the fewest allowed",
        "Use a smaller model or a larger device",
    )


def _part(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, part: slice) -> Any:
    """The outputs for some of the samples: whatever is `size` long is cut."""
    leaves, spec = tree_flatten((args, kwargs))
    some = [
        leaf[part] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == size else leaf
        for leaf in leaves
    ]
    some_args, some_kwargs = tree_unflatten(some, spec)
    return module(*some_args, **some_kwargs)


def _join(*parts: Any) -> Any:
    if isinstance(parts[0], torch.Tensor) and parts[0].dim() > 0:
        return torch.cat(parts)
    if isinstance(parts[0], torch.Tensor):
        return torch.stack(parts).mean()
    return parts[0]
