"""The goodput model: fitting, the best (m, s), tables over shapes and jobs, and how well fits match measurements.

The baseline is the published procedure, written anew (`baselines.published`). Inputs are random with fixed seeds and
new for each repetition, so nothing is measured that a cache would answer; candidates per limits are cached, as in use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import inputs
from benchmarks.baselines import published
from benchmarks.inputs import APPLICATIONS
from benchmarks.measurement import Finding, LeftOut, Measurement, Table, cpu_seconds, cpu_times, median, spread
from pollux.core import BatchLimits, Shape
from pollux.goodput import PAPER, Envelope, Fit, GoodputModel, Observations, ShapeSet, best, fit, tables

POINTS = 20
JOBS = 160
SHAPES = ShapeSet.up_to(max_nodes=16, max_gpus=64)
PAIRS = [(shape.num_nodes, shape.num_gpus) for shape in SHAPES]
PUBLISHED = "published procedure, rewritten"
OTHER_WORK = np.ones(2**23)
"""64 MiB, more than caches hold."""


def measure() -> Iterator[Finding]:
    rng = np.random.default_rng(1)
    yield from _fits(rng)
    yield from _best(rng)
    yield from _tables(rng)
    yield from _starting()
    yield from _fit_error()


class FitCase(NamedTuple):
    """One application's random points, without and with one more."""

    application: str
    seen: Observations
    more: Observations
    more_profile: inputs.Profile
    earlier: Fit

    def cold(self) -> object:
        return fit(self.seen)

    def again(self) -> object:
        return fit(self.more, warm=self.earlier)

    def theirs(self) -> object:
        return published.fit(_points(self.seen))

    def theirs_again(self) -> object:
        return published.fit(_points(self.more))


def _points(seen: Observations) -> published.Points:
    return published.Points(seen.N, seen.K, seen.m, seen.t_grad, seen.t_iter)


def _fit_cases(rng: np.random.Generator, measured: dict[str, inputs.Profile]) -> list[FitCase]:
    """One for each application."""
    cases = []
    for name, profile in measured.items():
        keys = list(profile)
        chosen = [keys[index] for index in rng.choice(len(keys), POINTS + 1, replace=False)]
        part = {key: profile[key] for key in chosen}
        more = Observations.of(part)
        seen = more.subset(np.arange(POINTS))
        cases.append(FitCase(name, seen, more, part, fit(seen)))
    return cases


def _fits(rng: np.random.Generator) -> Iterator[Finding]:
    repetitions, draws = 12, 5
    measured = inputs.profiles(rng)
    source = "measured data" if inputs.traces() else "made-up times (no POLLUX_DATA)"
    for case in _fit_cases(rng, measured):
        case.again()  # all is compiled after this
    _fit_cases(rng, measured)[0].theirs()
    times: dict[str, list[list[float]]] = {"cold": [], "again": [], "alone": [], "theirs": [], "theirs_again": []}
    arrays = []
    for _ in range(repetitions):
        rows = [_fit_cases(rng, measured) for _ in range(draws)]
        cases = [case for row in rows for case in row]
        times["cold"].append(cpu_times(FitCase.cold, cases))
        times["theirs"].append(cpu_times(FitCase.theirs, rows[0]))
        times["again"].append(cpu_times(FitCase.again, cases))
        times["theirs_again"].append(cpu_times(FitCase.theirs_again, rows[0]))
        times["alone"].append([_after_other_work(FitCase.again, case) for case in cases])
        arrays.append(1e6 * cpu_seconds(Observations.of, [case.more_profile for case in cases]))
    # [repetition, fit], where fits of the same application are len(APPLICATIONS) apart
    ms = {name: 1e3 * np.array(rows) for name, rows in times.items()}
    for key, ours, theirs, bound, note in (
        (
            "goodput.fit20_ms",
            "cold",
            "theirs",
            5.0,
            "back to back; the published code itself: 193–377 ms recorded for 5–20 points",
        ),
        (
            "goodput.refit_ms",
            "again",
            "theirs_again",
            0.5,
            f"point {POINTS + 1}, warm start (the baseline has none), back to back",
        ),
        (
            "goodput.refit_alone_ms",
            "alone",
            "theirs_again",
            None,
            "the same, each refit after other work emptied the CPU caches",
        ),
    ):
        samples = ms[ours].mean(axis=1).tolist()
        yield Measurement(
            key,
            median(samples),
            "ms",
            median(ms[theirs].mean(axis=1).tolist()),
            PUBLISHED,
            bound,
            spread=spread(samples),
            note=f"mean of the six applications, {source}; {note}; 95 % of fits within "
            f"{np.quantile(ms[ours], 0.95):.2g} ms",
        )
    yield Measurement(
        "goodput.observations_us",
        median(arrays),
        "µs",
        spread=spread(arrays),
        note=f"the arrays of {POINTS + 1} profile entries, which each fit needs and no fit above includes",
    )
    by_application = {name: ms[name].reshape(-1, len(APPLICATIONS)) for name in ("cold", "again", "theirs")}
    yield Table(
        f"CPU ms of one fit of {POINTS} points, median by application",
        ("application", "ours, cold", "ours, one more point", "published procedure"),
        [
            (name, *(float(f"{np.median(column[:, place]):.3g}") for column in by_application.values()))
            for place, name in enumerate(APPLICATIONS)
        ],
    )


