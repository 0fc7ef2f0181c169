"""The model as the training loop holds it: one object that stays the same however many replicas there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pollux.agent.replicas import Replicas


class ReplicatedModel(nn.Module):
    """The user's module, through DistributedDataParallel where there are several replicas.

    Outside of the passes of a step, or without gradients, the bare module runs: in evaluation replicas may run it a
    different number of times. Names in `state_dict` and `named_parameters` are the bare module's, and so is every
    attribute that is not found here.
    """

    def __init__(self, module: nn.Module, ddp_options: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.on_failure: Callable[[BaseException, tuple[Any, ...], dict[str, Any]], Any] | None = None
        """Answers for a forward that ran out of memory, or raises."""
        self.on_error: Callable[[RuntimeError], bool] = _is_no_loss
        """Whether other replicas are out of reach, so that this forward is to run without them."""
        self.is_in_pass = False
        """Set by the agent while the body of the training loop runs."""
        self.did_forward = False
        """Whether DDP has seen a forward in this pass: only then does it average the gradients."""
        self._ddp: tuple[DistributedDataParallel, ...] = ()  # in a tuple, so that it is not a submodule
        self._ddp_options = dict(ddp_options)

    def connect(self, replicas: Replicas, *, is_equal: bool = False) -> None:
        """Join these replicas: all start from the weights of the first, unless they are equal already."""
        self._trained = self._trainable()
        if replicas.size == 1:
            self._ddp = ()
            return
        options: dict[str, Any] = {"init_sync": not is_equal}
        if replicas.device.type == "cuda":
            options["device_ids"] = [replicas.device.index]
        self._ddp = (
            DistributedDataParallel(self.module, process_group=replicas.group, **{**options, **self._ddp_options}),
        )

    def disconnect(self) -> None:
        """Run alone until the next `connect`."""
        self._ddp = ()

    def reconnect(self, replicas: Replicas) -> None:
        """Join anew if parameters were frozen or unfrozen: DDP averages those that it found trainable."""
        if self._ddp and self._trainable() != self._trained:
            self.connect(replicas)

    def _trainable(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self.module.parameters())

    def synchronise(self, is_wanted: bool) -> None:
        """Whether the next forward and backward average gradients over the replicas."""
        for ddp in self._ddp:
            ddp.require_backward_grad_sync = is_wanted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._ddp and self.is_in_pass and torch.is_grad_enabled():
                self.did_forward = True
                return self._replicated(args, kwargs)
            return self.module(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if self.on_failure is None or not torch.is_grad_enabled():
                raise
            failed: BaseException = error
            for ddp in self._ddp:
                # DDP notes it after a forward; replicas whose forward fitted have, and all must agree.
                ddp.require_forward_param_sync = ddp.require_backward_grad_sync
        # Outside the handler: the traceback would keep the activations alive.
        return self.on_failure(failed.with_traceback(None), args, kwargs)

    def _replicated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Through DDP, which first spreads buffers; alone where the others are out of reach."""
        try:
            return self._ddp[0](*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not self.on_error(error):
                raise
        return self.module(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the model (an average of weights, a file) are not part of the training."""
        return {**self.__dict__, "on_failure": None, "on_error": _is_no_loss, "_ddp": (), "is_in_pass": False}

    def train(self, mode: bool = True) -> ReplicatedModel:
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def batch_dependent_layers(module: nn.Module) -> list[nn.Module]:
    """Layers to which half a batch shows other statistics than the whole: batch normalisation, in whichever mode."""
    return [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def _is_no_loss(_: RuntimeError) -> bool:
    return False
