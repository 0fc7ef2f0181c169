from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from pollux.core import BatchLimits, FrozenMap, GradientStats, JobModel, Shape, ThroughputFit
from pollux.goodput import DEFAULT_BATCH, PAPER, PUBLISHED_BATCH, RACKS, GoodputModel, ThroughputModel, throughput_model
from pollux.policies.pollux import speedups as room
from pollux.policies.pollux.speedups import Speedups, spreads_known_to
from pollux.testing.snapshots import LIMITS
from pollux.testing.snapshots import job as new_job

THETAS = {
    "paper": (0.02, 0.001, 0.01, 0.001, 0.05, 0.002, 1.5),
    "racks": (0.02, 0.001, 0.01, 0.001, 0.05, 0.002, 0.2, 0.004, 1.5),
    "my_models:BY_NODES": (0.02, 0.001, 0.01),
    "my_models:BY_RACKS": (0.02, 0.001, 0.01),
}

FAIR = Shape(3)


class _Own(ThroughputModel):
    """A model of the user's own: every further node (or rack) costs the same."""

    parameters = ("start", "per_example", "per_step_apart")
    upper = (np.inf, np.inf, np.inf)

    def __init__(self, name: str, by_racks: bool) -> None:
        self.name, self._by_racks = name, by_racks

    def level(self, N, R):
        return R if self._by_racks else N

    def t_grad(self, theta, m):
        return theta[0] + theta[1] * m

    def t_step(self, theta, K, level, m):
        return self.t_grad(theta, m) + theta[2] * (level - 1)

    def starts(self, seen):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def my_models(monkeypatch):
    module = ModuleType("my_models")
    module.BY_NODES, module.BY_RACKS = _Own("my_models:BY_NODES", False), _Own("my_models:BY_RACKS", True)
    monkeypatch.setitem(sys.modules, "my_models", module)
    return module


def fit(model: str = "paper", **facts) -> ThroughputFit:
    names = throughput_model(model).parameters
    return ThroughputFit(model, FrozenMap(zip(names, THETAS[model], strict=True)), **facts)


def job(name: str = "a", model: str | None = "paper", noise: float = 10.0, box: BatchLimits = LIMITS, **spec):
    """A job that was fitted with that throughput model; None: not yet."""
    known = None
    if model is not None:
        known = JobModel(box, GradientStats(1.0, noise), FrozenMap({"gpu": fit(model)}))
    return replace(new_job(name, **spec), model=known)


def table(found: Speedups, *jobs, most: int = 12, nodes: int = 4, racks: int = 2, largest: int = 4, fair=FAIR):
    """Speedups and the classes of spread that they are for."""
    models = found.prepare(jobs)
    spreads = spreads_known_to(frozenset(model.model for model in models if model), nodes, racks)
    return found.table(jobs, np.full(len(jobs), most), spreads, largest, fair), spreads


def fresh(*jobs, options=DEFAULT_BATCH, **kwargs):
    return table(Speedups("gpu", options), *jobs, **kwargs)


def placements(nodes: int, racks: int, largest: int, most: int):
    for num_nodes in range(1, nodes + 1):
        for num_racks in range(1, min(num_nodes, racks) + 1):
            for num_gpus in range(num_nodes, min(num_nodes * largest, most) + 1):
                yield Shape(num_gpus, num_nodes, num_racks)


@pytest.fixture
def calls(monkeypatch):
    """How many jobs each call of `tables` was about."""
    counted: list[int] = []

    def counting(models, shapes):
        counted.append(len(models))
        return tables(models, shapes)

    tables = room.tables
    monkeypatch.setattr(room, "tables", counting)
    return counted


