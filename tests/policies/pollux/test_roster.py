"""Jobs as columns: the same as asking each job, whatever is remembered from earlier rounds."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import fields, replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.core import (
    BatchLimits,
    Cluster,
    FrozenMap,
    GradientStats,
    JobModel,
    Node,
    NodeId,
    Progress,
    Shape,
    Snapshot,
    ThroughputFit,
)
from pollux.goodput import DEFAULT_BATCH, PAPER, PUBLISHED_BATCH, RACKS, GoodputModel, ThroughputModel, throughput_model
from pollux.goodput.efficiency import shares
from pollux.policies.packing import Free, by_arrival, hold_for, pinned
from pollux.policies.pollux.genetic.problem import Problem
from pollux.policies.pollux.gpu_types import by_gpu_type
from pollux.policies.pollux.moment import NO_LIMIT, Moment, Register
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.roster import Columns, Roster
from pollux.policies.pollux.solver.choices import Rows
from pollux.policies.pollux.spreads import spreads_known_to
from pollux.policies.pollux.values import Question, choices_of
from pollux.testing.snapshots import LIMITS, snapshot, snapshots
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


def fit(model: str = "paper", slower: float = 1.0, **facts) -> ThroughputFit:
    names = throughput_model(model).parameters
    values = [THETAS[model][0] * slower, *THETAS[model][1:]]
    return ThroughputFit(model, FrozenMap(zip(names, values, strict=True)), **facts)


def job(name: str = "a", model: str | None = "paper", noise: float = 10.0, box: BatchLimits = LIMITS, **spec):
    """A job that was fitted with that throughput model; None: not yet."""
    known = None
    if model is not None:
        known = JobModel(box, GradientStats(1.0, noise), FrozenMap({"gpu": fit(model)}))
    return replace(new_job(name, **spec), model=known)


def cluster(nodes: int = 4, racks: int = 2, largest: int = 4) -> Cluster:
    label = [FrozenMap({"rack": f"r{index % racks}"}) for index in range(nodes)]
    return Cluster.of(*(Node(NodeId(f"n{index}"), largest, labels=label[index]) for index in range(nodes)))


class Remembering:
    """A register and a roster, and what they make of jobs: speedups [J, C, K + 1] over the fair share."""

    def __init__(self, gpu_type: str = "gpu", options=DEFAULT_BATCH) -> None:
        self.register, self.roster = Register(), Roster(gpu_type, options)

    def columns(self, *jobs, most: int = 12, **of_cluster) -> Columns:
        moment = self.register.read(snapshot(cluster(**of_cluster), *jobs))
        facts = self.roster.read(moment, np.arange(len(jobs)))
        return self.roster.columns(facts, np.full(len(jobs), most))

    def table(self, *jobs, fair: Shape = FAIR, **arguments):
        columns = self.columns(*jobs, **arguments)
        goodput = self.roster.goodput_on(columns, fair)
        factor, objective = np.ones(len(jobs)), Objective()
        question = Question(columns, fair, goodput, factor, objective, True)
        return Problem.of(question, None).speedup, columns.spreads


def fresh(*jobs, options=DEFAULT_BATCH, **arguments):
    return Remembering(options=options).table(*jobs, **arguments)


def placements(nodes: int, racks: int, largest: int, most: int):
    for num_nodes in range(1, nodes + 1):
        for num_racks in range(1, min(num_nodes, racks) + 1):
            for num_gpus in range(num_nodes, min(num_nodes * largest, most) + 1):
                yield Shape(num_gpus, num_nodes, num_racks)


@pytest.fixture
def built(monkeypatch):
    """How many blocks were built so far."""
    counted: list[int] = []

    def counting(seconds, *arguments):
        counted.extend([1] * len(seconds))
        return fill_blocks(seconds, *arguments)

    from pollux.goodput import envelope

    fill_blocks = envelope.fill_blocks
    monkeypatch.setattr(envelope, "fill_blocks", counting)
    return counted


class TestSpreads:
    @pytest.mark.parametrize(("models", "nodes"), [([], (1, 2)), ([PAPER], (1, 2)), ([RACKS], (1, 2, 2))])
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
        assert spreads_known_to(frozenset([my_models.BY_RACKS]), 5, 2).most_nodes == (1, 5, 5)
        assert spreads_known_to(frozenset([PAPER]), 5, 2).most_nodes == (1, 5)

    def test_are_the_same_for_equal_questions(self):
        assert spreads_known_to(frozenset([PAPER]), 4, 2) is spreads_known_to(frozenset([PAPER]), 4, 2)


class TestGoodput:
    @pytest.mark.parametrize("options", [DEFAULT_BATCH, PUBLISHED_BATCH])
    @pytest.mark.parametrize("model", THETAS)
    @pytest.mark.parametrize("fair", [Shape(1), Shape(3), Shape(6, 2), Shape(12, 3, 2), Shape(16, 4, 2), Shape(9)])
    def test_is_the_best_over_that_of_the_fair_share(self, model, fair, options):
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

    @pytest.mark.parametrize("most", [3, 12])
    def test_the_fair_share_of_a_job_that_cannot_use_it_is_what_it_can_use(self, most):
        together = Remembering().columns(job(box=BatchLimits(64, 66, 16, 64)), most=12).goodput
        remembering = Remembering()
        columns = remembering.columns(job(box=BatchLimits(64, 66, 16, 64)), most=most)
        (found,) = remembering.roster.goodput_on(columns, Shape(8, 2))
        assert found == pytest.approx(together.reshape(-1, 13)[1, 4])

    def test_unknown_gradients_count_as_fully_efficient(self):
        blind = job()
        blind = replace(blind, model=replace(blind.model, gradient=None))
        certain = job(noise=1e12)
        np.testing.assert_allclose(fresh(blind)[0], fresh(certain)[0], rtol=1e-6)

    def test_what_a_job_holds_has_its_goodput_too(self):
        held = {"n0": 2, "n2": 3, "n3": 1}
        columns = Remembering().columns(job("a", "racks", held=held), job("b"), most=2)
        goodput = GoodputModel.of(job("a", "racks").model, "gpu")
        assert columns.width.tolist() == [6, 2]
        assert columns.kept_goodput.tolist() == pytest.approx([goodput.best(Shape(6, 3, 2)).goodput, 0.0])


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
    def test_new_gradients_need_no_new_envelope(self, built):
        found = Remembering()
        for noise in (1.0, 20.0, 3.0):
            jobs = job("a", noise=noise), job("b", noise=2 * noise, box=BatchLimits(64, 512, 8, 64))
            np.testing.assert_array_equal(found.table(*jobs)[0], fresh(*jobs)[0])
        assert len(built) == 2 + 3 * 2, "two by the one that remembers"

    @pytest.mark.parametrize(
        "change",
        [
            lambda a: replace(a, model=replace(a.model, limits=BatchLimits(64, 512, 8, 64))),
            lambda a: replace(a, model=replace(a.model, throughput=FrozenMap({"gpu": fit(slower=2.0)}))),
            lambda a: replace(a, spec=replace(a.spec, fixed_batch=True, requested_batch_size=256)),
            lambda a: replace(a, model=None),
        ],
    )
    def test_what_changed_is_made_anew_and_nothing_else(self, built, change):
        found = Remembering()
        before, jobs = (job("a"), job("b", noise=3.0)), (change(job("a")), job("b", noise=3.0))
        found.table(*before)
        assert len(built) == 1, "they are alike"
        np.testing.assert_array_equal(found.table(*jobs)[0], fresh(*jobs)[0])
        np.testing.assert_array_equal(found.table(*before)[0], fresh(*before)[0])

    def test_a_fit_that_is_trusted_farther_is_the_same_model(self):
        found, before = Register(), job("a")
        known = before.model.throughput["gpu"]
        moments = []
        for observed in (known, replace(known, max_gpus_observed=known.max_gpus_observed + 5), fit(slower=2.0)):
            now = replace(before, model=replace(before.model, throughput=FrozenMap({"gpu": observed})))
            moments.append(found.read(snapshot(cluster(), now)))
        versions, models = ([int(getattr(each, name)[0]) for each in moments] for name in ("version", "model_version"))
        assert len(set(versions)) == 3
        assert models[0] == models[1] != models[2]
        assert moments[1].observed[0] == known.max_gpus_observed + 5

    def test_envelopes_grow_with_the_job(self, built):
        found = Remembering()
        for most in (1, 2, 3, 8, 9, 12, 8, 1):
            found.table(job(), most=most, fair=Shape(1))
        assert len(built) == 6
        np.testing.assert_array_equal(found.table(job(), most=12)[0], fresh(job(), most=12)[0])

    def test_jobs_that_are_gone_are_forgotten(self, built):
        found = Remembering()
        for name, box in ("a", LIMITS), ("b", BatchLimits(64, 512, 8, 64)), ("a", LIMITS):
            found.table(job(name, box=box))
        assert len(built) == 3

    def test_nodes_come_and_go_without_new_envelopes(self, built):
        found = Remembering()
        for nodes in (4, 5, 3, 4):
            found.table(job("a"), nodes=nodes)
        assert len(built) == 1

    def test_other_spreads_and_larger_nodes_need_others(self):
        found = Remembering()
        for jobs, largest in [([job("a")], 4), ([job("a"), job("b", "racks")], 4), ([job("a")], 8), ([job("a")], 2)]:
            np.testing.assert_array_equal(found.table(*jobs, largest=largest)[0], fresh(*jobs, largest=largest)[0])

    def test_types_of_gpus_do_not_know_each_other(self):
        first = job()
        both = FrozenMap({"gpu": fit(), "t4": fit("racks")})
        first = replace(first, model=replace(first.model, throughput=both))
        nodes = cluster()
        t4 = Cluster.of(*(replace(node, gpu_type="t4") for node in nodes))
        facts = Roster("t4", DEFAULT_BATCH).read(Register().read(snapshot(t4, first)), np.arange(1))
        assert facts.num_classes == 3
        assert fresh(first)[0].shape[1] == 2

    def test_many_rounds_take_no_more_memory_than_one(self):
        found, rng = Remembering(), np.random.default_rng(0)
        jobs = {name: job(name) for name in map(str, range(40))}
        sizes = []
        for _ in range(60):
            for name in rng.choice(list(jobs), 20).tolist():
                model = jobs[name].model
                slower = FrozenMap({"gpu": fit(slower=float(rng.uniform(1, 9)))})
                jobs[name] = replace(jobs[name], model=replace(model, throughput=slower))
            found.columns(*jobs.values())
            sizes.append(found.roster._arena.size)
        assert max(sizes) < 3 * sizes[10]


def varied(moment: Snapshot, seed: int) -> Snapshot:
    """The same with models of their own, some told again, some with other fits, gradients and progress."""
    rng = np.random.default_rng(seed)
    jobs = {}
    for each in moment.jobs.values():
        if each.model is not None:
            observed = int(rng.integers(0, 4))
            fits = {
                kind: fit(slower=float(rng.choice([1.0, 2.0])), max_gpus_observed=observed) for kind in ("a100", "t4")
            }
            each = replace(
                each,
                model=JobModel(
                    [LIMITS, BatchLimits(64, 128, 16, 64)][rng.integers(2)],
                    [None, GradientStats(1.0, float(rng.uniform(0.1, 9.0)))][rng.integers(2)],
                    FrozenMap(dict(list(fits.items())[: rng.integers(1, 3)])),
                    [None, Progress(3.0), Progress(3.0, 9.0)][rng.integers(3)],
                    [None, 7.0][rng.integers(2)],
                ),
                num_reallocations=int(rng.integers(3)),
            )
        jobs[each.id] = each
    return replace(moment, jobs=FrozenMap(jobs))


def holdings_slowly(moment: Snapshot):
    free = Free(moment.cluster)
    found = pinned(moment, free)
    keeping = frozenset(found)
    for each in by_arrival(moment.jobs.values()):
        if each.assigned and each.id not in keeping and hold_for(each, each.assigned, free, each.spec.gpu_type):
            found[each.id] = each.assigned
    return found, keeping


def by_type_slowly(moment: Snapshot, held) -> dict[str, set[str]]:
    free = Free(moment.cluster)
    groups: dict[str, set[str]] = {kind: set() for kind in free.by_type}
    undecided = []
    for each in by_arrival(moment.jobs.values()):
        kind = each.spec.gpu_type or (free.gpu_type(held[each.id]) if each.id in held else None)
        if kind is None:
            undecided.append(each)
        elif kind in groups:
            groups[kind].add(each.id)
    for each in undecided:
        room = {kind: free.most_on_one_node(kind) if each.spec.single_node else free.by_type[kind] for kind in groups}
        wide = [kind for kind in groups if room[kind] >= each.spec.gpu_bounds[0]]
        if wide:
            groups[max(wide, key=lambda kind: free.by_type[kind] / (1 + len(groups[kind])))].add(each.id)
    return groups


def check_moment(found: Moment, moment: Snapshot) -> None:
    held, keeping = holdings_slowly(moment)
    assert list(found.ids) == list(moment.jobs)
    starts = dict(zip(found.nodes, np.cumsum([0, *(len(nodes.ids) for nodes in found.nodes.values())]), strict=False))
    assert len(starts) == len(found.nodes)
    for position, each in enumerate(moment.jobs.values()):
        least, most = each.spec.gpu_bounds
        mine = held.get(each.id)
        assert (found.holdings[position] or None) == mine
        assert found.pinned[position] == (each.id in keeping)
        assert found.held_gpus[position] == (mine.num_gpus if mine else 0)
        if mine:
            nodes = list(found.nodes.values())[found.held_type[position]]
            begin, end = found.held.first[position : position + 2]
            pairs = zip(found.held.node[begin:end].tolist(), found.held.gpus[begin:end].tolist(), strict=True)
            assert {nodes.ids[node]: gpus for node, gpus in pairs} == dict(mine.gpus)
        assert found.least[position] == least
        assert found.owner_most[position] == (NO_LIMIT if most is None else most)
        assert found.attained_gpu_s[position] == each.attained_gpu_s_at(moment.time_s)
        assert found.age_s[position] == each.age_s(moment.time_s)
        assert found.ran_before[position] == (each.first_started_at_s is not None or bool(each.allocation))
        assert found.num_reallocations[position] == each.num_reallocations
        gradient = each.model.gradient if each.model else None
        assert found.noise[position] == (shares(gradient.sqr, gradient.var)[1] if gradient else 1.0)
        progress = each.model.progress if each.model else None
        np.testing.assert_equal(found.done[position], progress.done if progress else np.nan)
        np.testing.assert_equal(found.total[position], (progress.total if progress else None) or np.nan)
        np.testing.assert_equal(found.delay_s[position], (each.model.realloc_delay_s if each.model else None) or np.nan)


def assert_equal(one: Columns, other: Columns) -> None:
    for field in fields(Columns):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, Rows):
            mine, its = (np.concatenate([rows.first, rows.node, rows.gpus]) for rows in (mine, its))
        if isinstance(mine, np.ndarray) and field.name != "row":
            np.testing.assert_array_equal(mine, its, field.name)


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(snapshots(), st.integers(0, 99)), min_size=1, max_size=4))
def test_round_after_round_the_columns_are_those_of_each_job(rounds):
    register, rosters = Register(), {kind: Roster(kind, DEFAULT_BATCH) for kind in ("a100", "t4")}
    for drawn, seed in rounds:
        moment = varied(drawn, seed)
        found = register.read(moment)
        check_moment(found, moment)
        groups = by_gpu_type(found)
        ids = {kind: {found.ids[member] for member in members} for kind, members in groups.items()}
        assert ids == by_type_slowly(moment, holdings_slowly(moment)[0])
        for kind, members in groups.items():
            if members:
                facts = rosters[kind].read(found, np.array(members))
                columns = rosters[kind].columns(facts, facts.most(2 * facts.observed, 7), 2)
                new = Roster(kind, DEFAULT_BATCH)
                again = new.read(Register().read(moment), np.array(members))
                again = new.columns(again, again.most(2 * again.observed, 7), 2)
                assert_equal(columns, again)
                check_columns(columns, kind, moment)
                shape = Shape(5, 2)
                np.testing.assert_array_equal(rosters[kind].goodput_on(columns, shape), new.goodput_on(again, shape))


def check_columns(columns: Columns, kind: str, moment: Snapshot) -> None:
    order = sorted(columns.jobs, key=lambda each: each.sequence)
    found, keeping = holdings_slowly(moment)
    order.sort(key=lambda each: (each.id not in keeping, each.attained_gpu_s_at(moment.time_s), each.sequence))
    assert columns.jobs == order
    for index, each in enumerate(order):
        held = found.get(each.id)
        least, most = each.spec.gpu_bounds
        observed, limits = 0, [7, columns.nodes.largest if each.spec.single_node else columns.nodes.total]
        if most is not None:
            limits.append(most)
        model = None
        if each.model is not None:
            observed = max(one.max_gpus_observed for one in each.model.throughput.values())
            limits.append(max(each.model.limits.max_batch_size // each.model.limits.min_per_gpu_batch_size, least))
            if kind in each.model.throughput:
                model = GoodputModel.of(each.model, kind)
        assert columns.may_have[index] == min([max(2 * observed, held.num_gpus if held else 0, least), *limits])
        assert columns.most_nodes[index] == (1 if each.spec.single_node else 2)
        width = columns.width[index]
        begin, end = columns.first[index : index + 2]
        rows = columns.goodput[begin:end].reshape(columns.num_classes, width + 1)
        for cls in range(columns.num_classes):
            for K in range(width + 1):
                is_possible = cls + 1 <= K and (columns.nodes.largest if cls == 0 else columns.nodes.total) >= K
                best = model.best(Shape(K, cls + 1)).goodput if model and is_possible else 0.0
                assert rows[cls, K] == pytest.approx(best, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("p", [-10.0, -1.0, -0.5, 0.0, 0.5, 1.0])
def test_values_are_those_of_the_objective(p):
    jobs = [
        job("a", held={"n0": 2, "n1": 1}),
        job("b", min_gpus=2, max_gpus=5),
        job("c", None, single_node=True),
        job("d", held={"n2": 1}, preemptible=False),
        job("e", box=BatchLimits(64, 66, 16, 64)),
    ]
    remembering = Remembering()
    columns = remembering.columns(*jobs, most=6, nodes=3, racks=1)
    columns = replace(columns, may_have=np.minimum(columns.owner_most, 6))
    objective, fair = Objective(p, 0.25), Shape(2)
    factor = np.linspace(0.0, 1.0, len(jobs))
    goodput = remembering.roster.goodput_on(columns, fair)
    question = Question(columns, fair, goodput, factor, objective, True)
    choices, problem = choices_of(question), Problem.of(question, None)
    ids = [each.id for each in columns.jobs]
    for index, each in enumerate(columns.jobs):
        values = choices.value[choices.first[index] : choices.first[index + 1]].reshape(2, -1)
        for cls in range(2):
            for K in range(values.shape[1]):
                allowed = K == 0 or (each.spec.min_gpus <= K <= (each.spec.max_gpus or 6) and cls < K <= (4, 12)[cls])
                allowed &= cls == 0 or K == 0 or not each.spec.single_node
                expected = objective.values(problem.speedup[index, cls, K] * factor[index])
                expected = expected if allowed and each.spec.preemptible else -np.inf
                assert values[cls, K] == pytest.approx(expected, rel=1e-12), (each.id, cls, K)
    kept = objective.values(problem.speedups(problem.present))
    assert [float(each) for each in choices.keep] == pytest.approx(
        [kept[index] if name in "ad" else -np.inf for index, name in enumerate(ids)]
    )


def test_memory_is_linear_in_jobs():
    """A matrix of jobs and nodes would have 8,000 bytes a job here, one of jobs and GPUs 16,000 more."""
    nodes = Cluster.uniform(1000, 2)
    jobs = [
        job(f"{index:04}", sequence=index, held={f"node-{index:03}": 1} if index < 1000 else None)
        for index in range(2000)
    ]
    moment = snapshot(nodes, *jobs)
    register, roster = Register(), Roster("gpu", DEFAULT_BATCH)
    for measured in (False, True):
        if measured:
            tracemalloc.start()
        facts = roster.read(register.read(moment), np.arange(2000))
        columns = roster.columns(facts, facts.most(4 + 0 * facts.observed))
        choices_of(Question(columns, Shape(1), roster.goodput_on(columns, Shape(1)), np.ones(2000), Objective(), True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak / 2000 < 3000
