"""Times and throughput: vector 2 of policies.md section E, what holds for all parameters, and broadcasting."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import BatchLimits, GradientStats, Shape
from pollux.goodput import (
    PAPER,
    RACKS,
    GoodputModel,
    ThetaRacks,
    ThetaSys,
    iteration_time,
    t_grad,
    t_iter,
    t_sync,
    throughput,
    throughput_model,
)

from .strategies import gradients, limits, log_integers, rack_thetas, shapes, thetas

E2 = ThetaSys(0.05, 0.001, 0.0, 0.0, 0.1, 0.005, 2.0)
SLACK = 1.0 + 1e-9  # of rounding


def test_vector_2_times_throughput_and_goodput():
    assert t_grad(E2, 128) == pytest.approx(0.178, abs=1e-12)
    assert t_sync(E2, 8, 2) == pytest.approx(0.130, abs=1e-12)
    assert t_iter(E2, 8, 2, 128) == pytest.approx(0.22042, abs=5e-6)
    assert t_iter(E2, 8, 2, 128, 1) == pytest.approx(0.39842, abs=5e-6)
    assert throughput(PAPER, E2, 8, PAPER.level(2, 1), 128, 1) == pytest.approx(5140.3, abs=0.05)
    job = GoodputModel(PAPER, E2, GradientStats(128.0, 1000.0), BatchLimits(128, 4096, 1, 1024))  # φ = 1000
    assert job.goodput(Shape(8, 2), 128, 1) == pytest.approx(1902.3, abs=0.05)


def test_one_gpu_never_synchronises_and_two_pay_no_growth():
    theta = ThetaSys(0.1, 0.01, 0.2, 0.03, 0.5, 0.07, 1.0)
    assert t_sync(theta, 1, 1) == 0.0
    assert t_sync(theta, 2, 1) == 0.2
    assert t_sync(theta, 2, 2) == 0.5
    assert t_sync(theta, 4, 1) == pytest.approx(0.26)
    assert t_sync(theta, 4, 3) == pytest.approx(0.64)
    assert t_iter(theta, 1, 1, 10) == t_grad(theta, 10)


@given(thetas, shapes(), log_integers(1, 2000), log_integers(1, 2000), st.integers(0, 8))
def test_throughput_never_falls_with_the_per_gpu_batch_size(theta, shape, m, more, s):
    level = PAPER.level(shape.num_nodes, 1)
    before, after = (throughput(PAPER, theta, shape.num_gpus, level, size, s) for size in (m, m + more))
    assert 0.0 < before <= after * SLACK


@given(thetas, shapes(), log_integers(1, 2000))
def test_a_step_takes_at_least_its_longer_part_and_at_most_both(theta, shape, m):
    grad, sync = t_grad(theta, m), t_sync(theta, shape.num_gpus, shape.num_nodes)
    step = t_iter(theta, shape.num_gpus, shape.num_nodes, m)
    assert max(grad, sync) <= step * SLACK
    assert step <= (grad + sync) * SLACK
    if theta.gamma == 1.0:
        assert step == pytest.approx(grad + sync, rel=1e-12)


@given(thetas, shapes(), log_integers(1, 200), st.integers(1, 10), st.integers(2, 10))
def test_at_equal_total_batch_size_fewer_passes_are_never_slower(theta, shape, m, passes, factor):
    K, N = shape.num_gpus, shape.num_nodes
    few, many = t_iter(theta, K, N, m * factor, passes - 1), t_iter(theta, K, N, m, passes * factor - 1)
    assert few <= many * SLACK


@given(thetas, shapes(), gradients, limits(), log_integers(1, 10**4), st.integers(0, 8))
def test_goodput_is_at_most_throughput_and_equal_to_it_at_the_initial_batch_size(theta, shape, gradient, box, m, s):
    m = max(m, -(-box.initial_batch_size // (shape.num_gpus * (s + 1))))
    job = GoodputModel(PAPER, theta, gradient, box)
    M = shape.num_gpus * m * (s + 1)
    assert 0.0 < job.goodput(shape, m, s) <= job.throughput(shape, m, s) * SLACK
    assert 0.0 < job.efficiency(M) <= SLACK
    at_initial = dataclasses.replace(job, limits=dataclasses.replace(box, initial_batch_size=M, max_batch_size=M))
    assert at_initial.goodput(shape, m, s) == pytest.approx(job.throughput(shape, m, s), rel=1e-9)


@given(st.lists(thetas, min_size=1, max_size=4), st.lists(shapes(), min_size=1, max_size=6), st.integers(0, 3))
def test_many_jobs_and_shapes_at_once_give_what_each_gives_alone(jobs, places, s):
    theta = ThetaSys(*np.array(jobs).T[..., None])  # [J, 1] each
    K, N = np.array([(shape.num_gpus, shape.num_nodes) for shape in places]).T
    m = np.arange(3, 3 + len(places))
    level = PAPER.level(N, 1)
    together = iteration_time(PAPER, theta, K, level, m, s)
    rate = throughput(PAPER, theta, K, level, m, s)
    assert together.shape == rate.shape == (len(jobs), len(places))
    for j, job in enumerate(jobs):
        for i, shape in enumerate(places):
            one = PAPER.level(shape.num_nodes, 1)
            alone = iteration_time(PAPER, job, shape.num_gpus, one, int(m[i]), s)
            assert together[j, i] == pytest.approx(alone, rel=1e-12)
            assert rate[j, i] == pytest.approx(throughput(PAPER, job, shape.num_gpus, one, int(m[i]), s), rel=1e-12)


@given(rack_thetas, shapes(), log_integers(1, 1000))
def test_the_racks_model_is_the_papers_within_one_rack(theta, shape, m):
    K, N = shape.num_gpus, shape.num_nodes
    paper = ThetaSys(*theta[:6], theta.gamma)
    assert iteration_time(RACKS, theta, K, RACKS.level(N, 1), m, 1) == t_iter(paper, K, N, m, 1)


def test_the_racks_model_charges_its_third_pair_across_racks():
    theta = ThetaRacks(0.1, 0.01, 0.2, 0.03, 0.5, 0.07, 1.0, 0.11, 1.0)
    assert RACKS.t_sync(theta, 8, RACKS.level(4, 2)) == pytest.approx(1.0 + 6 * 0.11)
    assert RACKS.t_sync(theta, 8, RACKS.level(4, 1)) == pytest.approx(0.5 + 6 * 0.07)
    assert RACKS.level(np.array([1, 2, 2]), np.array([1, 1, 2])).tolist() == [0, 1, 2]
    assert PAPER.level(np.array([1, 2, 2]), np.array([1, 1, 2])).tolist() == [0, 1, 1]


def test_built_in_models_are_found_by_name():
    assert throughput_model("paper") is PAPER
    assert throughput_model("racks") is RACKS
    assert PAPER.parameters == ThetaSys._fields
    assert RACKS.parameters == ThetaRacks._fields
