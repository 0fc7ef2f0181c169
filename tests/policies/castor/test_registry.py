"""What castor believes of jobs of a known kind: what others have measured, at the job's own pace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pollux.core import (
    Cluster,
    FrozenMap,
    JobId,
    KindProfile,
    Node,
    NodeId,
    Observation,
    ObservationKey,
    Profile,
    Progress,
    Shape,
    Snapshot,
    Tally,
    ThroughputFit,
)
from pollux.goodput import DEFAULT_BATCH, PAPER
from pollux.goodput.pooled import Corrected
from pollux.policies import make
from pollux.policies.castor.kinds import Kinds
from pollux.policies.pollux.moment import Register
from pollux.policies.pollux.roster import Roster
from pollux.testing.snapshots import LIMITS, MODEL, job

THETA = (0.02, 0.001, 0.01, 0.001, 0.05, 0.002, 1.5)
CLUSTER = Cluster.of(*(Node(NodeId(f"node-{index}"), 4) for index in range(4)))
PLACES = [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)]


def measured(places=PLACES, factor=1.0, passes=10, gpu_type="gpu"):
    """A profile of a job that takes so many times as long as `THETA` says."""
    found = {}
    for num_gpus, num_nodes in places:
        for m in (32, 128, 512):
            pace = factor(num_gpus) if callable(factor) else factor
            grad = pace * PAPER.t_grad(THETA, m)
            step = pace * PAPER.t_step(THETA, num_gpus, PAPER.level(num_nodes, 1), m)
            sums = (passes * step, passes * max(step - grad, 0.0), passes)
            found[ObservationKey(Shape(num_gpus, num_nodes), m)] = Observation(0.0, 0, *sums)
    return Profile(FrozenMap({gpu_type: FrozenMap(found)}))


def running(name, application=None, profile=None, sequence=0, total=1e5, held=None):
    """A job whose own fit says that every pass takes a second, wherever it runs."""
    params = dict(zip(PAPER.parameters, (1.0, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1.0), strict=True))
    fits = FrozenMap({"gpu": ThroughputFit("paper", FrozenMap(params), max_gpus_observed=1)})
    model = replace(MODEL, throughput=fits, progress=Progress(10.0, total), realloc_delay_s=30.0)
    held = held or {f"node-{sequence % 4}": 1}
    return replace(
        job(name, sequence, held=held, application=application), model=model, profile=profile or measured([(1, 1)])
    )


def ended(profile, work=1e6):
    return KindProfile(profile, 1, work=Tally.of(work), realloc_delay_s=Tally.of(30.0), limits=LIMITS)


def at(jobs, kinds=None, time_s=600.0, round=0):
    return Snapshot(
        time_s, round, CLUSTER, FrozenMap({JobId(each.id): each for each in jobs}), kinds=FrozenMap(kinds or {})
    )


class Reader:
    """A roster that plans by kinds, as castor's."""

    def __init__(self):
        self.kinds, self.register = Kinds(), Register()
        self.roster = Roster("gpu", DEFAULT_BATCH, self.kinds.on("gpu"))

    def goodput(self, snapshot):
        """{job: its goodput on 1, 2 … 16 GPUs, on as few nodes as can be}"""
        moment = self.register.read(self.kinds.filled_in(snapshot))
        self.kinds.read(moment)
        facts = self.roster.read(moment, np.arange(len(moment)))
        columns = self.roster.columns(facts, np.full(len(facts), 16))
        found = {}
        for index, job_id in enumerate(columns.job_ids):
            table = columns.goodput[columns.first[index] : columns.first[index + 1]].reshape(columns.num_classes, -1)
            found[job_id] = np.where(np.arange(17) <= 4, table[0], table[-1])[1:]
        return found


def test_only_jobs_of_a_kind_are_planned_by_what_was_measured_of_it():
    jobs = [
        running("fast", "a"),
        running("slow", "b", measured([(1, 1)], 3.0), 1),
        running("other", "c", measured([(1, 1)], 5.0), 2),
        running("none", None, sequence=3),
    ]
    kinds = {"a": ended(measured()), "b": ended(measured(factor=3.0)), "unused": ended(measured(factor=9.0))}
    alone, told = Reader().goodput(at(jobs)), Reader().goodput(at(jobs, kinds))
    np.testing.assert_allclose(told["fast"], 3.0 * told["slow"], rtol=0.02)
    np.testing.assert_array_equal(told["none"], alone["none"])
    np.testing.assert_array_equal(told["other"], alone["other"])
    assert not np.allclose(told["fast"], told["none"], rtol=0.1)


def test_a_job_that_is_slower_than_its_kind_everywhere_is_predicted_so_where_it_has_not_run():
    jobs = [running("usual", "a"), running("slow", "a", measured(PLACES[:2], 2.0), 1)]
    found = Reader().goodput(at(jobs, {"a": ended(measured(passes=1000))}))
    np.testing.assert_allclose(found["usual"], 2.0 * found["slow"], rtol=0.03)


