"""The convergence guard: does the loss fall as fast as the predicted efficiency claims?

Training loss against claimed progress (in M0-iterations) is a curve. At M0 the claim is true by definition, so growing
the batch must not put a kink into that curve. How it decides:

1. Losses are averaged in bins, each at least 3 % of the progress so far. Every growth of the batch starts a *trial*;
   its reference is the bins before it: once back to a half, once to a quarter of the progress.
2. Falling curves of many shapes (line, logarithm, power laws and exponentials with a floor) are fitted to the
   reference. Those that the bins do not rule out are extended, each no faster than a curve may flatten at its age.
3. If the loss lies significantly and lastingly above all of them at *half* of the claimed progress, and is not on its
   way back, the guard *suspects*: the job goes back to M0 for a stretch, quietly. A curve may bend by itself just then.
4. At M0 it compares how fast the loss falls with how fast it fell in the trial. Clearly faster: the guard *steps back*,
   says so, and stays; after a long stretch the batch may grow again, by a factor of two from trial to trial. Otherwise
   the suspicion is withdrawn, and not raised again until progress has doubled.
5. A loss that is not finite, or has given back half of all that training had gained, needs no comparison.

What it cannot see: a loss that is flat, falls ever faster, or is drowned in noise; a batch that grew before there was a
reference (`is_ready`); an error that comes without growth of the batch, or is smaller than about a factor of two. What
it may mistake: a curve that bends sharply, or other data (a curriculum), just after growth; step 4 finds that out.

No clock, no torch, no randomness: replicas that observe the same numbers decide alike.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pollux.errors import InvalidDocument, InvalidSpec

Array: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["suspected", "stepped_back", "withdrawn", "eased"]

POWERS = np.array([0.5, 1.0, 2.0, 3.0])
"""Exponents of the power laws a + b·p^-α."""

TIMES = np.array([0.1, 0.15, 0.22, 0.33, 0.5, 0.8])
"""Time constants of the exponentials a + b·exp(-p/τ), in units of the progress at which the batch grew."""

REACHES = (2.0, 4.0)
"""A reference goes back to the start of the trial over this: the short one follows the end of the curve
and must agree with any objection; the long one sees the curvature through more noise and may prove it."""

NEAR_M0 = 1.05
"""A batch up to this many times M0 counts as M0."""

RATE_STEP = 1.5
"""A schedule that has changed the learning rate by such a factor has changed the curve, too."""

NOT_YET = -1.0
"""`_Memory.since` before M0 is reached."""


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """When the guard objects. Stretches are in units of the progress at which they start."""

    least_ratio: float = 0.5  # seen over claimed progress that is still accepted; over-stated ×4 shows 0.25
    sigmas: float = 3.0  # how significantly the loss must differ from all curves
    lasting: int = 3  # bins in a row that must show it
    least_bins: int = 8  # bins that make a reference
    bin: float = 0.03  # width of a bin
    settling: float = 0.06  # left out after a change, while optimizer and learning rate settle
    horizon: float = 0.6  # length of a trial; beyond, extended curves say little
    flattening: float = 0.75  # time constant of the fastest flattening that needs no evidence
    growth: float = 1.5  # a batch this much larger is tried anew
    patience: float = 1.0  # stretch at M0 after a confirmed objection; doubled each time

    def __post_init__(self) -> None:
        for name in ("sigmas", "bin", "settling", "horizon", "flattening", "patience"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InvalidSpec(name, value, "is not a positive number", "Give a finite number above 0")
        if not 0 < self.least_ratio < 1:
            raise InvalidSpec("least_ratio", self.least_ratio, "is not between 0 and 1", "Give a ratio such as 0.5")
        if not self.growth > 1:
            raise InvalidSpec("growth", self.growth, "is not above 1", "Give a factor such as 1.5")
        if self.lasting < 3:
            raise InvalidSpec("lasting", self.lasting, "fewer bins show no slope", "Give at least 3")
        if self.least_bins < 5:
            raise InvalidSpec("least_bins", self.least_bins, "fewer bins show no curve", "Give at least 5")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the guard has decided; `largest_scale` holds from now on (inf: no objection).

    suspected: M0 is tried, to compare. stepped_back: it objects. withdrawn: it does not. eased: the limit has doubled.
    `claimed` and `seen` are M0-iterations in the trial: as claimed, and as the loss shows.
    """

    kind: Kind
    largest_scale: float
    claimed: float
    seen: float
    message: str


