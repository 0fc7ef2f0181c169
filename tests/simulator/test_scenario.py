"""From names and paths to an outcome."""

from __future__ import annotations

import pickle

import pytest
from tests.simulator.scenes import EQUAL_SHARE

from pollux.core import Cluster, JobSubmitted
from pollux.errors import InvalidDocument, InvalidSpec, UnknownName
from pollux.policies import registry
from pollux.scheduler import MemoryLog
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.options import AgentOptions, Options
from pollux.simulator.scenario import GPU_TYPE, Scenario, default_cluster, simulate, spec_of
from pollux.simulator.settings import applied
from pollux.simulator.truth import truths_built_in
from pollux.simulator.workload import WorkloadJob

CSV = "name,time,application,num_replicas,batch_size\nb,5,ncf,2,512\na,0,ncf,1,256\nc,5,ncf,1,1024\n"
NCF = truths_built_in(["ncf"])["ncf"]


@pytest.fixture
def workload(tmp_path) -> str:
    path = tmp_path / "three.csv"
    path.write_text(CSV)
    return str(path)


def small(num_nodes: int = 1) -> ClusterFile:
    return ClusterFile(Cluster.uniform(num_nodes, 2, GPU_TYPE))


class TestSimulate:
    def test_runs_a_file_to_the_end_and_names_its_jobs_in_order_of_arrival(self, workload):
        outcome = simulate(Scenario(workload, "fifo", small()))
        assert (outcome.workload, outcome.policy) == ("three", "fifo")
        assert [job.name for job in outcome.jobs] == ["a", "b", "c"]
        assert all(job.jct_s > 90 for job in outcome.jobs)
        assert outcome.cpu_s > 0

    def test_tells_how_many_jobs_there_are_and_of_each_that_ends(self, workload):
        heard: list[object] = []
        simulate(Scenario(workload, "fifo", small()), on_start=heard.append, on_end=lambda: heard.append("end"))
        assert heard == [3, "end", "end", "end"]

    def test_logs_where_asked_to(self, workload):
        log = MemoryLog()
        quiet, logged = (
            simulate(Scenario(workload, "fifo", small())),
            simulate(Scenario(workload, "fifo", small()), log),
        )
        assert quiet.jobs == logged.jobs
        assert sum(isinstance(record.event, JobSubmitted) for record in log.records()) == 3

    def test_truths_of_an_earlier_run_give_the_same_outcome(self, workload):
        truths = truths_built_in()
        scenario = Scenario(workload, "srtf", small())
        assert (
            simulate(scenario, truths=truths).jobs == simulate(scenario, truths=truths).jobs == simulate(scenario).jobs
        )

    def test_policies_get_their_options(self, workload):
        options = applied(Options(), {"policy.backfill": True})
        last = {name: simulate(Scenario(workload, name, small())).jobs[2] for name in ("fifo", "fifo-backfill")}
        assert simulate(Scenario(workload, "fifo", small(), options=options)).jobs[2] == last["fifo-backfill"]
        assert last["fifo"].started_at_s > last["fifo-backfill"].started_at_s

    def test_early_rounds_are_among_the_inputs_that_are_kept(self, workload):
        early = applied(Options(), {"early_gap_s": 2})
        outcomes = [simulate(Scenario(workload, "fifo", small(), options=options)) for options in (early, Options())]
        assert [outcome.inputs["early_gap_s"] for outcome in outcomes] == [2.0, None]
        assert [outcome.jobs[0].started_at_s for outcome in outcomes] == [0.0, 60.0]

    def test_a_built_in_workload_brings_its_cluster(self):
        assert default_cluster("demo").cluster == Cluster.uniform(4, 4, GPU_TYPE)
        assert default_cluster("some.csv").cluster == Cluster.uniform(16, 4, GPU_TYPE)
        assert len(simulate(Scenario("demo", "tiresias")).jobs) == 24

    def test_a_scenario_can_be_sent_to_another_process(self, workload):
        scenario = Scenario(workload, "fifo", small(), options=applied(Options(), {"policy.backfill": True}))
        assert pickle.loads(pickle.dumps(scenario)) == scenario


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"workload": "dem"}, InvalidSpec, "neither a file nor a built-in workload.*demo, paper"),
            ({"policy": "tiresius"}, UnknownName, "Did you mean 'tiresias'"),
            ({"cluster": ClusterFile(Cluster.uniform(1, 1, GPU_TYPE))}, InvalidDocument, "more GPUs than the 1"),
            ({"options": applied(Options(), {"policy.x": 1})}, UnknownName, "option of policy fifo = 'x'"),
            ({"cluster": ClusterFile(Cluster.uniform(1, 4, "k80"))}, InvalidSpec, "node node-0: gpu_type = 'k80'.*t4"),
            ({"options": applied(Options(), {"agent.pinned": "xyz"})}, UnknownName, "agent.pinned = 'xyz'"),
            (
                {"options": applied(Options(), {"world.max_time_s": 1})},
                InvalidSpec,
                "world.max_time_s.*is submitted later",
            ),
            ({"workload": "demo", "cluster": ClusterFile(Cluster.uniform(1, 1, GPU_TYPE))}, InvalidDocument, "the 1"),
        ],
    )
    def test_are_clear(self, workload, changes, error, message):
        arguments = {"workload": workload, "policy": "fifo", "cluster": small(), **changes}
        with pytest.raises(error, match=message):
            simulate(Scenario(**arguments))


class TestSpecs:
    JOB = WorkloadJob("a", 0, "ncf", 4, 512)

    def test_batch_sizes_are_kept_where_policies_do_not_adapt_them(self):
        spec = spec_of(self.JOB, NCF, registry.make("optimus"), AgentOptions())
        assert (spec.requested_gpus, spec.requested_batch_size, spec.fixed_batch) == (4, 512, True)
        assert spec.max_gpus is None
        assert spec.limits == NCF.limits

    def test_and_are_free_where_they_do(self):
        assert not spec_of(self.JOB, NCF, registry.make(EQUAL_SHARE), AgentOptions()).fixed_batch

    def test_pinned_applications_keep_one_gpu_and_their_largest_batch(self):
        pinned = AgentOptions(pinned=("ncf",))
        adaptive = spec_of(self.JOB, NCF, registry.make(EQUAL_SHARE), pinned)
        assert (adaptive.max_gpus, adaptive.requested_batch_size, adaptive.fixed_batch) == (1, 32768, True)
        elastic = spec_of(self.JOB, NCF, registry.make("optimus"), pinned)
        assert (elastic.max_gpus, elastic.requested_batch_size, elastic.fixed_batch) == (1, 512, True)
        rigid = spec_of(self.JOB, NCF, registry.make("fifo"), pinned)
        assert (rigid.max_gpus, rigid.requested_batch_size) == (None, 512)
