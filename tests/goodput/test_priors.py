"""What a fit believes of what it has not seen: ours, and the table of policies.md A.4 as the artifact has it."""

from __future__ import annotations

import numpy as np
import pytest

from pollux.goodput import PAPER, RACKS, ThetaSys, fit
from pollux.goodput.numerics import FLOOR
from pollux.goodput.published import published_procedure

from .strategies import observe, typical_keys

THETA = ThetaSys(0.1, 0.002, 0.05, 0.004, 0.2, 0.01, 1.8)
RACK_THETA = (*THETA[:6], 0.7, 0.03, 1.8)
ONE_GPU = [(1, 1, 1, 32), (1, 1, 1, 64)]
LOCAL = [*ONE_GPU, (2, 1, 1, 32), (4, 1, 1, 64), (8, 1, 1, 32)]
NODES = [(2, 2, 1, 32), (4, 2, 1, 64), (8, 4, 1, 32), (16, 4, 1, 32)]
RACKS_SEEN = [(4, 4, 2, 32), (8, 4, 2, 64), (16, 8, 4, 32)]


def fitted(keys, model=PAPER, theta=THETA):
    found = fit(observe(model, theta, keys), model)
    return found, dict(zip(model.parameters, found.theta, strict=True))


def test_with_everything_seen_nothing_is_a_prior():
    found, theta = fitted([*LOCAL, *NODES])
    assert found.priors == ()
    assert all(theta[name] > 1e-4 for name in PAPER.parameters)


def test_of_one_batch_size_half_of_the_time_is_taken_as_constant():
    seen = observe(PAPER, THETA, [(1, 1, 1, 50), (4, 1, 1, 50), (8, 2, 1, 50), (3, 2, 1, 50)], 0.1)
    found = fit(seen)
    assert found.theta[0] == seen.t_grad.mean() / 2
    assert found.priors == ("alpha_grad",)
    assert PAPER.t_grad(found.theta, 50) == pytest.approx(0.2, rel=0.15)


def test_never_on_two_nodes_they_cost_a_tenth_more_than_one():
    found, theta = fitted(LOCAL)
    assert found.priors == ("alpha_node", "beta_node")
    assert theta["alpha_node"] == pytest.approx(1.1 * theta["alpha_local"], rel=1e-12)
    assert theta["beta_node"] == pytest.approx(1.1 * theta["beta_local"], rel=1e-12)
    assert theta["alpha_local"] > 0.01


def test_never_within_one_node_that_is_free():
    found, theta = fitted([*ONE_GPU, *NODES])
    assert found.priors == ("alpha_local", "beta_local")
    assert theta["alpha_local"] == theta["beta_local"] == FLOOR
    assert theta["alpha_node"] > 0.01


def test_never_on_more_than_two_gpus_growth_is_free():
    found, theta = fitted([*ONE_GPU, (2, 1, 1, 32), (2, 2, 1, 64)])
    assert found.priors == ("beta_local", "beta_node")
    assert theta["beta_local"] == FLOOR
    assert theta["beta_node"] == pytest.approx(1.1 * FLOOR, rel=1e-12)
    assert min(theta["alpha_local"], theta["alpha_node"]) > 0.01


def test_never_on_more_than_two_gpus_nor_two_nodes_both_rules_hold():
    found, theta = fitted([*ONE_GPU, (2, 1, 1, 32)])
    assert set(found.priors) == {"beta_local", "alpha_node", "beta_node"}
    assert theta["beta_local"] == FLOOR
    assert theta["alpha_node"] == pytest.approx(1.1 * theta["alpha_local"], rel=1e-12)
    assert theta["beta_node"] == pytest.approx(1.1 * FLOOR, rel=1e-12)


def test_growth_is_believed_level_by_level():
    found, theta = fitted([*LOCAL, (2, 2, 1, 32), (2, 2, 1, 64)])
    assert found.priors == ("beta_node",)
    assert theta["alpha_node"] == pytest.approx(0.2, rel=0.1)
    assert theta["beta_node"] == pytest.approx(1.1 * theta["beta_local"], rel=1e-12)
    found, theta = fitted([*ONE_GPU, (2, 1, 1, 32), *NODES])
    assert found.priors == ("beta_local",)
    assert theta["beta_local"] == FLOOR