class Bin(NamedTuple):
    """Mean loss over `weight` samples around `progress`."""

    progress: float
    loss: float
    weight: float


EMPTY = Bin(0.0, 0.0, 0.0)


class Trial(NamedTuple):
    """The batch grew from `before` to `scale` times M0 at `start`."""

    start: float
    before: float
    scale: float


@dataclass(slots=True)
class _Memory:
    phase: str = "watching"  # comparing: at M0 on suspicion; holding: at M0, the suspicion has proved true
    largest_scale: float = math.inf
    progress: float = 0.0  # at the last observation
    bins: list[Bin] = field(default_factory=list)
    open: Bin = EMPTY  # the bin that is being filled
    opened: float = 0.0  # where it starts
    top: float = -math.inf  # the highest loss of a bin
    trials: list[Trial] = field(default_factory=list)
    scale: float = 1.0  # that later growth is measured from
    rate: float = 1.0  # the learning rate that trials and comparisons began with
    blamed: float = 1.0  # the scale of the last objection
    length: float = 0.0  # of the trial that was objected to
    fall: tuple[float, float] = (0.0, 0.0)  # how fast the loss fell in it, and the variance of that
    since: float = NOT_YET  # comparing: where M0 was reached
    until: float = 0.0  # comparing and holding: where that ends; watching: too early to object again
    confirmed: int = 0  # objections so far


