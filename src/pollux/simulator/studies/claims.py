"""The paper's claims as single figures: what it says, what its artifact gives, what came out here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.simulator.studies.cases import Measured, spread_of
from pollux.simulator.studies.paper import AVOIDING, GENETIC_NOT_AVOIDING, NOT_AVOIDING, MeasuredPart
from pollux.simulator.studies.published import FAIR_BELOW_2, SAVED, TESTBED

HEADINGS = ("claim", "paper", "artifact, these samples", "here")
AVOIDED = "average JCT where interference takes half the speed, avoided"
UNAVOIDED = "average JCT where interference takes half the speed, not avoided"
UNAVOIDED_GENETIC = f"{UNAVOIDED}, genetic search"
TOLERANCE = 0.05
"""Five points of a hundred: where a summary draws the line between near and far. It is no statistic."""


@dataclass(frozen=True, slots=True)
class Claim:
    """All figures are shares; None where there is none."""

    text: str
    paper: float | None
    published: float | None
    """What the artifact's results for the very same samples come to."""
    here: float
    is_change: bool = False
    """Shown with its sign."""

    def shown(self, share: float | None) -> str:
        if share is None:
            return "–"
        text = f"{100 * share:+.0f} %" if self.is_change else f"{100 * share:.0f} %"
        return text.replace("-", "−")

    @property
    def reference(self) -> float | None:
        """What it is to be held against: the very same samples, if there are figures of them."""
        return self.paper if self.published is None else self.published

    @property
    def holds(self) -> bool:
        return self.reference is not None and abs(self.here - self.reference) <= TOLERANCE

    def document(self) -> dict[str, Any]:
        return {"claim": self.text, "paper": self.paper, "published": self.published, "here": self.here}


def verdict(claims: Sequence[Claim]) -> str:
    """What was reproduced and what was not, in a sentence or two."""
    known = [claim for claim in claims if claim.reference is not None]
    if not known:
        return ""
    apart = [claim for claim in known if not claim.holds]
    text = (
        f"{len(known) - len(apart)} of {len(known)} figures below lie within {100 * TOLERANCE:.0f} points of what was "
    )
    text += "published."
    if apart:
        shown = (f"{it.text} ({it.shown(it.reference)} published, {it.shown(it.here)} here)" for it in apart)
        text += f" Not so: {'; '.join(shown)}."
    return text


def claims_of(parts: Mapping[str, MeasuredPart]) -> list[Claim]:
    """Those that the parts at hand can speak about."""
    found: list[Claim] = []
    for name, claims in (
        ("table", _policies),
        ("load", _load),
        ("interval", _interval),
        ("interference", _interference),
        ("p", _p),
        ("fairness", _fairness),
    ):
        if name in parts:
            found += claims(parts[name])
    return found


def _saved(part: MeasuredPart, other: str, value: float | None = None) -> tuple[float | None, float]:
    """By how much Pollux's average JCT is below another's: as published, and here."""
    pollux, rival = part.case("pollux", value), part.case(other, value)
    ours, theirs = (case.case.published.get("avg_jct_s") for case in (pollux, rival))
    published = None if ours is None or theirs is None else 1 - ours / theirs
    return published, 1 - pollux.avg_jct_s / rival.avg_jct_s


def _policies(part: MeasuredPart) -> Iterator[Claim]:
    for rival, paper in SAVED.items():
        yield Claim(f"average JCT below that of {rival}, tuned jobs", paper, *_saved(part, rival))
    for rival in SAVED:
        label = f"{rival}, realistic"
        testbed = 1 - TESTBED["pollux"].avg_jct_h / TESTBED[label].avg_jct_h
        text = f"average JCT below that of {rival}, realistic jobs (paper: testbed)"
        yield Claim(text, testbed, *_saved(part, label))


def _load(part: MeasuredPart) -> Iterator[Claim]:
    for rival in ("optimus", "tiresias"):
        for load in (0.5, 2.0):
            text = f"average JCT below that of {rival} at {load:g} times the load"
            yield Claim(text, None, *_saved(part, rival, load))


def _change(part: MeasuredPart, case: Measured, text: str) -> Claim:
    here = part.change(case)
    assert here is not None
    return Claim(text, part.published_change(case), None, here, is_change=True)


def _interval(part: MeasuredPart) -> Iterator[Claim]:
    for minutes in (2, 8):
        yield _change(
            part, part.case("pollux", 60.0 * minutes), f"average JCT with rounds of {minutes} instead of 1 min"
        )


def _interference(part: MeasuredPart) -> Iterator[Claim]:
    texts = {AVOIDING: AVOIDED, NOT_AVOIDING: UNAVOIDED, GENETIC_NOT_AVOIDING: UNAVOIDED_GENETIC}
    for case in part.cases:
        if case.case.value == 0.5:
            yield _change(part, case, texts[case.case.label])


def _p(part: MeasuredPart) -> Iterator[Claim]:
    usual = "pollux, p = −1"
    for case in part.cases:
        label = case.case.label
        if label != usual:
            paper = TESTBED[label].avg_jct_h / TESTBED[usual].avg_jct_h - 1
            here = case.avg_jct_s / part.case(usual).avg_jct_s - 1
            text = f"average JCT with {label.partition(', ')[2]} instead of −1 (paper: testbed)"
            yield Claim(text, paper, None, here, is_change=True)


def _fairness(part: MeasuredPart) -> Iterator[Claim]:
    spread = spread_of(part.case("pollux, p = −1"))
    assert spread is not None
    yield Claim("jobs with ρ < 2 under pollux, p = −1", FAIR_BELOW_2, None, spread.below_2)