class TestSpreads:
    @pytest.mark.parametrize(("models", "nodes"), [([], (1,)), ([PAPER], (1, 2)), ([RACKS], (1, 2, 2))])
    def test_are_what_the_models_tell_apart(self, models, nodes):
        assert spreads_known_to(frozenset(models), 4, 2).nodes == nodes

    def test_of_a_single_node_are_one(self):
        assert spreads_known_to(frozenset([PAPER, RACKS]), 1, 1).nodes == (1,)

    def test_number_classes_by_nodes_and_racks(self):
        spreads = spreads_known_to(frozenset([RACKS]), 3, 2)
        assert spreads.of[1:, 1:].tolist() == [[0, 0], [1, 2], [1, 2]], "one node cannot be in two racks"
        assert (spreads.nodes, spreads.racks) == ((1, 2, 2), (1, 1, 2))

    def test_of_several_models_are_fine_enough_for_all(self, my_models):
        spreads = spreads_known_to(frozenset([PAPER, RACKS, my_models.BY_NODES]), 3, 2)
        assert spreads.of[1:, 1:].tolist() == [[0, 0], [1, 2], [3, 4]]

    def test_span_as_many_nodes_as_a_model_does_not_tell_apart(self, my_models):
        assert spreads_known_to(frozenset([my_models.BY_RACKS]), 5, 2).most_nodes == (5, 5)
        assert spreads_known_to(frozenset([PAPER]), 5, 2).most_nodes == (1, 5)

    def test_are_the_same_for_equal_questions(self):
        assert spreads_known_to(frozenset([PAPER]), 4, 2) is spreads_known_to(frozenset([PAPER]), 4, 2)


class TestTable:
    @pytest.mark.parametrize("options", [DEFAULT_BATCH, PUBLISHED_BATCH])
    @pytest.mark.parametrize("model", THETAS)
    @pytest.mark.parametrize("fair", [Shape(1), Shape(3), Shape(6, 2), Shape(12, 3, 2)])
    def test_is_the_best_goodput_over_that_of_the_fair_share(self, model, fair, options):
        jobs = job("a", model), job("b", model, noise=1000.0, box=BatchLimits(64, 512, 8, 64))
        found, spreads = fresh(*jobs, fair=fair, options=options)
        for row, each in enumerate(jobs):
            goodput = GoodputModel.of(each.model, "gpu", options)
            for shape in placements(4, 2, 4, 12):
                spread = spreads.of[shape.num_nodes, shape.num_racks]
                expected = goodput.best(shape).goodput / goodput.best(fair).goodput
                assert found[row, spread, shape.num_gpus] == pytest.approx(expected, rel=1e-9), shape
        assert (found[:, :, 0] == 0).all()

    def test_of_jobs_with_different_models_together(self):
        jobs = [job(name, model) for name, model in zip("abcd", THETAS, strict=True)]
        found, spreads = fresh(*jobs)
        for row, each in enumerate(jobs):
            goodput = GoodputModel.of(each.model, "gpu")
            for shape in placements(4, 2, 4, 12):
                expected = goodput.best(shape).goodput / goodput.best(Shape(3)).goodput
                spread = spreads.of[shape.num_nodes, shape.num_racks]
                assert found[row, spread, shape.num_gpus] == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize(
        "known", [None, JobModel(LIMITS, throughput=FrozenMap({"t4": ThroughputFit("x", FrozenMap())}))]
    )
    def test_jobs_without_a_model_of_these_gpus_scale_perfectly(self, known):
        found, _ = fresh(replace(job(), model=known), job("b"))
        for spread in found[0]:
            np.testing.assert_allclose(spread, np.arange(13) / 3)

    def test_a_job_that_fits_nowhere_scales_perfectly_too(self):
        found, _ = fresh(job(box=BatchLimits(12, 13, 7, 11)))
        np.testing.assert_allclose(found[0, 0], np.arange(13) / 3)

    def test_is_nothing_where_no_batch_size_fits(self):
        found, _ = fresh(job(box=BatchLimits(64, 66, 16, 64)))
        assert (found[0, 1, 5:] == 0).all()
        assert (found[0, 0, 1:5] > 0).all()

    def test_the_fair_share_of_a_job_that_cannot_use_it_is_what_it_can_use(self):
        found, _ = fresh(job(box=BatchLimits(64, 66, 16, 64)), fair=Shape(8, 2))
        assert found[0, 1, 4] == pytest.approx(1.0)

    def test_unknown_gradients_count_as_fully_efficient(self):
        blind = job()
        blind = replace(blind, model=replace(blind.model, gradient=None))
        certain = job(noise=1e12)
        np.testing.assert_allclose(fresh(blind)[0], fresh(certain)[0], rtol=1e-6)

    def test_of_no_jobs(self):
        assert fresh()[0].shape == (0, 1, 1)


