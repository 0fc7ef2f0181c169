"""What the tuner decides, by properties and on a job whose parameters are known; and its thread."""

from __future__ import annotations

import dataclasses
import logging
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pollux.agent.batching import BatchConfig, fitted_to, initial_config
from pollux.agent.experience import Experience
from pollux.agent.tuner import DEFAULT_TUNER, NO_FITS, Measured, Tuned, Tuner, TunerOptions, tune
from pollux.core import BatchLimits, GradientStats, Observation, ObservationKey, Profile, Progress, Shape, dumps
from pollux.errors import InvalidModel, InvalidSpec
from pollux.goodput import PAPER, RACKS, GoodputModel, Observations, ThetaSys, fit
from pollux.goodput.pooled import Corrected, Kind

THETA = ThetaSys(0.05, 0.001, 0.03, 0.002, 0.12, 0.006, 1.8)
BOX = BatchLimits(128, 8192, 8, 1024)
PATIENCE_S = 20.0
"""Far beyond what any of this takes."""


def profile_of(theta: ThetaSys, keys, passes: int = 10, gpu_type: str = "v100") -> Profile:
    """What a job with these parameters measures under keys (K, N, m)."""
    profile = Profile()
    for num_gpus, num_nodes, m in keys:
        grad = PAPER.t_grad(theta, m)
        step = PAPER.t_step(theta, num_gpus, PAPER.level(num_nodes, 1), m)
        seen = Observation(passes * grad, passes, passes * step, max(0.0, passes * (step - grad)), passes)
        profile = profile.add(gpu_type, ObservationKey(Shape(num_gpus, num_nodes), m), seen)
    return profile


KEYS = [(1, 1, 32), (1, 1, 128), (2, 1, 64), (4, 1, 32), (4, 1, 128)]
KEYS += [(2, 2, 32), (4, 2, 64), (8, 2, 128), (8, 2, 16), (16, 4, 64)]


def measured(**changes) -> Measured:
    usual = Measured(
        profile=profile_of(THETA, KEYS),
        gradient=GradientStats(1.0, 8.0),
        config=BatchConfig(128, 32, 1),
        shape=Shape(4),
        gpu_type="v100",
        limits=BOX,
        progress=Progress(10.0, 1000.0),
        proven_per_gpu_batch_size=1024,
        largest_batch_size=8192,
    )
    return dataclasses.replace(usual, **changes)


def log_floats(low: float, high: float):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def limits(draw):
    initial, smallest = draw(st.integers(1, 500)), draw(st.integers(1, 40))
    return BatchLimits(
        initial, draw(st.integers(initial, 100 * initial)), smallest, draw(st.integers(max(smallest, 2), 600))
    )


thetas = st.builds(
    ThetaSys,
    *[log_floats(1e-3, 1.0), log_floats(1e-5, 0.1), *[log_floats(1e-4, 1.0), log_floats(1e-6, 0.1)] * 2],
    st.floats(1.0, 5.0),
)
gradients = st.builds(GradientStats, log_floats(1e-4, 1e4), log_floats(1e-4, 1e4))
any_gradient = st.none() | gradients
shapes = st.tuples(st.integers(1, 16), st.integers(1, 4)).map(lambda pair: Shape(max(pair), min(pair)))


@st.composite
def situations(draw, gradient=any_gradient):
    """Anything that a job may come to: bounds just lowered, other GPUs than before, a fit of one point."""
    box, shape = draw(limits()), draw(shapes)
    assume(box.max_batch_size >= shape.num_gpus)
    keys = draw(st.lists(st.tuples(st.integers(1, 8), st.just(1), st.integers(1, 256)), max_size=4, unique=True))
    keys += draw(st.lists(st.tuples(st.integers(4, 16), st.just(2), st.integers(1, 256)), max_size=2, unique=True))
    earlier = BatchLimits(box.initial_batch_size, 200 * box.initial_batch_size + 64, 1, draw(st.integers(2, 700)))
    wanted = BatchConfig(draw(st.integers(1, 2 * box.max_batch_size)), 1, 1)
    return Measured(
        profile=profile_of(draw(thetas), keys),
        gradient=draw(gradient),
        config=draw(st.just(initial_config(box, shape.num_gpus)) | st.just(fitted_to(wanted, earlier, shape.num_gpus))),
        shape=shape,
        gpu_type="v100",
        limits=box,
        progress=Progress(0.0),
        proven_per_gpu_batch_size=draw(st.integers(0, 600)),
        largest_batch_size=draw(st.integers(0, 2 * box.max_batch_size)),
    )


