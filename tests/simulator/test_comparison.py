"""Many runs side by side."""

from __future__ import annotations

import pytest

from pollux.core import Cluster
from pollux.errors import InvalidDocument, UnknownName
from pollux.simulator.cluster_file import ClusterFile
from pollux.simulator.comparison import run_all
from pollux.simulator.scenario import GPU_TYPE, Scenario

POLICIES = ("fifo", "srtf", "tiresias")
SMALL = ClusterFile(Cluster.uniform(2, 2, GPU_TYPE))


@pytest.fixture
def scenarios(tmp_path) -> list[Scenario]:
    path = tmp_path / "w.csv"
    path.write_text("name,time,application,num_replicas,batch_size\na,0,ncf,1,256\nb,5,ncf:0.5,4,512\nc,7,ncf,1,256\n")
    return [Scenario(str(path), policy, SMALL) for policy in POLICIES]


def test_runs_in_two_processes_give_what_one_process_gives(scenarios):
    told: dict[int, float] = {1: 0.0, 2: 0.0}

    def listen(processes):
        def hear(amount):
            told[processes] += amount

        return hear

    alone, together = (run_all(scenarios, processes, listen(processes)) for processes in (1, 2))
    assert [outcome.policy for outcome in together] == list(POLICIES)
    assert [outcome.jobs for outcome in together] == [outcome.jobs for outcome in alone]
    assert [vars(outcome.timeline) for outcome in together] == [vars(outcome.timeline) for outcome in alone]
    assert told == {1: pytest.approx(3.0), 2: pytest.approx(3.0)}


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_in_a_run_is_raised_as_it_is(scenarios, processes):
    scenarios[1] = Scenario(scenarios[1].workload, "no-such-policy", SMALL)
    with pytest.raises(UnknownName, match=r"no-such-policy.*Known"):
        run_all(scenarios, processes, lambda amount: None)


def test_a_run_that_fails_ends_the_others(scenarios, tmp_path):
    """The first would take minutes."""
    endless = tmp_path / "endless.csv"
    rows = "".join(f"job-{index},0,imagenet,1,200\n" for index in range(400))
    endless.write_text(f"name,time,application,num_replicas,batch_size\n{rows}")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("name\n")
    with pytest.raises(InvalidDocument, match=r"wrong\.csv"):
        run_all([Scenario(str(endless), "optimus", SMALL), Scenario(str(wrong), "fifo", SMALL)], 2, lambda amount: None)
