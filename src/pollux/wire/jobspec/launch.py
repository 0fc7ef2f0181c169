"""How a node is told to run a job. Apart from the rest, which the command line loads without knowing nodes."""

from __future__ import annotations

import os

from pollux.core import FrozenMap, JobSpec
from pollux.errors import InvalidSpec
from pollux.wire.jobspec.command import Complaint, find_script
from pollux.wire.nodes import Launch


def launch_of(spec: JobSpec, *, fixed_batch: bool = False) -> Launch:
    """What the nodes are to run. `fixed_batch`: the policy does not adapt batch sizes.

    What the specification says of batch sizes becomes variables of the agent. The job's own variables win over them.
    """
    if not spec.command:
        raise InvalidSpec("command", [], "there is nothing to run", "Give a command")
    if spec.rigid:
        return Launch(
            spec.id,
            spec.command[0],
            spec.command[1:],
            spec.working_dir or ".",
            spec.env,
            spec.checkpoint_dir,
            is_plain=True,
            gpus=spec.requested_gpus or 1,
        )
    found = find_script(spec.command)
    if isinstance(found, Complaint):
        raise InvalidSpec("command", list(spec.command), found.problem, found.fix)
    script = os.path.normpath(os.path.join(spec.working_dir, spec.command[found]))
    return Launch(
        spec.id,
        script,
        spec.command[found + 1 :],
        spec.working_dir or ".",
        FrozenMap({**_agent_variables(spec, fixed_batch), **spec.env}),
        spec.checkpoint_dir,
    )


def _agent_variables(spec: JobSpec, fixed_batch: bool) -> dict[str, str]:
    given = {
        "POLLUX_INITIAL_BATCH_SIZE": spec.batch.initial_batch_size,
        "POLLUX_MAX_BATCH_SIZE": spec.batch.max_batch_size,
        "POLLUX_MIN_PER_GPU_BATCH_SIZE": spec.batch.min_per_gpu_batch_size,
        "POLLUX_MAX_PER_GPU_BATCH_SIZE": spec.batch.max_per_gpu_batch_size,
        "POLLUX_BATCH_SIZE": spec.requested_batch_size,
        "POLLUX_FIXED_BATCH": 1 if spec.fixed_batch or fixed_batch else None,
    }
    return {name: str(value) for name, value in given.items() if value is not None}
