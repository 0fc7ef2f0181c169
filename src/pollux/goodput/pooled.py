"""What jobs of one kind have measured, as a throughput model for the others: the modelling half of the registry.

A fit of seven numbers to all that a kind has measured is wrong by some per cent nearly everywhere. But its errors are
smooth: what was measured at some size tells about its neighbours. So the fit is only where this begins,

    T(K, level, m) = scale · T_fit(K, level, m) · exp ρ(K, level, m)

with ρ = log(measured / fitted), interpolated in log m between the batch sizes measured with as many GPUs, then in log K
between the numbers of GPUs measured at the same level, and fading outside of what was measured. One GPU, which waits
for nobody, is a level of its own. `scale` is how much slower than its kind one job is: what a job measured of itself
moves all that it is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from pollux.core import BatchLimits, JobModel, KindProfile, Observation, ObservationKey, Progress, Shape
from pollux.goodput.candidates import Candidates
from pollux.goodput.compiled import compiled
from pollux.goodput.envelope import Grid, Spans
from pollux.goodput.fit import Fit, fit
from pollux.goodput.levels import PAPER
from pollux.goodput.numerics import FloatArray, Real
from pollux.goodput.observations import LONGEST_PASS_S, SHORTEST_PASS_S, Observations
from pollux.goodput.throughput import Theta, ThroughputModel, iteration_time

FADE = math.log(2.0)
"""Outside of what was measured, a correction falls by a factor e for each doubling of K or m."""
LARGEST = math.log(2.0)
"""No correction exceeds this factor: what is further off is a slip, and must not lead anybody astray."""
NEWS = 0.02
"""A change of a measured time that is worth another model; also the steps of a job's scale, so that jobs that differ
by less share what is derived from their model."""
ALIKE = 0.1
"""A job whose own times differ from its kind's by more than this on average, once scaled, is of another kind."""
NEAR = 0.2
"""Batch sizes of which one tells what the other takes; the logarithm of their ratio."""
NOTABLE = 0.03
"""Other batch sizes on GPUs that were measured before are news once they are such a share of all: each new model costs
whoever plans a look at all jobs of the kind."""
REFIT = 1.2
"""Fit again once there are so many times the observations; in between the correction takes in what is new."""
MOST = 1024
"""Observations of one kind; beyond, only sizes that nobody has run yet are taken in."""
UNASKED = -1.0
"""Instead of seconds: of what nobody has asked for yet."""
ALONE, COMPUTING = -1.0, -2.0
"""The level of one GPU, and that of passes without communication."""


