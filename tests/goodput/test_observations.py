"""Measurements on their way into a fit: what is kept, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pollux.core import Observation, ObservationKey, Profile, Shape
from pollux.errors import InvalidProfile, PolluxError
from pollux.goodput import Observations, fit

NAN, INF = float("nan"), float("inf")
GOOD = (4, 2, 1, 32, 0.1, 0.2)


def test_a_profile_becomes_arrays_of_mean_times():
    profile = Profile()
    profile = profile.add("t4", ObservationKey(Shape(4, 2), 32), Observation(1.0, 2, 6.0, 2.0, 2))
    profile = profile.add("t4", ObservationKey(Shape(1), 16), Observation(0.0, 0, 1.0, 0.0, 4))
    profile = profile.add("t4", ObservationKey(Shape(2), 16), Observation(3.0, 3, 0.0, 0.0, 0))  # never synchronised
    seen = Observations.of(profile.of_type("t4"))
    rows = sorted(zip(seen.K, seen.N, seen.R, seen.m, seen.t_grad, seen.t_iter, strict=True))
    assert rows == [(1, 1, 1, 16, 0.25, 0.25), (4, 2, 1, 32, 1.25, 3.0)]


def test_a_part_of_the_observations_can_be_picked_by_mask_or_index():
    seen = Observations.from_rows([(K, 1, 1, 8, 0.1, 0.2) for K in (1, 2, 3)])
    assert seen.subset(np.array([2, 0])).K.tolist() == [3, 1]
    assert seen.subset(seen.K > 1).K.tolist() == [2, 3]


@pytest.mark.parametrize(
    "build",
    [
        lambda: Observations.from_rows([]),
        lambda: Observations.of(Profile().of_type("t4")),
        lambda: Observations.of({ObservationKey(Shape(1), 8): Observation(1.0, 1, 0.0, 0.0, 0)}),
    ],
    ids=["no rows", "empty profile", "no synchronising pass"],
)
def test_an_empty_profile_is_refused_with_what_to_do(build):
    with pytest.raises(InvalidProfile, match="no observation to fit") as caught:
        build()
    assert caught.value.field == "profile"
    assert "synchronising pass" in caught.value.fix


@pytest.mark.parametrize(
    ("column", "value", "field"),
    [
        (0, 0, "num_gpus"),
        (0, 1, "num_gpus"),  # K < N
        (0, NAN, "num_gpus"),
        (1, 0, "num_nodes"),
        (2, 0, "num_racks"),
        (2, 3, "num_nodes"),  # N < R
        (3, 0, "per_gpu_batch_size"),
        (3, -8, "per_gpu_batch_size"),
        (3, INF, "per_gpu_batch_size"),
        *[(4, value, "grad_time_s") for value in (0.0, -0.1, NAN, INF, -INF, 1e9)],
        *[(5, value, "iteration_time_s") for value in (0.0, -0.1, NAN, INF, -INF, 1e9)],
    ],
)
def test_what_cannot_be_fitted_is_refused_with_row_field_value_and_fix(column, value, field):
    row = list(GOOD)
    row[column] = value
    with pytest.raises(InvalidProfile) as caught:
        Observations.from_rows([GOOD, tuple(row)])
    assert caught.value.field == f"observation 1: {field}"
    assert caught.value.fix
    expected = row[1] if (column, field) == (2, "num_nodes") else value
    assert caught.value.value == pytest.approx(expected, nan_ok=True)
    assert field in str(caught.value)


@pytest.mark.parametrize("time", [1e-12, 1e-100, 1e-200, 5e-324])
def test_a_time_too_short_to_be_real_is_refused_or_fitted_but_never_nan(time):
    rows = [(1, 1, 1, 8, time, time), (2, 1, 1, 16, time, 2 * time), (4, 2, 1, 16, 0.1, 0.2)]
    try:
        found = fit(Observations.from_rows(rows))
    except PolluxError:
        return
    assert np.isfinite(found.theta).all()
    assert np.isfinite(found.loss)


def test_checks_cannot_be_passed_by():
    one = Observations.from_rows([(1, 1, 1, 8, 0.1, 0.1)])
    with pytest.raises(InvalidProfile, match="no observation"):
        one.subset(np.array([False]))
    with pytest.raises(InvalidProfile, match="must be finite"):
        Observations(one.K, one.N, one.R, one.m, one.t_grad * np.nan, one.t_iter)
    with pytest.raises(InvalidProfile, match="not six numbers"):
        Observations.from_rows([(1, 1, 1, 8, 0.1)])
    with pytest.raises(InvalidProfile, match="not six numbers"):
        Observations.from_rows([(1, 1, 1, 8, 0.1, "fast")])
