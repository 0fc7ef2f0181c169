"""Tensors that gloo was lent, and forks: a DataLoader's workers are forked between two sums.

gloo's own thread may be the last to let go of a tensor that it has summed. It then comes into Python for a moment, and
holds a lock of the interpreter as it does. Where the training thread forks in just that moment, Python 3.11 lets the
child wait for that lock for ever, before it has run a line, and the loader for its worker (mended in 3.12). Seen in one
of a hundred jobs on a busy machine. So whoever forks waits until gloo has let go, which takes microseconds.
"""

from __future__ import annotations

import os
import sys
import time

import torch

PATIENCE_S = 1.0
"""For one fork. gloo keeps what it has failed to sum for a while."""
PAUSE_S = 0.0001

_given_back: list[torch.Tensor] = []
"""Handles that Python has no other use for; gloo may still hold them."""


def handle_of(vector: torch.Tensor) -> torch.Tensor:
    """What gloo is to be lent instead of a tensor: the same numbers, and nobody but gloo refers to it."""
    return vector.detach() if _can_be_lent(vector) else vector


def give_back(handle: torch.Tensor) -> None:
    """Python no longer refers to the call that the handle was lent to."""
    _forget_free()
    if _can_be_lent(handle):
        _given_back.append(handle)


def await_gloo() -> None:
    """Return when gloo holds no handle that was given back. What it keeps for longer is not waited for again."""
    until_s = time.monotonic() + PATIENCE_S
    _forget_free()
    while _given_back and time.monotonic() < until_s:
        time.sleep(PAUSE_S)
        _forget_free()
    _given_back.clear()


def _can_be_lent(tensor: torch.Tensor) -> bool:
    """GPUs have NCCL, and gloo puts other numbers into a sparse tensor, which its handle's owner would not see."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _forget_free() -> None:
    counts = _references(_given_back)
    _given_back[:] = [handle for handle, count in zip(_given_back, counts, strict=True) if count > _FREE]


def _references(handles: list[torch.Tensor]) -> list[int]:
    """How many there are to each. torch counts all of C++ together as one."""
    return [sys.getrefcount(handle) for handle in handles]


(_FREE,) = _references([torch.empty(0)])

if sys.version_info < (3, 12):
    os.register_at_fork(before=await_gloo)
