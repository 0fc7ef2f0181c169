"""Learning-rate rules: their formulas, their registry, what is refused, and a contract that tells good from broken."""

from __future__ import annotations

import itertools
import math
import operator
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.rules import (
    RULES,
    AdamScale,
    AdaScale,
    Legw,
    Linear,
    Scaling,
    ScalingRule,
    SquareRoot,
    Unscaled,
    checked_factors,
    default_rule,
    rule_named,
)
from pollux.errors import InvalidModel, InvalidSpec, UnknownName
from pollux.goodput import efficiency
from pollux.goodput.noise import NoiseAverage, NoiseSample
from pollux.testing import ScalingRuleContract, rules


def measured(*sqr_and_var: tuple[float, float]) -> NoiseAverage:
    sqr, var = zip(*sqr_and_var, strict=True)
    return NoiseAverage().update(NoiseSample(sqr, var, scale=1.0))


def step(
    scale: float = 4.0,
    noise: NoiseAverage | None = None,
    num_groups: int = 1,
    progress: float = 0.0,
    iterations_per_epoch: float = 100.0,
    initial_batch_size: int = 128,
) -> Scaling:
    return Scaling(scale, noise or NoiseAverage(), num_groups, progress, iterations_per_epoch, initial_batch_size)


class TestAdaScale:
    def test_is_the_published_gain(self):
        assert checked_factors(AdaScale(), step(8.0, measured((1.0, 4.0)))) == (pytest.approx(10 / 3),)

    @given(
        st.floats(1e-3, 1e3),
        st.floats(1e-3, 1e3),
        st.integers(1, 1000),
        st.integers(0, 10**5),
    )
    def test_over_scale_it_is_the_efficiency_of_the_noise_scale(self, sqr, var, M0, more):
        M, noise = M0 + more, measured((sqr, var))
        (factor,) = checked_factors(AdaScale(), step(M / M0, noise, initial_batch_size=M0))
        phi = noise.noise_scale(M0)
        assert factor * M0 / M == pytest.approx(efficiency(phi, M0, M), rel=1e-9)
        assert 1.0 <= factor <= min(M / M0, 1.0 + phi / M0) * (1.0 + 1e-12)

    def test_matches_the_vector_that_is_given_in_noise_scale_and_batch_sizes(self):
        noise = measured((1.0, 1000 / 128))
        assert noise.noise_scale(128) == pytest.approx(1000)
        (factor,) = checked_factors(AdaScale(), step(1024 / 128, noise))
        assert factor == pytest.approx(8 * 0.55731, rel=1e-5)

    def test_is_linear_where_there_is_only_noise_and_one_where_there_is_none(self):
        assert checked_factors(AdaScale(), step(8.0, measured((0.0, 4.0)))) == (8.0,)
        noiseless = replace(measured((1.0, 0.0)), var_floor=0.0)
        assert checked_factors(AdaScale(), step(8.0, noiseless)) == (1.0,)

    def test_gives_each_parameter_group_the_gain_of_its_own_noise(self):
        apart = [checked_factors(AdaScale(), step(8.0, measured(pair)))[0] for pair in ((1.0, 4.0), (3.0, 0.5))]
        together = checked_factors(AdaScale(), step(8.0, measured((1.0, 4.0), (3.0, 0.5)), num_groups=2))
        assert together == tuple(apart)
        assert together[0] == pytest.approx(10 / 3)
        assert together[1] == pytest.approx(3.5 / 3.0625)

    def test_does_not_scale_by_a_gain_that_nobody_measured(self):
        assert checked_factors(AdaScale(), step(8.0, num_groups=3)) == (1.0, 1.0, 1.0)
        overflowed = NoiseAverage().update(NoiseSample.overflowed(1.0))
        assert checked_factors(AdaScale(), step(8.0, overflowed)) == (1.0,)

    def test_a_group_that_was_added_since_the_last_measurement_counts_as_not_measured(self):
        assert checked_factors(AdaScale(), step(8.0, measured((1.0, 4.0)), num_groups=2)) == (1.0, 1.0)


