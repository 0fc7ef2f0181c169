"""The stopwatch against a clock that the tests set by hand."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.stopwatch import FIRST_FEW, LONGEST_QUEUE, WINDOW, CudaClock, HostClock, Stopwatch
from pollux.core import Observation, ObservationKey, Profile, Shape
from pollux.errors import InvalidInput, InvalidSpec
from pollux.goodput import Observations

ONE, TWO = Shape(1), Shape(2)


class Hands:
    """A clock whose hands the test moves; times are multiples of 1/1024, so sums are exact."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """A training loop as the job drives it."""

    def __init__(self, skip: int = 0, gpu_type: str = "v100") -> None:
        self.hands = Hands()
        self.watch = Stopwatch(gpu_type, HostClock(self.hands), skip)

    def run(self, seconds, m=32, shape=ONE, sync_s=0.0, is_synchronising=True, counts=True, hooked=True) -> None:
        self.watch.begin_pass()
        self.hands.now += (seconds - sync_s) / 2
        if is_synchronising and hooked:
            self.watch.gradients_ready()
        self.hands.now += sync_s
        self.watch.end_backward()
        self.hands.now += (seconds - sync_s) / 2
        self.watch.end_pass(shape, m, is_synchronising=is_synchronising, counts=counts)

    def seen(self, m=32, shape=ONE) -> Observation | None:
        return self.watch.profile().of_type("v100").get(ObservationKey(shape, m))


def test_sums_of_both_kinds_of_passes_are_exact():
    loop = Loop()
    for step in range(20):
        loop.run(1 + step / 16, shape=TWO, is_synchronising=False)
        loop.run(2.0, shape=TWO, sync_s=0.5)
    assert loop.seen(shape=TWO) == Observation(20 + sum(range(20)) / 16, 20, 40.0, 10.0, 20)


def test_each_shape_and_batch_size_has_its_own_sums():
    loop = Loop()
    loop.run(1.0)
    loop.run(2.0, m=64)
    loop.run(3.0, m=64, shape=Shape(4, 2))
    loop.run(1.0, m=32)
    assert {key: seen.sync_pass_time_s for key, seen in loop.watch.profile().of_type("v100").items()} == {
        ObservationKey(ONE, 32): 2.0,
        ObservationKey(ONE, 64): 2.0,
        ObservationKey(Shape(4, 2), 64): 3.0,
    }


def test_the_first_passes_after_a_change_are_warm_up():
    loop = Loop(skip=2)
    for seconds in (9.0, 9.0, 1.0):
        loop.run(seconds)
    for seconds in (7.0, 7.0, 2.0):
        loop.run(seconds, m=64)
    for seconds in (9.0, 9.0, 1.0):
        loop.run(seconds)
    assert loop.seen() == Observation(0.0, 0, 2.0, 0.0, 2)
    assert loop.seen(m=64) == Observation(0.0, 0, 2.0, 0.0, 1)


def test_an_equal_shape_is_no_change():
    loop = Loop(skip=1)
    for _ in range(4):
        loop.run(1.0, shape=Shape(2))
    assert loop.seen(shape=TWO).sync_count == 3


def test_the_first_pass_after_an_interruption_is_left_out():
    loop = Loop()
    loop.run(1.0)
    loop.watch.begin_pass()  # the loader is asked, but the epoch is over
    loop.watch.interrupt()
    loop.hands.now += 100.0
    loop.run(3.0)
    loop.run(1.0)
    assert loop.seen() == Observation(0.0, 0, 2.0, 0.0, 2)


def test_an_interruption_is_not_forgotten_by_a_change_of_batch_size():
    loop = Loop(skip=0)
    loop.run(1.0)
    loop.watch.interrupt()
    loop.run(3.0, m=64)
    assert loop.seen(m=64) is None


def test_the_end_of_a_pass_that_was_not_begun_is_ignored():
    loop = Loop()
    loop.watch.interrupt()
    loop.watch.end_pass(ONE, 32, is_synchronising=True, counts=True)
    assert loop.watch.profile() == Profile()


def test_a_pass_that_does_not_count_is_as_if_it_had_not_been():
    loop = Loop(skip=2)
    for _ in range(3):
        loop.run(1.0)
    loop.run(50.0, m=16, counts=False)  # a measured step, split in two: no change of the batch size
    loop.run(1.0)
    assert loop.seen() == Observation(0.0, 0, 2.0, 0.0, 2)
    assert loop.seen(m=16) is None


@pytest.mark.parametrize("position", [0, 1, FIRST_FEW, 3 * WINDOW])
def test_a_single_pass_far_slower_than_the_rest_is_left_out_wherever_it_stands(position):
    loop = Loop()
    for index in range(4 * WINDOW):
        loop.run(50.0 if index == position else 1.0)
    assert loop.seen() == Observation(0.0, 0, 4 * WINDOW - 1.0, 0.0, 4 * WINDOW - 1)
    assert loop.watch.left_out == 1


def test_passes_up_to_five_times_the_median_count():
    loop = Loop()
    for _ in range(FIRST_FEW):
        loop.run(1.0)
    loop.run(5.0)
    loop.run(5.5)
    assert loop.seen().sync_pass_time_s == FIRST_FEW + 5.0
    assert loop.watch.left_out == 1


def test_the_two_kinds_of_passes_are_not_outliers_of_each_other():
    loop = Loop()
    for _ in range(20):
        loop.run(1.0, shape=TWO, is_synchronising=False)
        loop.run(32.0, shape=TWO, sync_s=31.0)
    assert loop.seen(shape=TWO) == Observation(20.0, 20, 640.0, 620.0, 20)


def test_a_lasting_slowdown_is_believed_after_a_while():
    loop = Loop()
    for _ in range(WINDOW):
        loop.run(1.0)
    for _ in range(2 * WINDOW):
        loop.run(8.0)
    assert 0 < loop.watch.left_out <= WINDOW
    assert loop.watch.typical_step_s() == 8.0


def test_one_replica_does_not_synchronise():
    loop = Loop()
    loop.run(2.0, shape=ONE, sync_s=0.5)
    assert loop.seen().sync_time_s == 0.0


def test_without_the_hook_on_the_gradients_nothing_counts_as_synchronisation():
    loop = Loop()
    loop.run(2.0, shape=TWO, sync_s=0.5)
    loop.run(2.0, shape=TWO, sync_s=0.5, hooked=False)  # what the pass before left must not be used again
    assert loop.seen(shape=TWO) == Observation(0.0, 0, 4.0, 0.5, 2)


def test_the_typical_step_adds_its_passes_up():
    loop = Loop()
    assert loop.watch.typical_step_s(3) is None
    for seconds in (2.0, 3.0, 40.0):
        loop.run(seconds)
    assert loop.watch.typical_step_s(3) == 9.0
    loop.run(1.0, is_synchronising=False)
    assert loop.watch.typical_step_s(3) == 5.0


times = st.floats(0.0, 1e4)


@given(st.lists(st.tuples(times, st.floats(0.0, 2.0), st.booleans()), max_size=3 * WINDOW))
def test_any_times_whatever_make_a_profile_that_core_accepts(passes):
    loop = Loop()
    for seconds, share, is_synchronising in passes:
        loop.run(seconds, shape=TWO, sync_s=seconds * share, is_synchronising=is_synchronising)
    seen = loop.seen(shape=TWO)
    if passes:
        assert seen.accum_count + seen.sync_count + loop.watch.left_out >= len(passes) - 2 * FIRST_FEW
    assert loop.watch.profile() == loop.watch.profile()


def test_the_state_is_plain_and_what_is_measured_later_is_added_to_it():
    loop = Loop()
    for _ in range(3):
        loop.run(1.0)
    state = json.loads(json.dumps(loop.watch.state()))
    later = Loop(skip=1)
    later.run(9.0)
    later.watch.load(state)
    assert later.watch.profile() == loop.watch.profile()
    for seconds in (9.0, 1.0, 2.0):
        later.run(seconds)
    assert later.seen() == Observation(0.0, 0, 6.0, 0.0, 5)


def test_what_another_gpu_type_measured_is_kept_apart():
    loop = Loop()
    loop.run(1.0)
    other = Loop(gpu_type="t4")
    other.watch.load(loop.watch.state())
    other.run(3.0)
    profile = other.watch.profile()
    assert profile.of_type("v100") == loop.watch.profile().of_type("v100")
    assert profile.of_type("t4")[ObservationKey(ONE, 32)].sync_pass_time_s == 3.0


def test_a_damaged_state_is_refused_and_changes_nothing():
    loop = Loop()
    loop.run(1.0)
    before = loop.watch.profile()
    with pytest.raises(InvalidInput):
        loop.watch.load({"observations": 7})
    assert loop.watch.profile() == before


def test_the_profile_can_be_fitted():
    loop = Loop()
    for m in (16, 32):
        for _ in range(3):
            loop.run(1.0 + m / 32, m=m)
    seen = Observations.of(loop.watch.profile().of_type("v100"))
    assert seen.t_grad.tolist() == [1.5, 2.0]


# A device that runs behind the host.


class Gpu:
    """A stream: work takes device time, and is done only as far as the test lets it run."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        self.done_s = 0.0
        self.made = 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._at_s: float | None = None

    def record(self) -> None:
        self._at_s = self._gpu.queued_s

    def query(self) -> bool:
        return self._at_s is not None and self._at_s <= self._gpu.done_s

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return (end._at_s - self._at_s) * 1000.0