class Corrected(ThroughputModel):
    """A fitted model, less what it is known to be wrong about. Its only parameter is the scale.

    An object stands for one state of knowledge: it never changes, is compared by identity and is not stored.
    """

    name = "corrected"
    parameters = ("scale",)
    upper = (math.inf,)

    def __init__(
        self, base: ThroughputModel, theta: Theta, seen: Observations, keys: Collection[ObservationKey] = ()
    ) -> None:
        """`keys` are those of what was seen, if it will be asked for just these."""
        self.base = base
        """What it corrects, and whose levels it has."""
        self._theta = tuple(float(value) for value in theta)
        self.max_gpus_observed = int(seen.K.max())
        level = np.asarray(base.level(seen.N, seen.R), dtype=float)
        step, grad = base.t_step(self._theta, seen.K, level, seen.m), base.t_grad(self._theta, seen.m)
        log_K, log_m = np.log(seen.K), np.log(seen.m)
        level = np.where(seen.K > 1, level, ALONE)
        self._measured = seen.K, level, log_m
        self._surfaces = _Surfaces(
            np.concatenate([np.full(len(seen), COMPUTING), level]),
            np.concatenate([np.zeros(len(seen)), log_K]),
            np.concatenate([log_m, log_m]),
            np.log(np.concatenate([seen.t_grad / grad, seen.t_iter / step])),
        )
        self._expected: dict[ObservationKey, float | None] = {}
        if keys:
            right = self._surfaces.at(seen.K, level, seen.m)
            self._expected.update(zip(keys, (step * right).tolist(), strict=True))
        self._remembered: dict[tuple[int, float, int], tuple[Candidates, FloatArray]] = {}
        """Seconds of candidates, by GPUs, level and identity; the candidates are kept so that it stays theirs."""

    def level(self, N: Real, R: Real) -> Real:
        return self.base.level(N, R)

    def knows(self, key: ObservationKey) -> bool:
        """Whether somebody has measured about this batch size on so many GPUs, at the same level."""
        K, level = key.shape.num_gpus, ALONE
        if K > 1:
            level = float(self.level(key.shape.num_nodes, key.shape.num_racks))
        log_m = math.log(key.per_gpu_batch_size)
        return any(abs(known - log_m) <= NEAR for known in self._sizes.get((K, level), ()))

    @cached_property
    def _sizes(self) -> dict[tuple[float, float], list[float]]:
        """Logarithms of the batch sizes that were measured, by GPUs and level."""
        found: dict[tuple[float, float], list[float]] = {}
        for K, level, log_m in zip(*(array.tolist() for array in self._measured), strict=True):
            found.setdefault((K, level), []).append(log_m)
        return found

    def expected(self, keys: Collection[ObservationKey]) -> list[float | None]:
        """Seconds of an iteration without accumulation under each of these circumstances; None for those that it does
        not know. Jobs of a kind ask for the same again and again."""
        known = self._expected.get
        found = [known(key, UNASKED) for key in keys]
        if UNASKED not in found:
            return found
        self._ask([key for key, seconds in zip(keys, found, strict=True) if seconds == UNASKED])
        return [known(key) for key in keys]

    def _ask(self, keys: Sequence[ObservationKey]) -> None:
        self._expected.update(dict.fromkeys(keys))
        if keys := [key for key in keys if self.knows(key)]:
            K, N, R = np.array([(key.shape.num_gpus, key.shape.num_nodes, key.shape.num_racks) for key in keys]).T
            seconds = self.t_step((1.0,), K, self.level(N, R), np.array([key.per_gpu_batch_size for key in keys]))
            self._expected.update(zip(keys, np.broadcast_to(seconds, len(keys)).tolist(), strict=True))

    def t_grad(self, theta: Theta, m: Real) -> Real:
        return theta[0] * (self.base.t_grad(self._theta, m) * self._surfaces.at(1.0, COMPUTING, m))

    def t_step(self, theta: Theta, K: Real, level: Real, m: Real) -> Real:
        right = self._surfaces.at(K, np.where(np.greater(K, 1), level, ALONE), m)
        return theta[0] * (self.base.t_step(self._theta, K, level, m) * right)

    def times(self, theta: FloatArray, spans: Spans, grid: Grid, count: int) -> FloatArray:
        parts = [grid.slice(low, high) for low, high, _ in spans.of]
        K, m, s, size = (
            np.concatenate([array[part] for part in parts]) for array in (grid.K, grid.m, grid.s, grid.size)
        )
        level = np.repeat(spans.level, [part.stop - part.start for part in parts])
        grad, step = self.t_grad((1.0,), grid.sizes), self.t_step((1.0,), K, level, m)
        return np.asarray(s * (theta * np.asarray(grad)[size]) + theta * step)

    def starts(self, seen: Observations) -> FloatArray:
        return np.ones((1, 1))

    def cheapest(self, theta: Theta, K: int, level: Real, choice: Candidates, a: float, b: float) -> tuple[int, float]:
        key = K, float(level), id(choice)
        if key not in self._remembered:
            if len(self._remembered) >= MOST:
                self._remembered.clear()
            self._remembered[key] = choice, np.asarray(iteration_time(self, (1.0,), K, level, choice.m, choice.s))
        cost = self._remembered[key][1] * (a + b * choice.initial_share)
        index = int(cost.argmin())
        return index, float(theta[0] * cost[index])


Grids = tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]
"""The first seven arguments of `correct`."""


class _Surfaces:
    """Corrections on a grid of log K and log m for each level: linear between its points, fading outside."""

    def __init__(self, level: FloatArray, log_K: FloatArray, log_m: FloatArray, wrong: FloatArray) -> None:
        """Through scattered points [n], of their logarithms; those of the same place are averaged."""
        order, sizes = np.lexsort((log_m, log_K, level)), log_m[np.lexsort((log_m, level))]
        grids, inside, outside = laid_out(level[order], log_K[order], log_m[order], wrong[order], sizes)
        self._grids: Grids = *grids, inside * np.exp(-outside / FADE)

    def at(self, K: Real, level: Real, m: Real) -> FloatArray:
        """Factors by which the fit is wrong; 1 at levels that nobody has measured."""
        log_K, level, log_m = np.log(K), np.asarray(level, dtype=float), np.log(m)
        shape = np.broadcast(log_K, level, log_m).shape
        if len(shape) > 1:
            log_K, level, log_m = np.broadcast_arrays(log_K, level, log_m)
        found = np.empty(math.prod(shape))
        correct(*self._grids, log_K.ravel(), level.ravel(), log_m.ravel(), found)
        return np.asarray(np.exp(found).reshape(shape))


