"""The contract of a policy. Subclass `PolicyContract`, define `make`, and pytest does the rest.

class TestMyPolicy(PolicyContract):
    def make(self) -> Policy:
        return MyPolicy()
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.core import Allocation, Cluster, FrozenMap, Job, JobId, NodeId, Plan, Snapshot, to_json
from pollux.errors import InvalidSpec
from pollux.policies.base import Policy
from pollux.testing.snapshots import job as new_job
from pollux.testing.snapshots import snapshots

_SEEDS = st.integers(0, 2**32 - 1)
# Each policy runs the same test function under its own class, which is all that the health check complains about.
_SETTINGS = settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow]
)


class PolicyContract:
    """What the scheduler relies on, whatever the policy decides."""

    def make(self) -> Policy:
        """A new policy, the same each time."""
        raise NotImplementedError

    def _plan(self, snapshot: Snapshot, seed: int = 0) -> Plan:
        return self.make().plan(self._visible(snapshot), seed)

    def _visible(self, snapshot: Snapshot) -> Snapshot:
        return snapshot if self.make().needs_oracle else replace(snapshot, oracle=None)

    @_SETTINGS
    @given(snapshots(), _SEEDS)
    def test_the_cluster_can_hold_the_plan(self, snapshot: Snapshot, seed: int) -> None:
        self._plan(snapshot, seed).check(snapshot)

    @_SETTINGS
    @given(st.lists(snapshots(), min_size=1, max_size=3), _SEEDS)
    def test_the_same_history_and_seed_give_the_same_plans(self, history: list[Snapshot], seed: int) -> None:
        first, second = self.make(), self.make()
        for moment in map(self._visible, history):
            plan = first.plan(moment, seed)
            plan.check(moment)
            assert plan == second.plan(moment, seed)

    @_SETTINGS
    @given(snapshots())
    def test_the_snapshot_stays_as_it_was(self, snapshot: Snapshot) -> None:
        before = to_json(snapshot)
        self._plan(snapshot)
        assert to_json(snapshot) == before

    @_SETTINGS
    @given(snapshots())
    def test_every_job_gets_a_number_of_gpus_that_it_can_run_on_or_none(self, snapshot: Snapshot) -> None:
        plan, adapts = self._plan(snapshot), self.make().adapts_gpus
        for job_id, allocation in plan.allocations.items():
            job = snapshot.jobs[job_id]
            least, most = job.spec.gpu_bounds
            assert least <= allocation.num_gpus
            assert most is None or allocation.num_gpus <= most
            must_not_change = not job.spec.preemptible and job.phase.holds_gpus
            if not adapts and not must_not_change:
                assert allocation.num_gpus == _wanted(job)

    @_SETTINGS
    @given(snapshots())
    def test_jobs_that_must_not_be_preempted_keep_their_minimum(self, snapshot: Snapshot) -> None:
        plan = self._plan(snapshot)
        for job in snapshot.jobs.values():
            if _must_stay(job, snapshot.cluster):
                assert plan[job.id].num_gpus >= job.spec.gpu_bounds[0]

    @_SETTINGS
    @given(snapshots())
    def test_no_job_mixes_gpu_types_or_gets_one_that_it_did_not_ask_for(self, snapshot: Snapshot) -> None:
        for job_id, allocation in self._plan(snapshot).allocations.items():
            (gpu_type,) = {snapshot.cluster[node].gpu_type for node in allocation.gpus}
            assert snapshot.jobs[job_id].spec.gpu_type in (None, gpu_type)

    @_SETTINGS
    @given(snapshots())
    def test_a_job_that_must_be_on_one_node_is_never_given_several(self, snapshot: Snapshot) -> None:
        for job_id, allocation in self._plan(snapshot).allocations.items():
            assert len(allocation.gpus) == 1 or not snapshot.jobs[job_id].spec.single_node

    @pytest.mark.parametrize("gpus", [1, 2, 3, 4])
    def test_a_rigid_job_of_one_node_is_put_where_it_fits(self, gpus: int) -> None:
        """Beside jobs that leave many GPUs in all, but only on one node enough for it."""
        held = {"others-0": {"node-0": 3, "node-1": 1}, "others-1": {"node-1": 3}}
        others = [
            new_job(name, i, 4 - i, nodes, rigid=True, preemptible=False)
            for i, (name, nodes) in enumerate(held.items())
        ]
        waits = new_job("one-node", 2, gpus, rigid=True, single_node=True)
        jobs = FrozenMap({each.id: each for each in (*others, waits)})
        moment = Snapshot(0.0, 0, Cluster.uniform(3, 4), jobs, FrozenMap())
        plan = self._plan(moment)
        plan.check(moment)
        assert plan[waits.id].num_gpus == gpus

    @pytest.mark.parametrize("num_jobs", [0, 1])
    @pytest.mark.parametrize("num_nodes", [0, 1])
    def test_few_jobs_and_few_nodes(self, num_jobs: int, num_nodes: int) -> None:
        cluster = Cluster.uniform(num_nodes, 4)
        jobs = FrozenMap({JobId("only"): new_job("only", 0, 2)} if num_jobs else {})
        plan = self._plan(Snapshot(0.0, 0, cluster, jobs, FrozenMap()))
        plan.check(Snapshot(0.0, 0, cluster, jobs))
        assert bool(plan[JobId("only")]) == (num_jobs == num_nodes == 1)

    def test_more_jobs_than_gpus(self) -> None:
        jobs = FrozenMap({JobId(f"job-{i}"): new_job(f"job-{i}", i, 1) for i in range(9)})
        moment = Snapshot(0.0, 0, Cluster.uniform(1, 4), jobs, FrozenMap())
        plan = self._plan(moment)
        plan.check(moment)
        assert sum(allocation.num_gpus for allocation in plan.allocations.values()) == 4

    def test_a_policy_that_needs_the_truth_says_so_where_there_is_none(self) -> None:
        policy, moment = self.make(), Snapshot(0.0, 0, Cluster.uniform(1, 1))
        if policy.needs_oracle:
            with pytest.raises(InvalidSpec, match="oracle"):
                policy.plan(moment, 0)
        else:
            assert policy.plan(moment, 0) == Plan()


class WorkConservingContract(PolicyContract):
    """And no job waits beside free GPUs that it could run on, which not every policy promises."""

    @_SETTINGS
    @given(snapshots())
    def test_nobody_waits_beside_gpus_that_it_could_use(self, snapshot: Snapshot) -> None:
        plan, adapts = self._plan(snapshot), self.make().adapts_gpus
        free = _free_by_node(plan, snapshot.cluster)
        for job in snapshot.jobs.values():
            if not plan[job.id]:
                size = job.spec.gpu_bounds[0] if adapts else _wanted(job)
                wanted = job.spec.gpu_type
                for kind in snapshot.cluster.gpu_types:
                    counts = [free[node] for node in free if snapshot.cluster[node].gpu_type == kind]
                    usable = max(counts) if job.spec.single_node else sum(counts)
                    assert size > usable or wanted not in (None, kind)


def _wanted(job: Job) -> int:
    """Said again here, so that a contract does not test code with itself."""
    least, most = job.spec.gpu_bounds
    size = max(job.spec.requested_gpus or job.spec.min_gpus, least)
    return size if most is None else min(size, most)


def _must_stay(job: Job, cluster: Cluster) -> bool:
    """Whether it must not be pre-empted and can stay where it goes to, or else where it is."""
    return not job.spec.preemptible and (
        _can_stay(job, job.assigned, cluster) or _can_stay(job, job.allocation, cluster)
    )


def _can_stay(job: Job, held: Allocation, cluster: Cluster) -> bool:
    """Whether that is at least its minimum, on nodes that are there for it as before."""
    if held.num_gpus < job.spec.gpu_bounds[0]:
        return False
    if any(node not in cluster or not cluster[node].schedulable for node in held.gpus):
        return False
    types = {cluster[node].gpu_type for node in held.gpus}
    return len(types) == 1 and job.spec.gpu_type in (None, *types)


def _free_by_node(plan: Plan, cluster: Cluster) -> dict[NodeId, int]:
    free = dict(cluster.capacity)
    for allocation in plan.allocations.values():
        for node_id, count in allocation.gpus.items():
            free[node_id] -= count
    return free