def test_adamscale_is_the_root_of_the_gain_per_group():
    moment = step(8.0, measured((1.0, 4.0), (3.0, 0.5)), num_groups=2)
    squares = np.square(checked_factors(AdamScale(), moment))
    assert squares == pytest.approx(checked_factors(AdaScale(), moment))


@pytest.mark.parametrize(
    ("rule", "factor"), [(SquareRoot(), 3.0), (Linear(), 9.0), (Unscaled(), 1.0), (Legw(0.0), 3.0)]
)
def test_rules_of_the_scale_alone_are_the_same_for_all_groups_and_any_noise(rule, factor):
    for noise in (NoiseAverage(), measured((1.0, 4.0), (3.0, 0.5))):
        assert checked_factors(rule, step(9.0, noise, num_groups=2)) == (factor, factor)


class TestLegw:
    """With 100 iterations in an epoch."""

    def test_reaches_the_square_root_when_the_warm_up_that_grew_with_the_scale_is_over(self):
        rule = Legw(base_warmup_epochs=2.0)
        for progress in (800.0, 801.0, 1e9):
            assert checked_factors(rule, step(4.0, progress=progress)) == (2.0,)
        assert checked_factors(rule, step(4.0, progress=400.0)) == (1.0,)
        assert checked_factors(rule, step(4.0, progress=799.0)) == (pytest.approx(2.0 * 799 / 800),)

    @given(st.integers(1, 10), st.floats(1.0, 64.0), st.floats(0.0, 2000.0))
    def test_times_the_schedules_own_warm_up_it_is_the_published_rule(self, base, scale, progress):
        own = min(1.0, progress / (base * 100))
        (factor,) = checked_factors(Legw(base), step(scale, progress=progress))
        published = math.sqrt(scale) * min(1.0, progress / (base * scale * 100))
        assert own * factor == pytest.approx(published, rel=1e-12)

    def test_leaves_the_first_step_a_learning_rate(self):
        assert checked_factors(Legw(5.0), step(16.0, progress=0.0)) == (0.25,)

    @pytest.mark.parametrize("epochs", [-1.0, math.inf, math.nan])
    def test_refuses_a_warm_up_that_is_none(self, epochs):
        with pytest.raises(InvalidSpec, match=r"base_warmup_epochs = .*Give your schedule's warm-up"):
            Legw(epochs)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "rule"),
        [
            ("adascale", AdaScale()),
            ("adamscale", AdamScale()),
            ("sqrt", SquareRoot()),
            ("linear", Linear()),
            ("legw", Legw()),
            ("none", Unscaled()),
        ],
    )
    def test_lead_to_rules(self, name, rule):
        assert rule_named(name) == rule
        assert name in RULES

    def test_that_nobody_knows_are_answered_with_the_known_ones(self):
        with pytest.raises(UnknownName, match=r"rule = 'AdaScale'.*Did you mean 'adascale'\? Known: adamscale, "):
            rule_named("AdaScale")

    def test_of_optimizers_choose_the_papers_rule(self):
        for kind in ("sgd", "momentum", "SGD"):
            assert default_rule(kind) == AdaScale()
        for kind in ("adam", "adamw", "adagrad", "rmsprop", "AdamW", "Lion"):
            assert default_rule(kind) == SquareRoot()