def run(situation: Measured, options: TunerOptions = DEFAULT_TUNER, warm=NO_FITS) -> Tuned:
    return tune(situation, warm, options)


@settings(max_examples=60)
@given(situations())
def test_what_the_job_has_afterwards_is_inside_all_bounds(situation):
    tuned = run(situation)
    kept = tuned.config or situation.config
    box, before, num_gpus = situation.limits, situation.config, situation.shape.num_gpus
    assert kept.is_within(situation.allowed(2.0), num_gpus)
    lowest = max(box.initial_batch_size, box.min_per_gpu_batch_size * num_gpus)
    assert kept.batch_size <= max(lowest, situation.largest_batch_size)
    if situation.proven_per_gpu_batch_size > 0:
        tried = max(2 * situation.proven_per_gpu_batch_size, before.per_gpu_batch_size, box.min_per_gpu_batch_size)
        assert kept.per_gpu_batch_size <= tried
    if tuned.config is not None and tuned.config.per_gpu_batch_size < box.min_per_gpu_batch_size:
        assert kept == fitted_to(kept, situation.allowed(2.0), num_gpus)  # only what M0 or M_max forces


@settings(max_examples=60)
@given(situations())
def test_a_decision_is_not_taken_back_when_nothing_new_was_measured(situation):
    first = run(situation)
    again = dataclasses.replace(situation, config=first.config or situation.config)
    assert run(again, warm=first.fits).config is None


@settings(max_examples=60)
@given(situations(gradient=gradients))
def test_a_batch_size_that_may_stay_is_left_only_for_one_that_promises_five_per_cent_more(situation):
    tuned = run(situation)
    num_gpus = situation.shape.num_gpus
    if tuned.config is None or not situation.config.is_within(situation.allowed(2.0), num_gpus):
        return
    stayed = run(situation, TunerOptions(adapt=False))
    assert stayed.config is None
    assert tuned.goodput > 1.05 * stayed.goodput


@settings(max_examples=60)
@given(situations(gradient=st.just(GradientStats(1.0, 1.0))), log_floats(1e-4, 1e4), log_floats(1e-4, 1e4))
def test_more_noise_never_makes_the_batch_smaller(situation, one, other):
    num_gpus = situation.shape.num_gpus
    start = dataclasses.replace(situation, config=initial_config(situation.limits, num_gpus))
    assume(situation.limits.max_per_gpu_batch_size >= 12)  # where integers are coarse, less than 5 % may decide
    sizes = []
    for var in sorted((one, other)):
        tuned = run(dataclasses.replace(start, gradient=GradientStats(1.0, var)))
        sizes.append((tuned.config or start.config).batch_size)
    assert sizes[0] <= sizes[1]


@given(situations(gradient=st.none()))
def test_without_noise_statistics_the_batch_never_grows_beyond_what_the_bounds_demand(situation):
    tuned = run(situation)
    if tuned.config is not None:
        assert not situation.config.is_within(situation.allowed(2.0), situation.shape.num_gpus)
        lowest = max(
            situation.limits.initial_batch_size, situation.limits.min_per_gpu_batch_size * situation.shape.num_gpus
        )
        assert tuned.config.batch_size <= max(situation.config.batch_size, lowest)
    assert tuned.efficiency is None
    assert tuned.goodput is None
    assert bool(tuned.model.throughput) == bool(situation.profile)