@compiled
def laid_out(
    level: FloatArray, log_K: FloatArray, log_m: FloatArray, wrong: FloatArray, sizes: FloatArray
) -> tuple[tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray], FloatArray, FloatArray]:
    """Points [n], in order of level, log K and log m, as the grids of `correct`: their layout, what each cell says
    without fading, and how far it is from all that was measured with as many GPUs.

    sizes [n]: log m once more, in order of level and log m
    """
    n = len(level)
    levels, rows, columns = np.empty(n), np.empty(n), np.empty(n)
    row_of, column_of, cell_of = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    begin = np.empty(n + 1, dtype=np.int64)
    S = A = B = 0
    for i in range(n):
        is_first = i == 0 or level[i] != level[i - 1]
        if is_first:
            levels[S] = level[i]
            S += 1
        if is_first or log_K[i] != log_K[i - 1]:
            rows[A], begin[A] = log_K[i], i
            A += 1
        if is_first or sizes[i] != sizes[i - 1]:
            columns[B] = sizes[i]
            B += 1
        row_of[S], column_of[S] = A, B
    begin[A] = n
    for each in range(S):
        cell_of[each + 1] = cell_of[each] + (row_of[each + 1] - row_of[each]) * (column_of[each + 1] - column_of[each])
    inside, outside = np.empty(cell_of[S]), np.empty(cell_of[S])
    knot, mean = np.empty(n), np.empty(n)
    for each in range(S):
        cell = cell_of[each]
        for row in range(row_of[each], row_of[each + 1]):
            count = averaged(log_m[begin[row] : begin[row + 1]], wrong[begin[row] : begin[row + 1]], knot, mean)
            at = 0
            for column in range(column_of[each], column_of[each + 1]):
                x = columns[column]
                while at + 1 < count and knot[at + 1] <= x:
                    at += 1
                inside[cell] = mean[at]
                if at + 1 < count and x > knot[at]:
                    slope = (mean[at + 1] - mean[at]) / (knot[at + 1] - knot[at])
                    inside[cell] = slope * (x - knot[at]) + mean[at]
                outside[cell] = max(knot[0] - x, x - knot[count - 1], 0.0)
                cell += 1
    layout = levels[:S], row_of[: S + 1], column_of[: S + 1], cell_of[: S + 1], rows[:A], columns[:B]
    return layout, inside, outside


@compiled
def averaged(log_m: FloatArray, wrong: FloatArray, knot: FloatArray, mean: FloatArray) -> int:
    """Write the mean of what is wrong at each m [n], ascending; returns how many there are. None is beyond LARGEST."""
    count = i = 0
    while i < len(log_m):
        total, alike = 0.0, 0
        while i < len(log_m) and (alike == 0 or log_m[i] == log_m[i - 1]):
            total += min(max(wrong[i], -LARGEST), LARGEST)
            alike += 1
            i += 1
        knot[count], mean[count] = log_m[i - 1], total / alike
        count += 1
    return count


@compiled
def correct(
    levels: FloatArray,  # [S]
    row_of: FloatArray,  # [S + 1]: where the rows of each level begin
    column_of: FloatArray,  # [S + 1]: where its columns do
    cell_of: FloatArray,  # [S + 1]: and its cells, row by row
    rows: FloatArray,  # log K, ascending within a level
    columns: FloatArray,  # log m, likewise
    wrong: FloatArray,  # of each cell
    at_K: FloatArray,  # [n], like the next two, or one for all
    at_level: FloatArray,
    at_m: FloatArray,
    found: FloatArray,  # [n] is filled
) -> None:
    """`interpolate` on the grids of many levels; 0 where there is none."""
    end = 0
    while end < len(found):
        begin, level = end, at_level[min(end, len(at_level) - 1)]
        end += 1
        while end < len(found) and at_level[min(end, len(at_level) - 1)] == level:
            end += 1
        found[begin:end] = 0.0
        for each in range(len(levels)):
            if levels[each] == level:
                log_K, log_m = rows[row_of[each] : row_of[each + 1]], columns[column_of[each] : column_of[each + 1]]
                grid = wrong[cell_of[each] : cell_of[each + 1]].reshape(len(log_K), len(log_m))
                x = at_K[begin:end] if len(at_K) > 1 else at_K
                y = at_m[begin:end] if len(at_m) > 1 else at_m
                interpolate(log_K, log_m, grid, FADE, x, y, found[begin:end])