class TestAUsersOwn:
    def test_object_is_taken_as_it_is(self):
        own = Cautious()
        assert rule_named(own) is own

    def test_object_that_can_also_be_called_is_still_a_rule(self):
        class Both(Cautious):
            def __call__(self, initial: int, current: int) -> float:
                raise AssertionError

        own = Both()
        assert rule_named(own) is own

    def test_function_is_called_with_both_batch_sizes_and_serves_all_groups(self):
        seen = []

        def scale_lr(initial: int, current: int) -> float:
            seen.append((initial, current))
            return math.sqrt(current / initial)

        rule = rule_named(scale_lr)
        assert checked_factors(rule, step(300 / 96, num_groups=2, initial_batch_size=96)) == (math.sqrt(3.125),) * 2
        assert seen == [(96, 300)]
        assert isinstance(seen[0][1], int)

    def test_function_may_be_any_callable_of_two_arguments(self):
        assert checked_factors(rule_named(max), step(2.0, initial_batch_size=1)) == (2.0,)
        assert checked_factors(rule_named(lambda a, b, power=0.5: (b / a) ** power), step(4.0)) == (2.0,)

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            (math.sqrt, r"rule = 'sqrt\(x, /\)': cannot be called with \(M0, M\)\. Pass a function of two batch sizes"),
            (lambda scale: scale, r"<lambda>\(scale\)': cannot be called"),
            (AdaScale, r"rule = 'AdaScale': is a class\. Pass an instance: AdaScale\(…\)"),
            (None, r"rule = None: is no learning-rate rule\. Pass one of adamscale, adascale, .*function \(M0, M\)"),
            (0.1, r"rule = 0\.1: is no learning-rate rule"),
        ],
    )
    def test_anything_else_is_refused(self, rule, message):
        with pytest.raises(InvalidSpec, match=message):
            rule_named(rule)

    @pytest.mark.parametrize(
        ("answer", "scale", "message"),
        [
            ([2.0], 4.0, r"rule Fixed at scale 4 = \(2\.0,\): 1 for 2 parameter groups\. Return one number per"),
            ([], 4.0, r"0 for 2 parameter groups"),
            (
                [1.0, 0.0],
                4.0,
                r"\(1\.0, 0\.0\): not all finite and above 0\. Return finite numbers above 0; 1\.0 leaves",
            ),
            ([1.0, -1.0], 4.0, "not all finite and above 0"),
            ([1.0, math.nan], 4.0, "not all finite and above 0"),
            ([1.0, math.inf], 4.0, "not all finite and above 0"),
            (2.0, 4.0, r"= 2\.0: no sequence of numbers"),
            (None, 4.0, "no sequence of numbers"),
            (["much", "more"], 4.0, "no sequence of numbers"),
            ([1.0, 0.5], 1.0, r"changes the learning rate at M0.*put warm-up and decay into a schedule"),
        ],
    )
    def test_answer_that_cannot_be_used_is_refused_with_the_rule_the_value_and_the_fix(self, answer, scale, message):
        with pytest.raises(InvalidSpec, match=message) as caught:
            checked_factors(Fixed(answer), step(scale, num_groups=2))
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    def test_function_is_named_when_its_answer_cannot_be_used(self):
        with pytest.raises(InvalidSpec, match=r"rule sub at scale 4 = \(-384\.0,\)"):
            checked_factors(rule_named(operator.sub), step(4.0))

    def test_answer_may_be_of_any_kind_of_number(self):
        factors = checked_factors(Fixed(np.array([2, 3], dtype=np.float32)), step(4.0, num_groups=2))
        assert factors == (2.0, 3.0)
        assert all(type(factor) is float for factor in factors)

    def test_rounding_at_the_initial_batch_size_is_taken_away(self):
        inexact = rule_named(lambda initial, current: current * (1.0 / initial))
        assert inexact.factors(step(1.0, initial_batch_size=49)) != [1.0]
        assert checked_factors(inexact, step(1.0, initial_batch_size=49)) == (1.0,)

    def test_mistake_inside_a_rule_is_shown_as_it_is(self):
        with pytest.raises(ZeroDivisionError):
            checked_factors(rule_named(lambda initial, current: current / 0), step())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(["scale"], [0.5, math.inf, math.nan]),
        *itertools.product(["progress"], [-1.0, math.inf, math.nan]),
        *itertools.product(["num_groups", "iterations_per_epoch", "initial_batch_size"], [0, -1, math.inf]),
    ],
)
def test_a_step_that_cannot_be_is_refused(field, value):
    with pytest.raises(InvalidModel, match=f"{field} = "):
        step(**{field: value})