class ConvergenceGuard:
    """Watches one job. `observe` is called at every beat, on all replicas with the same numbers."""

    def __init__(self, options: GuardOptions | None = None) -> None:
        self.options = options or GuardOptions()
        self._memory = _Memory()

    @property
    def largest_scale(self) -> float:
        """The largest B/M0 that the guard allows now; inf: no objection."""
        return self._memory.largest_scale

    @property
    def is_ready(self) -> bool:
        """Whether there is a reference: growth of the batch before that cannot be judged."""
        return len(self._memory.bins) >= self.options.least_bins

    def observe(self, progress: float, loss: float, weight: float, scale: float, rate: float = 1.0) -> Verdict | None:
        """Take in the mean loss over the `weight` samples since the last call, at B/M0 = `scale`.

        `progress` is what the efficiency model claims so far, in M0-iterations; `rate` is the learning rate that the
        user's schedule says. An observation without progress or samples is ignored; so is a loss that is not finite,
        at M0.
        """
        memory = self._memory
        progress, loss, weight, scale = float(progress), float(loss), float(weight), float(scale)  # not NumPy's: JSON
        if not math.isfinite(loss):
            return self._not_finite(scale) if scale > NEAR_M0 and memory.phase == "watching" else None
        if not progress > memory.progress or not weight > 0:
            return None
        if rate > 0 and not 1 / RATE_STEP < rate / memory.rate < RATE_STEP:
            memory.rate, memory.trials = float(rate), []  # what came before and what comes now are two curves
            if memory.phase == "comparing":
                return self._withdraw("The schedule changed the learning rate: nothing to compare with any more.")
        self._follow(scale)
        memory.open = _merge(memory.open, Bin((memory.progress + progress) / 2, loss, weight))
        memory.progress = progress
        if progress - memory.opened < self.options.bin * progress:
            return None
        self._close()
        match memory.phase:
            case "watching":
                return self._watch()
            case "comparing":
                return self._compare()
            case _:
                return self._hold()

    def state(self) -> dict[str, Any]:
        """Everything the guard remembers, as JSON can hold it."""
        state = dataclasses.asdict(self._memory)
        for name in ("bins", "trials"):
            state[name] = [list(item) for item in state[name]]
        for name in ("open", "fall"):
            state[name] = list(state[name])
        for name in ("largest_scale", "top"):
            state[name] = state[name] if math.isfinite(state[name]) else None
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        try:
            memory = _Memory(**state)
            memory.bins = [Bin(*item) for item in memory.bins]
            memory.trials = [Trial(*item) for item in memory.trials]
            memory.open = Bin(*memory.open)
            memory.fall = (memory.fall[0], memory.fall[1])
        except (TypeError, IndexError) as error:
            raise InvalidDocument(
                "guard", state, f"is not its state ({error})", "Give what state() returned"
            ) from error
        memory.largest_scale = math.inf if memory.largest_scale is None else memory.largest_scale
        memory.top = -math.inf if memory.top is None else memory.top
        self._memory = memory

    def _close(self) -> None:
        """Close the open bin; forget bins that are too old to be a reference."""
        memory = self._memory
        if memory.open.weight > 0:
            memory.bins.append(memory.open)
            memory.top = max(memory.top, memory.open.loss)
        memory.open, memory.opened = EMPTY, memory.progress
        start = min((trial.start for trial in memory.trials), default=memory.progress)
        young = sum(item.progress >= start / max(REACHES) for item in memory.bins)
        least = self.options.least_bins + sum(item.progress > start for item in memory.bins)
        memory.bins = memory.bins[-max(young, least) :]

    def _follow(self, scale: float) -> None:
        """Notice that the batch has grown or shrunk since the last observation."""
        memory, options = self._memory, self.options
        if memory.phase == "comparing" and memory.since == NOT_YET and scale <= NEAR_M0:
            self._start_afresh()
            memory.scale, memory.since = scale, memory.progress
            memory.until = memory.since + max(memory.length, 2 * options.least_bins * options.bin * memory.since)
        if scale > memory.scale * options.growth:
            self._close()
            if self.is_ready and memory.phase == "watching":
                memory.trials.append(Trial(memory.progress, memory.scale, scale))
            memory.scale = scale
        elif scale * options.growth < memory.scale:
            self._close()
            going_on = [trial for trial in memory.trials if scale > trial.before * options.growth]
            if memory.trials and not going_on:
                # Whether the progress claimed in the unfinished trials was made is unknown: the curve is torn.
                self._start_afresh()
            memory.trials, memory.scale = going_on, scale

    def _start_afresh(self) -> None:
        memory = self._memory
        memory.bins, memory.trials, memory.open, memory.opened = [], [], EMPTY, memory.progress

    def _watch(self) -> Verdict | None:
        memory, options = self._memory, self.options
        bins = np.array(memory.bins)
        for trial in memory.trials:
            before, after = bins[bins[:, 0] <= trial.start], bins[bins[:, 0] > trial.start]
            short, long = (Curves(before, trial.start, reach, options) for reach in REACHES)
            if short.are_lost(after, memory.top):
                return self._go_back(trial, short.recent(after), 0.0, "stepped_back")
            sigmas = short.significance(after)
            if sigmas > 0:
                sigmas = max(sigmas, long.significance(after))
            if memory.progress >= memory.until and sigmas > options.sigmas:
                return self._go_back(trial, short.recent(after), short.seen(after), "suspected")
        over = [
            trial
            for trial in memory.trials
            if memory.progress > trial.start * (1 + options.horizon)
            and np.count_nonzero(bins[:, 0] > trial.start) > options.least_bins
        ]
        memory.trials = [trial for trial in memory.trials if trial not in over]
        return self._ease() if over and not math.isinf(memory.largest_scale) else None

    def _go_back(self, trial: Trial, recent: Array, ratio: float, kind: Kind) -> Verdict:
        memory = self._memory
        claimed = memory.progress - trial.start
        memory.phase, memory.since, memory.largest_scale = "comparing", NOT_YET, 1.0
        memory.length, memory.blamed, memory.fall = claimed, memory.scale, fall(recent)
        what = "falls too slowly" if memory.fall[0] > 0 else "does not fall any more"
        message = (
            f"The loss {what} since the batch grew from {trial.before:.3g} to {memory.scale:.3g} times its initial "
            f"size: {claimed:.0f} iterations of progress were claimed, the loss shows {ratio * claimed:.0f}. "
            "Going back to the initial batch size to compare."
        )
        return Verdict(kind, 1.0, claimed, ratio * claimed, message)

    def _not_finite(self, scale: float) -> Verdict:
        memory = self._memory
        claimed = memory.progress - min((trial.start for trial in memory.trials), default=memory.progress)
        memory.blamed, memory.largest_scale = scale, 1.0
        self._start_afresh()
        self._start_holding()
        message = f"The loss is not finite at {scale:.3g} times the initial batch size. Going back to that size."
        return Verdict("stepped_back", 1.0, claimed, 0.0, message)

    def _compare(self) -> Verdict | None:
        """At M0 on suspicion: does the loss fall clearly faster than it did in the trial?"""
        memory, options = self._memory, self.options
        bins = np.array([item for item in memory.bins if item.progress > memory.since * (1 + options.settling)])
        if memory.since == NOT_YET or len(bins) < 2 * options.lasting:
            return None
        (now, now_variance), (then, then_variance) = Curves(bins, memory.since, 1.0, options).fall(), memory.fall
        # Between "no faster" and the 1/least_ratio that was objected to, on a scale of ratios.
        factor = 1 / math.sqrt(options.least_ratio)
        excess = (now - factor * max(then, 0.0)) / math.sqrt(now_variance + factor**2 * then_variance + 1e-300)
        seen = memory.length * min(1.0, max(0.0, then / now)) if now > 0 else memory.length
        if excess > options.sigmas:
            self._start_holding()
            times = f"{now / then:.2g} times" if then > 0 else "many times"
            message = (
                f"At the initial batch size the loss falls {times} as fast per iteration as at {memory.blamed:.3g} "
                f"times that size: efficiency was over-stated. Staying there until progress {memory.until:.0f}."
            )
            return Verdict("stepped_back", 1.0, memory.length, seen, message)
        if memory.progress < memory.until:
            return None
        return self._withdraw("At the initial batch size the loss falls no faster: its curve had flattened.")

    def _withdraw(self, why: str) -> Verdict:
        memory = self._memory
        memory.phase, memory.largest_scale, memory.until = "watching", math.inf, 2 * memory.progress
        return Verdict("withdrawn", math.inf, memory.length, memory.length, f"{why} The batch may grow again.")

    def _start_holding(self) -> None:
        memory = self._memory
        memory.phase = "holding"
        memory.until = memory.progress * (1 + self.options.patience * 2.0**memory.confirmed)
        memory.confirmed += 1

    def _hold(self) -> Verdict | None:
        memory = self._memory
        if memory.progress < memory.until:
            return None
        memory.phase = "watching"
        return self._ease()

    def _ease(self) -> Verdict:
        """Allow twice as much; anything, once that is beyond what was blamed."""
        memory = self._memory
        memory.largest_scale *= 2
        if memory.largest_scale > memory.blamed:
            memory.largest_scale = math.inf
            return Verdict("withdrawn", math.inf, 0.0, 0.0, "The batch may grow freely again.")
        message = f"The batch may grow again, to {memory.largest_scale:.3g} times its initial size."
        return Verdict("eased", memory.largest_scale, 0.0, 0.0, message)