def on_gpu(gpu: Gpu, watch: Stopwatch, seconds: float, sync_s: float) -> None:
    watch.begin_pass()
    gpu.queued_s += seconds - sync_s
    watch.gradients_ready()
    gpu.queued_s += sync_s
    watch.end_backward()
    watch.end_pass(TWO, 32, is_synchronising=True, counts=True)


def test_a_device_behind_the_host_is_read_once_it_is_there_and_never_waited_for():
    gpu = Gpu()
    watch = Stopwatch("a100", CudaClock(gpu.event), skip=0)
    for _ in range(4):
        on_gpu(gpu, watch, 1.0, 0.25)
    assert watch.profile() == Profile()
    gpu.done_s = 2.9
    assert watch.profile().of_type("a100")[ObservationKey(TWO, 32)] == Observation(0.0, 0, 2.0, 0.5, 2)
    gpu.done_s = 4.0
    assert watch.profile().of_type("a100")[ObservationKey(TWO, 32)] == Observation(0.0, 0, 4.0, 1.0, 4)


def test_a_device_that_never_answers_costs_no_more_than_a_bounded_queue():
    gpu = Gpu()
    watch = Stopwatch("a100", CudaClock(gpu.event), skip=0)
    for _ in range(LONGEST_QUEUE + 10):
        on_gpu(gpu, watch, 1.0, 0.25)
    assert watch.lost == 10
    gpu.done_s = gpu.queued_s
    assert watch.profile().of_type("a100")[ObservationKey(TWO, 32)].sync_count == LONGEST_QUEUE


def test_the_cuda_clock_is_refused_without_a_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidSpec, match=r"HostClock"):
        CudaClock()


def test_the_host_clock_measures_seconds():
    clock = HostClock()
    start = clock.mark()
    time.sleep(0.002)
    assert clock.seconds(start, clock.mark()) > 0.001
