"""Averages over all replicas that survive a checkpoint and a change of the number of replicas.

Each replica adds up what it sees. `compute` and `merged_state` sum over the replicas: they are collective, every
replica calls them at the same point of its script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypedDict
from zlib import crc32

import torch
from torch import Tensor

from pollux.errors import InvalidSpec, LoopMisuse

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""The sum of a float64 vector over all replicas (it may be summed in place); blocking."""


class AverageState(TypedDict):
    """What an average is made of; JSON and `torch.load(weights_only=True)` carry it."""

    sum: float
    count: float


def _alone(vector: Tensor) -> Tensor:
    return vector


class Average:
    """The mean of a quantity over all samples (or tokens …) that any replica has seen since the last `reset`.

    Each value is weighted by its count, so batches of different sizes average to the mean over samples:

        accuracy.add(correct.float().mean(), count=len(correct))
    """

    def __init__(self, reduce: Reduce = _alone, device: torch.device | str = "cpu") -> None:
        """`device`: where `reduce` wants its vector (NCCL: on the GPU)."""
        self._reduce = reduce
        self._device = device
        self.reset()

    def add(self, value: float | Tensor, count: float | Tensor = 1) -> None:
        """Take in `value`, a mean over `count` samples. A value over no samples, be it nan, changes nothing.

        Tensors (one element, any device) are added where they are: the host does not wait for them.
        """
        if isinstance(value, Tensor) or isinstance(count, Tensor):
            self._add_on_device(value, count)
            return
        _check_count(count)
        if count:
            self._sum += float(value) * count
            self._count += count

    def compute(self) -> float:
        """The mean over all replicas; nan when nothing was added anywhere. Collective."""
        return _mean(self.merged_state())

    def merged_state(self) -> AverageState:
        """The state of all replicas together, for a checkpoint. Collective."""
        return _merged([self], self._reduce, self._device)[0]

    def state_dict(self) -> AverageState:
        """What this replica has added."""
        self._to_host()
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: AverageState, is_main: bool = True) -> None:
        """Go on from a merged state: one replica takes the whole, the others start at nothing."""
        self.reset()
        if is_main:
            self._sum, self._count = float(state["sum"]), float(state["count"])

    def reset(self) -> None:
        """Forget everything."""
        self._sum = 0.0
        self._count = 0.0
        self._on_device: tuple[Tensor, Tensor] | None = None

    def _add_on_device(self, value: float | Tensor, count: float | Tensor) -> None:
        device = next(x.device for x in (value, count) if isinstance(x, Tensor))
        if self._on_device is not None and self._on_device[0].device != device:
            self._to_host()
        if self._on_device is None:
            with torch.inference_mode(False):  # else they could not be added to outside of the evaluation
                zero = torch.zeros((), dtype=torch.float64, device=device)
                self._on_device = zero, zero.clone()
        sums, counts = self._on_device
        if isinstance(count, Tensor):
            weight = _scalar("count", count).to(device=device, dtype=torch.float64)
            part = (_scalar("value", value) if isinstance(value, Tensor) else value) * weight
            sums.add_(torch.where(weight > 0, part, 0.0))
            counts.add_(weight)
            return
        _check_count(count)
        if count and isinstance(value, Tensor):
            sums.add_(_scalar("value", value), alpha=count)
            self._count += count

    def _to_host(self) -> None:
        if self._on_device is not None:
            sums, counts = self._on_device
            self._sum += float(sums)
            self._count += float(counts)
            self._on_device = None


class Averages:
    """Averages by name. All of them are merged in one message, so every replica has to know the same names."""

    def __init__(self, reduce: Reduce = _alone, device: torch.device | str = "cpu") -> None:
        self._reduce = reduce
        self._device = device
        self._by_name: dict[str, Average] = {}

    def __getitem__(self, name: str) -> Average:
        """The average of that name, a new one if need be."""
        return self._by_name.setdefault(name, Average(self._reduce, self._device))

    def compute(self) -> dict[str, float]:
        """The means over all replicas, by name. Collective."""
        return {name: _mean(state) for name, state in self.merged_state().items()}

    def merged_state(self, reduce: Reduce | None = None) -> dict[str, AverageState]:
        """The states of all replicas together, for a checkpoint. Collective."""
        reduce = reduce or self._reduce
        names = sorted(self._by_name)
        self._check_same_everywhere(names, reduce)
        if not names:
            return {}
        merged = _merged([self._by_name[name] for name in names], reduce, self._device)
        return dict(zip(names, merged, strict=True))

    def state_dict(self) -> dict[str, AverageState]:
        """What this replica has added, by name."""
        return {name: average.state_dict() for name, average in self._by_name.items()}

    def load_state_dict(self, states: Mapping[str, AverageState], is_main: bool = True) -> None:
        """Go on from merged states; names that they lack start at nothing."""
        self.reset()
        for name, state in states.items():
            self[name].load_state_dict(state, is_main)

    def reset(self) -> None:
        """Forget everything but the names."""
        for average in self._by_name.values():
            average.reset()

    def _check_same_everywhere(self, names: list[str], reduce: Reduce) -> None:
        """Vectors of other lengths would hang or mix the replicas up; this one has the same length everywhere."""
        own = crc32("\0".join(names).encode()) >> 12  # 20 bits: sums of squares over 8192 replicas are exact
        told = torch.tensor([1.0, own, own * own], dtype=torch.float64, device=self._device)
        replicas, total, squares = (int(x) for x in reduce(told).tolist())
        if squares * replicas != total * total:  # equal just if all are equal (Cauchy and Schwarz)
            raise LoopMisuse(
                f"the replicas know different averages, this one {', '.join(names) or 'none'}",
                "Ask for an average on every replica, not under is_main",
            )


def _merged(averages: Iterable[Average], reduce: Reduce, device: torch.device | str) -> list[AverageState]:
    states = [average.state_dict() for average in averages]
    local = torch.tensor([[state["sum"], state["count"]] for state in states], dtype=torch.float64, device=device)
    return [{"sum": total, "count": count} for total, count in reduce(local.flatten()).view(-1, 2).tolist()]


def _mean(state: AverageState) -> float:
    return state["sum"] / state["count"] if state["count"] else math.nan


def _check_count(count: float) -> None:
    if not 0 <= count < math.inf:
        raise InvalidSpec("count", count, "not a number of samples", "Give how many samples the value is a mean over")


def _scalar(field: str, tensor: Tensor) -> Tensor:
    if tensor.numel() != 1:
        raise InvalidSpec(
            field, tuple(tensor.shape), "not one number", "Give the mean over the batch, and its size as count"
        )
    return tensor.detach().reshape(())  # without its graph, so nothing here is recorded