class TestFixedBatch:
    def throughput(self, shape: Shape, batch_size: int) -> float:
        """Of the smallest batch of equal shares from there on, with the fewest passes."""
        m = -(-batch_size // shape.num_gpus)
        passes = -(-m // LIMITS.max_per_gpu_batch_size)
        return float(GoodputModel.of(job().model, "gpu").throughput(shape, -(-m // passes), passes - 1))

    @pytest.mark.parametrize(("spec", "batch_size"), [({"requested_batch_size": 256}, 256), ({"limits": LIMITS}, 128)])
    def test_only_throughput_counts_and_the_batch_stays(self, spec, batch_size):
        found, _ = fresh(job(fixed_batch=True, **spec), fair=Shape(2))
        for shape in [Shape(1), Shape(2), Shape(4), Shape(8, 2)]:
            expected = self.throughput(shape, batch_size) / self.throughput(Shape(2), batch_size)
            assert found[0, shape.num_nodes - 1, shape.num_gpus] == pytest.approx(expected)

    def test_the_noise_does_not_matter(self):
        first, second = (job(noise=noise, fixed_batch=True, limits=LIMITS) for noise in (1.0, 1000.0))
        np.testing.assert_array_equal(fresh(first)[0], fresh(second)[0])

    def test_even_above_the_largest_batch_of_the_model(self):
        assert fresh(job(fixed_batch=True, requested_batch_size=8192))[0][0, 0, 1] > 0


class TestMemory:
    def test_unchanged_jobs_are_not_looked_at_again(self, calls):
        found, jobs = Speedups("gpu", DEFAULT_BATCH), [job("a"), job("b")]
        first, _ = table(found, *jobs)
        again, _ = table(found, *jobs)
        other, _ = table(found, jobs[1], jobs[0], fair=Shape(1))
        assert calls == [2]
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(other, fresh(jobs[1], jobs[0], fair=Shape(1))[0])

    @pytest.mark.parametrize(
        "change",
        [
            lambda a: replace(a, model=replace(a.model, gradient=GradientStats(1.0, 50.0))),
            lambda a: replace(a, model=replace(a.model, gradient=None)),
            lambda a: replace(a, model=replace(a.model, limits=BatchLimits(64, 512, 8, 64))),
            lambda a: replace(a, model=replace(a.model, throughput=FrozenMap({"gpu": fit(max_gpus_observed=3)}))),
            lambda a: replace(a, spec=replace(a.spec, fixed_batch=True, requested_batch_size=256)),
        ],
    )
    def test_those_who_changed_are(self, calls, change):
        found = Speedups("gpu", DEFAULT_BATCH)
        before, jobs = (job("a"), job("b")), (change(job("a")), job("b"))
        table(found, *before)
        remembered, _ = table(found, *jobs)
        assert calls == [2, 1]
        np.testing.assert_array_equal(remembered, fresh(*jobs)[0])

    def test_new_gradients_change_nothing_for_a_fixed_batch(self, calls):
        found = Speedups("gpu", DEFAULT_BATCH)
        for noise in (1.0, 2.0, 3.0):
            table(found, job(noise=noise, fixed_batch=True, limits=LIMITS))
        assert calls == [1]

    def test_tables_grow_with_the_job_in_powers_of_two(self, calls):
        found = Speedups("gpu", DEFAULT_BATCH)
        for most in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 8):
            np.testing.assert_array_equal(table(found, job(), most=most)[0], fresh(job(), most=most)[0])
        assert len(calls) == 12 + len([1, 2, 4, 8, 16])

    def test_jobs_that_are_gone_are_forgotten(self, calls):
        found = Speedups("gpu", DEFAULT_BATCH)
        table(found, job("a"))
        table(found, job("b"))
        table(found, job("a"))
        assert calls == [1, 1, 1]

    def test_other_spreads_need_other_tables(self, calls):
        found, jobs = Speedups("gpu", DEFAULT_BATCH), (job("a"), job("b", "racks"))
        table(found, job("a"))
        np.testing.assert_array_equal(table(found, *jobs)[0], fresh(*jobs)[0])
        assert calls[:2] == [1, 2]

    def test_larger_nodes_need_larger_tables(self):
        found = Speedups("gpu", DEFAULT_BATCH)
        table(found, job(), largest=4)
        np.testing.assert_array_equal(table(found, job(), largest=8)[0], fresh(job(), largest=8)[0])

    def test_types_of_gpus_do_not_know_each_other(self):
        first = job()
        both = FrozenMap({"gpu": fit(), "t4": fit("racks")})
        first = replace(first, model=replace(first.model, throughput=both))
        t4, _ = table(Speedups("t4", DEFAULT_BATCH), first)
        assert t4.shape[1] == 3
        assert fresh(first)[0].shape[1] == 2