class Curves:
    """Curves through the bins before `start`, extended beyond it.

    Each of S shapes g is fitted as loss = a + b·g(u), u = progress/start, by least squares weighted with the samples.

    before, after  [bins, 3]  progress, loss, weight
    """

    def __init__(self, before: Array, start: float, reach: float, options: GuardOptions) -> None:
        self.options, self.start = options, start
        young = before[before[:, 0] >= start / reach]
        u, loss, weight = (young if len(young) >= options.least_bins else before[-options.least_bins :]).T
        u = u / start
        self.weight = weight.sum()
        self.a = loss @ weight / self.weight  # b·g is centred
        self.centre, self.spread, self.b, misfit = _fit(shapes(u), loss - self.a, weight)
        self.best = int(misfit.argmin())
        self.variance = misfit[self.best] / (len(u) - 3)  # of one sample's loss; includes what no shape can fit
        self.unlikely = (misfit - misfit[self.best]) / self.variance if self.variance > 0 else misfit * 0.0
        # Curves that fall faster and faster have no known way to go on.
        rising = _fit(np.vstack([-(u**2), -(u**4)]), loss - self.a, weight)
        self.are_falling = bool(self.b[self.best] > 0 and rising[3].min() >= misfit[self.best])

    def at(self, u: Array) -> Array:
        """[u] the loss by the shape that fits best."""
        curve: Array = self.a + self.b[self.best] * (shapes(u)[self.best] - self.centre[self.best])
        return curve

    def fall(self) -> tuple[float, float]:
        """How much the loss falls per iteration at `start`, and the variance of that; cautiously.

        Bins lie beyond the start, where the curve may have flattened already: of the shapes that they do not rule
        out, the one that falls least there.
        """
        rates = -self.b * slopes() / self.start
        rates[self.unlikely > self.options.sigmas] = np.inf
        least = int(rates.argmin())
        return float(rates[least]), float(self.variance / self.spread[least] * (slopes()[least] / self.start) ** 2)

    def recent(self, after: Array) -> Array:
        """The later half of the trial, without its settling."""
        x = after[:, 0] / self.start - 1
        recent: Array = after[x >= max(self.options.settling, x.max(initial=0.0) / 2)]
        return recent if len(recent) >= self.options.lasting else after[-self.options.lasting :]

    def significance(self, after: Array) -> float:
        """By how many sigmas the loss lies above all curves at the least accepted ratio; 0 unless it lastingly does."""
        options, recent = self.options, self.recent(after)
        x = recent[:, 0] / self.start - 1
        if len(x) < options.lasting or x[0] < options.settling or not self.are_falling:
            return 0.0
        loss, share = recent[:, 1], recent[:, 2] / recent[:, 2].sum()
        slower, slowest = options.least_ratio * x, options.flattening
        flattened = shapes(np.ones(1)) + slopes()[:, None] * slowest * (1 - np.exp(-slower / slowest))
        g = np.maximum(shapes(1 + slower), flattened) - self.centre[:, None]  # [S, recent]
        excess = loss - self.a - self.b[:, None] * g
        # A loss that is high but falls fast was lifted by the change of learning rate and is on its way back.
        speed, uncertainty = fall(recent)
        expected = self.at(1 + x[[0, -1]]) @ [1, -1] / (recent[-1, 0] - recent[0, 0])
        is_recovering = speed - math.sqrt(uncertainty) > math.sqrt(options.least_ratio) * expected
        if is_recovering or (excess[self.best, -options.lasting :] <= 0).any():
            return 0.0
        variance = max(self.variance, _scatter(recent))
        distance = g @ share
        error = np.sqrt(variance * (1 / recent[:, 2].sum() + 1 / self.weight + distance**2 / self.spread))
        # If the drop that a shape expects is itself within the noise, nothing can be missed. A shape that hardly fits
        # the bins before the start needs less to be ruled out by those after it.
        drop = self.b * (shapes(np.ones(1))[:, 0] - self.centre - distance)
        sigmas = np.maximum(np.minimum(excess @ share, drop) / error, 0.0)
        return float(np.sqrt(sigmas**2 + self.unlikely).min())

    def are_lost(self, after: Array, top: float) -> bool:
        """Whether the loss has lastingly given back half of what training had gained, and does not recover."""
        last = after[-self.options.lasting :]
        if len(last) < self.options.lasting or fall(last)[0] > 0:
            return False
        level = self.at(np.ones(1))[0]
        far = np.maximum(0.5 * (top - level), self.options.sigmas * np.sqrt(self.variance / last[:, 2]))
        return bool((last[:, 1] - level > far).all())

    def seen(self, after: Array) -> float:
        """Seen over claimed progress, by the shape that fits best."""
        recent = self.recent(after)
        middle, loss = recent[:, 2] @ recent[:, :2] / recent[:, 2].sum()
        ratios = np.linspace(0.0, 1.0, 101)
        return float(ratios[np.abs(self.at(1 + ratios * (middle / self.start - 1)) - loss).argmin()])