def test_known_parameters_are_recovered_and_the_best_batch_size_follows():
    situation = measured()
    tuned = run(situation)
    fitted = tuned.model.throughput["v100"]
    assert fitted.priors == ()
    assert fitted.params == pytest.approx(THETA._asdict(), rel=0.06)
    for K, N, m in [(1, 1, 512), (2, 1, 128), (4, 1, 256), (4, 2, 128), (8, 2, 32), (16, 4, 128)]:
        truth = PAPER.t_step(THETA, K, PAPER.level(N, 1), m)
        found = PAPER.t_step([fitted.params[name] for name in PAPER.parameters], K, PAPER.level(N, 1), m)
        assert found == pytest.approx(truth, rel=0.01)
    truth = GoodputModel(PAPER, THETA, situation.gradient, BOX)
    config = tuned.config
    reached = truth.goodput(situation.shape, config.per_gpu_batch_size, config.accumulation_steps)
    assert reached == pytest.approx(truth.best(situation.shape).goodput, rel=0.01)
    assert tuned.goodput == pytest.approx(reached, rel=0.01)
    assert tuned.goodput == pytest.approx(tuned.throughput * tuned.efficiency)


def test_the_best_per_gpu_batch_size_follows_the_noise_and_the_gpus():
    def chosen(var: float, shape: Shape) -> BatchConfig:
        config = initial_config(BOX, shape.num_gpus)
        found = run(measured(gradient=GradientStats(1.0, var), shape=shape, config=config))
        return found.config or config

    on_four = [chosen(var, Shape(4)).batch_size for var in (0.01, 1.0, 10.0, 100.0)]
    assert on_four == sorted(on_four)
    assert on_four[0] == 128
    assert on_four[-1] > 1000
    assert chosen(10.0, Shape(1)).batch_size < chosen(10.0, Shape(8, 2)).batch_size


def test_the_growth_of_a_pass_is_bounded_by_what_has_worked():
    tuned = run(measured(gradient=GradientStats(1.0, 1e4), proven_per_gpu_batch_size=32))
    assert tuned.config.per_gpu_batch_size == 64
    tuned = run(measured(gradient=GradientStats(1.0, 1e4), proven_per_gpu_batch_size=32), TunerOptions(growth=1.0))
    assert tuned.config is None or tuned.config.per_gpu_batch_size <= 32


def test_with_one_batch_size_seen_a_larger_one_looks_attractive():
    tuned = run(measured(profile=profile_of(THETA, [(4, 1, 32)]), proven_per_gpu_batch_size=32))
    assert tuned.config.per_gpu_batch_size == 64
    assert "promises" in tuned.reason


def test_the_guard_takes_the_batch_back_at_once_and_the_report_knows():
    large = BatchConfig(2048, 512, 1)
    tuned = run(measured(gradient=GradientStats(1.0, 1e4), config=large, largest_batch_size=300))
    assert 128 <= tuned.config.batch_size <= 300
    assert "no longer allowed" in tuned.reason
    assert tuned.model.limits == dataclasses.replace(BOX, max_batch_size=300)
    tuned = run(measured(config=large, largest_batch_size=1))
    assert tuned.config == BatchConfig(128, 32, 1)


def test_after_out_of_memory_the_same_batch_is_cut_into_more_passes_even_before_any_fit():
    smaller = dataclasses.replace(BOX, max_per_gpu_batch_size=100)
    stuck = measured(profile=Profile(), gradient=None, config=BatchConfig(800, 200, 1), limits=smaller)
    assert run(stuck).config == BatchConfig(800, 100, 2)
    assert run(dataclasses.replace(stuck, proven_per_gpu_batch_size=0)).config == BatchConfig(800, 100, 2)


def test_m0_need_not_divide_by_the_number_of_replicas():
    box = BatchLimits(1000, 1000, 1, 400)
    tuned = run(measured(limits=box, shape=Shape(3), config=initial_config(box, 3)))
    assert tuned.config is None
    assert tuned.throughput > 0


def test_a_fixed_batch_size_stays_but_the_job_is_fitted_and_predicted():
    tuned = run(measured(config=BatchConfig(9999, 5000, 1)), TunerOptions(adapt=False))
    assert tuned.config is None
    assert tuned.reason == "the batch size is fixed"
    assert tuned.model.throughput["v100"].max_gpus_observed == 16
    assert tuned.goodput > 0


