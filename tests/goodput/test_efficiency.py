"""Statistical efficiency: vectors 1 and 3 of policies.md section E, and what holds for every gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.goodput import efficiency, gain, noise_scale

from .strategies import gradients, log_uniform

batch_sizes = log_uniform(1.0, 1e6)
scales = log_uniform(1.0, 1e4)
noise_scales = st.just(0.0) | log_uniform(1e-3, 1e9)


def test_vector_1_efficiency_from_the_noise_scale():
    assert efficiency(1000.0, 128, 1024) == pytest.approx(0.55731, abs=5e-6)


def test_vector_3_gain_efficiency_and_noise_scale_from_the_measured_pair():
    assert gain(1.0, 4.0, 8.0) == pytest.approx(3.3333, abs=5e-5)
    assert gain(1.0, 4.0, 8.0) / 8.0 == pytest.approx(0.41667, abs=5e-6)
    assert noise_scale(1.0, 4.0, 128) == 4 * 128


@given(noise_scales, batch_sizes, scales, scales)
def test_efficiency_falls_with_the_batch_size_and_lies_between_0_and_1(phi, M0, scale, growth):
    at_M, beyond = efficiency(phi, M0, M0 * scale), efficiency(phi, M0, M0 * scale * growth)
    assert 0.0 < beyond <= at_M <= 1.0 + 1e-12
    assert efficiency(phi, M0, M0) == 1.0
    if growth > 1.001 and phi < 1e3 * M0 * scale * growth:  # beyond, the fall is below rounding
        assert beyond < at_M


@given(gradients, scales)
def test_one_iteration_is_worth_at_least_one_and_at_most_scale_iterations_of_the_initial_size(gradient, scale):
    worth = gain(gradient.sqr, gradient.var, scale)
    assert 1.0 - 1e-12 <= worth <= scale * (1.0 + 1e-12)


@given(gradients.filter(lambda gradient: gradient.sqr > 0), log_uniform(1.0, 1e4), scales)
def test_both_forms_of_efficiency_agree(gradient, M0, scale):
    phi = noise_scale(gradient.sqr, gradient.var, M0)
    by_pair = gain(gradient.sqr, gradient.var, scale) / scale
    assert by_pair == pytest.approx(efficiency(phi, M0, M0 * scale), rel=1e-9)


@given(scales)
def test_pure_noise_makes_every_batch_size_fully_efficient_and_no_noise_makes_growth_worthless(scale):
    assert gain(0.0, 1.0, scale) == pytest.approx(scale, rel=1e-12)
    assert gain(1.0, 0.0, scale) == 1.0


def test_arrays_and_numbers_agree():
    sqr, var, scale = np.array([[1.0], [0.5]]), np.array([[4.0], [0.0]]), np.array([1.0, 2.0, 8.0])
    phi, M = noise_scale(sqr, var, 128), 128 * scale
    assert gain(sqr, var, scale).shape == efficiency(phi, 128, M).shape == (2, 3)
    for j in range(2):
        for i in range(3):
            assert gain(sqr, var, scale)[j, i] == gain(sqr[j, 0], var[j, 0], scale[i])
            assert efficiency(phi, 128, M)[j, i] == efficiency(phi[j, 0], 128, M[i])