def shapes(u: Array) -> Array:
    """[S, u] falling curves of u > 0: line, logarithm, power laws, exponentials."""
    return np.vstack([-u, -np.log(u), u ** -POWERS[:, None], np.exp(-u / TIMES[:, None])])


def slopes() -> Array:
    """[S] derivatives of `shapes` at u = 1."""
    return np.concatenate([[-1.0, -1.0], -POWERS, -np.exp(-1 / TIMES) / TIMES])


def fall(bins: Array) -> tuple[float, float]:
    """How much the loss falls per iteration, by a line through the bins; and the variance of that."""
    progress, loss, weight = bins.T
    _, spread, b, misfit = _fit(-progress[None], loss - loss @ weight / weight.sum(), weight)
    return float(b[0]), float(misfit[0] / max(len(bins) - 2, 1) / spread[0])


def _scatter(bins: Array) -> float:
    """Variance of one sample's loss around a line through the bins."""
    progress, loss, weight = bins.T
    return float(_fit(progress[None], loss - loss @ weight / weight.sum(), weight)[3][0] / (len(bins) - 2))


def _fit(g: Array, loss: Array, weight: Array) -> tuple[Array, Array, Array, Array]:
    """Least squares of a centred loss on each row of g: (mean and spread of g, coefficient, misfit), all [S]."""
    centre = g @ weight / weight.sum()
    centred = g - centre[:, None]
    spread = centred**2 @ weight
    b = centred @ (weight * loss) / spread
    return centre, spread, b, (loss - b[:, None] * centred) ** 2 @ weight


def _merge(one: Bin, other: Bin) -> Bin:
    weight = one.weight + other.weight
    share = other.weight / weight
    progress = one.progress + share * (other.progress - one.progress)
    return Bin(progress, one.loss + share * (other.loss - one.loss), weight)