@compiled
def interpolate(
    log_K: FloatArray,  # [A] ascending
    log_m: FloatArray,  # [B] ascending
    wrong: FloatArray,  # [A, B]
    fade: float,
    at_K: FloatArray,  # [n] or one for all
    at_m: FloatArray,  # [n] or one for all
    found: FloatArray,  # [n] is filled
) -> None:
    """Linear in both directions inside the grid; outside, the value of its edge times e^(−distance/fade)."""
    last_K, last_m = len(log_K) - 1, len(log_m) - 1
    above = right = 0  # neighbours are near each other: each is looked for where the last one was found
    for index in range(len(found)):
        x, y = at_K[min(index, len(at_K) - 1)], at_m[min(index, len(at_m) - 1)]
        inside_x, inside_y = min(max(x, log_K[0]), log_K[last_K]), min(max(y, log_m[0]), log_m[last_m])
        above, right = reached(log_K, inside_x, above), reached(log_m, inside_y, right)
        below, left = max(above - 1, 0), max(right - 1, 0)
        up = (inside_x - log_K[below]) / (log_K[above] - log_K[below]) if above > below else 0.0
        along = (inside_y - log_m[left]) / (log_m[right] - log_m[left]) if right > left else 0.0
        low = wrong[below, left] + along * (wrong[below, right] - wrong[below, left])
        high = wrong[above, left] + along * (wrong[above, right] - wrong[above, left])
        outside = abs(x - inside_x) + abs(y - inside_y)
        value = low + up * (high - low)
        found[index] = value * np.exp(-outside / fade) if outside > 0.0 else value


@compiled
def reached(knots: FloatArray, at: float, guess: int) -> int:
    """The first of these, ascending, that is not below; the second where that is the first, if there is one."""
    while guess > 0 and knots[guess - 1] >= at:
        guess -= 1
    while knots[guess] < at:
        guess += 1
    return max(guess, min(1, len(knots) - 1))


class Kind:
    """What jobs of one kind have measured on one GPU type: a memory for whoever plans, or for a job's own agent."""

    def __init__(self, base: ThroughputModel = PAPER) -> None:
        self._base = base
        self._seen: dict[ObservationKey, Observation] = {}
        self._fit: Fit | None = None
        self._num_fitted = 0
        self._model: Corrected | None = None
        self._shapes: set[Shape] = set()
        self._news = 0.0  # observations; more than there are for what must be known at once

    def note(self, measured: Mapping[ObservationKey, Observation]) -> None:
        """Take in what one job has measured, or what all that have ended did; again and again as it grows.

        Times are taken as those of a job of the kind's own speed; a job that is not like the others is left out. Of the
        same circumstances the longest measured counts: what is noted twice counts once.
        """
        fresh = [(key, one) for key, one in measured.items() if self._is_longest(key, one) and _is_usable(one)]
        if not fresh:
            return
        model = self._model or self.model()
        scale = 1.0 if model is None else scale_of(model, measured)
        if scale is None:
            return
        for key, one in fresh:
            known = self._seen.get(key)
            if known is None and not self._has_room(key):
                continue
            self._seen[key] = one = _scaled(one, 1.0 / scale)
            if known is None:
                self._news += 1.0 if key.shape in self._shapes else math.inf
                self._shapes.add(key.shape)
            elif abs(math.log(one.iteration_time_s / known.iteration_time_s)) > NEWS:
                self._news += 1.0

    def model(self) -> Corrected | None:
        """The same object until there is news; None before anything was measured."""
        if self._news > NOTABLE * len(self._seen):
            seen = Observations.of(self._seen)
            if self._fit is None or len(seen) >= REFIT * self._num_fitted:
                self._fit, self._num_fitted = fit(seen, self._base, self._fit), len(seen)
            # A time that was scaled may be too short to count now.
            keys = self._seen.keys() if len(seen) == len(self._seen) else ()
            self._model, self._news = Corrected(self._base, self._fit.theta, seen, keys), 0.0
        return self._model

    def _is_longest(self, key: ObservationKey, one: Observation) -> bool:
        known = self._seen.get(key)
        return known is None or known.sync_count < one.sync_count

    def _has_room(self, key: ObservationKey) -> bool:
        return len(self._seen) < MOST or key.shape not in self._shapes