class TestAdaScaleContract(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return rule_named("adascale")


class TestAdamScaleContract(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return rule_named("adamscale")


class TestSquareRootContract(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return rule_named("sqrt")


class TestLinearContract(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return rule_named("linear")


class TestLegwContract(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return rule_named("legw")


class TestLegwContractWithALongWarmUp(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return Legw(base_warmup_epochs=20.0)


class TestUnscaledContract(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return rule_named("none")


class TestFunctionContract(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return rule_named(cube_root)


@pytest.mark.parametrize("name", RULES)
def test_every_name_is_held_to_the_contract(name):
    here = [kind for kind in globals().values() if isinstance(kind, type) and kind.__module__ == __name__]
    held = [kind().make() for kind in here if issubclass(kind, ScalingRuleContract)]
    assert rule_named(name) in held, "rules are equal if their classes and options are"


def cube_root(initial: int, current: int) -> float:
    return math.cbrt(current / initial)


@dataclass
class Fixed:
    """Always the same."""

    answer: object

    def factors(self, scaling: Scaling) -> Sequence[float]:
        return self.answer  # type: ignore[return-value]


class Cautious:
    """A good rule, to break in one way each below."""

    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [scaling.scale**0.25] * scaling.num_groups


class OneForAll(Cautious):
    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [scaling.scale]


class Vanishing(Cautious):
    """LEGW as published: no learning rate at the very start, and a warm-up at M0."""

    def factors(self, scaling: Scaling) -> Sequence[float]:
        warm = min(1.0, scaling.progress / (scaling.scale * scaling.iterations_per_epoch))
        return [scaling.scale**0.5 * warm] * scaling.num_groups


class Exploding(Cautious):
    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [scaling.scale if scaling.scale < 4.0 else math.inf] * scaling.num_groups


class Discounting(Cautious):
    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [0.999 * factor for factor in super().factors(scaling)]


class Overeager(Cautious):
    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [scaling.scale**1.5] * scaling.num_groups


class Shy(Cautious):
    def factors(self, scaling: Scaling) -> Sequence[float]:
        return [1.0 / scaling.scale] * scaling.num_groups


class Smoothing(Cautious):
    """Remembers the last step, which a resumed job would not."""

    def __init__(self) -> None:
        self.last = 1.0

    def factors(self, scaling: Scaling) -> Sequence[float]:
        self.last = 1.0 if scaling.scale == 1.0 else min(scaling.scale, 0.5 * self.last + 0.5 * scaling.scale)
        return [self.last] * scaling.num_groups


class Meddling(Cautious):
    def factors(self, scaling: Scaling) -> Sequence[float]:
        object.__setattr__(scaling, "progress", scaling.progress + 1.0)
        return super().factors(scaling)


TESTS = [name for name in vars(ScalingRuleContract) if name.startswith("test_")]


def hold(rule: type[ScalingRule], promise: str) -> None:
    """Run the one test of the contract that has these words in its name."""

    class Held(ScalingRuleContract):
        def make(self) -> ScalingRule:
            return rule()

    (name,) = [name for name in TESTS if promise in name]
    getattr(Held(), name)()


@pytest.mark.parametrize("promise", TESTS)
def test_the_contract_lets_a_good_rule_through(promise):
    hold(Cautious, promise)


@pytest.mark.parametrize(
    ("rule", "promise"),
    [
        (OneForAll, "one_finite_factor"),
        (Vanishing, "above_zero"),
        (Vanishing, "exactly_as_it_is"),
        (Exploding, "one_finite_factor"),
        (Exploding, "exceeds_the_scale"),
        (Discounting, "exactly_as_it_is"),
        (Overeager, "exceeds_the_scale"),
        (Shy, "never_means_a_smaller_factor"),
        (Smoothing, "follows_from_this_step_alone"),
        (Meddling, "stays_as_it_was"),
    ],
)
def test_the_contract_finds_what_is_broken(rule, promise):
    with pytest.raises((AssertionError, ExceptionGroup)):
        hold(rule, promise)


def test_pytest_explains_what_fails_in_the_contract():
    assert "@pytest_ar" in vars(rules), "it was imported before its assertions could be rewritten"


def test_the_contract_needs_no_torch():
    script = "import sys, pollux.testing; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