def test_the_model_reports_what_was_measured():
    situation = measured()
    model = run(situation).model
    assert (model.limits, model.gradient, model.progress) == (BOX, situation.gradient, situation.progress)
    assert model.realloc_delay_s is None
    assert model.throughput["v100"] == fit(Observations.of(situation.profile.of_type("v100"))).summary()


def test_nothing_measured_means_stay_and_an_empty_model():
    tuned = run(measured(profile=Profile(), gradient=None))
    assert tuned.config is None
    assert tuned.problem == ""
    assert tuned.model.throughput == {}
    assert (tuned.throughput, tuned.efficiency, tuned.goodput) == (None, None, None)


def test_measurements_that_cannot_be_fitted_mean_stay_and_say_why():
    broken = Profile().add("v100", ObservationKey(Shape(1), 32), Observation(0.0, 0, 1e9, 0.0, 1))
    tuned = run(measured(profile=broken))
    assert tuned.config is None
    assert "iteration_time_s" in tuned.problem or "grad_time_s" in tuned.problem
    assert tuned.model.throughput == {}


def test_what_was_fitted_before_survives_measurements_that_cannot_be_fitted():
    good = run(measured())
    broken = Profile().add("v100", ObservationKey(Shape(1), 32), Observation(0.0, 0, 1e9, 0.0, 1))
    tuned = run(measured(profile=broken), warm=good.fits)
    assert tuned.fits == good.fits
    assert tuned.problem


def test_a_fit_that_gives_no_usable_model_means_stay(monkeypatch):
    def refuse(*_):
        raise InvalidModel("theta", (), "gives no time per iteration", "Give others")

    monkeypatch.setattr(GoodputModel, "best", refuse)
    tuned = run(measured())
    assert tuned.config is None
    assert "gives no time" in tuned.problem
    assert run(measured(largest_batch_size=128, config=BatchConfig(512, 128, 1))).config == BatchConfig(128, 32, 1)


def test_only_the_gpu_type_in_use_is_fitted_again():
    both = profile_of(THETA, KEYS, gpu_type="t4")
    for key, seen in profile_of(THETA, KEYS).of_type("v100").items():
        both = both.add("v100", key, seen)
    first = run(measured(profile=both))
    assert set(first.model.throughput) == {"t4", "v100"}
    second = run(measured(profile=both), warm=first.fits)
    assert second.fits["t4"] is first.fits["t4"]
    assert second.fits["v100"] is not first.fits["v100"]


@pytest.mark.parametrize("option", [{"hysteresis": 0.9}, {"growth": 0.5}, {"adapt": 1}])
def test_options_that_cannot_work_are_refused(option):
    with pytest.raises(InvalidSpec, match=next(iter(option))):
        TunerOptions(**option)


# What others of its kind have measured.


def kind(theta: ThetaSys = THETA, keys=KEYS) -> Corrected:
    pool = Kind()
    pool.note(profile_of(theta, keys).of_type("v100"))
    known = pool.model()
    assert known is not None
    return known


ONE_GPU = profile_of(THETA, [(1, 1, 32)])
"""All that a job has measured which has only begun."""


def test_on_gpus_that_it_has_not_run_on_a_job_goes_by_its_kind():
    newcomer = measured(profile=ONE_GPU, shape=Shape(16, 4), config=BatchConfig(128, 8, 1))
    experienced = dataclasses.replace(newcomer, profile=profile_of(THETA, KEYS))
    told = tune(newcomer, told=kind())
    assert told.config == tune(experienced).config
    assert told.config != tune(newcomer).config
    assert told.throughput == pytest.approx(tune(experienced).throughput, rel=0.02)


def test_so_does_one_that_has_measured_nothing_at_all():
    told = tune(measured(profile=Profile()), told=kind())
    assert told.config == tune(measured()).config
    assert not told.model.throughput