def _after_other_work(work: Callable[[FitCase], object], case: FitCase) -> float:
    """CPU seconds with CPU caches full of something else: what a process that refits now and then sees."""
    OTHER_WORK.sum()
    return cpu_times(work, [case])[0]


class BestCase(NamedTuple):
    job: GoodputModel
    shape: Shape

    def ours(self) -> object:
        return best(PAPER, self.job.theta, self.shape, self.job.gradient, self.job.limits)

    def theirs(self) -> object:
        job, gradient = self.job, self.job.gradient
        return published.best(
            job.theta, self.shape.num_nodes, self.shape.num_gpus, gradient.sqr, gradient.var, _limits(job.limits)
        )


def _limits(limits: BatchLimits) -> published.Limits:
    return published.Limits(
        limits.initial_batch_size,
        limits.max_batch_size,
        limits.min_per_gpu_batch_size,
        limits.max_per_gpu_batch_size,
    )


def _best_cases(rng: np.random.Generator, count: int) -> list[BestCase]:
    shapes, kinds = list(SHAPES), list(APPLICATIONS.values())
    return [BestCase(kinds[place % len(kinds)].model(rng), shapes[rng.integers(len(shapes))]) for place in range(count)]


def _unseen(rng: np.random.Generator, cases: list[BestCase]) -> list[BestCase]:
    """The same with limits that occur once: M_max up to a quarter higher."""
    changed = []
    for job, shape in cases:
        limits = job.limits
        new = BatchLimits(
            limits.initial_batch_size,
            int(limits.max_batch_size * rng.uniform(1.0, 1.25)) + len(changed) * 2,
            limits.min_per_gpu_batch_size,
            limits.max_per_gpu_batch_size,
        )
        changed.append(BestCase(GoodputModel(job.model, job.theta, job.gradient, new), shape))
    return changed


def _best(rng: np.random.Generator) -> Iterator[Finding]:
    for case in (BestCase(kind.model(rng), shape) for kind in APPLICATIONS.values() for shape in SHAPES):
        case.ours()  # candidates of every (limits, K)
    ours, first, theirs, theirs_first = [], [], [], []
    for _ in range(21):
        cases = _best_cases(rng, 300)
        unseen = _unseen(rng, cases[:60])
        ours.append(1e6 * cpu_seconds(BestCase.ours, cases))
        theirs.append(1e6 * cpu_seconds(BestCase.theirs, cases[:60]))
        first.append(1e6 * cpu_seconds(BestCase.ours, unseen))
        theirs_first.append(1e6 * cpu_seconds(BestCase.theirs, unseen))
    yield Measurement(
        "goodput.best_us",
        median(ours),
        "µs",
        median(theirs),
        PUBLISHED,
        30.0,
        spread=spread(ours),
        note="random jobs and shapes up to 16 nodes × 64 GPUs; the published code itself: 250 µs recorded",
    )
    yield Measurement(
        "goodput.best_first_us",
        median(first),
        "µs",
        median(theirs_first),
        PUBLISHED,
        spread=spread(first),
        note="first call with limits never seen before: lists the candidates, which are then kept",
    )