def test_never_on_two_gpus_all_communication_is_free_and_nothing_overlaps():
    found, theta = fitted(ONE_GPU)
    assert set(found.priors) == {"alpha_local", "beta_local", "alpha_node", "beta_node", "gamma"}
    assert theta["alpha_local"] == theta["beta_local"] == FLOOR
    assert theta["alpha_node"] == theta["beta_node"] == pytest.approx(1.1 * FLOOR, rel=1e-12)
    assert theta["gamma"] == 1.0


def test_a_single_pass_on_one_gpu_leaves_one_parameter_to_fit():
    found, theta = fitted([(1, 1, 1, 50)])
    assert set(PAPER.parameters) - set(found.priors) == {"beta_grad"}
    assert theta["alpha_grad"] == pytest.approx(0.1)
    assert theta["beta_grad"] == pytest.approx(0.1 / 50, rel=0.01)


def test_two_nodes_once_seen_may_be_cheaper_than_one():
    fast_network = THETA._replace(alpha_node=0.02, beta_node=0.001)
    _, theta = fitted([*LOCAL, *NODES], theta=fast_network)
    assert theta["alpha_node"] < theta["alpha_local"]


def test_never_across_racks_they_cost_a_tenth_more_than_nodes():
    found, theta = fitted([*LOCAL, *NODES], RACKS, RACK_THETA)
    assert found.priors == ("alpha_rack", "beta_rack")
    assert theta["alpha_rack"] == pytest.approx(1.1 * theta["alpha_node"], rel=1e-12)
    assert theta["beta_rack"] == pytest.approx(1.1 * theta["beta_node"], rel=1e-12)


def test_never_on_two_nodes_racks_cost_a_tenth_more_than_the_nodes_are_believed_to():
    found, theta = fitted(LOCAL, RACKS, RACK_THETA)
    assert set(found.priors) == {"alpha_node", "beta_node", "alpha_rack", "beta_rack"}
    assert theta["alpha_rack"] == pytest.approx(1.21 * theta["alpha_local"], rel=1e-12)
    assert theta["beta_rack"] == pytest.approx(1.21 * theta["beta_local"], rel=1e-12)


def test_across_racks_but_never_otherwise_the_narrower_levels_are_priors():
    found, theta = fitted([*ONE_GPU, *RACKS_SEEN], RACKS, RACK_THETA)
    assert set(found.priors) == {"alpha_local", "beta_local", "alpha_node", "beta_node"}
    assert theta["alpha_rack"] > 0.1


@pytest.mark.parametrize("model", [PAPER, RACKS], ids=["paper", "racks"])
def test_a_wider_spread_that_was_never_seen_is_never_believed_to_be_faster(model):
    rng = np.random.default_rng(8)
    for _ in range(10):
        keys = [key for key in typical_keys(rng, 15) if key[1] == 1]
        found = fit(observe(PAPER, THETA, keys, 0.1, int(rng.integers(1000))), model)
        K = np.arange(2, 65)
        local, wider = model.t_sync(found.theta, K, 0), model.t_sync(found.theta, K, model.num_levels - 1)
        assert (wider >= 1.1 * local * (1 - 1e-12)).all()


A4 = {
    "one batch size": ([(1, 1, 1, 50), (4, 1, 1, 50), (8, 2, 1, 50)], {"alpha_grad"}),
    "never on two nodes": (LOCAL, {"alpha_node", "beta_node"}),
    "never within one node": ([*ONE_GPU, *NODES], {"alpha_local", "beta_local"}),
    "never on more than two GPUs": ([*ONE_GPU, (2, 1, 1, 32), (2, 2, 1, 64)], {"beta_local", "beta_node"}),
    "growth seen at one level only": ([*LOCAL, (2, 2, 1, 32)], set()),
    "one GPU": (ONE_GPU, {"alpha_local", "beta_local", "alpha_node", "beta_node"}),
    "everything": ([*LOCAL, *NODES], set()),
}


@pytest.mark.parametrize(("keys", "frozen"), A4.values(), ids=A4)
def test_the_published_procedure_freezes_what_its_table_says(keys, frozen):
    seen = observe(PAPER, THETA, keys, 0.05)
    found = published_procedure(seen)
    theta = dict(zip(PAPER.parameters, found.theta, strict=True))
    assert set(found.priors) == frozen
    if "alpha_grad" in frozen:
        assert theta["alpha_grad"] == seen.t_grad.mean() / 2
    for name in frozen - {"alpha_grad"}:
        local = theta[name.replace("node", "local")]
        raised = "node" in name and (seen.N == 1).all()
        assert theta[name] == pytest.approx(max(FLOOR, 1.1 * local) if raised else FLOOR, rel=1e-12)