def test_a_job_that_is_slower_than_its_kind_throughout_is_like_it():
    slower = ThetaSys(*(2.0 * seconds for seconds in THETA[:6]), THETA[6])
    own = profile_of(slower, [(1, 1, 32), (1, 1, 128)])
    told = tune(measured(profile=own, shape=Shape(16, 4), config=BatchConfig(128, 8, 1)), told=kind())
    faster = tune(measured(shape=Shape(16, 4), config=BatchConfig(128, 8, 1)))
    assert told.config == faster.config
    assert told.throughput == pytest.approx(faster.throughput / 2.0, rel=0.05)


def test_a_job_that_differs_from_its_kind_goes_by_what_it_measured():
    odd = ThetaSys(0.001, 0.01, 0.03, 0.002, 0.12, 0.006, 1.8)
    situation = measured(profile=profile_of(odd, KEYS))
    assert tune(situation, told=kind()) == tune(situation)


def test_what_it_reports_is_its_own_all_the_same():
    told, untold = tune(measured(profile=ONE_GPU), told=kind()), tune(measured(profile=ONE_GPU))
    assert (told.model, told.fits) == (untold.model, untold.fits)


def test_bounds_hold_whatever_the_kind_says():
    tuned = tune(measured(profile=ONE_GPU, proven_per_gpu_batch_size=32, largest_batch_size=256), told=kind())
    assert tuned.config == BatchConfig(256, 64, 1)


def test_a_job_with_a_throughput_model_of_its_own_is_not_meant():
    racks, situation = TunerOptions(throughput_model=RACKS), measured(profile=ONE_GPU)
    assert tune(situation, options=racks, told=kind()) == tune(situation, options=racks)


# The thread.


