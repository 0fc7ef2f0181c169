"""Squared norms of gradients on measured steps: |P g_i|² of every pass, and |P mean|² after the all-reduce.

Tensor hooks live only from `watch_pass` to `end_pass` of a measured step; on all other steps the model runs as if
this module did not exist. Nothing is read by the host: the norms are tensors on the gradients' device, for whoever
sums them over the replicas. The estimators themselves are `pollux.goodput.noise`'s. Training thread only.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from pollux.agent.preconditioners import UNKNOWN, Inverse, Preconditioner, inverse_divisors, is_active, kind
from pollux.errors import LoopMisuse
from pollux.goodput.noise import JENSEN_SLACK, LARGEST_USABLE, NoiseSample, from_difference, from_replicas

log = logging.getLogger(__name__)

LONG = 2**20
"""Elements from which on a norm is taken by rows first. In single precision, torch's CPU kernel for one long vector
loses 5e-4 at 10 million elements, and 1 % at 100 million."""


class NoiseMeter:
    """The norms of one optimizer's gradients, per parameter group.

    A step of K replicas, measured over at least two gradients (replicas × passes):

        begin_step
        for each pass:  watch_pass, forward, backward, end_pass(w, K)
        end_step        after the synchronising backward, before anybody changes p.grad
        local, total    local summed over the replicas, and total of any of them, are what `sample` takes

    One replica with one pass, two consecutive steps under one P:

        forward, backward, keep_gradient, optimizer step
        forward, backward, difference

    P is that of the optimizer's state when the step began, or older by less than `refresh_every` measured steps. It
    takes as much memory as the parameters, and nothing for SGD. All replicas have the same P because they measure the
    same steps. `drop` ends an unfinished measurement at any point.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, preconditioner: Preconditioner | None = None, refresh_every: int = 8
    ) -> None:
        self._optimizer = optimizer
        self._user = preconditioner
        self._refresh_every = refresh_every
        self.last_parameter: torch.Tensor | None = None
        """The parameter whose hook was called last in the last watched pass: its gradient completes the backward."""
        self._handles: list[RemovableHandle] = []
        self._norms: list[torch.Tensor] = []
        self._local: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._copies: list[torch.Tensor | None] = []
        self._kept_sqr: torch.Tensor | None = None
        self._kept_scale: float | torch.Tensor = 1.0
        self._inverses: list[Inverse] = []
        self._is_preconditioned = False
        self._age = 0
        self._find_parameters()
        if preconditioner is None and kind(optimizer) == UNKNOWN:
            log.warning(
                "%s is not an optimizer whose preconditioner is known: its noise scale is measured as that of plain "
                "SGD. Give preconditioner=, a function (parameter, state, group) -> divisor, to have its own",
                type(optimizer).__name__,
            )

    @property
    def num_groups(self) -> int:
        return self._num_groups

    @property
    def is_preconditioned(self) -> bool:
        """Whether P is other than the identity, as of the last `begin_step`.

        A sample belongs to an average of samples of the same kind: when this changes, restart the average.
        """
        return self._is_preconditioned

    def begin_step(self) -> None:
        """Forget any measurement before, and refresh P if that is due."""
        self._forget()
        if self._layout() != self._known_layout:
            self._find_parameters()
        if self._age == 0 or not self._is_preconditioned:
            inverses = inverse_divisors(self._optimizer, self._user)
            self._inverses = [inverse for group in inverses for inverse in group]
            self._is_preconditioned = is_active(inverses)
        self._age = (self._age + 1) % self._refresh_every

    def watch_pass(self) -> None:
        """Before the forward of each pass of a measured step."""
        self._unhook()
        self._norms = [self._nothing] * len(self._parameters)
        self._handles = [
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            for parameter, hook in zip(self._parameters, self._hooks, strict=True)
            if parameter.requires_grad
        ]

    def end_pass(self, weight: float, replicas: int = 1) -> None:
        """After the backward of the pass, whose loss was multiplied by `weight` = w = K·b/B, with K = `replicas`.

        The hooks saw h = w·g_i, and the pass's term of `pollux.goodput.noise.local_mean` is
        (b/B)|P g_i|² = |P h|²/(w·K).
        """
        self._unhook()
        if weight > 0.0:
            squares = self._sum(self._norms) / (weight * replicas)
            self._local = squares if self._local is None else self._local + squares
        self._norms = []

    def end_step(self, gradient_scale: float | torch.Tensor = 1.0) -> None:
        """After the synchronising backward, while every p.grad holds the mean over B samples times `gradient_scale`.

        `gradient_scale` is the GradScaler's, which the gradients of all passes of this step were multiplied by.
        """
        self._total = _divided(self._sum(self._gradient_norms()), gradient_scale, gradient_scale)
        if self._local is not None:
            self._local = _divided(self._local, gradient_scale, gradient_scale)

    def local(self) -> torch.Tensor:
        """float64 [groups]: Σ (b/B)|P g_i|² over the passes of this replica; to be summed over the replicas."""
        if self._local is None:
            raise LoopMisuse("no pass of this step was measured", "Call watch_pass and end_pass around each pass")
        return self._local

    def total(self) -> torch.Tensor:
        """float64 [groups]: |P mean|², the same on all replicas."""
        if self._total is None:
            raise LoopMisuse("the step was not measured to its end", "Call end_step after the last backward")
        return self._total

    def keep_gradient(self, gradient_scale: float | torch.Tensor = 1.0) -> None:
        """After the backward of the first of two consecutive steps: keep a copy of P g. Begins the measurement."""
        self.begin_step()
        self._copies = [self._copied(index) for index in range(len(self._parameters))]
        self._kept_sqr = self._sum([self._nothing if copy is None else self._norm(copy) for copy in self._copies])
        self._kept_scale = gradient_scale

    def difference(self, gradient_scale: float | torch.Tensor = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """After the second step's backward: (|P previous|², |P current|², their dot), float64 [groups] each.

        What `difference_sample` takes.
        """
        if self._kept_sqr is None:
            raise LoopMisuse("no gradient of the step before was kept", "Call keep_gradient on that step")
        norms = [self._nothing] * len(self._parameters)
        dots = list(norms)
        for index, (copy, inverse) in enumerate(zip(self._copies, self._inverses, strict=True)):
            gradient = self._dense_gradient(index)
            if gradient is not None:
                current = _preconditioned(gradient, inverse)
                norms[index] = self._norm(current)
                dots[index] = self._nothing if copy is None else _dot(copy, current)
        before, now = self._kept_scale, gradient_scale
        answer = (
            _divided(self._kept_sqr, before, before),
            _divided(self._sum(norms), now, now),
            _divided(self._by_group(self._stacked(dots)), before, now),
        )
        self._forget()
        return answer

    def drop(self) -> None:
        """Forget an unfinished measurement: hooks, sums and the kept gradient. P and `last_parameter` stay."""
        self._forget()
        self._copies = [None] * len(self._parameters)

    def _forget(self) -> None:
        """All but the memory of the copies, which the next `keep_gradient` writes to: new memory costs more."""
        self._unhook()
        self._norms = []
        self._local = self._total = self._kept_sqr = None

    def _layout(self) -> tuple[int, ...]:
        return tuple(len(group["params"]) for group in self._optimizer.param_groups)

    def _find_parameters(self) -> None:
        """Whatever depends on which parameters there are; groups may be added while training."""
        groups = self._optimizer.param_groups
        self._known_layout = self._layout()
        self._num_groups = len(groups)
        self._parameters: list[torch.Tensor] = [parameter for group in groups for parameter in group["params"]]
        self._device = self._parameters[0].device
        is_double = any(p.dtype in (torch.float64, torch.complex128) for p in self._parameters)
        # Norms of half precision are taken in single: in half, 256 already has a square that overflows.
        self._wide = torch.float64 if is_double else torch.float32
        self._nothing = torch.zeros((), dtype=self._wide, device=self._device)
        membership = [number for number, group in enumerate(groups) for _ in group["params"]]
        self._group_of = torch.tensor(membership, device=self._device)
        # Made once: they are registered anew for every measured pass.
        self._hooks = [functools.partial(self._take, index) for index in range(len(self._parameters))]
        self._inverses = [None] * len(self._parameters)
        self._copies = [None] * len(self._parameters)
        self._is_preconditioned = False
        self._age = 0

    def _take(self, index: int, gradient: torch.Tensor) -> None:
        """A hook: the gradient of one pass, before it is added to p.grad and before the all-reduce."""
        self.last_parameter = self._parameters[index]
        self._norms[index] = self._norm(_preconditioned(gradient, self._inverses[index]))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _gradient_norms(self) -> list[torch.Tensor]:
        """|P p.grad| of every parameter; those without a divisor in one call, as they may be many and small."""
        norms = [self._nothing] * len(self._parameters)
        plain: dict[int, torch.Tensor] = {}
        for index, (parameter, inverse) in enumerate(zip(self._parameters, self._inverses, strict=True)):
            if parameter.grad is None:
                continue
            seen = _preconditioned(parameter.grad, inverse)
            if inverse is None:
                plain[index] = _by_rows(seen, self._wide)
            else:
                norms[index] = self._norm(seen)  # at once: the product then lives no longer than its norm takes
        if plain:
            of_plain = torch._foreach_norm(list(plain.values()), 2, dtype=self._wide)
            for index, norm in zip(plain, of_plain, strict=True):
                norms[index] = norm
        return norms

    def _dense_gradient(self, index: int) -> torch.Tensor | None:
        """In full and in the wide type, so that any two of them can be multiplied."""
        gradient = self._parameters[index].grad
        if gradient is None or gradient.is_complex():
            return gradient
        return (gradient.to_dense() if gradient.is_sparse else gradient).to(self._wide)

    def _copied(self, index: int) -> torch.Tensor | None:
        gradient = self._dense_gradient(index)
        if gradient is None:
            return None
        room, inverse = self._copies[index], self._inverses[index]
        gradient = _preconditioned(gradient, None)
        if room is None or room.shape != gradient.shape:
            room = torch.empty_like(gradient)
        return room.copy_(gradient) if inverse is None else torch.mul(gradient, inverse, out=room)

    def _norm(self, values: torch.Tensor) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(_by_rows(values, self._wide), dtype=self._wide)
        return norm

    def _sum(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._by_group(self._stacked(norms).square_())

    def _stacked(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([value.to(self._device) for value in values]).double()

    def _by_group(self, values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(self._num_groups, dtype=torch.float64, device=self._device)
        return sums.index_add_(0, self._group_of, values)


def sample(local: Sequence[float], total: Sequence[float], count: int, scale: float) -> NoiseSample:
    """The sample of a measured step, from `NoiseMeter.local` summed over replicas and `total` of one, per group.

    `count` = K·passes gradients, `scale` = B/M0. Norms that are not finite give `NoiseSample.overflowed`, and so do
    norms that no gradients can have: training goes on without the sample.
    """
    if not _are_usable(local, total):
        return NoiseSample.overflowed(scale)
    if sum(total) > JENSEN_SLACK * sum(local):
        log.warning(
            "A measured step was left out: the mean gradient (squared norm %.6g) is longer than its parts (%.6g). Does "
            "something change gradients after the backward, such as a communication hook?",
            sum(total),
            sum(local),
        )
        return NoiseSample.overflowed(scale)
    return from_replicas(list(local), list(total), count, scale)


def difference_sample(
    previous: Sequence[float], current: Sequence[float], dot: Sequence[float], scale: float
) -> NoiseSample:
    """The sample of two consecutive steps, from `NoiseMeter.difference`. `scale` = B/M0 of one of them."""
    if not _are_usable(previous, current, dot):
        return NoiseSample.overflowed(scale, biased=True)
    return from_difference(list(previous), list(current), list(dot), scale)


def _are_usable(*norms: Sequence[float]) -> bool:
    return all(math.isfinite(x) and abs(x) < LARGEST_USABLE for group in norms for x in group)


def _preconditioned(gradient: torch.Tensor, inverse: Inverse) -> torch.Tensor:
    """The entries of P g that are not zero by construction: all of a dense gradient, the rows of a sparse one."""
    if gradient.requires_grad:  # after a backward that builds a graph of its own
        gradient = gradient.detach()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if not gradient.is_sparse:
        return gradient if inverse is None else gradient * inverse
    gradient = gradient.coalesce()  # a row that occurs twice counts with its sum
    values = gradient.values()
    if inverse is None:
        return values
    return values * (inverse[tuple(gradient.indices())] if inverse.dim() else inverse)


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.numel() < LONG:
        return torch.dot(one.reshape(-1), other.reshape(-1))
    return (one * other).sum()  # slower, and exact for long ones


def _by_rows(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Something of the same norm, short enough for its norm to be exact."""
    if values.numel() < LONG or values.dim() < 2:
        return values
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=dtype)
    return norms


def _divided(norms: torch.Tensor, one: float | torch.Tensor, other: float | torch.Tensor) -> torch.Tensor:
    """Squared norms, or a dot, of gradients that were multiplied by `one` and `other`."""
    if isinstance(one, float | int) and one == 1.0 and isinstance(other, float | int) and other == 1.0:
        return norms
    return norms / one / other