def _is_usable(one: Observation) -> bool:
    """Whether it can be fitted: a pass that took no time, or days, was not measured well."""
    if one.sync_count == 0:
        return False
    # The means that `Observation` has, without asking twice whether there are any.
    computing = one.accum_time_s + (one.sync_pass_time_s - one.sync_time_s)
    t_grad, t_iter = computing / (one.accum_count + one.sync_count), one.sync_pass_time_s / one.sync_count
    return t_grad >= SHORTEST_PASS_S and t_iter <= LONGEST_PASS_S


def _usable(own: Mapping[ObservationKey, Observation]) -> dict[ObservationKey, Observation]:
    return {key: one for key, one in own.items() if _is_usable(one)}


def _scaled(one: Observation, factor: float) -> Observation:
    if factor == 1.0:
        return one
    accum_s, pass_s, sync_s = (
        factor * seconds for seconds in (one.accum_time_s, one.sync_pass_time_s, one.sync_time_s)
    )
    return Observation(accum_s, one.accum_count, pass_s, sync_s, one.sync_count)


def scale_of(model: Corrected, own: Mapping[ObservationKey, Observation]) -> float | None:
    """How many times as long as the model says the passes of a job take that has measured this; 1 if it cannot tell.

    None if that depends on where it ran: such a job is of another kind, and its own fit is the better guess. Only what
    was measured before counts: elsewhere it is the model that must learn.
    """
    return _scale(_errors(model, _usable(own)))


def _errors(model: Corrected, measured: Mapping[ObservationKey, Observation]) -> list[float | None]:
    """Logarithms of how many times as long as the model says each took; None where it does not know."""
    expected = zip(measured.values(), model.expected(measured), strict=True)
    return [None if seconds is None else math.log(one.iteration_time_s / seconds) for one, seconds in expected]


def _scale(errors: Collection[float | None]) -> float | None:
    wrong = sorted(error for error in errors if error is not None)
    if not wrong:
        return 1.0
    middle = 0.5 * (wrong[(len(wrong) - 1) // 2] + wrong[len(wrong) // 2])
    if sum(abs(each - middle) for each in wrong) > ALIKE * len(wrong):
        return None
    return math.exp(NEWS * round(middle / NEWS))


def of_job(model: Corrected, own: Mapping[ObservationKey, Observation]) -> Corrected | None:
    """The kind's model as one job finds it, with scale 1: its own speed everywhere, its own times where it measured.

    For the job's agent, to choose batch sizes by; None as in `scale_of`. Whoever plans for many does with their scales.
    The kind's model itself, with all that was derived from it, if the job has found nothing else than its kind did.
    """
    measured = _usable(own)
    errors = _errors(model, measured)
    scale = _scale(errors)
    if scale == 1.0 and all(error is not None and abs(error) <= 0.5 * NEWS for error in errors):
        return model
    return None if scale is None else Corrected(model, (scale,), Observations.of(measured))


def foreseen(kind: KindProfile, limits: BatchLimits | None = None) -> JobModel | None:
    """What to believe of a job that has not reported yet: that it begins and lasts as its kind does.

    `limits` are its own, if they are known; None if nobody knows any. It has no fit: see `Kind`.
    """
    limits = limits or kind.limits
    if limits is None:
        return None
    progress = _usual_length(kind, limits, 0.0)
    gradient = kind.gradient_at(0.0, limits.initial_batch_size)
    return JobModel(limits, gradient, progress=progress, realloc_delay_s=kind.realloc_delay_s.mean)


def with_usual_length(model: JobModel, kind: KindProfile) -> JobModel:
    """The same model, with the length of its kind for a job that does not know its own."""
    done = 0.0 if model.progress is None else model.progress.done
    return replace(model, progress=_usual_length(kind, model.limits, done) or model.progress)


def _usual_length(kind: KindProfile, limits: BatchLimits, done: float) -> Progress | None:
    """None before any job of the kind has come to its end."""
    M0, work, spread = limits.initial_batch_size, kind.work.mean, kind.work.stddev
    return None if work is None or spread is None else Progress(done, work / M0, spread / M0)
