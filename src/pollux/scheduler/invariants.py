"""What must hold after every event; tests check it after each step. A violation is a bug of ours, never of the input.

Two things are beyond us: a node that comes back with fewer GPUs than are in use on it, and a job that is found to run,
by decisions that the log has lost, on GPUs that the log gave to others.
"""

from __future__ import annotations

from pollux.core import Allocation, NodeId, Phase
from pollux.scheduler.reports import LEAVING
from pollux.scheduler.state import SchedulerState


def violations(state: SchedulerState) -> list[str]:
    """Every broken invariant, one sentence each."""
    found = []
    used: dict[NodeId, int] = {}
    for job in state.jobs.values():
        for node_id, count in job.occupied.gpus.items():
            used[node_id] = used.get(node_id, 0) + count
    if used != state.occupancy.used:
        found.append(f"GPUs in use are {used}, not {state.occupancy.used}")
    for node in state.cluster:
        if used.get(node.id, 0) > node.num_gpus:
            found.append(f"node {node.id!r} has {node.num_gpus} GPUs, {used[node.id]} are in use")
    if both := state.jobs.keys() & state.ended.keys():
        found.append(f"jobs {sorted(both)} have ended and have not")
    everybody = [*state.jobs.values(), *state.ended.values()]
    if sorted(job.sequence for job in everybody) != list(range(len(everybody))):
        found.append("a job is lost, or two arrived as the same")
    in_flight = [job for job in state.jobs.values() if job.phase.holds_gpus and job.phase is not Phase.RUNNING]
    if len(in_flight) != state.num_in_flight:
        found.append(f"{len(in_flight)} jobs are in flight, not {state.num_in_flight}")
    if lost := state.target.keys() - state.jobs.keys():
        found.append(f"jobs {sorted(lost)} are to hold GPUs and do not exist")
    for job in state.jobs.values():
        is_settled = job.phase in LEAVING or job.assigned == state.target.get(job.id, Allocation())
        if is_settled == (job.id in state.unsettled):
            found.append(f"job {job.id!r} is{' not' if is_settled else ''} settled, which the state does not know")
    for job_id in state.giving_way:
        job = state.jobs[job_id]
        if job.phase is not Phase.RESIZING or job.assigned == state.target.get(job_id):
            found.append(f"job {job_id!r} is {job.phase} to {job.assigned}, which is no step towards its target")
    return found