@pytest.fixture
def tuners():
    made: list[Tuner] = []

    def make(*args, **kwargs) -> Tuner:
        made.append(Tuner(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Answers:
    """Where the thread's answers are waited for."""

    def __init__(self) -> None:
        self.all: list[Tuned] = []
        self._arrived = threading.Semaphore(0)

    def __call__(self, tuned: Tuned) -> None:
        self.all.append(tuned)
        self._arrived.release()

    def wait(self) -> Tuned:
        assert self._arrived.acquire(timeout=PATIENCE_S)
        return self.all[-1]


def submit(tuner: Tuner, situation: Measured) -> None:
    """Submit once the thread is free, which it is very soon after its last answer."""
    for _ in range(int(PATIENCE_S / 0.001)):
        if tuner.submit(situation):
            return
        threading.Event().wait(0.001)
    raise AssertionError("the thread is still busy")


def test_an_answer_of_the_thread_is_that_of_the_function_and_is_taken_once(tuners):
    answers = Answers()
    tuner = tuners(on_tuned=answers)
    assert tuner.take() is None
    submit(tuner, measured())
    answers.wait()
    tuned, expected = tuner.take(), run(measured())
    assert tuned.config == expected.config
    assert tuned.goodput == pytest.approx(expected.goodput, rel=1e-6)  # one of them may be machine code
    assert tuner.take() is None


def test_submit_never_waits_for_a_slow_fit(tuners):
    is_started, may_end = threading.Event(), threading.Event()

    def slow(situation, warm, options, told):
        is_started.set()
        assert may_end.wait(PATIENCE_S)
        return run(situation, options, warm)

    answers = Answers()
    tuner = tuners(on_tuned=answers, work=slow)
    assert tuner.submit(measured())
    assert is_started.wait(PATIENCE_S)
    assert [tuner.submit(measured()) for _ in range(100)] == [False] * 100
    assert tuner.take() is None
    may_end.set()
    answers.wait()
    assert tuner.take() is not None
    assert len(answers.all) == 1


def test_only_the_newest_answer_is_kept(tuners):
    answers = Answers()
    tuner = tuners(on_tuned=answers)
    for done in (1.0, 2.0, 3.0):
        submit(tuner, measured(progress=Progress(done)))
        answers.wait()
    assert tuner.take().model.progress == Progress(3.0)
    assert tuner.take() is None


def test_the_next_fit_starts_from_the_last(tuners):
    seen = []

    def spy(situation, warm, options, told):
        seen.append(dict(warm))
        return run(situation, options, warm)

    answers = Answers()
    tuner = tuners(on_tuned=answers, work=spy)
    for _ in range(2):
        submit(tuner, measured())
        answers.wait()
    assert seen == [{}, dict(answers.all[0].fits)]


def test_a_failure_costs_one_answer_and_is_logged_once(tuners, caplog):
    calls = []
    has_failed = threading.Semaphore(0)

    def failing(situation, warm, options, told):
        calls.append(situation)
        if len(calls) < 4:
            has_failed.release()
            raise (ZeroDivisionError("of mine") if len(calls) < 3 else KeyError("another"))
        return run(situation, options, warm)

    answers = Answers()
    tuner = tuners(on_tuned=answers, work=failing)
    with caplog.at_level(logging.INFO, logger="pollux.agent.tuner"):
        for _ in range(3):
            submit(tuner, measured())
            assert has_failed.acquire(timeout=PATIENCE_S)
        submit(tuner, measured())
        assert answers.wait().config is not None
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError, KeyError]


def test_the_thread_goes_by_what_the_daemon_was_told(tuners, tmp_path):
    path = tmp_path / "experience.json"
    path.write_text(dumps(profile_of(THETA, KEYS)))
    answers = Answers()
    tuner = tuners(on_tuned=answers, experience=Experience(path))
    situation = measured(profile=ONE_GPU, shape=Shape(16, 4), config=BatchConfig(128, 8, 1))
    submit(tuner, situation)
    assert answers.wait() == tune(situation, told=kind())


def test_after_a_failure_it_does_without(tuners, tmp_path):
    path = tmp_path / "experience.json"
    path.write_text(dumps(profile_of(THETA, KEYS)))
    has_failed = threading.Event()

    def failing(situation, warm, options, told):
        if told is not None:
            has_failed.set()
            raise ZeroDivisionError("of theirs")
        return run(situation, options, warm)

    answers = Answers()
    tuner = tuners(on_tuned=answers, work=failing, experience=Experience(path))
    submit(tuner, measured())
    assert has_failed.wait(PATIENCE_S)
    submit(tuner, measured())
    assert answers.wait() == tune(measured())


def test_a_failure_of_the_listener_does_not_end_the_thread(tuners, caplog):
    answers = Answers()

    def listener(tuned: Tuned) -> None:
        answers(tuned)
        raise RuntimeError("the reporter is gone")

    tuner = tuners(on_tuned=listener)
    for _ in range(2):
        submit(tuner, measured())
        answers.wait()
    assert tuner.take() is not None


def test_a_problem_is_logged_when_it_appears_and_not_every_time(tuners, caplog):
    broken = Profile().add("v100", ObservationKey(Shape(1), 32), Observation(0.0, 0, 1e9, 0.0, 1))
    answers = Answers()
    tuner = tuners(on_tuned=answers)
    with caplog.at_level(logging.INFO, logger="pollux.agent.tuner"):
        for _ in range(3):
            submit(tuner, measured(profile=broken))
            answers.wait()
    assert len(caplog.records) == 1


def test_close_ends_the_thread_and_may_be_called_twice(tuners):
    before = threading.active_count()
    tuner = tuners()
    submit(tuner, measured())
    tuner.close()
    tuner.close()
    assert threading.active_count() == before
    assert not tuner.submit(measured())


def test_the_thread_does_not_load_numba(tmp_path):
    script = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_tuner import KEYS, THETA, Answers, dumps, measured, profile_of
from pollux.agent.tuner import Experience, Tuner
answers = Answers()
path = Path(sys.argv[2])
path.write_text(dumps(profile_of(THETA, KEYS)))
tuner = Tuner(on_tuned=answers, experience=Experience(path))
assert tuner.submit(measured())
assert answers.wait().config is not None
tuner.close()
print("numba" in sys.modules)
"""
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "experience.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "False\n", done.stderr