def _their_table(job: GoodputModel) -> object:
    return published.table(job.theta, PAIRS, job.gradient.sqr, job.gradient.var, _limits(job.limits))


def _their_table_at_once(job: GoodputModel) -> object:
    N, K = np.array(PAIRS).T
    return published.best_many(job.theta, N, K, job.gradient.sqr, job.gradient.var, _limits(job.limits))


def _our_table(job: GoodputModel) -> object:
    return tables([job], SHAPES)


def _tables(rng: np.random.Generator) -> Iterator[Finding]:
    kinds = list(APPLICATIONS.values())
    for kind in kinds:
        _our_table(kind.model(rng))  # the layout of these limits, kept from now on
    repetitions, baseline_repetitions = 15, 5
    one, at_once, theirs, first = [], [], [], []
    all_jobs, build, query = [], [], []
    for repetition in range(repetitions):
        six = [kind.model(rng) for kind in kinds]
        one.append(1e3 * cpu_seconds(_our_table, six))
        at_once.append(1e3 * cpu_seconds(_their_table_at_once, six))
        unseen = [case.job for case in _unseen(rng, [BestCase(job, Shape(1)) for job in six])]
        first.append(1e3 * cpu_seconds(_our_table, unseen))
        if repetition < baseline_repetitions:
            theirs.append(1e3 * cpu_seconds(_their_table, six))
        jobs = [kinds[place % len(kinds)].model(rng) for place in range(JOBS)]
        all_jobs.append(1e3 * cpu_seconds(lambda jobs: tables(jobs, SHAPES), [jobs]))
        build.append(1e3 * cpu_seconds(lambda jobs: Envelope(jobs, SHAPES), [jobs]))
        envelope = Envelope(jobs, SHAPES)
        gradients = [kinds[place % len(kinds)].gradient(rng) for place in range(JOBS)]
        query.append(1e3 * cpu_seconds(envelope.tables, [gradients]))
    size = f"{len(SHAPES)} shapes (16 nodes × 64 GPUs)"
    yield Measurement(
        "goodput.table_ms",
        median(one),
        "ms",
        median(theirs),
        PUBLISHED,
        3.0,
        spread=spread(one),
        note=f"one job with new parameters, {size}; the baseline asks shape by shape, memoised by (N, K); in one NumPy "
        f"call for all shapes it would take {median(at_once):.3g} ms",
    )
    yield Measurement(
        "goodput.table_first_ms",
        median(first),
        "ms",
        median(theirs),
        PUBLISHED,
        spread=spread(first),
        note="the same for limits never seen before: lists all candidates, which are then kept",
    )
    yield Measurement(
        "goodput.tables160_ms",
        median(all_jobs),
        "ms",
        JOBS * median(theirs),
        PUBLISHED,
        100.0,
        spread=spread(all_jobs),
        note=f"{JOBS} jobs with distinct parameters and gradients, {size}; baseline: {JOBS} × its one-job table, "
        "mean of the six applications",
    )
    yield Measurement(
        "goodput.envelope_build160_ms",
        median(build),
        "ms",
        spread=spread(build),
        note="once for new parameters of all jobs",
    )
    yield Measurement(
        "goodput.envelope_query160_ms",
        median(query),
        "ms",
        median(all_jobs),
        "tables160, ours",
        spread=spread(query),
        note="then for each round of new gradients",
    )