def test_a_job_that_differs_from_its_kind_is_planned_by_its_own_fit():
    strange = measured(PLACES[:3], lambda num_gpus: num_gpus**2)
    jobs = [running("usual", "a"), running("strange", "a", strange, 1), running("none", None, sequence=2)]
    found = Reader().goodput(at(jobs, {"a": ended(measured(passes=1000))}))
    np.testing.assert_allclose(found["strange"], found["none"])
    assert not np.allclose(found["usual"], found["none"], rtol=0.1)


def test_what_one_job_measures_while_it_runs_tells_about_the_others_in_the_next_round():
    reader, one, two = Reader(), running("one", "a"), running("two", "a", sequence=1)
    before = reader.goodput(at([one, two]))["two"]
    fits = FrozenMap({"gpu": replace(one.model.throughput["gpu"], max_gpus_observed=16)})
    slow_together = measured(factor=lambda num_gpus: 4.0 if num_gpus > 1 else 1.0)
    one = replace(one, model=replace(one.model, throughput=fits), profile=slow_together)
    after = reader.goodput(at([one, two]))["two"]
    assert (after[1:] < 0.5 * before[1:]).all()


def test_a_job_that_never_ran_is_foreseen_from_those_of_its_kind_that_have_ended():
    young = job("young", application="a")
    reader = Reader()
    assert not reader.goodput(at([young]))["young"].any()
    assert not Reader().goodput(at([young], {"b": ended(measured())}))["young"].any()
    snapshot = at([young], {"a": ended(measured())})
    filled = reader.kinds.filled_in(snapshot)
    assert filled.jobs["young"].model.progress.total == pytest.approx(1e6 / LIMITS.initial_batch_size)
    assert reader.kinds.filled_in(snapshot).jobs["young"] is filled.jobs["young"]
    assert reader.goodput(snapshot)["young"].all()


def test_what_was_noted_is_not_noted_again(monkeypatch):
    noted = []
    reader, kinds = Reader(), {"a": ended(measured()), "b": ended(measured(factor=2.0))}
    monkeypatch.setattr(type(reader.kinds.on("gpu")), "note", lambda self, number, seen: noted.append(number))
    jobs = [running("one", "a")]
    reader.goodput(at(jobs, kinds))
    assert len(noted) == 3
    reader.goodput(at(jobs, kinds))
    assert len(noted) == 3
    reader.goodput(at(jobs, {**kinds, "b": ended(measured(factor=3.0))}))
    assert len(noted) == 4


def test_kinds_without_jobs_are_forgotten_unless_the_registry_has_them():
    reader = Reader()
    reader.goodput(at([running("one", "a"), running("two", "b", sequence=1)]))
    pools = reader.kinds.on("gpu")._pools
    assert len(pools) == 2
    reader.goodput(at([running("one", "a")]))
    assert len(pools) == 1
    reader.goodput(at([], {"a": ended(measured())}))
    assert len(pools) == 1


def test_a_fit_of_another_model_is_not_replaced():
    one = running("one", "a")
    fits = FrozenMap({"gpu": replace(one.model.throughput["gpu"], model="racks")})
    racks = replace(one, model=replace(one.model, throughput=fits))
    kinds, register = Kinds(), Register()
    moment = register.read(at([racks], {"a": ended(measured())}))
    kinds.read(moment)
    kinds.on("gpu").versions(moment, np.arange(1))
    assert kinds.on("gpu")._believed == {}


def many(application):
    return [running(f"job-{index}", application, sequence=index, total=1e3 * (index + 1)) for index in range(4)]


def plans(policy, snapshots):
    return [policy.plan(each, seed=1) for each in snapshots]


def test_plans_are_the_same_again_and_without_kinds_the_same_as_without_the_registry():
    kinds = {"a": ended(measured())}
    rounds = [at(many("a"), kinds), at([*many("a"), job("young", 9, application="a")], kinds, 660.0, 1)]
    told = plans(make("castor"), rounds)
    assert told == plans(make("castor"), rounds)
    untold = plans(make("castor", {"registry": False}), rounds)
    assert told != untold
    rounds = [at(many(None)), at([*many(None), job("young", 9)], None, 660.0, 1)]
    assert plans(make("castor"), rounds) == plans(make("castor", {"registry": False}), rounds)


def test_without_the_registry_nothing_of_it_is_looked_at():
    rounds = [at(many("a")), at(many("a"), {"a": ended(measured())}, 660.0, 1)]
    without = [replace(each, kinds=FrozenMap()) for each in rounds]
    policy = {"registry": False}
    assert plans(make("castor", policy), rounds) == plans(make("castor", policy), without)


def test_corrected_models_do_not_pile_up():
    reader = Reader()
    for passes in range(1, 8):
        reader.goodput(at([running("one", "a")], {"a": ended(measured(passes=passes, factor=1.0 + passes))}))
    assert reader.roster._models == [PAPER]
    assert len(reader.roster._arena) == 1
    assert isinstance(next(iter(reader.roster._built.values())).model.model, Corrected)
