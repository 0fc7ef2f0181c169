"""The convergence guard: does the loss fall as fast as the predicted efficiency claims?

Training loss against claimed progress (in M0-iterations) is a curve. At M0 the claim is true by definition, so growing
the batch must not put a kink into that curve. How it decides:

1. Losses are averaged in bins, each at least 3 % of the progress so far. Every growth of the batch starts a *trial*
   with the bins before it as reference.
2. Falling curves of many shapes (linear, logarithmic, power laws and exponentials with a floor) are fitted to the
   reference. Those that the data do not rule out are extended, each no faster than a curve may flatten at its age.
3. If the loss lies significantly and lastingly above all of them at *half* of the claimed progress, or rises by half
   of what training had gained, or is not finite, the guard steps back to M0. A trial without objection is over once
   progress has grown enough; its bins then serve later trials as reference.
4. Back at M0 it compares the slope of the loss with that of the trial: clearly steeper confirms the objection, and
   after a long stretch the batch may grow again, doubling from trial to trial. Otherwise the curve had just flattened:
   the objection is withdrawn, and not raised again until progress has doubled.

What it cannot see: a loss that is flat or drowned in noise, a batch that grew before there was a reference (`is_ready`),
an error that creeps in without growth of the batch or is smaller than about a factor of two. What it may mistake: a
change of the data (curriculum) or of the user's learning rate just after growth; step 4 is there to find out.

No clock, no torch, no randomness; replicas that observe the same numbers decide alike.
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
Kind: TypeAlias = Literal["stepped_back", "confirmed", "withdrawn", "eased"]

POWERS = np.array([0.5, 1.0, 2.0, 3.0])
"""Exponents of the power laws a + b·p^-α."""

TIMES = np.array([0.1, 0.15, 0.22, 0.33, 0.5, 0.8])
"""Time constants of the exponentials a + b·exp(-p/τ), in units of the progress at which the batch grew."""

WINDOWS = tuple(float(x) for x in __import__("os").environ.get("W", "8,3").split(","))
MEMORY = 8.0
"""The reference reaches back to 1/8 of the progress at which the batch grew: older losses say nothing about it."""


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """When the guard objects. Stretches are relative to the progress at which the batch grew, not to a clock."""

    least_ratio: float = 0.5  # seen over claimed progress that is still accepted; over-stated ×4 shows 0.25
    sigmas: float = 4.0  # how significant the excess must be; it is looked for again with every bin
    lasting: int = 3  # bins in a row that must show it
    least_bins: int = 8  # bins that make a reference
    bin: float = 0.03  # width of a bin
    settling: float = 0.06  # left out after a change: optimizer averages and the learning rate's effect settle
    horizon: float = 0.8  # length of a trial
    flattening: float = 0.75  # time constant of the fastest flattening that needs no evidence
    growth: float = 1.5  # a batch this much larger than the one last accepted is tried anew
    patience: float = 1.0  # stretch at M0 after a confirmed objection; doubled each time

    def __post_init__(self) -> None:
        for name in ("sigmas", "bin", "horizon", "flattening", "patience"):
            _positive(name, getattr(self, name))
        if not 0 < self.least_ratio < 1:
            raise InvalidSpec("least_ratio", self.least_ratio, "is not between 0 and 1", "Give a ratio such as 0.5")
        if self.growth <= 1:
            raise InvalidSpec("growth", self.growth, "is not above 1", "Give a factor such as 1.5")
        if self.least_bins < 4 or self.lasting < 1:
            raise InvalidSpec(
                "least_bins", self.least_bins, "too few to fit a curve", "Give at least 4, and lasting ≥ 1"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the guard has decided; `largest_scale` holds from now on (inf: no objection).

    `claimed` and `seen` are M0-iterations since the batch grew: as claimed, and as the loss shows.
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


class Trial(NamedTuple):
    """A growth of the batch at `start`, from `before` to `scale` times M0."""

    start: float
    before: float
    scale: float


@dataclass(slots=True)
class _Memory:
    """All that the guard remembers: plain numbers, strings and lists of them."""

    phase: str = "watching"  # watching; comparing: at M0 after an objection; holding: at M0, objection confirmed
    largest_scale: float = math.inf
    progress: float = 0.0  # at the last observation
    bins: list[Bin] = field(default_factory=list)
    open: list[Bin] = field(default_factory=list)  # observations of the bin that is being filled
    opened: float = 0.0  # where that bin starts
    trials: list[Trial] = field(default_factory=list)
    scale: float = 1.0  # the largest that was accepted or is on trial
    blamed: float = 1.0  # the scale of the last objection
    slope: tuple[float, float] = (0.0, 0.0)  # of the trial that was objected to, and its variance
    until: float = 0.0  # comparing, holding: where that ends; watching: no objection before
    length: float = 0.0  # of the trial that was objected to
    since: float = -1.0  # comparing: where M0 was reached; -1: not yet
    top: float = -math.inf  # the highest loss of a bin
    objections: int = 0  # confirmed ones


NEAR_M0 = 1.05
"""A batch up to this many times M0 counts as M0."""

FORGET = -1.0
"""`_Memory.since` before M0 is reached."""


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

    def observe(self, progress: float, loss: float, weight: float, scale: float) -> Verdict | None:
        """Take in the mean loss over the `weight` samples since the last call, at B/M0 = `scale`.

        `progress` is what the efficiency model claims so far, in M0-iterations. An observation without progress or
        samples is ignored; so is a loss that is not finite, at M0.
        """
        memory = self._memory
        if not math.isfinite(loss):
            if scale <= NEAR_M0 or memory.phase != "watching":
                return None
            return self._not_finite(scale)
        if not progress > memory.progress or not weight > 0:
            return None
        self._follow(scale)
        memory.open.append(Bin((memory.progress + progress) / 2, loss, weight))
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
        state["largest_scale"] = None if math.isinf(self.largest_scale) else self.largest_scale
        for name in ("bins", "open", "trials"):
            state[name] = [list(item) for item in state[name]]
        state["slope"] = list(state["slope"])
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        try:
            memory = _Memory(**state)
            memory.largest_scale = math.inf if memory.largest_scale is None else memory.largest_scale
            memory.bins = [Bin(*item) for item in memory.bins]
            memory.open = [Bin(*item) for item in memory.open]
            memory.trials = [Trial(*item) for item in memory.trials]
            memory.slope = (memory.slope[0], memory.slope[1])
        except (TypeError, IndexError) as error:
            raise InvalidDocument(
                "guard", state, f"is not the state of a guard ({error})", "Give what state() returned"
            ) from error
        self._memory = memory

    def _close(self) -> None:
        """Turn the open observations into a bin; drop bins too old to matter."""
        memory = self._memory
        if memory.open:
            items = np.array(memory.open)
            weight = items[:, 2].sum()
            middle, loss = items[:, 2] @ items[:, :2] / weight
            memory.bins.append(Bin(float(middle), float(loss), float(weight)))
            memory.open = []
            memory.top = max(memory.top, float(loss))
        memory.opened = memory.progress
        oldest = min((trial.start for trial in memory.trials), default=memory.progress) / MEMORY
        memory.bins = [item for item in memory.bins if item.progress >= oldest]

    def _follow(self, scale: float) -> None:
        """Notice that the batch has grown or shrunk since the last observation."""
        memory, options = self._memory, self.options
        if memory.phase == "comparing" and memory.since == FORGET and scale <= NEAR_M0:
            self._restart(scale)
            memory.since = memory.progress
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
                # Nobody knows whether the progress claimed in the unfinished trials was made: what came before
                # them says nothing about what comes now.
                memory.bins = []
            memory.trials, memory.scale = going_on, scale

    def _restart(self, scale: float) -> None:
        memory = self._memory
        memory.bins, memory.open, memory.trials, memory.scale = [], [], [], scale
        memory.opened = memory.progress

    def _watch(self) -> Verdict | None:
        memory, options = self._memory, self.options
        items = np.array(memory.bins)
        for trial in memory.trials:
            after = items[:, 0] > trial.start
            before = items[~after]
            if (before[:, 0] >= trial.start / min(WINDOWS)).sum() < 6:
                continue
            fits = [
                Extension(before[before[:, 0] >= trial.start / memory_], trial.start, options) for memory_ in WINDOWS
            ]
            fit = fits[0]
            if fit.has_diverged(items[after], memory.top):
                return self._step_back(trial, items[after], 0.0, "rises since")
            if memory.progress >= memory.until and all(fit.falls_behind(items[after]) for fit in fits):
                ratio = fit.seen(items[after])
                return self._step_back(trial, items[after], ratio, "falls too slowly since")
        over = [
            trial
            for trial in memory.trials
            if memory.progress > trial.start * (1 + options.horizon)
            and (items[:, 0] > trial.start).sum() > options.least_bins
        ]
        memory.trials = [t for t in memory.trials if t not in over]
        if over and not math.isinf(memory.largest_scale):
            return self._ease(max(trial.scale for trial in over))
        return None

    def _step_back(self, trial: Trial, after: Array, ratio: float, what: str) -> Verdict:
        memory, options = self._memory, self.options
        claimed = memory.progress - trial.start
        settled = after[after[:, 0] > trial.start * (1 + options.settling)]
        memory.slope = slope(settled if len(settled) >= options.lasting else after)
        memory.length, memory.blamed, memory.phase, memory.since = claimed, memory.scale, "comparing", FORGET
        memory.largest_scale = 1.0
        return Verdict(
            "stepped_back",
            1.0,
            claimed,
            ratio * claimed,
            f"The loss {what} the batch grew from {trial.before:.3g} to {memory.scale:.3g} times its initial size: "
            f"{claimed:.0f} iterations of progress were claimed, the loss shows {ratio * claimed:.0f}. "
            "Going back to the initial batch size to compare.",
        )

    def _not_finite(self, scale: float) -> Verdict:
        memory = self._memory
        start = memory.trials[0].start if memory.trials else memory.progress
        memory.blamed, memory.largest_scale = scale, 1.0
        self._start_holding()
        return Verdict(
            "stepped_back",
            1.0,
            memory.progress - start,
            0.0,
            f"The loss is not finite at a batch {scale:.3g} times its initial size. "
            "Going back to the initial batch size.",
        )

    def _start_holding(self) -> None:
        memory = self._memory
        memory.phase = "holding"
        memory.until = memory.progress * (1 + self.options.patience * 2.0**memory.objections)
        memory.objections += 1

    def _compare(self) -> Verdict | None:
        """At M0 after an objection: is the loss falling clearly faster per iteration than it did in the trial?"""
        memory, options = self._memory, self.options
        items = np.array(memory.bins)
        if memory.since == FORGET:
            return None
        items = items[items[:, 0] > memory.since * (1 + options.settling)]
        if len(items) < 2 * options.lasting:
            return None
        (now, now_var), (then, then_var) = slope(items), memory.slope
        # Twice as fast is where `least_ratio` draws the line, too; the blame needs less proof than the objection did.
        factor = 1 / math.sqrt(options.least_ratio)
        excess = now - factor * max(then, 0.0)
        error = math.sqrt(now_var + factor**2 * then_var)
        claimed = memory.length
        seen = claimed * min(1.0, max(0.0, then / now)) if now > 0 else claimed
        needed = 0.75 * options.sigmas if memory.progress < memory.until else 1.0
        if excess > needed * error:
            self._start_holding()
            return Verdict(
                "confirmed",
                1.0,
                claimed,
                seen,
                f"At the initial batch size the loss falls {_times(now, then)} as fast per iteration as at "
                f"{memory.blamed:.3g} times it: the larger batch is to blame. Keeping the initial batch size until "
                f"progress {memory.until:.0f}.",
            )
        if memory.progress < memory.until:
            return None
        memory.phase, memory.largest_scale, memory.until = "watching", math.inf, 2 * memory.progress
        return Verdict(
            "withdrawn",
            math.inf,
            claimed,
            seen,
            "At the initial batch size the loss falls no faster: its curve had flattened. "
            "The batch size is free again.",
        )

    def _hold(self) -> Verdict | None:
        memory = self._memory
        if memory.progress < memory.until:
            return None
        memory.phase, memory.until = "watching", 0.0
        return self._ease(1.0)

    def _ease(self, accepted: float) -> Verdict:
        """Allow twice what was accepted; all, once that is more than what was blamed."""
        memory = self._memory
        allowed = 2 * max(accepted, memory.largest_scale)
        memory.largest_scale = allowed if allowed <= memory.blamed else math.inf
        kind: Kind = "withdrawn" if math.isinf(memory.largest_scale) else "eased"
        limit = "freely" if kind == "withdrawn" else f"to {allowed:.3g} times its initial size"
        return Verdict(kind, memory.largest_scale, 0.0, 0.0, f"The batch may grow {limit} again.")


class Extension:
    """Curves through the bins before `start`, extended beyond it by a cautious fraction of the claimed progress.

    Each of S shapes g is fitted as loss = a + b·g(u), u = progress/start, by least squares weighted with the samples.

    reference  [n, 3]  bins before `start`: progress, loss, weight
    """

    def __init__(self, reference: Array, start: float, options: GuardOptions) -> None:
        self.options, self.start = options, start
        progress, self.loss, weight = reference.T
        self.total = weight.sum()
        g = shapes(progress / start)  # [S, n]
        self.g = g @ weight / self.total
        self.a = self.loss @ weight / self.total
        self.spread = (g - self.g[:, None]) ** 2 @ weight
        self.b = (g - self.g[:, None]) @ (weight * (self.loss - self.a)) / self.spread
        misfit = (self.loss - self.a - self.b[:, None] * (g - self.g[:, None])) ** 2 @ weight
        self.best = int(misfit.argmin())
        self.variance = misfit[self.best] / max(len(self.loss) - 3, 1)  # of one sample
        x = np.vstack([-((progress / start) ** 2), -((progress / start) ** 4)])
        x -= (x @ weight / self.total)[:, None]
        y = self.loss - self.a
        rest = y**2 @ weight - np.maximum(x @ (weight * y), 0.0) ** 2 / (x**2 @ weight)
        self.is_speeding_up = bool(rest.min() < misfit[self.best])
        self.possible = misfit <= misfit[self.best] + 4 * self.variance

    def at(self, u: Array) -> Array:
        """[S, len(u)] the loss that the curves give."""
        fitted: Array = self.a + self.b[:, None] * (shapes(u) - self.g[:, None])
        return fitted

    def cautious(self, x: Array) -> Array:
        """[S, len(x)] values of g, `x` claimed beyond the start, if only the least accepted ratio of it is true."""
        x, time = self.options.least_ratio * x, self.options.flattening
        flattened = shapes(np.ones(1)) + slopes_at_start()[:, None] * time * (1 - np.exp(-x / time))
        cautious: Array = np.maximum(shapes(1 + x), flattened)
        return cautious

    def _recent(self, after: Array) -> Array:
        x = after[:, 0] / self.start - 1
        recent: Array = after[x >= max(self.options.settling, x[-1] / 2)] if len(x) else after
        return recent

    def falls_behind(self, after: Array) -> bool:
        """Whether the loss lies above all possible curves, significantly and for some time."""
        after = self._recent(after)
        if len(after) < max(self.options.lasting, 3) or self.is_speeding_up or self.b[self.best] <= 0:
            return False
        weight = after[:, 2]
        g = self.cautious(after[:, 0] / self.start - 1)[self.possible]
        b, mean = self.b[self.possible], self.g[self.possible]
        excess = after[:, 1] - self.a - b[:, None] * (g - mean[:, None])  # [S, bins]
        if (excess[:, -self.options.lasting :] <= 0).any():
            return False
        # A loss that is high but falls as it should was lifted by the change (learning rate) and is recovering.
        falling, uncertainty = slope(after)
        length = after[-1, 0] - after[0, 0]
        if (falling - math.sqrt(uncertainty)) * length > (b * (g[:, 0] - g[:, -1])).min():
            return False
        variance = max(self.variance, scatter(after))
        distance = g @ weight / weight.sum() - mean
        error = np.sqrt(variance * (1 / weight.sum() + 1 / self.total + distance**2 / self.spread[self.possible]))
        least = self.options.sigmas * error
        # A drop that is not itself beyond the noise cannot be missed.
        drop = b * (shapes(np.ones(1))[self.possible, 0] - mean - distance)
        return bool(((excess @ weight / weight.sum() > least) & (drop > least)).all())

    def has_diverged(self, after: Array, top: float) -> bool:
        """Whether the loss has lastingly lost half of what the reference had gained."""
        last = after[-self.options.lasting :]
        if len(last) < self.options.lasting:
            return False
        level = self.at(np.ones(1))[self.best, 0]
        excess = last[:, 1] - level
        if slope(last)[0] > 0:
            return False
        far = np.maximum(0.5 * (top - level), self.options.sigmas * np.sqrt(self.variance / last[:, 2]))
        return bool((excess > far).all())

    def seen(self, after: Array) -> float:
        """Seen over claimed progress, by the curve that fits best."""
        after = self._recent(after)
        middle, loss = after[:, 2] @ after[:, :2] / after[:, 2].sum()
        ratios = np.linspace(0.0, 1.0, 101)
        curve = self.at(1 + ratios * (middle / self.start - 1))[self.best]
        return float(ratios[np.abs(curve - loss).argmin()])


def shapes(u: Array) -> Array:
    """[S, len(u)] falling curves of u > 0: linear, logarithmic, power laws, exponentials."""
    return np.vstack([-u, -np.log(u), u ** -POWERS[:, None], np.exp(-u / TIMES[:, None])])


def slopes_at_start() -> Array:
    """[S] derivatives of `shapes` at u = 1."""
    slopes: Array = np.concatenate([[-1.0, -1.0], -POWERS, -np.exp(-1 / TIMES) / TIMES])
    return slopes


def _line(bins: Array) -> tuple[float, float, float]:
    """(slope, spread, weighted sum of squared residuals) of the line through the bins."""
    progress, loss, weight = bins.T
    total = weight.sum()
    x, y = progress - progress @ weight / total, loss - loss @ weight / total
    spread = float(x**2 @ weight)
    steepness = float(x * y @ weight / spread)
    return steepness, spread, float((y - steepness * x) ** 2 @ weight)


def scatter(bins: Array) -> float:
    """Variance of one sample's loss around a line through the bins."""
    return _line(bins)[2] / (len(bins) - 2) if len(bins) > 2 else 0.0


def slope(bins: Array) -> tuple[float, float]:
    """How fast the loss falls per iteration, and the variance of that."""
    steepness, spread, _ = _line(bins)
    return -steepness, scatter(bins) / spread


def _times(now: float, then: float) -> str:
    return f"{now / then:.2g} times" if then > 0 else "many times"


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidSpec(name, value, "is not a positive number", "Give a finite number above 0")
