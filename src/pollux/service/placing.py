"""Whether a job can ever run here, and why one that waits does."""

from __future__ import annotations

from collections.abc import Sequence

from pollux.core import Job, JobSpec, Node, Phase
from pollux.scheduler.rounds import num_free
from pollux.scheduler.state import SchedulerState
from pollux.wire.api import Fault


def hopeless(spec: JobSpec, nodes: Sequence[Node], min_gpus: int | None = None) -> tuple[Fault, ...]:
    """What rules it out on these nodes, be all of them free. `min_gpus`: instead of the specification's."""
    fitting = [node for node in nodes if spec.gpu_type in (None, node.gpu_type)]
    types = sorted({node.gpu_type for node in nodes})
    if not fitting and spec.gpu_type is not None:
        fix = f"Leave it out, or give one of these: {', '.join(types) or 'none'}"
        return (Fault("gpu_type", spec.gpu_type, "no node has GPUs of this type", fix),)
    by_type = {kind: [node.num_gpus for node in fitting if node.gpu_type == kind] for kind in types}
    sizes = [sizes for sizes in by_type.values() if sizes]
    most = max((max(one) if spec.single_node else sum(one) for one in sizes), default=0)
    least = spec.gpu_bounds[0] if min_gpus is None else min_gpus
    if least <= most:
        return ()
    field = "gpus" if spec.rigid else "min_gpus"
    whose = "the largest node has" if spec.single_node else "the cluster has"
    there = f"{whose} {most}" + (f" of type {spec.gpu_type}" if spec.gpu_type else "")
    return (Fault(field, str(least), f"it can never run: {there}", f"Ask for {most} at most, or add nodes"),)


def waits_for(job: Job, state: SchedulerState, now_s: float, is_recovering: bool) -> str:
    """Why the job does not train now, in a few words; empty if it does, or has ended."""
    match job.phase:
        case Phase.PENDING if job.retry_at_s is not None and job.retry_at_s > now_s:
            failures = "1 failure" if job.num_failures == 1 else f"{job.num_failures} failures"
            return f"its next try, after {failures}"
        case Phase.PENDING if is_recovering:
            return "the service, which is just starting"
        case Phase.PENDING if job.spec.gpu_type not in (None, *state.cluster.gpu_types):
            return f"GPUs of type {job.spec.gpu_type}, which no node has"
        case Phase.PENDING if job.id in state.target:
            return "GPUs that others are leaving"
        case Phase.PENDING:
            least, free = job.spec.gpu_bounds[0], num_free(state)
            what = "the next round" if free >= least else f"{least} GPU{'' if least == 1 else 's'}, {free} free"
            return what if free else "a free GPU"
        case Phase.STARTING:
            return "its replicas to get ready"
        case Phase.PAUSED:
            return f"pollux resume {job.id}"
        case Phase.STOPPING | Phase.PAUSING | Phase.CANCELLING:
            return "its replicas to leave"
    return ""