IMPORT = "import pollux.goodput as goodput"
FIRST_CALLS = """
from pollux.core import BatchLimits, GradientStats, Shape
fitted = goodput.fit(goodput.Observations.from_rows([(1, 1, 1, 8, 0.1, 0.1), (4, 1, 1, 8, 0.1, 0.15)]))
goodput.best(fitted.model, fitted.theta, Shape(4), GradientStats(1.0, 1.0), BatchLimits(8, 512, 4, 8))
"""


def _child_seconds(code: str, cache: str | None = None) -> float:
    """CPU seconds that a new interpreter spends on `code`, its own start not counted."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = cache
    timed = f"import time\nstart = time.process_time()\n{code}\nprint(time.process_time() - start)"
    done = subprocess.run([sys.executable, "-c", timed], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _starting() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as cache:
        compiling = _child_seconds(IMPORT + FIRST_CALLS, cache)
        cached = [_child_seconds(IMPORT + FIRST_CALLS, cache) for _ in range(5)]
        importing = [_child_seconds(IMPORT, cache) for _ in range(5)]
    yield Measurement(
        "goodput.jit_first_s",
        compiling,
        "s",
        note="import, first fit and first best on a machine that has compiled nothing yet; once per version",
    )
    yield Measurement(
        "goodput.jit_cached_s", median(cached), "s", spread=spread(cached), note="the same in any later process"
    )
    yield Measurement(
        "goodput.import_s", median(importing), "s", spread=spread(importing), note="of that: import pollux.goodput"
    )


def _fit_error() -> Iterator[Finding]:
    key = "goodput.fit_error_max"
    folder = inputs.traces()
    if folder is None:
        yield LeftOut(key, "needs the measured data: set POLLUX_DATA to the folder that holds it")
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "fits.json"
        command = [sys.executable, "-m", "pollux.cli.main", "profile", "fit", str(folder), "--json", str(file)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0 or not file.exists():
            reason = (done.stderr.strip().splitlines() or ["it wrote no file"])[-1]
            yield LeftOut(key, f"`pollux profile fit` ended with {done.returncode}: {reason}")
            return
        fits = json.loads(file.read_text(encoding="utf-8"))
    yield from fit_error(fits, {name: _their_error(seen) for name, seen in inputs.all_rows(folder).items()})


def _their_error(seen: Observations) -> float:
    theta = published.fit(_points(seen))
    return float(np.abs(published.t_iter(theta, seen.N, seen.K, seen.m) / seen.t_iter - 1.0).mean())


def fit_error(fits: dict[str, dict[str, Any]], by_autograd: dict[str, float]) -> Iterator[Finding]:
    """The key and the table, from what `pollux profile fit --json` writes and this baseline's own errors."""
    ours = {name: float(fits[name]["mean_relative_error"]) for name in sorted(fits)}
    theirs = {name: float(fits[name]["published_procedure_error"]) for name in ours}
    worst = max(ours, key=ours.__getitem__)
    lower = sum(ours[name] < theirs[name] for name in ours)
    yield Measurement(
        "goodput.fit_error_max",
        ours[worst],
        "relative",
        max(theirs.values()),
        PUBLISHED,
        0.10,
        note=f"mean |predicted / measured − 1| of T_iter of the worst application ({worst}), all rows of both "
        f"files; lower than the baseline's on {lower} of {len(ours)}",
    )
    yield Table(
        "Mean relative error of T_iter, by application",
        ("application", "points", "ours", "published", "published, autograd", "held out: ours", "held out: published"),
        [
            (
                name,
                fits[name].get("observations", ""),
                _percent(ours[name]),
                _percent(theirs[name]),
                _percent(by_autograd.get(name)),
                _percent(fits[name].get("heldout_mean_relative_error")),
                _percent(fits[name].get("heldout_published_error")),
            )
            for name in ours
        ],
        "Made by `pollux profile fit`. Held out: fitted on half of the placements, error on the other half. Where the "
        "published procedure stops depends on rounding: with its slopes written out (used for the key above) and with "
        "slopes by autograd it may end in different places.",
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
