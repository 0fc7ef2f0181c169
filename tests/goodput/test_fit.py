"""Fitting: what it recovers, what does not matter to it, and that it survives everything that is valid."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pollux.errors import InvalidModel
from pollux.goodput import PAPER, PUBLISHED, RACKS, FitOptions, Observations, ThetaSys, fit, fit_many

from .strategies import any_observations, observation_rows, observe, predicted, typical_keys, typical_theta

THETA = ThetaSys(0.1, 0.002, 0.05, 0.004, 0.2, 0.01, 1.8)


def problem(seed: int, count: int = 20, noise: float = 0.05) -> Observations:
    rng = np.random.default_rng(seed)
    return observe(PAPER, typical_theta(rng), typical_keys(rng, count), noise, seed)


def rows_of(seen: Observations) -> list[tuple[float, ...]]:
    return list(zip(seen.K, seen.N, seen.R, seen.m, seen.t_grad, seen.t_iter, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_times_without_noise_are_predicted_within_one_per_cent(seed):
    rng = np.random.default_rng(seed)
    theta = typical_theta(rng)
    found = fit(observe(PAPER, theta, typical_keys(rng, 20)))
    assert np.abs(found.residuals).max() < 0.01
    unseen = observe(PAPER, theta, [(K, N, 1, m) for K, N in ((3, 1), (6, 3), (12, 2), (48, 16)) for m in (20, 200)])
    np.testing.assert_allclose(predicted(found, unseen), unseen.t_iter, rtol=0.1)
    np.testing.assert_allclose(PAPER.t_grad(found.theta, unseen.m), unseen.t_grad, rtol=0.01)
    assert found.converged
    assert found.priors == ()


def test_the_report_says_how_far_each_prediction_is_off():
    seen = problem(1)
    found = fit(seen)
    residuals = predicted(found, seen) / seen.t_iter - 1.0
    np.testing.assert_allclose(found.residuals, residuals, rtol=1e-9)
    assert found.mean_relative_error == pytest.approx(np.abs(residuals).mean())
    assert (found.max_gpus_observed, found.max_nodes_observed) == (seen.K.max(), seen.N.max())
    summary = found.summary()
    assert summary.model == "paper"
    assert dict(summary.params) == dict(zip(PAPER.parameters, found.theta, strict=True))
    assert (summary.priors, summary.converged) == (found.priors, True)


@pytest.mark.parametrize("options", [FitOptions(), PUBLISHED], ids=["ours", "published"])
@pytest.mark.parametrize("model", [PAPER, RACKS], ids=["paper", "racks"])
@pytest.mark.parametrize("seen", [problem(2), problem(2).subset(problem(2).N == 1)], ids=["all", "one node"])
def test_the_loss_reported_is_that_of_the_parameters_reported(model, options, seen):
    found = fit(seen, model, options=options)
    assert found.loss == pytest.approx(model.loss(seen, found.theta, options), rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_observations_does_not_matter(seed):
    seen = problem(seed)
    mixed = np.random.default_rng(seed).permutation(len(seen))
    one, other = fit(seen), fit(seen.subset(mixed))
    assert one.loss == pytest.approx(other.loss, rel=1e-3)
    np.testing.assert_allclose(np.array(one.residuals)[mixed], other.residuals, atol=5e-3)


@pytest.mark.parametrize("factor", [1e-2, 1e3])
@pytest.mark.parametrize("seed", range(3))
def test_in_other_units_of_time_the_predictions_are_the_same(seed, factor):
    seen = problem(seed)
    rows = [(*row[:4], row[4] * factor, row[5] * factor) for row in rows_of(seen)]
    one, other = fit(seen), fit(Observations.from_rows(rows))
    np.testing.assert_allclose(predicted(other, seen), factor * predicted(one, seen), rtol=0.01)
    large = np.array(one.theta[:6]) > 1e-4  # what is nothing in one unit is the same floor in any
    np.testing.assert_allclose(np.array(other.theta[:6])[large], factor * np.array(one.theta[:6])[large], rtol=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_one_gross_outlier_bends_the_other_predictions_far_less_than_it_bends_the_published_loss(seed):
    seen = problem(seed, noise=0.0)
    rows = rows_of(seen)
    rows[8] = (*rows[8][:5], rows[8][5] * 10.0)
    others = np.arange(20) != 8

    def damage(options: FitOptions) -> float:
        found = fit(Observations.from_rows(rows), options=options)
        return float(np.abs(predicted(found, seen) / seen.t_iter - 1.0)[others].mean())

    assert damage(FitOptions()) < 0.02
    assert damage(FitOptions()) < 0.25 * damage(PUBLISHED)


def test_when_the_work_runs_out_the_fit_says_so_and_is_usable():
    found = fit(problem(3), options=FitOptions(max_iterations=1))
    assert not found.converged
    assert not found.summary().converged
    assert np.isfinite(found.theta).all()


def assert_sound(found, model):
    theta = np.array(found.theta)
    assert np.isfinite(theta).all()
    assert (theta >= np.array(model.lower)).all()
    assert (theta <= np.array(model.upper)).all()
    assert np.isfinite([found.loss, found.mean_relative_error, *found.residuals]).all()
    found.summary()


@settings(max_examples=150)
@given(any_observations, st.sampled_from([PAPER, RACKS]), st.sampled_from([FitOptions(), PUBLISHED]))
def test_every_valid_set_of_observations_gives_a_sound_fit(seen, model, options):
    if options.max_iterations > 300:
        options = dataclasses.replace(options, max_iterations=300)  # sound long before the end
    assert_sound(fit(seen, model, options=options), model)


@given(observation_rows)
@example((1, 1, 1, 1, 1e-6, 1e-6))
@example((512, 16, 4, 1, 1e-6, 1e5))
@example((512, 1, 1, 10**5, 1e5, 1e-6))
def test_a_single_point_and_the_same_point_thrice_give_a_sound_fit_that_meets_it(row):
    for seen in (Observations.from_rows([row]), Observations.from_rows([row] * 3)):
        found = fit(seen)
        assert_sound(found, PAPER)
        if row[0] > 1 and row[5] > row[4] > 1e-7 * row[3]:  # a pass that is not all floor, in a step that takes longer
            assert PAPER.t_grad(found.theta, row[3]) == pytest.approx(row[4], rel=0.1)


@settings(max_examples=40)
@given(any_observations, any_observations)
def test_a_warm_start_from_any_other_observations_gives_a_sound_fit(earlier, seen):
    assert_sound(fit(seen, warm=fit(earlier)), PAPER)


@pytest.mark.parametrize("seed", range(10))
def test_a_warm_start_reaches_the_loss_of_a_cold_start(seed):
    seen = problem(seed, 21)
    earlier = fit(seen.subset(np.arange(20)))
    cold, warm = fit(seen), fit(seen, warm=earlier)
    assert warm.loss <= 1.02 * cold.loss + 1e-4
    assert warm.iterations <= 1.5 * cold.iterations


def test_a_warm_start_meets_the_first_observation_of_a_level_afresh():
    keys = [(1, 1, 1, 32), (1, 1, 1, 64), (2, 1, 1, 64), (4, 1, 1, 32), (8, 2, 1, 64), (4, 2, 1, 64), (16, 4, 1, 64)]
    seen = observe(PAPER, THETA, keys)
    found = None
    for count in range(1, len(keys) + 1):
        found = fit(seen.subset(np.arange(count)), warm=found)
    assert found is not None
    assert np.abs(found.residuals).max() < 0.02


ABSURD = {
    "nothing takes time": (1e-8,) * 6 + (1.0,),
    "everything takes a day": (1e5,) * 6 + (10.0,),
    "only growth": (1e-8, 1e5, 1e-8, 1e5, 1e-8, 1e5, 10.0),
    "no growth": (1e3, 1e-8, 1e3, 1e-8, 1e3, 1e-8, 1.0),
}


@pytest.mark.parametrize("theta", ABSURD.values(), ids=ABSURD)
@pytest.mark.parametrize("honest", [False, True], ids=["claims a good loss", "says how bad it is"])
def test_a_warm_start_recovers_from_an_absurd_earlier_fit(theta, honest):
    for seed in (*range(8), 39, 53):  # from the last two, one start alone ends in a poor minimum
        seen = problem(seed)
        cold = fit(seen)
        loss = PAPER.loss(seen, theta, FitOptions()) if honest else cold.loss
        warm = fit(seen, warm=dataclasses.replace(cold, theta=theta, loss=loss))
        assert warm.loss <= 1.5 * cold.loss + 1e-3, seed


def test_a_warm_start_from_a_fit_of_another_model_is_refused_by_name():
    seen = problem(4)
    with pytest.raises(InvalidModel, match="racks"):
        fit(seen, RACKS, warm=fit(seen))


def test_many_fits_at_once_are_the_fits_one_by_one():
    jobs = [problem(seed, count) for seed, count in enumerate((1, 5, 20))]
    cold = fit_many(jobs)
    assert cold == [fit(seen) for seen in jobs]
    assert fit_many(jobs, warm=[None, *cold[1:]]) == [fit(jobs[0]), *(fit(jobs[i], warm=cold[i]) for i in (1, 2))]
    assert fit_many([]) == []
    with pytest.raises(InvalidModel, match="3 jobs") as caught:
        fit_many(jobs, warm=cold[:2])
    assert (caught.value.field, caught.value.value) == ("warm", 2)


def test_the_racks_model_fits_jobs_that_span_racks_better():
    theta = (0.1, 0.002, 0.05, 0.002, 0.2, 0.004, 1.5, 0.02, 1.6)
    seen = observe(RACKS, theta, typical_keys(np.random.default_rng(5), 30, max_racks=4), 0.01)
    assert (seen.R > 1).sum() > 5
    assert ((seen.N > 1) & (seen.R == 1)).sum() > 5
    racks, paper = fit(seen, RACKS), fit(seen, PAPER)
    assert racks.mean_relative_error < 0.02 < 0.2 * paper.mean_relative_error
    assert racks.summary().model == "racks"


@pytest.mark.parametrize(
    "field", ["delta", "grad_weight", "penalty_weight", "tolerance", "stuck_factor", "max_iterations"]
)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_options_out_of_range_are_refused_with_field_value_and_fix(field, value):
    with pytest.raises(InvalidModel) as caught:
        FitOptions(**{field: value})
    assert caught.value.field == f"FitOptions.{field}"
    assert caught.value.fix
    assert caught.value.value == pytest.approx(value, nan_ok=True)
