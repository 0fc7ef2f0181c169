"""The replicas of this job and what they say to one another: small sums, nothing else.

With one replica no process group is made at all. Which backend: NCCL where the replica has a CUDA device, else gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pollux.agent.environment import Environment
from pollux.agent.lending import give_back, handle_of
from pollux.core import Shape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Pending:
    """A sum over all replicas that is under way; the tensor may be read after `wait`."""

    def __init__(self, tensor: torch.Tensor, group: ProcessGroup | None) -> None:
        """`group`: None where there is nobody to add to it."""
        self._tensor = tensor
        self._work: Work | None = None
        if group is not None:
            self._handle = handle_of(tensor)
            self._work = dist.all_reduce(self._handle, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._let_go()
        return self._tensor

    def _let_go(self) -> None:
        self._work = None
        give_back(self._handle)
        del self._handle

    def __del__(self) -> None:
        if self._work is not None:  # the replicas have lost each other, and nobody waits for it any more
            self._let_go()


class Replicas:
    """All replicas of this job, seen from one of them. Collective calls: every replica, in the same order."""

    rank: int
    size: int
    shape: Shape
    group: ProcessGroup | None

    def __init__(
        self, rank: int, size: int, num_nodes: int, device: torch.device, group: ProcessGroup | None = None
    ) -> None:
        self.device = device
        self.generation, self.membership = 1, 0
        self.is_member = True
        """False for one that has not joined the others yet, or has left them."""
        self.become(rank, size, num_nodes, group)
        self._owns_group = False

    def become(self, rank: int, size: int, num_nodes: int, group: ProcessGroup | None) -> None:
        """Take another place among others. Whoever holds this object sees the change."""
        self.rank = rank
        self.size = size
        self.shape = Shape(size, min(num_nodes, size))
        self.group = group

    @classmethod
    def join(cls, environment: Environment) -> Replicas:
        """Become one of the replicas that the launcher started; the script may have made the process group already."""
        device = device_of(environment)
        if dist.is_available() and dist.is_initialized():
            size = dist.get_world_size()
            return cls(dist.get_rank(), size, min(environment.num_nodes, size), device, dist.group.WORLD)
        if environment.size == 1:
            return cls(0, 1, 1, device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        joined = cls(environment.rank, environment.size, environment.num_nodes, device, dist.group.WORLD)
        joined._owns_group = True
        return joined

    @property
    def is_main(self) -> bool:
        """One of the replicas writes files, reports and decides."""
        return self.rank == 0 and self.is_member

    @property
    def gpu_type(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def sum_async(self, vector: torch.Tensor) -> Pending:
        """Start to sum a tensor over all replicas, in place."""
        return Pending(vector, self.group if self.size > 1 else None)

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum over all replicas; waits for it."""
        return self.sum_async(vector).wait()

    def mean_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Average gradients over all replicas, in place and in one message: for the rare step that DDP does not do."""
        if self.size == 1 or not gradients:
            return
        for gradient in gradients:
            if gradient.is_sparse:
                self.sum(gradient).div_(self.size)
        dense = [gradient for gradient in gradients if not gradient.is_sparse]
        if not dense:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in dense])
        self.sum(flat).div_(self.size)
        for gradient, part in zip(dense, torch.split(flat, [gradient.numel() for gradient in dense]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def barrier(self) -> None:
        if self.group is not None and self.size > 1:
            dist.barrier(group=self.group)

    def leave(self) -> None:
        """Give back what `join` made."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_group = False


def device_of(environment: Environment) -> torch.device:
    """Where this replica's model belongs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # After this a script's own "cuda" means this replica's device.
    torch.cuda.set_device(environment.local_rank)
    return torch.device("cuda", environment.local_rank)
