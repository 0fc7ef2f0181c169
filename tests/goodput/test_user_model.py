"""A throughput model of the user's own: found by dotted path, fitted by SciPy, used wherever a built-in one is."""

from __future__ import annotations

import pickle
import sys
import textwrap

import numpy as np
import pytest

from pollux.core import BatchLimits, FrozenMap, GradientStats, JobModel, Shape
from pollux.errors import InvalidModel
from pollux.goodput import (
    PUBLISHED,
    Envelope,
    FitOptions,
    GoodputModel,
    Observations,
    Prior,
    ShapeSet,
    best,
    fit,
    tables,
    throughput_model,
)

SOURCE = '''
import numpy as np
from pollux.goodput import Prior, ThroughputModel


class TreeModel(ThroughputModel):
    """Compute in proportion to m; an all-reduce along a tree, whose every doubling of K costs the same. No overlap."""

    name = "my_models:TREE"
    parameters = ("start", "per_example", "per_doubling")
    upper = (np.inf, np.inf, np.inf)

    def level(self, N, R):
        return N * 0

    def t_grad(self, theta, m):
        return theta[0] + theta[1] * m

    def t_step(self, theta, K, level, m):
        return self.t_grad(theta, m) + theta[2] * np.log2(K)

    def starts(self, seen):
        t = float(seen.t_grad.min())
        return np.array([[t, t / seen.m[0], t]])

    def prior(self, seen):
        return Prior({2: 1e-8} if (seen.K == 1).all() else {})


TREE = TreeModel()
NOT_A_MODEL = 3.0
'''
THETA = (0.1, 0.002, 0.05)
BOX = BatchLimits(32, 2048, 8, 256)
GRADIENT = GradientStats(1.0, 20.0)


@pytest.fixture(scope="module", autouse=True)
def my_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_models.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    (folder / "broken_models.py").write_text("1 / 0\n", encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for name in ("my_models", "broken_models"):
        sys.modules.pop(name, None)


@pytest.fixture
def tree():
    return throughput_model("my_models:TREE")


def observed(tree, keys, noise=0.0) -> Observations:
    rng = np.random.default_rng(0)
    rows = []
    for K, m in keys:
        factor = np.exp(noise * rng.standard_normal(2))
        rows.append((K, 1, 1, m, tree.t_grad(THETA, m) * factor[0], tree.t_step(THETA, K, 0, m) * factor[1]))
    return Observations.from_rows(rows)


KEYS = [(1, 16), (2, 32), (4, 64), (8, 16), (16, 100)]


def test_a_users_model_is_found_by_its_dotted_path_as_object_or_class(tree):
    assert tree.name == "my_models:TREE"
    assert type(throughput_model("my_models:TreeModel")) is type(tree)


def test_a_class_named_by_its_path_is_one_model_however_often_it_is_looked_up():
    assert throughput_model("my_models:TreeModel") is throughput_model("my_models:TreeModel")


def test_a_users_model_is_fitted_to_what_it_describes(tree):
    found = fit(observed(tree, KEYS), tree)
    np.testing.assert_allclose(found.theta, THETA, rtol=1e-3)
    assert found.converged
    assert found.priors == ()
    assert found.mean_relative_error < 1e-3


def test_a_users_model_can_be_fitted_warm_and_holds_its_priors(tree):
    first = fit(observed(tree, [(1, 16), (1, 64)]), tree)
    assert first.priors == ("per_doubling",)
    assert first.theta[2] == 1e-8
    second = fit(observed(tree, KEYS, 0.02), tree, warm=first)
    np.testing.assert_allclose(second.theta, THETA, rtol=0.1)


def test_a_users_model_whose_every_parameter_is_held_needs_no_fit(tree, monkeypatch):
    monkeypatch.setattr(type(tree), "prior", lambda self, seen: Prior(dict(enumerate(THETA))))
    found = fit(observed(tree, KEYS), tree)
    assert found.theta == THETA
    assert found.mean_relative_error < 1e-9


def test_one_odd_measurement_does_not_bend_a_users_model(tree):
    rows = [(K, 1, 1, m, tree.t_grad(THETA, m), tree.t_step(THETA, K, 0, m)) for K, m in KEYS * 2]
    rows[3] = (*rows[3][:5], rows[3][5] * 10)
    np.testing.assert_allclose(fit(Observations.from_rows(rows), tree).theta, THETA, rtol=0.1)


def test_best_and_tables_work_with_a_users_model(tree):
    job = GoodputModel(tree, THETA, GRADIENT, BOX)
    places = ShapeSet.of([Shape(1), Shape(4, 2), Shape(8, 8), Shape(512, 64)])
    found = tables([job], places)
    envelope = Envelope([job], places).tables([GRADIENT])
    m = np.arange(8.0, 257.0)
    for i, shape in enumerate(places):
        one = best(tree, THETA, shape, GRADIENT, BOX)
        assert found.goodput[0, i] == pytest.approx(one.goodput, rel=1e-9)
        assert envelope.goodput[0, i] == pytest.approx(one.goodput, rel=1e-9)
        M = shape.num_gpus * m
        fits = (M >= 32) & (M <= 2048)
        if fits.any():
            assert one.goodput >= 0.995 * job.goodput(shape, m[fits]).max()
        else:
            assert one.goodput == 0.0


def test_a_users_model_survives_the_report_and_the_way_to_another_process(tree):
    found = fit(observed(tree, KEYS), tree)
    job = GoodputModel.of(JobModel(BOX, GRADIENT, FrozenMap({"t4": found.summary()})), "t4")
    assert (job.model, job.theta) == (tree, found.theta)
    assert pickle.loads(pickle.dumps(job)).best(Shape(4)) == job.best(Shape(4))


def test_the_published_loss_is_refused_for_a_users_model_with_what_to_do(tree):
    with pytest.raises(InvalidModel, match="my_models:TREE") as caught:
        fit(observed(tree, KEYS), tree, options=PUBLISHED)
    assert (caught.value.field, caught.value.value) == ("FitOptions.delta", 0.0)
    assert "delta > 0" in caught.value.fix
    fit(observed(tree, KEYS), tree, options=FitOptions(delta=1.0))


@pytest.mark.parametrize(
    "name", ["my_models:MISSING", "no_such_module:TREE", "my_models:NOT_A_MODEL", ":TREE", ".x:TREE", "broken_models:X"]
)
def test_a_path_that_leads_to_no_model_is_refused_by_name(name):
    with pytest.raises(InvalidModel) as caught:
        throughput_model(name)
    assert (caught.value.field, caught.value.value) == ("throughput model", name)
    assert caught.value.fix
