"""The contract of a learning-rate rule. Subclass `ScalingRuleContract`, define `make`, and pytest does the rest.

class TestMyRule(ScalingRuleContract):
    def make(self) -> ScalingRule:
        return MyRule()
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.agent.rules import Scaling, ScalingRule, checked_factors
from pollux.goodput.noise import NoiseAverage, NoiseSample

SLACK = 1.0 + 1e-9
"""Rounding may carry a factor this far beyond its bound."""
LONG_AFTER_ANY_WARM_UP = 1e12

# Each rule runs the same test function under its own class, which is all that the health check complains about.
_SETTINGS = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.differing_executors])


# One draw per parameter group rather than one per number: contracts run often.
_STATISTICS = [-1.0, 0.0, 1e-9, 1e-3, 0.3, 1.0, 7.0, 1e3, 1e9]
_GROUPS = st.sampled_from(list(itertools.product(_STATISTICS, _STATISTICS)))


@st.composite
def averages(draw: st.DrawFn, num_groups: int) -> NoiseAverage:
    """Not measured, or measured: hardly noise, only noise, or so few samples that a statistic is negative."""
    groups = draw(st.lists(_GROUPS, min_size=num_groups, max_size=num_groups) | st.none())
    if groups is None:
        return NoiseAverage()
    sqr, var = zip(*groups, strict=True)
    return NoiseAverage().update(NoiseSample(sqr, var, scale=1.0))


@st.composite
def scalings(draw: st.DrawFn, scale: float | None = None) -> Scaling:
    """Any step of any job, up to 10,000 times M0 and with up to four parameter groups."""
    initial = draw(st.integers(1, 4096))
    if scale is None:
        scale = draw(st.integers(initial, 10_000 * initial) | st.integers(initial, 4 * initial)) / initial
    num_groups = draw(st.integers(1, 4))
    return Scaling(
        scale=scale,
        noise=draw(averages(num_groups)),
        num_groups=num_groups,
        progress=draw(st.just(0.0) | st.floats(0.0, 1e4) | st.floats(0.0, 1e9)),
        iterations_per_epoch=draw(st.integers(1, 10**6)),
        initial_batch_size=initial,
    )


class ScalingRuleContract:
    """What the agent relies on, whatever the rule makes of a batch size."""

    def make(self) -> ScalingRule:
        """A new rule, the same each time."""
        raise NotImplementedError

    def _factors(self, scaling: Scaling) -> list[float]:
        return list(self.make().factors(scaling))

    @_SETTINGS
    @given(scalings())
    def test_each_parameter_group_gets_one_finite_factor_above_zero(self, scaling: Scaling) -> None:
        factors = self._factors(scaling)
        assert len(factors) == scaling.num_groups
        assert all(0.0 < factor < math.inf for factor in factors)
        assert list(checked_factors(self.make(), scaling)) == factors

    @_SETTINGS
    @given(scalings(scale=1.0))
    def test_at_the_initial_batch_size_the_learning_rate_stays_exactly_as_it_is(self, scaling: Scaling) -> None:
        assert self._factors(scaling) == [1.0] * scaling.num_groups

    @_SETTINGS
    @given(scalings())
    def test_no_factor_exceeds_the_scale(self, scaling: Scaling) -> None:
        assert max(self._factors(scaling)) <= scaling.scale * SLACK

    @_SETTINGS
    @given(scalings(), st.integers(1, 10_000))
    def test_after_warm_up_a_larger_batch_never_means_a_smaller_factor(self, scaling: Scaling, more: int) -> None:
        progress = LONG_AFTER_ANY_WARM_UP * scaling.iterations_per_epoch
        smaller = replace(scaling, progress=progress)
        larger = replace(smaller, scale=(scaling.batch_size + more) / scaling.initial_batch_size)
        for low, high in zip(self._factors(smaller), self._factors(larger), strict=True):
            assert low <= high * SLACK

    @_SETTINGS
    @given(st.lists(scalings(), min_size=1, max_size=3))
    def test_the_answer_follows_from_this_step_alone(self, steps: list[Scaling]) -> None:
        with_a_past = self.make()
        for scaling in steps:
            answer = list(with_a_past.factors(scaling))
            assert answer == list(with_a_past.factors(scaling))
            assert answer == self._factors(scaling)

    @_SETTINGS
    @given(scalings())
    def test_the_input_stays_as_it_was(self, scaling: Scaling) -> None:
        before = copy.deepcopy(scaling)
        self._factors(scaling)
        assert scaling == before
