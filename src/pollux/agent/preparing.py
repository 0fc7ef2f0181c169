"""Which of the objects handed to `job.prepare` is what, and whether they fit together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from pollux.errors import InvalidSpec, LoopMisuse

KINDS: dict[str, type | tuple[type, ...]] = {
    "model": nn.Module,
    "optimizer": Optimizer,
    "loader": DataLoader,
    "scheduler": (LRScheduler, ReduceLROnPlateau),
    "scaler": torch.amp.GradScaler,
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """The user's objects."""

    model: nn.Module
    optimizer: Optimizer
    loader: DataLoader[Any]
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None


def sort_out(objects: tuple[Any, ...]) -> Prepared:
    """One of each kind, in any order; raises for what is missing, double or unknown."""
    found: dict[str, Any] = {}
    for item in objects:
        if item is None:
            continue  # an optional schedule or scaler that this run does without
        name = next((name for name, kind in KINDS.items() if isinstance(item, kind)), None)
        if name is None:
            raise InvalidSpec(
                "prepare",
                type(item).__name__,
                "neither a model, an optimizer, a DataLoader, a learning-rate schedule nor a GradScaler",
                "Hand other objects to job.register, evaluation loaders to job.shard",
            )
        if name in found:
            raise InvalidSpec(
                "prepare",
                type(item).__name__,
                f"a second {name}",
                "Put models into one nn.Module, schedules into one SequentialLR; evaluate with job.shard(loader)",
            )
        found[name] = item
    for name in ("model", "optimizer", "loader"):
        if name not in found:
            raise LoopMisuse(f"job.prepare was given no {name}", "Call job.prepare(model, optimizer, loader)")
    prepared = Prepared(**found)
    _check(prepared)
    return prepared


def _check(prepared: Prepared) -> None:
    if isinstance(prepared.model, DistributedDataParallel):
        raise InvalidSpec(
            "model", "DistributedDataParallel", "the job replicates the model itself", "Hand in the bare model"
        )
    known = {id(parameter) for parameter in prepared.model.parameters()}
    groups = prepared.optimizer.param_groups
    strangers = sum(id(parameter) not in known for group in groups for parameter in group["params"])
    if strangers:
        raise InvalidSpec(
            "optimizer",
            type(prepared.optimizer).__name__,
            f"{strangers} of its parameters are not the model's",
            "Make it from model.parameters() after the model is on its device",
        )
    schedule = prepared.scheduler
    if schedule is not None and getattr(schedule, "optimizer", prepared.optimizer) is not prepared.optimizer:
        raise InvalidSpec(
            "scheduler", type(schedule).__name__, "belongs to another optimizer", "Make it from the one handed in"
        )
