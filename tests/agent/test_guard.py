"""The guard on curves whose truth is known, and on stochastic gradient descent whose noise is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from pollux.agent.guard import ConvergenceGuard, GuardOptions, Verdict
from pollux.errors import InvalidDocument, InvalidSpec

Curve = Callable[[float], float]
M0, BEAT = 64, 16

CURVES: dict[str, Curve] = {
    "power law": lambda p: 0.3 + 3 * (1 + p / 20) ** -0.5,
    "steep power law": lambda p: 0.1 + 2 * (1 + p / 300) ** -1.5,
    "logarithm": lambda p: 4 - 0.35 * math.log1p(p / 10),
    "exponential": lambda p: 0.5 + 2 * math.exp(-p / 1500),
    "two exponentials": lambda p: 0.5 + math.exp(-p / 150) + math.exp(-p / 3000),
    "cosine schedule": lambda p: 1 + 2 * (1 + p / 20) ** -0.4 + 0.1 * math.cos(math.pi * min(p / 6000, 1)),
}
FALLING = ["power law", "logarithm", "exponential", "cosine schedule"]


def play(
    guard: ConvergenceGuard,
    curve: Curve,
    grow: dict[float, float],
    *,
    overstated: float = 1.0,
    noise: float = 0.3,
    bump: float = 0.0,
    until: float = 6000.0,
    seed: int = 0,
) -> list[tuple[float, Verdict]]:
    """Train along `curve`, with batches that `grow` {at progress: to scale} as far as the guard allows.

    `noise` is the spread of one sample's loss; `bump` lifts the loss after each growth, for some dozens of steps.
    """
    rng = np.random.default_rng(seed)
    claimed = true = lifted = 0.0
    last, verdicts = 1.0, []
    while claimed < until:
        wanted = max([1.0, *(scale for at, scale in grow.items() if claimed >= at)])
        scale = min(wanted, guard.largest_scale)
        lifted = bump * curve(true) if scale > last else lifted * math.exp(-BEAT / 30)
        last = scale
        gain = 21 * scale / (20 + scale)  # a noise scale of 20·M0
        losses = []
        for _ in range(BEAT):
            claimed += gain
            true += gain / (overstated if scale > 1 else 1.0)
            losses.append(curve(true))
        samples = BEAT * M0 * scale
        verdict = guard.observe(
            claimed, float(np.mean(losses)) + lifted + rng.normal() * noise / math.sqrt(samples), samples, scale
        )
        if verdict is not None:
            verdicts.append((claimed, verdict))
    return verdicts


def kinds(verdicts: list[tuple[float, Verdict]]) -> list[str]:
    return [verdict.kind for _, verdict in verdicts]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("noise", [0.01, 0.3, 2.0])
def test_healthy_growth_is_left_alone(name: str, noise: float) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        grow = dict(zip(np.sort(rng.uniform(300, 4000, 4)).tolist(), [2.0, 4.0, 8.0, 16.0], strict=True))
        guard = ConvergenceGuard()
        assert play(guard, CURVES[name], grow, noise=noise, bump=rng.uniform(-0.05, 0.1), seed=seed) == []
        assert guard.largest_scale == math.inf


@pytest.mark.parametrize("name", FALLING)
def test_efficiency_that_is_overstated_four_times_is_suspected_and_stepped_back_from(name: str) -> None:
    for seed in range(3):
        guard = ConvergenceGuard()
        verdicts = play(guard, CURVES[name], {1000.0: 4.0}, overstated=4.0, noise=0.1, until=4000, seed=seed)
        assert kinds(verdicts)[:2] == ["suspected", "stepped_back"]
        at, first = verdicts[0]
        assert at < 2000
        assert first.largest_scale == 1.0
        assert first.seen < 0.5 * first.claimed
        assert "from 1 to 4 times" in first.message


def test_the_limit_is_eased_after_a_long_stretch_and_step_by_step() -> None:
    grow = {1000.0: 8.0}
    verdicts = play(ConvergenceGuard(), CURVES["power law"], grow, overstated=4.0, noise=0.05, until=8000)
    (_, first), (confirmed_at, _), (eased_at, eased) = verdicts[:3]
    assert [first.kind, eased.kind] == ["suspected", "eased"]
    assert eased.largest_scale == 2.0
    assert eased_at >= 2 * confirmed_at


def test_a_cured_efficiency_frees_the_batch_again() -> None:
    guard = ConvergenceGuard()
    play(guard, CURVES["logarithm"], {1000.0: 4.0}, overstated=4.0, noise=0.05, until=1900)
    assert guard.largest_scale == 1.0
    resumed = ConvergenceGuard()
    resumed.load(guard.state())
    progress, scale = 1900.0, 1.0
    while progress < 20000 and not math.isinf(resumed.largest_scale):
        progress += 16 * scale
        resumed.observe(progress, CURVES["logarithm"](progress), 1024 * scale, scale)
        scale = min(4.0, resumed.largest_scale)
    assert resumed.largest_scale == math.inf


def test_a_curve_that_just_flattens_is_forgiven_after_comparing() -> None:
    def bend(p: float) -> float:
        return 3 - p / 1000 if p < 1500 else 1.5 - (p - 1500) / 20000

    guard = ConvergenceGuard()
    verdicts = play(guard, bend, {1450.0: 8.0}, noise=0.05)
    assert kinds(verdicts) == ["suspected", "withdrawn"]
    assert guard.largest_scale == math.inf


def test_a_loss_that_blows_up_after_growth_is_caught_soon() -> None:
    guard = ConvergenceGuard()
    verdicts = []
    for step in range(1, 200):
        progress = 16.0 * step
        scale = 1.0 if progress <= 1600 else 4.0
        loss = 3 * (1 + progress / 20) ** -0.5 + max(0.0, progress - 1600) / 100
        verdicts += [v for v in [guard.observe(progress, loss, 1024 * scale, scale)] if v]
        if verdicts:
            break
    assert verdicts[0].largest_scale == 1.0
    assert "does not fall" in verdicts[0].message
    assert progress < 2000


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_steps_back_at_once_but_not_at_m0(loss: float) -> None:
    guard = ConvergenceGuard()
    assert guard.observe(16.0, loss, 64, 1.0) is None
    verdict = guard.observe(32.0, loss, 256, 4.0)
    assert verdict is not None
    assert verdict.kind == "stepped_back"
    assert guard.largest_scale == 1.0
    assert guard.observe(48.0, loss, 256, 4.0) is None


def test_a_flat_loss_says_nothing() -> None:
    assert play(ConvergenceGuard(), lambda p: 1.0, {1000.0: 8.0}, overstated=4.0) == []


def test_without_a_reference_growth_is_not_judged() -> None:
    guard = ConvergenceGuard()
    assert not guard.is_ready
    assert play(guard, CURVES["power law"], {0.0: 8.0}, overstated=4.0) == []


def test_a_batch_that_shrinks_by_itself_is_no_matter() -> None:
    guard = ConvergenceGuard()
    for step in range(1, 400):
        scale = (1.0, 8.0, 2.0, 8.0)[step // 100]
        progress = 16.0 * step
        assert guard.observe(progress, CURVES["power law"](progress), 1024 * scale, scale) is None


def test_a_guard_goes_on_from_its_state_as_if_nothing_had_happened() -> None:
    whole, parts = ConvergenceGuard(), ConvergenceGuard()
    rng = np.random.default_rng(3)
    seen: list[tuple[Verdict | None, Verdict | None]] = []
    for step in range(1, 400):
        progress = 16.0 * step
        scale = min(4.0 if progress > 1600 else 1.0, whole.largest_scale)
        true = progress if progress <= 1600 else 1600 + (progress - 1600) / 4
        loss = CURVES["logarithm"](true) + 0.003 * rng.normal()
        seen.append((whole.observe(progress, loss, 1024, scale), parts.observe(progress, loss, 1024, scale)))
        resumed = ConvergenceGuard()
        resumed.load(json.loads(json.dumps(parts.state(), allow_nan=False)))
        parts = resumed
    assert all(one == other for one, other in seen)
    assert any(one is not None for one, _ in seen)
    assert whole.state() == parts.state()


def test_memory_stays_bounded_over_a_long_run() -> None:
    guard = ConvergenceGuard()
    for step in range(1, 20000):
        scale = 1.0 if step % 4000 < 2000 else 4.0
        guard.observe(32.0 * step, 3 * (32.0 * step) ** -0.1, 1024 * scale, scale)
    assert len(json.dumps(guard.state())) < 20_000


def test_observations_without_progress_or_samples_are_ignored() -> None:
    guard = ConvergenceGuard()
    guard.observe(10.0, 1.0, 64, 1.0)
    before = guard.state()
    guard.observe(10.0, 5.0, 64, 1.0)
    guard.observe(20.0, 5.0, 0, 1.0)
    assert guard.state() == before


def descend(overstated: float, seed: int) -> list[str]:
    """SGD on least squares with AdaScale and the exact gain, of which `overstated` times as much is claimed."""
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1, 33) ** -1.2
    error, rate, noise, samples = np.ones(32), 0.2 / spectrum.sum(), 0.1, 512
    guard, progress, found = ConvergenceGuard(), 0.0, []
    losses: list[float] = []
    while progress < 2000:
        scale = min(1.0 if progress < 600 else 8.0, guard.largest_scale)
        size = int(samples * scale)
        inputs = rng.normal(size=(size, 32)) * np.sqrt(spectrum)
        residuals = inputs @ error + noise * rng.normal(size=size)
        sqr = float(((spectrum * error) ** 2).sum())
        var = (spectrum.sum() * (error @ (spectrum * error) + noise**2) + sqr) / samples
        gain = (var + sqr) / (var / scale + sqr)
        error = error - rate * gain * inputs.T @ residuals / size
        progress += gain * (overstated if scale > 1 else 1.0)
        losses.append(float(np.mean(residuals**2)) / 2)
        if len(losses) == 8:
            verdict = guard.observe(progress, float(np.mean(losses)), 8 * size, scale)
            found += [verdict.kind] if verdict else []
            losses = []
    return found


def test_real_descent_with_an_honest_gain_is_left_alone() -> None:
    assert descend(1.0, seed=0) == []


def test_real_descent_with_an_overstated_gain_is_caught() -> None:
    assert descend(4.0, seed=1)[:2] == ["suspected", "stepped_back"]


@pytest.mark.parametrize(
    "wrong", [{"least_ratio": 1.0}, {"growth": 1.0}, {"lasting": 2}, {"least_bins": 4}, {"sigmas": math.nan}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSpec, match=next(iter(wrong))):
        GuardOptions(**wrong)  # type: ignore[arg-type]


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="state"):
        ConvergenceGuard().load({"something": "else"})
