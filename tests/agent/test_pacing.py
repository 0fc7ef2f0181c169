"""The stopwatch that waits, against a clock that only its sleeps and the tests' work move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.dealing import StepPlan
from pollux.agent.pacing import LEAST_TIME_S, MOST_SLIP, Pace, PacedStopwatch
from pollux.core import ObservationKey, Shape
from pollux.errors import PacingSlipped, PolluxError

TWO = Shape(2)
STEP = StepPlan(step=0, pass_index=0, start=0, stop=64, passes=1, per_gpu_batch_size=32)
PACE = Pace(until_gradients_s=0.06, pass_s=0.1, repeats=4, compress=20.0)


class Loop:
    """A training loop whose own work takes as long as the test says."""

    def __init__(self, pace: Pace = PACE) -> None:
        self.now = 100.0
        self.slept_s = 0.0
        self.watch = PacedStopwatch("emulated-t4", lambda *_: pace, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept_s += seconds

    def accumulate(self) -> float:
        began = self.now
        self.watch.begin_pass()
        self.watch.expect(TWO, STEP, 0)
        self.watch.end_backward()
        self.watch.end_pass(TWO, 32, is_synchronising=False, counts=True)
        return self.now - began

    def step(self, work_s: float = 0.002, average_s: float = 0.001, after_s: float = 0.0) -> float:
        """How long it took in all."""
        began = self.now
        self.watch.begin_pass()
        self.watch.expect(TWO, STEP, 0)
        self.now += work_s
        self.watch.gradients_ready()
        self.now += average_s
        self.watch.end_backward()
        self.now += after_s
        self.watch.end_pass(TWO, 32, is_synchronising=True, counts=True)
        return self.now - began


def test_a_pass_takes_as_long_as_it_should_however_little_work_it_is() -> None:
    loop = Loop()
    assert loop.step() == pytest.approx(0.1)
    assert loop.step(0.05, 0.02) == pytest.approx(0.1)
    assert loop.watch.slip == pytest.approx(0.0, abs=1e-9)


def test_what_is_measured_is_one_emulated_pass_with_its_share_of_synchronisation() -> None:
    loop = Loop()
    for _ in range(10):
        loop.step()
    seen = loop.watch.profile().of_type("emulated-t4")[ObservationKey(TWO, 32)]
    assert seen.sync_pass_time_s / seen.sync_count == pytest.approx(0.1 / 4)
    assert seen.sync_time_s / seen.sync_count == pytest.approx(0.04 / 4)


def test_what_comes_after_the_backward_does_not_add_up() -> None:
    loop = Loop()
    loop.step()
    began = loop.now
    for _ in range(100):
        loop.step(after_s=0.003)
    assert loop.now - began == pytest.approx(100 * 0.1, abs=0.004)


def test_a_late_pass_is_made_up_for_and_not_measured() -> None:
    loop = Loop()
    for _ in range(5):
        loop.step()
    began = loop.now
    assert loop.step(work_s=0.25) > 0.2
    for _ in range(9):
        loop.step()
    assert loop.now - began == pytest.approx(1.0)
    seen = loop.watch.profile().of_type("emulated-t4")[ObservationKey(TWO, 32)]
    assert seen.sync_pass_time_s / seen.sync_count == pytest.approx(0.1 / 4, rel=0.01)
    assert loop.watch.slip == pytest.approx(0.0, abs=1e-9)


def test_no_pass_is_cut_to_less_than_half() -> None:
    loop = Loop()
    loop.step()
    loop.step(work_s=0.5)
    assert [loop.step() for _ in range(3)] == pytest.approx([0.05] * 3)


def test_a_job_that_cannot_keep_up_ends_and_says_by_how_much() -> None:
    loop = Loop()
    while not loop.watch.is_too_slow:
        loop.step(work_s=0.12)
        assert loop.watch.trained_s < 60
    with pytest.raises(PacingSlipped, match=r"cannot keep its pace: .* --compress") as caught:
        loop.watch.fail()
    assert caught.value.slip > MOST_SLIP
    behind_s = caught.value.slip * caught.value.trained_s
    assert behind_s == pytest.approx(MOST_SLIP * LEAST_TIME_S, rel=0.1)
    assert isinstance(caught.value, PolluxError)


def test_a_slip_below_the_bound_is_told_and_borne() -> None:
    loop = Loop()
    for _ in range(300):
        loop.step(work_s=0.103, average_s=0.0)
    assert 0.02 < loop.watch.slip < MOST_SLIP
    assert not loop.watch.is_too_slow


def test_time_in_which_training_stood_still_is_no_slip() -> None:
    loop = Loop()
    for _ in range(200):
        loop.step()
    loop.now += 60.0
    loop.watch.start_over()
    loop.step(work_s=0.4)  # the others come later
    for _ in range(200):
        loop.step()
    assert loop.watch.slip == pytest.approx(0.0, abs=1e-9)


def test_the_first_step_waits_for_the_others_whatever_its_number_of_passes() -> None:
    loop = Loop()
    assert [loop.accumulate() for _ in range(3)] == pytest.approx([0.1] * 3)
    loop.step(average_s=2.0)
    for _ in range(5):
        loop.accumulate()
    assert loop.watch.slip == 0.0
    assert loop.accumulate() == pytest.approx(0.1)


def test_what_was_lost_before_a_change_stays_lost() -> None:
    loop = Loop()
    loop.step()
    loop.step(work_s=0.5)
    lost = loop.watch.slip * loop.watch.trained_s
    assert lost == pytest.approx(0.401, abs=0.01)
    loop.watch.start_over()
    for _ in range(50):
        loop.step()
    assert loop.watch.slip * loop.watch.trained_s == pytest.approx(lost)


def test_whoever_goes_on_takes_over_how_far_the_job_is_behind() -> None:
    before, after = Loop(), Loop()
    before.step()
    before.step(work_s=0.4)
    after.watch.go_on(*before.watch.pacing())
    assert after.watch.slip == before.watch.slip > 0
    after.step()
    assert after.watch.trained_s == pytest.approx(before.watch.trained_s + 0.1)


def test_the_usual_step_is_told_in_emulated_seconds_of_a_whole_real_one() -> None:
    loop = Loop()
    for _ in range(10):
        loop.step()
    assert loop.watch.typical_step_s() == pytest.approx(0.1 * 20.0)


@given(st.lists(st.floats(0.0, 0.15), min_size=1, max_size=60))
def test_it_is_never_ahead_and_never_later_than_its_work_demands(work: list[float]) -> None:
    loop = Loop()
    loop.step()
    began, busy = loop.now, 0.0
    for count, work_s in enumerate(work, 1):
        loop.step(work_s=work_s, average_s=0.0)
        busy += max(work_s, 0.1)
        assert count * 0.1 - 1e-9 <= loop.now - began <= busy + 1e-9
